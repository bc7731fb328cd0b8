"""Compute over many rows in blocks, in the memory of one block."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")


def in_blocks(function: Callable[[Any, Any], Result], fixed: Any, rows: Any, most: int) -> Result:
    """Compute function(fixed, rows) in blocks of at most `most` rows; recompute a block for its gradient.

    rows and the result are pytrees of arrays [n, ...]. A row's result must not depend on other rows.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    blocks = -(-count // most)
    size = -(-count // blocks)

    def cut(part: jax.Array) -> jax.Array:
        padded = jnp.pad(part, [(0, blocks * size - count), *[(0, 0)] * (part.ndim - 1)])
        return padded.reshape(blocks, size, *part.shape[1:])

    recomputed = _recomputed(function)
    results = jax.lax.map(lambda block: recomputed(fixed, block), jax.tree.map(cut, rows))
    joined: Result = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:count], results)
    return joined


def _recomputed(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a function of pytrees so that only its arguments are kept for its gradient."""

    def with_barrier(*arguments: Any) -> Result:
        # Without the barrier XLA would compute values that need no gradient (masks, labels) for all blocks in a loop of
        # their own, and keep them.
        return function(*jax.lax.optimization_barrier(arguments))

    result: Callable[..., Result] = jax.checkpoint(with_barrier)
    return result
