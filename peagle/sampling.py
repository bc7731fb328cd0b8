"""Logits to probabilities to tokens. Both sides of the acceptance ratio use it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.config import SamplingConfig
from peagle.ops.likeliest import NO_TOKEN, argmax


def probabilities(logits: Float[Array, "... V"], sampling: SamplingConfig) -> Float[Array, "... V"]:
    """Compute the distribution tokens are drawn from, float32: temperature, then top-k, then top-p, renormalised.

    top-k keeps every logit not below the k-th largest; top-p keeps the smallest set of most likely tokens whose mass
    reaches top_p, and what ties with its last member. `sampling` must not be greedy. Finite logits, and -inf beside
    them, give finite probabilities that sum to 1; where a logit is NaN, or the largest is infinite, all are NaN.
    """
    logits = logits.astype(jnp.float32)
    # the largest becomes exactly 0 before anything is scaled: a scaled one is rounded, and what is left of a difference
    # of two such is that rounding, times 1 / temperature
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = _cut(logits, jnp.ones_like(logits), float(sampling.top_k))
    if sampling.top_p < 1:
        logits = _cut(logits, jax.nn.softmax(logits, axis=-1), sampling.top_p)
    return jax.nn.softmax(logits, axis=-1)


def _cut(logits: Float[Array, "... V"], weights: Float[Array, "... V"], enough: float) -> Float[Array, "... V"]:
    """Keep the logits of the fewest most likely tokens whose weights reach `enough`, and of those that tie with the
    last of them; -inf for the others. The largest logit is 0, and stays, however little is enough.

    No sorting, which at 200 000 tokens takes longer than a pass of most targets: the lowest logit that stays is found
    bit by bit, each of which takes one sum.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)  # 0 and -0 are equal
    top = jnp.uint32(1 << 31)
    order = jnp.where(bits >= top, ~bits, bits | top)  # unsigned numbers in the order of the logits

    def find(step: jax.Array, lowest: jax.Array) -> jax.Array:
        higher = lowest | (top >> step.astype(jnp.uint32))
        return jnp.where(
            jnp.sum(jnp.where(order >= higher, weights, 0.0), axis=-1, keepdims=True) >= enough, higher, lowest
        )

    lowest = jax.lax.fori_loop(jnp.int32(0), 32, find, jnp.zeros_like(order[..., :1]))
    return jnp.where(order >= jnp.minimum(lowest, top), logits, -jnp.inf)  # top is the place of 0


BLOCK = 512  # weights that are summed up together


def draw(weights: Float[Array, "... V"], uniform: Float[Array, "..."]) -> Int[Array, "..."]:
    """Draw the token whose interval of the cumulative weights holds uniform * total. Weights need not be normalised.

    uniform lies in [0, 1); a token of zero weight has an empty interval and is never drawn. NO_TOKEN where the total is
    not above 0, NaN above all. The sums are those of blocks first, then those within the block that was hit: one
    running sum over a large vocabulary is slow.
    """
    *lead, vocab_size = weights.shape
    padded = jnp.pad(weights, [(0, 0)] * len(lead) + [(0, -vocab_size % BLOCK)])
    blocks = padded.reshape(*lead, -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    point = uniform * ends[..., -1]
    block = _hit(sums, ends, point)[..., None]
    inside = jnp.take_along_axis(blocks, block[..., None], axis=-2)[..., 0, :]
    begin = jnp.take_along_axis(ends - sums, block, axis=-1)[..., 0]
    token = block[..., 0] * BLOCK + _hit(inside, jnp.cumsum(inside, axis=-1), point - begin)
    return jnp.where(ends[..., -1] > 0, token, NO_TOKEN)


def _hit(weights: Float[Array, "... N"], ends: Float[Array, "... N"], point: Float[Array, "..."]) -> Int[Array, "..."]:
    """The first place that weighs anything and ends beyond the point; the last such, where rounding has put the point
    behind them all."""
    index = jax.lax.broadcasted_iota(jnp.int32, weights.shape, weights.ndim - 1)
    place = jnp.sum(ends <= point[..., None], axis=-1, keepdims=True, dtype=jnp.int32)
    some = weights > 0
    first = jnp.min(jnp.where(some & (index >= place), index, weights.shape[-1]), axis=-1)
    return jnp.minimum(first, jnp.max(jnp.where(some, index, 0), axis=-1))


def choose(
    logits: Float[Array, "... V"], sampling: SamplingConfig, uniform: Float[Array, "..."] | None
) -> Int[Array, "..."]:
    """Choose the token plain decoding takes: the argmax, or a draw with the given uniform numbers. NO_TOKEN where a
    logit is NaN, or the largest is not finite."""
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
