"""Run a pass over prompt rows: chunks of several prompts.

A pass needs only the pages, so a chunk may begin anywhere. If tokens before it are in the pages, its first row is the
last of them: that row writes nothing, and gives the aux_hidden that the drafter's next row needs.

    chunk 0         | t0 t1 t2 t3 |
    chunk 1         | t3 t4 t5 .. |     t3 is known: it reads, and writes nothing; padding has position -1

So a chunk, a prompt with a cached prefix, and a resumed request are one case. If all of a prompt is cached, its last
token runs once more, for its logits. The pages do not depend on where a prompt is cut, on native kernels bit for bit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.ops.attention import PagedCache
from peagle.ops.row_blocks import in_row_blocks
from peagle.protocols import Drafter, Target

ABSORBED_TOGETHER = 2048  # rows at most that the drafter computes at once


class ChunkRows(NamedTuple):
    """Rows of n prompts, T at most per prompt."""

    token_ids: Int[Array, "n T"]
    begin: Int[Array, " n"]  # position of the first row
    num_rows: Int[Array, " n"]  # 0 in an entry without a prompt
    known: Int[Array, " n"]  # 1: the first row's token is in the pages already; 0: no row's is


class Prefilled(NamedTuple):
    """The outputs of each prompt's last row."""

    logits: Float[Array, "n V"]
    aux_hidden: Float[Array, "n A"]


def prefill(
    target: Target,
    drafter: Drafter | None,
    target_cache: PagedCache,
    drafter_cache: PagedCache | None,
    chunk: ChunkRows,
) -> tuple[PagedCache, PagedCache | None, Prefilled]:
    """Write the rows of a chunk to the pages of target and drafter.

    The drafter's row p pairs token p + 1 with aux_hidden[p]: rows begin .. begin + num_rows - 2. drafter_cache None:
    without the drafter.
    """
    row = jnp.arange(chunk.token_ids.shape[1], dtype=jnp.int32)[None, :]
    active = row < chunk.num_rows[:, None]
    positions = jnp.where(active, chunk.begin[:, None] + row, -1)
    writes = row >= chunk.known[:, None]
    last = jnp.maximum(chunk.num_rows - 1, 0)[:, None]
    output, target_cache = target.extend(chunk.token_ids, positions, target_cache, last, writes)
    if drafter is not None and drafter_cache is not None:
        drafter_cache = _absorb(drafter, drafter_cache, chunk, positions, output.aux_hidden)
    aux_hidden = jnp.take_along_axis(output.aux_hidden, last[:, :, None], axis=1)[:, 0]
    return target_cache, drafter_cache, Prefilled(output.logits[:, 0], aux_hidden)


def _absorb(
    drafter: Drafter, cache: PagedCache, chunk: ChunkRows, positions: jax.Array, aux_hidden: jax.Array
) -> PagedCache:
    """Let the drafter absorb each token but the first with the aux_hidden of the position before it."""
    token_ids, aux_hidden = chunk.token_ids[:, 1:], aux_hidden[:, :-1]
    positions = jnp.where(positions[:, 1:] >= 0, positions[:, :-1], -1)

    def of_rows(
        token_ids: jax.Array, cache: PagedCache, positions: jax.Array, aux_hidden: jax.Array
    ) -> tuple[jax.Array, PagedCache]:
        return token_ids, drafter.absorb(cache, token_ids, aux_hidden, positions)

    num_blocks = -(-token_ids.shape[1] // ABSORBED_TOGETHER)
    return in_row_blocks(of_rows, num_blocks, token_ids, cache, positions, aux_hidden)[1]
