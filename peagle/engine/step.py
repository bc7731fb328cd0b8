"""Run one decoding step: propose, verify, accept, commit. Pure functions; the host decides and reads nothing.

    state ──► propose ──► verify ──► accept ──► commit ──► state'
              drafter      target     pure       pure
              2K rows      K+1 rows

Slot b drafts and verifies widths[b] <= K tokens. Its further rows have position -1, which kernels skip.

A plain step does not run the drafter. It appends the committed token to drafter_input, and `absorb` passes those tokens
to the drafter later, so that the drafter's cache has no gap when the slot drafts again. A slot whose credit is below 0
never drafts again and keeps nothing.

For grammars the step can be cut after `propose` and after `verify`. While the target verifies, the host reads the
drafts and computes the masks that `accept` takes (peagle.engine.grammar).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from peagle.engine.accept import Acceptance, accept, accept_by_rate
from peagle.engine.adjust import adjust
from peagle.engine.sampling import LogProbs, choose, draw_keys, log_probs
from peagle.engine.state import NO_CREDIT, DecodeState, is_stop
from peagle.engine.widths import credit_after
from peagle.ops.messages import DrafterInput, VerifyOutput, likeliest_of
from peagle.protocols import Drafter, Target

DRAFT_PART, VERIFY_PART, ACCEPT_PART = PARTS = ("draft", "verify", "accept")  # named scopes, for the profiler


@dataclass(frozen=True)
class StepKind:
    """A variant of the step; each compiles its own program.

    num_drafts 0: plain steps. sampled: some row is not greedy; such rows draw their drafts, by the keys of the target's
    draws. full: some row has its logits adjusted or needs log-probabilities (peagle.engine.request.Request.full).
    synthetic_acceptance: see `accept_by_rate`. lean: plain steps of rows that all draft no more, so nothing is kept for
    the drafter. goes_on: once all rows have spent their credit, lean steps follow the drafted ones within a dispatch.
    """

    num_drafts: int
    sampled: bool = False
    full: bool = False
    synthetic_acceptance: tuple[float, ...] | None = None
    lean: bool = False
    goes_on: bool = False


@flax.struct.dataclass
class StepOutput:
    """The output of a step for the host.

    A slot that was done before has count 0 and num_accepted -1.
    """

    count: jax.Array | np.ndarray  # [B]: emitted tokens, 0..K+1, cut after a stop token and at the budget
    num_accepted: jax.Array | np.ndarray  # [B]: before that cut
    num_verified: jax.Array | np.ndarray  # [B]
    done: jax.Array | np.ndarray  # [B]
    paused: jax.Array | np.ndarray  # [B]: its credit is below 0
    token_ids: jax.Array | np.ndarray  # [B, K+1]: accepted drafts, then next_token or NO_TOKEN, then leftovers
    draft_token_ids: jax.Array | np.ndarray  # [B, K]; leftovers from num_verified on
    log_probs: LogProbs | None = None  # of token_ids, in full steps

    def padded(self, num_more: int) -> "StepOutput":
        """Pad the output by `num_more` drafts, so that it packs as that of a step with as many more."""

        def pad(leaf: jax.Array | np.ndarray) -> jax.Array:
            return jnp.pad(leaf, ((0, 0), (0, num_more), *((0, 0) for _ in leaf.shape[2:])))

        drafts, log_probs = pad(self.draft_token_ids), jax.tree.map(pad, self.log_probs)
        return dataclasses.replace(self, token_ids=pad(self.token_ids), draft_token_ids=drafts, log_probs=log_probs)

    def pack(self) -> Int[Array, "B W"]:
        """Pack into one array: one copy to the host instead of seven."""
        flags = jnp.asarray(self.done).astype(jnp.int32) + 2 * jnp.asarray(self.paused).astype(jnp.int32)
        numbers = (self.count, self.num_accepted, self.num_verified, flags)
        columns = [jnp.asarray(number).astype(jnp.int32)[:, None] for number in numbers]
        columns += [jnp.asarray(self.token_ids), jnp.asarray(self.draft_token_ids)]
        if self.log_probs is not None:
            packed = self.log_probs.pack()
            columns.append(packed.reshape(packed.shape[0], -1))
        return jnp.concatenate(columns, axis=1)

    @classmethod
    def unpack(cls, packed: np.ndarray, num_drafts: int) -> "StepOutput":
        """Undo `pack`; leading axes stay."""
        parts = np.cumsum([1, 1, 1, 1, num_drafts + 1, num_drafts])
        *numbers, tokens, drafts, rest = np.split(packed, parts, axis=-1)
        count, num_accepted, num_verified, flags = (number[..., 0] for number in numbers)
        log_probs = None
        if rest.shape[-1]:
            log_probs = LogProbs.unpack(rest.reshape(*rest.shape[:-1], num_drafts + 1, -1))
        return cls(count, num_accepted, num_verified, flags & 1 != 0, flags & 2 != 0, tokens, drafts, log_probs)


@flax.struct.dataclass
class Proposed:
    """Drafts that are not verified yet."""

    widths: jax.Array  # [B]: drafts to verify; 0 in a slot that is done
    draft_token_ids: jax.Array  # [B, K]
    keys: jax.Array | None  # [B, K+1, 2]: of draws (peagle.engine.sampling); None: all rows are greedy


def step(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    widths: Int[Array, " B"],
    cost: Float[Array, ""],
    kind: StepKind,
) -> tuple[DecodeState, StepOutput]:
    """Run one step: every active slot emits between 1 and widths[b] + 1 tokens. cost: its time, in plain steps; 0 where
    it is unknown, and no row pauses."""
    state, proposed = propose(drafter, state, widths, kind)
    state, verified = verify(target, state, proposed)
    return accept_and_commit(state, proposed, verified, cost, kind)


def propose(
    drafter: Drafter | None, state: DecodeState, widths: Int[Array, " B"], kind: StepKind
) -> tuple[DecodeState, Proposed]:
    """Propose the drafts of a step; of the state, only the drafter's changes."""
    widths = jnp.where(state.may_draft, jnp.minimum(widths, kind.num_drafts), 0)
    keys = None
    if kind.sampled or kind.synthetic_acceptance is not None:
        reach = jnp.arange(1, kind.num_drafts + 2, dtype=jnp.int32)
        keys = draw_keys(state.sampling, state.length[:, None] + reach[None, :])
    drafts = jnp.zeros((state.slots, 0), jnp.int32)
    if kind.num_drafts:
        with jax.named_scope(DRAFT_PART):
            drafts, state = _propose(drafter, state, widths, keys, kind)
    return state, Proposed(widths, drafts, keys)


def verify(target: Target, state: DecodeState, proposed: Proposed) -> tuple[DecodeState, VerifyOutput]:
    """Run the target over the pending token and the drafts; of the state, only the target's cache changes."""
    with jax.named_scope(VERIFY_PART):
        rows = jnp.concatenate([state.pending_token[:, None], proposed.draft_token_ids], axis=1)
        place = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
        verified = ~state.done[:, None] & (place <= proposed.widths[:, None])
        positions = jnp.where(verified, state.length[:, None] + place, -1)
        output, target_cache = target.extend(rows, positions, state.target_cache)
        return dataclasses.replace(state, target_cache=target_cache), output


def accept_and_commit(
    state: DecodeState,
    proposed: Proposed,
    verified: VerifyOutput,
    cost: Float[Array, ""],
    kind: StepKind,
    masks: UInt32[Array, "B T W"] | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Accept drafts and commit what follows; the caches stay as they are.

    masks: allowed tokens of each row (peagle.engine.adjust), in full steps.
    """
    drafts, logits, keys = proposed.draft_token_ids, verified.logits, proposed.keys
    with jax.named_scope(ACCEPT_PART):
        if kind.full:
            assert state.adjustments is not None
            logits = adjust(logits, drafts, state.adjustments, state.stop_token_ids, masks)
        if kind.synthetic_acceptance is not None:
            assert keys is not None
            acceptance = accept_by_rate(
                kind.synthetic_acceptance, drafts, logits, proposed.widths, state.sampling, keys, kind.sampled
            )
        else:
            acceptance = accept(drafts, logits, proposed.widths, state.sampling, keys)
        return _commit(state, proposed, verified, acceptance, cost, kind.full)


def _propose(
    drafter: Drafter | None, state: DecodeState, widths: jax.Array, keys: jax.Array | None, kind: StepKind
) -> tuple[jax.Array, DecodeState]:
    """Propose K drafts; return (drafts, the state). keys: drafts of rows that are not greedy are drawn by them."""
    assert drafter is not None
    assert state.drafter_input is not None
    whole = state.drafter_input
    first_position = jnp.where(state.may_draft, whole.first_position, -1)
    num_rows = kind.num_drafts + 1  # a step commits no more; `absorb` has taken the rest
    drafter_input = DrafterInput(
        whole.token_ids[:, :num_rows], whole.aux_hidden[:, :num_rows], whole.num, first_position
    )

    # drafts are not truncated: that takes time and gains nothing (1.57, 2.03, 2.29 either way at top-p .9, K = 1, 3, 7)
    whole_law = dataclasses.replace(
        state.sampling,
        top_k=jnp.zeros_like(state.sampling.top_k),
        top_p=jnp.ones_like(state.sampling.top_p),
        min_p=jnp.zeros_like(state.sampling.min_p),
    )

    def draw(logits: jax.Array, token_ids: jax.Array | None, first: int) -> jax.Array:
        assert keys is not None
        return choose(logits, whole_law, keys[:, first : first + logits.shape[1]], token_ids)

    chooser = draw if kind.sampled else likeliest_of
    draft, drafter_state = drafter.propose(state.drafter_state, drafter_input, widths, kind.num_drafts, chooser)
    return draft.token_ids, dataclasses.replace(state, drafter_state=drafter_state)


def _commit(
    state: DecodeState,
    proposed: Proposed,
    verified: VerifyOutput,
    acceptance: Acceptance,
    cost: jax.Array,
    full: bool,
) -> tuple[DecodeState, StepOutput]:
    """Emit num_accepted drafts and next_token; return (the state, the output for the host).

    Rejected rows are dead because `length` excludes them. A stop token inside the run, or the budget, ends the row
    there. The output holds NO_TOKEN, so that the host can end the request; on the device the row continues with token
    0.
    """
    drafts = proposed.draft_token_ids
    active, num_drafts = ~state.done, drafts.shape[1]
    place = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :]
    accepted = acceptance.num_accepted[:, None]
    next_token = jnp.maximum(acceptance.next_token, 0)
    run = jnp.where(place == accepted, next_token[:, None], jnp.pad(drafts, ((0, 0), (0, 1))))

    in_run = place <= accepted
    stops = in_run & is_stop(run, state.stop_token_ids)
    first_stop = jnp.min(jnp.where(stops, place, num_drafts + 1), axis=1, keepdims=True)
    kept = in_run & (place <= first_stop) & (place < state.remaining[:, None]) & active[:, None]
    count = jnp.sum(kept, axis=1, dtype=jnp.int32)
    remaining = state.remaining - count
    done = state.done | jnp.any(stops & kept, axis=1) | (remaining <= 0)

    num_new = acceptance.num_accepted + 1
    spent = credit_after(state.credit, acceptance.num_accepted.astype(jnp.float32), cost)
    credit = jnp.where(proposed.widths > 0, spent, state.credit)
    drafter_input, too_far_behind = _input_after(state, run, verified.aux_hidden, num_new)
    credit = jnp.where(too_far_behind, NO_CREDIT, credit)
    after = dataclasses.replace(
        state,
        length=jnp.where(active, state.length + num_new, state.length),
        pending_token=jnp.where(active, next_token, state.pending_token),
        drafter_input=drafter_input,
        done=done,
        remaining=remaining,
        credit=credit,
    )
    token_ids, found = jnp.where(place == accepted, acceptance.next_token[:, None], run), None
    if full:
        assert state.adjustments is not None
        after = dataclasses.replace(after, adjustments=state.adjustments.emitted(run, kept))
        found = log_probs(verified.logits, token_ids)
    output = StepOutput(
        count=count,
        num_accepted=jnp.where(active, acceptance.num_accepted, -1),
        num_verified=proposed.widths,
        done=done,
        paused=credit < 0,
        token_ids=token_ids,
        draft_token_ids=drafts,
        log_probs=found,
    )
    return after, output


def _input_after(
    state: DecodeState, run: jax.Array, aux_hidden: jax.Array, num_new: jax.Array
) -> tuple[DrafterInput | None, jax.Array]:
    """Replace the drafter's input by the committed rows; after a plain step, append its row.

    Returns (the input, [B] whether it had no room left for the row).
    """
    before = state.drafter_input
    if before is None:
        return None, jnp.zeros_like(state.done)
    aux_hidden = aux_hidden.astype(before.aux_hidden.dtype)
    if run.shape[1] > 1:

        def put(into: jax.Array, rows: jax.Array) -> jax.Array:
            done = state.done.reshape(-1, *(1 for _ in rows.shape[1:]))  # rows that stand still keep their input
            rows = jnp.where(done, into[:, : rows.shape[1]], rows)
            return jax.lax.dynamic_update_slice_in_dim(into, rows, 0, 1)

        token_ids, aux = put(before.token_ids, run), put(before.aux_hidden, aux_hidden)
        num, first_position = (
            jnp.where(state.done, old, new)
            for old, new in ((before.num, num_new), (before.first_position, state.length))
        )
        return DrafterInput(token_ids, aux, num, first_position), jnp.zeros_like(state.done)
    full = ~state.done & (before.num >= before.token_ids.shape[1])
    room = before.token_ids.shape[1]

    def append(into: jax.Array, rows: jax.Array) -> jax.Array:
        if state.slots == 1:  # the checks of a scatter take as long as a layer of a small target
            # one slot stands still only if it is done, and then nobody reads its rewritten row
            return jax.lax.dynamic_update_slice_in_dim(into, rows, jnp.minimum(before.num, room - 1)[0], 1)
        place = jnp.where(state.done, room, jnp.minimum(before.num, room - 1))  # rows that stand still keep their input
        return into.at[jnp.arange(state.slots), place].set(rows[:, 0], mode="drop")

    num = jnp.where(state.done | full, before.num, before.num + 1)
    token_ids, aux = append(before.token_ids, run), append(before.aux_hidden, aux_hidden)
    return DrafterInput(token_ids, aux, num, before.first_position), full


def absorb(drafter: Drafter, state: DecodeState) -> DecodeState:
    """Let the drafter absorb its input but the last row of each slot: its next pass begins there."""
    before = state.drafter_input
    assert before is not None
    place = jnp.arange(before.token_ids.shape[1], dtype=jnp.int32)[None, :]
    taken = (place < before.num[:, None] - 1) & state.may_draft[:, None]
    positions = jnp.where(taken, before.first_position[:, None] + place, -1)
    with jax.named_scope(DRAFT_PART):
        drafter_state = drafter.absorb(state.drafter_state, before.token_ids, before.aux_hidden, positions)
    last = jnp.where(state.done, 0, jnp.maximum(before.num - 1, 0))  # rows that stand still keep their input

    def first(rows: jax.Array) -> jax.Array:
        index = last.reshape(-1, *(1 for _ in rows.shape[1:]))
        return jax.lax.dynamic_update_slice_in_dim(rows, jnp.take_along_axis(rows, index, axis=1), 0, 1)

    left = DrafterInput(
        first(before.token_ids),
        first(before.aux_hidden),
        jnp.where(state.done, before.num, jnp.minimum(before.num, 1)),
        before.first_position + last,
    )
    return dataclasses.replace(state, drafter_input=left, drafter_state=drafter_state)


def steps(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    widths: Int[Array, " B"],
    cost: Float[Array, ""],
    limit: Int[Array, ""],
    kind: StepKind,
    most: int,
) -> tuple[DecodeState, Int[Array, "most B W"]]:
    """Run `limit` <= most steps of the slots of a pass; return (their state, packed outputs).

    Stops early if all are done; drafted steps also if no slot drafts any more, as plain steps are then cheaper: these
    follow at once in kinds that go on, as the host would send them two dispatches later. Outputs of steps that were not
    run look like steps of slots that were done before.
    """
    if most == 1:
        state, output = step(target, drafter, state, widths, cost, kind)
        return state, output.pack()[None]
    width = 2 * kind.num_drafts + 5
    if kind.full:
        width += (kind.num_drafts + 1) * LogProbs.packed_width(target.vocab_size)
    empty = jnp.zeros((most, state.slots, width), jnp.int32).at[:, :, 1].set(-1).at[:, :, 3].set(1)

    def run_while(
        may_go_on: Callable[[DecodeState], jax.Array], kind_now: StepKind, run: tuple[DecodeState, jax.Array, jax.Array]
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        """Run steps; return (the state, the outputs, how many there are)."""

        def one(run: tuple[DecodeState, jax.Array, jax.Array]) -> tuple[DecodeState, jax.Array, jax.Array]:
            state, outputs, count = run
            state, output = step(target, drafter, state, widths, cost, kind_now)
            packed = output.padded(kind.num_drafts - kind_now.num_drafts).pack()
            return state, jax.lax.dynamic_update_index_in_dim(outputs, packed, count, 0), count + 1

        return jax.lax.while_loop(lambda run: (run[2] < limit) & may_go_on(run[0]), one, run)

    none = jnp.zeros((), jnp.int32)
    if not kind.num_drafts:
        state, outputs, _ = run_while(lambda state: jnp.any(~state.done), kind, (state, empty, none))
        return state, outputs
    state, outputs, count = run_while(lambda state: jnp.any(state.may_draft & (widths > 0)), kind, (state, empty, none))
    if kind.goes_on:
        plain = dataclasses.replace(kind, num_drafts=0, lean=True, goes_on=False)
        lean = dataclasses.replace(state, drafter_input=None, drafter_state=None)
        lean, outputs, _ = run_while(
            lambda state: jnp.any(~state.done) & ~jnp.any(state.may_draft), plain, (lean, outputs, count)
        )
        state = dataclasses.replace(lean, drafter_input=state.drafter_input, drafter_state=state.drafter_state)
    return state, outputs
