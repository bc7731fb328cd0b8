"""Bound the acceptance that a temperature allows any drafter, along one output.

p is the target's distribution at a position, q the drafter's. Under any rule that keeps the target's distribution, a
draft is accepted with a probability of at most (arXiv 2211.17192)

    one_hot    p(d)             if it is the drafter's likeliest token d
    sampled    sum min(p, q)    if it is drawn from q
    best       max p            if it is the target's likeliest token

So 1 - max p is the target's own uncertainty: training can raise a drafter's p(d) at most to max p. (The drafts of
`peagle.engine.step.accept` are drawn by the target's own noise; they reach between o / (2 - o) and o = sum min(p, q).)

Teacher forcing recomputes these figures at the positions that acceptance counts: those of drafts that a step verified
after it had accepted all drafts before them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle.answers.result import Result
from peagle.config import SamplingParams
from peagle.engine.request import fold_seed
from peagle.engine.step.sampling import RowSampling, probabilities
from peagle.ops.messages import DrafterInput
from peagle.protocols import Drafter, PyTree, Target

CHUNK = 32  # tokens of one pass


@dataclasses.dataclass(frozen=True)
class Bound:
    """Sums of the module's figures over the positions of one output, by draft [K]."""

    tried: tuple[int, ...]  # number of positions
    one_hot: tuple[float, ...]
    best: tuple[float, ...]
    sampled: tuple[float, ...] | None  # None: the drafter has no distribution


def bound(target: Target, drafter: Drafter, result: Result) -> Bound | None:
    """Sum the bounds along the output of a speculative result.

    None if nothing was drafted, or if the request's logits were adjusted (penalties, biases, a grammar).
    """
    request, k = result.request, result.num_speculative_tokens
    steps = [step for step in result.steps if step.draft_token_ids]
    if not steps or request.sampling.adjusts or request.grammar is not None:
        return None
    text = [*request.prompt_ids, *result.output_ids]
    probs, aux_hidden = _read_text(target, text, len(request.prompt_ids), request.sampling)
    if hasattr(drafter, "with_logits"):
        drafter = drafter.replace(with_logits=True)  # type: ignore[attr-defined]
    replay = _Replay(drafter, text, aux_hidden, k, request.sampling)
    tried = np.zeros(k, np.int64)
    sums = np.zeros((3, k))
    has_overlap = True
    for step in steps:
        # draft j is for position length + j; the text may end before it
        rows = min(step.num_accepted + 1, len(step.draft_token_ids), len(text) - step.length)
        first = step.length - len(request.prompt_ids)
        padded = np.pad(probs[first : first + rows], ((0, k - rows), (0, 0)))
        figures = replay.step(step.length, len(step.draft_token_ids), padded)
        has_overlap = has_overlap and figures[2] is not None
        tried[:rows] += 1
        for total, figure in zip(sums, figures, strict=True):
            total[:rows] += 0.0 if figure is None else np.asarray(figure)[:rows]
    one_hot, best, overlap = map(tuple, sums.tolist())
    return Bound(tuple(tried.tolist()), one_hot, best, overlap if has_overlap else None)


def _row(sampling: SamplingParams) -> RowSampling:
    """Make the sampling of a single row."""
    reals = (np.array([real], np.float32) for real in (sampling.temperature, sampling.top_p, sampling.min_p))
    temperature, top_p, min_p = reals
    top_k, seed, index = (np.array([number], np.int32) for number in (sampling.top_k, fold_seed(sampling.seed), 0))
    return RowSampling(temperature, top_k, top_p, min_p, seed, index)  # type: ignore[arg-type]  # NumPy's, too


def _capacity(num_tokens: int) -> int:
    """Round up to a power of two, so that most texts share their programs."""
    return max(256, 1 << (num_tokens - 1).bit_length())


def _read_text(
    target: Target, text: Sequence[int], first: int, sampling: SamplingParams
) -> tuple[np.ndarray, np.ndarray]:
    """Run the target over a text; return (distributions after the tokens from `first` on, aux_hidden of all)."""
    cache = target.init_cache(1, _capacity(len(text)), CHUNK)
    probs, aux = [], []
    for start in range(0, len(text), CHUNK):
        ids = np.zeros((1, CHUNK), np.int32)
        count = min(CHUNK, len(text) - start)
        ids[0, :count] = text[start : start + count]
        in_output = start + count > first
        chunk_probs, chunk_aux, cache = _read_chunk(
            target, ids, np.int32(start), np.int32(count), cache, _row(sampling), needs_probs=in_output
        )
        aux.append(np.asarray(chunk_aux)[0, :count])
        if chunk_probs is not None:
            probs.append(np.asarray(chunk_probs)[0, max(first - start, 0) : count])
    return np.concatenate(probs), np.concatenate(aux)


@functools.partial(jax.jit, static_argnames="needs_probs", donate_argnames="cache")
def _read_chunk(
    target: Target,
    token_ids: jax.Array,
    begin: jax.Array,
    count: jax.Array,
    cache: PyTree,
    sampling: RowSampling,
    *,
    needs_probs: bool,
) -> tuple[jax.Array | None, jax.Array, PyTree]:
    row = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.where(row < count, begin + row, -1)
    rows = None if needs_probs else jnp.zeros((1, 1), jnp.int32)
    output, cache = target.extend(token_ids, positions, cache, rows)
    return probabilities(output.logits, sampling) if needs_probs else None, output.aux_hidden, cache


class _Replay:
    """A drafter that drafts along a text again, step by step."""

    def __init__(
        self, drafter: Drafter, text: Sequence[int], aux_hidden: np.ndarray, k: int, sampling: SamplingParams
    ) -> None:
        self._drafter, self._aux, self._k = drafter, aux_hidden, k
        self._next_tokens = np.array([*text[1:], 0], np.int32)
        widest = max(CHUNK, 2 * k)
        self._state = drafter.init_state(1, _capacity(len(text) + k + 1), widest)
        self._absorbed = 0
        # drafts are drawn at the request's temperature, without its top_k, top_p and min_p (peagle.engine.step.propose)
        self._sampling = _row(SamplingParams(sampling.temperature, seed=sampling.seed))

    def step(self, length: int, width: int, probs: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Draft at the step that began with `length` tokens, and compare with the target's probs [K, V].

        Returns (p(d), max p, sum min(p, q) or None), of shape [K].
        """
        while length - self._absorbed > self._k + 1:
            count = min(CHUNK, length - self._absorbed - self._k - 1)
            ids, aux = self._rows(count, CHUNK)
            row = np.arange(CHUNK, dtype=np.int32)
            positions = np.where(row < count, self._absorbed + row, -1)[None]
            self._state = _absorb(self._drafter, self._state, ids, aux, positions)
            self._absorbed += count
        num = length - self._absorbed
        ids, aux = self._rows(num, self._k + 1)
        counts = np.array([num], np.int32), np.array([self._absorbed], np.int32)
        drafter_input = DrafterInput(ids, aux, *counts)  # type: ignore[arg-type]  # NumPy's, too
        self._absorbed = length
        widths = np.array([width], np.int32)
        figures, self._state = _compare(
            self._drafter, self._state, drafter_input, widths, probs, self._sampling, num_drafts=self._k
        )
        return figures

    def _rows(self, count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the next rows, padded to a width: (next tokens [1, W], aux_hidden [1, W, A])."""
        rows = slice(self._absorbed, self._absorbed + count)
        ids, aux = self._next_tokens[rows], self._aux[rows]
        return np.pad(ids, (0, width - count))[None], np.pad(aux, ((0, width - count), (0, 0)))[None]


@functools.partial(jax.jit, donate_argnames="state")
def _absorb(drafter: Drafter, state: PyTree, ids: jax.Array, aux: jax.Array, positions: jax.Array) -> PyTree:
    return drafter.absorb(state, ids, aux, positions)


@functools.partial(jax.jit, static_argnames="num_drafts", donate_argnames="state")
def _compare(
    drafter: Drafter,
    state: PyTree,
    drafter_input: DrafterInput,
    widths: jax.Array,
    probs: jax.Array,
    sampling: RowSampling,
    *,
    num_drafts: int,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array | None], Any]:
    draft, state = drafter.propose(state, drafter_input, widths, num_drafts)
    token = draft.token_ids[0]
    picked = jnp.take_along_axis(probs, jnp.maximum(token, 0)[:, None], axis=1)[:, 0]
    one_hot = jnp.where(token < 0, 0.0, picked)
    overlap = None
    if draft.logits is not None:
        overlap = jnp.sum(jnp.minimum(probs, probabilities(draft.logits, sampling)[0]), axis=-1)
    return (one_hot, jnp.max(probs, axis=-1), overlap), state
