"""The public entry: picks the form that suits the layout and the number of rows."""

from jaxtyping import Array, Float

from peagle.ops.expert_matmul import reference
from peagle.ops.expert_matmul.weights import Experts, FusedExperts


def expert_mlp(
    x: Float[Array, "T D"], router_logits: Float[Array, "T E"], experts: Experts, top_k: int, swiglu_limit: float
) -> Float[Array, "T D"]:
    """sum over the top_k selected experts e of softmax(selected logits)_e * (down_e(swiglu(gate_up_e(x))) + bias_e).

    Whatever the layout of the weights, the result is the same function, in x's dtype.
    """
    if isinstance(experts, FusedExperts):
        return reference.fused(x, router_logits, experts, top_k, swiglu_limit)
    # Few rows touch few experts: read just those. Many rows touch all: read each expert once for all rows.
    if x.shape[0] * top_k < experts.num_experts:
        return reference.selected(x, router_logits, experts, top_k, swiglu_limit)
    return reference.each_expert_once(x, router_logits, experts, top_k, swiglu_limit)
