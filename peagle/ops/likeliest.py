"""The most likely token and its probability: by the compiled kernels where they run, whatever the weights are, since a
comparison is the same on both; else in passes over the logits that vectorise, as XLA's own argmax on CPU does not."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.ops import native


def argmax(logits: Float[Array, "... V"]) -> Int[Array, "..."]:
    """The index of the largest logit, the first of equal ones; the last index where a logit is NaN."""
    if native.available():
        return _native(logits, with_probability=False)[0]
    return _first_of(logits, jnp.max(logits, axis=-1, keepdims=True))


def likeliest(logits: Float[Array, "... V"]) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
    """(the argmax, its probability in float32)."""
    if native.available():
        return _native(logits, with_probability=True)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp((logits - peak).astype(jnp.float32)), axis=-1)
    return _first_of(logits, peak), 1.0 / total


def _native(logits: jax.Array, *, with_probability: bool) -> tuple[jax.Array, jax.Array]:
    """(indices, probabilities or nothing)."""
    *lead, vocab_size = logits.shape
    rows = math.prod(lead)
    shapes = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows * with_probability,), jnp.float32)
    index, probability = native.call("likeliest", shapes, logits.reshape(rows, vocab_size))
    return index.reshape(lead), probability.reshape(lead) if with_probability else probability


def _first_of(logits: Float[Array, "... V"], peak: Float[Array, "... 1"]) -> Int[Array, "..."]:
    vocab_size = logits.shape[-1]
    index = jnp.arange(vocab_size, dtype=jnp.int32)
    # a row of NaN has no peak: its token is the last one, which is a token
    return jnp.minimum(jnp.min(jnp.where(logits == peak, index, vocab_size), axis=-1), vocab_size - 1)
