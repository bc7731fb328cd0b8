"""Write rows into the arrays of slots, each from its own place on.

The native kernel writes in place. XLA on CPUs makes a loop of a scatter, which takes as long as half a pass of a small
target over eight rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from peagle.ops import native


def put_rows(
    into: Shaped[Array, "B S ..."], rows: Shaped[Array, "B T ..."], start: Int[Array, " B"], count: Int[Array, " B"]
) -> Shaped[Array, "B S ..."]:
    """Write the first count[b] of rows[b] into into[b], from start[b] >= 0 on; leave out what lies beyond its end."""
    rows = rows.astype(into.dtype)
    if native.available():
        shape = jax.ShapeDtypeStruct(into.shape, into.dtype)
        written: jax.Array = native.call("put_rows", shape, into, rows, start, count, in_place={0: 0})
        return written
    place = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
    places = jnp.where(place < count[:, None], start[:, None] + place, into.shape[1])
    return into.at[jnp.arange(into.shape[0])[:, None], places].set(rows, mode="drop")
