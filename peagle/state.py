"""What is known between two steps, on the device, and how a step changes it.

Invariants, per active row, between steps:
    the target's caches hold exactly the prompt and all emitted tokens but the last: `length` of them
    `pending_token` is that last one: emitted, in no cache
    the drafter lags by the tokens committed since it ran last: `fresh.num` of them, fresh.first_position = length -
    fresh.num; where that is more than fit, the later ones have taken the places of the earlier (`overdue`)
A row that is done is frozen: steps go on computing it, and change nothing that is read.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle import policy
from peagle.config import Ladder
from peagle.ops.messages import Fresh
from peagle.policy import Outlook
from peagle.protocols import Acceptance, PyTree

# rows that may wait for a drafter that rests, at least twice what a step commits. A pause may be longer: what lies
# before them it never sees
FRESH_ROOM = 16


@flax.struct.dataclass
class DecodeState:
    length: jax.Array  # [B] int32
    pending_token: jax.Array  # [B] int32
    fresh: Fresh
    target_cache: PyTree
    drafter_state: PyTree
    done: jax.Array  # [B] bool
    remaining: jax.Array  # [B] int32: tokens that may still be emitted
    key: jax.Array  # [B] PRNG keys: the row's random numbers, a function of its request alone
    stop_token_ids: jax.Array  # [S] int32, S may be 0
    outlook: Outlook | None  # what each step's choice of widths goes by; None where a step has nothing to choose


@flax.struct.dataclass
class Proposal:
    """The drafts of a step: K places, however many are drafted, or none in a step that cannot draft."""

    token_ids: jax.Array  # [B, K]
    confidence: jax.Array  # [B, K]
    probs: jax.Array | None  # [B, K, V] where drafts are sampled
    verified: jax.Array  # [] int32: the rung of how many of them to verify


@flax.struct.dataclass
class Verdict:
    """What the target said of them."""

    acceptance: Acceptance
    aux_hidden: jax.Array  # [B, K+1, A]: of the verified rows, then leftovers


@flax.struct.dataclass
class StepOutput:
    """What the host reads of a step. A row that was done before it has count 0 and num_accepted -1."""

    count: jax.Array | np.ndarray  # [B]: emitted tokens, 0..K+1: cut behind a stop token and at the budget
    num_accepted: jax.Array | np.ndarray  # [B]: before that cut
    num_verified: jax.Array | np.ndarray  # [B]: drafts that were verified, 0..K
    done: jax.Array | np.ndarray  # [B]
    token_ids: (
        jax.Array | np.ndarray
    )  # [B, K+1]: accepted drafts, then next_token, or NO_TOKEN, at index num_accepted; then leftovers
    draft_token_ids: jax.Array | np.ndarray  # [B, K]; from num_verified on leftovers
    confidence: jax.Array | np.ndarray  # [B, K]: the drafter's, as far as it gives any

    def pack(self, num_drafts: int) -> Int[Array, "B W"]:
        """All of it in one array, for K = num_drafts places: one copy to the host instead of seven."""

        def widen(values: jax.Array | np.ndarray, width: int) -> jax.Array:
            return jnp.pad(values, ((0, 0), (0, width - values.shape[1])))

        numbers = (self.count, self.num_accepted, self.num_verified, self.done)
        return jnp.concatenate(
            [
                *(number.astype(jnp.int32)[:, None] for number in numbers),
                widen(self.token_ids, num_drafts + 1),
                widen(self.draft_token_ids, num_drafts),
                widen(jax.lax.bitcast_convert_type(self.confidence, jnp.int32), num_drafts),
            ],
            axis=1,
        )

    @classmethod
    def unpack(cls, packed: np.ndarray, num_drafts: int) -> "StepOutput":
        """What was packed, on the host; leading axes stay."""
        ends = np.cumsum([1, 1, 1, 1, num_drafts + 1, num_drafts])
        *numbers, tokens, drafts, confidence = np.split(packed, ends, axis=-1)
        count, num_accepted, num_verified, done = (number[..., 0] for number in numbers)
        confidence = np.ascontiguousarray(confidence).view(np.float32)
        return cls(count, num_accepted, num_verified, done != 0, tokens, drafts, confidence)


def empty_outputs(count: int, batch: int, num_drafts: int) -> Int[Array, "count B W"]:
    """The packed outputs of `count` steps of rows that were done before."""
    nothing = jnp.zeros((batch,), jnp.int32)
    drafts = jnp.zeros((batch, 0), jnp.int32)
    output = StepOutput(nothing, nothing - 1, nothing, nothing + 1, drafts, drafts, drafts.astype(jnp.float32))
    return jnp.broadcast_to(output.pack(num_drafts), (count, batch, 3 * num_drafts + 5))


def init_state(
    first_token: Int[Array, " B"],
    lengths: Int[Array, " B"],
    last_aux_hidden: Float[Array, "B A"],
    ladder: Ladder,
    outlook: Outlook | None,
    budgets: Int[Array, " B"],
    key: jax.Array,
    stop_token_ids: Int[Array, " S"],
) -> DecodeState:
    """The state after prefill and the first token, which counts as emitted, but for what the target and the drafter
    keep. A row of budget 0 is done from the start; where the first token is NO_TOKEN, it goes on with 0.

    A ladder of several numbers needs an outlook, unless the host chooses.
    """
    first_token = jnp.maximum(first_token, 0)
    batch, width = first_token.shape[0], ladder[-1] + 1
    places = width if len(ladder) == 1 else 2 * max(2 * width, FRESH_ROOM)  # twice the room: see overdue
    fresh = Fresh(
        token_ids=jnp.zeros((batch, places), jnp.int32).at[:, 0].set(first_token),
        aux_hidden=jnp.zeros((batch, places, last_aux_hidden.shape[1]), last_aux_hidden.dtype)
        .at[:, 0]
        .set(last_aux_hidden),
        num=jnp.ones((batch,), jnp.int32),
        first_position=lengths - 1,
    )
    return DecodeState(
        length=lengths,
        pending_token=first_token,
        fresh=fresh,
        target_cache=None,
        drafter_state=None,
        done=(budgets <= 1) | _is_stop(first_token, stop_token_ids),
        remaining=budgets - 1,
        key=key,
        stop_token_ids=stop_token_ids,
        outlook=outlook,
    )


def commit(
    state: DecodeState,
    ladder: Ladder,
    drafted: Int[Array, ""],
    proposal: Proposal,
    verdict: Verdict,
    *,
    drafter_ran: bool,
) -> tuple[DecodeState, StepOutput]:
    """The state with num_accepted drafts and next_token emitted, and what the host will read of it. `drafted` is the
    rung of how many tokens were drafted.

    Rejected rows are dead because `length` excludes them. A stop token inside the run, or the budget, ends the row
    there. NO_TOKEN is said in the output, for the host to stop; on the device the row goes on with token 0.
    """
    active = ~state.done
    num_drafts, acceptance = proposal.token_ids.shape[1], verdict.acceptance
    next_token = jnp.maximum(acceptance.next_token, 0)
    steps = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :]
    accepted = acceptance.num_accepted[:, None]
    drafts = jnp.pad(proposal.token_ids, ((0, 0), (0, 1)))
    run = jnp.where(steps == accepted, next_token[:, None], drafts)

    in_run = steps <= accepted
    stops = in_run & _is_stop(run, state.stop_token_ids)
    first_stop = jnp.min(jnp.where(stops, steps, num_drafts + 1), axis=1, keepdims=True)
    kept = in_run & (steps <= first_stop) & (steps < state.remaining[:, None]) & active[:, None]
    count = jnp.sum(kept, axis=1, dtype=jnp.int32)
    remaining = state.remaining - count
    done = state.done | jnp.any(stops & kept, axis=1) | (remaining <= 0)

    num_new = acceptance.num_accepted + 1
    committed = Fresh(token_ids=run, aux_hidden=verdict.aux_hidden, num=num_new, first_position=state.length)
    fresh, outlook = put_first(committed, state.fresh) if drafter_ran else state.fresh, state.outlook
    if outlook is not None and drafter_ran:
        outlook = policy.learn(
            outlook, ladder, drafted, proposal.verified, proposal.confidence, acceptance.num_accepted, active
        )
    elif len(ladder) > 1:
        fresh = _behind(committed, state.fresh)
        outlook = None if outlook is None else policy.rested(outlook)
    state = dataclasses.replace(
        state,
        length=jnp.where(active, state.length + num_new, state.length),
        pending_token=jnp.where(active, next_token, state.pending_token),
        fresh=fresh,
        done=done,
        remaining=remaining,
        outlook=outlook,
    )
    num_verified = jnp.asarray(ladder, jnp.int32)[proposal.verified]
    output = StepOutput(
        count=count,
        num_accepted=jnp.where(active, acceptance.num_accepted, -1),
        num_verified=jnp.where(active, num_verified, 0),
        done=done,
        token_ids=jnp.where(steps == accepted, acceptance.next_token[:, None], run),
        draft_token_ids=proposal.token_ids,
        confidence=proposal.confidence,
    )
    return state, output


def first_rows(waiting: Fresh, width: int) -> Fresh:
    """The same with the first `width` places alone, where no more rows wait."""
    return dataclasses.replace(
        waiting, token_ids=waiting.token_ids[:, :width], aux_hidden=waiting.aux_hidden[:, :width]
    )


def put_first(committed: Fresh, taken: Fresh) -> Fresh:
    """The fresh rows after a step whose drafter took those before it: what was committed now."""

    def put(into: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(into, new, 0, 1)

    token_ids = put(taken.token_ids, committed.token_ids)
    return dataclasses.replace(committed, token_ids=token_ids, aux_hidden=put(taken.aux_hidden, committed.aux_hidden))


def _behind(committed: Fresh, waiting: Fresh) -> Fresh:
    """The fresh rows after a plain step: the one row committed, behind those that wait for the drafter, round about,
    and once more as far behind as there is room for rows (`overdue`)."""
    rows = jnp.arange(waiting.num.shape[0], dtype=jnp.int32)
    room = waiting.token_ids.shape[1] // 2
    place = waiting.num % room

    def put(into: jax.Array, new: jax.Array) -> jax.Array:
        if len(rows) == 1:  # the checks of a scatter take as long as a layer of a small target
            into = jax.lax.dynamic_update_slice_in_dim(into, new[:, :1], place[0], 1)
            return jax.lax.dynamic_update_slice_in_dim(into, new[:, :1], place[0] + room, 1)
        return into.at[rows, place].set(new[:, 0]).at[rows, place + room].set(new[:, 0])

    return Fresh(
        put(waiting.token_ids, committed.token_ids),
        put(waiting.aux_hidden, committed.aux_hidden),
        waiting.num + 1,
        waiting.first_position,
    )


def overdue(waiting: Fresh, width: int) -> tuple[Fresh, Fresh]:
    """(the rows that wait for the drafter before the last `width`, as far as there was room for them, inactive in a
    sequence that has none; those last ones, from the first place on, as put_first leaves them).

    There are twice as many places as room: what has come round is in both halves, and so those wanted always lie side
    by side. Example: room for 4, rows a b c d e f have come: the places hold e f c d, e f . .; with width 1 c d e from
    first_position + 2 are overdue, and f is left.
    """
    room = waiting.token_ids.shape[1] // 2
    lost = jnp.maximum(waiting.num - room, 0)
    num = waiting.num - lost
    before = jnp.maximum(num - width, 0)

    def take(start: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        def part(rows: jax.Array) -> jax.Array:
            if len(rows) == 1:  # as in _behind
                return jax.lax.dynamic_slice_in_dim(rows, start[0], count, 1)
            return jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, count, 0))(rows, start)

        return part(waiting.token_ids), part(waiting.aux_hidden)

    begin, first_position = lost % room, waiting.first_position + lost
    older = Fresh(*take(begin, room - width), before, jnp.where(before > 0, first_position, -1))
    newer = Fresh(*take(begin + before, width), num - before, first_position + before)
    return older, put_first(newer, waiting)


def _is_stop(token_ids: Int[Array, "..."], stop_token_ids: Int[Array, " S"]) -> Bool[Array, "..."]:
    stops = stop_token_ids.reshape((1,) * token_ids.ndim + (-1,))
    return jnp.any(token_ids[..., None] == stops, axis=-1)
