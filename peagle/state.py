"""What is known between two steps, on the device, and how a step changes it.

Invariants, per active row, between steps:
    the target's caches hold exactly the prompt and all emitted tokens but the last: `length` of them
    `pending_token` is that last one: emitted, in no cache
    the drafter lags by the tokens committed last: `fresh.num` of them, fresh.first_position = length - fresh.num
A row that is done is frozen: steps go on computing it, and change nothing that is read.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from peagle.ops.messages import Fresh
from peagle.protocols import Acceptance, PyTree


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
    accepted_histogram: jax.Array  # [B, K+1] int32: steps by num_accepted, counted before any truncation


@flax.struct.dataclass
class StepOutput:
    """What the host reads of a step (as NumPy arrays then). A row that was done before it has count 0 and
    num_accepted -1."""

    token_ids: (
        jax.Array | np.ndarray
    )  # [B, K+1]: accepted drafts, then next_token at index num_accepted; the rest is leftovers
    count: jax.Array | np.ndarray  # [B]: emitted tokens, 0..K+1: cut behind a stop token and at the budget
    num_accepted: jax.Array | np.ndarray  # [B]: before that cut
    draft_token_ids: jax.Array | np.ndarray  # [B, K]
    done: jax.Array | np.ndarray  # [B]


def init_state(
    first_token: Int[Array, "B"],
    lengths: Int[Array, "B"],
    last_aux_hidden: Float[Array, "B A"],
    num_drafts: int,
    target_cache: PyTree,
    drafter_state: PyTree,
    budgets: Int[Array, "B"],
    key: jax.Array,
    stop_token_ids: Int[Array, "S"],
) -> DecodeState:
    """The state after prefill and the first token, which counts as emitted. A row of budget 0 is done from the
    start."""
    batch = first_token.shape[0]
    width = num_drafts + 1
    fresh = Fresh(
        token_ids=jnp.zeros((batch, width), jnp.int32).at[:, 0].set(first_token),
        aux_hidden=jnp.zeros((batch, width, last_aux_hidden.shape[1]), last_aux_hidden.dtype)
        .at[:, 0]
        .set(last_aux_hidden),
        num=jnp.ones((batch,), jnp.int32),
        first_position=lengths - 1,
    )
    return DecodeState(
        length=lengths,
        pending_token=first_token,
        fresh=fresh,
        target_cache=target_cache,
        drafter_state=drafter_state,
        done=(budgets <= 1) | _is_stop(first_token, stop_token_ids),
        remaining=budgets - 1,
        key=key,
        stop_token_ids=stop_token_ids,
        accepted_histogram=jnp.zeros((batch, width), jnp.int32),
    )


def empty_outputs(count: int, batch: int, num_drafts: int) -> StepOutput:
    """The outputs of `count` steps of rows that were done before."""
    return StepOutput(
        token_ids=jnp.zeros((count, batch, num_drafts + 1), jnp.int32),
        count=jnp.zeros((count, batch), jnp.int32),
        num_accepted=jnp.full((count, batch), -1, jnp.int32),
        draft_token_ids=jnp.zeros((count, batch, num_drafts), jnp.int32),
        done=jnp.ones((count, batch), bool),
    )


def commit(
    state: DecodeState,
    draft_token_ids: Int[Array, "B K"],
    acceptance: Acceptance,
    aux_hidden: Float[Array, "B T A"],
    target_cache: PyTree,
    drafter_state: PyTree,
) -> tuple[DecodeState, StepOutput]:
    """The state with num_accepted drafts and next_token emitted, and what the host will read of it.

    Rejected rows are dead because `length` excludes them. A stop token inside the run, or the budget, ends the row
    there.
    """
    active = ~state.done
    num_drafts = draft_token_ids.shape[1]
    steps = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :]
    accepted = acceptance.num_accepted[:, None]
    drafts = jnp.pad(draft_token_ids, ((0, 0), (0, 1)))
    run = jnp.where(steps == accepted, acceptance.next_token[:, None], drafts)

    in_run = steps <= accepted
    stops = in_run & _is_stop(run, state.stop_token_ids)
    behind_stop = jnp.cumsum(stops.astype(jnp.int32), axis=1) - stops.astype(jnp.int32)
    kept = in_run & (behind_stop == 0) & (steps < state.remaining[:, None]) & active[:, None]
    count = jnp.sum(kept, axis=1, dtype=jnp.int32)
    remaining = state.remaining - count
    done = state.done | jnp.any(stops & kept, axis=1) | (remaining <= 0)

    num_new = acceptance.num_accepted + 1
    fresh = Fresh(token_ids=run, aux_hidden=aux_hidden, num=num_new, first_position=state.length)
    state = dataclasses.replace(
        state,
        length=jnp.where(active, state.length + num_new, state.length),
        pending_token=jnp.where(active, acceptance.next_token, state.pending_token),
        fresh=jax.tree.map(lambda new, old: _rows_where(active, new, old), fresh, state.fresh),
        target_cache=target_cache,
        drafter_state=drafter_state,
        done=done,
        remaining=remaining,
        accepted_histogram=state.accepted_histogram + ((steps == accepted) & active[:, None]).astype(jnp.int32),
    )
    output = StepOutput(
        token_ids=run,
        count=count,
        num_accepted=jnp.where(active, acceptance.num_accepted, -1),
        draft_token_ids=draft_token_ids,
        done=done,
    )
    return state, output


def _is_stop(token_ids: Int[Array, "..."], stop_token_ids: Int[Array, "S"]) -> Bool[Array, "..."]:
    stops = stop_token_ids.reshape((1,) * token_ids.ndim + (-1,))
    return jnp.any(token_ids[..., None] == stops, axis=-1)


def _rows_where(rows: Bool[Array, "B"], new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(rows.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)
