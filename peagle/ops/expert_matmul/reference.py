"""The mixture-of-experts op in plain XLA, one function per order of visiting the experts.

`fused` takes the dense weights of `route_dense`; every other function is a `Form`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle.ops.expert_matmul.routing import Choices, combine
from peagle.ops.expert_matmul.weights import ExpandedExperts, FusedExperts, PackedExperts
from peagle.ops.mxfp4 import dequantize_on_device, products_on_device

# (x [T, D], choices, experts, SwiGLU limit) -> [T, D], in x's dtype or float32
Form: TypeAlias = Callable[[jax.Array, Choices, Any, float], jax.Array]
ALPHA = 1.702  # openai/gpt-oss: the sigmoid's slope
BLOCK_ROWS = 16  # of `grouped`; more would be padding in a chunk of 128 tokens, which has 16 per expert of 32


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Compute gate * sigmoid(1.702 gate) * (up + 1), gate clamped from above at the limit, up on both sides."""
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)


def fused(
    x: Float[Array, "T D"], weights: Float[Array, "T E"], experts: FusedExperts, limit: float
) -> Float[Array, "T D"]:
    """Compute every expert for every row in two matmuls, with the weights of `route_dense`.

    A weight scales its expert's hidden values, so the second matmul also sums over the experts.
    """
    weights = weights.astype(x.dtype)
    gate, up = jnp.split(x @ experts.gate_up + experts.gate_up_bias[None, :], 2, axis=-1)
    hidden = swiglu(gate, up, limit).reshape(*weights.shape, -1) * weights[:, :, None]
    return hidden.reshape(x.shape[0], -1) @ experts.down + weights @ experts.down_bias


def selected(
    x: Float[Array, "T D"], choices: Choices, experts: PackedExperts | ExpandedExperts, limit: float
) -> Float[Array, "T D"]:
    """Compute one (row, selected expert) pair after the other; only selected experts are read."""
    ids, weights = choices

    def one_pair(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        expert_id, row = pair
        return _one_expert(x[row][None, :], _expert(experts, expert_id), limit)[0]

    rows = jnp.repeat(jnp.arange(x.shape[0], dtype=jnp.int32), ids.shape[1])
    out = jax.lax.map(one_pair, (ids.reshape(-1), rows)).reshape(*ids.shape, -1)
    return jnp.sum(out * weights[:, :, None].astype(out.dtype), axis=1)


def all_pairs(x: Float[Array, "T D"], choices: Choices, experts: PackedExperts, limit: float) -> Float[Array, "T D"]:
    """Compute all (row, selected expert) pairs at once: two fused sums and no loop.

    For accelerators, where a loop would launch a kernel per pair. An expert is read once per row that selected it.
    """
    ids, weights = choices
    # an id that selects nothing has weight 0, so any expert will do
    e = jax.tree.map(lambda leaf: leaf[jnp.minimum(ids, experts.num_experts - 1).reshape(-1)], experts)
    rows = jnp.repeat(x, ids.shape[1], axis=0)
    hidden = products_on_device(e.gate_up_blocks, e.gate_up_scales, rows).astype(x.dtype) + e.gate_up_bias
    active = swiglu(hidden[:, 0::2], hidden[:, 1::2], limit)
    out = products_on_device(e.down_blocks, e.down_scales, active) + e.down_bias.astype(jnp.float32)
    return jnp.sum(out.reshape(*ids.shape, -1) * weights[:, :, None], axis=1)


def all_experts_in_turn(
    x: Float[Array, "T D"], choices: Choices, experts: PackedExperts | ExpandedExperts, limit: float
) -> Float[Array, "T D"]:
    """Compute all rows through one expert after the other.

    Each expert is read and dequantised once; one is in memory at a time.
    """
    ids, weights = choices

    def body(total: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        expert_id, expert = step
        weight = jnp.sum(jnp.where(ids == expert_id, weights, 0.0), axis=1, keepdims=True)
        return total + _one_expert(x, expert, limit).astype(jnp.float32) * weight, None

    numbers = jnp.arange(experts.num_experts, dtype=jnp.int32)
    total, _ = jax.lax.scan(body, jnp.zeros(x.shape, jnp.float32), (numbers, experts))
    return total


def grouped(
    x: Float[Array, "T D"], choices: Choices, experts: PackedExperts | ExpandedExperts, limit: float
) -> Float[Array, "T D"]:
    """Compute each selected expert for the rows that selected it, in blocks of BLOCK_ROWS.

    Choices are sorted by expert; none is dropped. Each expert is dequantised once; those without rows are skipped. All
    blocks have one shape, so on CPU, where XLA's matmul treats the rows of one shape alike, a row's bits do not depend
    on other rows or their number. The loops have dynamic lengths, so reverse-mode differentiation fails.
    """
    ids = choices.ids
    order, begins, ends = by_expert(ids, experts.num_experts)
    row_of = jnp.pad(order // ids.shape[1], (0, BLOCK_ROWS))

    def one(out: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        expert, begin, end = step

        def of_its_rows(out: jax.Array) -> jax.Array:
            through = _prepared(expert, x.dtype, limit)

            def one_block(block: jax.Array | int, out: jax.Array) -> jax.Array:
                # A last block's surplus rows belong to the next expert, which overwrites them, or are not read.
                start = begin + block * BLOCK_ROWS
                block_rows = x[jax.lax.dynamic_slice_in_dim(row_of, start, BLOCK_ROWS)]
                return jax.lax.dynamic_update_slice_in_dim(out, through(block_rows), start, axis=0)

            num_blocks = (end - begin + BLOCK_ROWS - 1) // BLOCK_ROWS
            return jax.lax.fori_loop(jnp.zeros_like(num_blocks), num_blocks, one_block, out)

        return jax.lax.cond(begin < end, of_its_rows, lambda out: out, out), None

    sorted_out = jnp.zeros((ids.size + BLOCK_ROWS, x.shape[1]), x.dtype)
    sorted_out, _ = jax.lax.scan(one, sorted_out, (experts, begins, ends))
    return combine(_by_row(sorted_out, order, ids), choices, experts.num_experts)


def in_blocks(
    x: Float[Array, "T D"], choices: Choices, experts: PackedExperts | ExpandedExperts, limit: float
) -> Float[Array, "T D"]:
    """Compute blocks of rows of one expert each: `grouped` with a fixed number of blocks, the most there can be.

    For accelerators, which wait for the host at each turn of a loop of dynamic length. A block has up to twice the
    average rows per expert, so more than a third of all computed rows count; each block reads its expert anew.
    """
    ids, num_experts, size = choices.ids, experts.num_experts, BLOCK_ROWS
    while size * num_experts < ids.size:
        size *= 2
    order, begins, ends = by_expert(ids, num_experts)
    row_of = jnp.pad(order // ids.shape[1], (0, size))
    blocks = (ends - begins + size - 1) // size
    lasts = jnp.cumsum(blocks).astype(jnp.int32)  # after each expert's last block
    numbers = jnp.arange(ids.size // size + num_experts, dtype=jnp.int32)
    expert_of = jnp.minimum(jnp.searchsorted(lasts, numbers, side="right"), num_experts - 1).astype(jnp.int32)
    starts = begins[expert_of] + (numbers - (lasts - blocks)[expert_of]) * size
    starts = jnp.where(numbers < lasts[-1], starts, ids.size)  # empty blocks compute rows that are not read

    def one(out: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        expert_id, start = step
        # A last block's surplus rows belong to the next expert, which overwrites them, or are not read.
        rows = x[jax.lax.dynamic_slice_in_dim(row_of, start, size)]
        result = _one_expert(rows, _expert(experts, expert_id), limit)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, axis=0), None

    sorted_out = jnp.zeros((ids.size + size, x.shape[1]), x.dtype)
    sorted_out, _ = jax.lax.scan(one, sorted_out, (expert_of, starts))
    return combine(_by_row(sorted_out, order, ids), choices, num_experts)


def by_expert(ids: Int[Array, "T K"], num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort choices by expert, those that select nothing last; return (order, begin and end of each expert's)."""
    choices = ids.reshape(-1)
    order = jnp.argsort(choices).astype(jnp.int32)  # stable
    ends = jnp.searchsorted(choices[order], jnp.arange(num_experts, dtype=jnp.int32), side="right").astype(jnp.int32)
    return order, jnp.pad(ends[:-1], (1, 0)), ends


def _by_row(sorted_out: Float[Array, "_ D"], order: Int[Array, " N"], ids: Int[Array, "T k"]) -> Float[Array, "T k D"]:
    """Restore the order of rows."""
    return sorted_out[jnp.argsort(order).astype(jnp.int32).reshape(ids.shape)].astype(jnp.float32)


def _expert(experts: PackedExperts | ExpandedExperts, expert_id: jax.Array) -> PackedExperts | ExpandedExperts:
    """Take one expert's leaves, without their leading E."""
    expert: PackedExperts | ExpandedExperts = jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert_id, keepdims=False), experts
    )
    return expert


def _prepared(
    expert: PackedExperts | ExpandedExperts, dtype: DTypeLike, limit: float
) -> Callable[[jax.Array], jax.Array]:
    """Dequantise one expert's matrices; return the function that computes a block of rows [R, D] through it."""
    if isinstance(expert, ExpandedExperts):
        return lambda x: _one_expert(x, expert, limit)
    gate_up = dequantize_on_device(expert.gate_up_blocks, expert.gate_up_scales, dtype)
    down = dequantize_on_device(expert.down_blocks, expert.down_scales, dtype)

    def through(x: jax.Array) -> jax.Array:
        # XLA on CPU would copy a transposed matrix for every block, so transpose the rows instead. The barriers keep
        # XLA from undoing that.
        hidden = gate_up @ jax.lax.optimization_barrier(x.T) + expert.gate_up_bias[:, None]
        out = down @ swiglu(hidden[0::2], hidden[1::2], limit) + expert.down_bias[:, None]
        return jax.lax.optimization_barrier(out).T

    return through


def _one_expert(x: jax.Array, expert: PackedExperts | ExpandedExperts, limit: float) -> jax.Array:
    """Compute x [T, D] through one expert (leaves without their leading E), bias included."""
    if isinstance(expert, ExpandedExperts):
        gate, up = jnp.split(x @ expert.gate_up + expert.gate_up_bias[None, :], 2, axis=-1)
        return swiglu(gate, up, limit) @ expert.down + expert.down_bias[None, :]
    gate_up = dequantize_on_device(expert.gate_up_blocks, expert.gate_up_scales, x.dtype)
    hidden = x @ gate_up.T + expert.gate_up_bias[None, :]
    down = dequantize_on_device(expert.down_blocks, expert.down_scales, x.dtype)
    return swiglu(hidden[:, 0::2], hidden[:, 1::2], limit) @ down.T + expert.down_bias[None, :]
