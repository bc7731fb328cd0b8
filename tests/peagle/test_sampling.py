"""Truncation and draws against their definitions, written with sorting in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle import sampling as functions
from peagle.config import SamplingConfig
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
