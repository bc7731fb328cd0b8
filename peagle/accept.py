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

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from peagle.config import SamplingConfig
from peagle.ops.likeliest import NO_TOKEN
from peagle.protocols import Acceptance
from peagle.sampling import ACCEPT, TARGET, choose, draw, probabilities


def accept(
    draft_token_ids: Int[Array, "B K"],
    draft_probs: Float[Array, "B K V"] | None,
    logits: Float[Array, "B T V"],
    sampling: SamplingConfig,
    uniforms: Float[Array, "B T 3"] | None,
) -> Acceptance:
    """Judge the drafts: num_accepted in 0..K and the token that follows; T = K + 1, row i's logits decide the token
    draft i stands for. Logits that are not finite accept no draft, and give NO_TOKEN.

    draft_probs None means one-hot drafts. uniforms may be None when greedy, unless acceptance is synthetic.
    """
    if sampling.synthetic_acceptance is not None:
        assert uniforms is not None
        return _synthetic(draft_token_ids, logits, sampling, uniforms)
    if draft_probs is None:
        uniform = None if uniforms is None else uniforms[..., TARGET]
        chosen = choose(logits, sampling, uniform)
        num_accepted = _leading(draft_token_ids == chosen[:, :-1])
        return Acceptance(num_accepted, _row(chosen, num_accepted))
    assert uniforms is not None
    target_probs = probabilities(logits, sampling)
    drafted = draft_token_ids[..., None]
    p = jnp.take_along_axis(target_probs[:, :-1], drafted, axis=-1)[..., 0]
    q = jnp.take_along_axis(draft_probs, drafted, axis=-1)[..., 0]
    num_accepted = _leading(uniforms[:, :-1, ACCEPT] * q < p)
    # behind the last draft there is nothing to subtract: q = 0 makes the bonus token a draw from p
    no_draft = jnp.zeros_like(draft_probs[:, :1])
    residual = jnp.maximum(target_probs - jnp.concatenate([draft_probs, no_draft], axis=1), 0.0)
    rejected = jnp.take_along_axis(residual, num_accepted[:, None, None], axis=1)[:, 0]
    # p == q to the last bit and yet rejected: possible only by rounding; then p itself is the residual's limit
    fallback = jnp.take_along_axis(target_probs, num_accepted[:, None, None], axis=1)[:, 0]
    rejected = jnp.where(jnp.sum(rejected, axis=-1, keepdims=True) > 0, rejected, fallback)
    return Acceptance(num_accepted, draw(rejected, _row(uniforms[..., TARGET], num_accepted)))


def _synthetic(
    draft_token_ids: Int[Array, "B K"],
    logits: Float[Array, "B T V"],
    sampling: SamplingConfig,
    uniforms: Float[Array, "B T 3"],
) -> Acceptance:
    """Draft i is kept with the conditional rate v_i / v_(i-1) of the unconditional rates v, v_(-1) = 1. The logits are
    computed and read as ever; only the judgement is another."""
    num_drafts = draft_token_ids.shape[1]
    rates = (1.0, *(sampling.synthetic_acceptance or ()))
    conditional = [after / before if before else 0.0 for before, after in itertools.pairwise(rates)][:num_drafts]
    kept = uniforms[:, :-1, ACCEPT] < jnp.asarray(conditional, uniforms.dtype)[None, :]
    chosen = choose(logits, sampling, None if sampling.greedy else uniforms[..., TARGET])
    num_accepted = _leading(kept & (chosen[:, :-1] != NO_TOKEN))
    return Acceptance(num_accepted, _row(chosen, num_accepted))


def _leading(hit: Array) -> Array:
    """How many leading True there are in each row of [B, K]: the index of the first False."""
    num = hit.shape[1]
    index = jnp.arange(num, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(hit, num, index), axis=1, initial=num)


def _row(values: Array, index: Array) -> Array:
    """values[b, index[b]]."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
