"""Compute over many rows in the memory of one chunk."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")


def in_chunks(function: Callable[[Any, Any], Result], fixed: Any, rows: Any, most: int) -> Result:
    """Compute function(fixed, rows) in chunks of at most `most` rows; recompute a chunk for its gradient.

    rows and the result are pytrees of arrays [n, ...]. A row's result must not depend on other rows.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    chunks = -(-count // most)
    size = -(-count // chunks)

    def cut(part: jax.Array) -> jax.Array:
        padded = jnp.pad(part, [(0, chunks * size - count), *[(0, 0)] * (part.ndim - 1)])
        return padded.reshape(chunks, size, *part.shape[1:])

    recomputed = _recomputed(function)
    results = jax.lax.map(lambda chunk: recomputed(fixed, chunk), jax.tree.map(cut, rows))
    joined: Result = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:count], results)
    return joined


def _recomputed(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a function of pytrees so that only its arguments are kept for its gradient."""

    def with_barrier(*arguments: Any) -> Result:
        # Without the barrier XLA would compute values that need no gradient (masks, labels) for all chunks in a loop of
        # their own, and keep them.
        return function(*jax.lax.optimization_barrier(arguments))

    result: Callable[..., Result] = jax.checkpoint(with_barrier)
    return result
