"""Write the plan of a pass, one array of integers for the device, and read it there. -1 in a table: no page."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from peagle.engine.step.prefill import ChunkRows
from peagle.engine.step.state import SlotBatch


def step_plan(slots: Sequence[int], widths: Sequence[int], tables: np.ndarray, absent: int) -> np.ndarray:
    """Write the plan of a pass over slots: rows of (slot, width, tables).

    absent: the number of slots, which entries after `slots` name. tables: [B, M], those of all groups side by side.
    """
    plan = np.zeros((len(tables), 2 + tables.shape[1]), np.int32)
    plan[:, 0] = absent
    plan[: len(slots), 0], plan[: len(widths), 1] = slots, widths
    plan[:, 2:] = tables
    return plan


def chunk_plan(
    token_ids: Sequence[Sequence[int]], num_cached: Sequence[int], length: int, tables: np.ndarray
) -> np.ndarray:
    """Write the plan of a chunk of prompts: rows of (num_cached, count, tokens, tables).

    num_cached: tokens of each prompt that are in its pages. If there are some, token_ids begin with the last of them.
    """
    plan = np.zeros((len(tables), 2 + length + tables.shape[1]), np.int32)
    for row, tokens in enumerate(token_ids):
        plan[row, :2] = num_cached[row], len(tokens)
        plan[row, 2 : 2 + len(tokens)] = tokens
    plan[:, 2 + length :] = tables
    return plan


Tables = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]  # of the target's groups, of the drafter's


@dataclass(frozen=True)
class PlanLayout:
    """Where the tables lie in the rows of a plan: their widths, the first num_target_groups of them the target's."""

    table_widths: tuple[int, ...]
    num_target_groups: int

    def read_steps(self, plan: jax.Array) -> tuple[SlotBatch, jax.Array]:
        """Return (the batch, the widths of its slots)."""
        return SlotBatch(plan[:, 0], *self._tables(plan)), plan[:, 1]

    def read_chunk(self, plan: jax.Array) -> tuple[ChunkRows, Tables]:
        num_cached, num_rows, end = plan[:, 0], plan[:, 1], plan.shape[1] - sum(self.table_widths)
        chunk = ChunkRows(plan[:, 2:end], jnp.maximum(num_cached - 1, 0), num_rows, jnp.minimum(num_cached, 1))
        return chunk, self._tables(plan)

    def _tables(self, plan: jax.Array) -> Tables:
        ends = (plan.shape[1] - sum(self.table_widths) + np.cumsum([0, *self.table_widths])).tolist()
        tables = tuple(plan[:, begin:end] for begin, end in itertools.pairwise(ends))
        return tables[: self.num_target_groups], tables[self.num_target_groups :]
