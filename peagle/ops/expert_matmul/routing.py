"""Route rows to experts: from router logits to the selected experts and their weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.ops.collectives import LocalExperts


class Choices(NamedTuple):
    """The experts that each row selected, and their weights. Ids from num_experts on select nothing."""

    ids: jax.Array  # [T, k] int32
    weights: jax.Array  # [T, k] float32


def route_dense(logits: Float[Array, "T E"], top_k: int, local: LocalExperts | None = None) -> Float[Array, "T local"]:
    """Compute router weights as a matrix: softmax over each row's top_k logits, zero elsewhere.

    local: return the columns of these experts only. Selects by pairwise ranks (equal logits: the lower index first, as
    lax.top_k), which needs no sort and is cheap to differentiate.
    """
    logits = logits.astype(jnp.float32)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    mine, other = logits[:, :, None], logits[:, None, :]
    ahead = (other > mine) | ((other == mine) & (index[None, None, :] < index[None, :, None]))
    selected = jnp.sum(ahead, axis=-1) < top_k
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(selected, jnp.exp(logits - peak), 0.0)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights if local is None else jax.lax.dynamic_slice_in_dim(weights, local.first, local.count, axis=1)


def route_top_k(
    logits: Float[Array, "T E"],
    top_k: int,
    local: LocalExperts | None = None,
    positions: Int[Array, " T"] | None = None,
) -> Choices:
    """Select each row's experts, best first, with softmax over the selected logits only.

    local: ids count from the first local expert. A choice of another rank's expert, and every choice of a row of
    negative position, has the id num_experts (of the local ones) and weight 0.
    """
    values, ids = jax.lax.top_k(logits.astype(jnp.float32), top_k)
    weights, counted = jax.nn.softmax(values, axis=-1), jnp.ones(ids.shape, bool)
    num_experts = logits.shape[-1]
    if local is not None:
        counted, num_experts = (ids >= local.first) & (ids < local.first + local.count), local.count
        ids = ids - local.first
    if positions is not None:
        counted = counted & (positions[:, None] >= 0)
    return Choices(jnp.where(counted, ids, num_experts), jnp.where(counted, weights, 0.0))


def combine(outputs: Float[Array, "T k D"], choices: Choices, num_experts: int) -> Float[Array, "T D"]:
    """Sum each row's expert outputs by its weights. Ids from num_experts on add nothing, not even a NaN."""
    weighted = jnp.where((choices.ids < num_experts)[:, :, None], outputs * choices.weights[:, :, None], 0.0)
    return jnp.sum(weighted, axis=1)
