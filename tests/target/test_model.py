"""Properties of the target without a reference: its passes agree, and rows are independent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops.kv_cache import KVCache
from peagle.ops.rope import RopeConfig, Yarn
from target.config import FULL, SLIDING, TargetConfig
from target.model import GptOss, forward
from target.params import TargetParams, init_params
from tests.target.walk import WIDTH, walk

CONFIG = TargetConfig(
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=53,
    layer_types=(SLIDING, FULL),
    sliding_window=7,
    num_experts=5,
    top_k=3,
    expert_width=14,
    swiglu_limit=2.0,
    rms_norm_eps=1e-5,
    max_positions=128,
    rope=RopeConfig(10, 10000.0, Yarn(factor=4.0, original_length=16, truncate=False)),
)
BATCH, LENGTH = 3, 34
# one trace for all tests: forward(params, config, [BATCH, LENGTH], ...)
run_forward = jax.jit(forward, static_argnames=("config", "aux_layer_ids"))


def random_params(config: TargetConfig = CONFIG, seed: int = 0) -> TargetParams:
    """Make parameters without special values: norms around one, biases and sinks far from zero."""
    rng = np.random.default_rng(seed)

    def one(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = 0.25 * rng.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(values + 1.0 if "norm" in jax.tree_util.keystr(path) else values)

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(lambda: init_params(config, jax.random.key(0))))


@pytest.fixture(scope="module")
def model() -> GptOss:
    return GptOss(random_params(), CONFIG, aux_layer_ids=(1,))


def token_ids(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (BATCH, LENGTH)).astype(np.int32)


def positions() -> np.ndarray:
    return np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))


def test_the_caches_agree_with_the_whole_sequence(model: GptOss) -> None:
    ids = token_ids()
    logits, aux = run_forward(model.params, CONFIG, ids, positions(), aux_layer_ids=(1,))
    checked = np.zeros((BATCH, LENGTH), bool)

    def check(rows: np.ndarray, at: np.ndarray, ours: np.ndarray, hidden: np.ndarray) -> None:
        np.testing.assert_allclose(ours, np.asarray(logits)[rows, at], atol=1e-4 * float(logits.std()))
        np.testing.assert_allclose(hidden, np.asarray(aux)[rows, at], atol=1e-4 * float(aux.std()))
        checked[rows, at] = True

    walk(model, ids, [9, 3, 6], check, decoded=0)
    assert checked[:, 9 : LENGTH - WIDTH].any(axis=0).all()


def test_an_inactive_row_writes_nothing_and_changes_no_other(model: GptOss) -> None:
    """All of a sequence's rows are inactive, or all but the first."""
    extend, caches = jax.jit(GptOss.extend), prompts_of(model, [12, 10])
    ids = jnp.asarray(token_ids()[:2, 12 : 12 + WIDTH])
    positions = np.array([[12], [10]], np.int32) + np.arange(WIDTH, dtype=np.int32)
    both, written = extend(model, ids, positions, caches)
    for active in (0, 1):
        some = positions.copy()
        some[1, active:] = -1
        found, after = extend(model, ids, some, caches)
        np.testing.assert_array_equal(found.logits[0], both.logits[0])
        np.testing.assert_allclose(found.logits[1, :active], both.logits[1, :active], atol=1e-5)
        assert np.isfinite(found.logits).all()
        for old, new, full in zip(caches, after, written, strict=True):
            slots = positions[1, :active] % new.capacity
            for part in ("key", "value"):
                before, now, then = (np.array(getattr(cache, part)) for cache in (old, new, full))
                np.testing.assert_array_equal(now[0], then[0])
                assert not np.array_equal(now[0], before[0])
                np.testing.assert_allclose(now[1, slots], then[1, slots], atol=1e-5)
                now[1, slots] = before[1, slots]
                np.testing.assert_array_equal(now[1], before[1])


@pytest.mark.parametrize("named", [[[2], [0]], [[3, 1], [0, 0]]])
def test_logits_are_those_of_the_named_rows(model: GptOss, named: list[list[int]]) -> None:
    """aux_hidden is that of all rows, whichever are named."""
    caches = prompts_of(model, [12, 10])
    ids = jnp.asarray(token_ids()[:2, 12 : 12 + WIDTH])
    positions = np.array([[12], [10]], np.int32) + np.arange(WIDTH, dtype=np.int32)
    full, written = jax.jit(GptOss.extend)(model, ids, positions, caches)
    some, after = jax.jit(GptOss.extend)(model, ids, positions, caches, np.array(named, np.int32))
    expected = np.take_along_axis(np.asarray(full.logits), np.array(named)[:, :, None], axis=1)
    np.testing.assert_allclose(some.logits, expected, atol=1e-5)
    np.testing.assert_allclose(some.aux_hidden, full.aux_hidden, atol=1e-5)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(written), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def prompts_of(model: GptOss, lengths: list[int]) -> tuple[KVCache, ...]:
    """Fill caches with the first tokens of two sequences, in one padded pass."""
    widest = max(lengths)
    places = np.arange(widest, dtype=np.int32)[None, :]
    positions = np.where(places < np.array(lengths, np.int32)[:, None], places, -1)
    caches = model.init_cache(2, LENGTH, widest)
    _, caches = jax.jit(GptOss.extend)(model, jnp.asarray(token_ids()[:2, :widest]), positions, caches)
    return caches


def test_segments_are_independent(model: GptOss) -> None:
    """Two documents packed into a row give the results of each alone, wherever the row is cut."""
    ids, cuts = token_ids(5), [13, 1, 30]
    starts = positions() - np.where(positions() >= np.array(cuts)[:, None], np.array(cuts)[:, None], 0)
    segments = (positions() >= np.array(cuts)[:, None]).astype(np.int32)
    packed, _ = run_forward(
        model.params, CONFIG, ids, starts.astype(np.int32), segment_ids=segments, aux_layer_ids=(1,)
    )
    # alone: the first document starts the row, the second one is moved to the start
    seconds = np.stack([np.roll(row, -cut) for row, cut in zip(ids, cuts, strict=True)])
    first, _ = run_forward(model.params, CONFIG, ids, positions(), aux_layer_ids=(1,))
    second, _ = run_forward(model.params, CONFIG, seconds, positions(), aux_layer_ids=(1,))
    for row, cut in enumerate(cuts):
        apart = np.concatenate([first[row, :cut], second[row, : LENGTH - cut]])
        np.testing.assert_allclose(packed[row], apart, atol=1e-4 * apart.std())


def test_rings_only_if_they_are_smaller() -> None:
    model = GptOss(random_params(), CONFIG)
    kinds = [(cache.ring, cache.capacity) for cache in model.init_cache(1, 30, WIDTH)]
    assert kinds == [(True, CONFIG.sliding_window + WIDTH - 1), (False, 30 + WIDTH)]
    assert [cache.ring for cache in model.init_cache(1, 5, WIDTH)] == [False, False]
    retained = dataclasses.replace(model, retain_full_kv=True).init_cache(1, 30, WIDTH)
    assert [(cache.ring, cache.capacity) for cache in retained] == [(False, 34), (False, 34)]


def test_gradients_reach_every_parameter(model: GptOss) -> None:
    """The trainer differentiates `forward`: no gradient is zero throughout, none is NaN."""
    ids = jnp.asarray(token_ids(9))

    def loss(params: TargetParams) -> jax.Array:
        logits, _ = forward(params, CONFIG, ids, jnp.asarray(positions()))
        return -jnp.mean(jax.nn.log_softmax(logits)[:, :-1, 0])

    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(model.params)):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path


def test_fresh_parameters_start_near_the_uniform_distribution() -> None:
    """init_params: the config's shapes, biases zero, and logits whose loss is close to log V."""
    params = jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))
    assert params.lm_head.shape == (CONFIG.hidden_size, CONFIG.vocab_size)
    assert not params.layers[1].moe.router_bias.any()
    logits, _ = run_forward(params, CONFIG, token_ids(), positions(), aux_layer_ids=(1,))
    loss = -jax.nn.log_softmax(logits).mean()
    assert np.log(CONFIG.vocab_size) < loss < np.log(CONFIG.vocab_size) + 1.0


def test_the_first_output_that_is_not_finite_is_named() -> None:
    """Of several outputs the earliest in the model; of one token, the first position that holds it."""
    params, ids = random_params(), token_ids(3)[0].tolist()
    ids[32] = lone = 52  # after the tokens of the first pass
    assert lone not in ids[:32]
    first, second = params.layers
    spoilt = dataclasses.replace(second.attention, out=second.attention.out.at[3, 5].set(jnp.nan))
    nan_layer = dataclasses.replace(params, layers=(first, dataclasses.replace(second, attention=spoilt)))
    infinite_head = dataclasses.replace(params, lm_head=params.lm_head.at[2, 7].set(jnp.inf))
    nan_token = dataclasses.replace(nan_layer, embedding=params.embedding.at[lone, 2].set(jnp.nan))
    for broken, given, expected in (
        (params, ids, None),
        (nan_layer, ids, f"layer 1 of 0..1, at position 0 (token {ids[0]})"),
        (nan_layer, ids[:1], f"layer 1 of 0..1, at position 0 (token {ids[0]})"),
        (infinite_head, ids, f"the head, at position 0 (token {ids[0]})"),
        (nan_token, ids, f"layer 1 of 0..1, at position 0 (token {ids[0]})"),
        (dataclasses.replace(nan_token, layers=params.layers), ids, f"the embedding, at position 32 (token {lone})"),
    ):
        assert GptOss(broken, CONFIG).first_not_finite(given) == expected
