"""The whole drafter on the native kernels: XLA's results, and a draft's bits independent of its batch."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from drafter.load import load_drafter, save_drafter
from drafter.propose import PEagle
from peagle.base.errors import InputError
from peagle.ops import native
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix, arrange, arrange_embedding
from tests.drafter.test_load import File, cast
from tests.support.checkpoints import GONE
from tests.support.drafters import (
    CONFIGS,
    FOUR,
    ONE,
    TWO,
    logits_of,
    prompt_state,
    random_params,
    random_text,
    run_steps,
)

pytestmark = pytest.mark.skipif(not native.available(), reason=native.status()[1])

FORMS: tuple[Implementation, ...] = ("native", "xla")
LENGTHS = (5, 9)
NUM_DRAFTS = {ONE: 8, TWO: 5}  # the same ones throughout, since every other one compiles anew


def load(directory: Path, form: Implementation, dtype: Any = jnp.float32, **shared: Any) -> PEagle:
    params, config = load_drafter(directory, dtype, implementation=form, **shared)
    assert params.implementation == form
    return PEagle(params, config, with_logits=True)


def assert_alike(ours: PEagle, theirs: PEagle, num_drafts: int) -> None:
    """Assert that both draft the same, by logits that are equal to 1e-4."""
    texts, some = [random_text(ours.config, seed) for seed in (1, 2)], num_drafts // 2
    accepted = [(0, num_drafts), (num_drafts, some), (some, 0), (num_drafts, num_drafts)]
    both = [
        run_steps(model, prompt_state(model, texts, LENGTHS, num_drafts), texts, LENGTHS, accepted, num_drafts)[0]
        for model in (ours, theirs)
    ]
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(logits_of(one.draft), logits_of(other.draft), rtol=0, atol=1e-4)
        np.testing.assert_array_equal(one.draft.token_ids, other.draft.token_ids)


@pytest.mark.parametrize(
    ("name", "num_drafts", "stored"),
    [
        (ONE, NUM_DRAFTS[ONE], np.float32),
        (TWO, NUM_DRAFTS[TWO], ml_dtypes.bfloat16),
        (FOUR, 3, ml_dtypes.bfloat16),
    ],
)
def test_proposing_agrees_with_xla(tmp_path: Path, name: str, num_drafts: int, stored: type) -> None:
    config = CONFIGS[name]
    save_drafter(tmp_path / "drafter", cast(random_params(config), stored), config)
    ours, theirs = (load(tmp_path / "drafter", form) for form in FORMS)
    for matrix in (ours.params.fc, ours.params.lm_head, *(layer.qkv for layer in ours.params.layers)):
        assert isinstance(matrix, PackedMatrix)
        assert matrix.data.dtype == stored
    assert_alike(ours, theirs, num_drafts)


@pytest.mark.parametrize(("name", "stored"), [(ONE, np.float32), (TWO, ml_dtypes.bfloat16)])
def test_a_shared_embedding_and_head_are_the_targets_own(tmp_path: Path, name: str, stored: type) -> None:
    """Narrowed to the draft vocabulary, if there is one."""
    config, shared = CONFIGS[name], ("lm_head.weight", "embed_tokens.weight")
    directory = File(name, tensors=dict.fromkeys(shared, GONE)).write(tmp_path / "drafter")
    rows, table = np.random.default_rng(0).standard_normal((2, config.vocab_size, config.hidden_size)).astype(stored)
    peagles = []
    for form in FORMS:
        head, embedding = arrange(rows, jnp.float32, form), arrange_embedding(table, jnp.float32, form)
        peagles.append(load(directory, form, target_lm_head=head, target_embedding=embedding))
    ours, theirs = peagles
    own = ours.params.lm_head
    assert isinstance(own, PackedMatrix)
    assert (own.inputs, own.outputs, own.data.dtype) == (config.hidden_size, config.draft_vocab_size, stored)
    assert ours.params.embedding.dtype == (jnp.float32 if stored == np.float32 else jnp.uint16)
    assert_alike(ours, theirs, NUM_DRAFTS[name])
    head = arrange(rows[:, 1:], jnp.float32, "native")
    with pytest.raises(InputError, match="to share it"):
        load(directory, "native", target_lm_head=head, target_embedding=ours.params.embedding)
