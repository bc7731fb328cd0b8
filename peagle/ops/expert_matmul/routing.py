"""Routing: from router logits to the selected experts and their weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.ops.collectives import Held


def route_dense(logits: Float[Array, "T E"], top_k: int, held: Held | None = None) -> Float[Array, "T held"]:
    """Compute router weights as a matrix: softmax over each row's top_k logits, zero elsewhere.

    Returns the weights of the experts `held` only, by default of all. Selects by pairwise ranks (equal logits: the
    lower index first, as lax.top_k), which needs no sort and is cheap to differentiate.
    """
    logits = logits.astype(jnp.float32)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    mine, other = logits[:, :, None], logits[:, None, :]
    ahead = (other > mine) | ((other == mine) & (index[None, None, :] < index[None, :, None]))
    selected = jnp.sum(ahead, axis=-1) < top_k
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.where(selected, jnp.exp(logits - peak), 0.0)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights if held is None else jax.lax.dynamic_slice_in_dim(weights, held.first, held.count, axis=1)


def route_top_k(
    logits: Float[Array, "T E"], top_k: int, held: Held | None = None
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Select experts; return (ids, weights), best first, with softmax over the selected logits only.

    If only some experts are held, ids count from the first of them; a choice of another has id held.count, weight 0.
    """
    values, ids = jax.lax.top_k(logits.astype(jnp.float32), top_k)
    weights = jax.nn.softmax(values, axis=-1)
    if held is None:
        return ids, weights
    mine = (ids >= held.first) & (ids < held.first + held.count)
    return jnp.where(mine, ids - held.first, held.count), jnp.where(mine, weights, 0.0)
