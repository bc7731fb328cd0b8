"""The whole drafter on the native kernels: XLA's results, and a draft's bits independent of its batch."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from drafter.load import load_drafter, save_drafter
from drafter.propose import PEagle
from peagle.ops import native
from peagle.ops.errors import InputError
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix, arrange, arrange_embedding
from peagle.ops.messages import DraftOutput
from tests.drafter.test_load import Tensors, cast, write
from tests.support.compiling import AS_FOR_USERS
from tests.support.drafters import (
    CONFIGS,
    FOUR,
    ONE,
    TWO,
    logits_of,
    prompt_state,
    propose,
    random_params,
    random_text,
    stack_fresh,
)
from tests.support.paging import entries, of_sequences

pytestmark = pytest.mark.skipif(not native.available(), reason=native.status()[1])

FORMS: tuple[Implementation, ...] = ("native", "xla")
LENGTHS = (5, 9)
NUM_DRAFTS = {ONE: 8, TWO: 5}  # the same ones throughout, since every other one compiles anew


def load(directory: Path, form: Implementation, dtype: Any = jnp.float32, **shared: Any) -> PEagle:
    params, config = load_drafter(directory, dtype, implementation=form, **shared)
    assert params.implementation == form
    return PEagle(params, config, with_logits=True)


def steps(peagle: PEagle, num_drafts: int) -> list[DraftOutput]:
    """Two sequences of different length; per step none, some and all of K drafts are accepted; one pauses."""
    some = num_drafts // 2
    accepted = [(0, num_drafts), (num_drafts, some), (some, 0), (num_drafts, num_drafts)]
    texts = [random_text(peagle.config, seed) for seed in (1, 2)]
    state = prompt_state(peagle, texts, LENGTHS, num_drafts)
    firsts, nums, drafts = [n - 1 for n in LENGTHS], [1, 1], []
    for step in accepted:
        _, state = propose(peagle, state, stack_fresh(texts, [-1, -1], nums, num_drafts), num_drafts=num_drafts)
        draft, state = propose(peagle, state, stack_fresh(texts, firsts, nums, num_drafts), num_drafts=num_drafts)
        drafts.append(draft)
        firsts = [first + num for first, num in zip(firsts, nums, strict=True)]
        nums = [count + 1 for count in step]
    return drafts


def assert_alike(ours: PEagle, theirs: PEagle, num_drafts: int) -> None:
    """The same drafts, by logits that are equal to 1e-4."""
    for one, other in zip(steps(ours, num_drafts), steps(theirs, num_drafts), strict=True):
        np.testing.assert_allclose(logits_of(one), logits_of(other), rtol=0, atol=1e-4)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize(
    ("name", "num_drafts", "stored"),
    [
        (ONE, 1, ml_dtypes.bfloat16),
        (ONE, NUM_DRAFTS[ONE], np.float32),
        (TWO, NUM_DRAFTS[TWO], np.float32),
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


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [ONE, TWO])
def test_a_shared_embedding_and_head_are_the_targets_own(tmp_path: Path, name: str, stored: type) -> None:
    """Narrowed to the draft vocabulary, if there is one."""

    def drop(_config: dict[str, Any], tensors: Tensors) -> None:
        del tensors["lm_head.weight"], tensors["embed_tokens.weight"]

    config = CONFIGS[name]
    directory = write(tmp_path / "drafter", name, edit=drop)
    rows, table = np.random.default_rng(0).standard_normal((2, config.vocab_size, config.hidden_size)).astype(stored)
    peagles = []
    for form in FORMS:
        head, embedding = arrange(rows, jnp.float32, form), arrange_embedding(table, jnp.float32, form)
        peagles.append(load(directory, form, target_lm_head=head, target_embedding=embedding))
    ours, theirs = peagles
    shared = ours.params.lm_head
    assert isinstance(shared, PackedMatrix)
    assert (shared.inputs, shared.outputs, shared.data.dtype) == (config.hidden_size, config.draft_vocab_size, stored)
    assert ours.params.embedding.dtype == (jnp.float32 if stored == np.float32 else jnp.uint16)
    assert_alike(ours, theirs, NUM_DRAFTS[name])
    head = arrange(rows[:, 1:], jnp.float32, "native")
    with pytest.raises(InputError, match="to share it"):
        load(directory, "native", target_lm_head=head, target_embedding=ours.params.embedding)


# A draft's bits are its own

propose_exactly = jax.jit(propose.__wrapped__, static_argnames="num_drafts", compiler_options=AS_FOR_USERS)


@pytest.fixture(scope="module", params=[(ONE, "float32"), (TWO, "bfloat16")], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PEagle, int]:
    """Load (a drafter, K)."""
    name, dtype = request.param
    at = tmp_path_factory.mktemp("drafter")
    save_drafter(at, random_params(CONFIGS[name]), CONFIGS[name])
    return load(at, "native", jnp.dtype(dtype)), NUM_DRAFTS[name]


def bits(draft: DraftOutput) -> np.ndarray:
    return logits_of(draft).view(np.uint32)


def test_a_sequence_alone_is_the_sequence_in_a_batch(case: tuple[PEagle, int]) -> None:
    peagle, most = case
    texts, lengths = [random_text(peagle.config, seed) for seed in (1, 2, 3)], (5, 9, 7)
    firsts, nums = [n - 1 for n in lengths], [1, most + 1, 3]
    state = prompt_state(peagle, texts, lengths, most)
    fresh = stack_fresh(texts, firsts, nums, most)
    together, after = propose_exactly(peagle, state, fresh, num_drafts=most)
    for b in range(len(texts)):
        own = slice(b, b + 1)
        own_fresh = jax.tree.map(lambda part, own=own: jnp.asarray(np.asarray(part)[own]), fresh)
        alone, own_after = propose_exactly(peagle, of_sequences(state, own), own_fresh, num_drafts=most)
        np.testing.assert_array_equal(bits(alone), bits(together)[own])
        held = (entries(peagle, cache, 0, 32) for cache in (own_after, of_sequences(after, own)))
        for one, other in zip(*held, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_draft_does_not_depend_on_the_number_of_drafts(case: tuple[PEagle, int]) -> None:
    peagle, most = case
    texts, lengths = [random_text(peagle.config, seed) for seed in (1, 2)], (5, 9)
    firsts, nums = [n - 1 for n in lengths], [1, 2]
    drafts = []
    for num_drafts in (2, most):
        state = prompt_state(peagle, texts, lengths, num_drafts)
        drafts.append(
            propose_exactly(peagle, state, stack_fresh(texts, firsts, nums, num_drafts), num_drafts=num_drafts)[0]
        )
    for fewer in drafts[:-1]:
        np.testing.assert_array_equal(bits(fewer), bits(drafts[-1])[:, : fewer.token_ids.shape[1]])
