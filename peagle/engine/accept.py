"""Accept drafts and choose the token after them. Pure functions that take random numbers as arguments.

Why this is lossless. Plain decoding draws token i from p_i, its distribution after the tokens before it (greedy: a
point mass on the argmax): x_i = choose(logits_i, key_i), where the key depends on the seed and the token's index alone.
Acceptance draws the same x_i. Draft i is accepted iff it equals x_i. The first x_i that differs is the recovered token;
if all drafts are accepted, x_K is the bonus token. Position i + 1 counts only if draft i was accepted, so its logits
follow exactly the emitted tokens. So with the same seed the emitted tokens equal plain decoding's, whatever drafts
them, however many are drafted, and by whatever rule widths are chosen.

A drafter can only agree more or less often. The argmax of its distribution q agrees with probability p(argmax q). A
draft drawn from q with the same key (peagle.ops.draw) agrees more often where the target is uncertain: with
probability at least (1 - d) / (1 + d) and at most 1 - d, d the total variation of p and q. (The rejection sampling of
arXiv 2211.17192 reaches 1 - d, but emits other tokens than plain decoding.)
"""

import itertools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from peagle.engine.sampling import RowSampling, choose
from peagle.ops.draw import uniform
from peagle.ops.likeliest import NO_TOKEN

NOISE = 0.1  # largest error of the confidence of synthetic drafts


@flax.struct.dataclass
class Acceptance:
    num_accepted: jax.Array  # [B] int32, 0..width
    # [B] int32: the recovered token, or the bonus token after all verified drafts; NO_TOKEN if the logits that decide
    # it are not finite
    next_token: jax.Array


@flax.struct.dataclass
class SyntheticDrafts:
    """Drawn success and confidence of drafts, in place of a drafter's (`draw_synthetic`)."""

    right: jax.Array  # [B, K] bool
    confidence: jax.Array  # [B, K]


def accept(
    draft_token_ids: Int[Array, "B K"],
    logits: Float[Array, "B T V"],
    widths: Int[Array, " B"],
    sampling: RowSampling,
    keys: UInt32[Array, "B T 2"] | None,
) -> Acceptance:
    """Accept 0..widths[b] drafts of each row and choose the token that follows.

    T = K + 1; row i's logits decide the token that draft i proposes. Logits that are not finite accept no draft and
    give NO_TOKEN. keys None: all rows are greedy.
    """
    chosen = choose(logits, sampling, keys)
    num_accepted = _leading(_verified(draft_token_ids, widths) & (draft_token_ids == chosen[:, :-1]))
    return Acceptance(num_accepted, _row(chosen, num_accepted))


def draw_synthetic(rates: tuple[float, ...], keys: UInt32[Array, "B T 2"]) -> SyntheticDrafts:
    """Draw which drafts are right, and a drafter's confidence in them, to time models of random weights.

    rates: v_i, the share of steps in which drafts 0..i are all right. After right drafts 0..i-1, draft i is right with
    a chance of mean r = v_i / v_(i-1), v_(-1) = 1. One draft's own chance is u^((1 - r) / r), u uniform, so that drafts
    differ in how sure they are. The confidence is that chance, off by up to NOISE. keys: of the K + 1 positions of a
    row.
    """
    num_drafts = keys.shape[1] - 1
    pairs = itertools.pairwise((1.0, *rates))
    means = [after / before if before else 0.0 for before, after in pairs]
    mean = jnp.asarray(means[:num_drafts], jnp.float32)[None, :]
    u, right, noise = (uniform(keys[:, :-1] ^ jnp.uint32(number)) for number in range(3))
    chance = jnp.where(mean > 0, u ** ((1 - mean) / jnp.maximum(mean, 1e-6)), 0.0)
    return SyntheticDrafts(right < chance, jnp.clip(chance + NOISE * (2 * noise - 1), 0.0, 1.0))


def accept_synthetic(
    drafts: SyntheticDrafts,
    logits: Float[Array, "B T V"],
    widths: Int[Array, " B"],
    sampling: RowSampling,
    keys: UInt32[Array, "B T 2"] | None,
) -> Acceptance:
    """Accept the drafts that were drawn right. The logits only choose the token after them.

    keys None: all rows are greedy.
    """
    chosen = choose(logits, sampling, keys)
    right = drafts.right[:, : logits.shape[1] - 1]
    num_accepted = _leading(_verified(right, widths) & right & (chosen[:, :-1] != NO_TOKEN))
    return Acceptance(num_accepted, _row(chosen, num_accepted))


def _verified(drafts: Array, widths: Array) -> Array:
    return jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :] < widths[:, None]


def _leading(hit: Array) -> Array:
    """Count the leading True of each row of [B, K]."""
    num = hit.shape[1]
    index = jnp.arange(num, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(hit, num, index), axis=1, initial=num)


def _row(values: Array, index: Array) -> Array:
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
