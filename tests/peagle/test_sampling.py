"""Truncation and draws against their definitions, written with sorting in float64."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from peagle import sampling as functions
from peagle.config import GREEDY_BELOW, HOTTEST, SamplingConfig
from peagle.ops.errors import InputError
from peagle.ops.likeliest import NO_TOKEN
from peagle.sampling import BLOCK

draw = jax.jit(functions.draw)
probabilities = jax.jit(functions.probabilities, static_argnums=1)


def defined(logits: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    """One row: temperature, top-k with its ties, top-p with its ties, softmax."""
    scaled = logits.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        weights = np.exp(scaled - scaled.max())
        ordered = np.argsort(-scaled, kind="stable")
        mass = np.cumsum(weights[ordered]) / weights.sum()
        scaled[scaled < scaled[ordered[np.argmax(mass >= sampling.top_p)]]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 5000])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (1, 1.0), (5, 1.0), (40, 0.5), (0, 0.1), (0, 0.999), (3, 0.01)])
def test_truncated_distributions_are_those_defined(vocab_size: int, top_k: int, top_p: float) -> None:
    sampling = SamplingConfig(0.7, top_k=top_k, top_p=top_p)
    logits = np.random.default_rng(vocab_size).normal(0, 3, (2, 3, vocab_size)).astype(np.float32)
    found = np.asarray(probabilities(jnp.asarray(logits), sampling))
    for row in np.ndindex(2, 3):
        np.testing.assert_allclose(found[row], defined(logits[row], sampling), rtol=2e-5, atol=1e-9)


def test_what_ties_with_the_last_stays() -> None:
    logits = jnp.asarray([3.0, -0.0, 0.0, 0.0, -1.0, -np.inf])
    top_k = probabilities(logits, SamplingConfig(1.0, top_k=2))
    np.testing.assert_array_equal(np.asarray(top_k) > 0, [True, True, True, True, False, False])
    top_p = probabilities(logits, SamplingConfig(1.0, top_p=0.9))
    np.testing.assert_array_equal(np.asarray(top_p) > 0, [True, True, True, True, False, False])
    np.testing.assert_array_equal(probabilities(logits, SamplingConfig(1.0, top_p=0.5)), [1, 0, 0, 0, 0, 0])


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
    SamplingConfig(*each)
    for each in itertools.product((GREEDY_BELOW, 0.7, HOTTEST), (0, 3), (5e-324, 0.4, 1 - 2**-53, 1.0))
]


@functools.cache
def all_corners() -> Callable[[jax.Array], list[jax.Array]]:
    """The probabilities by each of them, compiled as one."""
    return jax.jit(lambda logits: [functions.probabilities(logits, sampling) for sampling in CORNERS])


@settings(max_examples=30)
@given(
    hnp.arrays(
        np.float32,
        (6, 4),
        elements=st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.just(-np.inf)),
    )
)
@example(np.array(EXTREMES, np.float32))
def test_all_that_may_be_asked_for_gives_probabilities(logits: np.ndarray) -> None:
    """Finite ones that sum to 1, the largest among them that of the largest logit: of temperature, top-k and top-p at
    the ends of what is allowed and between, for any finite logits, and minus infinity beside one."""
    logits[:, 1] = np.where(np.isinf(logits).all(axis=1), 0, logits[:, 1])
    for sampling, found in zip(CORNERS, map(np.asarray, all_corners()(jnp.asarray(logits))), strict=True):
        assert np.isfinite(found).all(), sampling
        assert (found >= 0).all(), sampling
        np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5, err_msg=str(sampling))
        best = np.take_along_axis(found, logits.argmax(-1)[:, None], axis=-1)[:, 0]
        np.testing.assert_array_equal(best, found.max(-1), str(sampling))


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-12, 1e-9, float(np.nextafter(GREEDY_BELOW, 0))])
def test_below_a_threshold_it_is_greedy(temperature: float) -> None:
    sampling = SamplingConfig(temperature, top_k=2, top_p=0.5)
    assert sampling.greedy
    assert functions.choose(jnp.asarray([1.0, 20.0, 20.0, 19.0]), sampling, None) == 1
    with pytest.raises(InputError, match="draft sampling needs a temperature of 1e-05 or more"):
        SamplingConfig(temperature, draft_sampling=True)


def test_at_the_threshold_only_what_float32_tells_apart_matters() -> None:
    """At 10 its last place is 1e-6, a tenth of the temperature."""
    logits = np.array([10.0, np.nextafter(np.float32(10), np.float32(0)), 9.99], np.float32)
    found = np.asarray(probabilities(jnp.asarray(logits), SamplingConfig(GREEDY_BELOW)))
    np.testing.assert_allclose(found, defined(logits, SamplingConfig(GREEDY_BELOW)), rtol=1e-4)
    assert 0.45 < found[1] < found[0]


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -0.5, -1e-300, 2 * HOTTEST, 1e39])
def test_temperatures_that_mean_nothing_are_refused(temperature: float) -> None:
    with pytest.raises(InputError, match=r"expected a number between 0 \(greedy\) and 1e\+30"):
        SamplingConfig(temperature)


@pytest.mark.parametrize("top_p", [float("nan"), float("inf"), -0.1, 0.0, 1.0001])
def test_masses_that_mean_nothing_are_refused(top_p: float) -> None:
    with pytest.raises(InputError, match=r"top-p is .*; expected a number above 0 and at most 1"):
        SamplingConfig(0.7, top_p=top_p)


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(0.7), SamplingConfig(0.7, top_k=2), SamplingConfig(0.7, top_p=0.5)]
)
def test_no_token_is_chosen_where_logits_are_not_finite(sampling: SamplingConfig) -> None:
    nan, infinite = float("nan"), float("inf")
    logits = [[0, 1, 2, 3], [0, nan, 2, 3], [-nan, 1, 2, 3], [0, 1, infinite, 3], [-infinite] * 4, [nan] * 4]
    chosen = functions.choose(jnp.asarray(logits), sampling, jnp.full(len(logits), 0.5))
    assert chosen[0] >= 0
    np.testing.assert_array_equal(chosen[1:], NO_TOKEN)


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
