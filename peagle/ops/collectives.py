"""Sum and gather over the ranks of a model that is sharded over several devices.

For code inside a `jax.shard_map` over the ranks (peagle.parallel.mesh). A model on one device has no Ranks.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

Reduce: TypeAlias = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class LocalExperts:
    """The experts that a rank holds: `count` of them, from number `first` on."""

    first: jax.Array
    count: int


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The devices along one axis of a mesh, each with its part of every layer.

    ep: groups of ranks that divide the experts among them; 1: every rank has a part of every expert. in_order: sum in
    rank order; in an all-reduce a row's bits may depend on the number of rows.
    """

    axis: str
    count: int
    ep: int = 1
    in_order: bool = True

    def reduce(self, part: jax.Array) -> jax.Array:
        """Sum the ranks' parts; every rank gets the sum."""
        if not self.in_order:
            total: jax.Array = jax.lax.psum(part, self.axis)
            return total
        parts = jax.lax.all_gather(part, self.axis)
        total = parts[0]
        for rank in range(1, self.count):
            total = total + parts[rank]
        return total

    def gather(self, part: jax.Array, width: int) -> jax.Array:
        """Concatenate the ranks' parts along the last axis; every rank gets the first `width` columns."""
        whole: jax.Array = jax.lax.all_gather(part, self.axis, axis=part.ndim - 1, tiled=True)
        return whole[..., :width]

    def local_experts(self, count: int) -> LocalExperts | None:
        """Return this rank's `count` experts; None if it has a part of every expert."""
        if self.ep == 1:
            return None
        group = jax.lax.axis_index(self.axis).astype(jnp.int32) // (self.count // self.ep)
        return LocalExperts(group * count, count)
