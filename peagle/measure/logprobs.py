"""Compute log-probabilities of an output by teacher forcing, through the target's caches.

In float32 they equal those of decoding up to rounding; in bfloat16 passes of other widths differ by more.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from peagle.engine.request import TokenLogprobs
from peagle.protocols import PyTree, Target

CHUNK = 32  # tokens of one pass


def output_logprobs(
    target: Target, prompt_ids: Sequence[int], output_ids: Sequence[int], num_best: int, capacity: int
) -> list[TokenLogprobs]:
    """Compute the output tokens' log-probabilities, with the num_best likeliest tokens.

    capacity: positions of the caches; every value compiles a program.
    """
    if not output_ids:
        return []
    token_ids = [*prompt_ids, *output_ids]
    cache, parts = target.init_cache(1, capacity, CHUNK), []
    first = len(prompt_ids) - 1  # the row whose logits decide the first output token
    for start in range(0, len(token_ids) - 1, CHUNK):
        token_chunk, next_tokens = np.zeros((2, 1, CHUNK), np.int32)
        count = min(CHUNK, len(token_ids) - 1 - start)
        token_chunk[0, :count] = token_ids[start : start + count]
        next_tokens[0, :count] = token_ids[start + 1 : start + 1 + count]
        in_output = start + count > first
        num = max(num_best, 1) if in_output else 0
        logprobs, cache = _chunk_logprobs(
            target, token_chunk, np.int32(start), np.int32(count), cache, next_tokens, num_best=num
        )
        if in_output:
            parts.append([np.asarray(leaf)[max(first - start, 0) : count] for leaf in logprobs])
    values, best_logprobs, best_ids = (np.concatenate(column).tolist() for column in zip(*parts, strict=True))
    return [
        TokenLogprobs(token, values[i], tuple(zip(best_ids[i], best_logprobs[i], strict=True))[:num_best])
        for i, token in enumerate(output_ids)
    ]


def top_2_margin(target: Target, prompt_ids: Sequence[int], output_ids: Sequence[int], capacity: int) -> float:
    """Return by how much the highest logit exceeds the second at the last output token."""
    first, second = output_logprobs(target, prompt_ids, output_ids, 2, capacity)[-1].best
    return first[1] - second[1]


@functools.partial(jax.jit, static_argnames="num_best", donate_argnames="cache")
def _chunk_logprobs(
    target: Target,
    token_ids: jax.Array,
    begin: jax.Array,
    count: jax.Array,
    cache: PyTree,
    next_tokens: jax.Array,
    *,
    num_best: int,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array] | None, PyTree]:
    """Run `count` tokens at positions begin.., and return (log-probabilities, caches).

    The log-probabilities are (of the next tokens, of the num_best likeliest, ids of these); None if num_best is 0.
    """
    row = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.where(row < count, begin + row, -1)
    if not num_best:
        return None, target.extend(token_ids, positions, cache, jnp.zeros((1, 1), jnp.int32))[1]
    output, cache = target.extend(token_ids, positions, cache)
    logprobs = jax.nn.log_softmax(output.logits[0].astype(jnp.float32), axis=-1)
    of_next = jnp.take_along_axis(logprobs, next_tokens[0][:, None], axis=-1)[:, 0]
    best, ids = jax.lax.top_k(logprobs, num_best)
    return (of_next, best, ids), cache
