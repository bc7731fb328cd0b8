"""A sequence through the caches in every way decoding goes: what parity and the golden test both run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from target.model import GptOss

WIDTH = 4  # rows of a verifying pass
ACCEPTED = np.array([[0, 3, 1], [2, 0, 3], [3, 1, 0], [1, 2, 2]])  # per pass, per row of the batch: none, some, all


def walk(
    model: GptOss,
    token_ids: np.ndarray,
    prompt_lengths: list[int],
    check: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None],
    decoded: int = 6,
) -> list[int]:
    """The lengths reached after a padded prefill of prompts of different length, `decoded` single tokens, and verifying
    passes over some right tokens followed by wrong ones, rolled back, until the sequences end.

    check(rows, positions, logits [n, V], aux_hidden [n, A]) is called for everything computed from right tokens.
    """
    batch, total = token_ids.shape
    rng = np.random.default_rng(0)
    prefill, verify = jax.jit(GptOss.prefill), jax.jit(GptOss.verify)
    caches = model.init_cache(batch, total, WIDTH)

    lengths = np.array(prompt_lengths, np.int32)
    padded = np.array(token_ids[:, : max(prompt_lengths) + 3])  # padding that must not matter
    for row, length in enumerate(prompt_lengths):
        padded[row, length:] = rng.integers(0, model.vocab_size, padded.shape[1] - length)
    out, caches = prefill(model, jnp.asarray(padded), jnp.asarray(lengths), caches)
    rows = np.arange(batch)
    check(rows, lengths - 1, np.asarray(out.logits), np.asarray(out.aux_hidden)[rows, lengths - 1])

    for _ in range(decoded):
        out, caches = verify(model, jnp.asarray(token_ids[rows, lengths][:, None]), jnp.asarray(lengths), caches)
        check(rows, lengths, np.asarray(out.logits)[:, 0], np.asarray(out.aux_hidden)[:, 0])
        lengths = lengths + 1

    step = 0
    while lengths.max() + WIDTH <= total:
        accepted = ACCEPTED[step % len(ACCEPTED)][:batch]
        tokens = token_ids[rows[:, None], lengths[:, None] + np.arange(WIDTH)]
        wrong = np.arange(WIDTH)[None, :] > accepted[:, None]
        tokens = np.where(wrong, (tokens + 1 + step) % model.vocab_size, tokens).astype(np.int32)
        out, caches = verify(model, jnp.asarray(tokens), jnp.asarray(lengths), caches)
        right_rows, right_columns = np.nonzero(~wrong)
        check(
            right_rows,
            lengths[right_rows] + right_columns,
            np.asarray(out.logits)[right_rows, right_columns],
            np.asarray(out.aux_hidden)[right_rows, right_columns],
        )
        lengths = (lengths + accepted + 1).astype(np.int32)
        step += 1
    return lengths.tolist()
