"""Blocked prefill: into how many blocks of rows a whole prompt is cut. No JAX."""

import math
from dataclasses import dataclass

from peagle.ops.errors import InputError

PADDED_TO = 128  # a whole prompt is padded to the context, rounded up to a multiple of this
QUERY_ROWS, EXPERT_ROWS = 128, 2048  # most rows of a block by default


@dataclass(frozen=True)
class RowBlocks:
    """How many rows of a whole prompt attention and experts compute at a time."""

    query_rows: int
    expert_rows: int


@dataclass(frozen=True)
class BlockedPrefill:
    """Prefill a whole prompt in one pass. query_blocks, ffn_blocks: how many blocks attention and experts cut it into.

    None: blocks of QUERY_ROWS and of at most EXPERT_ROWS.
    """

    query_blocks: int | None = None
    ffn_blocks: int | None = None

    def rows(self, capacity: int) -> RowBlocks:
        """Return the blocks of a context. Raises InputError for a number that does not divide its padded length."""
        length = padded_length(capacity)
        divisors = [number for number in range(1, length + 1) if length % number == 0]
        for name, number in (("query", self.query_blocks), ("ffn", self.ffn_blocks)):
            if number is not None and number not in divisors:
                raise InputError(
                    f"{name}_blocks is {number}; expected a number that divides {length}, the context padded to a "
                    f"multiple of {PADDED_TO}: {', '.join(map(str, divisors))}",
                    f"{name}_blocks",
                )
        query = self.query_blocks or length // QUERY_ROWS
        ffn = self.ffn_blocks or next(number for number in divisors if length // number <= EXPERT_ROWS)
        return RowBlocks(length // query, length // ffn)

    @property
    def step(self) -> int:
        """The least context length that all numbers of blocks divide."""
        return math.lcm(PADDED_TO, self.query_blocks or 1, self.ffn_blocks or 1)


def padded_length(capacity: int) -> int:
    """Return the rows of a pass over a whole prompt: the context, padded."""
    return -(-capacity // PADDED_TO) * PADDED_TO
