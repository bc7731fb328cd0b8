"""Prefill a prompt chunk by chunk in its own lane: batch 1, chunks of one length.

A chunk runs through the same cached attention as a step.

    chunk 0         | t0 t1 t2 t3 |                 positions 0 1 2 3
    chunk 1 (last)                | t4 t5 .. .. |   positions 4 5 -1 -1: padding is never written

The drafter's row p pairs token p + 1 with aux_hidden[p]. So the chunk of tokens b..e gives the drafter rows b-1..e-1;
the aux_hidden of row b-1 was computed by the previous chunk and is kept in the Prefix. The caches do not depend on
where the prompt is cut, on native kernels bit for bit.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.engine.state import Prefix
from peagle.protocols import Drafter, Target


def empty_prefix(target: Target, drafter: Drafter | None, capacity: int, chunk: int) -> Prefix:
    """Make a Prefix of no tokens, with room for `capacity` positions.

    Sliding layers have room for a whole chunk besides, since a chunk is written before it attends.
    """
    cache = target.init_cache(1, capacity, chunk)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    aux = jax.eval_shape(target.extend, one, one, cache)[0].aux_hidden
    drafter_state = None if drafter is None else drafter.init_state(1, capacity, chunk)
    return Prefix(cache, drafter_state, jnp.zeros((1, aux.shape[2]), aux.dtype), jnp.zeros((1,), jnp.int32))


def extend(
    target: Target, drafter: Drafter | None, prefix: Prefix, token_ids: Int[Array, "1 T"], count: Int[Array, ""]
) -> tuple[Prefix, Float[Array, "1 1 V"]]:
    """Append the first `count` >= 1 tokens; return (the Prefix, the logits that follow the last)."""
    place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.where(place < count, prefix.length[:, None] + place, -1)
    last = (count - 1).reshape(1, 1)
    output, cache = target.extend(token_ids, positions, prefix.target_cache, last)
    drafter_state = prefix.drafter_state
    if drafter is not None:
        shifted = jnp.concatenate([prefix.aux_hidden[:, None], output.aux_hidden[:, :-1]], axis=1)
        drafter_state = drafter.absorb(drafter_state, token_ids, shifted, jnp.maximum(positions - 1, -1))
    aux_hidden = jnp.take_along_axis(output.aux_hidden, last[:, :, None], axis=1)[:, 0]
    after = dataclasses.replace(
        prefix,
        target_cache=cache,
        drafter_state=drafter_state,
        aux_hidden=aux_hidden,
        length=prefix.length + count,
    )
    return after, output.logits
