"""Properties of the target without a reference: its passes agree, and rows are independent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops.attention import PagedCache
from peagle.ops.rope import RopeConfig, Yarn
from target.config import FULL, SLIDING, TargetConfig
from target.model import GptOss, forward
from target.params import TargetParams, init_params
from tests.support.paging import entries, small_pages
from tests.support.walk import WIDTH, walk

pytestmark = pytest.mark.compile

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
    extend, cache = jax.jit(GptOss.extend), prompts_of(model, [12, 10])
    ids = jnp.asarray(token_ids()[:2, 12 : 12 + WIDTH])
    positions = np.array([[12], [10]], np.int32) + np.arange(WIDTH, dtype=np.int32)
    both, written = extend(model, ids, positions, cache)
    for active in (0, 1):
        some = positions.copy()
        some[1, active:] = -1
        partial, after = extend(model, ids, some, cache)
        np.testing.assert_array_equal(partial.logits[0], both.logits[0])
        np.testing.assert_allclose(partial.logits[1, :active], both.logits[1, :active], atol=1e-5)
        assert np.isfinite(partial.logits).all()
        held = (entries(model, one, 0, 12 + WIDTH) for one in (cache, after, written))
        for before, now, then in zip(*held, strict=True):
            np.testing.assert_array_equal(now[0], then[0])
            assert not np.array_equal(now[0], before[0])
            at = positions[1, :active]
            np.testing.assert_allclose(now[1, at], then[1, at], atol=1e-5)
            now[1, at] = before[1, at]
            np.testing.assert_array_equal(now[1], before[1])


@pytest.mark.parametrize("named", [[[2], [0]], [[3, 1], [0, 0]]])
def test_logits_are_those_of_the_named_rows(model: GptOss, named: list[list[int]]) -> None:
    """aux_hidden is that of all rows, whichever are named."""
    cache = prompts_of(model, [12, 10])
    ids = jnp.asarray(token_ids()[:2, 12 : 12 + WIDTH])
    positions = np.array([[12], [10]], np.int32) + np.arange(WIDTH, dtype=np.int32)
    full, written = jax.jit(GptOss.extend)(model, ids, positions, cache)
    some, after = jax.jit(GptOss.extend)(model, ids, positions, cache, np.array(named, np.int32))
    expected = np.take_along_axis(np.asarray(full.logits), np.array(named)[:, :, None], axis=1)
    np.testing.assert_allclose(some.logits, expected, atol=1e-5)
    np.testing.assert_allclose(some.aux_hidden, full.aux_hidden, atol=1e-5)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(written), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def prompts_of(model: GptOss, lengths: list[int]) -> PagedCache:
    """Fill a cache with the first tokens of two sequences, in one padded pass."""
    widest = max(lengths)
    places = np.arange(widest, dtype=np.int32)[None, :]
    positions = np.where(places < np.array(lengths, np.int32)[:, None], places, -1)
    empty = small_pages(model, 2, LENGTH, widest)
    _, cache = jax.jit(GptOss.extend)(model, jnp.asarray(token_ids()[:2, :widest]), positions, empty)
    return cache


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


def test_a_window_keeps_few_pages() -> None:
    model = GptOss(random_params(), CONFIG)
    retaining = dataclasses.replace(model, retain_full_kv=True)
    for owner, capacity, widths in ((model, 1000, [16, 2]), (model, 5, [1, 1]), (retaining, 1000, [16])):
        cache = owner.init_cache(3, capacity, WIDTH)
        assert [table.shape for table in cache.tables] == [(3, width) for width in widths]
        by_layer = [3 * widths[-1 if window else 0] for window in map(CONFIG.window, range(2))]
        assert [len(pages.key) for pages in cache.pages] == by_layer


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
    for broken, tokens, expected in (
        (params, ids, None),
        (nan_layer, ids, f"layer 1 of 0..1, at position 0 (token {ids[0]})"),
        (nan_layer, ids[:1], f"layer 1 of 0..1, at position 0 (token {ids[0]})"),
        (infinite_head, ids, f"the head, at position 0 (token {ids[0]})"),
        (nan_token, ids, f"layer 1 of 0..1, at position 0 (token {ids[0]})"),
        (dataclasses.replace(nan_token, layers=params.layers), ids, f"the embedding, at position 32 (token {lone})"),
    ):
        assert GptOss(broken, CONFIG).first_not_finite(tokens) == expected
