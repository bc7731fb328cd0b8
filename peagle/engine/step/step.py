"""Run one decoding step: propose, verify, accept, commit. Pure functions; the host decides and reads nothing.

    state ──► propose ──► verify ──► accept ──► commit ──► state'
              drafter      target     pure       pure
              2K rows      K+1 rows

Slot b drafts and verifies widths[b] <= K tokens. Its further rows have position -1, which kernels skip. In adaptive
steps widths are upper bounds, and `propose` chooses how many drafts to verify.

A step that does not run the drafter appends the committed tokens to drafter_input. `absorb` passes them to the drafter
later, so that its cache has no gap when the slot drafts again. In a slot that drafts by lookups only, drafter_input
holds only the latest step's rows.

A masked step, for grammars, is cut after `propose` and after `verify`. While the target verifies, the host reads the
drafts and fills in the masks for acceptance (peagle.engine.step.masks).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from peagle.engine.auto.costs import StepCosts
from peagle.engine.auto.learn import learn
from peagle.engine.auto.state import MOST_PAUSE
from peagle.engine.request import Drafting
from peagle.engine.step.accept import Acceptance, accept
from peagle.engine.step.adjust import adjust
from peagle.engine.step.drafter_input import append_rows, has_no_room
from peagle.engine.step.propose import Proposed, propose
from peagle.engine.step.sampling import log_probs
from peagle.engine.step.state import DecodeState
from peagle.engine.step.step_kinds import StepKind, StepOutput
from peagle.ops.messages import VerifyOutput
from peagle.protocols import Drafter, Target

VERIFY_PART, ACCEPT_PART = "verify", "accept"  # named scopes, for JAX's profiler


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

    drafter_input, too_far_behind = append_rows(
        state, run, verified.aux_hidden, acceptance.num_accepted + 1, proposed.read
    )
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
        source=jnp.zeros_like(count) if proposed.choice is None else proposed.choice.source,
        drafting=after.drafting,
        caught_up=proposed.read & state.uses_drafter,
        token_ids=token_ids,
        draft_token_ids=drafts,
        log_probs=token_log_probs,
    )
    return after, output


def _learn(
    state: DecodeState, proposed: Proposed, acceptance: Acceptance, run: Int[Array, "B T"], costs: StepCosts
) -> DecodeState:
    """Learn from an adaptive step; leave the drafter out for good where it is behind and to catch up takes too long."""
    if (choice := proposed.choice) is None:
        return state
    assert state.auto is not None
    slots, num_drafts = state.auto_slots(costs), choice.token_ids.shape[1]
    right = None if proposed.synthetic is None else proposed.synthetic.right
    auto = learn(state.auto, slots, choice, proposed.widths, acceptance.num_accepted, run, right)
    # decide before the drafter must run, because drafter_input is full
    behind = ~state.done & ~proposed.read & has_no_room(state, 2 * max(num_drafts, MOST_PAUSE) + 1)
    dear = costs.catching_up_is_dear(slots.num_active, num_drafts)
    most = jnp.where(behind & dear, jnp.int32(Drafting.LOOKUP_ONLY), jnp.int32(Drafting.ALWAYS))
    return dataclasses.replace(state, auto=auto, drafting=jnp.minimum(state.drafting, most))
