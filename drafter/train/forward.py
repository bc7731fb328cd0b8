"""Compute a drafter over all (anchor, depth) rows of a training sequence at once, without an L*D x L*D mask.

A row (anchor, depth) attends to the context, which is the rows of depth 0 up to its anchor, and to its own chain up to
itself, within its window if the layer has one (arXiv 2602.01469, figure 3). Example with two context rows and two mask
slots for each. x: the row (down) attends to the key (across):

             (0,0) (1,0) (0,1) (1,1) (0,2) (1,2)
      (0,0)    x     .     .     .     .     .
      (1,0)    x     x     .     .     .     .
      (0,1)    x     .     x     .     .     .
      (1,1)    x     x     .     x     .     .
      (0,2)    x     .     x     .     x     .
      (1,2)    x     x     .     x     .     x

A P-EAGLE drafter runs all rows in one pass, an EAGLE-3 drafter one depth after the other. One softmax has two kinds of
scores: every row against the T context keys, and row (chain, d) against the d keys of its own chain. Chains are sorted
longest first (drafter/train/cod.py), so these are at the same index within the rows of each depth 1..d:

    rows     [ depth 0: T anchors | depth 1: n1 chains | depth 2: n2 chains | ... ],  n1 >= n2 >= ...
    scores   [ every row x T context keys | row (j, d) . key (j, d'), 1 <= d' <= d ]

There are rows * (T + D) scores instead of rows^2, and in long sequences only those of one chunk are in memory. Tests
compare the result with the float64 reference and with recorded logits of speculators.

A DFlash drafter (`forward_blocks`) has no rows of depth 0: its context has only keys and values. Its chains are blocks
of D + 1 rows, and a row attends to all rows of its block.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter import dflash, model
from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.train.chunks import in_chunks
from peagle.ops.attention import MASKED, after_rope, split_heads
from peagle.ops.linear import embed, linear
from peagle.ops.norm import rms_norm
from peagle.ops.rope import rope_tables

CONTEXT_CHUNK = 128  # context rows whose scores are computed together, without keys after them or before their windows
# From this many tokens on, loops on the device run over chunks of rows, sequences and kv heads, and recompute a chunk's
# scores for its gradient instead of keeping them: memory is that of one chunk.
LONG = 1024
LONG_CHUNK = 512  # most rows of such a chunk


def rows_of(anchors: Int[Array, "B n"], counts: tuple[int, ...], width: int) -> tuple[jax.Array, jax.Array]:
    """Return (anchor, depth) [B, T + sum(counts)] of every row, depth by depth."""
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
    token_ids: Int[Array, "B N"],
    aux_hidden: Float[Array, "B T A"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    anchors: Int[Array, "B n"],
    counts: tuple[int, ...],
) -> Float[Array, "B R D"]:
    """Compute the residual stream of every row, R = T + sum(counts), before the final norm and head.

    token_ids are shifted: row p holds token[p+1] and aux_hidden[p]; N >= T, because an EAGLE-3 chain reads the tokens
    after its anchor. anchors are indices into the T rows; positions are RoPE positions and may restart in each segment.
    """
    anchor, depth = rows_of(anchors, counts, segment_ids.shape[1])
    row_positions = jnp.take_along_axis(positions, anchor, axis=1) + depth
    run = _at_once if config.parallel else _in_turn
    return run(params, config, token_ids, aux_hidden, segment_ids, row_positions, anchor, counts)


def forward_blocks(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B N"],
    aux_hidden: Float[Array, "B T A"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    anchors: Int[Array, "B n"],
    depth: int,
) -> Float[Array, "B R D"]:
    """Compute the residual stream of a DFlash drafter's mask slots, R = depth n, before the final norm and head.

    Row d n + j is draft d of the block that follows anchor j; arguments are those of `forward_chains`. The block begins
    with the token after the anchor, which is token_ids[anchor].
    """
    batch, width = segment_ids.shape
    count = anchors.shape[1]
    anchor_positions = jnp.take_along_axis(positions, anchors, axis=1)
    place = jnp.concatenate([anchor_positions + 1 + row for row in range(depth + 1)], axis=1)
    cos, sin = rope_tables(config.rope, jnp.concatenate([positions, place], axis=1), params.dtype)
    masks = jnp.full((batch, depth * count), model.mask_token_of(config), jnp.int32)
    tokens = jnp.concatenate([jnp.take_along_axis(token_ids, anchors, axis=1), masks], axis=1)
    context = dflash.project_context(params, config, aux_hidden)
    x = embed(params.embedding, tokens, params.dtype, config.hidden_size)
    rows = [slice(width + row * count, width + (row + 1) * count) for row in range(depth + 1)]
    for layer, p in enumerate(params.layers):
        read = jnp.concatenate([context, rms_norm(x, p.norm, config.rms_norm_eps)], axis=1)
        qkv = model.norm_heads(linear(read, p.qkv, p.qkv_bias), p, config)
        query, key, value = split_heads(qkv, config.num_heads, config.num_kv_heads, cos, sin)
        block = [(key[:, row], value[:, row]) for row in rows]
        keys_of_rows = key[:, :width], value[:, :width], anchors, segment_ids, block
        skipped = layer == config.num_layers - 1  # nothing reads the pending token's last row
        outputs = [
            _attention(query[:, row], *keys_of_rows, config.window(layer), place)
            for place, row in enumerate(rows, 1)
            if place > skipped
        ]
        out = jnp.concatenate(outputs, axis=1).reshape(batch, len(outputs) * count, -1)
        x = linear(out, p.out, p.out_bias, residual=x[:, skipped * count :])
        x = model.feed_forward(p, x, config.rms_norm_eps)
    return x


def _at_once(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B N"],
    aux_hidden: Float[Array, "B T A"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B R"],
    anchor: Int[Array, "B R"],
    counts: tuple[int, ...],
) -> Float[Array, "B R D"]:
    """Compute P-EAGLE: all rows in one pass, chain rows as mask slots."""
    batch, width = segment_ids.shape

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        context, window = (key[:, :width], value[:, :width]), config.window(layer)
        depths = _depths(width, counts)
        outputs = [_attention(query[:, :width], *context, anchor[:, :width], segment_ids, [], window)]
        for depth, here in enumerate(depths, 1):
            length = here.stop - here.start
            own = [(key[:, d.start : d.start + length], value[:, d.start : d.start + length]) for d in depths[:depth]]
            outputs.append(_attention(query[:, here], *context, anchor[:, here], segment_ids, own, window))
        return jnp.concatenate(outputs, axis=1)

    slots = model.mask_slots(params, config)
    hidden = [model.project_aux(params, config, aux_hidden)]
    hidden += [
        jnp.broadcast_to(slots[min(slot, config.num_mask_hiddens - 1)], (batch, count, slots.shape[1]))
        for slot, count in enumerate(counts)
    ]
    masks = jnp.full((batch, sum(counts)), model.mask_token_of(config), jnp.int32)
    tokens = jnp.concatenate([token_ids[:, :width], masks], axis=1)
    projected = after_rope(attend, config.num_heads, config.num_kv_heads)
    return model.run_layers(params, config, tokens, jnp.concatenate(hidden, axis=1), positions, projected)


def _in_turn(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B N"],
    aux_hidden: Float[Array, "B T A"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B R"],
    anchor: Int[Array, "B R"],
    counts: tuple[int, ...],
) -> Float[Array, "B R D"]:
    """Compute EAGLE-3: one pass per depth, over each chain's last hidden state and the true next token.

    This is the training-time test of arXiv 2503.01840.
    """
    width = segment_ids.shape[1]
    written: list[list[tuple[jax.Array, jax.Array]]] = [[] for _ in range(config.num_layers)]

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        written[layer].append((key, value))
        (keys, values), *earlier = written[layer]
        count = query.shape[1]
        own = [(k[:, :count], v[:, :count]) for k, v in earlier]
        return _attention(query, keys, values, anchor[:, here], segment_ids, own, config.window(layer))

    here = slice(0, width)
    projected = after_rope(attend, config.num_heads, config.num_kv_heads)
    hidden = model.project_aux(params, config, aux_hidden)
    outputs = [model.run_layers(params, config, token_ids[:, :width], hidden, positions[:, here], projected)]
    for depth, here in enumerate(_depths(width, counts), 1):
        last = outputs[-1]
        before = jnp.take_along_axis(last, anchor[:, here, None], axis=1) if depth == 1 else last
        hidden = model.next_input(params, config, before[:, : here.stop - here.start])
        place = jnp.minimum(anchor[:, here] + depth, token_ids.shape[1] - 1)
        tokens = jnp.take_along_axis(token_ids, place, axis=1)
        outputs.append(model.run_layers(params, config, tokens, hidden, positions[:, here], projected))
    return jnp.concatenate(outputs, axis=1)


def _depths(width: int, counts: tuple[int, ...]) -> list[slice]:
    """Return the slice of rows of each depth from 1 on."""
    starts = [width + sum(counts[:i]) for i in range(len(counts))]
    return [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _attention(
    query: Float[Array, "B n N H"],
    key: Float[Array, "B T G H"],
    value: Float[Array, "B T G H"],
    anchor: Int[Array, "B n"],
    segment_ids: Int[Array, "B T"],
    chain: list[tuple[jax.Array, jax.Array]],
    window: int | None,
    depth: int | None = None,
) -> Float[Array, "B n N H"]:
    """Attend from the rows of one depth to the context up to their anchors, and to their own chain.

    chain: (keys, values) [B, n, G, H] by depth; empty for the context rows themselves. depth: how many positions the
    rows are after their anchors; None: they end the chain. window: a row attends to the last `window` positions, itself
    included, and to later rows of its chain; None: to all. Plain matrix products and elementwise sums, one sequence and
    kv head at a time, are several times faster on a CPU than batched products of such small matrices.
    """
    batch, rows, heads, head_dim = query.shape
    if not rows:
        return query
    groups, width = key.shape[2], segment_ids.shape[1]
    grouped = query.reshape(batch, rows, groups, heads // groups, head_dim) * head_dim**-0.5
    long = width >= LONG
    depth = len(chain) if depth is None else depth
    # a segment's context has consecutive positions, and a row comes `depth` positions after its anchor
    num_keys, chain = (None, chain) if window is None else (window - depth, chain[max(depth - window, 0) :])
    one = functools.partial(_one_long if long else _one, num_keys=num_keys)
    over = jax.lax.map if long else _unrolled

    def of_sequence(sequence: tuple[Any, ...]) -> jax.Array:
        parts, anchors, segments = sequence
        by_group = jax.tree.map(lambda part: part.swapaxes(0, 1), parts)
        return over(lambda own: one(own[0], own[1], own[2], own[3], anchors, segments), by_group).swapaxes(0, 1)

    return over(of_sequence, ((grouped, key, value, chain), anchor, segment_ids)).reshape(query.shape)


def _unrolled(function: Callable[[Any], jax.Array], parts: Any) -> jax.Array:
    count = jax.tree.leaves(parts)[0].shape[0]
    return jnp.stack([function(jax.tree.map(lambda part, at=at: part[at], parts)) for at in range(count)])


def _one(
    q: Float[Array, "n M H"],
    k: Float[Array, "T H"],
    v: Float[Array, "T H"],
    chain: list[tuple[jax.Array, jax.Array]],
    anchors: Int[Array, " n"],
    segment_ids: Int[Array, " T"],
    num_keys: int | None,
) -> Float[Array, "n M H"]:
    if chain:
        return _attend_chunk(q, k, v, anchors, segment_ids, chain, num_keys)
    parts = []
    for start in range(0, q.shape[0], CONTEXT_CHUNK):
        rows = slice(start, start + CONTEXT_CHUNK)
        first = 0 if num_keys is None else max(0, start - num_keys + 1)
        keys = slice(first, rows.stop)
        parts.append(_attend_chunk(q[rows], k[keys], v[keys], anchors[rows], segment_ids, [], num_keys, first))
    return jnp.concatenate(parts, axis=0)


def _one_long(
    q: Float[Array, "n M H"],
    k: Float[Array, "T H"],
    v: Float[Array, "T H"],
    chain: list[tuple[jax.Array, jax.Array]],
    anchors: Int[Array, " n"],
    segment_ids: Int[Array, " T"],
    num_keys: int | None,
) -> Float[Array, "n M H"]:
    """Attend within one sequence and kv head, in chunks of rows, each against the whole context."""

    def attend(fixed: tuple[jax.Array, ...], rows: tuple[jax.Array, jax.Array, Any]) -> jax.Array:
        keys, values, segments = fixed
        queries, own_anchors, own_chain = rows
        return _attend_chunk(queries, keys, values, own_anchors, segments, own_chain, num_keys)

    return in_chunks(attend, (k, v, segment_ids), (q, anchors, chain), LONG_CHUNK)


def _attend_chunk(
    query: Float[Array, "n M H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S H"],
    anchors: Int[Array, " n"],
    segment_ids: Int[Array, " T"],
    chain: list[tuple[jax.Array, jax.Array]],
    num_keys: int | None,
    first: int = 0,
) -> Float[Array, "n M H"]:
    """Attend from n rows (M query heads, scaled) to S context keys, from the key `first` on, and to their own chains.

    num_keys: how many context keys a row attends to, the last up to its anchor, in its segment; None: all. chain: (keys
    [n, H], values [n, H]) by depth, one key and value per row.
    """
    count, heads, head_dim = query.shape
    keys = key.shape[0]
    place = jnp.arange(first, first + keys, dtype=jnp.int32)[None, :]
    mask = (place <= anchors[:, None]) & (segment_ids[None, first : first + keys] == segment_ids[anchors][:, None])
    if num_keys is not None:
        mask = mask & (place > anchors[:, None] - num_keys)
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
