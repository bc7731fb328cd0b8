"""The mixture-of-experts op in the CUDA kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from peagle.base.errors import InputError
from peagle.ops import cuda, native
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


def takes_tiled(width: int, expert_width: int, num_experts: int, top_k: int) -> bool:
    """Whether the kernels for Hopper GPUs take experts of these shapes."""
    widths_fit = width == expert_width == calls.TILED_WIDTH
    return widths_fit and top_k == calls.TILED_TOP_K and num_experts <= calls.TILED_EXPERTS and num_experts % 8 == 0


def tiled_experts(experts: PackedExperts, num_experts: int, top_k: int) -> PackedExperts | TiledExperts:
    """Lay out a layer's experts for a Hopper GPU; unchanged if its kernels do not run here or do not take them.

    num_experts: of the router; `experts` may be a rank's part of them. Raises InputError for a part with scales that
    the layout has no room for, because all ranks need one layout.
    """
    (here, outputs), width = experts.gate_up_bias.shape, experts.down_bias.shape[1]
    shapes_fit = takes_tiled(width, outputs // 2, num_experts, top_k)
    if not shapes_fit or experts.gate_up_bias.dtype != jnp.bfloat16 or not cuda.has_tiles():
        return experts
    largest = max(int(scales.max()) for scales in (experts.gate_up_scales, experts.down_scales))
    if largest <= LARGEST_SCALE:
        return tile(experts)
    if here == num_experts:
        return experts
    raise InputError(
        f"an expert has an MXFP4 scale of {largest}; expected up to {LARGEST_SCALE} for the kernels of Hopper GPUs "
        f"over several devices; set {native.VARIABLE}={native.XLA}"
    )


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
    first: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "T D"], BFloat16[Array, "_ D"]]:
    """Compute `expert_block` on a Hopper GPU, for any T. first: as in `calls.expert_block`."""
    gate_up, down = (experts.gate_up, experts.gate_up_bias), (experts.down, experts.down_bias)

    def some(rows: slice) -> tuple[jax.Array, jax.Array]:
        at = None if positions is None else positions[rows]
        routing = norm, router, router_bias, at
        return calls.expert_block(x[rows], *routing, gate_up, down, next_norm, limit=limit, first=first)

    parts = [some(slice(start, start + calls.MAX_ROWS)) for start in range(0, x.shape[0], calls.MAX_ROWS)]
    y, normalised = (rows[0] if len(rows) == 1 else jnp.concatenate(rows) for rows in zip(*parts, strict=True))
    return y, normalised
