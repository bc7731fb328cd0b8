"""The mixture-of-experts op in plain XLA, one function per way of visiting the experts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from peagle.ops.expert_matmul.routing import route_dense, route_top_k
from peagle.ops.expert_matmul.weights import ExpandedExperts, FusedExperts, PackedExperts
from peagle.ops.mxfp4 import dequantize_on_device, products_on_device

ALPHA = 1.702  # openai/gpt-oss: the sigmoid's slope


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Compute gate * sigmoid(1.702 gate) * (up + 1), gate clamped from above at the limit, up on both sides."""
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)


def fused(
    x: Float[Array, "T D"], router_logits: Float[Array, "T E"], experts: FusedExperts, top_k: int, limit: float
) -> Float[Array, "T D"]:
    """Compute every expert for every row in two matmuls; zero an unselected expert's hidden values.

    The router weight is applied between the matmuls, so the second one also sums over the experts.
    """
    rows, num_experts = x.shape[0], experts.num_experts
    weights = route_dense(router_logits, top_k).astype(x.dtype)
    gate, up = jnp.split(x @ experts.gate_up + experts.gate_up_bias[None, :], 2, axis=-1)
    hidden = swiglu(gate, up, limit).reshape(rows, num_experts, -1) * weights[:, :, None]
    return hidden.reshape(rows, -1) @ experts.down + weights @ experts.down_bias


def selected(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts | ExpandedExperts,
    top_k: int,
    limit: float,
) -> Float[Array, "T D"]:
    """Compute one (row, selected expert) pair after the other; only selected experts are read."""
    ids, weights = route_top_k(router_logits, top_k)

    def one(expert_id: jax.Array, row: jax.Array) -> jax.Array:
        expert = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert_id, keepdims=False), experts)
        return _one_expert(row[None, :], expert, limit)[0]

    def one_pair(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        return one(pair[0], x[pair[1]])

    rows = jnp.repeat(jnp.arange(x.shape[0], dtype=jnp.int32), top_k)
    out = jax.lax.map(one_pair, (ids.reshape(-1), rows)).reshape(x.shape[0], top_k, -1)
    return jnp.sum(out * weights[:, :, None].astype(out.dtype), axis=1).astype(x.dtype)


def all_pairs(
    x: Float[Array, "T D"], router_logits: Float[Array, "T E"], experts: PackedExperts, top_k: int, limit: float
) -> Float[Array, "T D"]:
    """Compute all (row, selected expert) pairs at once: two fused sums and no loop.

    For accelerators, where a loop would launch a kernel per pair. An expert that several rows selected is read for each
    of them.
    """
    ids, weights = route_top_k(router_logits, top_k)
    e = jax.tree.map(lambda leaf: leaf[ids.reshape(-1)], experts)
    rows = jnp.repeat(x, top_k, axis=0)
    hidden = products_on_device(e.gate_up_blocks, e.gate_up_scales, rows).astype(x.dtype) + e.gate_up_bias
    active = swiglu(hidden[:, 0::2], hidden[:, 1::2], limit)
    out = products_on_device(e.down_blocks, e.down_scales, active) + e.down_bias.astype(jnp.float32)
    return jnp.sum(out.reshape(x.shape[0], top_k, -1) * weights[:, :, None], axis=1).astype(x.dtype)


def each_expert_once(
    x: Float[Array, "T D"],
    router_logits: Float[Array, "T E"],
    experts: PackedExperts | ExpandedExperts,
    top_k: int,
    limit: float,
) -> Float[Array, "T D"]:
    """Compute all rows through one expert after the other.

    Each expert is read and dequantised once, and one at a time is in memory.
    """
    weights = route_dense(router_logits, top_k)

    def body(total: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        expert, weight = step
        return total + _one_expert(x, expert, limit).astype(jnp.float32) * weight[:, None], None

    total, _ = jax.lax.scan(body, jnp.zeros(x.shape, jnp.float32), (experts, weights.T))
    return total.astype(x.dtype)


def _one_expert(x: jax.Array, expert: PackedExperts | ExpandedExperts, limit: float) -> jax.Array:
    """Compute x [T, D] through one expert (leaves without their leading E), bias included."""
    if isinstance(expert, ExpandedExperts):
        gate, up = jnp.split(x @ expert.gate_up + expert.gate_up_bias[None, :], 2, axis=-1)
        return swiglu(gate, up, limit) @ expert.down + expert.down_bias[None, :]
    gate_up = dequantize_on_device(expert.gate_up_blocks, expert.gate_up_scales, x.dtype)
    hidden = x @ gate_up.T + expert.gate_up_bias[None, :]
    down = dequantize_on_device(expert.down_blocks, expert.down_scales, x.dtype)
    return swiglu(hidden[:, 0::2], hidden[:, 1::2], limit) @ down.T + expert.down_bias[None, :]
