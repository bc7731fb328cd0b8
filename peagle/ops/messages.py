"""Values passed between the engine, a target and a drafter; here so that all three can import them."""

from collections.abc import Callable
from typing import TypeAlias

import flax.struct
import jax
import jax.numpy as jnp

from peagle.ops.likeliest import NO_TOKEN, argmax, likeliest


@flax.struct.dataclass
class VerifyOutput:
    """A target's results of one pass, besides its caches."""

    logits: jax.Array  # [B, L, V]: of the requested rows
    aux_hidden: jax.Array  # [B, T, A]: the aux layers' hidden states, concatenated; A is 0 without aux layers


@flax.struct.dataclass
class DrafterInput:
    """The tokens committed since the drafter proposed last, each with the aux_hidden that predicts it.

    Row i pairs token[p+1] with aux_hidden[p] at p = first_position + i, for i < num; ignore later rows. One step
    commits up to K+1 rows. first_position is the position after the last row that the drafter has absorbed.
    """

    token_ids: jax.Array  # [B, F] int32, F >= K+1
    aux_hidden: jax.Array  # [B, F, A]
    num: jax.Array  # [B] int32, 1..F, or 0 in an inactive sequence
    first_position: jax.Array  # [B] int32; negative: the sequence is inactive


# (indices [B, n], NO_TOKEN where the logits are not finite; the probabilities [B, n] of these drafts, float32, or None)
Chosen: TypeAlias = tuple[jax.Array, jax.Array | None]
# Chooses drafts first .. first + n - 1 from logits [B, n, U]. token_ids [U]: the target's ids of the logits' tokens;
# None: 0, 1, 2, ...
Choose: TypeAlias = Callable[[jax.Array, jax.Array | None, int], Chosen]


def likeliest_of(logits: jax.Array, token_ids: jax.Array | None, first: int) -> Chosen:  # noqa: ARG001
    """Choose the most likely drafts (`Choose`), without their probabilities."""
    return argmax(logits), None


def likeliest_with_confidence(logits: jax.Array, token_ids: jax.Array | None, first: int) -> Chosen:  # noqa: ARG001
    """Choose the most likely drafts (`Choose`), with their probabilities."""
    index, probability = likeliest(logits)
    finite = jnp.isfinite(probability)
    # a probability of 1, so that the draft is verified and the error is noticed
    return jnp.where(finite, index, NO_TOKEN), jnp.where(finite, probability, 1.0)


@flax.struct.dataclass
class DraftOutput:
    """K proposed tokens, with logits over the target's vocabulary if the drafter is set to return them.

    confidence: the drafter's probability of each draft; None: not requested. Tokens that the drafter cannot propose
    have logits of -inf or a very large negative number.
    """

    token_ids: jax.Array  # [B, K] int32
    logits: jax.Array | None = None  # [B, K, V]
    confidence: jax.Array | None = None  # [B, K] float32
