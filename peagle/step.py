"""One step: propose, verify, accept, commit. One program, or several steps in one; no host decision, no host read.

A step drafts and verifies a number of tokens on its ladder; a rung is such a number's index. A ladder of one number
leaves no choice. Of several numbers each has its own code inside one program, and peagle.policy chooses among them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from peagle import policy
from peagle.accept import accept
from peagle.config import Ladder, SamplingConfig
from peagle.ops.messages import Fresh
from peagle.policy import Outlook
from peagle.protocols import Drafter, PyTree, Target
from peagle.sampling import DRAFT, draw, probabilities, uniforms
from peagle.state import (
    DecodeState,
    Proposal,
    StepOutput,
    Verdict,
    commit,
    empty_outputs,
    first_rows,
    overdue,
    put_first,
)

DRAFT_PART, VERIFY_PART, ACCEPT_PART = PARTS = ("draft", "verify", "accept")  # what operations are named by

Message = TypeVar("Message")
Carry = TypeVar("Carry")
Known = TypeVar("Known")


def step(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    ladder: Ladder,
    sampling: SamplingConfig,
    drafting: Sequence[int] = (0,),
    verifying: Sequence[int] = (0,),
) -> tuple[DecodeState, StepOutput]:
    """The state one step on: every active row has emitted between 1 and K + 1 tokens, K the ladder's last number.

    drafting and verifying are the rungs that may be chosen: one each, and there is nothing to choose. See
    peagle.protocols for the indices.
    """
    random = None
    if not sampling.greedy or sampling.synthetic_acceptance is not None:
        reach = ladder[verifying[-1]] + 1  # a plain step asks for the numbers of one token
        index = state.length[:, None] + 1 + jnp.arange(reach, dtype=jnp.int32)[None, :]
        random = uniforms(state.key, index)
    drafted = policy.drafts(state.outlook)
    known = _Known(state.pending_token, state.length, state.done, state.fresh, state.outlook, random)

    def propose(rung: int, known: _Known, drafter_state: PyTree) -> tuple[Proposal, PyTree]:
        with jax.named_scope(DRAFT_PART):
            return _propose(drafter, known, drafter_state, ladder, rung, sampling)

    def verify(rung: int, known: tuple[_Known, Proposal], target_cache: PyTree) -> tuple[Verdict, PyTree]:
        with jax.named_scope(VERIFY_PART):
            return _verify(target, *known, target_cache, ladder[rung], sampling)

    proposal, drafter_state = _one_of(drafting, drafted, propose, known, state.drafter_state)
    verdict, target_cache = _one_of(verifying, proposal.verified, verify, (known, proposal), state.target_cache)
    state = dataclasses.replace(state, drafter_state=drafter_state, target_cache=target_cache)
    with jax.named_scope(ACCEPT_PART):
        return commit(state, ladder, drafted, proposal, verdict, drafter_ran=ladder[drafting[-1]] > 0)


def steps(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    ladder: Ladder,
    sampling: SamplingConfig,
    count: int,
    limit: Int[Array, ""] | None = None,
) -> tuple[DecodeState, Int[Array, "count B W"]]:
    """The state `count` steps on, or `limit` if that is fewer, and the packed outputs of all of them; it stops where
    every row is done. What would have come behind looks like outputs of rows that were done before. Without an outlook
    to choose by, all are of the ladder's first number: plain steps, if it is one of several."""
    choice = state.outlook is not None
    most = ladder[-1 if choice else 0]
    if count == 1 and not choice:
        state, output = step(target, drafter, state, ladder, sampling)
        return state, output.pack(most)[None]

    Run = tuple[DecodeState, jax.Array, jax.Array]

    def go_on(run: Run) -> jax.Array:
        return (run[2] < (count if limit is None else limit)) & ~jnp.all(run[0].done)

    def one(run: Run, *rungs: Sequence[int]) -> Run:
        state, outputs, index = run
        state, output = step(target, drafter, state, ladder, sampling, *rungs)
        return state, jax.lax.dynamic_update_index_in_dim(outputs, output.pack(most), index, 0), index + 1

    def resting(run: Run) -> jax.Array:
        return go_on(run) & policy.resting(run[0].outlook)

    def drafting(run: Run) -> jax.Array:
        return go_on(run) & ~policy.resting(run[0].outlook)

    def behind(run: Run) -> jax.Array:
        return go_on(run) & jnp.any(run[0].fresh.num > most + 1)

    def catch_up(run: Run) -> Run:
        return _catch_up(drafter, run[0], most + 1), *run[1:]

    def alternate(run: Run) -> Run:
        rungs = range(len(ladder))
        run = jax.lax.while_loop(resting, one, run)
        run = jax.lax.while_loop(behind, catch_up, run)
        return jax.lax.while_loop(drafting, lambda run: one(run, rungs[1:], rungs), run)

    run: Run = (state, empty_outputs(count, state.length.shape[0], most), jnp.zeros((), jnp.int32))
    state, outputs, _ = jax.lax.while_loop(go_on, alternate if choice else one, run)
    return state, outputs


def steps_of(
    rung: int,
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    ladder: Ladder,
    sampling: SamplingConfig,
    count: int,
    limit: Int[Array, ""] | None = None,
) -> tuple[DecodeState, Int[Array, "count B W"]]:
    """As `steps`, where all of them draft and verify K = ladder[rung] > 0 tokens, for which the outputs are packed: the
    very steps of a run with this K, once the drafter has taken in what waited for it."""
    num_drafts = ladder[rung]

    def behind(state: DecodeState) -> jax.Array:
        return ~jnp.all(state.done) & jnp.any(state.fresh.num > num_drafts + 1)

    def catch_up(state: DecodeState) -> DecodeState:
        return _catch_up(drafter, state, num_drafts + 1)

    state = jax.lax.while_loop(behind, catch_up, state)
    waiting = state.fresh
    state = dataclasses.replace(state, fresh=first_rows(waiting, num_drafts + 1))
    state, outputs = steps(target, drafter, state, (num_drafts,), sampling, count, limit)
    return dataclasses.replace(state, fresh=put_first(state.fresh, waiting)), outputs


def _catch_up(drafter: Drafter, state: DecodeState, width: int) -> DecodeState:
    """The state once the drafter has taken in all that waits for it but the last `width` rows."""
    older, fresh = overdue(state.fresh, width)
    older = dataclasses.replace(older, first_position=jnp.where(state.done, -1, older.first_position))
    with jax.named_scope(DRAFT_PART):
        _, drafter_state = drafter.propose(state.drafter_state, older, 1)
    return dataclasses.replace(state, fresh=fresh, drafter_state=drafter_state)


@flax.struct.dataclass
class _Known:
    """What a step goes by, without the caches."""

    pending_token: jax.Array
    length: jax.Array
    done: jax.Array
    fresh: Fresh
    outlook: Outlook | None
    random: jax.Array | None

    def unless_done(self, positions: jax.Array) -> jax.Array:
        """The positions, -1 (inactive) for rows that are done: such rows write nothing."""
        return jnp.where(self.done, -1, positions)


def _propose(
    drafter: Drafter, known: _Known, drafter_state: PyTree, ladder: Ladder, rung: int, sampling: SamplingConfig
) -> tuple[Proposal, PyTree]:
    """ladder[rung] drafts, and how many of them to verify. Of 0 the drafter is not asked, and what is fresh waits."""
    num_drafts, most = ladder[rung], ladder[-1]
    if num_drafts == 0:
        none = jnp.zeros((known.length.shape[0], 0), jnp.int32)
        return Proposal(none, none.astype(jnp.float32), None, jnp.zeros((), jnp.int32)), drafter_state
    fresh = first_rows(known.fresh, most + 1)  # what a step commits; more has been taken in before (_catch_up)
    fresh = dataclasses.replace(fresh, first_position=known.unless_done(fresh.first_position))
    draft, drafter_state = drafter.propose(drafter_state, fresh, num_drafts)
    token_ids, probs = draft.token_ids, None
    if sampling.draft_sampling and draft.logits is not None and known.random is not None:
        probs = probabilities(draft.logits, SamplingConfig(temperature=sampling.temperature))
        token_ids = jnp.maximum(draw(probs, known.random[:, :num_drafts, DRAFT]), 0)  # NaN shows in the confidence
        probs = _widen(probs, most)
    confidence = draft.confidence
    if confidence is None:
        confidence = policy.usual_confidence(known.outlook, token_ids)
    confidence = _widen(confidence, most)
    verified = policy.width(known.outlook, ladder, rung, confidence, ~known.done)
    return Proposal(_widen(token_ids, most), confidence, probs, verified), drafter_state


def _verify(
    target: Target, known: _Known, proposal: Proposal, target_cache: PyTree, width: int, sampling: SamplingConfig
) -> tuple[Verdict, PyTree]:
    """What becomes of the first `width` drafts."""
    most, random = proposal.token_ids.shape[1], known.random
    drafts = proposal.token_ids[:, :width]
    probs = proposal.probs[:, :width] if proposal.probs is not None and width else None
    rows = jnp.concatenate([known.pending_token[:, None], drafts], axis=1)
    output, target_cache = target.verify(rows, known.unless_done(known.length), target_cache)
    with jax.named_scope(ACCEPT_PART):
        acceptance = accept(drafts, probs, output.logits, sampling, None if random is None else random[:, : width + 1])
    return Verdict(acceptance, _widen(output.aux_hidden, most + 1)), target_cache


def _one_of(
    rungs: Sequence[int],
    chosen: jax.Array,
    branch: Callable[[int, Known, Carry], tuple[Message, Carry]],
    known: Known,
    carry: Carry,
) -> tuple[Message, Carry]:
    """What the branch of the chosen rung makes of what is known and of the carry; only that one runs.

    Loops of one round or none, not jax.lax.switch: XLA copies what goes through a conditional, so all the caches, and
    updates what goes through a loop in place.
    """
    if len(rungs) == 1:
        return branch(rungs[0], known, carry)
    message: Any = jax.eval_shape(functools.partial(branch, rungs[0]), known, carry)[0]
    message = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), message)
    waiting = jnp.ones((), bool)
    for rung in rungs:

        def here(run: tuple[Any, Carry, jax.Array], rung: int = rung) -> jax.Array:
            return run[2] & (chosen == rung)

        def once(run: tuple[Any, Carry, jax.Array], rung: int = rung) -> tuple[Any, Carry, jax.Array]:
            # made to depend on the round: XLA moves what does not out of the loop, where it would run in any case
            held = jax.tree.map(lambda leaf: jnp.where(run[2], leaf, jnp.zeros_like(leaf)), known)
            return *branch(rung, held, run[1]), jnp.zeros((), bool)

        message, carry, waiting = jax.lax.while_loop(here, once, (message, carry, waiting))
    return message, carry


def _widen(values: jax.Array, width: int) -> jax.Array:
    """Zeros behind the second axis, up to this width."""
    return jnp.pad(values, [(0, 0), (0, width - values.shape[1])] + [(0, 0)] * (values.ndim - 2))
