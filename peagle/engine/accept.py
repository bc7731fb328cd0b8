"""Which drafts are kept, and the token that follows them. Pure: every random number comes in.

Why nothing is lost. Let p_i be the distribution plain decoding would draw token i of the step from, given the tokens
before it (greedy: a point mass on the argmax).

One-hot drafts (the drafter's argmax, an n-gram, anything deterministic): token i is drawn from p_i exactly as plain
decoding draws it, x_i = choose(logits_i, uniform_i). The draft is accepted iff it equals x_i; the first x_i that
differs is the recovered token, and x_K, with all drafts right, the bonus token. So the emitted tokens ARE plain
decoding's, number for number, with the same seed; a draft d is accepted with probability p_i(d), which is what
rejection sampling of a one-hot q gives. Greedy is the case without randomness.

Sampled drafts, d_i ~ q_i: accepted iff u_i < p_i(d_i) / q_i(d_i), else the recovered token is drawn from
max(p_i - q_i, 0) renormalised (Leviathan et al., arXiv 2211.17192, theorem 1): P(x) = min(p, q) + P(reject) *
max(p - q, 0) / P(reject) = p. u < ratio, never <=: u may be exactly 0 and p_i(d_i) too.

Either way position i + 1 is looked at only when position i was accepted, and its logits saw exactly the tokens emitted.
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
    next_token: jax.Array  # [B] int32: the recovered token, or the bonus token when all verified drafts were accepted;
    # NO_TOKEN where the logits that decide it are not finite


def accept(
    draft_token_ids: Int[Array, "B K"],
    draft_probs: Float[Array, "B K V"] | None,
    logits: Float[Array, "B T V"],
    widths: Int[Array, " B"],
    sampling: RowSampling,
    uniforms: Float[Array, "B T 3"] | None,
) -> Acceptance:
    """Accept 0..widths[b] drafts of each row and choose the token that follows; T = K + 1, row i's logits decide the
    token draft i stands for. Logits that are not finite accept no draft, and give NO_TOKEN.

    draft_probs None means one-hot drafts. uniforms None: all rows are greedy. A greedy row's draft_probs are one-hot,
    too (`probabilities`), so that its law is the argmax's.
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
    # behind the last verified draft there is nothing to subtract: q = 0 makes the bonus token a draw from p
    q_all = jnp.where(verified[..., None], draft_probs, 0.0)
    residual = jnp.maximum(target_probs - jnp.pad(q_all, ((0, 0), (0, 1), (0, 0))), 0.0)
    rejected = jnp.take_along_axis(residual, num_accepted[:, None, None], axis=1)[:, 0]
    # p == q to the last bit and yet rejected: possible only by rounding; then p itself is the residual's limit
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
    """Accept by draws, to time models of random weights: draft i is kept in this share of all steps, whatever the
    target says.

    `rates` are unconditional: draft i is kept with the conditional rate v_i / v_(i-1), v_(-1) = 1. The logits are
    computed and read as ever; only the judgement is another. sampled: some row is not greedy.
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
    """How many leading True there are in each row of [B, K]: the index of the first False."""
    num = hit.shape[1]
    index = jnp.arange(num, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(hit, num, index), axis=1, initial=num)


def _row(values: Array, index: Array) -> Array:
    """values[b, index[b]]."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
