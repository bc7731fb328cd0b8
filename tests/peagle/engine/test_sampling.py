"""Truncation and draws, row by row, against definitions that sort in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from peagle.config import GREEDY_BELOW, HOTTEST, LARGEST_SEED, SMALLEST_SEED, SamplingParams
from peagle.engine import sampling as functions
from peagle.engine.engine import Engine
from peagle.engine.request import Request, fold_seed
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.sampling import BLOCK
from peagle.ops.errors import InputError
from peagle.ops.likeliest import NO_TOKEN
from tests.peagle.engine.rows import defined, rows_of
from tests.peagle.toys import FixedLogits, MarkovTarget

draw = jax.jit(functions.draw)
probabilities = jax.jit(functions.probabilities)
choose = jax.jit(functions.choose)
uniforms = jax.jit(functions.uniforms)

SIDE_BY_SIDE = [
    SamplingParams(1.3),
    *(SamplingParams(0.7, top_k, top_p) for top_k, top_p in ((0, 0.9), (1, 1.0), (5, 1.0), (40, 0.5), (0, 0.1))),
    *(SamplingParams(0.7, top_k, top_p) for top_k, top_p in ((0, 0.999), (3, 0.01), (2, 5e-324), (10**9, 1.0))),
    SamplingParams(0.0, top_k=4, top_p=0.9, min_p=0.1),
    *(SamplingParams(2.0, min_p=min_p) for min_p in (1e-3, 0.4, 1.0)),
    SamplingParams(2.0, 9, 0.8, 0.05),
]


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 5000])
def test_each_row_has_the_distribution_its_own_request_defines(vocab_size: int) -> None:
    shape = (len(SIDE_BY_SIDE), 3, vocab_size)
    logits = np.random.default_rng(vocab_size).normal(0, 3, shape).astype(np.float32)
    found = np.asarray(probabilities(logits, rows_of(SIDE_BY_SIDE)))
    for row, t in np.ndindex(*shape[:2]):
        expected = defined(logits[row, t], SIDE_BY_SIDE[row])
        np.testing.assert_allclose(found[row, t], expected, rtol=2e-5, atol=1e-9, err_msg=str(SIDE_BY_SIDE[row]))


def test_a_rows_distribution_is_the_one_it_has_alone() -> None:
    """Bit for bit, whatever the sampling of other rows."""
    logits = np.random.default_rng(3).normal(0, 3, (len(SIDE_BY_SIDE), 2, 300)).astype(np.float32)
    together = np.asarray(probabilities(logits, rows_of(SIDE_BY_SIDE)))
    for row, asked in enumerate(SIDE_BY_SIDE):
        alone = probabilities(logits[row : row + 1], rows_of([asked]))
        np.testing.assert_array_equal(alone[0], together[row], str(asked))


def test_what_ties_with_the_last_stays() -> None:
    logits = np.array([3.0, -0.0, 0.0, 0.0, -1.0, -np.inf], np.float32)
    asked = [
        *(SamplingParams(1.0, top_k=2), SamplingParams(1.0, top_p=0.9), SamplingParams(1.0, top_p=0.5)),
        *(SamplingParams(0.5, top_p=5e-324), SamplingParams(1.0, min_p=float(np.exp(-3.001)))),
    ]
    found = np.asarray(probabilities(np.tile(logits, (len(asked), 1, 1)), rows_of(asked)))[:, 0]
    np.testing.assert_array_equal(found[[0, 1, 4]] > 0, [[True, True, True, True, False, False]] * 3)
    np.testing.assert_array_equal(found[[2, 3]], [[1, 0, 0, 0, 0, 0]] * 2)


LARGEST, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny
EXTREMES = [
    [LARGEST, -LARGEST, 0.0, 1.0],
    [-LARGEST, -LARGEST, -LARGEST, np.nextafter(-LARGEST, np.float32(0))],
    [LARGEST, LARGEST, np.nextafter(LARGEST, np.float32(0)), -np.inf],
    [20.0, np.nextafter(np.float32(20), np.float32(0)), 19.5, -1e30],  # as a drafter masks tokens
    [-np.inf, -np.inf, -3e38, -np.inf],
    [TINY, -TINY, 0.0, -0.0],
]
CORNERS = [
    SamplingParams(*each)
    for each in itertools.product(
        (0.0, GREEDY_BELOW, 0.7, HOTTEST), (0, 3), (5e-324, 0.4, 1 - 2**-53, 1.0), (0.0, 5e-324, 0.3, 1.0)
    )
]


@settings(max_examples=30)
@given(
    hnp.arrays(
        np.float32,
        (6, 4),
        # no subnormals, which XLA's threads take for zero
        elements=st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), st.just(-np.inf)
        ),
    )
)
@example(np.array(EXTREMES, np.float32))
def test_all_that_may_be_asked_for_gives_probabilities(logits: np.ndarray) -> None:
    """They are finite, sum to 1, and the largest logit has the largest.

    For any finite logits, or -inf beside a finite one, and for all allowed temperature, top-k, top-p and min-p.
    """
    logits[:, 1] = np.where(np.isinf(logits).all(axis=1), 0, logits[:, 1])
    rows = np.asarray(probabilities(np.tile(logits, (len(CORNERS), 1, 1)), rows_of(CORNERS)))
    for sampling, found in zip(CORNERS, rows, strict=True):
        assert np.isfinite(found).all(), sampling
        assert (found >= 0).all(), sampling
        np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5, err_msg=str(sampling))
        best = np.take_along_axis(found, logits.argmax(-1)[:, None], axis=-1)[:, 0]
        np.testing.assert_array_equal(best, found.max(-1), str(sampling))


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-12, 1e-9, float(np.nextafter(GREEDY_BELOW, 0))])
def test_below_a_threshold_it_is_greedy(temperature: float) -> None:
    """Beside sampled rows, too, although its uniform number would draw another token."""
    sampling = SamplingParams(temperature, top_k=3, top_p=0.9)
    assert sampling.greedy
    rows = rows_of([sampling, SamplingParams(1.0)])
    assert rows.greedy.tolist() == [True, False]
    logits = np.tile(np.array([1.0, 20.0, 20.0, 19.0], np.float32), (2, 1, 1))
    assert choose(logits, rows, None)[:, 0].tolist() == [1, 1]
    assert choose(logits, rows, np.full((2, 1), 0.8, np.float32))[:, 0].tolist() == [1, 2]
    table = jnp.zeros((3, 3))
    engine = Engine(MarkovTarget(table), FixedLogits(table), ResolvedConfig(2, draft_sampling=True))
    with pytest.raises(InputError, match="draft sampling needs a temperature of 1e-05 or more"):
        engine.add(Request((0,), 1, sampling))


def test_at_the_threshold_only_what_float32_tells_apart_matters() -> None:
    """At 10 its last place is 1e-6, a tenth of the temperature."""
    logits = np.array([10.0, np.nextafter(np.float32(10), np.float32(0)), 9.99], np.float32)
    sampling = SamplingParams(GREEDY_BELOW)
    found = np.asarray(probabilities(logits[None, None], rows_of([sampling])))[0, 0]
    np.testing.assert_allclose(found, defined(logits, sampling), rtol=1e-4)
    assert 0.45 < found[1] < found[0]


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -0.5, -1e-300, 2 * HOTTEST, 1e39])
def test_temperatures_that_mean_nothing_are_refused(temperature: float) -> None:
    with pytest.raises(InputError, match=r"expected a number between 0 \(greedy\) and 1e\+30"):
        SamplingParams(temperature)


@pytest.mark.parametrize("top_p", [float("nan"), float("inf"), -0.1, 0.0, 1.0001])
def test_masses_that_mean_nothing_are_refused(top_p: float) -> None:
    with pytest.raises(InputError, match=r"top-p is .*; expected a number above 0 and at most 1"):
        SamplingParams(0.7, top_p=top_p)


@pytest.mark.parametrize("min_p", [float("nan"), float("inf"), -0.1, 1.0001])
def test_shares_of_the_likeliest_that_mean_nothing_are_refused(min_p: float) -> None:
    with pytest.raises(InputError, match=r"min-p is .*; expected a number from 0 \(off\) to 1"):
        SamplingParams(0.7, min_p=min_p)


def test_whole_numbers_that_are_too_large_are_refused() -> None:
    for top_k in (-1, 2**31):
        with pytest.raises(InputError, match=r"top-k is .*; expected 0 \(off\) or more"):
            SamplingParams(0.7, top_k=top_k)
    for seed in (SMALLEST_SEED - 1, LARGEST_SEED + 1):
        with pytest.raises(InputError, match=r"seed is .*; expected an integer of 64 bits"):
            SamplingParams(0.7, seed=seed)


def test_a_seed_of_31_bits_is_itself_on_the_device_and_a_larger_one_is_folded_for_good() -> None:
    for seed in (0, 7, 2**31 - 1):
        assert fold_seed(seed) == seed
    folded = {
        2**31: 142642693,
        2**32 - 1: 450614939,
        2**40: 1628671565,
        2**63: 295773774,
        -1: 2099174690,
    }
    assert {seed: fold_seed(seed) for seed in folded} == folded  # of any version: answers are to be had again
    assert fold_seed(-1) == fold_seed(2**64 - 1)  # the same 64 bits
    rows = rows_of([SamplingParams(1.0, seed=seed) for seed in folded])
    assert np.asarray(rows.seed).tolist() == [*folded.values()]


@pytest.mark.parametrize("uniform", [None, 0.5])
def test_no_token_is_chosen_where_logits_are_not_finite(uniform: float | None) -> None:
    """In whatever row; the other positions of the row and the other rows choose theirs."""
    nan, infinite = float("nan"), float("inf")
    logits = [[0, 1, 2, 3], [0, nan, 2, 3], [-nan, 1, 2, 3], [0, 1, infinite, 3], [-infinite] * 4, [nan] * 4]
    asked = [SamplingParams(), SamplingParams(0.7), SamplingParams(0.7, top_k=2), SamplingParams(0.7, top_p=0.5)]
    asked += [SamplingParams(0.7, min_p=0.5), SamplingParams(0.7, 3, 0.9, 0.1)]
    given = None if uniform is None else np.full((len(asked), len(logits)), uniform, np.float32)
    chosen = np.asarray(choose(np.tile(np.array(logits, np.float32), (len(asked), 1, 1)), rows_of(asked), given))
    assert (chosen[:, 0] >= 0).all()
    np.testing.assert_array_equal(chosen[:, 1:], NO_TOKEN)


@pytest.mark.parametrize("vocab_size", [1, 3, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_a_draw_is_the_token_whose_interval_holds_the_point(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    weights = (rng.integers(0, 3, vocab_size) * rng.integers(0, 2, vocab_size)).astype(np.float32)  # sums are exact
    weights[vocab_size // 2] = 1
    ends = np.cumsum(weights)
    points = np.unique(np.concatenate([ends, ends - 0.5, [0.0]]))
    points = points[(points >= 0) & (points < ends[-1])]
    uniform = (points / ends[-1]).astype(np.float32)
    exact = uniform * ends[-1] == points  # the quotient may be rounded
    assert exact.any()
    found = draw(jnp.broadcast_to(jnp.asarray(weights), (len(points), vocab_size)), jnp.asarray(uniform))
    np.testing.assert_array_equal(np.asarray(found)[exact], np.searchsorted(ends, points, side="right")[exact])
    assert (weights[np.asarray(found)] > 0).all()


def test_no_uniform_number_draws_what_weighs_nothing() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((4000, 2 * BLOCK)).astype(np.float32) ** 8
    weights[:, rng.random(2 * BLOCK) < 0.7] = 0
    uniform = np.concatenate([rng.random(3998), [0.0, np.nextafter(np.float32(1), np.float32(0))]]).astype(np.float32)
    found = np.asarray(draw(jnp.asarray(weights), jnp.asarray(uniform)))
    assert (weights[np.arange(4000), found] > 0).all()
    shares = np.bincount(found, minlength=2 * BLOCK)
    expected = (weights.astype(np.float64) / weights.sum(-1, keepdims=True, dtype=np.float64)).sum(0)
    assert ((shares - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 0].sum() < 450  # 300 degrees of freedom


def test_random_numbers_are_those_of_seed_request_and_token_alone() -> None:
    """They do not depend on slot, other rows or place in the pass, and no two are equal."""
    asked = [SamplingParams(0.5, seed=7), SamplingParams(0.0, seed=7), SamplingParams(1.0, 3, 0.5, seed=LARGEST_SEED)]
    rows = rows_of(asked)  # of requests 0, 1 and 2
    tokens = np.array([[5, 6, 7]] * 3, np.int32)
    found = np.asarray(uniforms(rows, tokens))
    assert ((found >= 0) & (found < 1)).all()
    assert len(np.unique(found)) == found.size
    turned = jax.tree.map(lambda leaf: leaf[::-1], rows)
    np.testing.assert_array_equal(uniforms(turned, tokens[:, ::-1].copy()), found[::-1, ::-1])
    others = rows_of([SamplingParams(2.0, 1, 0.1, 0.9, seed=7)])
    np.testing.assert_array_equal(uniforms(others, tokens[:1, 1:2])[0, 0], found[0, 1])
