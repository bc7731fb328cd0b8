"""The public entries: pick the form that suits the layout and the number of rows."""

import functools

import jax
from jaxtyping import Array, Float, Int

from peagle.ops.cuda import not_taken
from peagle.ops.cuda.calls import MAX_ROWS
from peagle.ops.errors import InputError
from peagle.ops.expert_matmul import cuda, native, reference
from peagle.ops.expert_matmul.weights import ExpandedExperts, Experts, FusedExperts, NativeExperts, PackedExperts
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix, linear
from peagle.ops.norm import Norm, rms_norm

DECODE_ROWS = 16  # the widest verify pass: one sequence with K = 15, or a batch with smaller K


def expert_block(
    x: Float[Array, "*rows D"],
    norm: Norm,
    router: jax.Array | PackedMatrix,
    router_bias: Float[Array, " E"],
    experts: Experts,
    top_k: int,
    swiglu_limit: float,
    positions: Int[Array, "*rows"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*rows D"]:
    """Compute the second half of a layer: x + expert_mlp of norm(x), routed by its router logits.

    Rows of negative position are inactive, as in `linear`. NativeExperts run in the native kernels, and nothing else
    does. Raises InputError if the named implementation does not run here or does not take these operands.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(experts, NativeExperts):
        if implementation not in (None, "native"):
            raise InputError(f"the weights are packed for the native kernels; load them for {implementation!r}")
        assert isinstance(router, PackedMatrix)
        out = native.routed(rows, norm, router, router_bias, experts, top_k, swiglu_limit, positions)
        return out.reshape(x.shape)
    rows = rms_norm(rows, norm.weight, norm.epsilon)
    logits = linear(rows, router, router_bias)
    out = expert_mlp(rows, logits, experts, top_k, swiglu_limit, implementation=implementation)
    return x + out.reshape(x.shape)


def expert_mlp(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: Experts,
    top_k: int,
    swiglu_limit: float,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T D"]:
    """Sum softmax(selected logits)_e * (down_e(swiglu(gate_up_e(x))) + bias_e) over the top_k selected experts e.

    All layouts but NativeExperts, which only `expert_block` takes, give the same function, in x's dtype. Raises
    InputError as `expert_block` does.
    """
    if isinstance(experts, NativeExperts):
        raise TypeError("the native kernels compute experts with their norm and router; call expert_block")
    if implementation == "native":
        raise InputError("the weights are not packed for the native kernels; load them for 'native'")
    if implementation == "cuda":
        if not isinstance(experts, PackedExperts) or not cuda.takes(x, experts):
            raise not_taken(f"MXFP4 experts, bfloat16 activations and up to {MAX_ROWS} rows")
        return cuda.routed(x, router_logits, experts, top_k, swiglu_limit)
    if isinstance(experts, FusedExperts):
        return reference.fused(x, router_logits, experts, top_k, swiglu_limit)
    if isinstance(experts, PackedExperts) and x.shape[0] <= MAX_ROWS:
        return jax.lax.platform_dependent(
            x,
            router_logits,
            experts,
            cuda=functools.partial(_on_gpu, top_k=top_k, limit=swiglu_limit, implementation=implementation),
            default=functools.partial(_visit, top_k=top_k, limit=swiglu_limit),
        )
    return _visit(x, router_logits, experts, top_k, swiglu_limit)


def _on_gpu(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts,
    top_k: int,
    limit: float,
    implementation: Implementation | None = None,
) -> Float[Array, "T D"]:
    if implementation != "xla" and cuda.takes(x, experts):
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
    # Few rows select few experts: read just those. Many rows select all: read each expert once for all rows.
    if x.shape[0] * top_k < experts.num_experts:
        return reference.selected(x, router_logits, experts, top_k, limit)
    return reference.each_expert_once(x, router_logits, experts, top_k, limit)
