"""Run one decoding step: propose, verify, accept, commit. Pure functions; the host decides and reads nothing.

    state ──► propose ──► verify ──► accept ──► commit ──► state'
              drafter      target     pure       pure
              2K rows      K+1 rows

Slot b drafts and verifies widths[b] <= K tokens. Its further rows have position -1, which kernels skip. In adaptive
steps widths are upper bounds, and `propose` chooses how many drafts to verify.

A step that does not run the drafter appends the committed tokens to drafter_input. `absorb` passes them to the drafter
later, so that its cache has no gap when the slot drafts again. In a slot that drafts by lookups only, drafter_input
holds only the latest step's rows.

For grammars the step can be split after `propose` and after `verify`. While the target verifies, the host reads the
drafts and fills in the masks for acceptance (peagle.engine.step.masks).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from peagle.engine.auto.widths import MOST_CATCH_UP_FRAC, MOST_PAUSE, StepCosts
from peagle.engine.request import Drafting
from peagle.engine.step.accept import Acceptance, accept
from peagle.engine.step.adjust import adjust
from peagle.engine.step.propose import DRAFT_PART, Proposed, SourceDrafts, has_no_room, propose, run_if
from peagle.engine.step.sampling import log_probs
from peagle.engine.step.state import DecodeState
from peagle.engine.step.step_kinds import StepKind, StepOutput
from peagle.ops.messages import DrafterInput, VerifyOutput
from peagle.protocols import Drafter, Target

_Run: TypeAlias = tuple[DecodeState, jax.Array, jax.Array]  # the state, packed outputs, and how many steps were run
VERIFY_PART, ACCEPT_PART = "verify", "accept"
PARTS = DRAFT_PART, VERIFY_PART, ACCEPT_PART  # named scopes, for the profiler


def step(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    widths: Int[Array, " B"],
    costs: StepCosts,
    kind: StepKind,
    lookup: Drafter | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Run one step: every active slot emits 1 to widths[b] + 1 tokens. costs: for adaptive steps."""
    state, proposed = propose(drafter, state, widths, costs, kind, lookup)
    state, verified = verify(target, state, proposed)
    return accept_and_commit(state, proposed, verified, costs, kind)


def verify(target: Target, state: DecodeState, proposed: Proposed) -> tuple[DecodeState, VerifyOutput]:
    """Run the target over the pending token and the drafts. Of the state, only the target's cache changes."""
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
    costs: StepCosts,
    kind: StepKind,
    masks: UInt32[Array, "B T W"] | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Accept drafts and commit the emitted tokens; the caches stay as they are.

    masks: allowed tokens of each row (peagle.engine.step.adjust).
    """
    drafts, logits, keys = proposed.draft_token_ids, verified.logits, proposed.keys
    with jax.named_scope(ACCEPT_PART):
        if kind.full_logits:
            assert state.adjustments is not None
            logits = adjust(logits, drafts, state.adjustments, state.stop_token_ids, masks)
        acceptance = accept(drafts, logits, proposed.widths, state.sampling, keys, proposed.synthetic)
        return _commit(state, proposed, verified, acceptance, costs, kind)


def _commit(
    state: DecodeState,
    proposed: Proposed,
    verified: VerifyOutput,
    acceptance: Acceptance,
    costs: StepCosts,
    kind: StepKind,
) -> tuple[DecodeState, StepOutput]:
    """Emit num_accepted drafts and next_token; return (the state, the output for the host).

    `length` excludes rejected rows. A stop token inside the run, or the budget, ends the slot there. After NO_TOKEN
    the slot continues with token 0, until the host has read it and ends the request.
    """
    drafts = proposed.draft_token_ids
    active, num_drafts = ~state.done, drafts.shape[1]
    place = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :]
    accepted = acceptance.num_accepted[:, None]
    next_token = jnp.maximum(acceptance.next_token, 0)
    run = jnp.where(place == accepted, next_token[:, None], jnp.pad(drafts, ((0, 0), (0, 1))))

    in_run = place <= accepted
    stops = in_run & jnp.any(run[:, :, None] == state.stop_token_ids[:, None, :], axis=-1)
    first_stop = jnp.min(jnp.where(stops, place, num_drafts + 1), axis=1, keepdims=True)
    kept = in_run & (place <= first_stop) & (place < state.remaining[:, None]) & active[:, None]
    count = jnp.sum(kept, axis=1, dtype=jnp.int32)
    remaining = state.remaining - count
    done = state.done | jnp.any(stops & kept, axis=1) | (remaining <= 0)

    drafter_input, too_far_behind = _input_after(state, proposed, run, verified.aux_hidden, acceptance, kind)
    learned = _learn(state, proposed, acceptance, run, costs)
    after = dataclasses.replace(
        learned,
        length=jnp.where(active, state.length + acceptance.num_accepted + 1, state.length),
        pending_token=jnp.where(active, next_token, state.pending_token),
        drafter_input=drafter_input,
        done=done,
        remaining=remaining,
        drafting=jnp.where(too_far_behind, jnp.int32(Drafting.NEVER), learned.drafting),
    )
    token_ids, token_log_probs = jnp.where(place == accepted, acceptance.next_token[:, None], run), None
    if kind.full_logits:
        assert state.adjustments is not None
        after = dataclasses.replace(after, adjustments=state.adjustments.emitted(run, kept))
        token_log_probs = log_probs(verified.logits, token_ids)
    output = StepOutput(
        count=count,
        num_accepted=jnp.where(active, acceptance.num_accepted, -1),
        num_verified=proposed.widths,
        num_drafted=proposed.num_drafted,
        source=jnp.zeros_like(count) if proposed.adaptive is None else proposed.adaptive.source,
        drafting=after.drafting,
        caught_up=proposed.drafter_ran & state.uses_drafter,
        token_ids=token_ids,
        draft_token_ids=drafts,
        log_probs=token_log_probs,
    )
    return after, output


def _learn(
    state: DecodeState,
    proposed: Proposed,
    acceptance: Acceptance,
    run: Int[Array, "B T"],
    costs: StepCosts,
) -> DecodeState:
    """Count the drafts of an adaptive step, and decide how the next ones draft (peagle.engine.auto.widths)."""
    pace, learned, choice = state.pace, state.learned, proposed.adaptive
    if choice is None:
        return state
    assert pace is not None
    assert learned is not None
    active, num_accepted, sampled = ~state.done, acceptance.num_accepted, ~state.sampling.greedy
    drafts = choice.sources
    known, right = _known(drafts, proposed, acceptance, run, active)
    learned = learned.count_drafts(sampled, drafts.confidence, known, right)
    first = known[..., 0] & (drafts.confidence[..., 0] > 0)
    pace = pace.record_first_drafts(drafts.survival[..., 0], right[..., 0], first)
    num_active = jnp.maximum(jnp.sum(active, dtype=jnp.int32), 1)
    widths = jnp.where(active, proposed.widths, 0)
    pass_time = costs.of_rows(num_active + jnp.sum(widths))
    measured = pass_time > 0
    time = pass_time + choice.time
    tokens = jnp.sum(jnp.where(active, num_accepted + 1, 0)).astype(jnp.float32) / num_active.astype(jnp.float32)
    learned = learned.update_rate(tokens, jnp.where(measured, time, 0.0))
    num_drafts = choice.gains.shape[1]
    place = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    drafted = active[:, None] & (place < choice.num_to_drafter[:, None]) & measured
    learned = learned.update_gain(sampled, choice.gains, drafted)
    pace = pace.record_steps(active, choice.gains, drafted, learned.gain_of(sampled))
    tried = active & choice.tried & measured
    learned = learned.update_profit(sampled, tried, tokens - time)
    pace = pace.record_try(tried, tokens - time)
    # to absorb drafter_input takes about one pass per K + 1 tokens
    too_slow = costs.of_pass(num_active) > MOST_CATCH_UP_FRAC * (num_drafts + 1)
    # decide before the drafter must run, because drafter_input is full
    behind = active & has_no_room(state, 2 * max(num_drafts, MOST_PAUSE) + 1) & ~proposed.drafter_ran
    most = jnp.where(behind & too_slow, jnp.int32(Drafting.LOOKUP_ONLY), jnp.int32(Drafting.ALWAYS))
    return dataclasses.replace(state, drafting=jnp.minimum(state.drafting, most), pace=pace, learned=learned)


def _learn_from_pause(state: DecodeState, costs: StepCosts, num_steps: jax.Array) -> DecodeState:
    """Record the plain steps of a pause."""
    assert state.pace is not None
    assert state.learned is not None
    active, sampled, steps = ~state.done, ~state.sampling.greedy, num_steps.astype(jnp.float32)
    no_gains, no_drafts = jnp.zeros_like(state.pace.gain), jnp.zeros(state.pace.gain.shape, bool)
    measured = costs.of_rows(jnp.sum(active, dtype=jnp.int32)) > 0
    learned = state.learned.update_rate(steps, jnp.where(measured, steps, 0.0))
    learned = learned.update_gain(sampled, no_gains, no_drafts, steps)
    pace = state.pace.record_steps(active, no_gains, no_drafts, learned.gain_of(sampled), steps)
    return dataclasses.replace(state, pace=pace, learned=learned)


def _known(
    drafts: SourceDrafts,
    proposed: Proposed,
    acceptance: Acceptance,
    run: Int[Array, "B T"],
    active: jax.Array,
) -> tuple[Bool[Array, "B source K"], Bool[Array, "B source K"]]:
    """Return two masks of the sources' drafts: the token at the draft's position is known; the draft is right."""
    place = jnp.arange(drafts.token_ids.shape[2], dtype=jnp.int32)[None, None, :]
    most = jnp.minimum(acceptance.num_accepted[:, None] + 1, drafts.num)  # [B, source]
    known = (place < most[..., None]) & active[:, None, None]
    known_tokens = jnp.pad(run, ((0, 0), (0, max(place.size - run.shape[1], 0))))[:, None, : place.size]
    right = drafts.token_ids == known_tokens
    if proposed.synthetic is not None:
        right = jnp.broadcast_to(proposed.synthetic.right[:, None], right.shape)
    # a draft counts after right ones
    num_wrong = jnp.cumsum(~right, axis=2, dtype=jnp.int32)
    return known & (num_wrong - (~right).astype(jnp.int32) == 0), right


def _input_after(
    state: DecodeState,
    proposed: Proposed,
    run: jax.Array,
    aux_hidden: jax.Array,
    acceptance: Acceptance,
    kind: StepKind,
) -> tuple[DrafterInput | None, jax.Array]:
    """Append the committed rows to drafter_input, or let them replace it if the drafter has read it.

    Returns (drafter_input, [B] whether it had no room left for the rows).
    """
    before = state.drafter_input
    if before is None:
        return None, jnp.zeros_like(state.done)
    aux_hidden = aux_hidden.astype(before.aux_hidden.dtype)
    num_new, room = acceptance.num_accepted + 1, before.token_ids.shape[1]
    if kind.num_drafts and proposed.adaptive is None:

        def put(into: jax.Array, rows: jax.Array) -> jax.Array:
            done = state.done.reshape(-1, *(1 for _ in rows.shape[1:]))  # inactive rows keep their input
            rows = jnp.where(done, into[:, : rows.shape[1]], rows)
            return jax.lax.dynamic_update_slice_in_dim(into, rows, 0, 1)

        token_ids, aux = put(before.token_ids, run), put(before.aux_hidden, aux_hidden)
        num, first_position = (
            jnp.where(state.done, old, new)
            for old, new in ((before.num, num_new), (before.first_position, state.length))
        )
        return DrafterInput(token_ids, aux, num, first_position), jnp.zeros_like(state.done)
    read = jnp.asarray(proposed.drafter_ran & state.may_draft)
    if state.pace is not None and proposed.adaptive is not None and proposed.adaptive.sources.num.shape[1] > 1:
        # only the lookup drafter reads the slot's rows, and it reads them at once
        read |= (state.drafting == Drafting.LOOKUP_ONLY) & proposed.adaptive.tried
    begin = jnp.where(read, 0, before.num)
    full = ~state.done & (begin + num_new > room)

    def append(into: jax.Array, rows: jax.Array) -> jax.Array:
        if state.slots == 1:  # the checks of a scatter take as long as a layer of a small target
            # an inactive single slot is done, and nothing reads its rewritten rows
            return jax.lax.dynamic_update_slice_in_dim(into, rows, jnp.minimum(begin, room - rows.shape[1])[0], 1)
        places = begin[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
        places = jnp.where((state.done | full)[:, None], room, places)  # inactive rows keep their input
        return into.at[jnp.arange(state.slots)[:, None], places].set(rows, mode="drop")

    num = jnp.where(state.done | full, before.num, begin + num_new)
    first_position = jnp.where(read & ~state.done, state.length, before.first_position)
    token_ids, aux = append(before.token_ids, run), append(before.aux_hidden, aux_hidden)
    return DrafterInput(token_ids, aux, num, first_position), full


def steps(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    widths: Int[Array, " B"],
    costs: StepCosts,
    limit: Int[Array, ""],
    kind: StepKind,
    most: int,
    lookup: Drafter | None = None,
) -> tuple[DecodeState, Int[Array, "most B W"]]:
    """Run `limit` <= most steps of the slots of a pass; return (their state, packed outputs).

    Stops early if all slots are done. An adaptive step that verifies nothing runs as a plain one, and so do the next
    ones while drafting is paused (`Pace.pause`). Outputs of steps that were not run have num_accepted -1.
    """
    packed_width = StepOutput.packed_width(kind, target.vocab_size)

    def fixed(state: DecodeState) -> tuple[DecodeState, Int[Array, "B W"]]:
        state, output = step(target, drafter, state, widths, costs, kind)
        return state, output.pack()

    def plain(state: DecodeState) -> tuple[DecodeState, Int[Array, "B W"]]:
        state, output = step(target, drafter, state, widths, costs, kind.plain)
        return state, output.padded(kind.num_drafts).pack()

    def adaptive(state: DecodeState) -> tuple[DecodeState, Int[Array, "B W"]]:
        state, proposed = propose(drafter, state, widths, costs, kind, lookup)

        def wide(run: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
            state, verified = verify(target, run[0], proposed)
            state, output = accept_and_commit(state, proposed, verified, costs, kind)
            return state, output.pack()

        def narrow(run: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
            keys = None if proposed.keys is None else proposed.keys[:, :1]
            without = dataclasses.replace(proposed, draft_token_ids=proposed.draft_token_ids[:, :0], keys=keys)
            state, verified = verify(target, run[0], without)
            state, output = accept_and_commit(state, without, verified, costs, kind.plain)
            return state, output.padded(kind.num_drafts).pack()

        some = jnp.any(proposed.widths > 0)
        run = state, jnp.zeros((state.slots, packed_width), jnp.int32)
        return run_if(~some, narrow, run_if(some, wide, run))

    one = adaptive if kind.adaptive else fixed
    if most == 1:
        state, packed = one(state)
        return state, packed[None]

    def repeat(body: Callable[[_Run], _Run], run: _Run, limit: jax.Array) -> _Run:
        return jax.lax.while_loop(lambda run: (run[2] < limit) & jnp.any(~run[0].done), body, run)

    def once(one: Callable[[DecodeState], tuple[DecodeState, jax.Array]], run: _Run) -> _Run:
        state, packed = one(run[0])
        return state, jax.lax.dynamic_update_index_in_dim(run[1], packed, run[2], 0), run[2] + 1

    def once_then_pause(run: _Run) -> _Run:
        run = once(one, run)
        assert run[0].pace is not None
        until = jnp.minimum(run[2] + run[0].pace.pause(~run[0].done), limit)
        state, outputs, count = repeat(functools.partial(once, plain), run, until)
        return _learn_from_pause(state, costs, count - run[2]), outputs, count

    empty = jnp.zeros((most, state.slots, packed_width), jnp.int32).at[:, :, 1].set(-1)  # num_accepted
    body = once_then_pause if kind.adaptive else functools.partial(once, one)
    state, outputs, _ = repeat(body, (state, empty, jnp.zeros((), jnp.int32)), limit)
    return state, outputs
