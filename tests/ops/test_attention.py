"""Attention against a loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops.attention import attention
from peagle.ops.mask import causal_mask

B, T, S, N, G, H = 2, 3, 5, 6, 2, 4


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw (query, key, value, mask, sinks); every row attends to something, no two rows to the same."""
    rng = np.random.default_rng(seed)
    query = 2 * rng.standard_normal((B, T, N, H), np.float32)
    key, value = rng.standard_normal((2, B, S, G, H), np.float32)
    mask = rng.random((B, T, S)) < 0.6
    mask[:, :, 0] |= ~mask.any(axis=-1)
    return query, key, value, mask, rng.standard_normal(N).astype(np.float32)


def by_definition(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray, sinks: np.ndarray | None
) -> np.ndarray:
    """Compute [B, T, N, H] in float64, by head."""
    out = np.zeros(query.shape)
    for b, t, n in np.ndindex(query.shape[:3]):
        keys, values = key[b, :, n // (N // G)], value[b, :, n // (N // G)]
        visible = mask[b, t]
        scores = keys[visible].astype(np.float64) @ query[b, t, n].astype(np.float64) / np.sqrt(H)
        weights = np.exp(scores)
        total = weights.sum() + (0.0 if sinks is None else np.exp(np.float64(sinks[n])))
        out[b, t, n] = weights @ values[visible] / total
    return out


def run(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray, sinks: np.ndarray | None
) -> np.ndarray:
    return np.asarray(jax.jit(attention)(query, key, value, mask, sinks))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_it_is_the_definition(with_sinks: bool) -> None:
    query, key, value, mask, sinks = inputs()
    chosen = sinks if with_sinks else None
    expected = by_definition(query, key, value, mask, chosen)
    np.testing.assert_allclose(run(query, key, value, mask, chosen), expected, atol=1e-6)


@pytest.mark.parametrize("sink", [-1e4, 80.0])
def test_extreme_sinks_stay_finite(sink: float) -> None:
    """Far below all scores a sink has no weight; far above, it takes all the weight."""
    query, key, value, mask, _ = inputs(2)
    out = run(query, key, value, mask, np.full(N, sink, np.float32))
    expected = run(query, key, value, mask, None) if sink < 0 else np.zeros_like(query)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_masked_keys_have_no_influence() -> None:
    query, key, value, mask, sinks = inputs(3)
    mask[:, :, 2] = False
    before = run(query, key, value, mask, sinks)
    key[:, 2], value[:, 2] = 1e6, -1e6
    np.testing.assert_array_equal(run(query, key, value, mask, sinks), before)


def test_a_row_without_keys_is_finite() -> None:
    query, key, value, mask, sinks = inputs(4)
    mask[0, 1] = False
    assert np.isfinite(run(query, key, value, mask, sinks)).all()
    assert np.isfinite(run(query, key, value, mask, None)).all()


def test_bfloat16_in_bfloat16_out_with_float32_softmax() -> None:
    query, key, value, mask, sinks = inputs(6)
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in (query, key, value)]
    out = jax.jit(attention)(*arrays, jnp.asarray(mask), jnp.asarray(sinks, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    rounded = [np.asarray(a, np.float32) for a in arrays]
    expected = by_definition(*rounded, mask, np.asarray(jnp.asarray(sinks, jnp.bfloat16), np.float32))
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)


def test_causal_mask_by_enumeration() -> None:
    queries, keys = np.array([[0, 3, 7], [5, 6, -1]]), np.array([[0, 1, 2, 3, 7, -1], [3, 8, 5, -2, 6, 4]])
    for window in (None, 1, 3):
        jitted = jax.jit(causal_mask, static_argnums=2)
        mask = np.asarray(jitted(queries.astype(np.int32), keys.astype(np.int32), window))
        for b, t, s in np.ndindex(2, 3, 6):
            p, q = keys[b, s], queries[b, t]
            assert mask[b, t, s] == (0 <= p <= q and (window is None or q - p < window))
