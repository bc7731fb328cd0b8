"""Shard a matrix's outputs over the devices of a mesh. Each multiplies by its part; all get every output."""

from typing import Any

import flax.struct
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peagle.ops.linear.packed import ROWS, PackedMatrix, num_panels


@flax.struct.dataclass
class SplitMatrix:
    """A sharded matrix. Leaves of `parts` are [rank, *local shape], padded with zero outputs. mesh: of one axis."""

    parts: jax.Array | PackedMatrix
    outputs: int = flax.struct.field(pytree_node=False)
    mesh: Mesh = flax.struct.field(pytree_node=False)

    @property
    def axis(self) -> str:
        return str(self.mesh.axis_names[0])


def split_outputs(weight: jax.Array | PackedMatrix, mesh: Mesh) -> SplitMatrix:
    """Shard the outputs of a weight over the devices of a mesh; those of a packed matrix in whole panels.

    Example: 101 outputs over 4 devices are 26, 26, 26 and 23, or, packed, 32, 32, 32 and 5.
    """
    if not isinstance(weight, PackedMatrix):
        return SplitMatrix(_split(weight, 1, -(-weight.shape[1] // mesh.size), mesh), weight.shape[1], mesh)
    panels = -(-num_panels(weight.outputs) // mesh.size)
    data, scales = (None if leaf is None else _split(leaf, 0, panels, mesh) for leaf in (weight.data, weight.scales))
    assert data is not None
    return SplitMatrix(PackedMatrix(data, scales, weight.inputs, panels * ROWS), weight.outputs, mesh)


def _split(leaf: jax.Array, axis: int, width: int, mesh: Mesh) -> jax.Array:
    """Put `width` entries of an axis on each device; pad the last with zeros."""
    whole = np.asarray(leaf).swapaxes(0, axis)

    def part(index: Any) -> np.ndarray:
        start = (index[0].start or 0) * width
        entries = whole[start : start + width]
        filled = np.pad(entries, [(0, width - len(entries)), *[(0, 0)] * (whole.ndim - 1)])
        return np.ascontiguousarray(filled.swapaxes(0, axis))[None]

    shape = list(leaf.shape)
    shape[axis] = width
    return jax.make_array_from_callback(
        (mesh.size, *shape), NamedSharding(mesh, PartitionSpec(mesh.axis_names[0])), part
    )
