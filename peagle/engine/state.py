"""Hold the decode state on the device between steps; insert a prefilled request into a slot, extract it again.

The slot is the leading axis of every leaf. Between steps, for each active slot:

    target_cache       holds the prompt and all emitted tokens but the last: `length` of them
    pending_token      is the last emitted token; it is in no cache
    drafter_state      lags by the tokens in drafter_input: rows first_position ..
                       first_position + num - 1 = length - 1. It has no gap, unless credit is below 0
    remaining          counts the tokens that may still be emitted
    credit             counts the plain steps that drafting may still lose (peagle.engine.widths); below 0 the slot
                       never drafts again

A slot that is done or was never filled is frozen: its rows have position -1, write nothing and emit nothing.
"""

import dataclasses
import math
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from peagle.engine.adjust import Adjustments
from peagle.engine.masks import all_allowed
from peagle.engine.request import MOST_STOP_TOKENS, Request, fold_seed
from peagle.engine.sampling import RowSampling
from peagle.engine.widths import allowance
from peagle.ops.kv_cache import KVCache, copy_positions
from peagle.ops.messages import DrafterInput
from peagle.protocols import Drafter, PyTree, Target

NO_STOP = -2  # fills unused stop token entries; neither a token nor NO_TOKEN
NO_CREDIT = -1.0
INPUT_ROOM = 128  # rows of drafter_input, at least; a row whose drafter is further behind drafts no more


@flax.struct.dataclass
class DecodeState:
    length: jax.Array  # [B] int32
    pending_token: jax.Array  # [B] int32
    drafter_input: DrafterInput | None  # None: this engine never drafts
    target_cache: PyTree
    drafter_state: PyTree
    done: jax.Array  # [B] bool
    remaining: jax.Array  # [B] int32
    credit: jax.Array  # [B] float32
    stop_token_ids: jax.Array  # [B, MOST_STOP_TOKENS] int32, NO_STOP in unused entries
    sampling: RowSampling
    adjustments: Adjustments  # only full steps keep its counts (peagle.engine.step.StepKind)

    @property
    def slots(self) -> int:
        return self.length.shape[0]

    @property
    def may_draft(self) -> jax.Array:
        """[B]: slots whose request goes on, and may draft again."""
        return ~self.done & (self.credit >= 0)


@flax.struct.dataclass
class Prefix:
    """The caches of one sequence of `length` tokens. Every leaf has one row.

    The target's caches hold positions 0..length-1, the drafter's rows 0..length-2: row length-1 needs the token that
    follows. aux_hidden is the target's at the last position.
    """

    target_cache: PyTree
    drafter_state: PyTree
    aux_hidden: jax.Array  # [1, A]
    length: jax.Array  # [1] int32


@flax.struct.dataclass
class SlotParams:
    """The parameters of a request as arrays of one row, for `insert`."""

    remaining: jax.Array | np.ndarray
    credit: jax.Array | np.ndarray
    stop_token_ids: jax.Array | np.ndarray
    sampling: RowSampling
    adjustments: Adjustments
    full: jax.Array | np.ndarray  # [1] bool: Request.full
    masks: jax.Array | np.ndarray  # [1, 1, W] uint32: the tokens that may come first

    @classmethod
    def of(
        cls,
        request: Request,
        stop_token_ids: tuple[int, ...],
        vocab_size: int,
        drafts: bool = True,
        masks: np.ndarray | None = None,
    ) -> "SlotParams":
        """Make the row of a request.

        stop_token_ids: the tokens that end it. drafts: whether it ever drafts. masks: None allows all first tokens.
        """
        wanted = request.sampling
        stops = np.full((1, MOST_STOP_TOKENS), NO_STOP, np.int32)
        stops[0, : len(stop_token_ids)] = stop_token_ids
        # decide here whether it is greedy: float32 rounds a temperature just below GREEDY_BELOW up to it
        temperature = 0.0 if wanted.greedy else wanted.temperature
        reals = np.asarray([[temperature], [wanted.top_p], [wanted.min_p]], np.float32)
        whole = np.asarray([[wanted.top_k], [fold_seed(wanted.seed)], [request.index]], np.int32)
        row = RowSampling(reals[0], whole[0], reals[1], reals[2], whole[1], whole[2])  # type: ignore[arg-type]
        budget, full = np.asarray([request.max_new_tokens], np.int32), np.asarray([request.full])
        credit = np.asarray([_first_credit(request) if drafts else NO_CREDIT], np.float32)
        masks = all_allowed(1, 1, vocab_size) if masks is None else masks
        return cls(budget, credit, stops, row, Adjustments.of(request, vocab_size), full, masks)

    def continued(self, output_ids: Sequence[int]) -> "SlotParams":
        """Make the row of a request that has emitted these tokens, the pending one last, in NumPy."""
        *before, _ = output_ids
        counts = np.array(self.adjustments.counts)
        np.add.at(counts[0], before, 1)
        must_emit = np.maximum(np.asarray(self.adjustments.must_emit) - len(before), 0)
        adjustments = dataclasses.replace(self.adjustments, counts=counts, must_emit=must_emit)  # type: ignore[arg-type]
        return dataclasses.replace(self, remaining=np.asarray(self.remaining) - len(before), adjustments=adjustments)


def _first_credit(request: Request) -> float:
    """Return a row's credit at its start. A request that sets its own K asks for drafts, whether they pay or not."""
    return math.inf if request.num_speculative_tokens is not None else allowance(request.max_new_tokens)


def init_state(target: Target, drafter: Drafter | None, slots: int, capacity: int, num_drafts: int) -> DecodeState:
    """Make a state of empty slots, with room for `capacity` positions and a step's rows."""
    zero = jnp.zeros((slots,), jnp.int32)
    cache = target.init_cache(slots, capacity, num_drafts + 1)
    drafter_input = drafter_state = None
    if drafter is not None:
        room = max(INPUT_ROOM, num_drafts + 1)
        drafter_state = drafter.init_state(slots, capacity, max(2 * num_drafts, room))
        token_ids = jnp.zeros((slots, room), jnp.int32)
        aux_hidden = jax.eval_shape(target.extend, token_ids, token_ids, cache)[0].aux_hidden
        drafter_input = DrafterInput(token_ids, jnp.zeros(aux_hidden.shape, aux_hidden.dtype), zero, zero)
    real = jnp.zeros((slots,), jnp.float32)
    return DecodeState(
        length=zero,
        pending_token=zero,
        drafter_input=drafter_input,
        target_cache=cache,
        drafter_state=drafter_state,
        done=jnp.ones((slots,), bool),
        remaining=zero,
        credit=real,
        stop_token_ids=jnp.full((slots, MOST_STOP_TOKENS), NO_STOP, jnp.int32),
        sampling=RowSampling(real, zero, real + 1, real, zero, zero),
        adjustments=Adjustments.none(slots, target.vocab_size),
    )


def insert(
    state: DecodeState, prefix: Prefix, first_token: Int[Array, " one"], slot: Int[Array, ""], params: SlotParams
) -> DecodeState:
    """Put a prompt and its first token into a slot; the first token counts as emitted.

    Copies the valid positions of the caches, not the capacity. If the first token is NO_TOKEN, the slot continues with
    token 0 until the host ends the request.
    """
    first_token = jnp.maximum(first_token, 0)

    def put(rows: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(rows, jnp.asarray(value, rows.dtype), slot, axis=0)

    length = prefix.length[0]
    drafter_input = state.drafter_input
    if drafter_input is not None:
        # one row: the first token, with the aux_hidden of the last prompt position
        drafter_input = DrafterInput(
            put_column(drafter_input.token_ids, first_token, slot),
            put_column(drafter_input.aux_hidden, prefix.aux_hidden.astype(drafter_input.aux_hidden.dtype), slot),
            put(drafter_input.num, jnp.ones((1,), jnp.int32)),
            put(drafter_input.first_position, prefix.length - 1),
        )
    stops = jnp.any(first_token[:, None] == params.stop_token_ids, axis=1)
    emits = jnp.ones((1, 1), bool)
    return DecodeState(
        length=put(state.length, prefix.length),
        pending_token=put(state.pending_token, first_token),
        drafter_input=drafter_input,
        target_cache=_move(state.target_cache, prefix.target_cache, slot, length),
        drafter_state=_move(state.drafter_state, prefix.drafter_state, slot, length - 1),
        done=put(state.done, stops | (jnp.asarray(params.remaining) <= 1)),
        remaining=put(state.remaining, jnp.asarray(params.remaining) - 1),
        credit=put(state.credit, jnp.asarray(params.credit)),
        stop_token_ids=put(state.stop_token_ids, jnp.asarray(params.stop_token_ids)),
        sampling=jax.tree.map(put, state.sampling, params.sampling),
        adjustments=jax.tree.map(put, state.adjustments, params.adjustments.emitted(first_token[:, None], emits)),
    )


def extract(state: DecodeState, empty: Prefix, slot: Int[Array, ""]) -> Prefix:
    """Extract the Prefix of a slot's tokens as far as its drafter has absorbed them. `empty` gives its shape.

    After peagle.engine.step.absorb these are all but the pending token, and `insert` with that as first token continues
    the request in any slot. After a drafted step they are those that the step began with, and its pending token. After
    more plain steps than that the sliding rings no longer hold what the Prefix needs. The slot's credit must not be
    below 0.
    """

    def row(leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=0)

    zero = jnp.zeros_like(slot)
    length = row(state.length if state.drafter_input is None else state.drafter_input.first_position + 1)
    target_cache, drafter_state = jax.tree.map(row, (state.target_cache, state.drafter_state))
    aux_hidden = empty.aux_hidden
    if state.drafter_input is not None:
        aux_hidden = row(state.drafter_input.aux_hidden)[:, 0].astype(aux_hidden.dtype)
    return Prefix(
        target_cache=_move(empty.target_cache, target_cache, zero, length[0]),
        drafter_state=_move(empty.drafter_state, drafter_state, zero, length[0] - 1),
        aux_hidden=aux_hidden,
        length=length,
    )


def _move(into: PyTree, source: PyTree, row: jax.Array, length: jax.Array) -> PyTree:
    """Copy the row of `source` into a row of `into`; of caches, the first `length` positions."""

    def one(cache: KVCache | jax.Array, given: KVCache | jax.Array) -> KVCache | jax.Array:
        if isinstance(cache, KVCache):
            assert isinstance(given, KVCache)
            return copy_positions(cache, given, row, length)
        assert not isinstance(given, KVCache)
        return jax.lax.dynamic_update_slice_in_dim(cache, given.astype(cache.dtype), row, axis=0)

    return jax.tree.map(one, into, source, is_leaf=lambda node: isinstance(node, KVCache))


def put_column(rows: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Set rows[slot, 0] = value[0]."""
    start = (slot, *(jnp.zeros_like(slot) for _ in rows.shape[1:]))
    return jax.lax.dynamic_update_slice(rows, value[:, None], start)


def is_stop(token_ids: Int[Array, "B T"], stop_token_ids: Int[Array, "B S"]) -> Bool[Array, "B T"]:
    """Test whether each token ends its row."""
    return jnp.any(token_ids[:, :, None] == stop_token_ids[:, None, :], axis=-1)


def check_integrity(state: DecodeState, capacity: int) -> None:
    """Raise AssertionError if an invariant of the state is broken.

    For tests: copies everything to the host.
    """
    slots = state.slots
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        assert leaf.shape[:1] == (slots,), f"{jax.tree_util.keystr(path)} has shape {leaf.shape}, not {slots} rows"
    active = ~np.asarray(state.done)
    length, remaining = np.asarray(state.length)[active], np.asarray(state.remaining)[active]
    assert (length >= 1).all(), length
    assert (remaining >= 1).all(), remaining
    assert (length + remaining <= capacity).all(), (length, remaining, capacity)
    if state.drafter_input is not None:
        drafts = np.asarray(state.may_draft)
        waiting = jax.tree.map(lambda leaf: np.asarray(leaf)[drafts], state.drafter_input)
        length, num, first = np.asarray(state.length)[drafts], waiting.num, waiting.first_position
        assert ((num >= 1) & (num <= waiting.token_ids.shape[1])).all(), num
        assert (first + num == length).all(), (first, num, length)
        last = np.take_along_axis(waiting.token_ids, num[:, None] - 1, axis=1)[:, 0]
        assert (last == np.asarray(state.pending_token)[drafts]).all()
