"""Accept drafts and choose the token after them. Pure functions that take random numbers as arguments.

Why this is lossless. Plain decoding draws token i from p_i, its distribution after the tokens before it (greedy: a
point mass on the argmax): x_i = choose(logits_i, key_i). The key depends on the seed, the request's index and the
token's index alone. Acceptance draws the same x_i. Draft i is accepted iff it equals x_i. The first x_i that differs is
the recovered token; if all drafts are accepted, x_K is the bonus token. Position i + 1 counts only if draft i was
accepted, so its logits follow exactly the emitted tokens. So with the same seed the emitted tokens equal plain
decoding's, whatever drafts them, however many are drafted, and by whatever rule widths are chosen.

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

from peagle.engine.step.sampling import RowSampling, choose
from peagle.ops.draw import uniform
from peagle.ops.likeliest import NO_TOKEN

NOISE = 0.1  # largest error of the confidence of synthetic drafts


@flax.struct.dataclass
class Acceptance:
    num_accepted: jax.Array  # [B] int32, 0..width
    next_token: jax.Array  # [B] int32: the recovered or bonus token; NO_TOKEN if its logits are not finite


@flax.struct.dataclass
class SyntheticDrafts:
    """Drafts whose acceptance is drawn, not decided by the target (`draw_synthetic`)."""

    right: jax.Array  # [B, K] bool: accepted if verified, and if the drafts before it are
    confidence: jax.Array  # [B, K]: in place of the drafter's


def accept(
    draft_token_ids: Int[Array, "B K"],
    logits: Float[Array, "B T V"],
    widths: Int[Array, " B"],
    sampling: RowSampling,
    keys: UInt32[Array, "B T 2"] | None,
    synthetic: SyntheticDrafts | None = None,
) -> Acceptance:
    """Accept 0..widths[b] drafts of each row and choose the token that follows.

    T = K + 1; row i's logits decide the token that draft i proposes. Logits that are not finite accept no draft and
    give NO_TOKEN. keys None: all rows are greedy. With synthetic drafts, the logits only choose the token that follows.
    """
    chosen, num_drafts = choose(logits, sampling, keys), draft_token_ids.shape[1]
    if synthetic is None:
        right = draft_token_ids == chosen[:, :-1]
    else:
        right = synthetic.right[:, :num_drafts] & (chosen[:, :-1] != NO_TOKEN)
    index = jnp.arange(num_drafts, dtype=jnp.int32)[None, :]
    accepted = right & (index < widths[:, None])
    num_accepted = jnp.min(jnp.where(accepted, num_drafts, index), axis=1, initial=num_drafts)
    return Acceptance(num_accepted, jnp.take_along_axis(chosen, num_accepted[:, None], axis=1)[:, 0])


def draw_synthetic(rates: tuple[float, ...], keys: UInt32[Array, "B T 2"]) -> SyntheticDrafts:
    """Draw which drafts are right, and a drafter's confidence in them, to time models of random weights.

    rates[i]: the share of steps in which drafts 0..i are all right. Given that drafts 0..i-1 are, draft i is right with
    a chance whose mean is r = rates[i] / rates[i - 1]. The chance itself is u^((1 - r) / r) for a uniform u, so that
    drafts differ in how sure they are. The confidence is the chance plus an error of up to NOISE.
    """
    num_drafts = keys.shape[1] - 1
    pairs = itertools.pairwise((1.0, *rates))
    means = [after / before if before else 0.0 for before, after in pairs]
    mean = jnp.asarray(means[:num_drafts], jnp.float32)[None, :]
    u, right, noise = (uniform(keys[:, :-1] ^ jnp.uint32(number)) for number in range(3))
    chance = jnp.where(mean > 0, u ** ((1 - mean) / jnp.maximum(mean, 1e-6)), 0.0)
    return SyntheticDrafts(right < chance, jnp.clip(chance + NOISE * (2 * noise - 1), 0.0, 1.0))
