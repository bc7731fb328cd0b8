"""Propose the drafts of a step.

Adaptive steps ask peagle.engine.auto how many drafts to make and to verify. A lookup drafter may propose, too, and a
slot takes the better drafts. If looked-up drafts are good enough in all slots, the drafter does not run.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from peagle.engine.auto.choose import Choice, choose, plan_drafting
from peagle.engine.auto.costs import StepCosts
from peagle.engine.auto.state import MOST_PAUSE
from peagle.engine.request import Drafting
from peagle.engine.step.accept import SyntheticDrafts, draw_synthetic
from peagle.engine.step.drafter_input import ABSORB_PART, DRAFT_PART, absorb, has_no_room
from peagle.engine.step.sampling import draw_keys, weights_of
from peagle.engine.step.state import DecodeState
from peagle.engine.step.step_kinds import StepKind
from peagle.ops.draw import draw as draw_index
from peagle.ops.likeliest import argmax
from peagle.ops.messages import Choose, Chosen, DrafterInput, DraftOutput, likeliest_of, likeliest_with_confidence
from peagle.protocols import Drafter

Carry = TypeVar("Carry")


@flax.struct.dataclass
class Proposed:
    """Drafts before verification."""

    widths: jax.Array  # [B]: drafts to verify; 0 in a slot that is done
    draft_token_ids: jax.Array  # [B, K]
    keys: jax.Array | None  # [B, K+1, 2]: of draws (peagle.engine.step.sampling); None: all rows are greedy
    read: jax.Array  # [B] bool: the slot's drafter_input has been read
    num_drafted: jax.Array  # [B]
    choice: Choice | None = None  # of an adaptive step
    synthetic: SyntheticDrafts | None = None  # decides acceptance instead of the target

    @property
    def without_drafts(self) -> "Proposed":
        keys = None if self.keys is None else self.keys[:, :1]
        return dataclasses.replace(self, draft_token_ids=self.draft_token_ids[:, :0], keys=keys)


def propose(
    drafter: Drafter | None,
    state: DecodeState,
    widths: Int[Array, " B"],
    costs: StepCosts,
    kind: StepKind,
    lookup: Drafter | None = None,
) -> tuple[DecodeState, Proposed]:
    """Propose the drafts of a step. Of the state, only the drafters' parts change."""
    widths = jnp.where(state.may_draft, jnp.minimum(widths, kind.num_drafts), 0)
    keys = synthetic = None
    if kind.sampled or kind.synthetic_acceptance is not None:
        offsets = jnp.arange(1, kind.num_drafts + 2, dtype=jnp.int32)
        keys = draw_keys(state.sampling, state.length[:, None] + offsets[None, :])
    if kind.synthetic_acceptance is not None:
        assert keys is not None
        synthetic = draw_synthetic(kind.synthetic_acceptance, keys)
    if not kind.sampled:
        keys = None
    if not kind.num_drafts:
        none = jnp.zeros((state.slots, 0), jnp.int32)
        return state, Proposed(widths, none, keys, jnp.zeros_like(state.done), widths)
    chooser = _chooser(state, keys, kind)
    with jax.named_scope(DRAFT_PART):
        if kind.adaptive:
            confidence = None if synthetic is None else synthetic.confidence
            state, choice, read = _propose_adaptively(
                drafter, lookup, state, widths, costs, chooser, confidence, always=kind.masked
            )
            return state, Proposed(choice.widths, choice.token_ids, keys, read, choice.num, choice, synthetic)
        state, draft = _run_drafter(drafter, state, widths, chooser, kind.num_drafts)
    return state, Proposed(widths, draft.token_ids, keys, ~state.done, widths, synthetic=synthetic)


def _chooser(state: DecodeState, keys: jax.Array | None, kind: StepKind) -> Choose:
    """Return the function that chooses drafts: the likeliest tokens or, in sampled rows, draws by the keys."""
    if not kind.sampled:
        return likeliest_with_confidence if kind.adaptive else likeliest_of
    sampling = state.sampling
    # to truncate takes time and gains nothing (acceptance length 1.57, 2.03, 2.29 either way at top-p 0.9, K = 1, 3, 7)
    untruncated = dataclasses.replace(
        sampling,
        temperature=jnp.where(sampling.greedy, 1.0, sampling.temperature),
        top_k=jnp.zeros_like(sampling.top_k),
        top_p=jnp.ones_like(sampling.top_p),
        min_p=jnp.zeros_like(sampling.min_p),
    )

    def draw(logits: jax.Array, token_ids: jax.Array | None, first: int) -> Chosen:
        assert keys is not None
        likeliest = argmax(logits)
        weights = weights_of(logits, likeliest, untruncated)
        drawn = draw_index(weights, keys[:, first : first + logits.shape[1]], token_ids)
        index = jnp.where(sampling.greedy[:, None], likeliest, drawn)
        if not kind.adaptive:
            return index, None
        weight = jnp.take_along_axis(weights, jnp.maximum(index, 0)[..., None], axis=-1)[..., 0]
        # probability 1 for a draft that is not finite: it gets verified, and the check of the step finds it
        return index, jnp.where(index < 0, 1.0, weight / jnp.sum(weights, axis=-1))

    return draw


def _run_drafter(
    drafter: Drafter | None, state: DecodeState, num: Int[Array, " B"], chooser: Choose, num_drafts: int
) -> tuple[DecodeState, DraftOutput]:
    """Let the drafter read its input, of K + 1 rows at most, and propose num[b] <= K drafts."""
    assert drafter is not None
    assert state.drafter_input is not None
    rows, num_rows = state.drafter_input, num_drafts + 1
    first_position = jnp.where(state.uses_drafter, rows.first_position, -1)
    drafter_input = DrafterInput(rows.token_ids[:, :num_rows], rows.aux_hidden[:, :num_rows], rows.num, first_position)
    draft, drafter_state = drafter.propose(state.drafter_state, drafter_input, num, num_drafts, chooser)
    return dataclasses.replace(state, drafter_state=drafter_state), draft


def run_if(condition: jax.Array, function: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Run a function if the condition holds.

    A loop, because XLA on CPU copies the pages that a `cond` changes; but XLA on TPUs copies the weights of a loop, to
    other layouts.
    """
    if jax.default_backend() == "tpu":
        return jax.lax.cond(condition, function, lambda carry: carry, carry)  # type: ignore[no-any-return]

    def body(run: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        return jnp.zeros((), bool), function(run[1])

    result: Carry = jax.lax.while_loop(lambda run: run[0], body, (condition, carry))[1]
    return result


def _propose_adaptively(
    drafter: Drafter | None,
    lookup: Drafter | None,
    state: DecodeState,
    limits: Int[Array, " B"],
    costs: StepCosts,
    chooser: Choose,
    confidence: jax.Array | None,
    always: bool,
) -> tuple[DecodeState, Choice, jax.Array]:
    """Propose limits[b] drafts at most per slot, by the better of its sources; choose how many to verify.

    confidence: in place of the drafter's. always: the drafter runs even if its drafts gain nothing. Also returns which
    slots' drafter_input has been read.
    """
    assert state.auto is not None
    assert state.drafter_input is not None
    num_unread = state.drafter_input.num
    auto, slots, num_drafts = state.auto, state.auto_slots(costs), state.auto.slots.gains.shape[1]
    looked_up, read = None, jnp.zeros((state.slots,), bool)
    if lookup is not None:  # it reads its input at once
        state, looked_up = _look_up(lookup, state, limits, chooser, num_drafts)
        read = state.drafting == Drafting.LOOKUP_ONLY
    must_run = None if always else jnp.any(state.uses_drafter & has_no_room(state, max(num_drafts, MOST_PAUSE)))
    plan = plan_drafting(auto, slots, limits, num_unread, state.uses_drafter, must_run, looked_up)

    def run(carry: tuple[DecodeState, DraftOutput]) -> tuple[DecodeState, DraftOutput]:
        state, _ = carry
        with jax.named_scope(ABSORB_PART):
            state = run_if(plan.behind, lambda state: absorb(drafter, lookup, state), state)
        state, draft = _run_drafter(drafter, state, plan.num, chooser, num_drafts)
        known = draft.confidence if confidence is None else confidence
        if known is None:  # the drafter reports none
            known = jnp.full(draft.token_ids.shape, 0.5, jnp.float32)
        return state, DraftOutput(draft.token_ids, confidence=known)

    shape = (state.slots, num_drafts)
    none = DraftOutput(jnp.zeros(shape, jnp.int32), confidence=jnp.zeros(shape, jnp.float32))
    state, draft = run((state, none)) if always else run_if(plan.runs, run, (state, none))
    return state, choose(auto, slots, plan, draft), state.may_draft & (plan.runs | read)


def _look_up(
    lookup: Drafter, state: DecodeState, limits: Int[Array, " B"], chooser: Choose, num_drafts: int
) -> tuple[DecodeState, DraftOutput]:
    """Let the lookup drafter read the whole input and propose."""
    assert state.drafter_input is not None
    first_position = jnp.where(state.may_draft, state.drafter_input.first_position, -1)
    drafter_input = dataclasses.replace(state.drafter_input, first_position=first_position)
    draft, lookup_state = lookup.propose(state.lookup_state, drafter_input, limits, num_drafts, chooser)
    return dataclasses.replace(state, lookup_state=lookup_state), draft
