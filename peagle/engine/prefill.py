"""A prompt, chunk by chunk, in a lane of its own: batch 1, one fixed chunk length, the same cached attention as a step.

    chunk 0         | t0 t1 t2 t3 |                 positions 0 1 2 3
    chunk 1 (last)                | t4 t5 .. .. |   positions 4 5 -1 -1: padding is never written

The drafter's row p pairs token p + 1 with aux_hidden[p]. So a chunk brings it the rows one position behind its own: the
first of them with the aux_hidden that the chunk before left in the Prefix. Cutting a prompt anywhere gives the same
caches, on native kernels bit for bit.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.engine.protocols import Drafter, Target
from peagle.engine.state import Prefix, init_drafter


def empty_prefix(target: Target, drafter: Drafter | None, capacity: int, num_drafts: int, chunk: int) -> Prefix:
    """A Prefix of no tokens, with room for `capacity` positions and for a chunk that is written before it attends."""
    cache = target.init_cache(1, capacity, chunk)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    aux = jax.eval_shape(target.extend, one, one, cache)[0].aux_hidden
    drafter_state = None if drafter is None else init_drafter(drafter, 1, capacity, num_drafts, chunk)
    return Prefix(cache, drafter_state, jnp.zeros((1, aux.shape[2]), aux.dtype), jnp.zeros((1,), jnp.int32))


def extend(
    target: Target, drafter: Drafter | None, prefix: Prefix, token_ids: Int[Array, "1 T"], count: Int[Array, ""]
) -> tuple[Prefix, Float[Array, "1 1 V"]]:
    """(the Prefix with the first `count` >= 1 of these tokens behind it, the logits that follow the last of them)."""
    place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.where(place < count, prefix.length[:, None] + place, -1)
    last = (count - 1).reshape(1, 1)
    output, cache = target.extend(token_ids, positions, prefix.target_cache, last)
    drafter_state = prefix.drafter_state
    if drafter is not None:
        behind = jnp.concatenate([prefix.aux_hidden[:, None], output.aux_hidden[:, :-1]], axis=1)
        drafter_state = drafter.absorb(drafter_state, token_ids, behind, jnp.maximum(positions - 1, -1))
    aux_hidden = jnp.take_along_axis(output.aux_hidden, last[:, :, None], axis=1)[:, 0]
    after = dataclasses.replace(
        prefix,
        target_cache=cache,
        drafter_state=drafter_state,
        aux_hidden=aux_hidden,
        length=prefix.length + count,
    )
    return after, output.logits
