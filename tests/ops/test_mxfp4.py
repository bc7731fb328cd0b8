"""MXFP4 against its definition, on the host and on the device; transformers' own code is in test_mxfp4_oracle.py."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from peagle.ops import mxfp4
from peagle.ops.linear import as_matrix, to_mxfp4
from peagle.ops.linear.packed import pack_floats, pack_mxfp4, packed_matrix
from peagle.ops.mxfp4 import BLOCK, CODES, NAN_SCALE, dequantize, dequantize_on_device, quantize

products_on_device = jax.jit(mxfp4.products_on_device)


def every_byte_and_scale(scales: range) -> tuple[np.ndarray, np.ndarray]:
    """Make (blocks [S, 16, 16], scales [S, 16]): all 256 bytes under each scale, as 16 blocks."""
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (len(scales), 16, 16))
    return np.ascontiguousarray(blocks), np.repeat(np.array(scales, np.uint8)[:, None], 16, axis=1)


def test_every_nibble_is_the_hardware_type() -> None:
    """ml_dtypes' e2m1 is an independent table of the sixteen codes."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(CODES, codes)
    np.testing.assert_array_equal(np.signbit(CODES), np.signbit(codes))


def test_every_byte_under_every_scale_by_definition() -> None:
    blocks, scales = every_byte_and_scale(range(NAN_SCALE))
    values = dequantize(blocks, scales).reshape(NAN_SCALE, 256, 2)
    for scale in range(NAN_SCALE):
        power = np.float64(2.0) ** (scale - 127)
        with np.errstate(over="ignore"):
            low, high = (np.float32(CODES[np.arange(256) >> shift & 15].astype(np.float64) * power) for shift in (0, 4))
        np.testing.assert_array_equal(values[scale, :, 0], low)
        np.testing.assert_array_equal(values[scale, :, 1], high)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_device_agrees_on_normal_numbers(dtype: type) -> None:
    """Scale 2 is the first under which the smallest code, 0.5, is a normal number."""
    blocks, scales = every_byte_and_scale(range(2, NAN_SCALE))
    device = np.asarray(dequantize_on_device(jnp.asarray(blocks), jnp.asarray(scales), dtype))
    assert device.dtype == dtype
    np.testing.assert_array_equal(device.astype(np.float32), dequantize(blocks, scales))


@given(
    codes=hnp.arrays(np.uint8, (3, 2, BLOCK), elements=st.integers(0, 15)),
    scales=hnp.arrays(np.uint8, (3, 2), elements=st.integers(3, 250)),
)
def test_representable_values_survive(codes: np.ndarray, scales: np.ndarray) -> None:
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    values = dequantize(blocks, scales)
    back = dequantize(*quantize(values))
    np.testing.assert_array_equal(back, values)


@given(hnp.arrays(np.float32, (2, 2 * BLOCK), elements=st.floats(-1e4, 1e4, width=32)))
def test_quantize_takes_the_nearest_code(values: np.ndarray) -> None:
    blocks, scales = quantize(values)
    assert blocks.shape == (2, 2, 16)
    assert scales.shape == (2, 2)
    back = dequantize(blocks, scales).astype(np.float64)
    grid = CODES.astype(np.float64) * np.exp2(scales.astype(np.float64) - 127)[..., None]  # each block's values
    grouped = values.astype(np.float64).reshape(2, 2, BLOCK)
    nearest = np.abs(grouped[..., None] - grid[..., None, :]).min(axis=-1)
    np.testing.assert_array_equal(np.abs(grouped - back.reshape(2, 2, BLOCK)), nearest)
    # and the scale is the standard's: the peak lands on the code's highest exponent
    peak = np.abs(grouped).max(axis=-1) / np.exp2(scales.astype(np.float64) - 127)
    normal = np.abs(grouped).max(axis=-1) > 1e-36
    assert np.all((peak[normal] >= 4) & (peak[normal] < 8))


def test_ties_go_to_the_even_code_and_the_largest_saturates() -> None:
    values = np.zeros((2, BLOCK), np.float32)  # the second has zeros only
    values[0, :10] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 7.99]
    blocks, scales = quantize(values)
    assert scales.tolist() == [[127], [127]]
    assert not dequantize(blocks, scales)[1].any()
    assert dequantize(blocks, scales)[0, :10].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -4.0, 6.0]


def test_products_are_those_of_the_dequantised_matrix() -> None:
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (3, 5, 2, 16), np.uint8), rng.integers(118, 132, (3, 5, 2), np.uint8)
    x = rng.standard_normal((3, 64), np.float32)
    expected = np.einsum("poc,pc->po", dequantize(blocks, scales).astype(np.float64), x)
    products = products_on_device(*map(jnp.asarray, (blocks, scales, x)))
    np.testing.assert_allclose(products, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("column", [0, 1, 31])
def test_every_code_by_arithmetic(column: int) -> None:
    """A one in a single column gives that column's code."""
    byte = np.arange(256, dtype=np.uint8)
    blocks, x = np.zeros((256, 1, 1, 16), np.uint8), np.zeros((256, 32), np.float32)
    blocks[:, 0, 0, column // 2], x[:, column] = byte, 1
    scales = np.full((256, 1, 1), 127, np.uint8)
    products = np.asarray(products_on_device(*map(jnp.asarray, (blocks, scales, x))))[:, 0]
    np.testing.assert_array_equal(products, CODES[byte >> 4 if column % 2 else byte & 15])


def test_columns_must_fill_their_blocks() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(np.zeros((1, 33), np.float32))


@pytest.mark.parametrize("outputs", [1, 16, 4100])  # one panel in part, whole, more panels than are rounded at once
def test_packed_matrix_is_rounded_as_quantize_does(outputs: int) -> None:
    rows = np.random.default_rng(0).standard_normal((outputs, 96)).astype(ml_dtypes.bfloat16)
    rows *= np.exp2(np.random.default_rng(1).integers(-30, 30, (outputs, 1))).astype(ml_dtypes.bfloat16)
    rows[0, 32:64] = 0
    packed = to_mxfp4(packed_matrix(pack_floats(rows), 96, outputs))
    data, scales = pack_mxfp4(*quantize(rows.astype(np.float32)))
    np.testing.assert_array_equal(packed.data, data)
    assert packed.scales is not None
    np.testing.assert_array_equal(as_matrix(packed).T, dequantize(*quantize(rows.astype(np.float32))))
    filled = outputs % 16 or 16  # the last panel's rows without outputs are zeros, whose scale is any
    np.testing.assert_array_equal(packed.scales[:-1], scales[:-1])
    np.testing.assert_array_equal(packed.scales[-1, :, :filled], scales[-1, :, :filled])


def test_matrix_without_whole_blocks_is_not_rounded() -> None:
    packed = packed_matrix(pack_floats(np.ones((16, 40), ml_dtypes.bfloat16)), 40, 16)
    assert to_mxfp4(packed) is packed
