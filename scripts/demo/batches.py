"""The batches of the demo target's training: packed rows, in the shares of a stage's recipe."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from scripts.demo.rows import LOOP, PROMPT, TEXT, WIDTH

BATCH_ROWS = 8  # of a step, of WIDTH tokens
PROMPT_WEIGHT = 0.25
STEP_TOKENS = BATCH_ROWS * WIDTH
SEED = 0


@dataclasses.dataclass(frozen=True)
class Stage:
    """The recipe of a stage: its tokens, learning rates, and kinds of rows.

    With chat_frac the rows of every step are raw and chat, in shares that follow the progress, linear between its
    points. With shares a step has one kind of rows, and each kind has its share of the steps.
    """

    tokens: int
    peak: float  # of MUON_RATE and ADAM_RATE
    warmup_frac: float
    decay_frac: float
    chat_frac: tuple[tuple[float, float], ...] = ()  # (progress, share of chat rows)
    shares: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted(self.shares)) or (f"raw_{WIDTH}", f"chat_{WIDTH}")

    def rate_at(self, progress: float) -> float:
        """Compute the share of the learning rates: linear warm-up, plateau, linear decay to zero."""
        return self.peak * min(1.0, progress / self.warmup_frac, (1.0 - progress) / self.decay_frac)


STAGES = {
    "begun": Stage(10_000_000, 1.0, 0.01, 0.6, chat_frac=((0.0, 0.4), (0.25, 0.4), (0.6, 0.8), (1.0, 0.9))),
    "practised": Stage(1_228_800, 0.25, 0.01, 0.6, chat_frac=((0.0, 0.9), (1.0, 0.9))),
    "long_begun": Stage(
        11_000_000, 0.3, 0.03, 0.97,
        shares={"chat_512": 4, "raw_512": 2, "chat_2048": 6, "raw_2048": 3, "chat_4096": 2, "raw_4096": 1},
    ),
    "long_practised": Stage(
        1_140_000, 0.12, 0.03, 0.97,
        shares={"chat_512": 4, "raw_512": 1, "chat_2048": 5, "raw_2048": 1, "chat_4096": 2},
    ),
}  # fmt: skip


class Batch(NamedTuple):
    """B packed rows."""

    token_ids: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    weights: jax.Array  # how much each token counts; below 0: as one that should not be predicted


class Rows:
    """Packed rows of one file, read in an endless order that depends on the seed only."""

    def __init__(self, path: Path, seed: int = SEED) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            self.token_ids, self.segment_ids, self.roles = arrays["token_ids"], arrays["segment_ids"], arrays["roles"]
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(len(self.roles))
        )

    def at(self, start: int, count: int) -> np.ndarray:
        """Look up the row numbers at indices start .. start + count - 1 of the endless order."""
        size = len(self.roles)
        return np.array([self._order(i // size)[i % size] for i in range(start, start + count)], np.int64)


class Batches:
    """The batches of a stage: each a function of (stage, rows, step) alone."""

    def __init__(self, stage: Stage, rows: Mapping[str, Rows], scale: float = 1) -> None:
        self.stage, self._rows = stage, rows
        self._turns = [kind for kind in stage.kinds for _ in range(stage.shares.get(kind, 0))]
        self._counts = {kind: max(len(jax.devices()), STEP_TOKENS // rows[kind].token_ids.shape[1]) for kind in rows}
        tokens = [self._counts[kind] * rows[kind].token_ids.shape[1] for kind in self._turns] or [STEP_TOKENS]
        self.steps = max(1, int(scale * stage.tokens * len(tokens) / sum(tokens)))

    def rate_at(self, step: int) -> float:
        """Return the share of the learning rates."""
        return self.stage.rate_at((step + 0.5) / self.steps)

    def kind_at(self, step: int) -> str:
        """Return the kind of rows of a step, in an order that depends on the seed."""
        number, index = divmod(step, len(self._turns))
        return self._turns[np.random.default_rng((SEED, number)).permutation(len(self._turns))[index]]

    def chat_rows_until(self, step: int) -> int:
        """Count the chat rows of the first steps; all other rows are raw."""
        progress = (np.arange(step) + 0.5) / self.steps
        shares = np.interp(progress, *zip(*self.stage.chat_frac, strict=True))
        return round(float(shares.sum()) * BATCH_ROWS)

    def at(self, step: int) -> Batch:
        """Make the batch of a step."""
        if self._turns:
            kind, (number, index) = self.kind_at(step), divmod(step, len(self._turns))
            before = Counter(self.kind_at(number * len(self._turns) + i) for i in range(index))[kind]
            count = self._counts[kind]
            start = (number * self.stage.shares[kind] + before) * count
            return make_batch([(self._rows[kind], self._rows[kind].at(start, count))])
        raw, chat = (self._rows[kind] for kind in self.stage.kinds)
        chat_start, chat_end = self.chat_rows_until(step), self.chat_rows_until(step + 1)
        raw_start, raw_end = step * BATCH_ROWS - chat_start, (step + 1) * BATCH_ROWS - chat_end
        parts = [(raw, raw.at(raw_start, raw_end - raw_start)), (chat, chat.at(chat_start, chat_end - chat_start))]
        return make_batch([part for part in parts if len(part[1])])


def positions_of(segment_ids: np.ndarray) -> np.ndarray:
    """Compute positions that start at 0 in each segment."""
    index = np.arange(segment_ids.shape[1])[None, :]
    starts = np.concatenate([np.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32)


def make_batch(parts: list[tuple[Rows, np.ndarray]]) -> Batch:
    """Gather rows of files. A weight counts the prediction OF its token; below 0 as unwanted."""
    token_ids, segment_ids, roles = (
        np.concatenate([getattr(rows, name)[numbers] for rows, numbers in parts])
        for name in ("token_ids", "segment_ids", "roles")
    )
    weights = np.select([roles == TEXT, roles == PROMPT, roles == LOOP], [1.0, PROMPT_WEIGHT, -1.0], 0.0)
    positions = positions_of(segment_ids)
    weights = np.where(positions == 0, 0.0, weights).astype(np.float32)
    return Batch(token_ids.astype(np.int32), positions, segment_ids.astype(np.int32), weights)
