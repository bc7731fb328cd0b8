"""MXFP4: blocks of 32 four-bit floats (e2m1) with one power-of-two scale (e8m0), OCP Microscaling v1.0.

Layout of a matrix [rows, columns], as GPT-OSS checkpoints store it: `blocks` [..., rows, columns/32, 16] uint8, the low
nibble of each byte first, and `scales` [..., rows, columns/32] uint8; value = code * 2^(scale - 127). Scale byte 255 is
NaN in the standard; here it means a corrupt file, which loading refuses.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

BLOCK = 32
NAN_SCALE = 255
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
CODES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_PAIRS = np.stack([CODES[np.arange(256) & 15], CODES[np.arange(256) >> 4]], axis=-1)  # [256, 2]


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantise to float32 [..., rows, columns] on the host.

    Exact for every scale, denormal results included; values beyond float32 (scales 253 and 254 only) become infinite.
    """
    with np.errstate(over="ignore"):
        values = np.ldexp(_PAIRS[blocks], scales.astype(np.int32)[..., None, None] - 127)
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def dequantize_on_device(
    blocks: UInt8[Array, "*rows n 16"], scales: UInt8[Array, "*rows n"], dtype: DTypeLike
) -> Float[Array, "*rows columns"]:
    """Dequantise in a jitted function, to `dtype`. XLA on CPU flushes denormals, such as scale 0 (2^-127)."""
    codes = jnp.asarray(CODES, dtype)
    low, high = codes[(blocks & 15).astype(jnp.int32)], codes[(blocks >> 4).astype(jnp.int32)]
    values = jnp.stack([low, high], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    return (values * _powers(scales).astype(dtype)[..., None]).reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def products_on_device(
    blocks: UInt8[Array, "P O n 16"], scales: UInt8[Array, "P O n"], x: Float[Array, "P columns"]
) -> Float[Array, "P O"]:
    """Compute matrix[p] @ x[p] of P matrices in float32.

    It is one sum over products, so that a compiler that fuses (XLA on GPU) reads only four-bit codes from memory.
    """
    pairs = x.astype(jnp.float32).reshape(x.shape[0], 1, -1, BLOCK // 2, 2)
    products = _values(blocks & 15) * pairs[..., 0] + _values(blocks >> 4) * pairs[..., 1]
    return jnp.sum(jnp.sum(products, axis=-1) * _powers(scales), axis=-1)


def _powers(scales: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Build the powers of two from their exponent bits: exact, which exp2 need not be."""
    return jnp.asarray(scales.astype(jnp.uint32) << 23).view(jnp.float32)


def _values(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Decode four-bit codes by arithmetic, because a table look-up would not be fused into a sum."""
    codes = codes.astype(jnp.int32)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))  # twice the magnitude
    return jnp.where(codes >= 8, -0.5, 0.5) * halves.astype(jnp.float32)


def quantize(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise float32 values [..., rows, columns] to the nearest (blocks, scales); columns: a multiple of 32.

    A block's scale is the power of two that puts its largest magnitude in [4, 8), so at most codes above 6 saturate
    (OCP Microscaling v1.0, section 6.3); a block of zeros gets scale 127. Rounding is to the nearest code, ties to
    even.
    """
    if values.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 needs a last dimension that is a multiple of {BLOCK}, got shape {values.shape}")
    grouped = np.asarray(values, np.float32).reshape(*values.shape[:-1], -1, BLOCK)
    peak = np.abs(grouped).max(axis=-1)
    _, exponent = np.frexp(peak)  # peak = m * 2^exponent, m in [0.5, 1)
    exponent = np.where(peak > 0, exponent - 3, 0)
    scales = np.clip(exponent + 127, 0, NAN_SCALE - 1)
    magnitude = np.abs(np.ldexp(grouped, -(scales.astype(np.int32) - 127)[..., None]))
    # codes are 0.5 apart below 2, 1 apart below 4, 2 apart above; rint takes ties to the even code
    code = np.where(magnitude < 2, np.rint(2 * magnitude), np.rint(magnitude) + 2)
    code = np.where(magnitude < 4, code, np.minimum(np.rint(magnitude / 2) + 4, 7)).astype(np.uint8)
    code |= np.signbit(grouped).astype(np.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4), scales.astype(np.uint8)
