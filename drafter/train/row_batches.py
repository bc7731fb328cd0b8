"""Make the batches of a training: documents packed into rows, in an order that depends on the seed alone.

A row holds several documents, each with its own segment id (1, 2, ...; 0 is padding). The batch of a step is a function
of (data, recipe, step), so a resumed training gets the batches of an uninterrupted one.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import flax.struct
import numpy as np

from drafter.train.cod import sample
from drafter.train.recipe import Recipe
from drafter.train.shards import TEACHER, Document
from peagle.base.errors import InputError

Values: TypeAlias = Any  # an array on the host or on the devices
OPEN_ROWS = 64  # the newest rows, into which a document may be packed


@flax.struct.dataclass
class RowBatch:
    """R packed rows of T tokens with their chains: for each part of a row, n chains (drafter/train/cod.py)."""

    token_ids: Values  # [R, T]
    positions: Values  # [R, T]: from 0 in each segment
    segment_ids: Values  # [R, T]
    trained: Values  # [R, T] float32: 1 if predicting the token counts
    anchors: tuple[Values, ...]  # per part [R, n]
    last_depth: tuple[Values, ...]  # per part [R, n]
    teacher: dict[str, Values]  # stored tensors of the target (shards.TEACHER), [R, T, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    documents: tuple[Document, ...]

    def arrays(self, width: int) -> dict[str, np.ndarray]:
        """Return token_ids, segment_ids, positions, trained and stored tensors of the target, padded to the width."""
        parts: dict[str, list[np.ndarray]] = {"token_ids": [], "segment_ids": [], "positions": [], "trained": []}
        for segment, document in enumerate(self.documents, 1):
            size = len(document.token_ids)
            parts["token_ids"].append(document.token_ids.astype(np.int32))
            parts["segment_ids"].append(np.full((size,), segment, np.int32))
            parts["positions"].append(np.arange(size, dtype=np.int32))
            parts["trained"].append(document.trained.astype(np.float32))
            for name, values in document.teacher.items():
                parts.setdefault(name, []).append(values)
        joined = {name: np.concatenate(values) for name, values in parts.items()}
        return {
            name: np.pad(values, [(0, width - len(values)), *[(0, 0)] * (values.ndim - 1)])
            for name, values in joined.items()
        }


def pack(documents: Sequence[Document], width: int) -> list[Row]:
    """Pack documents into rows of at most `width` tokens. Raises InputError for a document longer than a row."""
    if too_long := [len(document.token_ids) for document in documents if len(document.token_ids) > width]:
        raise InputError(
            f"{len(too_long)} of {len(documents)} documents are longer than the {width} tokens of a row, the longest "
            f"{max(too_long)}; raise --width, or make the data with a smaller --max-new-tokens"
        )
    rows = fill_rows([len(document.token_ids) for document in documents], width)
    return [Row(tuple(documents[index] for index in row)) for row in rows]


def fill_rows(sizes: Sequence[int], width: int) -> list[list[int]]:
    """Pack sizes into rows, each into the fullest of the newest rows with room. Returns the indices of sizes by row."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    for index, size in enumerate(sizes):
        candidates = [row for row in range(max(0, len(rows) - OPEN_ROWS), len(rows)) if rooms[row] >= size]
        if candidates:
            row = min(candidates, key=rooms.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            rooms.append(width)
        rows[row].append(index)
        rooms[row] -= size
    return rows


@functools.lru_cache(maxsize=8)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


@dataclasses.dataclass(frozen=True)
class DocumentSource:
    """The rows of one folder, and how many of them each step has."""

    rows: Sequence[Row]
    rows_per_step: int

    def at(self, index: int, seed: int) -> Row:
        """Return the row at an index of an endless order, in which every row comes once per epoch."""
        size = len(self.rows)
        return self.rows[_order(seed, index // size, size)[index % size]]

    def epochs(self, steps: int) -> float:
        """Return how often `steps` steps read every row."""
        return steps * self.rows_per_step / len(self.rows)


@dataclasses.dataclass(frozen=True)
class RowBatches:
    """The batches of a training."""

    sources: tuple[DocumentSource, ...]
    recipe: Recipe

    @property
    def rows_per_step(self) -> int:
        return sum(source.rows_per_step for source in self.sources)

    def at(self, step: int) -> RowBatch:
        recipe = self.recipe
        step_rows = [
            source.at(step * source.rows_per_step + i, recipe.seed)
            for source in self.sources
            for i in range(source.rows_per_step)
        ]
        rows = [row.arrays(recipe.width) for row in step_rows]
        rng = np.random.default_rng((recipe.seed, 1, step))
        chains = [sample(recipe, row["trained"] > 0, row["segment_ids"], rng) for row in rows]
        # stored tensors of the target count only if all rows have them: it runs for a whole batch or not at all
        shared = [name for name in rows[0] if all(name in row for row in rows)]
        stacked = {name: np.stack([row[name] for row in rows]) for name in shared}
        parts = range(len(recipe.room))
        return RowBatch(
            token_ids=stacked["token_ids"],
            positions=stacked["positions"],
            segment_ids=stacked["segment_ids"],
            trained=stacked["trained"],
            anchors=tuple(np.stack([chain[s][0] for chain in chains]) for s in parts),
            last_depth=tuple(np.stack([chain[s][1] for chain in chains]) for s in parts),
            teacher={name: stacked[name] for name in TEACHER if name in stacked},
        )
