"""Accept drafts and choose the token after them. Pure functions that take random numbers as arguments.

Why this is lossless. Let p_i be the distribution of token i under plain decoding, given the tokens before it. Under
greedy decoding p_i is a point mass on the argmax. Token i is drawn from p_i as plain decoding draws it: x_i =
choose(logits_i, key_i), where the key depends on the seed and the token's index alone. Draft i is accepted iff it
equals x_i. The first x_i that differs is the recovered token; if all drafts are accepted, x_K is the bonus token. So
with the same seed the emitted tokens equal plain decoding's, number for number, whatever drafts them, however many are
drafted, and by whatever rule widths are chosen. Position i + 1 counts only if position i was accepted, so its logits
follow exactly the emitted tokens.

What a drafter can do is agree often. The argmax of its distribution q agrees with probability p(argmax q). A draft that
is drawn from q with the same key, so by the same race (peagle.engine.sampling.draw), agrees more often where the target
is uncertain: with a probability of at least (1 - d) / (1 + d), d the total variation of p and q, at most 1 - d. (The
rejection sampling of arXiv 2211.17192 reaches 1 - d, but emits other tokens than plain decoding.)
"""

import itertools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from peagle.engine.sampling import RowSampling, choose, uniform
from peagle.ops.likeliest import NO_TOKEN


@flax.struct.dataclass
class Acceptance:
    num_accepted: jax.Array  # [B] int32, 0..width
    # [B] int32: the recovered token, or the bonus token if all verified drafts were accepted; NO_TOKEN if the logits
    # that decide it are not finite
    next_token: jax.Array


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


def accept_by_rate(
    rates: tuple[float, ...],
    draft_token_ids: Int[Array, "B K"],
    logits: Float[Array, "B T V"],
    widths: Int[Array, " B"],
    sampling: RowSampling,
    keys: UInt32[Array, "B T 2"],
    sampled: bool,
) -> Acceptance:
    """Accept drafts at random with the given rates, to time models of random weights.

    `rates` are unconditional, as shares of all steps: draft i is accepted with the conditional rate v_i / v_(i-1),
    v_(-1) = 1. The logits are computed and read as usual, but do not decide. sampled: some row is not greedy.
    """
    num_drafts = draft_token_ids.shape[1]
    pairs = itertools.pairwise((1.0, *rates))
    conditional = [after / before if before else 0.0 for before, after in pairs][:num_drafts]
    kept = uniform(keys[:, :-1]) < jnp.asarray(conditional, jnp.float32)[None, :]
    chosen = choose(logits, sampling, keys if sampled else None)
    num_accepted = _leading(_verified(draft_token_ids, widths) & kept & (chosen[:, :-1] != NO_TOKEN))
    return Acceptance(num_accepted, _row(chosen, num_accepted))


def _verified(drafts: Array, widths: Array) -> Array:
    return jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :] < widths[:, None]


def _leading(hit: Array) -> Array:
    """Count the leading True of each row of [B, K]: the index of the first False."""
    num = hit.shape[1]
    index = jnp.arange(num, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(hit, num, index), axis=1, initial=num)


def _row(values: Array, index: Array) -> Array:
    """Take values[b, index[b]]."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
