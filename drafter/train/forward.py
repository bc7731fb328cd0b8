"""The drafter over all (anchor, depth) rows of a training sequence at once, without an L*D x L*D mask.

The group-causal mask (peagle.ops.mask.group_causal_mask) lets a row see two things only: the context, rows of depth 0
up to its anchor, and its own chain. So attention is two pieces under one softmax: every row against the T context
keys, and row (chain, d) against the d keys of its own chain, which, with chains longest first (drafter/train/cod.py),
are the same places of the depth 1..d blocks:

    rows     [ depth 0: T anchors | depth 1: n1 chains | depth 2: n2 chains | ... ],  n1 >= n2 >= ...
    scores   [ every row x T context keys | row (j, d) . key (j, d'), 1 <= d' <= d ]

Memory is rows * (T + D) instead of rows^2; the same function as drafter.model.forward (a test holds it).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from drafter import model
from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from peagle.ops.attention import MASKED


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
    row_segment = jnp.take_along_axis(segment_ids, anchor, axis=1)
    context_mask = (jnp.arange(width, dtype=jnp.int32)[None, None, :] <= anchor[:, :, None]) & (
        segment_ids[:, None, :] == row_segment[:, :, None]
    )

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:  # noqa: ARG001
        return _attention(query, key, value, context_mask, counts, width)

    hidden = model._project_taps(params, config, aux_hidden)
    mask_hidden = model._project_taps(params, config, params.mask_hidden[None, None, :])
    chain_rows = sum(counts)
    batch = token_ids.shape[0]
    hidden = jnp.concatenate([hidden, jnp.broadcast_to(mask_hidden, (batch, chain_rows, hidden.shape[-1]))], axis=1)
    tokens = jnp.concatenate([token_ids, jnp.full((batch, chain_rows), config.mask_token_id, jnp.int32)], axis=1)
    row_positions = jnp.take_along_axis(positions, anchor, axis=1) + depth
    return model._run_layers(params, config, tokens, hidden, row_positions, attend)


def _attention(
    query: Float[Array, "B R N H"],
    key: Float[Array, "B R G H"],
    value: Float[Array, "B R G H"],
    context_mask: Bool[Array, "B R T"],
    counts: tuple[int, ...],
    width: int,
) -> Float[Array, "B R N H"]:
    batch, rows, heads, head_dim = query.shape
    groups = key.shape[2]
    grouped = query.reshape(batch, rows, groups, heads // groups, head_dim) * head_dim**-0.5
    context = jnp.einsum("btgrh,bsgh->bgrts", grouped, key[:, :width])
    context = jnp.where(context_mask[:, None, None], context, MASKED)
    starts = [width + sum(counts[:i]) for i in range(len(counts))]
    outs = []
    # block by block: the context rows see no chain, block d sees chain keys 1..d
    for depth, (start, count) in enumerate(zip([0, *starts], [width, *counts], strict=True)):
        block = slice(start, start + count)
        q = grouped[:, block]
        chain = [slice(starts[other], starts[other] + count) for other in range(depth)]
        own_scores = [jnp.einsum("btgrh,btgh->bgrt", q, key[:, own])[..., None] for own in chain]
        probs = jax.nn.softmax(jnp.concatenate([context[:, :, :, block], *own_scores], axis=-1), axis=-1)
        out = jnp.einsum("bgrts,bsgh->btgrh", probs[..., :width], value[:, :width])
        for other, own in enumerate(chain):
            out = out + jnp.einsum("bgrt,btgh->btgrh", probs[..., width + other], value[:, own])
        outs.append(out)
    return jnp.concatenate(outs, axis=1).reshape(batch, rows, heads, head_dim)
