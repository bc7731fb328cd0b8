"""The drafter's loss over all rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drafter.config import DrafterConfig
from drafter.params import DrafterParams
from drafter.train.forward import forward_chains, rows_of
from peagle.ops.linear import linear
from peagle.ops.norm import Norm

# How much of the label is the target's whole distribution; the rest is its argmax. Half and half measured best on the
# first prototype (BASELINES): greedy acceptance asks for the argmax, the distribution tells how near the others are.
SOFT_FRAC = 0.5


def chain_loss(
    params: DrafterParams,
    config: DrafterConfig,
    token_ids: Int[Array, "B T"],
    aux_hidden: Float[Array, "B T A"],
    target_logits: Float[Array, "B T V"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    trained: Float[Array, "B T"],
    anchors: Int[Array, "B n"],
    reach: Int[Array, "B n"],
    counts: tuple[int, ...],
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """(sum of the loss over kept rows, (hits [D], rows [D]) by depth): sums, so that parts of a batch add up.

    token_ids are the sequence itself. Row (a, d) predicts token a + d + 2; its label is what the target says there, its
    logits at place a + d + 1: SOFT_FRAC of its distribution and the rest of its argmax. A hit is the drafter's argmax
    being the target's. A row counts if the token it predicts is trained, in the anchor's segment, and d <= its reach.
    """
    width = token_ids.shape[1]
    shifted = jnp.pad(token_ids[:, 1:], ((0, 0), (0, 1)))
    x = forward_chains(params, config, shifted, aux_hidden, segment_ids, positions, anchors, counts)
    logits = linear(x, params.lm_head, norm=Norm(params.norm, config.rms_norm_eps))
    anchor, depth = rows_of(anchors, counts, width)
    reached = jnp.concatenate(
        [jnp.full((token_ids.shape[0], width), 0, jnp.int32), *(reach[:, :n] for n in counts)], axis=1
    )
    label_place = anchor + depth + 1  # of the target's row; the token it decides stands one further
    inside = label_place + 1 < width
    place = jnp.where(inside, label_place, 0)
    following = jnp.minimum(place + 1, width - 1)
    same = jnp.take_along_axis(segment_ids, following, axis=1) == jnp.take_along_axis(segment_ids, anchor, axis=1)
    counted = jnp.take_along_axis(trained, following, axis=1) * (inside & same & (reached >= depth)).astype(jnp.float32)

    log_probs = jax.nn.log_softmax(logits, axis=-1)
    best = jnp.argmax(target_logits, axis=-1).astype(jnp.int32)
    rows_best = jnp.take_along_axis(best, place, axis=1)
    rows_target = jnp.take_along_axis(jax.nn.softmax(target_logits, axis=-1), place[:, :, None], axis=1)
    hard = -jnp.take_along_axis(log_probs, rows_best[:, :, None], axis=-1)[..., 0]
    soft = -jnp.sum(rows_target * log_probs, axis=-1)
    loss = jnp.sum((SOFT_FRAC * soft + (1 - SOFT_FRAC) * hard) * counted)

    hit = (jnp.argmax(logits, axis=-1).astype(jnp.int32) == rows_best).astype(jnp.float32) * counted
    depths = len(counts) + 1
    by_depth = (depth[:, :, None] == jnp.arange(depths, dtype=jnp.int32)[None, None, :]).astype(jnp.float32)
    hits = jnp.sum(hit[:, :, None] * by_depth, axis=(0, 1))
    rows = jnp.sum(counted[:, :, None] * by_depth, axis=(0, 1))
    return loss, (hits, rows)
