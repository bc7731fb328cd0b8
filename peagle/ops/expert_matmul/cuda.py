"""The mixture-of-experts op in the CUDA kernels."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from peagle.ops import cuda
from peagle.ops.collectives import Held
from peagle.ops.cuda import calls
from peagle.ops.expert_matmul.routing import route_top_k
from peagle.ops.expert_matmul.weights import PackedExperts


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
