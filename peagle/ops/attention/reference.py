"""Grouped-query attention with optional sinks, in plain XLA."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle.ops.rope import apply_rope

MASKED = -1e30  # finite: a row with only masked keys gives finite garbage, never NaN
# (layer, query [B, T, N, H], key, value [B, T, G, H]) -> output [B, T, N, H]
AttendHeads: TypeAlias = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
# (layer, qkv [B, T, (N + 2G) H], cos, sin) -> output [B, T, N H]
Attend: TypeAlias = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def split_heads(
    qkv: Float[Array, "B T all"],
    num_heads: int,
    num_kv_heads: int,
    cos: Float[Array, "B T h"],
    sin: Float[Array, "B T h"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T G H"], Float[Array, "B T G H"]]:
    """Split a qkv projection into (queries, keys, values); apply RoPE to queries and keys."""
    batch, width, outputs = qkv.shape
    head_dim = outputs // (num_heads + 2 * num_kv_heads)
    heads = qkv.reshape(batch, width, -1, head_dim)
    query, key, value = jnp.split(heads, (num_heads, num_heads + num_kv_heads), axis=2)
    return apply_rope(query, cos, sin), apply_rope(key, cos, sin), value


def after_rope(attend: AttendHeads, num_heads: int, num_kv_heads: int) -> Attend:
    """Make an `Attend` that splits the qkv projection into heads, applies RoPE, and calls `attend`."""

    def attend_projected(layer: int, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        query, key, value = split_heads(qkv, num_heads, num_kv_heads, cos, sin)
        return attend(layer, query, key, value).reshape(*qkv.shape[:2], -1)

    return attend_projected


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S G H"],
    value: Float[Array, "B S G H"],
    mask: Bool[Array, "B T S"],
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend by softmax, scaled by 1/sqrt(head_dim); query head n reads kv head n // (N / G).

    A sink is one learned logit per query head: it is not scaled and joins the softmax's denominator only. Scores and
    softmax are float32 for every input dtype; the result has the query's dtype. Ignore the result of a row whose mask
    is all False (padding); it is finite.
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
    # unseen rows may hold a failed request's NaN, and 0 * NaN is NaN
    value = jnp.where(mask.any(axis=1)[:, :, None, None], value, jnp.zeros((), value.dtype))
    out = jnp.einsum("bgrts,bsgh->btgrh", probs, value, preferred_element_type=jnp.float32)
    return out.astype(query.dtype).reshape(batch, width, heads, head_dim)


def online_attention(
    query: Float[Array, "B T N H"],
    groups: int,
    load: Callable[[Int[Array, ""]], tuple[Float[Array, "B S G H"], Float[Array, "B S G H"], Bool[Array, "B T S"]]],
    begin: Int[Array, ""],
    end: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B T N H"]:
    """Compute `attention` over the keys, values and masks that load(begin) .. load(end - 1) return.

    An online softmax: sums are rescaled by the largest score so far (Milakov and Gimelshein, arXiv 1805.02867). A sink
    is the first score.
    """
    batch, width, heads, head_dim = query.shape
    repeat = heads // groups
    grouped = query.reshape(batch, width, groups, repeat, head_dim)

    def fold(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, out = carry
        keys, values, mask = load(index)
        values = jnp.where(mask.any(axis=1)[:, :, None, None], values, jnp.zeros((), values.dtype))  # 0 * NaN is NaN
        visible = mask[:, None, None]
        scores = jnp.einsum("btgrh,bsgh->bgrts", grouped, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
        scores = jnp.where(visible, scores, MASKED)
        higher = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(scores - higher), 0.0)
        shrink = jnp.exp(peak - higher)
        rounded = weights.astype(values.dtype)
        added = jnp.einsum("bgrts,bsgh->bgrth", rounded, values, preferred_element_type=jnp.float32)
        return higher, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), out * shrink + added

    shape = (batch, groups, repeat, width)
    if sinks is None:
        peak, total = jnp.full((*shape, 1), MASKED, jnp.float32), jnp.zeros((*shape, 1), jnp.float32)
    else:
        sink = sinks.astype(jnp.float32).reshape(1, groups, repeat, 1, 1)
        peak, total = jnp.broadcast_to(sink, (*shape, 1)), jnp.ones((*shape, 1), jnp.float32)
    start = (peak, total, jnp.zeros((*shape, head_dim), jnp.float32))
    _, total, out = jax.lax.fori_loop(begin, end, fold, start)
    out = jnp.moveaxis(out / jnp.where(total > 0, total, 1.0), 3, 1)
    return out.astype(query.dtype).reshape(batch, width, heads, head_dim)
