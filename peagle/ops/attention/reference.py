"""Grouped-query attention with optional sinks: the XLA form."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -1e30  # finite: a row that sees nothing gives finite garbage, never NaN


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    mask: Bool[Array, "B T S"],
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention scaled by 1/sqrt(head_dim); query head n reads kv head n // (N / G).

    A sink is one learned logit per query head: it is not scaled and joins the softmax's denominator only. Scores and
    softmax are float32 whatever the inputs are; the result has the query's dtype. A row whose mask is all False (a
    padding row) is finite and meaningless.
    """
    batch, width, heads, head_dim = query.shape
    groups = key.shape[2]
    grouped = query.reshape(batch, width, groups, heads // groups, head_dim)
    scores = jnp.einsum("btgrh,bsgh->bgrts", grouped, key, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None, :, :], scores * head_dim**-0.5, MASKED)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, groups, heads // groups, 1, 1)
        peak = jnp.maximum(peak, sink)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - peak)
    probs = (weights / total).astype(value.dtype)
    out = jnp.einsum("bgrts,bsgh->btgrh", probs, value, preferred_element_type=jnp.float32)
    return out.astype(query.dtype).reshape(batch, width, heads, head_dim)
