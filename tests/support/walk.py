"""Run a sequence through the caches in every kind of pass, for the parity and native tests."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from target.model import GptOss
from tests.support.paging import small_pages

WIDTH = 4  # rows of a verifying pass
ACCEPTED = np.array([[0, 3, 1], [2, 0, 3], [3, 1, 0], [1, 2, 2]])  # per pass, per row of the batch: none, some, all


def walk(
    model: GptOss,
    token_ids: np.ndarray,
    prompt_lengths: list[int],
    check: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None],
    decoded: int = 6,
) -> list[int]:
    """Run prompts in padded chunks, `decoded` single tokens, then verify passes until the sequences end.

    A verify pass covers some right tokens followed by wrong ones, which are rolled back. Returns the lengths reached.

    check(rows, positions, logits [n, V], aux_hidden [n, A]) is called for everything computed from right tokens.
    """
    batch, total = token_ids.shape
    rng = np.random.default_rng(0)
    extend = jax.jit(GptOss.extend)
    cache = small_pages(model, batch, total, WIDTH)

    lengths = np.array(prompt_lengths, np.int32)
    rows = np.arange(batch)
    for begin in range(0, max(prompt_lengths), WIDTH):
        index = begin + np.arange(WIDTH, dtype=np.int32)[None, :]
        inside = index < lengths[:, None]
        padding = rng.integers(0, model.vocab_size, inside.shape)  # must not affect the results
        tokens = np.where(inside, token_ids[:, begin : begin + WIDTH], padding).astype(np.int32)
        out, cache = extend(model, jnp.asarray(tokens), jnp.asarray(np.where(inside, index, -1)), cache)
        row, column = np.nonzero(inside)
        check(row, begin + column, np.asarray(out.logits)[row, column], np.asarray(out.aux_hidden)[row, column])

    for _ in range(decoded):
        tokens = token_ids[rows, lengths][:, None]
        out, cache = extend(model, jnp.asarray(tokens), jnp.asarray(lengths[:, None]), cache)
        check(rows, lengths, np.asarray(out.logits)[:, 0], np.asarray(out.aux_hidden)[:, 0])
        lengths = lengths + 1

    step = 0
    while lengths.max() + WIDTH <= total:
        accepted = ACCEPTED[step % len(ACCEPTED)][:batch]
        positions = lengths[:, None] + np.arange(WIDTH, dtype=np.int32)
        tokens = token_ids[rows[:, None], positions]
        wrong = np.arange(WIDTH)[None, :] > accepted[:, None]
        tokens = np.where(wrong, (tokens + 1 + step) % model.vocab_size, tokens).astype(np.int32)
        out, cache = extend(model, jnp.asarray(tokens), jnp.asarray(positions), cache)
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
