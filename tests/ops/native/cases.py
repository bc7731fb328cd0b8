"""Shared by the tests of the native kernels: matrices in every format with their values in float64, and bits."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops.linear import PackedMatrix
from peagle.ops.linear.packed import pack_floats, pack_mxfp4, packed_matrix

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXACT = 1e-5  # error of results around one, summed in float32
ROUNDED = 2.0**-8  # error of a result rounded to bfloat16 once
# for tests of what all instruction sets share: the checks of shapes are one source without vectors
one_set = pytest.mark.parametrize("kernels", ["portable"], indirect=True)
# (stored matrix [..., outputs, inputs] or MXFP4 pair, its values in float64)
Stored = tuple[np.ndarray | tuple[np.ndarray, np.ndarray], np.ndarray]


def float32_matrix(rng: np.random.Generator, *shape: int) -> Stored:
    values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
    return values, values.astype(np.float64)


def bfloat16_matrix(rng: np.random.Generator, *shape: int) -> Stored:
    values = float32_matrix(rng, *shape)[1].astype(ml_dtypes.bfloat16)
    return values, values.astype(np.float64)


def mxfp4_matrix(rng: np.random.Generator, *shape: int) -> Stored:
    """Draw codes under scales that make outputs around one; neighbouring blocks never have the same scale."""
    *lead, inputs = shape
    blocks = rng.integers(0, 256, (*lead, inputs // 32, 16), np.uint8)
    centre = 127 - round(np.log2(2.93 * inputs**0.5))  # random codes have a root mean square of 2.93
    scales = (centre + rng.integers(-1, 1, (*lead, inputs // 32)) + np.arange(inputs // 32) % 2).astype(np.uint8)
    return (blocks, scales), mxfp4_values(blocks, scales)


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode to float64 values [..., inputs]; scale byte 0 counts as zero."""
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    powers = np.where(scales > 0, np.exp2(scales.astype(np.float64) - 127), 0.0)
    values = np.array(CODES)[nibbles] * powers[..., None]
    return values.reshape(*values.shape[:-2], -1)


MATRICES: dict[str, Callable[..., Stored]] = {
    "float32": float32_matrix,
    "bfloat16": bfloat16_matrix,
    "mxfp4": mxfp4_matrix,
}


def pack(
    stored: np.ndarray | tuple[np.ndarray, np.ndarray], order: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
) -> PackedMatrix:
    """Pack a stored matrix for the kernels, after reordering its rows."""
    if isinstance(stored, tuple):
        blocks, scales = map(order, stored)
        data, packed_scales = pack_mxfp4(blocks, scales)
        return packed_matrix(data, blocks.shape[-2] * 32, blocks.shape[-3], packed_scales)
    rows = order(stored)
    return packed_matrix(pack_floats(rows), rows.shape[-1], rows.shape[-2])


def results_of(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Compute the function's results in one compiled program, since eighteen compilations would take longest of all.

    Values that the function closes over become constants."""
    return jax.jit(lambda operands: [function(*one) for one in operands])(jax.tree.map(jnp.asarray, calls))


def one_at_a_time(function: Callable[..., jax.Array], *rows: np.ndarray) -> np.ndarray:
    """Compute the results for each row alone, with one compilation, and stack them."""
    compiled = jax.jit(function)
    calls = ([jnp.asarray(part[t : t + 1]) for part in rows] for t in range(len(rows[0])))
    return np.concatenate([compiled(*call) for call in calls])


def bits(array: jax.Array) -> np.ndarray:
    """Return the array's bits, which distinguish 0 from -0."""
    values = np.ascontiguousarray(array)
    return values.view(np.uint16 if values.dtype == ml_dtypes.bfloat16 else np.uint32)


def assert_same_bits(ours: jax.Array, theirs: jax.Array, what: object = "") -> None:
    np.testing.assert_array_equal(bits(ours), bits(theirs), str(what))
