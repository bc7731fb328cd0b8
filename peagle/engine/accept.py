"""Accept drafts and choose the token after them. Pure functions that take random numbers as arguments.

Why this is lossless. Let p_i be the distribution of token i under plain decoding, given the tokens before it. Under
greedy decoding p_i is a point mass on the argmax.

One-hot drafts (the drafter's argmax, an n-gram, any deterministic rule). Token i is drawn from p_i exactly as plain
decoding draws it: x_i = choose(logits_i, uniform_i). The draft is accepted iff it equals x_i. The first x_i that
differs is the recovered token; if all drafts are accepted, x_K is the bonus token. With the same seed the emitted
tokens therefore equal plain decoding's, number for number. A draft d is accepted with probability p_i(d), as in
rejection sampling with a one-hot q.

Sampled drafts, d_i ~ q_i. The draft is accepted iff u_i < p_i(d_i) / q_i(d_i). Otherwise the recovered token is drawn
from max(p_i - q_i, 0), renormalised (Leviathan et al., arXiv 2211.17192, theorem 1): P(x) = min(p, q) +
P(reject) * max(p - q, 0) / P(reject) = p. The test is u < ratio, never <=, because u and p_i(d_i) can both be 0.

In both cases position i + 1 counts only if position i was accepted, so its logits follow exactly the emitted tokens.
"""

import itertools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.engine.sampling import ACCEPT, TARGET, RowSampling, choose, draw, probabilities
from peagle.ops.likeliest import NO_TOKEN


@flax.struct.dataclass
class Acceptance:
    num_accepted: jax.Array  # [B] int32, 0..width
    # [B] int32: the recovered token, or the bonus token if all verified drafts were accepted; NO_TOKEN if the logits
    # that decide it are not finite
    next_token: jax.Array


def accept(
    draft_token_ids: Int[Array, "B K"],
    draft_probs: Float[Array, "B K V"] | None,
    logits: Float[Array, "B T V"],
    widths: Int[Array, " B"],
    sampling: RowSampling,
    uniforms: Float[Array, "B T 3"] | None,
) -> Acceptance:
    """Accept 0..widths[b] drafts of each row and choose the token that follows.

    T = K + 1; row i's logits decide the token that draft i proposes. Logits that are not finite accept no draft and
    give NO_TOKEN. draft_probs None: one-hot drafts. uniforms None: all rows are greedy. draft_probs of a greedy row are
    one-hot, too (`probabilities`), so that it emits the argmax.
    """
    num_drafts = draft_token_ids.shape[1]
    verified = jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < widths[:, None]
    if draft_probs is None:
        chosen = choose(logits, sampling, None if uniforms is None else uniforms[..., TARGET])
        num_accepted = _leading(verified & (draft_token_ids == chosen[:, :-1]))
        return Acceptance(num_accepted, _row(chosen, num_accepted))
    assert uniforms is not None
    target_probs = probabilities(logits, sampling)
    drafted = draft_token_ids[..., None]
    p = jnp.take_along_axis(target_probs[:, :-1], drafted, axis=-1)[..., 0]
    q = jnp.take_along_axis(draft_probs, drafted, axis=-1)[..., 0]
    num_accepted = _leading(verified & (uniforms[:, :-1, ACCEPT] * q < p))
    # after the last verified draft q is 0, so the bonus token is drawn from p
    q_all = jnp.where(verified[..., None], draft_probs, 0.0)
    residual = jnp.maximum(target_probs - jnp.pad(q_all, ((0, 0), (0, 1), (0, 0))), 0.0)
    rejected = jnp.take_along_axis(residual, num_accepted[:, None, None], axis=1)[:, 0]
    # rejected although p == q to the last bit: possible only by rounding; the limit of the residual is p
    fallback = jnp.take_along_axis(target_probs, num_accepted[:, None, None], axis=1)[:, 0]
    rejected = jnp.where(jnp.sum(rejected, axis=-1, keepdims=True) > 0, rejected, fallback)
    return Acceptance(num_accepted, draw(rejected, _row(uniforms[..., TARGET], num_accepted)))


def accept_by_rate(
    rates: tuple[float, ...],
    draft_token_ids: Int[Array, "B K"],
    logits: Float[Array, "B T V"],
    widths: Int[Array, " B"],
    sampling: RowSampling,
    uniforms: Float[Array, "B T 3"],
    sampled: bool,
) -> Acceptance:
    """Accept drafts at random with the given rates, to time models of random weights.

    `rates` are unconditional, as shares of all steps: draft i is accepted with the conditional rate v_i / v_(i-1),
    v_(-1) = 1. The logits are computed and read as usual, but do not decide. sampled: some row is not greedy.
    """
    num_drafts = draft_token_ids.shape[1]
    verified = jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < widths[:, None]
    pairs = itertools.pairwise((1.0, *rates))
    conditional = [after / before if before else 0.0 for before, after in pairs][:num_drafts]
    kept = uniforms[:, :-1, ACCEPT] < jnp.asarray(conditional, uniforms.dtype)[None, :]
    chosen = choose(logits, sampling, uniforms[..., TARGET] if sampled else None)
    num_accepted = _leading(verified & kept & (chosen[:, :-1] != NO_TOKEN))
    return Acceptance(num_accepted, _row(chosen, num_accepted))


def _leading(hit: Array) -> Array:
    """Count the leading True of each row of [B, K]: the index of the first False."""
    num = hit.shape[1]
    index = jnp.arange(num, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(hit, num, index), axis=1, initial=num)


def _row(values: Array, index: Array) -> Array:
    """Take values[b, index[b]]."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
