"""Draw tokens by keys, so that similar distributions often draw the same token by the same key.

The native kernels draw if they run here. They and XLA draw the same token, except if the two best of a row are equal up
to rounding.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from peagle.ops import native
from peagle.ops.likeliest import NO_TOKEN, argmax

KEYS = "threefry2x32"  # two words; jax's default is a setting of the environment, on which no draw may depend


def draw(
    weights: Float[Array, "B T V"], keys: UInt32[Array, "B T 2"], token_ids: Int[Array, " V"] | None = None
) -> Int[Array, "B T"]:
    """Draw an index with a probability in proportion to its weight.

    An exponential race: each token has an exponentially distributed waiting time E that depends only on the row's key
    and the token's id; the token with the smallest E / weight is drawn (the argmax of log weight plus Gumbel noise). So
    two sets of weights draw the same token with probability (1 - d) / (1 + d) or more, d their total variation.

    token_ids: of the weights; None: 0, 1, 2, ... A token of zero weight is never drawn. Returns NO_TOKEN if no weight
    is above 0, or one is NaN.
    """
    if native.available():
        return _native(weights, keys, token_ids)
    if token_ids is None:
        token_ids = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    drawn = argmax(weights / _waiting_time(keys, token_ids))
    weight = jnp.take_along_axis(weights, jnp.maximum(drawn, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(weight > 0, drawn, NO_TOKEN)


def uniform(keys: UInt32[Array, "B T 2"]) -> Float[Array, "B T"]:
    """Make a number in [0, 1) per key, independent of `draw` by the same key."""
    return (_mixed(keys[..., 1] ^ _mixed(keys[..., 0] ^ jnp.uint32(0x9E3779B9))) >> 8).astype(jnp.float32) * 2.0**-24


def _native(weights: jax.Array, keys: jax.Array, token_ids: jax.Array | None) -> jax.Array:
    *lead, vocab_size = weights.shape
    rows = math.prod(lead)
    shape = jax.ShapeDtypeStruct((rows,), jnp.int32)
    operands = weights.astype(jnp.float32).reshape(rows, vocab_size), keys.reshape(rows, 2)
    drawn: jax.Array = native.call("draw", shape, *operands, native.optional(token_ids, jnp.int32))
    return drawn.reshape(lead)


def _waiting_time(keys: UInt32[Array, "B T 2"], token_ids: Int[Array, " V"]) -> Float[Array, "B T V"]:
    """Make exponentially distributed numbers of mean 1 from counters.

    Their steps near 0, where races are won, are 2^-32.
    """
    counters = token_ids.astype(jnp.uint32)[None, None, :] * jnp.uint32(0x9E3779B9)
    bits = _mixed(counters + keys[..., :1])
    bits = _mixed(bits ^ keys[..., 1:])
    past = bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33  # the distribution function's value, in (0, 1]
    # -log1p(-past), which XLA does not vectorise; the error of the series is past^4 / 5
    series = past * (1 + past * (1 / 2 + past * (1 / 3 + past / 4)))
    return jnp.where(past < 2.0**-7, series, -jnp.log(1 - past))


def _mixed(bits: jax.Array) -> jax.Array:
    """Hash 32 bits so that each bit depends on all (lowbias32; Wellons, "Prospecting for Hash Functions")."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
