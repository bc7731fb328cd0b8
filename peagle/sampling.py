"""Logits to probabilities to tokens. Both sides of the acceptance ratio use it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.config import SamplingConfig
from peagle.ops.likeliest import argmax


def probabilities(logits: Float[Array, "... V"], sampling: SamplingConfig) -> Float[Array, "... V"]:
    """The distribution tokens are drawn from, float32: temperature, then top-k, then top-p, renormalised.

    top-k keeps every logit not below the k-th largest; top-p keeps the smallest set of most likely tokens whose mass
    reaches top_p, and what ties with its last member. Temperature must be above 0.
    """
    logits = logits.astype(jnp.float32) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits >= kth, logits, -jnp.inf)
    if sampling.top_p < 1:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        mass = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(mass, axis=-1) - mass
        last_kept = jnp.sum(before < sampling.top_p, axis=-1, keepdims=True) - 1
        threshold = jnp.take_along_axis(ordered, jnp.maximum(last_kept, 0), axis=-1)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return jax.nn.softmax(logits, axis=-1)


def draw(weights: Float[Array, "... V"], uniform: Float[Array, "..."]) -> Int[Array, "..."]:
    """The token whose interval of the cumulative weights holds uniform * total. Weights need not be normalised.

    uniform lies in [0, 1); a token of zero weight has an empty interval and is never drawn.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    point = uniform[..., None] * cumulative[..., -1:]
    token = jnp.sum(cumulative <= point, axis=-1, dtype=jnp.int32)
    # uniform * total may round up to the total: the last token of positive weight then
    indices = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(weights > 0, indices, 0), axis=-1)
    return jnp.minimum(token, last).astype(jnp.int32)


def choose(
    logits: Float[Array, "... V"], sampling: SamplingConfig, uniform: Float[Array, "..."] | None
) -> Int[Array, "..."]:
    """The token plain decoding takes: the argmax, or a draw with the given uniform numbers."""
    if sampling.greedy:
        return argmax(logits)
    assert uniform is not None
    return draw(probabilities(logits, sampling), uniform)


# The purposes a position needs random numbers for, as the last axis of `uniforms`.
TARGET, ACCEPT, DRAFT = 0, 1, 2


def row_keys(seed: Int[Array, " B"], request: Int[Array, " B"]) -> jax.Array:
    """One PRNG key a row, [B], from its seed and the place of its request in the input."""
    return jax.vmap(lambda s, r: jax.random.fold_in(jax.random.key(s), r))(seed, request)


def uniforms(keys: jax.Array, index: Int[Array, "B T"]) -> Float[Array, "B T 3"]:
    """Uniform numbers in [0, 1) that depend on a row's key and the sequence index of the token decided alone.

    So a row's randomness does not depend on the batch it is decoded in, on K, or on how a step happened to end.
    Numbers of an index that a step drafted and did not reach are used again for the same index by the next step:
    nothing that was emitted depended on them.
    """

    def one(key: jax.Array, token_index: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, token_index), (3,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)), (0, 0))(keys, index)
