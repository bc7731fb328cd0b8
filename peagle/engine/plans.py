"""Write the plan of a pass, one array of integers for the device, and read it there."""

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from peagle.engine.state import Batch


def step_plan(slots: Sequence[int], widths: Sequence[int], tables: np.ndarray, absent: int) -> np.ndarray:
    """Write the plan of a pass over slots: rows of (slot, width, tables).

    absent: the slot number of entries after `slots`. tables: [B, M], the tables of all groups side by side.
    """
    plan = np.zeros((len(tables), 2 + tables.shape[1]), np.int32)
    plan[:, 0] = absent
    plan[: len(slots), 0], plan[: len(widths), 1] = slots, widths
    plan[:, 2:] = tables
    return plan


def chunk_plan(
    token_ids: Sequence[Sequence[int]], begin: Sequence[int], known: Sequence[int], length: int, tables: np.ndarray
) -> np.ndarray:
    """Write the plan of a chunk of prompts: rows of (begin, count, known, tokens, tables)."""
    plan = np.zeros((len(tables), 3 + length + tables.shape[1]), np.int32)
    for row, tokens in enumerate(token_ids):
        plan[row, :3] = begin[row], len(tokens), known[row]
        plan[row, 3 : 3 + len(tokens)] = tokens
    plan[:, 3 + length :] = tables
    return plan


def read_step_plan(plan: jax.Array, widths: tuple[int, ...], num_target: int) -> tuple[Batch, jax.Array]:
    tables = cut_tables(plan[:, 2:], widths)
    return Batch(plan[:, 0], tables[:num_target], tables[num_target:]), plan[:, 1]


def cut_tables(columns: jax.Array, widths: tuple[int, ...]) -> tuple[jax.Array, ...]:
    ends = np.cumsum([0, *widths]).tolist()
    return tuple(columns[:, begin:end] for begin, end in itertools.pairwise(ends))
