"""The public entries: choose an implementation by the layout and the number of rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle.base.errors import InputError
from peagle.ops.collectives import LocalExperts, Ranks
from peagle.ops.cuda import unsupported
from peagle.ops.cuda.calls import MAX_ROWS, TILED_TOP_K
from peagle.ops.expert_matmul import cuda, native, reference, tpu
from peagle.ops.expert_matmul.routing import Choices, route_dense, route_top_k
from peagle.ops.expert_matmul.weights import (
    Experts,
    FusedExperts,
    NativeExperts,
    PackedExperts,
    TiledExperts,
    TpuExperts,
)
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix, linear
from peagle.ops.norm import Norm, rms_norm
from peagle.ops.tpu import pad_rows

BLOCKED_ROWS = 256  # estimated: with fewer rows, in_blocks, which reads an expert twice, gains nothing on a GPU
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

    Rows of negative position are inactive, as in `linear`. NativeExperts need the native kernels, TiledExperts those
    for Hopper GPUs, TpuExperts those for TPUs. ranks: `experts` is this rank's part; the ranks' outputs are summed, in
    float32, before x is added.

    Raises InputError if the named implementation does not run here or does not take these operands.
    """
    rows = x.reshape(-1, x.shape[-1])
    positions = None if positions is None else positions.reshape(-1)
    local = None if ranks is None else ranks.local_experts(experts.num_experts)
    if isinstance(experts, TiledExperts):
        if implementation not in (None, "cuda"):
            raise InputError(f"the weights are laid out for the CUDA kernels; load them for {implementation!r}")
        assert not isinstance(router, PackedMatrix)
        assert top_k == TILED_TOP_K
        tiled = functools.partial(cuda.tiled, rows, norm, router, router_bias, experts, swiglu_limit, positions)
        if ranks is None:
            y, normalised = tiled(next_norm)
            return y.reshape(x.shape), None if next_norm is None else normalised.reshape(x.shape)
        out, _ = tiled(first=jnp.int32(0) if local is None else local.first)
    elif isinstance(experts, NativeExperts):
        if implementation not in (None, "native"):
            raise InputError(f"the weights are packed for the native kernels; load them for {implementation!r}")
        assert isinstance(router, PackedMatrix)
        operands = (rows, norm, router, router_bias, experts, top_k, swiglu_limit, positions)
        if ranks is None:
            return native.routed(*operands).reshape(x.shape), None
        out = native.routed(*operands, local=local, residual=False, dtype=jnp.float32)
    else:
        count = len(rows)
        if isinstance(experts, TpuExperts):  # the norm, too, computes whole tiles
            rows = pad_rows(rows)
        rows = rms_norm(rows, norm.weight, norm.epsilon)
        logits = linear(rows, router, router_bias, implementation=implementation)
        rows, logits = rows[:count], logits[:count]
        dtype = x.dtype if ranks is None else jnp.dtype(jnp.float32)
        options: Any = {"implementation": implementation, "local": local, "dtype": dtype}
        out = expert_mlp(rows, logits, experts, top_k, swiglu_limit, positions, **options)
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
    local: LocalExperts | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """Sum softmax(selected logits)_e * (down_e(swiglu(gate_up_e(x))) + bias_e) over the top_k selected experts e.

    All layouts give the same function, in `dtype` (default: x's), except NativeExperts and TiledExperts, which only
    `expert_block` takes. TpuExperts take bfloat16. local: `experts` holds only these; sum over them alone. Rows of
    negative position are inactive, as in `linear`; the CUDA kernels skip them, and XLA on CPU if they are many. Raises
    InputError as `expert_block` does.
    """
    if isinstance(experts, NativeExperts | TiledExperts):
        raise TypeError("the kernels compute these experts with their norm and router; call expert_block")
    if implementation == "native":
        raise InputError("the weights are not packed for the native kernels; load them for 'native'")
    in_cuda = implementation != "xla" and isinstance(experts, PackedExperts) and cuda.supports(x, experts)
    if implementation == "cuda" and not in_cuda:
        raise unsupported(f"MXFP4 experts, bfloat16 activations and up to {MAX_ROWS} rows")
    dtype = x.dtype if dtype is None else dtype
    if isinstance(experts, FusedExperts):
        return reference.fused(x, route_dense(router_logits, top_k, local), experts, swiglu_limit).astype(dtype)
    choices = route_top_k(router_logits, top_k, local, positions)

    def run(form: reference.Form, x: jax.Array, choices: Choices, experts: Any) -> jax.Array:
        return form(x, choices, experts, swiglu_limit).astype(dtype)

    if implementation == "cuda":
        return run(cuda.routed, x, choices, experts)
    if isinstance(experts, TpuExperts):
        return run(tpu.routed, x, choices, experts)
    few_choices = choices.ids.size < experts.num_experts  # sorting them costs more than dequantising an expert for each
    elsewhere: reference.Form = reference.selected if few_choices else reference.grouped
    # Not `grouped`: a GPU waits for the host at each turn of a loop of dynamic length, and there would be hundreds.
    on_gpu: reference.Form = reference.all_experts_in_turn
    if in_cuda:
        on_gpu = cuda.routed
    elif isinstance(experts, PackedExperts) and x.shape[0] <= DECODE_ROWS:
        on_gpu = reference.all_pairs
    elif few_choices:
        on_gpu = reference.selected
    elif x.shape[0] >= BLOCKED_ROWS and 2 * top_k < experts.num_experts:
        on_gpu = reference.in_blocks
    out: jax.Array = jax.lax.platform_dependent(
        x, choices, experts, cuda=functools.partial(run, on_gpu), default=functools.partial(run, elsewhere)
    )
    return out
