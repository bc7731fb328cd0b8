"""Long computations over rows in the memory of one block."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")


def in_blocks(function: Callable[[Any, Any], Result], fixed: Any, rows: Any, most: int) -> Result:
    """function(fixed, rows), computed for at most so many rows at a time, one block after the other; for the gradient
    a block is computed again.

    rows and the result are pytrees whose arrays have a row per row [n, ...]; what a row gives may not depend on others.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    blocks = -(-count // most)
    size = -(-count // blocks)

    def cut(part: jax.Array) -> jax.Array:
        padded = jnp.pad(part, [(0, blocks * size - count), *[(0, 0)] * (part.ndim - 1)])
        return padded.reshape(blocks, size, *part.shape[1:])

    again = _recomputed(function)
    found = jax.lax.map(lambda block: again(fixed, block), jax.tree.map(cut, rows))
    joined: Result = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:count], found)
    return joined


def _recomputed(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function of its arguments (pytrees), of which nothing but those is kept for its gradient."""

    def at_once(*arguments: Any) -> Result:
        # Tied together: else, inside a loop, what does not depend on what is differentiated (masks, labels) would be
        # made for all turns in a loop of its own, and kept.
        return function(*jax.lax.optimization_barrier(arguments))

    result: Callable[..., Result] = jax.checkpoint(at_once)
    return result
