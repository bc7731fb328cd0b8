"""One step: propose, verify, accept, commit. One program, or several steps in one; no host decision, no host read."""

import dataclasses

import jax
import jax.numpy as jnp

from peagle.accept import accept
from peagle.config import SamplingConfig
from peagle.protocols import Drafter, Target
from peagle.sampling import DRAFT, draw, probabilities, uniforms
from peagle.state import DecodeState, StepOutput, commit, empty_outputs


def step(
    target: Target, drafter: Drafter, state: DecodeState, num_drafts: int, sampling: SamplingConfig
) -> tuple[DecodeState, StepOutput]:
    """The state one step on: every active row has emitted between 1 and num_drafts + 1 tokens.

    With num_drafts 0 this is plain decoding. See peagle.protocols for the indices.
    """
    random = None
    if not sampling.greedy:
        index = state.length[:, None] + 1 + jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :]
        random = uniforms(state.key, index)

    first_position = _unless_done(state, state.fresh.first_position)
    fresh = dataclasses.replace(state.fresh, first_position=first_position)
    draft, drafter_state = drafter.propose(state.drafter_state, fresh, num_drafts)
    draft_token_ids, draft_probs = draft.token_ids, None
    if sampling.draft_sampling and draft.logits is not None and random is not None:
        draft_probs = probabilities(draft.logits, SamplingConfig(temperature=sampling.temperature))
        draft_token_ids = draw(draft_probs, random[:, :-1, DRAFT])

    rows = jnp.concatenate([state.pending_token[:, None], draft_token_ids], axis=1)
    output, target_cache = target.verify(rows, _unless_done(state, state.length), state.target_cache)
    acceptance = accept(draft_token_ids, draft_probs, output.logits, sampling, random)
    return commit(state, draft_token_ids, acceptance, output.aux_hidden, target_cache, drafter_state)


def steps(
    target: Target, drafter: Drafter, state: DecodeState, num_drafts: int, sampling: SamplingConfig, count: int
) -> tuple[DecodeState, StepOutput]:
    """The state `count` steps on, and the outputs of all of them, [count, ...] each; it stops where every row is done:
    what would have come then are outputs of rows that were done before."""
    if count == 1:
        state, output = step(target, drafter, state, num_drafts, sampling)
        return state, jax.tree.map(lambda leaf: leaf[None], output)

    def go_on(carry: tuple[DecodeState, StepOutput, jax.Array]) -> jax.Array:
        return (carry[2] < count) & ~jnp.all(carry[0].done)

    def one(carry: tuple[DecodeState, StepOutput, jax.Array]) -> tuple[DecodeState, StepOutput, jax.Array]:
        state, outputs, index = carry
        state, output = step(target, drafter, state, num_drafts, sampling)
        return state, jax.tree.map(lambda all, own: all.at[index].set(own), outputs, output), index + 1

    nothing = empty_outputs(count, state.length.shape[0], num_drafts)
    state, outputs, _ = jax.lax.while_loop(go_on, one, (state, nothing, jnp.zeros((), jnp.int32)))
    return state, outputs


def _unless_done(state: DecodeState, positions: jax.Array) -> jax.Array:
    """The positions, -1 (inactive) for rows that are done: such rows write nothing."""
    return jnp.where(state.done, -1, positions)
