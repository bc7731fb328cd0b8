"""The mixture-of-experts op in plain XLA, one function per order of visiting the experts.

`held`: the experts of this rank; the result is their part of the sum. `dtype`: of the result; default: x's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from peagle.ops.collectives import Held
from peagle.ops.expert_matmul.routing import route_dense, route_top_k
from peagle.ops.expert_matmul.weights import ExpandedExperts, FusedExperts, PackedExperts
from peagle.ops.mxfp4 import dequantize_on_device, products_on_device

ALPHA = 1.702  # openai/gpt-oss: the sigmoid's slope
BLOCK_ROWS = 16  # of `grouped`; more would be padding in a chunk of 128 tokens, which has 16 per expert of 32


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Compute gate * sigmoid(1.702 gate) * (up + 1), gate clamped from above at the limit, up on both sides."""
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)


def fused(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: FusedExperts,
    top_k: int,
    limit: float,
    *,
    held: Held | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """Compute every expert for every row in two matmuls; zero an unselected expert's hidden values.

    The router weight is applied between the matmuls, so the second one also sums over the experts.
    """
    rows, num_experts = x.shape[0], experts.num_experts
    weights = route_dense(router_logits, top_k, held).astype(x.dtype)
    gate, up = jnp.split(x @ experts.gate_up + experts.gate_up_bias[None, :], 2, axis=-1)
    hidden = swiglu(gate, up, limit).reshape(rows, num_experts, -1) * weights[:, :, None]
    out = hidden.reshape(rows, -1) @ experts.down + weights @ experts.down_bias
    return out.astype(dtype or x.dtype)


def selected(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts | ExpandedExperts,
    top_k: int,
    limit: float,
    *,
    held: Held | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """Compute one (row, selected expert) pair after the other; only selected experts are read."""
    ids, weights = route_top_k(router_logits, top_k, held)

    def one(expert_id: jax.Array, row: jax.Array) -> jax.Array:
        expert = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert_id, keepdims=False), experts)
        return _one_expert(row[None, :], expert, limit)[0]

    def one_pair(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        return one(pair[0], x[pair[1]])

    rows = jnp.repeat(jnp.arange(x.shape[0], dtype=jnp.int32), top_k)
    out = jax.lax.map(one_pair, (ids.reshape(-1), rows)).reshape(x.shape[0], top_k, -1)
    return jnp.sum(out * weights[:, :, None].astype(out.dtype), axis=1).astype(dtype or x.dtype)


def all_pairs(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts,
    top_k: int,
    limit: float,
    *,
    held: Held | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """Compute all (row, selected expert) pairs at once: two fused sums and no loop.

    For accelerators, where a loop would launch a kernel per pair. An expert is read once per row that selected it.
    """
    ids, weights = route_top_k(router_logits, top_k, held)
    # another rank's expert has weight 0, so any index will do
    e = jax.tree.map(lambda leaf: leaf[jnp.minimum(ids, experts.num_experts - 1).reshape(-1)], experts)
    rows = jnp.repeat(x, top_k, axis=0)
    hidden = products_on_device(e.gate_up_blocks, e.gate_up_scales, rows).astype(x.dtype) + e.gate_up_bias
    active = swiglu(hidden[:, 0::2], hidden[:, 1::2], limit)
    out = products_on_device(e.down_blocks, e.down_scales, active) + e.down_bias.astype(jnp.float32)
    return jnp.sum(out.reshape(x.shape[0], top_k, -1) * weights[:, :, None], axis=1).astype(dtype or x.dtype)


def each_expert_once(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts | ExpandedExperts,
    top_k: int,
    limit: float,
    *,
    held: Held | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """Compute all rows through one expert after the other.

    Each expert is read and dequantised once; one is in memory at a time.
    """
    weights = route_dense(router_logits, top_k, held)

    def body(total: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        expert, weight = step
        return total + _one_expert(x, expert, limit).astype(jnp.float32) * weight[:, None], None

    total, _ = jax.lax.scan(body, jnp.zeros(x.shape, jnp.float32), (experts, weights.T))
    return total.astype(dtype or x.dtype)


def grouped(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts | ExpandedExperts,
    top_k: int,
    limit: float,
    positions: Int[Array, " T"] | None = None,
    *,
    held: Held | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """Compute each selected expert for the rows that selected it, in blocks of BLOCK_ROWS.

    Choices are sorted by expert; none is dropped. Each expert is dequantised once; those without rows are skipped. A
    row of negative position selects no expert, and its output is 0. All blocks have one shape, so a row's bits do not
    depend on other rows or their number, as far as XLA's matmul treats the rows of one shape alike: on CPU it does. Not
    for reverse-mode differentiation: the loops have dynamic lengths.
    """
    rows = x.shape[0]
    ids, weights = route_top_k(router_logits, top_k, held)
    active = jnp.ones((rows, 1), bool) if positions is None else positions[:, None] >= 0
    order, begins, ends = _by_expert(jnp.where(active, ids, experts.num_experts), experts.num_experts)
    row_of = jnp.pad(order // top_k, (0, BLOCK_ROWS))

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

    sorted_out = jnp.zeros((rows * top_k + BLOCK_ROWS, x.shape[1]), x.dtype)
    sorted_out, _ = jax.lax.scan(one, sorted_out, (experts, begins, ends))
    return jnp.where(active, _summed(sorted_out, order, weights), 0.0).astype(dtype or x.dtype)


def in_blocks(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts | ExpandedExperts,
    top_k: int,
    limit: float,
    *,
    held: Held | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """Compute blocks of rows of one expert each: `grouped` with a fixed number of blocks, the most there can be.

    For accelerators, which wait for the host at each turn of a loop of dynamic length. A block has up to twice the
    average rows per expert, so more than a third of all computed rows count; each block reads its expert anew.
    """
    rows, num_experts = x.shape[0], experts.num_experts
    size = BLOCK_ROWS
    while size * num_experts < rows * top_k:
        size *= 2
    ids, weights = route_top_k(router_logits, top_k, held)
    order, begins, ends = _by_expert(ids, num_experts)
    row_of = jnp.pad(order // top_k, (0, size))
    blocks = (ends - begins + size - 1) // size
    lasts = jnp.cumsum(blocks).astype(jnp.int32)  # after each expert's last block
    numbers = jnp.arange(rows * top_k // size + num_experts, dtype=jnp.int32)
    expert_of = jnp.minimum(jnp.searchsorted(lasts, numbers, side="right"), num_experts - 1).astype(jnp.int32)
    starts = begins[expert_of] + (numbers - (lasts - blocks)[expert_of]) * size
    starts = jnp.where(numbers < lasts[-1], starts, rows * top_k)  # empty blocks compute rows that are not read

    def one(out: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        number, start = step
        expert = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), experts)
        # A last block's surplus rows belong to the next expert, which overwrites them, or are not read.
        result = _one_expert(x[jax.lax.dynamic_slice_in_dim(row_of, start, size)], expert, limit)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, axis=0), None

    sorted_out = jnp.zeros((rows * top_k + size, x.shape[1]), x.dtype)
    sorted_out, _ = jax.lax.scan(one, sorted_out, (expert_of, starts))
    return _summed(sorted_out, order, weights).astype(dtype or x.dtype)


def _by_expert(ids: Int[Array, "T K"], num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort choices by expert, ids beyond num_experts last; return (order, begin and end of each expert's choices)."""
    choices = ids.reshape(-1)
    order = jnp.argsort(choices).astype(jnp.int32)  # stable
    ends = jnp.searchsorted(choices[order], jnp.arange(num_experts, dtype=jnp.int32), side="right").astype(jnp.int32)
    return order, jnp.pad(ends[:-1], (1, 0)), ends


def _summed(
    sorted_out: Float[Array, "_ D"], order: Int[Array, " N"], weights: Float[Array, "T K"]
) -> Float[Array, "T D"]:
    """Restore the order of rows, and sum each row's results with its weights."""
    place = jnp.argsort(order).astype(jnp.int32).reshape(weights.shape)
    return jnp.sum(sorted_out[place].astype(jnp.float32) * weights[:, :, None], axis=1)


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
