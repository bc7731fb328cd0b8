"""Propose the drafts of a step, and let a drafter absorb rows that it has not read.

Adaptive steps choose how many drafts to make and to verify (peagle.engine.auto.widths). A lookup drafter may propose,
too, and a slot takes the better drafts. If looked-up drafts are good enough in all slots, the drafter does not run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from peagle.engine.auto.widths import MOST_PAUSE, StepCosts, choose_drafts, choose_widths, gains_of
from peagle.engine.step.accept import SyntheticDrafts, draw_synthetic
from peagle.engine.step.sampling import draw_keys, weights_of
from peagle.engine.step.state import DecodeState
from peagle.engine.step.step_kinds import StepKind
from peagle.ops.draw import draw as draw_index
from peagle.ops.likeliest import argmax
from peagle.ops.messages import Choose, Chosen, DrafterInput, DraftOutput, likeliest_of, likeliest_with_confidence
from peagle.protocols import Drafter

Carry = TypeVar("Carry")
DRAFT_PART = "draft"  # a named scope, for the profiler


@flax.struct.dataclass
class SourceDrafts:
    """The drafts of one source; `together`: of all sources, on a second axis."""

    token_ids: jax.Array  # [B, K]
    confidence: jax.Array  # [B, K]
    num: jax.Array  # [B]: how many drafts
    survival: jax.Array  # [B, K]: by the counts (peagle.engine.auto.widths)

    @classmethod
    def together(cls, *sources: "SourceDrafts") -> "SourceDrafts":
        joined: SourceDrafts = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *sources)
        return joined


@flax.struct.dataclass
class AdaptiveChoice:
    """What an adaptive step proposed and chose from (peagle.engine.auto.widths)."""

    sources: SourceDrafts  # of the drafter, and of the lookup drafter, together
    time: jax.Array  # of choosing and of the drafter's passes, in units of a plain step
    source: jax.Array  # [B]: the source of the slot's drafts
    num_to_drafter: jax.Array  # [B]: drafts in the drafter's pass
    gains: jax.Array  # [B, K]: expected tokens of the drafter's drafts beyond their cost
    tried: jax.Array  # bool: sources proposed; False while drafting is paused


@flax.struct.dataclass
class Proposed:
    """Drafts before verification."""

    widths: jax.Array  # [B]: drafts to verify; 0 in a slot that is done
    draft_token_ids: jax.Array  # [B, K]
    keys: jax.Array | None  # [B, K+1, 2]: of draws (peagle.engine.step.sampling); None: all rows are greedy
    drafter_ran: jax.Array  # bool: it has read drafter_input
    num_drafted: jax.Array  # [B]
    synthetic: SyntheticDrafts | None = None  # decides acceptance instead of the target
    adaptive: AdaptiveChoice | None = None  # of an adaptive step


def propose(
    drafter: Drafter | None,
    state: DecodeState,
    widths: Int[Array, " B"],
    costs: StepCosts,
    kind: StepKind,
    lookup: Drafter | None = None,
    always_draft: bool = False,
) -> tuple[DecodeState, Proposed]:
    """Propose the drafts of a step. Of the state, only the drafters' parts change.

    always_draft: run the drafter even if its drafts gain nothing; the caller has made sure that its input fits one pass
    of K + 1 rows.
    """
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
        return state, Proposed(widths, none, keys, jnp.zeros((), bool), widths)
    with jax.named_scope(DRAFT_PART):
        if kind.adaptive:
            options = (widths, costs, kind, keys, synthetic, always_draft)
            sources = functools.partial(_propose_by_sources, drafter, lookup, *options)
            state, proposed = sources(state) if always_draft else _unless_paused(sources, state)
        else:
            state, draft = _run_drafter(drafter, state, widths, _chooser(state, keys, kind), kind.num_drafts)
            proposed = Proposed(widths, draft.token_ids, keys, jnp.ones((), bool), widths)
    return state, dataclasses.replace(proposed, keys=keys, synthetic=synthetic)


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


def _unless_paused(
    sources: Callable[[DecodeState], tuple[DecodeState, Proposed]], state: DecodeState
) -> tuple[DecodeState, Proposed]:
    """Propose nothing while drafting is paused."""
    assert state.pace is not None
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(sources, state)[1])
    return run_if(state.pace.pause(~state.done) == 0, lambda carry: sources(carry[0]), (state, nothing))


def run_if(condition: jax.Array, function: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Run a function if the condition holds. A loop, because XLA on CPU copies the pages that a `cond` changes."""

    def body(run: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        return jnp.zeros((), bool), function(run[1])

    result: Carry = jax.lax.while_loop(lambda run: run[0], body, (condition, carry))[1]
    return result


def _propose_by_sources(
    drafter: Drafter | None,
    lookup: Drafter | None,
    limits: Int[Array, " B"],
    costs: StepCosts,
    kind: StepKind,
    keys: jax.Array | None,
    synthetic: SyntheticDrafts | None,
    always_draft: bool,
    state: DecodeState,
) -> tuple[DecodeState, Proposed]:
    """Propose limits[b] drafts at most per slot, by the better of its sources; choose how many to verify."""
    learned, pace, num_drafts = state.learned, state.pace, kind.num_drafts
    assert learned is not None
    assert pace is not None
    before = state.drafter_input
    assert before is not None
    num_active, sampled = jnp.sum(~state.done, dtype=jnp.int32), ~state.sampling.greedy
    rate, chooser = jnp.maximum(learned.rate, 1.0), _chooser(state, keys, kind)
    expected_gains, looked_up = pace.gain_or(learned.gain_of(sampled)), None
    gain_looked_up = jnp.zeros((state.slots,), jnp.float32)
    if lookup is not None:
        state, looked_up = _look_up(lookup, state, limits, chooser, num_drafts)
        calibrated = looked_up.survival * pace.calibration[:, 1:]
        gain_looked_up = jnp.sum(gains_of(calibrated, limits, costs, num_active, rate), axis=1)

    to_drafter, ran = jnp.where(state.uses_drafter, limits, 0), jnp.ones((), bool)
    num_unread = jnp.max(jnp.where(state.uses_drafter, before.num, 0))
    behind = num_unread > num_drafts + 1
    # to absorb the input takes about one pass per K + 1 rows
    passes = jnp.where(behind, num_unread.astype(jnp.float32) / (num_drafts + 1), 0.0)
    catch_up = passes * costs.of_pass(num_active)
    if not always_draft:
        to_drafter = choose_drafts(expected_gains, to_drafter, num_active, costs, rate)
        place = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
        gain = jnp.sum(jnp.where(place < to_drafter[:, None], expected_gains, 0.0), axis=1) - gain_looked_up
        time = costs.of_pass(jnp.sum(to_drafter)) + catch_up
        exceeds = jnp.sum(jnp.maximum(gain, 0.0)) >= rate * num_active.astype(jnp.float32) * time
        to_drafter = jnp.where(exceeds, to_drafter, 0)
        ran = jnp.any(to_drafter > 0) | jnp.any(state.uses_drafter & has_no_room(state, max(num_drafts, MOST_PAUSE)))

    def run(carry: tuple[DecodeState, DraftOutput]) -> tuple[DecodeState, DraftOutput]:
        state, _ = carry
        if not always_draft:
            state = run_if(behind, functools.partial(absorb, drafter, lookup), state)
        state, draft = _run_drafter(drafter, state, to_drafter, chooser, num_drafts)
        confidence = draft.confidence if synthetic is None else synthetic.confidence
        if confidence is None:  # the drafter reports no confidence
            confidence = jnp.full(draft.token_ids.shape, 0.5, jnp.float32)
        return state, DraftOutput(draft.token_ids, confidence=confidence)

    shape = (state.slots, num_drafts)
    none = DraftOutput(jnp.zeros(shape, jnp.int32), confidence=jnp.zeros(shape, jnp.float32))
    state, draft = run((state, none)) if always_draft else run_if(ran, run, (state, none))
    assert draft.confidence is not None
    counted = learned.survival(0, sampled, draft.confidence)
    drafts = SourceDrafts(draft.token_ids, draft.confidence, to_drafter, counted)

    survival = counted * pace.calibration[:, :1]
    gains = gains_of(survival, to_drafter, costs, num_active, rate)
    token_ids, num, source = drafts.token_ids, to_drafter, jnp.zeros((state.slots,), jnp.int32)
    sources = SourceDrafts.together(drafts)
    if looked_up is not None:
        # before times are measured, take the drafter's own drafts: `Engine.count_acceptance` counts these alone
        takes = (gain_looked_up > jnp.sum(gains, axis=1)) & (costs.of_rows(num_active) > 0)
        source, sources = takes.astype(jnp.int32), SourceDrafts.together(drafts, looked_up)
        token_ids = jnp.where(takes[:, None], looked_up.token_ids, token_ids)
        survival = jnp.where(takes[:, None], looked_up.survival * pace.calibration[:, 1:], survival)
        num = jnp.where(takes, limits, num)
    widths = choose_widths(survival, num, num_active, costs, rate)
    time = costs.of_drafts(jnp.sum(to_drafter)) + jnp.where(ran, catch_up, 0.0)
    choice = AdaptiveChoice(sources, time, source, to_drafter, gains, tried=jnp.ones((), bool))
    # `propose` adds the keys
    return state, Proposed(widths, token_ids, keys=None, drafter_ran=ran, num_drafted=num, adaptive=choice)


def _look_up(
    lookup: Drafter, state: DecodeState, limits: Int[Array, " B"], chooser: Choose, num_drafts: int
) -> tuple[DecodeState, SourceDrafts]:
    """Let the lookup drafter read the whole input and propose."""
    assert state.learned is not None
    assert state.drafter_input is not None
    first_position = jnp.where(state.may_draft, state.drafter_input.first_position, -1)
    drafter_input = dataclasses.replace(state.drafter_input, first_position=first_position)
    draft, lookup_state = lookup.propose(state.lookup_state, drafter_input, limits, num_drafts, chooser)
    assert draft.confidence is not None
    survival = state.learned.survival(1, ~state.sampling.greedy, draft.confidence)
    drafts = SourceDrafts(draft.token_ids, draft.confidence, limits, survival)
    return dataclasses.replace(state, lookup_state=lookup_state), drafts


def has_no_room(state: DecodeState, num_more: int) -> Bool[Array, " B"]:
    """Test which slots' drafter_input has no room for num_more rows after the next one."""
    assert state.drafter_input is not None
    return state.drafter_input.num + num_more + 1 > state.drafter_input.token_ids.shape[1]


def absorb(drafter: Drafter | None, lookup: Drafter | None, state: DecodeState) -> DecodeState:
    """Let the drafters absorb their input, except each slot's last row, with which their next pass begins."""
    before = state.drafter_input
    assert drafter is not None
    assert before is not None
    place = jnp.arange(before.token_ids.shape[1], dtype=jnp.int32)[None, :]
    taken = (place < before.num[:, None] - 1) & state.may_draft[:, None]
    positions = jnp.where(taken, before.first_position[:, None] + place, -1)
    with jax.named_scope(DRAFT_PART):
        lookup_state = state.lookup_state
        if lookup is not None:
            lookup_state = lookup.absorb(lookup_state, before.token_ids, before.aux_hidden, positions)
        positions = jnp.where(state.uses_drafter[:, None], positions, -1)
        drafter_state = drafter.absorb(state.drafter_state, before.token_ids, before.aux_hidden, positions)
    last = jnp.where(state.done, 0, jnp.maximum(before.num - 1, 0))  # inactive rows keep their input

    def first(rows: jax.Array) -> jax.Array:
        # not a slice update: XLA on GPUs makes a copy of one, which CUDA before 12.9 does not take into a loop's graph
        shape = (-1, *(1 for _ in rows.shape[1:]))
        kept = jnp.take_along_axis(rows, last.reshape(shape), axis=1)
        return jnp.where((jnp.arange(rows.shape[1]) == 0).reshape(1, -1, *shape[2:]), kept, rows)

    left = DrafterInput(
        first(before.token_ids),
        first(before.aux_hidden),
        jnp.where(state.done, before.num, jnp.minimum(before.num, 1)),
        before.first_position + last,
    )
    return dataclasses.replace(state, drafter_input=left, drafter_state=drafter_state, lookup_state=lookup_state)
