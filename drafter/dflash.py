"""Run a DFlash drafter: one pass over a block of the pending token and mask slots, which all see each other.

The target has read tokens 0 .. m-1; token m is pending. A row of the context is a projection of aux_hidden, the same
for every layer, without a token. A row of the block is a token, without aux_hidden:

    context   c[p] = hidden_norm(fc(aux_hidden[p]))          positions 0 .. m-1     keys and values of each layer
    block     embedding of [token m, mask, .., mask]         positions m .. m+B-1   queries, keys and values
    drafts                 [   -     d0   .. dB-2]           row 1 + i gives draft i, for the row's own position

A block row sees the whole context and all of its block, later rows too. Even for few drafts a block has the B rows that
the drafter was trained with: the demo's first draft is right in .83 of the steps with its block of 8, and in .18 with
one of 4, as vLLM runs it at K = 3. Only the context stays in the caches: the next pass overwrites the rows of the block
with rows of the context, and no row sees beyond its own block.

The context row at position p has index p + 1 in a page. Index p would do, but P-EAGLE's row p, which holds token p + 1,
has index p + 1: so the pages of all drafters become final at the same time.

Sources: arXiv 2602.06036; z-lab/dflash; vllm qwen3_dflash.py.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from drafter import model
from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from peagle.ops.attention import CacheGroup, PagedCache
from peagle.ops.linear import embed, linear
from peagle.ops.messages import DrafterInput
from peagle.ops.norm import rms_norm
from peagle.ops.rope import rope_tables


@flax.struct.dataclass
class BlockRows:
    """The rows of one proposing pass: F of the context, then S of the block (`lay_out_block`)."""

    token_ids: jax.Array  # [B, S]: of the block
    positions: jax.Array  # [B, F+S]; -1 in padding, and in the block of a sequence that does not draft
    until: jax.Array  # [B, F+S]: the last position that a row sees; -1: it sees nothing


def lay_out_block(
    drafter_input: DrafterInput, drafts: Bool[Array, " B"], block_size: int, mask_token_id: int
) -> BlockRows:
    """Lay out the committed rows as context, then the block of S rows, active only if drafts[b].

    Example (S = 4, mask id M): C = 2 tokens 11 12 committed from position 5; and C = 1, 20 from 9, without drafts.

        row          0    1    2  .. F-1 |  F    F+1  F+2  F+3
        token_ids                        |  12   M    M    M
        positions    5    6    -1 .. -1  |  7    8    9    10      12 is pending: aux_hidden[6] predicted it
        until        -1   -1   -1 .. -1  |  10   10   10   10
        token_ids                        | (20   M    M    M)
        positions    9    -1   -1 .. -1  |  -1   -1   -1   -1
    """
    num, first = drafter_input.num[:, None], drafter_input.first_position[:, None]
    row = jnp.arange(drafter_input.token_ids.shape[1], dtype=jnp.int32)[None, :]
    context = jnp.where((first >= 0) & (row < num), first + row, -1)
    pending = jnp.take_along_axis(drafter_input.token_ids, jnp.maximum(num - 1, 0), axis=1)
    masks = jnp.full((num.shape[0], block_size - 1), mask_token_id, jnp.int32)
    place = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    active = (first >= 0) & drafts[:, None]
    block = jnp.where(active, first + num + place, -1)
    until = jnp.where(active, first + num + block_size - 1, -1)
    until = jnp.broadcast_to(until, block.shape)
    return BlockRows(
        token_ids=jnp.concatenate([pending, masks], axis=1),
        positions=jnp.concatenate([context, block], axis=1),
        until=jnp.concatenate([jnp.full_like(context, -1), until], axis=1),
    )


def project_context(
    params: DrafterParams,
    config: DrafterConfig,
    aux_hidden: Float[Array, "B T A"],
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Project aux_hidden to the input of every layer's keys and values. Ignore rows of negative position."""
    assert params.hidden_norm is not None
    return rms_norm(model.project_aux(params, config, aux_hidden, positions), params.hidden_norm, config.rms_norm_eps)


def absorb(
    params: DrafterParams,
    config: DrafterConfig,
    aux_hidden: Float[Array, "B T A"],
    positions: Int[Array, "B T"],
    cache: PagedCache,
    groups: Sequence[CacheGroup],
) -> PagedCache:
    """Write context rows to the cache. Rows of negative position are inactive: they are not written."""
    context = project_context(params, config, aux_hidden.astype(params.dtype), positions)
    nothing = jnp.full_like(positions, -1)
    attend, written = model.attend_to(params, config, cache, groups, positions, until=nothing)
    cos, sin = rope_tables(config.rope, positions, params.dtype, implementation=params.implementation)
    for layer, p in enumerate(params.layers):
        qkv = linear(context, p.qkv, p.qkv_bias, positions=positions, implementation=params.implementation)
        attend(layer, model.norm_heads(qkv, p, config), cos, sin)
    return written()


def propose(
    params: DrafterParams,
    config: DrafterConfig,
    drafter_input: DrafterInput,
    widths: Int[Array, " B"],
    cache: PagedCache,
    groups: Sequence[CacheGroup],
    num_drafts: int,
) -> tuple[Float[Array, "B K U"], PagedCache]:
    """Propose K drafts in one pass; return (logits over the draft vocabulary, the cache).

    The cache holds the context 0 .. first_position-1 before the pass, and also the input's rows after it. Draft i
    predicts token[first_position + num + 1 + i]; ignore logits of drafts from widths[b] on. A sequence of negative
    first_position is inactive: it writes nothing; ignore its logits. Raises ValueError for more drafts than a block has
    mask slots.
    """
    assert config.block_size is not None
    if not 1 <= num_drafts < config.block_size:
        raise ValueError(f"{num_drafts} drafts; expected 1 to {config.most_drafts}, the mask slots of a block")
    rows = lay_out_block(drafter_input, widths > 0, config.block_size, model.mask_token_of(config))
    num_context = drafter_input.token_ids.shape[1]
    aux_hidden, before = drafter_input.aux_hidden.astype(params.dtype), rows.positions[:, :num_context]
    context = project_context(params, config, aux_hidden, before)
    positions = rows.positions[:, num_context:]
    attend, written = model.attend_to(params, config, cache, groups, rows.positions, until=rows.until)
    cos, sin = rope_tables(config.rope, rows.positions, params.dtype, implementation=params.implementation)
    x = embed(params.embedding, rows.token_ids, params.dtype)
    for layer, p in enumerate(params.layers):
        read = jnp.concatenate([context, rms_norm(x, p.norm, config.rms_norm_eps)], axis=1)
        qkv = linear(read, p.qkv, p.qkv_bias, positions=rows.positions, implementation=params.implementation)
        out = attend(layer, model.norm_heads(qkv, p, config), cos, sin)[:, num_context:]
        if layer == config.num_layers - 1:  # of the last layer's output only the first K drafts are read
            out, x = out[:, 1 : num_drafts + 1], x[:, 1 : num_drafts + 1]
            place = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
            positions = jnp.where(place < widths[:, None], positions[:, 1 : num_drafts + 1], -1)
        x = linear(out, p.out, p.out_bias, residual=x, positions=positions, implementation=params.implementation)
        x = model.feed_forward(p, x, config.rms_norm_eps, positions, params.implementation)
    return model.head(params, config, x, positions), written()
