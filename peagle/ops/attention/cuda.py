"""Attention over a KV cache, in the CUDA kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from peagle.ops import cuda
from peagle.ops.cuda import calls
from peagle.ops.cuda.calls import HEAD_DIM, PAGE
from peagle.ops.kv_cache import KVCache

MAX_WIDTH = 16  # rows of a sequence: enough for a verify pass


def takes(qkv: jax.Array, cache: KVCache) -> bool:
    """Check that the kernels run here and take such operands."""
    if not cuda.available():
        return False
    fits = qkv.shape[1] <= MAX_WIDTH and cache.key.shape[3] == HEAD_DIM
    return fits and qkv.dtype == cache.key.dtype == jnp.bfloat16


def takes_pages(qkv: jax.Array, key: jax.Array) -> bool:
    """Check that the kernels run here and take rows over such pages [P, S, G, H]."""
    if not cuda.available():
        return False
    return key.shape[1] == PAGE and key.shape[3] == HEAD_DIM and qkv.dtype == key.dtype == jnp.bfloat16


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
    """See `peagle.ops.attention.decode_attention`.

    Slots that no query attends to are not read, and a row's bits do not depend on the other rows.
    """
    out, key, value = calls.decode_attention(
        qkv, cos, sin, cache.key, cache.value, positions, sinks, window=window, ring=cache.ring
    )
    return out, KVCache(key, value, cache.ring)
