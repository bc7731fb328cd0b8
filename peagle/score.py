"""How likely a finished output was: the target's logits with the output given (teacher forcing), through its caches.

It is not what decoding computed, token by token, but the same function of the same tokens: in float32 equal to
rounding, in bfloat16 with the differences that passes of different width have there.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from peagle.generate import SMALLEST_BUCKET
from peagle.protocols import PyTree, Target

CHUNK = 32  # output tokens scored in one pass


@dataclass(frozen=True)
class TokenScore:
    """One emitted token: the log of its probability (log-softmax of the logits, before temperature and truncation), and
    the most likely tokens there with theirs, best first."""

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...]


def score(
    target: Target, prompt_ids: Sequence[int], output_ids: Sequence[int], num_best: int, capacity: int | None = None
) -> list[TokenScore]:
    """One TokenScore per output token. `capacity` is the room for prompt and output, of which each value is one
    program; by default the next power of two."""
    if not output_ids:
        return []
    needed = len(prompt_ids) + len(output_ids)
    capacity = max(capacity or _bucket(needed), needed)
    padded = np.zeros((1, _bucket(len(prompt_ids))), np.int32)
    padded[0, : len(prompt_ids)] = prompt_ids
    best = max(num_best, 1)
    scores, cache = _score_first(
        target, padded, np.asarray([len(prompt_ids)], np.int32), output_ids[0], capacity=capacity, num_best=best
    )
    parts = [tuple(np.asarray(leaf)[None] for leaf in scores)]
    for start in range(0, len(output_ids) - 1, CHUNK):
        given, wanted = np.zeros((2, 1, CHUNK), np.int32)
        given_ids, wanted_ids = output_ids[start : start + CHUNK], output_ids[start + 1 : start + 1 + CHUNK]
        given[0, : len(given_ids)], wanted[0, : len(wanted_ids)] = given_ids, wanted_ids
        length = np.asarray([len(prompt_ids) + start], np.int32)
        scores, cache = _score_chunk(target, given, length, cache, wanted, num_best=best)
        logprob, best_logprob, best_id = (np.asarray(leaf)[: len(wanted_ids)] for leaf in scores)
        parts.append((logprob, best_logprob, best_id))
    logprobs, best_logprobs, best_ids = (np.concatenate(column).tolist() for column in zip(*parts, strict=True))
    return [
        TokenScore(token, logprobs[i], tuple(zip(best_ids[i], best_logprobs[i], strict=True))[:num_best])
        for i, token in enumerate(output_ids)
    ]


def top_2_margin(target: Target, prompt_ids: Sequence[int], output_ids: Sequence[int], capacity: int | None) -> float:
    """The difference of the two highest logits that decided the last of the output's tokens."""
    first, second = score(target, prompt_ids, output_ids, 2, capacity)[-1].best
    return first[1] - second[1]


@functools.partial(jax.jit, static_argnames=("capacity", "num_best"))
def _score_first(
    target: Target, token_ids: jax.Array, lengths: jax.Array, wanted: jax.Array, *, capacity: int, num_best: int
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], PyTree]:
    output, cache = target.prefill(token_ids, lengths, target.init_cache(1, capacity, CHUNK))
    return _pick(output.logits[0], wanted, num_best), cache


@functools.partial(jax.jit, static_argnames="num_best", donate_argnames="cache")
def _score_chunk(
    target: Target, token_ids: jax.Array, lengths: jax.Array, cache: PyTree, wanted: jax.Array, *, num_best: int
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], PyTree]:
    output, cache = target.verify(token_ids, lengths, cache)
    return _pick(output.logits[0], wanted[0], num_best), cache


def _pick(logits: jax.Array, wanted: jax.Array, num_best: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(log-probability of the wanted tokens, the best ones' log-probabilities, their ids), over the last axis."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    wanted = jnp.asarray(wanted, jnp.int32)
    best, ids = jax.lax.top_k(logprobs, num_best)
    return jnp.take_along_axis(logprobs, wanted[..., None], axis=-1)[..., 0], best, ids


def _bucket(length: int) -> int:
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())
