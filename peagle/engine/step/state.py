"""The state of slots between steps: take the slots of one pass, put them back, and admit a request.

The slot is the leading axis of every leaf but the pages, which all slots share. Between steps, for each active slot:

    target pages       hold the prompt and all emitted tokens but the last: `length` of them
    pending_token      is the last emitted token; it is in no page
    drafter pages      lag by the tokens in drafter_input: rows first_position ..
                       first_position + num - 1 = length - 1. They have no gap if `drafting` is ALWAYS
    remaining          counts the tokens that may still be emitted
    drafting           says which sources may draft (peagle.engine.request.Drafting)
    auto               remembers what drafting gained, in adaptive engines

A pass runs over the slots that the host names, gathered into a batch. The rows of a done slot, and of a batch entry
without a slot, have position -1: they write and emit nothing.
"""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from peagle.engine.auto.costs import StepCosts
from peagle.engine.auto.state import AutoState, Slots
from peagle.engine.request import MOST_STOP_TOKENS, Drafting, Request, fold_seed
from peagle.engine.step.adjust import Adjustments
from peagle.engine.step.masks import all_allowed
from peagle.engine.step.sampling import RowSampling
from peagle.ops.attention import PagedCache
from peagle.ops.messages import DrafterInput
from peagle.ops.put_rows import put_rows
from peagle.protocols import Drafter, PyTree, Target

NO_STOP = -2  # fills unused stop token entries; neither a token nor NO_TOKEN
# rows of drafter_input, at least; a slot whose drafter lags further never drafts again. Not 128, which a TPU would lay
# along its lanes, and transpose in every dispatch
INPUT_ROOM = 136


@flax.struct.dataclass
class DecodeState:
    """The state of all slots, or of the B slots of one pass (`take`)."""

    length: jax.Array  # [B] int32
    pending_token: jax.Array  # [B] int32
    drafter_input: DrafterInput | None  # None: the engine never drafts, or the pass keeps nothing for the drafter
    target_cache: PagedCache  # has tables only within a pass
    drafter_state: PyTree  # a PagedCache; of a drafter without caches, a tree whose leading axis is the slot
    done: jax.Array  # [B] bool
    remaining: jax.Array  # [B] int32
    drafting: jax.Array  # [B] int32: Drafting
    stop_token_ids: jax.Array  # [B, MOST_STOP_TOKENS] int32, NO_STOP in unused entries
    sampling: RowSampling
    adjustments: Adjustments | None  # taken by steps that need full logits (StepKind)
    auto: AutoState | None = None  # all slots share a part of it
    lookup_state: PyTree = None  # of the lookup drafter; the slot is the leading axis

    @property
    def slots(self) -> int:
        return self.length.shape[0]

    @property
    def may_draft(self) -> jax.Array:
        """[B]: active slots that draft, now or later."""
        return ~self.done & (self.drafting != Drafting.NEVER)

    @property
    def uses_drafter(self) -> jax.Array:
        """[B]: active slots whose rows the drafter reads, now or later."""
        return ~self.done & (self.drafting == Drafting.ALWAYS)

    def auto_slots(self, costs: StepCosts) -> Slots:
        """Describe the slots for peagle.engine.auto."""
        assert self.auto is not None
        return Slots(~self.done, ~self.sampling.greedy, costs, jnp.maximum(self.auto.rate, 1.0))


@flax.struct.dataclass
class SlotBatch:
    """The slots of one pass and their page tables."""

    slots: jax.Array  # [B] int32; an entry without a slot has the number of slots
    target_tables: tuple[jax.Array, ...]  # [B, M] int32 for each cache group
    drafter_tables: tuple[jax.Array, ...]


@flax.struct.dataclass
class SlotParams:
    """The parameters of requests as arrays, led by the request, for `admit`."""

    remaining: jax.Array | np.ndarray
    drafting: jax.Array | np.ndarray  # [B] int32: Drafting
    stop_token_ids: jax.Array | np.ndarray
    sampling: RowSampling
    adjustments: Adjustments
    full_logits: jax.Array | np.ndarray  # [B] bool: Request.full_logits
    masks: jax.Array | np.ndarray  # [B, 1, W] uint32: the allowed first tokens

    @classmethod
    def of(
        cls,
        request: Request,
        stop_token_ids: tuple[int, ...],
        vocab_size: int,
        drafting: Drafting = Drafting.ALWAYS,
        masks: np.ndarray | None = None,
    ) -> "SlotParams":
        """Make the row of a request.

        stop_token_ids: the tokens that end it. masks: None allows all first tokens.
        """
        sampling = request.sampling
        stops = np.full((1, MOST_STOP_TOKENS), NO_STOP, np.int32)
        stops[0, : len(stop_token_ids)] = stop_token_ids
        # decide greediness here: float32 rounds a temperature just below GREEDY_BELOW up to it
        temperature = 0.0 if sampling.greedy else sampling.temperature
        reals = np.asarray([[temperature], [sampling.top_p], [sampling.min_p]], np.float32)
        whole = np.asarray([[sampling.top_k], [fold_seed(sampling.seed)], [request.index]], np.int32)
        row = RowSampling(reals[0], whole[0], reals[1], reals[2], whole[1], whole[2])  # type: ignore[arg-type]
        return cls(
            remaining=np.asarray([request.max_new_tokens], np.int32),
            drafting=np.asarray([drafting], np.int32),
            stop_token_ids=stops,
            sampling=row,
            adjustments=Adjustments.of(request, vocab_size),
            full_logits=np.asarray([request.full_logits]),
            masks=all_allowed(1, 1, vocab_size) if masks is None else masks,
        )

    @classmethod
    def stack(cls, rows: Sequence["SlotParams"], size: int) -> "SlotParams":
        """Make one batch of `size` rows; missing ones repeat the first."""
        padded = [*rows, *[rows[0]] * (size - len(rows))]
        stacked: SlotParams = jax.tree.map(lambda *leaves: np.concatenate(leaves), *padded)
        return stacked

    def continued(self, output_ids: Sequence[int]) -> "SlotParams":
        """Make the row of a request that has emitted these tokens, the pending one last."""
        *before, _ = output_ids
        counts = np.array(self.adjustments.counts)
        np.add.at(counts[0], before, 1)
        must_emit = np.maximum(np.asarray(self.adjustments.must_emit) - len(before), 0)
        adjustments = dataclasses.replace(self.adjustments, counts=counts, must_emit=must_emit)  # type: ignore[arg-type]
        return dataclasses.replace(self, remaining=np.asarray(self.remaining) - len(before), adjustments=adjustments)


def init_state(
    target: Target,
    drafter: Drafter | None,
    lookup: Drafter | None,
    slots: int,
    capacity: int,
    num_drafts: int,
    target_pages: Sequence[int],
    drafter_pages: Sequence[int],
    adaptive: bool = False,
) -> DecodeState:
    """Make a state of empty slots. target_pages, drafter_pages: of each cache group."""
    zero = jnp.zeros((slots,), jnp.int32)
    num_sources = 1 if lookup is None else 2
    drafter_input = drafter_state = None
    if drafter is not None:
        room = max(INPUT_ROOM, num_drafts + 1)
        rows = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        aux = jax.eval_shape(lambda rows: target.extend(rows, rows, target.init_cache(1, 1, 1))[0].aux_hidden, rows)
        aux_hidden = jnp.zeros((slots, room, aux.shape[2]), aux.dtype)
        drafter_input = DrafterInput(jnp.zeros((slots, room), jnp.int32), aux_hidden, zero, zero)
        if drafter.cache_groups:
            drafter_state = PagedCache(drafter.init_pages(drafter_pages), ())
        else:
            drafter_state = drafter.init_state(slots, capacity, max(2 * num_drafts, room))
    real = jnp.zeros((slots,), jnp.float32)
    return DecodeState(
        length=zero,
        pending_token=zero,
        drafter_input=drafter_input,
        target_cache=PagedCache(target.init_pages(target_pages), ()),
        drafter_state=drafter_state,
        done=jnp.ones((slots,), bool),
        remaining=zero,
        drafting=zero,
        stop_token_ids=jnp.full((slots, MOST_STOP_TOKENS), NO_STOP, jnp.int32),
        sampling=RowSampling(real, zero, real + 1, real, zero, zero),
        adjustments=Adjustments.none(slots, target.vocab_size),
        auto=AutoState.start(slots, num_drafts, num_sources) if adaptive else None,
        lookup_state=None if lookup is None else lookup.init_state(slots, capacity, max(2 * num_drafts, INPUT_ROOM)),
    )


def take(state: DecodeState, batch: SlotBatch, input_rows: int | None, adjusts: bool) -> DecodeState:
    """Gather the slots of one pass, with their tables. A batch with an entry per slot holds them in order.

    input_rows: how many rows of drafter_input the pass needs; None: all; 0: no drafter_input. adjusts: it needs the
    adjustments.
    """
    slots, whole = batch.slots, batch.slots.shape[0] == state.slots

    def rows(leaf: jax.Array) -> jax.Array:
        return leaf if whole else leaf.at[slots].get(mode="clip")

    drafter_input = None if input_rows == 0 else state.drafter_input
    if drafter_input is not None:
        token_ids, aux_hidden = (leaf[:, :input_rows] for leaf in (drafter_input.token_ids, drafter_input.aux_hidden))
        drafter_input = dataclasses.replace(drafter_input, token_ids=token_ids, aux_hidden=aux_hidden)
    drafter_state, paged = state.drafter_state, isinstance(state.drafter_state, PagedCache)
    led_by_slot = dataclasses.replace(
        state,
        drafter_input=drafter_input,
        target_cache=None,  # type: ignore[arg-type]
        drafter_state=None if paged else drafter_state,
        adjustments=state.adjustments if adjusts else None,
        auto=None,
    )
    taken: DecodeState = jax.tree.map(rows, led_by_slot)
    return dataclasses.replace(
        taken,
        target_cache=PagedCache(state.target_cache.pages, batch.target_tables),
        drafter_state=PagedCache(drafter_state.pages, batch.drafter_tables) if paged else taken.drafter_state,
        done=taken.done | (slots >= state.slots),
        auto=state.auto and state.auto.map_slots(rows),
    )


def put(state: DecodeState, batch: SlotBatch, after: DecodeState) -> DecodeState:
    """Scatter the slots of a pass back (`take`). Leaves that the pass did not take stay."""
    slots, whole = batch.slots, batch.slots.shape[0] == state.slots

    def rows(into: jax.Array, leaf: jax.Array) -> jax.Array:
        if whole:
            return leaf
        return into.at[slots].set(leaf.astype(into.dtype), mode="drop")

    drafter_input, left = state.drafter_input, after.drafter_input
    if drafter_input is not None and left is not None:
        width = left.token_ids.shape[1]

        def columns(into: jax.Array, leaf: jax.Array) -> jax.Array:
            if whole:
                return jax.lax.dynamic_update_slice_in_dim(into, leaf, 0, 1)
            return into.at[slots, :width].set(leaf, mode="drop")

        drafter_input = DrafterInput(
            columns(drafter_input.token_ids, left.token_ids),
            columns(drafter_input.aux_hidden, left.aux_hidden),
            rows(drafter_input.num, left.num),
            rows(drafter_input.first_position, left.first_position),
        )
    drafter_state = after.drafter_state
    if isinstance(drafter_state, PagedCache):
        drafter_state = PagedCache(drafter_state.pages, ())
    else:
        drafter_state = jax.tree.map(rows, state.drafter_state, drafter_state)
    # a whole batch also holds inactive slots: done within the pass, restored afterwards
    done = jnp.where(slots >= state.slots, state.done, after.done) if whole else rows(state.done, after.done)
    names = ["length", "pending_token", "remaining", "drafting", "lookup_state"]
    names += ["adjustments"] if after.adjustments is not None else []
    changed = {name: jax.tree.map(rows, getattr(state, name), getattr(after, name)) for name in names}
    return dataclasses.replace(
        state,
        **changed,
        drafter_input=drafter_input,
        target_cache=PagedCache(after.target_cache.pages, ()),
        drafter_state=drafter_state,
        done=done,
        auto=state.auto and after.auto and after.auto.map_slots(lambda leaf, into: rows(into, leaf), state.auto),
    )


def admit(
    state: DecodeState,
    slots: Int[Array, " n"],
    length: Int[Array, " n"],
    token_ids: Int[Array, " n"],
    aux_hidden: Float[Array, "n A"],
    params: SlotParams,
) -> DecodeState:
    """Admit requests to their slots: `length` tokens are in pages; token_ids follow them and count as emitted.

    aux_hidden: the target's at position length - 1. Entries without a slot are dropped. After NO_TOKEN a slot continues
    with token 0, until the host ends the request.
    """
    token_ids = jnp.maximum(token_ids, 0)

    def rows(into: jax.Array, value: jax.Array | np.ndarray) -> jax.Array:
        return into.at[slots].set(jnp.asarray(value, into.dtype), mode="drop")

    drafter_input = state.drafter_input
    if drafter_input is not None:
        # one row: the token that follows, with the aux_hidden of the position before it
        entry = jnp.full((state.slots,), -1, jnp.int32).at[slots].set(jnp.arange(len(slots)), mode="drop")
        begin, count = jnp.zeros_like(entry), (entry >= 0).astype(jnp.int32)
        drafter_input = DrafterInput(
            put_rows(drafter_input.token_ids, token_ids[entry][:, None], begin, count),
            put_rows(drafter_input.aux_hidden, aux_hidden[entry][:, None], begin, count),
            rows(drafter_input.num, jnp.ones_like(length)),
            rows(drafter_input.first_position, length - 1),
        )
    stops = jnp.any(token_ids[:, None] == params.stop_token_ids, axis=1)
    emitted = params.adjustments.emitted(token_ids[:, None], jnp.ones_like(token_ids[:, None], dtype=bool))
    return dataclasses.replace(
        state,
        length=rows(state.length, length),
        pending_token=rows(state.pending_token, token_ids),
        drafter_input=drafter_input,
        done=rows(state.done, stops | (jnp.asarray(params.remaining) <= 1)),
        remaining=rows(state.remaining, jnp.asarray(params.remaining) - 1),
        drafting=rows(state.drafting, params.drafting),
        stop_token_ids=rows(state.stop_token_ids, params.stop_token_ids),
        sampling=jax.tree.map(rows, state.sampling, params.sampling),
        adjustments=jax.tree.map(rows, state.adjustments, emitted),
        auto=state.auto and state.auto.map_slots(rows, state.auto.entered(~params.sampling.greedy)),
    )
