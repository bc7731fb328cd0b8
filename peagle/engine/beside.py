"""A drafter with a second, cacheless one beside it, which drafts in adaptive steps (peagle.engine.propose)."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax

from peagle.ops.attention import CacheGroup, Pages
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, likeliest_of
from peagle.protocols import Drafter, PyTree


@flax.struct.dataclass
class Beside:
    """Runs the first drafter alone, except in adaptive steps, which run `second` as well."""

    first: Any  # a Drafter
    second: Any  # a Drafter without cache groups

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        groups: tuple[CacheGroup, ...] = self.first.cache_groups
        return groups

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:
        pages: tuple[Pages, ...] = self.first.init_pages(num_pages)
        return pages

    def init_state(self, batch: int, capacity: int, widest_write: int) -> PyTree:
        return self.first.init_state(batch, capacity, widest_write)

    def absorb(self, state: PyTree, token_ids: jax.Array, aux_hidden: jax.Array, positions: jax.Array) -> PyTree:
        return self.first.absorb(state, token_ids, aux_hidden, positions)

    def propose(
        self,
        state: PyTree,
        drafter_input: DrafterInput,
        widths: jax.Array,
        num_drafts: int,
        choose: Choose = likeliest_of,
    ) -> tuple[DraftOutput, PyTree]:
        output: tuple[DraftOutput, PyTree] = self.first.propose(state, drafter_input, widths, num_drafts, choose)
        return output


def alone(drafter: Drafter | None) -> Drafter | None:
    """Return the first of two drafters, or the drafter itself."""
    return drafter.first if isinstance(drafter, Beside) else drafter


def most_drafts_of(drafter: Drafter | None) -> int | None:
    """Return the drafts per block, the most of a step; None for a drafter without blocks."""
    most: int | None = getattr(alone(drafter), "most_drafts", None)
    return most


def second_of(drafter: Drafter | None) -> Drafter | None:
    return drafter.second if isinstance(drafter, Beside) else None
