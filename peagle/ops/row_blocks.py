"""Compute a wide pass in blocks of rows, in the memory of one block."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

LEAST_ROWS = 32  # of a block; so the passes of steps are not cut
T = TypeVar("T")
Carry = TypeVar("Carry")


def in_row_blocks(
    function: Callable[..., tuple[T, Carry]],
    num_blocks: int,
    x: T,
    carry: Carry,
    positions: Int[Array, "B T"],
    *others: Any,
) -> tuple[T, Carry]:
    """Compute function(x, carry, positions, *others) -> (y, carry) in at most num_blocks blocks of rows, in order.

    x and others are trees of arrays [B, T, ...]; y is like x and takes its memory. Blocks after the last active row,
    whose position is 0 or more, are left as they are in x.
    """
    width = positions.shape[1]
    size = max(LEAST_ROWS, -(-width // max(num_blocks, 1)))
    if size >= width:
        return function(x, carry, positions, *others)

    def padded(leaf: jax.Array) -> jax.Array:
        pad = [(0, 0), (0, -width % size), *[(0, 0)] * (leaf.ndim - 2)]
        return jnp.pad(leaf, pad, constant_values=-1)

    def one(block: jax.Array, carried: tuple[T, Carry]) -> tuple[T, Carry]:
        def part_of(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(leaf, block * size, size, axis=1)

        def put(leaf: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, part, block * size, axis=1)

        x, carry = carried
        y, carry = function(jax.tree.map(part_of, x), carry, *jax.tree.map(part_of, rows))
        return jax.tree.map(put, x, y), carry

    x, *rows = jax.tree.map(padded, (x, positions, *others))
    num_active = jnp.max(jnp.where(positions >= 0, jnp.arange(1, width + 1, dtype=jnp.int32), 0))
    x, carry = jax.lax.fori_loop(jnp.int32(0), (num_active + size - 1) // size, one, (x, carry))
    return jax.tree.map(lambda leaf: leaf[:, :width], x), carry
