"""Run one decoding step: propose, verify, accept, commit. Pure functions; the host decides and reads nothing.

    state ──► propose ──► verify ──► accept ──► commit ──► state'
              drafter      target     pure       pure
              2K rows      K+1 rows

Slot b drafts and verifies widths[b] <= K tokens. Its further rows have position -1, which kernels skip. In adaptive
steps widths are the most of each slot, and the step chooses how many to verify (peagle.engine.widths). A second
drafter, without caches, may propose there, too; a slot takes the drafts that promise more. If those of the second are
enough for all slots, the first does not run.

A step that does not run the drafter appends the committed tokens to drafter_input, and `absorb` passes them to the
drafter later, so that the drafter's cache has no gap when the slot drafts again. A slot without `drafts` keeps
nothing; one for which the drafter is left out for good keeps the latest step's rows.

For grammars the step can be cut after `propose` and after `verify`. While the target verifies, the host reads the
drafts and computes the masks that `accept` takes (peagle.engine.grammar).
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from peagle.engine.accept import Acceptance, accept, accept_by_rate
from peagle.engine.adjust import adjust
from peagle.engine.beside import second_of
from peagle.engine.sampling import LogProbs, choose, draw_keys, log_probs
from peagle.engine.state import DecodeState, is_stop
from peagle.engine.widths import KEEPING_UP, StepCosts, choose_drafts, choose_widths, gains_of
from peagle.ops.messages import (
    Choose,
    Chosen,
    DrafterInput,
    DraftOutput,
    VerifyOutput,
    likeliest_of,
    likeliest_with_confidence,
)
from peagle.protocols import Drafter, Target

Carry = TypeVar("Carry")
DRAFT_PART, VERIFY_PART, ACCEPT_PART = PARTS = ("draft", "verify", "accept")  # named scopes, for the profiler


@dataclass(frozen=True)
class StepKind:
    """A variant of the step; each compiles its own program.

    num_drafts 0: plain steps. sampled: some row is not greedy; such rows draw their drafts, by the keys of the target's
    draws. full: some row has its logits adjusted or needs log-probabilities (peagle.engine.request.Request.full).
    synthetic_acceptance: see `accept_by_rate`. lean: plain steps of rows that all draft no more, so nothing is kept for
    the drafter. adaptive: widths are chosen in the step, and slots rest.
    """

    num_drafts: int
    sampled: bool = False
    full: bool = False
    synthetic_acceptance: tuple[float, ...] | None = None
    lean: bool = False
    adaptive: bool = False

    def no_costs(self, size: int) -> np.ndarray:
        """Make the packed costs of a batch of this size before they are measured; none if nobody reads them."""
        return StepCosts.unknown(size, self.num_drafts).pack() if self.adaptive else np.zeros((0,), np.float32)

    def costs(self, packed: jax.Array, size: int) -> StepCosts:
        """Read the packed costs of a batch of this size."""
        return StepCosts.unpack(packed, size, self.num_drafts)

    @property
    def input_rows(self) -> int | None:
        """Rows of drafter_input that its steps take; None: all, since a step may append its rows to them."""
        return self.num_drafts + 1 if self.num_drafts and not self.adaptive else None

    @property
    def plain(self) -> "StepKind":
        """Its steps without drafts."""
        return StepKind(0, self.sampled, self.full)


@flax.struct.dataclass
class StepOutput:
    """The output of a step for the host.

    A slot that was done before has count 0 and num_accepted -1.
    """

    count: jax.Array | np.ndarray  # [B]: emitted tokens, 0..K+1, cut after a stop token and at the budget
    num_accepted: jax.Array | np.ndarray  # [B]: before that cut
    num_verified: jax.Array | np.ndarray  # [B]
    num_drafted: jax.Array | np.ndarray  # [B]: of the source that it took; num_verified of these are token_ids
    source: jax.Array | np.ndarray  # [B]: 0 the drafter, 1 the second one
    done: jax.Array | np.ndarray  # [B]
    paused: jax.Array | np.ndarray  # [B]: it drafts no more
    caught_up: jax.Array | np.ndarray  # [B]: the drafter has read all rows before this step's
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
        """Pack into one array: one copy to the host instead of ten."""
        bits = (self.done, self.paused, self.caught_up, self.source)
        flags = sum(jnp.asarray(bit).astype(jnp.int32) << place for place, bit in enumerate(bits))
        flags = flags | jnp.asarray(self.num_drafted).astype(jnp.int32) << len(bits)
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
        done, paused, caught_up, source = (flags >> place & 1 for place in range(4))
        return cls(
            count=count,
            num_accepted=num_accepted,
            num_verified=num_verified,
            num_drafted=flags >> 4,
            source=source,
            done=done != 0,
            paused=paused != 0,
            caught_up=caught_up != 0,
            token_ids=tokens,
            draft_token_ids=drafts,
            log_probs=log_probs,
        )


@flax.struct.dataclass
class SourceDrafts:
    """What one drafter proposed."""

    token_ids: jax.Array  # [B, K]
    confidence: jax.Array  # [B, K]
    num: jax.Array  # [B]: how many of them
    survival: jax.Array  # [B, K]: by the counts (peagle.engine.widths)


@flax.struct.dataclass
class Proposed:
    """Drafts that are not verified yet."""

    widths: jax.Array  # [B]: drafts to verify; 0 in a slot that is done
    draft_token_ids: jax.Array  # [B, K]
    keys: jax.Array | None  # [B, K+1, 2]: of draws (peagle.engine.sampling); None: all rows are greedy
    ran: jax.Array  # bool: the drafter ran, so it has read drafter_input
    num_drafted: jax.Array  # [B]
    # of adaptive steps
    sources: tuple[SourceDrafts, ...] = ()
    source: jax.Array | None = None  # [B]: the one whose drafts these are
    num_to_drafter: jax.Array | None = None  # [B]: drafts of the pass of the drafter
    looked_up: jax.Array | None = None  # bool: the second drafter ran
    gains: jax.Array | None = None  # [B, K]: what the drafter's are worth

    def without_drafts(self) -> "Proposed":
        """Make the proposal of a pass that verifies none of them."""
        keys = None if self.keys is None else self.keys[:, :1]
        return dataclasses.replace(self, draft_token_ids=self.draft_token_ids[:, :0], keys=keys)


def step(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    widths: Int[Array, " B"],
    costs: StepCosts,
    kind: StepKind,
) -> tuple[DecodeState, StepOutput]:
    """Run one step: every active slot emits between 1 and widths[b] + 1 tokens. costs: for adaptive steps."""
    state, proposed = propose(drafter, state, widths, costs, kind)
    state, verified = verify(target, state, proposed)
    return accept_and_commit(state, proposed, verified, costs, kind)


def propose(
    drafter: Drafter | None,
    state: DecodeState,
    widths: Int[Array, " B"],
    costs: StepCosts,
    kind: StepKind,
    may_skip: bool = True,
) -> tuple[DecodeState, Proposed]:
    """Propose the drafts of a step; of the state, only the drafters' changes.

    may_skip: an adaptive step may leave the drafter out. If not, drafter_input has at most K + 1 rows.
    """
    widths = jnp.where(state.may_draft, jnp.minimum(widths, kind.num_drafts), 0)
    keys = None
    if kind.sampled or kind.synthetic_acceptance is not None:
        reach = jnp.arange(1, kind.num_drafts + 2, dtype=jnp.int32)
        keys = draw_keys(state.sampling, state.length[:, None] + reach[None, :])
    if not kind.num_drafts:
        none = jnp.zeros((state.slots, 0), jnp.int32)
        return state, Proposed(widths, none, keys, jnp.zeros((), bool), widths)
    with jax.named_scope(DRAFT_PART):
        if kind.adaptive:
            state, proposed = _propose_adaptively(drafter, state, widths, costs, kind, keys, may_skip)
            return state, dataclasses.replace(proposed, keys=keys)
        state, draft = _run_drafter(drafter, state, widths, _chooser(state, keys, kind), kind.num_drafts)
        return state, Proposed(widths, draft.token_ids, keys, jnp.ones((), bool), widths)


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
    costs: StepCosts,
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
        return _commit(state, proposed, verified, acceptance, costs, kind)


def _chooser(state: DecodeState, keys: jax.Array | None, kind: StepKind) -> Choose:
    """Return the function that chooses drafts: the likeliest, or in rows that are not greedy a draw by the keys."""
    if not kind.sampled:
        return likeliest_with_confidence if kind.adaptive else likeliest_of
    # drafts are not truncated: that takes time and gains nothing (1.57, 2.03, 2.29 either way at top-p .9, K = 1, 3, 7)
    whole_law = dataclasses.replace(
        state.sampling,
        top_k=jnp.zeros_like(state.sampling.top_k),
        top_p=jnp.ones_like(state.sampling.top_p),
        min_p=jnp.zeros_like(state.sampling.min_p),
    )

    def draw(logits: jax.Array, token_ids: jax.Array | None, first: int) -> Chosen:
        assert keys is not None
        index = choose(logits, whole_law, keys[:, first : first + logits.shape[1]], token_ids)
        if not kind.adaptive:
            return index, None
        scaled = (
            logits.astype(jnp.float32)
            / jnp.where(state.sampling.greedy, 1.0, state.sampling.temperature)[:, None, None]
        )
        drawn = jnp.take_along_axis(scaled, jnp.maximum(index, 0)[..., None], axis=-1)[..., 0]
        probability = jnp.exp(drawn - jax.nn.logsumexp(scaled, axis=-1))
        return index, jnp.where(index < 0, 1.0, probability)  # what is not finite is verified, and so noticed

    return draw


def _run_drafter(
    drafter: Drafter | None, state: DecodeState, num: Int[Array, " B"], chooser: Choose, num_drafts: int
) -> tuple[DecodeState, DraftOutput]:
    """Let the drafter read its input, of K + 1 rows at most, and propose num[b] <= K drafts."""
    assert drafter is not None
    assert state.drafter_input is not None
    whole = state.drafter_input
    first_position = jnp.where(state.keeps_up, whole.first_position, -1)
    num_rows = num_drafts + 1
    drafter_input = DrafterInput(
        whole.token_ids[:, :num_rows], whole.aux_hidden[:, :num_rows], whole.num, first_position
    )
    draft, drafter_state = drafter.propose(state.drafter_state, drafter_input, num, num_drafts, chooser)
    return dataclasses.replace(state, drafter_state=drafter_state), draft


def _propose_adaptively(
    drafter: Drafter | None,
    state: DecodeState,
    limits: Int[Array, " B"],
    costs: StepCosts,
    kind: StepKind,
    keys: jax.Array | None,
    may_skip: bool,
) -> tuple[DecodeState, Proposed]:
    """Propose drafts in a step in which some slot may draft now; in another one there are none."""
    assert state.pace is not None
    evaluates = functools.partial(_propose_by_sources, drafter, limits, costs, kind, keys, may_skip)
    if not may_skip:
        return evaluates(state)
    now = ~state.pace.given_up
    if second_of(drafter) is not None:
        now |= state.pace.idle == 0
    shapes = jax.eval_shape(evaluates, state)[1]
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return _run_if(jnp.any(now & (limits > 0)), lambda carry: evaluates(carry[0]), (state, nothing))


def _run_if(condition: jax.Array, function: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Run a function once if the condition holds. XLA on CPU copies the pages that a `cond` changes, not a loop's."""

    def body(run: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        return jnp.zeros((), bool), function(run[1])

    result: Carry = jax.lax.while_loop(lambda run: run[0], body, (condition, carry))[1]
    return result


def _propose_by_sources(
    drafter: Drafter | None,
    limits: Int[Array, " B"],
    costs: StepCosts,
    kind: StepKind,
    keys: jax.Array | None,
    may_skip: bool,
    state: DecodeState,
) -> tuple[DecodeState, Proposed]:
    """Propose limits[b] drafts at most of each slot by the better of its sources, and choose how many to verify."""
    learned, pace, num_drafts = state.learned, state.pace, kind.num_drafts
    assert learned is not None
    assert pace is not None
    assert state.drafter_input is not None
    num_active, sampled = jnp.sum(~state.done, dtype=jnp.int32), ~state.sampling.greedy
    rate, chooser = jnp.maximum(learned.rate, 1.0), _chooser(state, keys, kind)
    known_gains, looked_up = pace.gain_or(learned.gain), None
    worth_looked_up = jnp.zeros((state.slots,), jnp.float32)
    if (second := second_of(drafter)) is not None:
        state, looked_up = _look_up(second, state, limits, chooser, num_drafts)
        trusted = looked_up.survival * pace.trust[:, 1:]
        worth_looked_up = jnp.sum(gains_of(trusted, limits, costs, num_active, rate), axis=1)

    to_drafter, ran = jnp.where(pace.given_up, 0, limits), jnp.ones((), bool)
    if may_skip:
        to_drafter = choose_drafts(known_gains, to_drafter, num_active, costs, rate)
        place = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
        worth = jnp.sum(jnp.where(place < to_drafter[:, None], known_gains, 0.0), axis=1) - worth_looked_up
        time = rate * num_active.astype(jnp.float32) * costs.of_drafts(jnp.sum(to_drafter))
        pays = jnp.sum(jnp.maximum(worth, 0.0)) >= time
        to_drafter = jnp.where(pays, to_drafter, 0)
        ran = jnp.any(to_drafter > 0) | jnp.any(state.keeps_up & _has_no_room(state, num_drafts))

    def run(carry: tuple[DecodeState, DraftOutput]) -> tuple[DecodeState, DraftOutput]:
        state, _ = carry
        if may_skip:
            assert state.drafter_input is not None
            behind = jnp.any(state.keeps_up & (state.drafter_input.num > num_drafts + 1))
            state = _run_if(behind, functools.partial(absorb, drafter), state)
        state, draft = _run_drafter(drafter, state, to_drafter, chooser, num_drafts)
        unsure = jnp.full(draft.token_ids.shape, 0.5, jnp.float32)  # of a drafter that does not say
        confidence = unsure if draft.confidence is None else draft.confidence
        return state, DraftOutput(draft.token_ids, confidence=confidence)

    shape = (state.slots, num_drafts)
    none = DraftOutput(jnp.zeros(shape, jnp.int32), confidence=jnp.zeros(shape, jnp.float32))
    state, draft = _run_if(ran, run, (state, none)) if may_skip else run((state, none))
    assert draft.confidence is not None
    counted = learned.survival(0, sampled, draft.confidence)
    drafts = SourceDrafts(draft.token_ids, draft.confidence, to_drafter, counted)

    survival = counted * pace.trust[:, :1]
    gains = gains_of(survival, to_drafter, costs, num_active, rate)
    token_ids, num, source = drafts.token_ids, to_drafter, jnp.zeros((state.slots,), jnp.int32)
    sources: tuple[SourceDrafts, ...] = (drafts,)
    if looked_up is not None:
        # where times are unknown the first source is counted, undisturbed (`Engine.count_acceptance`)
        takes = (worth_looked_up > jnp.sum(gains, axis=1)) & (costs.of_rows(num_active) > 0)
        source, sources = takes.astype(jnp.int32), (drafts, looked_up)
        token_ids = jnp.where(takes[:, None], looked_up.token_ids, token_ids)
        survival = jnp.where(takes[:, None], looked_up.survival * pace.trust[:, 1:], survival)
        num = jnp.where(takes, limits, num)
    widths = choose_widths(survival, num, num_active, costs, rate)
    used = jnp.full((), looked_up is not None)
    return state, Proposed(widths, token_ids, None, ran, num, sources, source, to_drafter, used, gains)


def _look_up(
    second: Drafter, state: DecodeState, limits: Int[Array, " B"], chooser: Choose, num_drafts: int
) -> tuple[DecodeState, SourceDrafts]:
    """Let the second drafter read the input, all of it, and propose."""
    assert state.learned is not None
    assert state.drafter_input is not None
    first_position = jnp.where(state.may_draft, state.drafter_input.first_position, -1)
    drafter_input = dataclasses.replace(state.drafter_input, first_position=first_position)
    draft, second_state = second.propose(state.second_state, drafter_input, limits, num_drafts, chooser)
    assert draft.confidence is not None
    survival = state.learned.survival(1, ~state.sampling.greedy, draft.confidence)
    drafts = SourceDrafts(draft.token_ids, draft.confidence, limits, survival)
    return dataclasses.replace(state, second_state=second_state), drafts


def _commit(
    state: DecodeState,
    proposed: Proposed,
    verified: VerifyOutput,
    acceptance: Acceptance,
    costs: StepCosts,
    kind: StepKind,
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

    drafter_input, too_far_behind = _input_after(state, proposed, run, verified.aux_hidden, acceptance, kind)
    after = state
    if proposed.sources:
        after = _paced(state, proposed, acceptance, run, costs)
    after = dataclasses.replace(
        after,
        length=jnp.where(active, state.length + acceptance.num_accepted + 1, state.length),
        pending_token=jnp.where(active, next_token, state.pending_token),
        drafter_input=drafter_input,
        done=done,
        remaining=remaining,
        drafts=state.drafts & ~too_far_behind,
    )
    token_ids, found = jnp.where(place == accepted, acceptance.next_token[:, None], run), None
    if kind.full:
        assert state.adjustments is not None
        after = dataclasses.replace(after, adjustments=state.adjustments.emitted(run, kept))
        found = log_probs(verified.logits, token_ids)
    output = StepOutput(
        count=count,
        num_accepted=jnp.where(active, acceptance.num_accepted, -1),
        num_verified=proposed.widths,
        num_drafted=proposed.num_drafted,
        source=jnp.zeros_like(count) if proposed.source is None else proposed.source,
        done=done,
        paused=~after.drafts,
        caught_up=proposed.ran & state.keeps_up,
        token_ids=token_ids,
        draft_token_ids=drafts,
        log_probs=found,
    )
    return after, output


def _paced(
    state: DecodeState,
    proposed: Proposed,
    acceptance: Acceptance,
    run: Int[Array, "B T"],
    costs: StepCosts,
) -> DecodeState:
    """Count the drafts of an adaptive step, and decide how the next ones draft (peagle.engine.widths)."""
    pace, learned = state.pace, state.learned
    assert pace is not None
    assert learned is not None
    assert proposed.num_to_drafter is not None
    assert proposed.gains is not None
    active, num_accepted, sampled = ~state.done, acceptance.num_accepted, ~state.sampling.greedy
    for number, drafts in enumerate(proposed.sources):
        known, right = _known(number, drafts, proposed, acceptance, run, active)
        learned = learned.counted(number, sampled, drafts.confidence, known, right)
        pace = pace.judged(number, drafts.survival[:, 0], right[:, 0], known[:, 0] & (drafts.confidence[:, 0] > 0))
    num_active = jnp.maximum(jnp.sum(active, dtype=jnp.int32), 1)
    widths = jnp.where(active, proposed.widths, 0)
    pass_time = costs.of_rows(num_active + jnp.sum(widths))
    measured = pass_time > 0
    draft_time = jnp.where(proposed.ran, costs.of_drafts(jnp.sum(proposed.num_to_drafter)), 0.0)
    tokens = jnp.sum(jnp.where(active, num_accepted + 1, 0)).astype(jnp.float32) / num_active.astype(jnp.float32)
    learned = learned.paced(tokens, jnp.where(measured, draft_time + pass_time, 0.0))
    num_drafts = proposed.gains.shape[1]
    place = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    drafted = active[:, None] & (place < proposed.num_to_drafter[:, None]) & measured
    learned = learned.gained(proposed.gains, drafted)
    assert proposed.looked_up is not None
    found_nothing = (widths == 0) & proposed.looked_up
    pace = pace.after(active, proposed.gains, drafted, found_nothing, learned.gain)
    # reading what was not drafted for takes about a pass for every K + 1 tokens
    too_dear = costs.of_drafts(num_active) > KEEPING_UP * (num_drafts + 1)
    behind = active & _has_no_room(state, 2 * num_drafts) & ~proposed.ran
    pace = dataclasses.replace(pace, given_up=pace.given_up | (behind & too_dear))
    return dataclasses.replace(state, pace=pace, learned=learned)


def _has_no_room(state: DecodeState, num_drafts: int) -> Bool[Array, " B"]:
    """Test which slots' drafter_input has no room for the rows of a step."""
    assert state.drafter_input is not None
    return state.drafter_input.num + num_drafts + 1 > state.drafter_input.token_ids.shape[1]


def _known(
    number: int,
    drafts: SourceDrafts,
    proposed: Proposed,
    acceptance: Acceptance,
    run: Int[Array, "B T"],
    active: jax.Array,
) -> tuple[Bool[Array, "B K"], Bool[Array, "B K"]]:
    """Return (of which drafts of a source the tokens at their places are known, verified or not; which are right)."""
    assert proposed.source is not None
    place = jnp.arange(drafts.token_ids.shape[1], dtype=jnp.int32)[None, :]
    known = (place <= acceptance.num_accepted[:, None]) & (place < drafts.num[:, None]) & active[:, None]
    known_tokens = jnp.pad(run, ((0, 0), (0, max(place.shape[1] - run.shape[1], 0))))[:, : place.shape[1]]
    right = drafts.token_ids == known_tokens
    # a verified draft after the accepted ones was rejected, even if a synthetic acceptance repeats its token
    rejected = (place == acceptance.num_accepted[:, None]) & (place < proposed.widths[:, None])
    right &= ~(rejected & (proposed.source == number)[:, None])
    before = jnp.cumprod(jnp.pad(right, ((0, 0), (1, 0)), constant_values=True)[:, :-1], axis=1) > 0
    return known & before, right


def _input_after(
    state: DecodeState,
    proposed: Proposed,
    run: jax.Array,
    aux_hidden: jax.Array,
    acceptance: Acceptance,
    kind: StepKind,
) -> tuple[DrafterInput | None, jax.Array]:
    """Append the committed rows to the drafter's input, or replace it by them if the drafter has read it.

    Returns (the input, [B] whether it had no room left for the rows).
    """
    before = state.drafter_input
    if before is None:
        return None, jnp.zeros_like(state.done)
    aux_hidden = aux_hidden.astype(before.aux_hidden.dtype)
    num_new, room = acceptance.num_accepted + 1, before.token_ids.shape[1]
    if kind.num_drafts and not proposed.sources:

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
    read = jnp.asarray(proposed.ran & state.may_draft)
    if state.pace is not None and proposed.looked_up is not None:
        read |= state.pace.given_up & proposed.looked_up  # nobody but a second drafter reads its rows, at once
    begin = jnp.where(read, 0, before.num)
    full = ~state.done & (begin + num_new > room)

    def append(into: jax.Array, rows: jax.Array) -> jax.Array:
        if state.slots == 1:  # the checks of a scatter take as long as a layer of a small target
            # one slot stands still only if it is done, and then nobody reads its rewritten rows
            return jax.lax.dynamic_update_slice_in_dim(into, rows, jnp.minimum(begin, room - rows.shape[1])[0], 1)
        places = begin[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
        places = jnp.where((state.done | full)[:, None], room, places)  # rows that stand still keep their input
        return into.at[jnp.arange(state.slots)[:, None], places].set(rows, mode="drop")

    num = jnp.where(state.done | full, before.num, begin + num_new)
    first_position = jnp.where(read & ~state.done, state.length, before.first_position)
    token_ids, aux = append(before.token_ids, run), append(before.aux_hidden, aux_hidden)
    return DrafterInput(token_ids, aux, num, first_position), full


def absorb(drafter: Drafter | None, state: DecodeState) -> DecodeState:
    """Let the drafters absorb their input but the last row of each slot: their next pass begins there."""
    before = state.drafter_input
    assert drafter is not None
    assert before is not None
    place = jnp.arange(before.token_ids.shape[1], dtype=jnp.int32)[None, :]
    taken = (place < before.num[:, None] - 1) & state.may_draft[:, None]
    positions = jnp.where(taken, before.first_position[:, None] + place, -1)
    with jax.named_scope(DRAFT_PART):
        second_state = state.second_state
        if (second := second_of(drafter)) is not None:
            second_state = second.absorb(second_state, before.token_ids, before.aux_hidden, positions)
        positions = jnp.where(state.keeps_up[:, None], positions, -1)
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
    return dataclasses.replace(state, drafter_input=left, drafter_state=drafter_state, second_state=second_state)


def steps(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    widths: Int[Array, " B"],
    costs: StepCosts,
    limit: Int[Array, ""],
    kind: StepKind,
    most: int,
) -> tuple[DecodeState, Int[Array, "most B W"]]:
    """Run `limit` <= most steps of the slots of a pass; return (their state, packed outputs).

    Stops early if all are done. An adaptive step that verifies nothing is a plain one. Outputs of steps that were not
    run look like steps of slots that were done before.
    """

    packed_width = 2 * kind.num_drafts + 5
    if kind.full:
        packed_width += (kind.num_drafts + 1) * LogProbs.packed_width(target.vocab_size)

    def one(state: DecodeState) -> tuple[DecodeState, Int[Array, "B W"]]:
        if not kind.adaptive:
            state, output = step(target, drafter, state, widths, costs, kind)
            return state, output.pack()
        state, proposed = propose(drafter, state, widths, costs, kind)

        def wide(run: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
            state, verified = verify(target, run[0], proposed)
            state, output = accept_and_commit(state, proposed, verified, costs, kind)
            return state, output.pack()

        def narrow(run: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
            plain = proposed.without_drafts()
            state, verified = verify(target, run[0], plain)
            state, output = accept_and_commit(state, plain, verified, costs, kind.plain)
            return state, output.padded(kind.num_drafts).pack()

        some = jnp.any(proposed.widths > 0)
        run = state, jnp.zeros((state.slots, packed_width), jnp.int32)
        return _run_if(~some, narrow, _run_if(some, wide, run))

    if most == 1:
        state, packed = one(state)
        return state, packed[None]
    empty = jnp.zeros((most, state.slots, packed_width), jnp.int32).at[:, :, 1].set(-1).at[:, :, 3].set(1)

    def body(run: tuple[DecodeState, jax.Array, jax.Array]) -> tuple[DecodeState, jax.Array, jax.Array]:
        state, outputs, count = run
        state, packed = one(state)
        return state, jax.lax.dynamic_update_index_in_dim(outputs, packed, count, 0), count + 1

    state, outputs, _ = jax.lax.while_loop(
        lambda run: (run[2] < limit) & jnp.any(~run[0].done), body, (state, empty, jnp.zeros((), jnp.int32))
    )
    return state, outputs
