"""A drafter and a lookup drafter, which has no caches; adaptive steps use both (peagle.engine.propose)."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax

from peagle.ops.attention import CacheGroup, Pages
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, likeliest_of
from peagle.protocols import Drafter, PyTree


@flax.struct.dataclass
class WithLookup:
    """Follows `Drafter` by `drafter` alone; adaptive steps call `lookup` themselves."""

    drafter: Any  # a Drafter
    lookup: Any  # a Drafter without cache groups

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        groups: tuple[CacheGroup, ...] = self.drafter.cache_groups
        return groups

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:
        pages: tuple[Pages, ...] = self.drafter.init_pages(num_pages)
        return pages

    def init_state(self, batch: int, capacity: int, widest_write: int) -> PyTree:
        return self.drafter.init_state(batch, capacity, widest_write)

    def absorb(self, state: PyTree, token_ids: jax.Array, aux_hidden: jax.Array, positions: jax.Array) -> PyTree:
        return self.drafter.absorb(state, token_ids, aux_hidden, positions)

    def propose(
        self,
        state: PyTree,
        drafter_input: DrafterInput,
        widths: jax.Array,
        num_drafts: int,
        choose: Choose = likeliest_of,
    ) -> tuple[DraftOutput, PyTree]:
        output: tuple[DraftOutput, PyTree] = self.drafter.propose(state, drafter_input, widths, num_drafts, choose)
        return output


def without_lookup(drafter: Drafter | None) -> Drafter | None:
    return drafter.drafter if isinstance(drafter, WithLookup) else drafter


def lookup_of(drafter: Drafter | None) -> Drafter | None:
    return drafter.lookup if isinstance(drafter, WithLookup) else None


def most_drafts_of(drafter: Drafter | None) -> int | None:
    """Return the drafts per block, the most of a step; None for a drafter without blocks."""
    most: int | None = getattr(without_lookup(drafter), "most_drafts", None)
    return most
