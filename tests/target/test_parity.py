"""The target against transformers' GptOssForCausalLM: float32, eager attention, checkpoints it wrote itself.

Logits agree to 1e-4 of their standard deviation, through rollbacks, windows and padding.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")

from peagle.workflows.random_checkpoint import SIZES, random_tensors
from target.load import LoadedTarget, load_target, write_target
from target.model import GptOss, forward
from tests.support.oracle import (
    BATCH,
    CONFIGS,
    LENGTH,
    Expected,
    bfloat16_logits,
    expected,
    quantized_model,
    random_model,
)
from tests.support.walk import WIDTH, walk

pytestmark = pytest.mark.compile

AUX_LAYER_IDS = (1, 0)  # out of order, without the last layer, whose hidden state transformers returns normed
PROMPTS = [9, 16, 4]


@pytest.fixture(scope="module", params=CONFIGS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    directory: Path = tmp_path_factory.mktemp("oracle") / request.param
    model = random_model(request.param)
    model.save_pretrained(directory)
    return expected(model, directory)


@pytest.fixture(scope="module")
def loaded(oracle: Expected) -> LoadedTarget:
    return load_target(oracle.directory, dtype=jnp.float32)


def aux_hidden_of(oracle: Expected, layer_ids: tuple[int, ...]) -> np.ndarray:
    """Return [BATCH, LENGTH, A]: transformers' hidden state i + 1 is the output of layer i."""
    return np.concatenate([oracle.hidden[i + 1] for i in layer_ids], axis=-1)


def full_forward(loaded: LoadedTarget, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32), token_ids.shape)
    run = jax.jit(forward, static_argnames=("config", "aux_layer_ids"))
    logits, aux = run(loaded.params, loaded.config, jnp.asarray(token_ids), positions, aux_layer_ids=AUX_LAYER_IDS)
    return np.asarray(logits), np.asarray(aux)


def test_the_checkpoints_config_and_stop_tokens(oracle: Expected, loaded: LoadedTarget) -> None:
    name = oracle.directory.name
    assert loaded.experts == name
    assert loaded.stop_token_ids == (5, 3)
    assert loaded.config.num_heads == CONFIGS[name]["num_attention_heads"]


def test_full_forward_and_aux_hidden(oracle: Expected, loaded: LoadedTarget) -> None:
    logits, aux = full_forward(loaded, oracle.token_ids)
    oracle.check(logits, np.s_[:, :])
    np.testing.assert_allclose(aux, aux_hidden_of(oracle, AUX_LAYER_IDS), atol=1e-4 * oracle.hidden.std())
    for shift in (-1, 1):  # the hidden state of a neighbouring layer is another vector altogether
        beside = oracle.hidden[AUX_LAYER_IDS[0] + 1 + shift]
        assert np.abs(aux[..., : beside.shape[-1]] - beside).max() > 0.1 * oracle.hidden.std()


@pytest.mark.parametrize("retain_full_kv", [False, True], ids=["window", "retained"])
def test_the_caches(oracle: Expected, loaded: LoadedTarget, retain_full_kv: bool) -> None:
    """Chunks of prompts, decoding and rolled-back verify passes, across YaRN's original length."""
    fused = oracle.directory.name == "fused"
    model = GptOss(loaded.params, loaded.config, AUX_LAYER_IDS, retain_full_kv)
    kept = [group.window for group in model.cache_groups if group.layers]
    assert sorted(kept, key=bool) == [None] if retain_full_kv else [None, loaded.config.sliding_window]
    hidden = aux_hidden_of(oracle, AUX_LAYER_IDS)

    def check(rows: np.ndarray, positions: np.ndarray, logits: np.ndarray, aux: np.ndarray) -> None:
        oracle.check(logits, (rows, positions))
        np.testing.assert_allclose(aux, hidden[rows, positions], atol=1e-4 * oracle.hidden.std())

    reached = walk(model, oracle.token_ids, PROMPTS, check, decoded=6 if fused and not retain_full_kv else 0)
    assert len(reached) == BATCH
    assert max(reached) > LENGTH - WIDTH
    if fused:
        assert min(reached) > CONFIGS["fused"]["rope_parameters"]["original_max_position_embeddings"]


def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(oracle: Expected) -> None:
    """bfloat16 references disagree among themselves. So: the same first token if float32 is sure of it, and errors no
    larger than those of transformers in bfloat16."""
    loaded = load_target(oracle.directory, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype(jnp.bfloat16)}
    logits, _ = full_forward(loaded, oracle.token_ids)
    assert logits.dtype == jnp.bfloat16
    ours = logits.astype(np.float32)
    theirs = bfloat16_logits(random_model(oracle.directory.name), oracle.token_ids)

    runner_up, best = np.sort(oracle.logits, axis=-1)[..., -2:].transpose(2, 0, 1)
    sure = best - runner_up > 0.9 * oracle.logits.std()
    assert sure.sum() >= 5
    same, same_theirs = (some.argmax(-1) == oracle.logits.argmax(-1) for some in (ours, theirs))
    assert same[sure].all()
    assert same.mean() > same_theirs.mean() - 0.1
    assert np.square(ours - oracle.logits).mean() < 1.5 * np.square(theirs - oracle.logits).mean()


def test_mxfp4_packed_expanded_and_transformers_agree(tmp_path: Path) -> None:
    config = dataclasses.replace(SIZES["tiny"], layer_types=("sliding_attention", "full_attention"))
    write_target(tmp_path / "mxfp4", config, random_tensors(config, mxfp4=True, seed=2), mxfp4=True)
    oracle = expected(quantized_model(tmp_path / "mxfp4"), tmp_path / "mxfp4")
    for experts, layout in (("packed", "packed"), ("expanded", "fused")):
        loaded = load_target(oracle.directory, dtype=jnp.float32, experts=experts)
        assert (loaded.experts, loaded.mxfp4) == (layout, True)
        logits, _ = full_forward(loaded, oracle.token_ids)
        oracle.check(logits, np.s_[:, :])
