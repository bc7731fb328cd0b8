"""Attention with a cache, and among the rows of one pass: in XLA, or in the compiled kernels, which read what a query
sees and nothing else. With those a query's bits depend on its position and on the keys and values it sees alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle.ops import native as kernels
from peagle.ops.attention import cuda
from peagle.ops.attention.reference import attention, attention_by_keys
from peagle.ops.kv_cache import KVCache, slot_positions, write_kv
from peagle.ops.mask import causal_mask
from peagle.ops.rope import apply_rope

MOST_SCORES = 1 << 18  # of a head, in memory together
BLOCK = 512  # queries whose scores are in memory together


def split_heads(
    qkv: Float[Array, "B T all"],
    num_heads: int,
    num_kv_heads: int,
    cos: Float[Array, "B T h"],
    sin: Float[Array, "B T h"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T G H"], Float[Array, "B T G H"]]:
    """(queries, keys, values) of a projection that holds them side by side; queries and keys rotated."""
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
    native: bool = False,
    xla: bool = False,
) -> tuple[Float[Array, "B T out"], KVCache]:
    """(attention's output [B, T, N H], the cache with the rows' keys and values): rotated, written, then attended.

    A query at position p sees positions max(0, p - window + 1) .. p, all of them without a window; the newest position
    that a ring holds is the largest of the pass. A query of negative position, wherever it stands among the rows,
    writes nothing, and what comes out of it is finite and means nothing. `native` is for CPUs; `xla`: no kernels on
    GPUs either.
    """
    if not native:
        on_xla = functools.partial(_decode_attention, num_heads=num_heads, window=window)
        operands = (qkv, cos, sin, cache, positions, sinks)
        if xla or not cuda.takes(qkv, cache):
            return on_xla(*operands)
        on_gpu = functools.partial(cuda.decode_attention, window=window)
        return jax.lax.platform_dependent(*operands, cuda=on_gpu, default=on_xla)
    outputs = num_heads * cache.key.shape[3]
    stored = jax.ShapeDtypeStruct(cache.key.shape, cache.key.dtype)
    out, key, value = kernels.call(
        "decode_attention",
        (jax.ShapeDtypeStruct((*qkv.shape[:2], outputs), cache.key.dtype), stored, stored),
        qkv,
        cos,
        sin,
        cache.key,
        cache.value,
        positions,
        kernels.optional(sinks),
        in_place={3: 1, 4: 2},
        window=np.int64(window or 0),
        ring=np.bool_(cache.ring),
    )
    return out, KVCache(key, value, cache.ring)


def _decode_attention(
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
    # not the last row's: rows that are padding, of negative position, may stand behind
    held = slot_positions(cache, jnp.max(positions, axis=1))
    if query.shape[1] * cache.capacity > MOST_SCORES:
        block = max(MOST_SCORES // query.shape[1], 1)
        out = attention_by_keys(query, cache.key, cache.value, positions, held, window, sinks, block)
    else:
        out = attention(query, cache.key, cache.value, causal_mask(positions, held, window), sinks)
    return out.reshape(*qkv.shape[:2], -1), cache


def attend_rows(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T G H"],
    value: Float[Array, "B T G H"],
    positions: Int[Array, "B T"],
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    *,
    native: bool = False,
) -> Float[Array, "B T N H"]:
    """Causal attention among a pass's own rows, which stand at positions 0, 1, 2, ...; negative ones behind them are
    inactive."""
    if not native:
        if query.shape[1] > BLOCK:
            return _in_blocks(query, key, value, positions, window, sinks)
        return attention(query, key, value, causal_mask(positions, positions, window), sinks)
    out: jax.Array = kernels.call(
        "attention",
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        query,
        key,
        value,
        positions,
        kernels.optional(sinks),
        window=np.int64(window or 0),
        ring=np.bool_(False),
    )
    return out


def _in_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T G H"],
    value: Float[Array, "B T G H"],
    positions: Int[Array, "B T"],
    window: int | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B T N H"]:
    """`attend_rows`, one block of queries after the other: all scores of a long prompt take more memory than a model.
    With a window a block reads the keys that its window reaches, and no others."""
    width = query.shape[1]
    num_blocks = -(-width // BLOCK)
    behind = num_blocks * BLOCK - width
    # where all keys are seen a block's begin at 0, else `before` keys ahead of its own rows
    before = 0 if window is None else min(window - 1, width)
    reach = num_blocks * BLOCK if window is None else before + BLOCK

    def padded(rows: jax.Array, ahead: int, fill: int = 0) -> jax.Array:
        widths = [(0, 0), (ahead, behind)] + [(0, 0)] * (rows.ndim - 2)
        return jnp.pad(rows, widths, constant_values=fill)

    queries, query_positions = padded(query, 0), padded(positions, 0, -1)
    keys, values, key_positions = padded(key, before), padded(value, before), padded(positions, before, -1)

    def one(start: jax.Array) -> jax.Array:
        def own(rows: jax.Array, first: jax.Array, count: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(rows, first, count, axis=1)

        first = jnp.zeros_like(start) if window is None else start
        mask = causal_mask(own(query_positions, start, BLOCK), own(key_positions, first, reach), window)
        return attention(own(queries, start, BLOCK), own(keys, first, reach), own(values, first, reach), mask, sinks)

    out = jax.lax.map(one, BLOCK * jnp.arange(num_blocks, dtype=jnp.int32))
    return jnp.moveaxis(out, 0, 1).reshape(query.shape[0], -1, *query.shape[2:])[:, :width]
