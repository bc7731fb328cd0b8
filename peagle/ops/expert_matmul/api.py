"""The public entry: picks the form that suits the layout and the number of rows."""

import functools

import jax
from jaxtyping import Array, Float, Int

from peagle.ops.cuda.calls import MAX_ROWS
from peagle.ops.expert_matmul import cuda, native, reference
from peagle.ops.expert_matmul.weights import ExpandedExperts, Experts, FusedExperts, PackedExperts, PanelExperts
from peagle.ops.linear import Panels, linear
from peagle.ops.norm import Norm, rms_norm

DECODE_ROWS = 16  # as wide as verify passes get: one sequence with K = 15, or a batch of small ones


def expert_block(
    x: Float[Array, "*rows D"],
    norm: Norm,
    router: jax.Array | Panels,
    router_bias: Float[Array, " E"],
    experts: Experts,
    top_k: int,
    swiglu_limit: float,
    positions: Int[Array, "*rows"] | None = None,
    *,
    xla: bool = False,
) -> Float[Array, "*rows D"]:
    """x + expert_mlp of norm(x), routed by its router logits: the second half of a layer. Rows of negative position are
    inactive, as in `linear`. `xla`: no kernels on GPUs."""
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(experts, PanelExperts):
        assert isinstance(router, Panels)
        out = native.routed(rows, norm, router, router_bias, experts, top_k, swiglu_limit, positions)
        return out.reshape(x.shape)
    rows = rms_norm(rows, norm.weight, norm.epsilon)
    out = expert_mlp(rows, linear(rows, router, router_bias), experts, top_k, swiglu_limit, xla=xla)
    return x + out.reshape(x.shape)


def expert_mlp(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: Experts,
    top_k: int,
    swiglu_limit: float,
    *,
    xla: bool = False,
) -> Float[Array, "T D"]:
    """sum over the top_k selected experts e of softmax(selected logits)_e * (down_e(swiglu(gate_up_e(x))) + bias_e).

    Whatever XLA layout the weights are in, the result is the same function, in x's dtype. Panels are for
    `expert_block`.
    """
    if isinstance(experts, PanelExperts):
        raise TypeError("experts in panels are computed with their norm and router: see expert_block")
    if isinstance(experts, FusedExperts):
        return reference.fused(x, router_logits, experts, top_k, swiglu_limit)
    if isinstance(experts, PackedExperts) and x.shape[0] <= MAX_ROWS:
        return jax.lax.platform_dependent(
            x,
            router_logits,
            experts,
            cuda=functools.partial(_on_gpu, top_k=top_k, limit=swiglu_limit, xla=xla),
            default=functools.partial(_visit, top_k=top_k, limit=swiglu_limit),
        )
    return _visit(x, router_logits, experts, top_k, swiglu_limit)


def _on_gpu(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts,
    top_k: int,
    limit: float,
    xla: bool = False,
) -> Float[Array, "T D"]:
    if not xla and cuda.takes(x, experts):
        return cuda.routed(x, router_logits, experts, top_k, limit)
    form = reference.all_pairs if x.shape[0] <= DECODE_ROWS else _visit
    return form(x, router_logits, experts, top_k, limit)


def _visit(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts | ExpandedExperts,
    top_k: int,
    limit: float,
) -> Float[Array, "T D"]:
    # Few rows touch few experts: read just those. Many rows touch all: read each expert once for all rows.
    if x.shape[0] * top_k < experts.num_experts:
        return reference.selected(x, router_logits, experts, top_k, limit)
    return reference.each_expert_once(x, router_logits, experts, top_k, limit)
