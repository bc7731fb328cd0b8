"""The mixture-of-experts op in the CUDA kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from peagle.ops import cuda
from peagle.ops.cuda import calls
from peagle.ops.cuda.pack import LARGEST_SCALE, pack
from peagle.ops.expert_matmul.routing import Choices, combine
from peagle.ops.expert_matmul.weights import PackedExperts, TiledExperts
from peagle.ops.norm import Norm


def supports(x: jax.Array, experts: PackedExperts) -> bool:
    """Check that the kernels run here and take such operands."""
    if not cuda.available():
        return False
    return x.shape[0] <= calls.MAX_ROWS and x.dtype == experts.gate_up_bias.dtype == jnp.bfloat16


def routed(x: BFloat16[Array, "T D"], choices: Choices, experts: PackedExperts, limit: float) -> Float[Array, "T D"]:
    """Compute a `reference.Form` in float32. T is at most calls.MAX_ROWS.

    Experts that no id selects are not read. A row's bits depend neither on the other rows nor on their number.
    """
    gate_up = experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias
    down = experts.down_blocks, experts.down_scales, experts.down_bias
    outputs = calls.experts(x, choices.ids, gate_up, down, limit=limit)
    return combine(outputs, choices, experts.num_experts)


def tiled_experts(experts: PackedExperts, top_k: int) -> PackedExperts | TiledExperts:
    """Lay out a layer's experts for a Hopper GPU; unchanged if its kernels do not run here or do not take them."""
    (num_experts, outputs), width = experts.gate_up_bias.shape, experts.down_bias.shape[1]
    supported = (
        (outputs, width, top_k) == (2 * calls.TILED_WIDTH, calls.TILED_WIDTH, calls.TILED_TOP_K)
        and num_experts <= calls.TILED_EXPERTS
        and num_experts % 8 == 0
        and experts.gate_up_bias.dtype == jnp.bfloat16
        and cuda.has_tiles()
        and max(int(scales.max()) for scales in (experts.gate_up_scales, experts.down_scales)) <= LARGEST_SCALE
    )
    return tile(experts) if supported else experts


def tile(experts: PackedExperts) -> TiledExperts:
    """Lay out a layer's experts for a Hopper GPU, whose kernels must take them (`tiled_experts`)."""
    return TiledExperts(
        _pack(experts.gate_up_blocks, experts.gate_up_scales),
        experts.gate_up_bias,
        _pack(experts.down_blocks, experts.down_scales),
        experts.down_bias,
    )


_pack = jax.jit(pack)


def tiled(
    x: BFloat16[Array, "T D"],
    norm: Norm,
    router: BFloat16[Array, "D E"],
    router_bias: BFloat16[Array, " E"],
    experts: TiledExperts,
    limit: float,
    positions: Int[Array, " T"] | None = None,
    next_norm: Norm | None = None,
) -> tuple[BFloat16[Array, "T D"], BFloat16[Array, "_ D"]]:
    """Compute `expert_block` on a Hopper GPU, for any T."""
    gate_up, down = (experts.gate_up, experts.gate_up_bias), (experts.down, experts.down_bias)

    def some(rows: slice) -> tuple[jax.Array, jax.Array]:
        at = None if positions is None else positions[rows]
        return calls.expert_block(x[rows], norm, router, router_bias, at, gate_up, down, next_norm, limit=limit)

    parts = [some(slice(start, start + calls.MAX_ROWS)) for start in range(0, x.shape[0], calls.MAX_ROWS)]
    y, normalised = (rows[0] if len(rows) == 1 else jnp.concatenate(rows) for rows in zip(*parts, strict=True))
    return y, normalised
