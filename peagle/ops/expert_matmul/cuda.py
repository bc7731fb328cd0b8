"""The mixture-of-experts op in the CUDA kernels."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float

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
    *,
    held: Held | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """See `expert_mlp`. T is at most calls.MAX_ROWS.

    Each selected expert is read once for all rows that selected it. A row's bits do not depend on the other rows.
    """
    ids, weights = route_top_k(router_logits, top_k, held)
    ids = jnp.minimum(ids, experts.num_experts - 1)  # another rank's expert has weight 0: any will do
    gate_up = experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias
    down = experts.down_blocks, experts.down_scales, experts.down_bias
    out = calls.experts(x, ids, gate_up, down, limit=limit)
    return jnp.sum(out * weights[:, :, None], axis=1).astype(dtype or x.dtype)
