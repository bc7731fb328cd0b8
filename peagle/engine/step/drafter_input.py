"""The committed rows that a drafter has not read: append them, and let it absorb them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from peagle.engine.step.state import DecodeState
from peagle.ops.messages import DrafterInput
from peagle.ops.put_rows import put_rows
from peagle.protocols import Drafter

DRAFT_PART, ABSORB_PART = "draft", "absorb"  # named scopes, for the profiler


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


def append_rows(
    state: DecodeState,
    token_ids: Int[Array, "B T"],
    aux_hidden: Float[Array, "B T A"],
    num_new: Int[Array, " B"],
    read: Bool[Array, " B"],
) -> tuple[DrafterInput | None, Bool[Array, " B"]]:
    """Append the first num_new[b] rows to drafter_input, or let them replace it where it has been read.

    Returns (drafter_input, whether it had no room left for the rows).
    """
    before = state.drafter_input
    if before is None:
        return None, jnp.zeros_like(state.done)
    begin, room = jnp.where(read, 0, before.num), before.token_ids.shape[1]
    full = ~state.done & (begin + num_new > room)

    count = jnp.where(state.done | full, 0, num_new)  # inactive rows keep their input
    after = DrafterInput(
        put_rows(before.token_ids, token_ids, begin, count),
        put_rows(before.aux_hidden, aux_hidden, begin, count),
        jnp.where(state.done | full, before.num, begin + num_new),
        jnp.where(read & ~state.done, state.length, before.first_position),
    )
    return after, full
