"""The most likely token and its probability, in passes over the logits that vectorise: on CPU, XLA's argmax does
not."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def argmax(logits: Float[Array, "... V"]) -> Int[Array, "..."]:
    """The index of the largest logit, the first of equal ones."""
    return _first_of(logits, jnp.max(logits, axis=-1, keepdims=True))


def likeliest(logits: Float[Array, "... V"]) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
    """(the argmax, its probability in float32)."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp((logits - peak).astype(jnp.float32)), axis=-1)
    return _first_of(logits, peak), 1.0 / total


def _first_of(logits: Float[Array, "... V"], peak: Float[Array, "... 1"]) -> Int[Array, "..."]:
    vocab_size = logits.shape[-1]
    index = jnp.arange(vocab_size, dtype=jnp.int32)
    # a row of NaN has no peak: its token is the last one, which is a token
    return jnp.minimum(jnp.min(jnp.where(logits == peak, index, vocab_size), axis=-1), vocab_size - 1)
