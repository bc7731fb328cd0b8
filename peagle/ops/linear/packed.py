"""Pack matrices in the order in which the native kernels read them (peagle/ops/native/kernels.h).

A matrix is cut into panels of 16 output rows (BLIS's micro-panels). The row within the panel is the last axis, so that
one vector register holds one input's weights for 16 outputs. Zero rows fill the last panel.

    float32     [panels, inputs, 16]
    bfloat16    [panels, inputs/2 rounded up, 16, 2]: neighbouring inputs of a row share 32 bits
    MXFP4       uint32 [panels, inputs/8, 16]: eight neighbouring codes of a row, the first in the lowest four bits;
                scales uint8 [panels, inputs/32, 16]

Bfloat16 and MXFP4 values are multiplied exactly and summed in float32, for any dtype of activations. So bfloat16
weights stay bfloat16, and give the same result as float32 weights.
"""

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from peagle.base.memory import aligned, aligned_copy, as_aligned, to_device
from peagle.ops.kernels import Implementation
from peagle.ops.mxfp4 import BLOCK, dequantize
from peagle.ops.tpu import LANES

ROWS = 16
ROUNDED_AT_ONCE = 256  # panels, for less memory
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@flax.struct.dataclass
class PackedMatrix:
    """One weight matrix, or those of all experts, with a leading axis."""

    data: jax.Array
    scales: jax.Array | None  # of MXFP4
    inputs: int = flax.struct.field(pytree_node=False)
    outputs: int = flax.struct.field(pytree_node=False)


def num_panels(outputs: int) -> int:
    return -(-outputs // ROWS)


def pack_floats(matrix: np.ndarray) -> np.ndarray:
    """Pack a matrix [..., outputs, inputs]; bfloat16 stays bfloat16, any other dtype becomes float32."""
    *lead, outputs, inputs = matrix.shape
    if matrix.dtype != BFLOAT16:
        data = aligned((*lead, num_panels(outputs), inputs, ROWS), np.float32)
        _fill(data.swapaxes(-1, -2), matrix)
        return data
    data = aligned((*lead, num_panels(outputs), (inputs + 1) // 2, ROWS, 2), BFLOAT16)
    for half in range(2):
        _fill(data[..., : (inputs + 1 - half) // 2, :, half].swapaxes(-1, -2), matrix[..., half::2])
    return data


def pack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack MXFP4 rows as checkpoints store them; return (data, scales).

    blocks [..., outputs, inputs/32, 16], scales [..., outputs, inputs/32] (peagle.ops.mxfp4).
    """
    *lead, outputs, count, _ = blocks.shape
    words = np.ascontiguousarray(blocks).view("<u4").reshape(*lead, outputs, count * 4)
    packed = []
    for rows in (words, scales):
        packed.append(aligned((*lead, num_panels(outputs), rows.shape[-1], ROWS), rows.dtype))
        _fill(packed[-1].swapaxes(-1, -2), rows)
    return packed[0], packed[1]


def _fill(panels: np.ndarray, rows: np.ndarray) -> None:
    """Copy the rows [..., outputs, width] into the panels [..., panels, 16, width]; later rows stay zero."""
    outputs, width = rows.shape[-2:]
    whole = outputs // ROWS
    panels[..., :whole, :, :] = rows[..., : whole * ROWS, :].reshape(*rows.shape[:-2], whole, ROWS, width)
    if rest := outputs % ROWS:
        panels[..., whole, :rest, :] = rows[..., whole * ROWS :, :]


def packed_matrix(data: np.ndarray, inputs: int, outputs: int, scales: np.ndarray | None = None) -> PackedMatrix:
    """Move packed arrays to the device. It may share their memory: do not write to them afterwards."""
    return PackedMatrix(to_device(data), None if scales is None else to_device(scales), inputs, outputs)


def unpack_floats(packed: PackedMatrix) -> np.ndarray:
    """Return the matrix [..., outputs, inputs], in bfloat16 or float32."""
    data = np.asarray(packed.data)
    if packed.scales is not None:
        words, scales = (leaf.swapaxes(-1, -2) for leaf in (data, np.asarray(packed.scales)))
        blocks = np.ascontiguousarray(words).view(np.uint8).reshape(*scales.shape, BLOCK // 2)
        rows = dequantize(blocks, scales)
    elif data.dtype == BFLOAT16:
        rows = data.swapaxes(-2, -3).reshape(*data.shape[:-4], -1, ROWS, data.shape[-3] * 2)
    else:
        rows = data.swapaxes(-1, -2)
    return rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])[..., : packed.outputs, : packed.inputs]


def to_mxfp4(matrix: PackedMatrix) -> PackedMatrix:
    """Round a matrix of bfloat16 to MXFP4, a quarter of its bytes. One whose inputs are no whole blocks stays."""
    if matrix.data.dtype != BFLOAT16 or matrix.inputs % BLOCK:
        return matrix
    starts = range(0, matrix.data.shape[0], ROUNDED_AT_ONCE)
    parts = [_panels_to_mxfp4(matrix.data[start : start + ROUNDED_AT_ONCE]) for start in starts]
    data, scales = (np.concatenate(leaves) for leaves in zip(*parts, strict=True))
    return packed_matrix(data, matrix.inputs, matrix.outputs, scales)


@jax.jit
def _panels_to_mxfp4(panels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round panels [P, K/2, 16, 2] as peagle.ops.mxfp4.quantize does, in a tenth of its time; return (data, scales)."""
    count, pairs = panels.shape[:2]
    # of a block of 32 inputs each eight make a word
    values = panels.astype(jnp.float32).swapaxes(2, 3).reshape(count, 2 * pairs // BLOCK, BLOCK // 8, 8, ROWS)
    peak = jnp.max(jnp.abs(values), axis=(2, 3))
    exponent = (jax.lax.bitcast_convert_type(peak, jnp.uint32) >> 23).astype(jnp.int32)
    scales = jnp.where(peak > 0, jnp.maximum(exponent - 2, 0), 127)
    power = jax.lax.bitcast_convert_type((254 - scales) << 23, jnp.float32)
    magnitude = jnp.abs(values) * power[:, :, None, None]
    code = jnp.where(magnitude < 2, jnp.rint(2 * magnitude), jnp.rint(magnitude) + 2)
    code = jnp.where(magnitude < 4, code, jnp.minimum(jnp.rint(magnitude / 2) + 4, 7)).astype(jnp.uint32)
    code |= jnp.signbit(values).astype(jnp.uint32) << 3
    places = 4 * jnp.arange(8, dtype=jnp.uint32)[None, None, None, :, None]
    words = jnp.sum(code << places, axis=3, dtype=jnp.uint32)
    return words.reshape(count, -1, ROWS), scales.astype(jnp.uint8)


def as_matrix(weight: jax.Array | PackedMatrix) -> np.ndarray:
    """Return the weight [inputs, outputs] on the host."""
    return unpack_floats(weight).T if isinstance(weight, PackedMatrix) else np.asarray(weight)


def take_outputs(weight: jax.Array | PackedMatrix, outputs: np.ndarray) -> jax.Array | PackedMatrix:
    """Select outputs of a weight, in this order."""
    if isinstance(weight, PackedMatrix):
        return packed_matrix(pack_floats(unpack_floats(weight)[outputs]), weight.inputs, len(outputs))
    return weight[:, outputs]


def arrange(rows: np.ndarray, dtype: DTypeLike, implementation: Implementation | None) -> jax.Array | PackedMatrix:
    """Lay out a checkpoint's matrix [outputs, inputs] for `linear` with activations of `dtype`.

    Returns [inputs, outputs] in that dtype; for "native" a packed matrix, in which bfloat16 stays bfloat16.
    """
    if implementation == "native":
        outputs, inputs = rows.shape
        return packed_matrix(pack_floats(rows if rows.dtype == BFLOAT16 else rows.astype(dtype)), inputs, outputs)
    return to_device(aligned_copy(rows.T, dtype))


def embedding_width(width: int, implementation: Implementation | None) -> int:
    """Return the width of a table's rows in memory: for "tpu" whole lanes.

    Else a TPU would put tokens along its lanes, to pad less, and every gather of several rows would copy the table.
    """
    return width + -width % LANES if implementation == "tpu" else width


def arrange_embedding(table: np.ndarray, dtype: DTypeLike, implementation: Implementation | None) -> jax.Array:
    """Lay out a table for `embed`: in `dtype`; for "native", as bfloat16 bits if it is stored or requested so.

    For "tpu" rows are padded (`embedding_width`). The result may share the table's memory: do not write to it
    afterwards.
    """
    if implementation == "tpu":
        table = np.pad(table, ((0, 0), (0, embedding_width(table.shape[1], implementation) - table.shape[1])))
    bits = implementation == "native" and BFLOAT16 in (table.dtype, np.dtype(dtype))
    # aligned, because the device copies an unaligned array later and holds both copies until then
    ready = as_aligned(table, BFLOAT16 if bits else dtype)
    return to_device(ready.view(np.uint16) if bits else ready)
