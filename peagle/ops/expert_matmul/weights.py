"""The six layouts of a layer's expert weights. E experts, D model width, F expert width.

    PackedExperts    MXFP4 blocks and scales as the checkpoint has them: smallest memory
    ExpandedExperts  one dense matrix per expert: a decoded token reads only the experts it selected
    FusedExperts     all experts side by side in two matrices: two plain matmuls, for models that select most experts
    NativeExperts    packed matrices for the native CPU kernels, in MXFP4, bfloat16 or float32: fastest on CPU
    TiledExperts     MXFP4 for the kernels of Hopper GPUs: fastest there, and as small as PackedExperts
    TpuExperts       MXFP4 for the kernels of TPUs

FusedExperts and ExpandedExperts hold all gate columns, then all up columns. Checkpoints and PackedExperts interleave
them: even rows are gates, odd rows are ups.
"""

from typing import TypeAlias

import flax.struct
import jax

from peagle.ops.linear.packed import PackedMatrix


class _Experts:
    down_bias: jax.Array  # [E, D], of TpuExperts [E, 1, D']

    @property
    def num_experts(self) -> int:
        return self.down_bias.shape[0]


@flax.struct.dataclass
class PackedExperts(_Experts):
    gate_up_blocks: jax.Array  # [E, 2F, D/32, 16] uint8
    gate_up_scales: jax.Array  # [E, 2F, D/32] uint8
    gate_up_bias: jax.Array  # [E, 2F]
    down_blocks: jax.Array  # [E, D, F/32, 16] uint8
    down_scales: jax.Array  # [E, D, F/32] uint8
    down_bias: jax.Array  # [E, D]


@flax.struct.dataclass
class ExpandedExperts(_Experts):
    gate_up: jax.Array  # [E, D, 2F]
    gate_up_bias: jax.Array  # [E, 2F]
    down: jax.Array  # [E, F, D]
    down_bias: jax.Array  # [E, D]


@flax.struct.dataclass
class FusedExperts(_Experts):
    gate_up: jax.Array  # [D, 2EF]
    gate_up_bias: jax.Array  # [2EF]
    down: jax.Array  # [EF, D]
    down_bias: jax.Array  # [E, D]


@flax.struct.dataclass
class NativeExperts(_Experts):
    gate_up: PackedMatrix  # E matrices; a panel of gates, then the panel of the same ups, and so on
    gate_up_bias: jax.Array  # [E, 2 * 16 * ceil(F/16)] float32, in the same order
    down: PackedMatrix  # E matrices
    down_bias: jax.Array  # [E, D] float32
    hidden: int = flax.struct.field(pytree_node=False)  # F


@flax.struct.dataclass
class TiledExperts(_Experts):
    gate_up: jax.Array  # [E, 2F/192, D/64, 3, 544] uint32: peagle.ops.cuda.pack
    gate_up_bias: jax.Array  # [E, 2F] bfloat16
    down: jax.Array  # [E, D/192, F/64, 3, 544] uint32
    down_bias: jax.Array  # [E, D] bfloat16


@flax.struct.dataclass
class TpuExperts(_Experts):
    """Inputs are in parts of k, which a kernel copies one by one; outputs are padded to F' and D', multiples of 128.

    A word has eight inputs of one output (peagle.ops.expert_matmul.tpu).
    """

    gate_up: jax.Array  # [E, D/k, 2, k/8, F'] uint32: gate, up
    gate_up_scales: jax.Array  # [E, D/k, 2, 32, F'] uint8: k/32 rows and padding
    gate_up_bias: jax.Array  # [E, 1, 2, F'] float32
    down: jax.Array  # [E, F/k, k/8, D'] uint32
    down_scales: jax.Array  # [E, F/k, 32, D'] uint8
    down_bias: jax.Array  # [E, 1, D'] float32


Experts: TypeAlias = PackedExperts | ExpandedExperts | FusedExperts | NativeExperts | TiledExperts | TpuExperts
