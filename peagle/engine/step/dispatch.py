"""Run the steps of one dispatch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from peagle.engine.auto.costs import StepCosts
from peagle.engine.auto.learn import learn_from_plain_steps
from peagle.engine.step.propose import Proposed, propose, run_if
from peagle.engine.step.state import DecodeState
from peagle.engine.step.step import accept_and_commit, step, verify
from peagle.engine.step.step_kinds import StepKind, StepOutput
from peagle.protocols import Drafter, Target

PLAIN_PART = "plain"  # a named scope: of an adaptive dispatch, its plain steps
_Step: TypeAlias = tuple[DecodeState, jax.Array]  # the state, packed outputs [B, W]
_Run: TypeAlias = tuple[DecodeState, jax.Array, jax.Array]  # the state, packed outputs, and how many steps were run


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
    ones while drafting is paused. Outputs of steps that were not run have num_accepted -1.
    """
    packed_width = StepOutput.packed_width(kind, target.vocab_size)

    def packed(state: DecodeState, output: StepOutput) -> _Step:
        return state, output.padded(kind.num_drafts + 1 - output.token_ids.shape[1]).pack()

    def finish(state: DecodeState, proposed: Proposed, own: StepKind) -> _Step:
        state, verified = verify(target, state, proposed)
        return packed(*accept_and_commit(state, proposed, verified, costs, own))

    def one(state: DecodeState, own: StepKind = kind) -> _Step:
        if not own.adaptive:
            return packed(*step(target, drafter, state, widths, costs, own))
        state, proposed = propose(drafter, state, widths, costs, own, lookup)
        some, nothing = jnp.any(proposed.widths > 0), jnp.zeros((state.slots, packed_width), jnp.int32)
        run = run_if(some, lambda run: finish(run[0], proposed, own), (state, nothing))
        with jax.named_scope(PLAIN_PART):
            return run_if(~some, lambda run: finish(run[0], proposed.without_drafts, own.plain), run)

    if most == 1 and not kind.adaptive:
        state, output = one(state)
        return state, output[None]

    def left(run: _Run, limit: jax.Array) -> jax.Array:
        return (run[2] < limit) & jnp.any(~run[0].done)

    def once(run: _Run, own: StepKind = kind) -> _Run:
        state, output = one(run[0], own)
        return state, jax.lax.dynamic_update_index_in_dim(run[1], output, run[2], 0), run[2] + 1

    def repeat(body: Callable[[_Run], _Run], limit: jax.Array, run: _Run) -> _Run:
        if most == 1:  # a branch, where that is cheaper than a loop
            return run_if(left(run, limit), body, run)
        return jax.lax.while_loop(lambda run: left(run, limit), body, run)  # type: ignore[no-any-return]

    def after_pause(run: _Run) -> _Run:
        assert run[0].auto is not None
        until = jnp.minimum(run[2] + run[0].auto.pause(~run[0].done), limit)
        plain = functools.partial(once, own=kind.plain)
        with jax.named_scope(PLAIN_PART):
            state, outputs, count = repeat(plain, until, run)
        assert state.auto is not None
        auto = learn_from_plain_steps(state.auto, state.auto_slots(costs), count - run[2])
        run = dataclasses.replace(state, auto=auto), outputs, count
        return run_if(left(run, limit), once, run)

    empty = jnp.zeros((most, state.slots, packed_width), jnp.int32).at[:, :, 1].set(-1)  # num_accepted
    run, body = (state, empty, jnp.zeros((), jnp.int32)), after_pause if kind.adaptive else once
    state, outputs, _ = repeat(body, limit, run)
    return state, outputs
