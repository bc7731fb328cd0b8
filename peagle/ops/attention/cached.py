"""Attention over a KV cache, in XLA or in the compiled kernels.

The kernels read only the slots that a query attends to. With them a query's bits depend on its position and on those
keys and values alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle.ops import native
from peagle.ops.attention import cuda
from peagle.ops.attention.reference import attention, attention_by_keys
from peagle.ops.cuda import not_taken
from peagle.ops.kernels import Implementation
from peagle.ops.kv_cache import KVCache, slot_positions, write_kv
from peagle.ops.mask import causal_mask
from peagle.ops.rope import apply_rope

MOST_SCORES = 1 << 18  # attention scores of one head in memory at once


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


def decode_attention(
    qkv: Float[Array, "B T all"],
    cos: Float[Array, "B T h"],
    sin: Float[Array, "B T h"],
    cache: KVCache,
    positions: Int[Array, "B T"],
    num_heads: int,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T out"], KVCache]:
    """Rotate the rows, write their keys and values to the cache, then attend; return (output [B, T, N H], cache).

    A query at position p sees positions max(0, p - window + 1) .. p, or 0 .. p without a window. The newest position of
    a ring is the largest of the pass. A query of negative position, anywhere among the rows, writes nothing; its output
    is finite and to be ignored. Raises InputError if the named implementation does not run here or does not take these
    operands.
    """
    if implementation == "native":
        return _on_native(qkv, cos, sin, cache, positions, sinks, num_heads=num_heads, window=window)
    operands = (qkv, cos, sin, cache, positions, sinks)
    on_gpu = functools.partial(cuda.decode_attention, window=window)
    on_xla = functools.partial(_on_xla, num_heads=num_heads, window=window)
    if implementation == "xla":
        return on_xla(*operands)
    if cuda.takes(qkv, cache):
        if implementation == "cuda":
            return on_gpu(*operands)
        return jax.lax.platform_dependent(*operands, cuda=on_gpu, default=on_xla)
    if implementation == "cuda":
        raise not_taken(f"bfloat16, up to {cuda.MAX_WIDTH} rows and heads of {cuda.HEAD_DIM}")
    return on_xla(*operands)


def _on_native(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: KVCache,
    positions: jax.Array,
    sinks: jax.Array | None,
    *,
    num_heads: int,
    window: int | None,
) -> tuple[jax.Array, KVCache]:
    outputs = num_heads * cache.key.shape[3]
    stored = jax.ShapeDtypeStruct(cache.key.shape, cache.key.dtype)
    out, key, value = native.call(
        "decode_attention",
        (jax.ShapeDtypeStruct((*qkv.shape[:2], outputs), cache.key.dtype), stored, stored),
        qkv,
        cos,
        sin,
        cache.key,
        cache.value,
        positions,
        native.optional(sinks),
        in_place={3: 1, 4: 2},
        window=np.int64(window or 0),
        ring=np.bool_(cache.ring),
    )
    return out, KVCache(key, value, cache.ring)


def _on_xla(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: KVCache,
    positions: jax.Array,
    sinks: jax.Array | None,
    *,
    num_heads: int,
    window: int | None,
) -> tuple[jax.Array, KVCache]:
    query, key, value = split_heads(qkv, num_heads, cache.key.shape[2], cos, sin)
    cache = write_kv(cache, key, value, positions)
    # the largest position, not the last row's: padding rows may follow
    newest = jnp.max(positions, axis=1)
    held = slot_positions(cache, newest)
    if query.shape[1] * cache.capacity > MOST_SCORES:
        block = max(MOST_SCORES // query.shape[1], 1)
        reached = None if cache.ring else jnp.max(newest) + 1
        out = attention_by_keys(query, cache.key, cache.value, positions, held, window, sinks, block, reached)
    else:
        out = attention(query, cache.key, cache.value, causal_mask(positions, held, window), sinks)
    return out.reshape(*qkv.shape[:2], -1), cache
