"""The public entries: choose a form by the layout and the number of rows."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle.ops.collectives import Held, Ranks
from peagle.ops.cuda import not_taken
from peagle.ops.cuda.calls import MAX_ROWS, TILED_TOP_K
from peagle.ops.errors import InputError
from peagle.ops.expert_matmul import cuda, native, reference
from peagle.ops.expert_matmul.weights import (
    ExpandedExperts,
    Experts,
    FusedExperts,
    NativeExperts,
    PackedExperts,
    TiledExperts,
)
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix, linear
from peagle.ops.norm import Norm, rms_norm

BLOCKED_ROWS = 256  # an estimate: below it, reading experts once each is as fast as by blocks, which read them twice
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
    next_norm: Norm | None = None,
    implementation: Implementation | None = None,
    ranks: Ranks | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"] | None]:
    """Compute the second half of a layer: y = x + expert_mlp of norm(x), routed by its router logits.

    Returns (y, next_norm(y) if the kernel computes it in passing, else None).

    Rows of negative position are inactive, as in `linear`. Only the native kernels take NativeExperts, and only those
    for Hopper GPUs TiledExperts. ranks: the experts are this rank's part; the ranks' outputs are summed, in float32,
    before x is added.

    Raises InputError if the named implementation does not run here or does not take these operands.
    """
    rows = x.reshape(-1, x.shape[-1])
    of_rows = None if positions is None else positions.reshape(-1)
    if isinstance(experts, TiledExperts):
        if implementation not in (None, "cuda"):
            raise InputError(f"the weights are laid out for the CUDA kernels; load them for {implementation!r}")
        assert not isinstance(router, PackedMatrix)
        assert (ranks, top_k) == (None, TILED_TOP_K)
        y, normalised = cuda.tiled(rows, norm, router, router_bias, experts, swiglu_limit, of_rows, next_norm)
        return y.reshape(x.shape), None if next_norm is None else normalised.reshape(x.shape)
    held = None if ranks is None else ranks.held(experts.num_experts)
    if isinstance(experts, NativeExperts):
        if implementation not in (None, "native"):
            raise InputError(f"the weights are packed for the native kernels; load them for {implementation!r}")
        assert isinstance(router, PackedMatrix)
        operands = (rows, norm, router, router_bias, experts, top_k, swiglu_limit, positions)
        if ranks is None:
            return native.routed(*operands).reshape(x.shape), None
        out = native.routed(*operands, held=held, residual=False, dtype=jnp.float32)
    else:
        rows = rms_norm(rows, norm.weight, norm.epsilon)
        logits = linear(rows, router, router_bias, implementation=implementation)
        dtype = x.dtype if ranks is None else jnp.dtype(jnp.float32)
        out = expert_mlp(
            rows, logits, experts, top_k, swiglu_limit, of_rows, implementation=implementation, held=held, dtype=dtype
        )
    if ranks is None:
        return x + out.reshape(x.shape), None
    return (x.astype(jnp.float32) + ranks.reduce(out.reshape(x.shape))).astype(x.dtype), None


def expert_mlp(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: Experts,
    top_k: int,
    swiglu_limit: float,
    positions: Int[Array, " T"] | None = None,
    *,
    implementation: Implementation | None = None,
    held: Held | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """Sum softmax(selected logits)_e * (down_e(swiglu(gate_up_e(x))) + bias_e) over the top_k selected experts e.

    All layouts give the same function, in `dtype` (default: x's), except NativeExperts and TiledExperts, which only
    `expert_block` takes. held: sum only over these experts, the ones in `experts`. Rows of negative position are
    inactive, as in `linear`; the CUDA kernels skip them, and XLA on CPU if they are many. Raises InputError as
    `expert_block` does.
    """
    if isinstance(experts, NativeExperts | TiledExperts):
        raise TypeError("the kernels compute these experts with their norm and router; call expert_block")
    if implementation == "native":
        raise InputError("the weights are not packed for the native kernels; load them for 'native'")
    if implementation == "cuda":
        if not isinstance(experts, PackedExperts) or not cuda.takes(x, experts):
            raise not_taken(f"MXFP4 experts, bfloat16 activations and up to {MAX_ROWS} rows")
        return cuda.routed(x, router_logits, experts, top_k, swiglu_limit, positions, held=held, dtype=dtype)
    if isinstance(experts, FusedExperts):
        return reference.fused(x, router_logits, experts, top_k, swiglu_limit, held=held, dtype=dtype)
    first = None if held is None else held.first
    elsewhere = functools.partial(_elsewhere, top_k=top_k, limit=swiglu_limit, dtype=dtype, positions=positions)
    on_gpu = functools.partial(
        _on_gpu, top_k=top_k, limit=swiglu_limit, dtype=dtype, positions=positions, implementation=implementation
    )
    out: jax.Array = jax.lax.platform_dependent(x, router_logits, experts, first, cuda=on_gpu, default=elsewhere)
    return out


def _on_gpu(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts | ExpandedExperts,
    first: Int[Array, ""] | None,
    *,
    top_k: int,
    limit: float,
    dtype: DTypeLike | None,
    positions: Int[Array, " T"] | None,
    implementation: Implementation | None,
) -> Float[Array, "T D"]:
    held = None if first is None else Held(first, experts.num_experts)
    if isinstance(experts, PackedExperts):
        if implementation != "xla" and cuda.takes(x, experts):
            return cuda.routed(x, router_logits, experts, top_k, limit, positions, held=held, dtype=dtype)
        if x.shape[0] <= DECODE_ROWS:
            return reference.all_pairs(x, router_logits, experts, top_k, limit, held=held, dtype=dtype)
    # Not `grouped`: a GPU waits for the host at each turn of a loop of dynamic length, and there would be hundreds.
    if _few(x, experts, top_k):
        form = reference.selected
    elif x.shape[0] >= BLOCKED_ROWS and 2 * top_k < experts.num_experts:
        form = reference.in_blocks
    else:
        form = reference.each_expert_once
    return form(x, router_logits, experts, top_k, limit, held=held, dtype=dtype)


def _elsewhere(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts | ExpandedExperts,
    first: Int[Array, ""] | None,
    *,
    top_k: int,
    limit: float,
    dtype: DTypeLike | None,
    positions: Int[Array, " T"] | None,
) -> Float[Array, "T D"]:
    held = None if first is None else Held(first, experts.num_experts)
    if _few(x, experts, top_k):
        return reference.selected(x, router_logits, experts, top_k, limit, held=held, dtype=dtype)
    return reference.grouped(x, router_logits, experts, top_k, limit, positions, held=held, dtype=dtype)


def _few(x: Float[Array, "T D"], experts: PackedExperts | ExpandedExperts, top_k: int) -> bool:
    """Check if rows are so few that dequantising an expert per choice costs less than sorting choices by expert."""
    return x.shape[0] * top_k < experts.num_experts
