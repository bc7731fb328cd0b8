"""Lay out a DFlash drafter's pass (propose.py): a block of the pending token and mask slots that all see each other.

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

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from drafter import model
from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from peagle.ops.messages import DrafterInput
from peagle.ops.norm import rms_norm


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
    offset = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    active = (first >= 0) & drafts[:, None]
    block = jnp.where(active, first + num + offset, -1)
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
