"""Routing: from router logits to the selected experts and their weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def route_dense(logits: Float[Array, "T E"], top_k: int) -> Float[Array, "T E"]:
    """Compute router weights as a matrix: softmax over each row's top_k logits, zero elsewhere.

    Selects by pairwise ranks (equal logits: the lower index first, as lax.top_k): no sort, and cheap to differentiate.
    """
    logits = logits.astype(jnp.float32)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    mine, other = logits[:, :, None], logits[:, None, :]
    ahead = (other > mine) | ((other == mine) & (index[None, None, :] < index[None, :, None]))
    selected = jnp.sum(ahead, axis=-1) < top_k
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(selected, jnp.exp(logits - peak), 0.0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def route_top_k(logits: Float[Array, "T E"], top_k: int) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Select experts; return (ids, weights), best first, with softmax over the selected logits only."""
    values, ids = jax.lax.top_k(logits.astype(jnp.float32), top_k)
    return ids, jax.nn.softmax(values, axis=-1)
