"""What the engine knows of a target and a drafter. peagle.ops.messages has the values that they exchange.

The protocols are structural: target/ and drafter/ satisfy them without importing them. Every object is a pytree of
arrays with static configuration and every method is pure, so that a whole step is one jitted function. Caches are pages
that all sequences share; tables say whose they are (peagle.ops.attention.paged).

The state of the drafters, and their use of drafter_input (the tokens committed last, with aux_hidden):

    P-EAGLE    pages of its own KV cache. It writes the rows (token[p+1], aux_hidden[p]) from position first_position
               on; the K-1 mask slots after them give the drafts 1..K-1 in the same pass.
    DFlash     pages of projections of aux_hidden, at the same indices. After these rows it writes a block: the pending
               token and K mask slots, which all see each other. No later pass reads the block.
    n-gram     each slot's tokens. It appends drafter_input.token_ids; aux_hidden has width 0 and is never read.

Worked indices, K = 3, prompt of P = 5 tokens t0..t4, t5 sampled at prefill (pending: emitted, in no cache):

    after prefill  length 5, pending t5, input: token_ids [t5, ., ., .], aux [h4, ., ., .], num 1, first_position 4
    propose        drafts d0 d1 d2 stand for t6 t7 t8
    verify         rows [t5 d0 d1 d2] at positions 5..8; row i's logits decide token 6 + i
    accept         if d0 is right and d1 wrong: num_accepted 1, next_token n (for t7)
    commit         length 7 (t5 and d0 are in the cache), pending n, input: token_ids [d0, n, ., .] = t6 t7,
                   aux [h5, h6, ., .], num 2, first_position 5 = length - num
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from peagle.ops.attention import CacheGroup, PagedCache, Pages
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, VerifyOutput, likeliest_of

PyTree: TypeAlias = Any


@runtime_checkable
class Target(Protocol):
    """The model that is sped up."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Groups of layers that keep the same indices; the first group has no window."""
        ...

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:
        """Make the empty pools of all layers. num_pages: of each group."""
        ...

    def init_cache(self, batch: int, capacity: int, widest_write: int) -> PagedCache:
        """Make empty caches for sequences of up to `capacity` positions, each in pages of its own.

        They have room for a pass of up to `widest_write` rows more, which can be rolled back.
        """
        ...

    def extend(
        self,
        token_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: PagedCache,
        logit_rows: Int[Array, "B L"] | None = None,
        writes: Bool[Array, "B T"] | None = None,
    ) -> tuple[VerifyOutput, PagedCache]:
        """Run T rows at their positions and write them to the cache.

        Computes the logits of `logit_rows`, by default of all rows. writes: False in rows that are already in the
        cache. A row of negative position is inactive. Active positions of a sequence are consecutive.
        """
        ...


@runtime_checkable
class Explains(Protocol):
    def first_not_finite(self, token_ids: Sequence[int]) -> str | None:
        """Run the model over the tokens and name its first output that is not finite; None if all are."""
        ...


@runtime_checkable
class OverDevices(Protocol):
    """A target whose caches are cut over several devices."""

    @property
    def ranks(self) -> int: ...
    @property
    def local_ranks(self) -> int:
        """How many of the devices this process has."""
        ...

    @property
    def kv_copies(self) -> int:
        """Adjacent copies of each kv head in the caches: more than one if there are more ranks than heads."""
        ...

    @property
    def kv_parts(self) -> int:
        """Parts of the caches, side by side: a rank's kv heads, or each copy of its only one."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """The model that proposes. Its state is a PagedCache or, without cache groups, a tree led by the slot."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Groups as of `Target`; () for a drafter without caches."""
        ...

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:
        """Make the empty pools of all layers. num_pages: of each group."""
        ...

    def init_state(self, batch: int, capacity: int, widest_write: int) -> PyTree:
        """Make an empty state for sequences of up to `capacity` positions and a pass of `widest_write` rows more."""
        ...

    def absorb(
        self,
        state: PyTree,
        token_ids: Int[Array, "B T"],
        aux_hidden: Float[Array, "B T A"],
        positions: Int[Array, "B T"],
    ) -> PyTree:
        """Append committed rows: the row at position p holds token p + 1 and aux_hidden[p].

        A row of negative position is inactive.
        """
        ...

    def propose(
        self,
        state: PyTree,
        drafter_input: DrafterInput,
        widths: Int[Array, " B"],
        num_drafts: int,
        choose: Choose = likeliest_of,
    ) -> tuple[DraftOutput, PyTree]:
        """Append the input's rows and propose the num_drafts tokens that follow them, chosen from logits by `choose`.

        Only the first widths[b] drafts of row b will be verified.
        """
        ...


@runtime_checkable
class DrafterWithoutCaches(Drafter, Protocol):
    """A drafter without cache groups. The engine lets it read all tokens of each request (`Executor.read_tokens`)."""

    def restart(self, state: PyTree) -> PyTree:
        """Forget the tokens of all sequences of a state."""
        ...
