"""Compute the drafter's loss over all rows.

A row's label is the target's distribution (or its n best tokens, if the data stores those) and its best token, or the
token in the data.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.train.chunks import in_chunks
from drafter.train.forward import forward_blocks, forward_chains, rows_of
from peagle.ops.linear import linear
from peagle.ops.norm import Norm

CHUNK_BYTES = 64_000_000  # logits in memory at once: with a large vocabulary those of all rows do not fit


@flax.struct.dataclass
class TrainingRows:
    """Packed rows, whole or a range of their positions, with the target's outputs."""

    token_ids: jax.Array  # [B, T]
    positions: jax.Array  # [B, T]
    segment_ids: jax.Array  # [B, T]
    trained: jax.Array  # [B, T]
    target: dict[str, jax.Array]  # the tensors of shards.TEACHER, or aux_hidden and all logits, [B, T, ...]


@flax.struct.dataclass
class Labels:
    """The target's prediction after every token (row t predicts token t + 1), over the draft vocabulary.

    Tokens that the drafter cannot propose have probability 0.
    """

    best: Int[Array, "B T"]  # -1: the target's best token cannot be proposed
    probs: Float[Array, "B T n"]
    ids: Int[Array, "B T n"] | None = None  # of probs; None: all of the draft vocabulary, in order


@flax.struct.dataclass
class Sums:
    """Sums over counted rows, so that parts of a batch add up: the loss, and by depth the hits and the rows.

    Hit: the drafter's best token is the target's.
    """

    loss: jax.Array
    hits: jax.Array  # [D]
    rows: jax.Array  # [D]


def labels_of_logits(logits: Float[Array, "B T V"], draft_to_target: Int[Array, " U"] | None) -> Labels:
    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if draft_to_target is not None:
        best = _to_draft(draft_to_target, logits.shape[-1])[best]
        logits = logits[:, :, draft_to_target]
    return Labels(best, jax.nn.softmax(logits, axis=-1))


def labels_of_best(
    ids: Int[Array, "B T n"],
    logits: Float[Array, "B T n"],
    log_total: Float[Array, "B T"],
    draft_to_target: Int[Array, " U"] | None,
    vocab_size: int,
) -> Labels:
    """Make labels from the target's n best tokens, best first. Their probabilities are normalised to a sum of 1."""
    draft_ids = ids if draft_to_target is None else _to_draft(draft_to_target, vocab_size)[ids]
    probs = jnp.where(draft_ids < 0, 0.0, jnp.exp(logits - log_total[:, :, None]))
    probs = probs / jnp.maximum(jnp.sum(probs, axis=-1, keepdims=True), 1e-9)
    return Labels(draft_ids[:, :, 0], probs, jnp.maximum(draft_ids, 0))


def _to_draft(draft_to_target: jax.Array, vocab_size: int) -> jax.Array:
    """Invert the map: the draft id of every target id, -1 if there is none."""
    places = jnp.arange(draft_to_target.shape[0], dtype=jnp.int32)
    return jnp.full((vocab_size,), -1, jnp.int32).at[draft_to_target].set(places)


def chain_loss(
    params: DrafterParams,
    config: DrafterConfig,
    loss: str,
    rows: TrainingRows,
    labels: Labels,
    anchors: Int[Array, "B n"],
    last_depth: Int[Array, "B n"],
    counts: tuple[int, ...],
    part: tuple[int, int] | None = None,
    draft_decay: float | None = None,
) -> Sums:
    """Compute the loss of one part of the sequence, by default all of it.

    Row (a, d) predicts token a + d + 2; its label is the target's row a + d + 1. A row counts if its token is trained
    and in the anchor's segment, d <= last_depth, and the drafter can propose its label; at depth 0 only if part[0] <= a
    < part[1]. The drafter reads no positions from part[1] on (drafter/train/cod.py). draft_decay: the loss of draft d
    is weighted by exp(-d / draft_decay).

    A DFlash drafter's chain is a block, whose draft d is row d of its chain; there are no other rows.
    """
    batch, width = rows.token_ids.shape
    first, last = (0, width) if part is None else part
    shifted = jnp.pad(rows.token_ids[:, 1:], ((0, 0), (0, 1)))
    aux_hidden = rows.target["aux_hidden"].astype(params.dtype)
    context = (aux_hidden[:, :last], rows.segment_ids[:, :last], rows.positions[:, :last])
    of_dflash, depths = config.kind == "DFlash", len(counts) + 1
    if of_dflash:
        x = forward_blocks(params, config, shifted, *context, anchors, depths)
        anchor, reached = (jnp.tile(values, (1, depths)) for values in (anchors, last_depth))
        depth = jnp.broadcast_to(jnp.arange(depths, dtype=jnp.int32).repeat(anchors.shape[1])[None], anchor.shape)
    else:
        x = forward_chains(params, config, shifted, *context, anchors, counts)
        anchor, depth = rows_of(anchors, counts, last)
        reached = jnp.concatenate([jnp.zeros((batch, last), jnp.int32), *(last_depth[:, :n] for n in counts)], axis=1)
    label_row = anchor + depth + 1  # the target's row, which predicts the next token
    inside = (label_row + 1 < width) & ((depth > 0) | (anchor >= first) | of_dflash)
    target_row = jnp.where(inside, label_row, 0)
    label = jnp.minimum(target_row + 1, width - 1)
    segment, anchor_segment = (jnp.take_along_axis(rows.segment_ids, at, axis=1) for at in (label, anchor))
    counts_here = inside & (segment == anchor_segment) & (reached >= depth)
    counted = jnp.take_along_axis(rows.trained, label, axis=1) * counts_here.astype(jnp.float32)
    tokens = jnp.take_along_axis(rows.token_ids, label, axis=1)
    if params.draft_to_target is not None:
        tokens = _to_draft(params.draft_to_target, config.vocab_size)[tokens]

    of_rows = functools.partial(_of_rows, loss, config.rms_norm_eps)
    most = max(1, CHUNK_BYTES // (4 * config.draft_vocab_size))
    parts = []
    for b in range(batch):
        fixed = (params.lm_head, params.norm, jax.tree.map(lambda leaf, b=b: leaf[b], labels))
        outputs = (x[b], target_row[b], tokens[b], counted[b])
        parts.append(of_rows(fixed, outputs) if x.shape[1] <= most else in_chunks(of_rows, fixed, outputs, most))
    row_losses, hit, kept = (jnp.stack(values) for values in zip(*parts, strict=True))
    by_depth = (depth[:, :, None] == jnp.arange(depths, dtype=jnp.int32)[None, None, :]).astype(jnp.float32)
    if draft_decay is not None:
        row_losses = row_losses * jnp.exp(-depth.astype(jnp.float32) / draft_decay)
    hits, rows_of_depth = (jnp.sum(values[:, :, None] * by_depth, axis=(0, 1)) for values in (hit, kept))
    return Sums(jnp.sum(row_losses), hits, rows_of_depth)


def _of_rows(
    loss: str, eps: float, fixed: tuple[Any, jax.Array, Labels], rows: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute (losses, hits, counted), each [n], of rows of one sequence. fixed: (lm_head, norm, labels)."""
    lm_head, norm, labels = fixed
    hidden, target_row, token, counted = rows
    logits = linear(hidden[None], lm_head, norm=Norm(norm, eps))[0]
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    best, ids = labels.best[target_row], None if labels.ids is None else labels.ids[target_row]
    losses, teaches = losses_of_rows(loss, log_probs, best, labels.probs[target_row], ids, token)
    counted = counted * teaches
    hit = (jnp.argmax(logits, axis=-1).astype(jnp.int32) == best).astype(jnp.float32) * counted
    return losses * counted, hit, counted


def losses_of_rows(
    loss: str,
    log_probs: Float[Array, "n U"],
    best: Int[Array, " n"],
    probs: Float[Array, "n m"],
    ids: Int[Array, "n m"] | None,
    token: Int[Array, " n"],
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Compute (each row's loss, 1 if the drafter can propose the row's label, else 0)."""

    def hard(label: jax.Array) -> tuple[jax.Array, jax.Array]:
        picked = jnp.take_along_axis(log_probs, jnp.maximum(label, 0)[:, None], axis=-1)[:, 0]
        return -picked, (label >= 0).astype(jnp.float32)

    if loss == "cross_entropy":
        return hard(token)
    soft = -jnp.sum(probs * (log_probs if ids is None else jnp.take_along_axis(log_probs, ids, axis=-1)), axis=-1)
    teaches = (jnp.sum(probs, axis=-1) > 0).astype(jnp.float32)
    if loss == "total_variation":
        drafted = jnp.exp(log_probs if ids is None else jnp.take_along_axis(log_probs, ids, axis=-1))
        return 1 - jnp.sum(jnp.minimum(probs, drafted), axis=-1), teaches
    if loss == "kl":
        return soft + jnp.sum(probs * jnp.log(jnp.maximum(probs, 1e-30)), axis=-1), teaches
    assert loss == "half", loss
    hard_losses, possible = hard(best)
    return 0.5 * soft + 0.5 * hard_losses, teaches * possible
