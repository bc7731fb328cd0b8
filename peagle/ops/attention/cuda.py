"""Attention over a cache in the GPU kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from peagle.ops import cuda
from peagle.ops.cuda import calls
from peagle.ops.kv_cache import KVCache

MAX_WIDTH = 16  # rows of a sequence: what a verify pass has


def takes(qkv: jax.Array, cache: KVCache) -> bool:
    """Whether the kernels are for such operands, and run here."""
    if not cuda.available():
        return False
    fits = qkv.shape[1] <= MAX_WIDTH and cache.key.shape[3] == calls.HEAD_DIM
    return fits and qkv.dtype == cache.key.dtype == jnp.bfloat16


def decode_attention(
    qkv: BFloat16[Array, "B T all"],
    cos: BFloat16[Array, "B T h"],
    sin: BFloat16[Array, "B T h"],
    cache: KVCache,
    positions: Int[Array, "B T"],
    sinks: Float[Array, " N"] | None,
    *,
    window: int | None,
) -> tuple[BFloat16[Array, "B T out"], KVCache]:
    """See `peagle.ops.attention.decode_attention`. Slots that no query sees are not read, and a row's bits do not
    depend on the other rows."""
    out, key, value = calls.decode_attention(
        qkv, cos, sin, cache.key, cache.value, positions, sinks, window=window, ring=cache.ring
    )
    return out, KVCache(key, value, cache.ring)
