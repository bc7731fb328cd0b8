"""Find the most likely token and its probability.

The native kernels compute it if they run here, for weights in any layout, because a comparison gives the same result in
every implementation. Otherwise it takes passes over the logits that XLA vectorises on CPU, unlike its argmax.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.ops import native

NO_TOKEN = -1  # the index if the logits are not finite


def argmax(logits: Float[Array, "... V"]) -> Int[Array, "..."]:
    """Return the index of the largest logit, the first of equal ones.

    NO_TOKEN if a logit is NaN or the largest is not finite.
    """
    if native.available():
        return _native(logits, with_probability=False)[0]
    return _first_of(logits, jnp.max(logits, axis=-1, keepdims=True))


def likeliest(logits: Float[Array, "... V"]) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
    """Return (argmax, its probability in float32); (0, NaN) in place of NO_TOKEN, so that the index stays valid."""
    if native.available():
        index, probability = _native(logits, with_probability=True)
    else:
        peak = jnp.max(logits, axis=-1, keepdims=True)
        index = _first_of(logits, peak)
        probability = 1.0 / jnp.sum(jnp.exp((logits - peak).astype(jnp.float32)), axis=-1)
    return jnp.maximum(index, 0), probability


def _native(logits: jax.Array, *, with_probability: bool) -> tuple[jax.Array, jax.Array]:
    """Return (indices, probabilities or an empty array)."""
    *lead, vocab_size = logits.shape
    rows = math.prod(lead)
    shapes = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows * with_probability,), jnp.float32)
    index, probability = native.call("likeliest", shapes, logits.reshape(rows, vocab_size))
    return index.reshape(lead), probability.reshape(lead) if with_probability else probability


def _first_of(logits: Float[Array, "... V"], peak: Float[Array, "... 1"]) -> Int[Array, "..."]:
    vocab_size = logits.shape[-1]
    index = jnp.arange(vocab_size, dtype=jnp.int32)
    first = jnp.min(jnp.where(logits == peak, index, vocab_size), axis=-1)
    return jnp.where(jnp.isfinite(peak[..., 0]), first, NO_TOKEN)  # jnp.max passes NaN on
