"""Attention over a cache in the GPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int

from peagle.ops import cuda
from peagle.ops.kv_cache import KVCache

HEAD_DIM, CHUNK = 64, 256  # slots that give one partial result: kHead and kChunkSlots in ops/cuda/attention.cu
MAX_WIDTH = 16  # rows of a sequence: what a verify pass has


def takes(qkv: jax.Array, cache: KVCache) -> bool:
    """Whether the kernels are for such operands, and run here."""
    if not cuda.available():
        return False
    fits = qkv.shape[1] <= MAX_WIDTH and cache.key.shape[3] == HEAD_DIM
    return fits and qkv.dtype == cache.key.dtype == jnp.bfloat16


def decode_attention(
    qkv: BFloat16[Array, "B T all"],
    cos: BFloat16[Array, "B T h"],
    sin: BFloat16[Array, "B T h"],
    cache: KVCache,
    positions: Int[Array, "B T"],
    sinks: Float[Array, " N"] | None,
    *,
    num_heads: int,
    window: int | None,
) -> tuple[BFloat16[Array, "B T out"], KVCache]:
    """See `peagle.ops.attention.decode_attention`. Slots that no query sees are not read, and a row's bits do not
    depend on the other rows."""
    batch, width, _ = qkv.shape
    _, capacity, kv_heads, head_dim = cache.key.shape
    stored = jax.ShapeDtypeStruct(cache.key.shape, cache.key.dtype)
    parts = (batch, kv_heads, -(-capacity // CHUNK), width * num_heads // kv_heads)
    out, key, value, *_ = cuda.call(
        "decode_attention",
        (
            jax.ShapeDtypeStruct((batch, width, num_heads * head_dim), qkv.dtype),
            stored,
            stored,
            jax.ShapeDtypeStruct((batch, width, num_heads, head_dim), qkv.dtype),
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        qkv,
        cos,
        sin,
        cache.key,
        cache.value,
        positions,
        jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        in_place={3: 1, 4: 2},
        window=np.int64(window or 0),
        ring=np.bool_(cache.ring),
    )
    return out, KVCache(key, value, cache.ring)
