"""Prefill a prompt in its own lane of batch 1: chunk by chunk, in chunks of one length, or at once in blocks of rows.

A chunk runs through the same cached attention as a step.

    chunk 0         | t0 t1 t2 t3 |                 positions 0 1 2 3
    chunk 1 (last)                | t4 t5 .. .. |   positions 4 5 -1 -1: padding is never written

The drafter's row p pairs token p + 1 with aux_hidden[p]. So the chunk of tokens b..e gives the drafter rows b-1..e-1;
the aux_hidden of row b-1 was computed by the previous chunk and is kept in the Prefix. The caches do not depend on
where the prompt is cut, on native kernels bit for bit.

At once, the layers are the outer loop and the blocks of rows the inner one. So attention may see few rows at a time,
and the experts many, which reads and dequantises each of them fewer times.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.engine.state import Prefix
from peagle.ops.kv_cache import KVCache, copy_positions, init_kv_cache
from peagle.ops.row_blocks import RowBlocks
from peagle.protocols import Drafter, PrefillsAtOnce, PyTree, Target

Snapshot: TypeAlias = tuple[list[Any], jax.Array]  # what is no full layer, the target's first; aux_hidden


def empty_prefix(target: Target, drafter: Drafter | None, capacity: int, widest_write: int) -> Prefix:
    """Make a Prefix of no tokens, with room for `capacity` positions.

    widest_write: rows that are written before they attend, a chunk; sliding layers have room for these besides.
    """
    cache = target.init_cache(1, capacity, widest_write)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    aux = jax.eval_shape(target.extend, one, one, cache)[0].aux_hidden
    drafter_state = None if drafter is None else drafter.init_state(1, capacity, widest_write)
    return Prefix(cache, drafter_state, jnp.zeros((1, aux.shape[2]), aux.dtype), jnp.zeros((1,), jnp.int32))


def extend(
    target: Target,
    drafter: Drafter | None,
    prefix: Prefix,
    token_ids: Int[Array, "1 T"],
    count: Int[Array, ""],
    num_absorbed: Int[Array, ""] | None = None,
) -> tuple[Prefix, Float[Array, "1 1 V"]]:
    """Append the first `count` >= 1 tokens; return (the Prefix, the logits that follow the last).

    num_absorbed: how many of them the drafter holds already, 0 or 1: after 1, the Prefix needs no aux_hidden.
    """
    positions, last = _places(prefix, token_ids, count)
    output, cache = target.extend(token_ids, positions, prefix.target_cache, last)
    state = prefix.drafter_state
    if drafter is not None:
        if num_absorbed is not None:
            place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
            positions = jnp.where(place < num_absorbed, -1, positions)
        state = _absorb(drafter, state, token_ids, positions, output.aux_hidden, prefix.aux_hidden)
    return _extended(prefix, cache, state, output.aux_hidden, last), output.logits


def extend_at_once(
    target: PrefillsAtOnce,
    drafter: Drafter | None,
    prefix: Prefix,
    token_ids: Int[Array, "1 T"],
    count: Int[Array, ""],
    blocks: RowBlocks,
) -> tuple[Prefix, Float[Array, "1 1 V"]]:
    """Do what `extend` does, with a whole prompt in one pass, layer by layer (peagle.protocols.PrefillsAtOnce)."""
    positions, last = _places(prefix, token_ids, count)
    output, cache = target.prefill(token_ids, positions, prefix.target_cache, last, blocks)
    state, rows = prefix.drafter_state, blocks.query_rows
    if drafter is not None:

        def absorb(block: jax.Array, carry: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
            state, before = carry
            ids, at, aux = (
                jax.lax.dynamic_slice_in_dim(each, block * rows, rows, axis=1)
                for each in (token_ids, positions, output.aux_hidden)
            )
            return _absorb(drafter, state, ids, at, aux, before), aux[:, -1]

        state, _ = jax.lax.fori_loop(jnp.int32(0), (count + rows - 1) // rows, absorb, (state, prefix.aux_hidden))
    return _extended(prefix, cache, state, output.aux_hidden, last), output.logits


def _places(prefix: Prefix, token_ids: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the tokens' positions [1, T], -1 after the first `count`; the last one's row [1, 1])."""
    place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(place < count, prefix.length[:, None] + place, -1), (count - 1).reshape(1, 1)


def _absorb(
    drafter: Drafter,
    state: PyTree,
    token_ids: jax.Array,
    positions: jax.Array,
    aux_hidden: jax.Array,
    before: jax.Array,
) -> PyTree:
    """Let the drafter absorb tokens with the aux_hidden of the positions before them; `before` [1, A]: the first's."""
    shifted = jnp.concatenate([before[:, None], aux_hidden[:, :-1]], axis=1)
    return drafter.absorb(state, token_ids, shifted, jnp.maximum(positions - 1, -1))


def _extended(prefix: Prefix, cache: PyTree, state: PyTree, aux_hidden: jax.Array, last: jax.Array) -> Prefix:
    return dataclasses.replace(
        prefix,
        target_cache=cache,
        drafter_state=state,
        aux_hidden=jnp.take_along_axis(aux_hidden, last[:, :, None], axis=1)[:, 0],
        length=prefix.length + last[0] + 1,
    )


# What the prefix cache keeps of a Prefix (peagle.engine.prefix_cache). A block is the rows of its positions in all full
# layers. The drafter's begin one row earlier: row p needs token p + 1, and a block must depend on its own tokens and
# those before it alone. A snapshot is everything else: rings, aux_hidden, states that are no caches. Without rings none
# is needed: aux_hidden is computed again, and so is the state of a drafter that reads tokens alone.


def needs_snapshots(prefix: Prefix) -> bool:
    """Check if blocks do not suffice to begin at any length."""
    drafters = [] if learns_from_tokens(prefix) else _nodes(prefix.drafter_state)
    return not all(map(_is_full, _nodes(prefix.target_cache) + drafters))


def learns_from_tokens(prefix: Prefix) -> bool:
    """Check if the drafter reads no aux_hidden."""
    return prefix.drafter_state is not None and prefix.aux_hidden.shape[1] == 0


def relearn(drafter: Drafter, prefix: Prefix, token_ids: Int[Array, "1 T"], positions: Int[Array, "1 T"]) -> Prefix:
    """Let a drafter that reads no aux_hidden absorb tokens at these positions."""
    nothing = jnp.zeros((*token_ids.shape, 0), prefix.aux_hidden.dtype)
    state = _absorb(drafter, prefix.drafter_state, token_ids, positions, nothing, prefix.aux_hidden)
    return dataclasses.replace(prefix, drafter_state=state)


def cut_block(prefix: Prefix, start: Int[Array, ""], size: int) -> list[KVCache]:
    """Copy the rows of positions start .. start + size - 1 of every full layer."""

    def cut(cache: KVCache, first: jax.Array) -> KVCache:
        rows = min(size, cache.capacity)
        key, value = (jax.lax.dynamic_slice_in_dim(each, first, rows, axis=1) for each in (cache.key, cache.value))
        return KVCache(key, value)

    return [cut(cache, first) for cache, first in _full_layers(prefix, start)]


def put_block(prefix: Prefix, block: list[KVCache], start: Int[Array, ""]) -> Prefix:
    """Write a block's rows to its positions. Blocks must be put in order."""
    rows = iter(block)

    def put(node: Any, first: jax.Array) -> Any:
        if not _is_full(node):
            return node
        given = next(rows)
        key = jax.lax.dynamic_update_slice_in_dim(node.key, given.key, first, axis=1)
        return KVCache(key, jax.lax.dynamic_update_slice_in_dim(node.value, given.value, first, axis=1))

    return _map_layers(prefix, put, start, jnp.maximum(start - 1, 0))


def cut_snapshot(prefix: Prefix, chunk: int) -> Snapshot:
    """Copy what is valid at the Prefix's length alone; of a ring, the positions that its window reaches.

    chunk: the widest write that the Prefix's rings survive.
    """

    def cut(node: Any, length: jax.Array) -> Any:
        if not isinstance(node, KVCache):
            return node
        reached = node.capacity - chunk + 1  # peagle.ops.kv_cache.ring_capacity
        _, _, kv_heads, head_dim = node.key.shape
        empty = init_kv_cache(1, reached, kv_heads, head_dim, node.key.dtype, ring=True)
        return copy_positions(empty, node, jnp.zeros((), jnp.int32), length)

    length = prefix.length[0]
    nodes = [(node, length) for node in _nodes(prefix.target_cache)]
    nodes += [(node, length - 1) for node in _nodes(prefix.drafter_state)]
    return [cut(*each) for each in nodes if not _is_full(each[0])], prefix.aux_hidden


def put_snapshot(prefix: Prefix, snapshot: Snapshot, length: Int[Array, ""]) -> Prefix:
    """Complete a Prefix of this length, whose blocks have been put, by its snapshot."""
    kept, aux_hidden = snapshot
    rest = iter(kept)

    def put(node: Any, valid: jax.Array) -> Any:
        if _is_full(node):
            return node
        given = next(rest)
        return copy_positions(node, given, jnp.zeros((), jnp.int32), valid) if isinstance(node, KVCache) else given

    after = _map_layers(prefix, put, length, length - 1)
    return dataclasses.replace(after, aux_hidden=aux_hidden, length=length[None])


def _is_full(node: Any) -> bool:
    return isinstance(node, KVCache) and not node.ring


def _nodes(tree: PyTree) -> list[Any]:
    """List the caches and other leaves of a tree, in order."""
    nodes: list[Any] = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, KVCache))
    return nodes


def _full_layers(prefix: Prefix, start: jax.Array) -> list[tuple[KVCache, jax.Array]]:
    """(each full layer, the first of its rows that belong to a block), the target's before the drafter's."""
    of_target = [(node, start) for node in _nodes(prefix.target_cache) if _is_full(node)]
    of_drafter = [(node, jnp.maximum(start - 1, 0)) for node in _nodes(prefix.drafter_state) if _is_full(node)]
    return of_target + of_drafter


def _map_layers(
    prefix: Prefix, change: Callable[[Any, jax.Array], Any], of_target: jax.Array, of_drafter: jax.Array
) -> Prefix:
    """Change every cache or leaf of target and drafter, each with the number that holds for its rows."""

    def changed(tree: PyTree, number: jax.Array) -> PyTree:
        return jax.tree.map(lambda node: change(node, number), tree, is_leaf=lambda node: isinstance(node, KVCache))

    target_cache, drafter_state = changed(prefix.target_cache, of_target), changed(prefix.drafter_state, of_drafter)
    return dataclasses.replace(prefix, target_cache=target_cache, drafter_state=drafter_state)
