"""Key/value caches of one attention layer: a full cache (slot = position) or a ring (slot = position mod capacity).

The caller's `length` decides which entries are valid; a cache holds no such mark. Entries at and beyond it are
leftovers of a rolled-back pass. Causality hides them from every earlier query, and the next pass overwrites them before
it reads.

    full   | 0 1 2 ... length-1 | dead ...... |            slot = position
    ring   | 8 9 | 2 3 4 5 6 7 |  capacity 8, newest 9     slot = position mod 8

A ring for a `window` of keys and passes that write T rows before they attend needs capacity >= window + T - 1: the last
of T rows overwrites position newest - capacity, which the first of them, or a query after a rollback, must not attend
to any more (`ring_capacity`).
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class KVCache:
    """One layer's keys and values, [B, C, G, H] each; `ring` selects the map from positions to slots."""

    key: jax.Array  # [B, C, G, H]
    value: jax.Array  # [B, C, G, H]
    ring: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def capacity(self) -> int:
        return self.key.shape[1]


def init_kv_cache(
    batch: int, capacity: int, kv_heads: int, head_dim: int, dtype: DTypeLike, ring: bool = False
) -> KVCache:
    """Make an empty cache."""
    # two buffers, since a donated buffer may appear only once
    shape = (batch, capacity, kv_heads, head_dim)
    return KVCache(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype), ring=ring)


def init_window_cache(
    batch: int,
    capacity: int,
    window: int | None,
    widest_write: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
) -> KVCache:
    """An empty cache of a layer that sees `window` positions (None: all) and is written up to `widest_write` rows at a
    time: a ring where that takes fewer slots than a full cache of `capacity` positions."""
    if window is None or ring_capacity(window, widest_write) >= capacity:
        return init_kv_cache(batch, capacity, kv_heads, head_dim, dtype)
    return init_kv_cache(batch, ring_capacity(window, widest_write), kv_heads, head_dim, dtype, ring=True)


def ring_capacity(window: int, widest_write: int) -> int:
    """Return the smallest safe ring for a window and the widest pass that writes before it attends."""
    return window + widest_write - 1


def write_kv(
    cache: KVCache, key: Float[Array, "B T G H"], value: Float[Array, "B T G H"], positions: Int[Array, "B T"]
) -> KVCache:
    """Write rows to their positions' slots.

    Rows of negative position are dropped, and in a full cache rows beyond its capacity. In a ring the positions of one
    call must span less than its capacity.
    """
    capacity = cache.capacity
    slots = positions % capacity if cache.ring else positions
    slots = jnp.where(positions < 0, capacity, slots)  # out of range: dropped by the scatter
    rows = jnp.arange(key.shape[0], dtype=jnp.int32)[:, None]
    return KVCache(
        key=cache.key.at[rows, slots].set(key.astype(cache.key.dtype), mode="drop"),
        value=cache.value.at[rows, slots].set(value.astype(cache.value.dtype), mode="drop"),
        ring=cache.ring,
    )


def slot_positions(cache: KVCache, newest: Int[Array, " B"]) -> Int[Array, "B C"]:
    """Return the position in each slot if `newest` is the highest position written; negative for an empty slot.

    Example: capacity 8, newest 9: slots 0..7 hold 8, 9, 2, 3, 4, 5, 6, 7. In a full cache slot = position for any
    newest: causality hides positions beyond it.
    """
    slots = jnp.broadcast_to(jnp.arange(cache.capacity, dtype=jnp.int32)[None, :], (newest.shape[0], cache.capacity))
    if not cache.ring:
        return slots
    newest = newest[:, None]
    position = (newest // cache.capacity) * cache.capacity + slots
    return jnp.where(position > newest, position - cache.capacity, position)


def put_rows(into: jax.Array, rows: jax.Array, start: Sequence[jax.Array]) -> jax.Array:
    """Write rows in place, as jax.lax.dynamic_update_slice does.

    XLA on CPU computes that in float32 for bfloat16, so it would convert the whole array there and back. As integers
    the same bits are written where they belong, in a twentieth of the time for a layer of 4,096 positions.
    """
    if into.dtype != jnp.bfloat16:
        return jax.lax.dynamic_update_slice(into, rows, start)
    into, rows = (jax.lax.bitcast_convert_type(each, jnp.uint16) for each in (into, rows))
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(into, rows, start), jnp.bfloat16)


COPIED = 128  # positions per block of a copy


def copy_positions(
    into: KVCache, source: KVCache, row: Int[Array, ""], length: Int[Array, ""], block: int = COPIED
) -> KVCache:
    """Copy positions 0..length-1 of the one sequence in `source` to a row of another cache.

    A ring receives the last positions that fit, each in its own slot; the source may be a ring of another capacity, or
    full. A full cache receives as many blocks of `block` positions as hold valid ones, so the cost grows with length,
    not with capacity. The rest of the row is dead.
    """
    if into.ring:
        wanted = slot_positions(into, length[None] - 1)[0]
        slots = jnp.where(wanted < 0, 0, wanted % source.capacity if source.ring else wanted)

        def put(target: jax.Array, values: jax.Array) -> jax.Array:
            taken = values[0, slots].astype(target.dtype)
            zero = jnp.zeros_like(row)
            return put_rows(target, taken[None], (row, zero, zero, zero))

        return KVCache(put(into.key, source.key), put(into.value, source.value), ring=True)
    if source.ring:
        raise ValueError("a ring does not hold all positions of a full cache")
    block = min(block, into.capacity, source.capacity)

    def copy(index: jax.Array, into: KVCache) -> KVCache:
        # the last block may begin earlier, so that it ends within both caches
        start = jnp.minimum(index * block, min(into.capacity, source.capacity) - block)
        zero = jnp.zeros_like(start)

        def put(target: jax.Array, values: jax.Array) -> jax.Array:
            taken = jax.lax.dynamic_slice_in_dim(values, start, block, axis=1)
            return put_rows(target, taken.astype(target.dtype), (row, start, zero, zero))

        return KVCache(put(into.key, source.key), put(into.value, source.value), ring=False)

    copied: KVCache = jax.lax.fori_loop(jnp.int32(0), (length + block - 1) // block, copy, into)
    return copied


def cache_bytes(caches: object) -> int:
    """Count the bytes of every array in a tree of caches (shapes suffice)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
