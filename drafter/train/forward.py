"""The drafter over all (anchor, depth) rows of a training sequence at once, without an L*D x L*D mask.

The group-causal mask (peagle.ops.mask.group_causal_mask) lets a row see two things only: the context, rows of depth 0
up to its anchor, and its own chain. So attention is two pieces under one softmax: every row against the T context
keys, and row (chain, d) against the d keys of its own chain, which, with chains longest first (drafter/train/cod.py),
are the same places of the depth 1..d blocks:

    rows     [ depth 0: T anchors | depth 1: n1 chains | depth 2: n2 chains | ... ],  n1 >= n2 >= ...
    scores   [ every row x T context keys | row (j, d) . key (j, d'), 1 <= d' <= d ]

Scores are rows * (T + D) instead of rows^2, and of long sequences only a block's are there at once; the same function
as drafter.model.forward (a test holds it).
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter import model
from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.train.blocks import in_blocks
from peagle.ops.attention import MASKED

CONTEXT_BLOCK = 128  # context rows that are scored together: what lies behind them is left out
# From so many tokens on, blocks, sequences and kv heads are looped over on the device, and a block's scores are made
# again for its gradient instead of kept: memory is that of one block.
LONG = 1024
LONG_BLOCK = 512  # rows of a block there, at most


def rows_of(anchors: Int[Array, "B n"], counts: tuple[int, ...], width: int) -> tuple[jax.Array, jax.Array]:
    """(anchor, depth) [B, T + sum(counts)] of every row, block by block."""
    batch = anchors.shape[0]
    context = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], (batch, width))
    anchor = jnp.concatenate([context, *(anchors[:, :count] for count in counts)], axis=1)
    depth = jnp.concatenate(
        [jnp.zeros((width,), jnp.int32), *(jnp.full((count,), d, jnp.int32) for d, count in enumerate(counts, 1))]
    )
    return anchor, jnp.broadcast_to(depth[None, :], anchor.shape)


def forward_chains(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B T"],
    aux_hidden: Float[Array, "B T A"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    anchors: Int[Array, "B n"],
    counts: tuple[int, ...],
) -> Float[Array, "B R D"]:
    """Residual stream of every row, R = T + sum(counts), before the final norm and head.

    token_ids are shifted: row p carries token[p+1] and aux_hidden[p]. anchors are places in the row of T; positions are
    RoPE positions and may restart in each segment.
    """
    width = token_ids.shape[1]
    anchor, depth = rows_of(anchors, counts, width)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:  # noqa: ARG001
        return _attention(query, key, value, anchor, segment_ids, counts)

    hidden = model.project_taps(params, config, aux_hidden)
    mask_hidden = model.project_taps(params, config, params.mask_hidden[None, None, :])
    chain_rows = sum(counts)
    batch = token_ids.shape[0]
    hidden = jnp.concatenate([hidden, jnp.broadcast_to(mask_hidden, (batch, chain_rows, hidden.shape[-1]))], axis=1)
    tokens = jnp.concatenate([token_ids, jnp.full((batch, chain_rows), config.mask_token_id, jnp.int32)], axis=1)
    row_positions = jnp.take_along_axis(positions, anchor, axis=1) + depth
    return model.run_layers(params, config, tokens, hidden, row_positions, model.rotated(config, attend))


def _attention(
    query: Float[Array, "B R N H"],
    key: Float[Array, "B R G H"],
    value: Float[Array, "B R G H"],
    anchor: Int[Array, "B R"],
    segment_ids: Int[Array, "B T"],
    counts: tuple[int, ...],
) -> Float[Array, "B R N H"]:
    """Block by block: runs of context rows see the context up to their end, rows of depth d also their own chain.

    Plain matrix products and elementwise sums, one sequence and kv head at a time: on a CPU several times faster than
    batched products of such small matrices.
    """
    batch, rows, heads, head_dim = query.shape
    groups, width = key.shape[2], segment_ids.shape[1]
    grouped = query.reshape(batch, rows, groups, heads // groups, head_dim) * head_dim**-0.5
    long = width >= LONG
    one = _one_long if long else _one
    over = jax.lax.map if long else _unrolled

    def of_sequence(each: tuple[jax.Array, ...]) -> jax.Array:
        *qkv, anchors, segments = each
        by_group = tuple(part.swapaxes(0, 1) for part in qkv)
        columns = over(lambda own: one(own[0], own[1], own[2], anchors, segments, counts), by_group)
        return columns.swapaxes(0, 1)

    return over(of_sequence, (grouped, key, value, anchor, segment_ids)).reshape(query.shape)


def _unrolled(function: Callable[[tuple[jax.Array, ...]], jax.Array], parts: tuple[jax.Array, ...]) -> jax.Array:
    """jax.lax.map without a loop."""
    return jnp.stack([function(tuple(part[index] for part in parts)) for index in range(parts[0].shape[0])])


def _one(
    q: Float[Array, "R M H"],
    k: Float[Array, "R H"],
    v: Float[Array, "R H"],
    anchors: Int[Array, "R"],
    segment_ids: Int[Array, "T"],
    counts: tuple[int, ...],
) -> Float[Array, "R M H"]:
    """One sequence and kv head."""
    width, parts = segment_ids.shape[0], []
    for start in range(0, width, CONTEXT_BLOCK):
        end = min(start + CONTEXT_BLOCK, width)
        parts.append(_block(q[start:end], k[:end], v[:end], anchors[start:end], segment_ids, []))
    for here, own_rows in _depths(k, v, width, counts):
        parts.append(_block(q[here], k[:width], v[:width], anchors[here], segment_ids, own_rows))
    return jnp.concatenate(parts, axis=0)


def _one_long(
    q: Float[Array, "R M H"],
    k: Float[Array, "R H"],
    v: Float[Array, "R H"],
    anchors: Int[Array, "R"],
    segment_ids: Int[Array, "T"],
    counts: tuple[int, ...],
) -> Float[Array, "R M H"]:
    """The same, block after block, each against all of the context."""
    width = segment_ids.shape[0]

    fixed = (k[:width], v[:width], segment_ids)

    def attend(fixed: tuple[jax.Array, ...], rows: tuple[jax.Array, jax.Array, Any]) -> jax.Array:
        keys, values, segments = fixed
        queries, own_anchors, own_rows = rows
        return _block(queries, keys, values, own_anchors, segments, own_rows)

    pieces = [(slice(0, width), []), *_depths(k, v, width, counts)]
    parts = [
        in_blocks(attend, fixed, (q[here], anchors[here], own_rows), LONG_BLOCK)
        for here, own_rows in pieces
        if here.stop > here.start
    ]
    return jnp.concatenate(parts, axis=0)


def _depths(
    k: jax.Array, v: jax.Array, width: int, counts: tuple[int, ...]
) -> Iterator[tuple[slice, list[tuple[jax.Array, jax.Array]]]]:
    """Of each depth from 1 on: where its rows are, and for them the keys and values of their own chain, by depth."""
    starts = [width + sum(counts[:i]) for i in range(len(counts))]
    for depth, (start, count) in enumerate(zip(starts, counts, strict=True), 1):
        yield slice(start, start + count), [(k[own : own + count], v[own : own + count]) for own in starts[:depth]]


def _block(
    query: Float[Array, "n M H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S H"],
    anchors: Int[Array, "n"],
    segment_ids: Int[Array, "T"],
    chain: list[tuple[jax.Array, jax.Array]],
) -> Float[Array, "n M H"]:
    """Attention of n rows (M query heads, scaled) to the first S context keys, up to their anchors in their segments,
    and of each row to its own key and value in every member (keys [n, H], values [n, H]) of its chain."""
    count, heads, head_dim = query.shape
    keys = key.shape[0]
    mask = (jnp.arange(keys, dtype=jnp.int32)[None, :] <= anchors[:, None]) & (
        segment_ids[None, :keys] == segment_ids[anchors][:, None]
    )
    scores = (query.reshape(-1, head_dim) @ key.T).reshape(count, heads, -1)
    scores = jnp.where(mask[:, None, :], scores, MASKED)
    own_scores = [jnp.sum(query * own_key[:, None, :], axis=-1) for own_key, _ in chain]
    peak = jnp.max(scores, axis=-1)
    for own in own_scores:
        peak = jnp.maximum(peak, own)
    peak = jax.lax.stop_gradient(peak)
    weights = jnp.exp(scores - peak[:, :, None])
    total = jnp.sum(weights, axis=-1)
    out = (weights.reshape(-1, weights.shape[-1]) @ value).reshape(count, heads, head_dim)
    for own, (_, own_value) in zip(own_scores, chain, strict=True):
        weight = jnp.exp(own - peak)
        total = total + weight
        out = out + weight[:, :, None] * own_value[:, None, :]
    return out / total[:, :, None]
