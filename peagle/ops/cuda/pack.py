"""Lay out MXFP4 weights for the Hopper kernels (see experts_hopper.cu), in the same number of bytes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8, UInt32

from peagle.ops.mxfp4 import BLOCK

CHUNK = 64  # inputs, and outputs, of a unit
UNITS_A_GROUP = 3
UNIT_WORDS = (2048 + 128) // 4
LARGEST_SCALE = 128  # a scale + 126 is the exponent of a bfloat16, which has no room beyond it


def pack(
    blocks: UInt8[Array, "E out b 16"], scales: UInt8[Array, "E out b"]
) -> UInt32[Array, "E groups chunks units words"]:
    """Lay out the matrices of all experts. Outputs are a multiple of 192, inputs of 64; scales are at most 128."""
    experts, outputs, num_blocks, _ = blocks.shape
    units, chunks = outputs // CHUNK, num_blocks * BLOCK // CHUNK
    # unit, warp, g, which of the two outputs; chunk, step of 16 inputs, which 8 of them, q
    split = blocks.reshape(experts, units, 4, 8, 2, chunks, 4, 2, 4).astype(jnp.uint32)
    words = _words(*(split[:, :, :, :, output, :, :, later] for later in (0, 1) for output in (0, 1)))
    # [E, unit, warp, g, chunk, step, q] -> [E, unit, chunk, warp, g, q, step]
    codes = words.transpose(0, 1, 4, 2, 3, 6, 5).reshape(experts, units, chunks, -1)
    # unit, warp, g, which output; chunk, which 32 inputs
    exponents = (scales.astype(jnp.uint32) + 126).reshape(experts, units, 4, 8, 2, chunks, 2)
    first, second = exponents[:, :, :, :, 0], exponents[:, :, :, :, 1]
    of_warps = first[..., 0] | second[..., 0] << 8 | first[..., 1] << 16 | second[..., 1] << 24
    of_warps = of_warps.transpose(0, 1, 4, 2, 3)
    packed = jnp.concatenate([codes, of_warps.reshape(experts, units, chunks, -1)], axis=-1)
    grouped = packed.reshape(experts, units // UNITS_A_GROUP, UNITS_A_GROUP, chunks, UNIT_WORDS)
    return grouped.transpose(0, 1, 3, 2, 4)


def _words(first: jax.Array, second: jax.Array, third: jax.Array, fourth: jax.Array) -> jax.Array:
    """Pack a[0] to a[3] of two inputs, from bytes whose low half is the code of an even input."""

    def half(shift: int) -> jax.Array:
        a, b, c = ((code >> shift) & 15 for code in (first, second, third))
        d = (fourth >> (4 - shift)) & 15  # the other input's
        own = (a >> 3) << 15 | (a & 7) << 6 | (b >> 3) << 12 | (b & 7) << 3 | (c >> 3) << 9 | (c & 7)
        return own | (d >> 1 & 1) << 10 | (d >> 2 & 1) << 11 | (d >> 3) << 13 | (d & 1) << 14

    return half(0) | half(4) << 16
