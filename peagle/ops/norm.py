"""Root-mean-square normalisation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Norm(NamedTuple):
    """A norm that an op applies first (`rms_norm`)."""

    weight: jax.Array
    epsilon: float


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """Scale x to unit mean square over its last axis, then multiply by the weight.

    All in float32, also the multiplication by the weight; the cast to x's dtype comes last (openai/gpt-oss; an earlier
    cast changes bfloat16 results).
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight32 = jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (x32 * scale * weight32).astype(x.dtype)
