"""The op in the GPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float

from peagle.ops import cuda
from peagle.ops.expert_matmul.routing import route_top_k
from peagle.ops.expert_matmul.weights import PackedExperts


def takes(x: jax.Array, experts: PackedExperts) -> bool:
    """Whether the kernels are for such operands, and run here."""
    if not cuda.available():
        return False
    return x.shape[0] <= cuda.MAX_ROWS and x.dtype == experts.gate_up_bias.dtype == jnp.bfloat16


def routed(
    x: BFloat16[Array, "T D"], router_logits: Float[Array, "T E"], experts: PackedExperts, top_k: int, limit: float
) -> BFloat16[Array, "T D"]:
    """See `expert_mlp`. Each selected expert is read once, for all rows that selected it, and a row's bits do not
    depend on the other rows. T is at most cuda.MAX_ROWS."""
    ids, weights = route_top_k(router_logits, top_k)
    rows, hidden = x.shape[0], experts.gate_up_bias.shape[1] // 2
    out, _ = cuda.call(
        "experts",
        (
            jax.ShapeDtypeStruct((rows, top_k, x.shape[1]), jnp.float32),
            jax.ShapeDtypeStruct((rows * top_k, hidden), jnp.bfloat16),
        ),
        x,
        ids,
        experts.gate_up_blocks,
        experts.gate_up_scales,
        experts.gate_up_bias,
        experts.down_blocks,
        experts.down_scales,
        experts.down_bias,
        limit=np.float32(limit),
    )
    return jnp.sum(out * weights[:, :, None], axis=1).astype(x.dtype)
