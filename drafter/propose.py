"""Drafters as the engine sees them: objects with state that propose. They match peagle's Drafter protocol by shape,
without importing it."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter import model
from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from peagle.ops.attention import MASKED
from peagle.ops.kv_cache import KVCache
from peagle.ops.likeliest import argmax
from peagle.ops.messages import Draft, Fresh


@flax.struct.dataclass
class _Cached:
    """What reads taps and keeps its own caches, which are its state."""

    params: DrafterParams
    config: DrafterConfig = flax.struct.field(pytree_node=False)

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """The tapped outputs of the target's layers; None: the target's default."""
        return self.config.aux_layer_ids

    def init_state(self, batch: int, capacity: int, widest_write: int) -> tuple[KVCache, ...]:
        """Empty caches for a target that may hold `capacity` positions, and room for a pass of `widest_write` rows
        behind them."""
        return model.init_caches(self.config, batch, capacity + widest_write, self.params.dtype)

    def absorb(
        self,
        state: tuple[KVCache, ...],
        token_ids: Int[Array, "B T"],
        aux_hidden: Float[Array, "B T A"],
        positions: Int[Array, "B T"],
    ) -> tuple[KVCache, ...]:
        """See `drafter.model.absorb`."""
        return model.absorb(self.params, self.config, token_ids, aux_hidden, positions, state)


@flax.struct.dataclass
class PEagle(_Cached):
    """A P-EAGLE drafter: all drafts in one pass.

    deterministic: the drafts are the drafter's argmax, and no logits come out. Otherwise the logits come, too, over the
    target's vocabulary, for whoever samples from them; token_ids are still the argmax.
    """

    deterministic: bool = flax.struct.field(pytree_node=False, default=True)

    def propose(
        self, state: tuple[KVCache, ...], fresh: Fresh, widths: Int[Array, " B"], num_drafts: int
    ) -> tuple[Draft, tuple[KVCache, ...]]:
        """(the drafts, the caches holding the fresh rows, too). Draft i stands for
        token[first_position + num + 1 + i]."""
        logits, caches = model.propose(self.params, self.config, fresh, widths, state, num_drafts)
        full = None if self.deterministic else to_target_logits(self.params, self.config, logits)
        return Draft(model.to_target_ids(self.params, argmax(logits)), full), caches


@flax.struct.dataclass
class Eagle3(_Cached):
    """An EAGLE-3 drafter: a pass per draft. Each pass reads the draft before it, its likeliest token: so the drafts
    follow from the context alone, and there are no logits to sample them from."""

    def propose(
        self, state: tuple[KVCache, ...], fresh: Fresh, widths: Int[Array, " B"], num_drafts: int
    ) -> tuple[Draft, tuple[KVCache, ...]]:
        """As PEagle.propose."""
        drafts, caches = model.propose_in_turn(self.params, self.config, fresh, widths, state, num_drafts)
        return Draft(drafts), caches


def drafter_of(params: DrafterParams, config: DrafterConfig) -> PEagle | Eagle3:
    """The drafter of either kind."""
    return PEagle(params, config) if config.parallel else Eagle3(params, config)


def to_target_logits(
    params: DrafterParams, config: DrafterConfig, logits: Float[Array, "B K U"]
) -> Float[Array, "B K V"]:
    """Float32 logits over the target's vocabulary; tokens that the drafter cannot propose get MASKED, whose probability
    is exactly zero."""
    logits = logits.astype(jnp.float32)
    if params.draft_to_target is None:
        return logits
    full = jnp.full((*logits.shape[:2], config.vocab_size), MASKED, jnp.float32)
    return full.at[:, :, params.draft_to_target].set(logits)
