"""Drafters as the engine sees them: objects with state that propose. They match peagle's Drafter protocol by shape,
without importing it."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter import model
from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from peagle.ops.attention import MASKED
from peagle.ops.kv_cache import KVCache
from peagle.ops.likeliest import likeliest
from peagle.ops.messages import Draft, Fresh


@flax.struct.dataclass
class State:
    """The rows a drafter was given, in the first slots of its caches."""

    caches: tuple[KVCache, ...]
    num_held: jax.Array  # [B] int32


@flax.struct.dataclass
class _Cached:
    """What reads taps and keeps its own caches."""

    params: DrafterParams
    config: DrafterConfig = flax.struct.field(pytree_node=False)

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """The tapped outputs of the target's layers; None: the target's default."""
        return self.config.aux_layer_ids

    def init_state(self, batch: int, capacity: int, num_drafts: int) -> State:
        """Empty caches for a target that may hold `capacity` positions: the widest write, 2K rows, fits behind them."""
        caches = model.init_caches(self.config, batch, capacity + 2 * num_drafts, self.params.dtype)
        return State(caches, jnp.zeros((batch,), jnp.int32))

    def prefill(
        self,
        state: State,
        token_ids: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        aux_hidden: Float[Array, "B P A"],
    ) -> State:
        """The (empty) state holding rows 0..length-2 of each prompt; token_ids are the prompt's own, padded.

        Example: prompt a b c with hiddens h0 h1 h2: rows (b, h0), (c, h1). Row 2 waits for the token that follows c:
        the first step brings it as its one fresh row, at first_position 2.
        """
        shifted = jnp.roll(token_ids, -1, axis=1)  # the wrapped-round last row is never real: lengths - 1 < P
        caches = model.prefill(self.params, self.config, shifted, aux_hidden, lengths - 1, state.caches)
        return State(caches, lengths - 1)

    def absorb(
        self,
        state: State,
        token_ids: Int[Array, "B T"],
        aux_hidden: Float[Array, "B T A"],
        positions: Int[Array, "B T"],
    ) -> State:
        """See `drafter.model.absorb`: for sequences of which no row is ever left out."""
        caches = model.absorb(self.params, self.config, token_ids, aux_hidden, positions, state.caches)
        return State(caches, jnp.maximum(state.num_held, jnp.max(positions, axis=1) + 1))


@flax.struct.dataclass
class PEagle(_Cached):
    """A P-EAGLE drafter: all drafts in one pass.

    deterministic: the drafts are the drafter's argmax, and no logits come out. Otherwise the logits come, too, over the
    target's vocabulary, for whoever samples from them; token_ids are still the argmax.
    """

    deterministic: bool = flax.struct.field(pytree_node=False, default=True)

    def propose(
        self, state: State, fresh: Fresh, num_drafts: int, widths: Int[Array, " B"] | None = None
    ) -> tuple[Draft, State]:
        """(the drafts, the state holding the fresh rows, too). Draft i stands for
        token[first_position + num + 1 + i]. With widths row b is asked for its first widths[b] drafts, and no row of a
        sequence was ever left out."""
        logits, caches = model.propose(
            self.params, self.config, fresh, _before(state, fresh, widths), state.caches, num_drafts, widths
        )
        draft_ids, confidence = likeliest(logits)
        full = None if self.deterministic else to_target_logits(self.params, self.config, logits)
        draft = Draft(model.to_target_ids(self.params, draft_ids), full, confidence)
        return draft, State(caches, _held(state, fresh))


@flax.struct.dataclass
class Eagle3(_Cached):
    """An EAGLE-3 drafter: a pass per draft. Each pass reads the draft before it, its likeliest token: so the drafts
    follow from the context alone, and there are no logits to sample them from."""

    def propose(
        self, state: State, fresh: Fresh, num_drafts: int, widths: Int[Array, " B"] | None = None
    ) -> tuple[Draft, State]:
        """As PEagle.propose."""
        token_ids, confidence, caches = model.propose_in_turn(
            self.params, self.config, fresh, _before(state, fresh, widths), state.caches, num_drafts, widths
        )
        return Draft(token_ids, None, confidence), State(caches, _held(state, fresh))


def drafter_of(params: DrafterParams, config: DrafterConfig) -> PEagle | Eagle3:
    """The drafter of either kind."""
    return PEagle(params, config) if config.parallel else Eagle3(params, config)


def _before(state: State, fresh: Fresh, widths: jax.Array | None) -> jax.Array:
    """How many rows the caches hold before the fresh ones: all of them, where none is ever left out."""
    return state.num_held if widths is None else fresh.first_position


def _held(state: State, fresh: Fresh) -> jax.Array:
    """How many rows the caches hold once they have the fresh ones."""
    return jnp.where(fresh.first_position < 0, state.num_held, state.num_held + fresh.num)


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
