"""The engine's view of a drafter: PEagle, Eagle3 and DFlash satisfy peagle.protocols.Drafter without importing it."""

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter import dflash, model
from drafter.config import DrafterConfig, Kind
from drafter.params import DrafterParams
from peagle.ops.attention import MASKED, CacheGroup, PagedCache, Pages, init_pools, own_tables
from peagle.ops.messages import Choose, DrafterInput, DraftOutput, likeliest_of


@flax.struct.dataclass
class _Cached:
    """A drafter with KV caches. retain_full_kv: windowed layers keep all positions."""

    params: DrafterParams
    config: DrafterConfig = flax.struct.field(pytree_node=False)
    retain_full_kv: bool = flax.struct.field(pytree_node=False, default=False, kw_only=True)

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """The target's layers whose outputs the drafter reads; None: the target's default."""
        return self.config.aux_layer_ids

    @property
    def window(self) -> int | None:
        """Smallest window of a layer, in positions; None: every layer sees all."""
        return self.config.narrowest_window

    @property
    def most_drafts(self) -> int | None:
        """Most drafts of a step; None: any number."""
        return self.config.most_drafts

    @property
    def trained_positions(self) -> int | None:
        """The positions of config.json, if a layer sees all; None: windows keep RoPE's distances small."""
        windows = self.config.windows or (None,)
        return self.config.max_positions if None in windows else None

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return model.cache_groups(self.config, self.retain_full_kv)

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:
        """Make the empty pools of all layers. num_pages: of each group."""
        config = self.config
        return init_pools(self.cache_groups, num_pages, config.num_kv_heads, config.head_dim, self.params.dtype)

    def init_state(self, batch: int, capacity: int, widest_write: int) -> PagedCache:
        """Make empty caches with their own pages, for `capacity` positions of the target and a pass of rows."""
        widest_write += self.most_drafts or 0  # a DFlash pass writes its whole block, for any number of drafts
        tables = own_tables(self.cache_groups, batch, capacity + widest_write, widest_write)
        return PagedCache(self.init_pages([table.size for table in tables]), tables)

    def absorb(
        self,
        state: PagedCache,
        token_ids: Int[Array, "B T"],
        aux_hidden: Float[Array, "B T A"],
        positions: Int[Array, "B T"],
    ) -> PagedCache:
        return model.absorb(self.params, self.config, token_ids, aux_hidden, positions, state, self.cache_groups)


@flax.struct.dataclass
class _AtOnce(_Cached):
    """A drafter that computes the logits of all drafts in one pass.

    with_logits: also return logits over the target's vocabulary, for comparison with a reference.
    """

    with_logits: bool = flax.struct.field(pytree_node=False, default=False)

    one_pass: ClassVar[Callable[..., tuple[jax.Array, PagedCache]]]  # returns the logits of all drafts

    def propose(
        self,
        state: PagedCache,
        drafter_input: DrafterInput,
        widths: Int[Array, " B"],
        num_drafts: int,
        choose: Choose = likeliest_of,
    ) -> tuple[DraftOutput, PagedCache]:
        """Return (drafts, cache with the input's rows). Draft i stands for token[first_position + num + 1 + i]."""
        params, config = self.params, self.config
        logits, cache = self.one_pass(params, config, drafter_input, widths, state, self.cache_groups, num_drafts)
        full = to_target_logits(params, config, logits) if self.with_logits else None
        drafts, confidence = choose(logits, params.draft_to_target, 0)
        return DraftOutput(model.to_target_ids(params, drafts), full, confidence), cache


@flax.struct.dataclass
class PEagle(_AtOnce):
    """A P-EAGLE drafter: after the committed rows come mask slots, each of which sees those before it."""

    one_pass = staticmethod(model.propose)


@flax.struct.dataclass
class Eagle3(_Cached):
    """An EAGLE-3 drafter: one pass per draft, which reads the draft before."""

    def propose(
        self,
        state: PagedCache,
        drafter_input: DrafterInput,
        widths: Int[Array, " B"],
        num_drafts: int,
        choose: Choose = likeliest_of,
    ) -> tuple[DraftOutput, PagedCache]:
        (drafts, confidence), cache = model.propose_in_turn(
            self.params, self.config, drafter_input, widths, state, self.cache_groups, num_drafts, choose
        )
        return DraftOutput(drafts, confidence=confidence), cache


@flax.struct.dataclass
class DFlash(_AtOnce):
    """A DFlash drafter: all drafts in one pass, as a block whose rows see each other."""

    one_pass = staticmethod(dflash.propose)

    def absorb(
        self,
        state: PagedCache,
        token_ids: Int[Array, "B T"],  # noqa: ARG002  # the context has no tokens
        aux_hidden: Float[Array, "B T A"],
        positions: Int[Array, "B T"],
    ) -> PagedCache:
        return dflash.absorb(self.params, self.config, aux_hidden, positions, state, self.cache_groups)


AnyDrafter: TypeAlias = PEagle | Eagle3 | DFlash


def drafter_of(params: DrafterParams, config: DrafterConfig) -> AnyDrafter:
    kinds: dict[Kind, type[AnyDrafter]] = {"P-EAGLE": PEagle, "EAGLE-3": Eagle3, "DFlash": DFlash}
    return kinds[config.kind](params, config)


def to_target_logits(
    params: DrafterParams, config: DrafterConfig, logits: Float[Array, "B K U"]
) -> Float[Array, "B K V"]:
    """Spread logits over the target's vocabulary, in float32.

    Tokens that the drafter cannot propose get MASKED, whose probability is exactly zero.
    """
    logits = logits.astype(jnp.float32)
    if params.draft_to_target is None:
        return logits
    full = jnp.full((*logits.shape[:2], config.vocab_size), MASKED, jnp.float32)
    return full.at[:, :, params.draft_to_target].set(logits)
