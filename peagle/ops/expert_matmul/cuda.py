"""The mixture-of-experts op in the CUDA kernels."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from peagle.ops import cuda
from peagle.ops.collectives import Held
from peagle.ops.cuda import calls
from peagle.ops.cuda.pack import LARGEST_SCALE, pack
from peagle.ops.expert_matmul.routing import route_top_k
from peagle.ops.expert_matmul.weights import PackedExperts, TiledExperts
from peagle.ops.norm import Norm


def takes(x: jax.Array, experts: PackedExperts) -> bool:
    """Check that the kernels run here and take such operands."""
    if not cuda.available():
        return False
    return x.shape[0] <= calls.MAX_ROWS and x.dtype == experts.gate_up_bias.dtype == jnp.bfloat16


def routed(
    x: BFloat16[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts,
    top_k: int,
    limit: float,
    positions: Int[Array, " T"] | None = None,
    *,
    held: Held | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """See `expert_mlp`. T is at most calls.MAX_ROWS. The output of an inactive row is 0.

    Experts that only inactive rows or other ranks' choices select are not read. A row's bits depend neither on the
    other rows nor on their number.
    """
    ids, weights = route_top_k(router_logits, top_k, held)
    if positions is not None:
        ids = jnp.where(positions[:, None] >= 0, ids, experts.num_experts)
    gate_up = experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias
    down = experts.down_blocks, experts.down_scales, experts.down_bias
    out = calls.experts(x, ids, gate_up, down, limit=limit)
    weighted = jnp.where((ids < experts.num_experts)[:, :, None], out * weights[:, :, None], 0.0)
    return jnp.sum(weighted, axis=1).astype(dtype or x.dtype)


def tile(experts: PackedExperts, top_k: int) -> PackedExperts | TiledExperts:
    """Lay out a layer's experts for a Hopper GPU; unchanged if its kernels do not run here or do not take them."""
    if not takes_tiles(experts, top_k):
        return experts
    if max(int(scales.max()) for scales in (experts.gate_up_scales, experts.down_scales)) > LARGEST_SCALE:
        return experts
    return TiledExperts(
        _pack(experts.gate_up_blocks, experts.gate_up_scales),
        experts.gate_up_bias,
        _pack(experts.down_blocks, experts.down_scales),
        experts.down_bias,
    )


_pack = jax.jit(pack)


def takes_tiles(experts: PackedExperts, top_k: int) -> bool:
    """Check that the kernels for Hopper GPUs run here and take experts of such shapes."""
    (num_experts, outputs), width = experts.gate_up_bias.shape, experts.down_bias.shape[1]
    return (
        (outputs, width, top_k) == (2 * calls.TILED_WIDTH, calls.TILED_WIDTH, calls.TILED_TOP_K)
        and num_experts <= calls.TILED_EXPERTS
        and num_experts % 8 == 0
        and experts.gate_up_bias.dtype == jnp.bfloat16
        and cuda.has_tiles()
    )


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
