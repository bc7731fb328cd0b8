"""Choose the slots, widths and program of the next steps, and write the plans of passes for the device.

A batch has the smallest size that holds its slots. The last size has a row for every slot: there a request's row has
its slot's number.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from peagle.engine.auto.costs import CostTable
from peagle.engine.host.handle import Handle
from peagle.engine.host.pass_plans import chunk_plan, step_plan
from peagle.engine.host.scheduler import PromptPiece
from peagle.engine.memory.kv_memory import KVMemory
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.step_kinds import StepKind
from peagle.ops import native

# the factor between batch sizes: native kernels skip rows without a slot, so they need fewer sizes
NATIVE_FACTOR, XLA_FACTOR = 8, 2
# drafts of a masked step with `-k auto`: beside the masks another row costs little. On JSON of ten schemas the demo
# decodes 1.3 times as fast as without drafts, at temperature 1 1.2 times; with 1 or 7 drafts less
MASKED_DRAFTS = 3


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """The next `count` steps: slots with their requests and widths, and the program."""

    rows: Sequence[tuple[int, Handle]]
    widths: Sequence[int]
    kind: StepKind
    count: int


@dataclasses.dataclass(frozen=True)
class StepBatches:
    """The step programs that an engine may run: numbers of drafts, variants and batch sizes."""

    config: ResolvedConfig
    memory: KVMemory

    @functools.cached_property
    def program_drafts(self) -> tuple[int, ...]:
        """The numbers of drafts of the programs, ascending: K, and 0 if some steps are plain."""
        some_are_plain = self.config.adaptive or self.config.k_per_request
        return tuple(sorted({self.config.num_drafts, *([0] if some_are_plain else [])}))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of batches, ascending; the last has a row for every slot."""
        factor = NATIVE_FACTOR if native.available() else XLA_FACTOR
        sizes = [1]
        while sizes[-1] * factor < self.config.slots:
            sizes.append(sizes[-1] * factor)
        return tuple(sorted({*sizes, self.config.slots}))

    def size_for(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def kind(self, num_drafts: int, sampled: bool = False, full_logits: bool = False, masked: bool = False) -> StepKind:
        """Return the variant of steps with this many drafts. masked implies full_logits, which implies sampled."""
        full_logits |= masked
        sampled |= full_logits
        if not num_drafts:
            return StepKind(0, sampled, full_logits, masked=masked)
        rates, adaptive = self.config.synthetic_acceptance, self.config.adaptive
        return StepKind(num_drafts, sampled, full_logits, rates, adaptive=adaptive, masked=masked)

    def choose(self, decoding: Sequence[tuple[int, Handle]], num_drafts: int, masked: bool, count: int) -> StepBatch:
        """Choose the next `count` steps of the decoding slots, with num_drafts drafts at most.

        Slots with a grammar take part only in masked steps.
        """
        most = min(num_drafts, MASKED_DRAFTS) if masked and self.config.adaptive else num_drafts
        rows = [(slot, handle) for slot, handle in decoding if masked or handle.matcher is None]
        widths = [handle.request.limit_drafts(most) if handle.drafting else 0 for _, handle in rows]
        number = self.config.num_drafts if any(widths) else 0
        if masked:
            return StepBatch(rows, widths, self.kind(number, masked=True), count)
        sampled = any(not handle.request.sampling.greedy for _, handle in rows)
        kind = self.kind(number, sampled, full_logits=any(handle.request.full_logits for _, handle in rows))
        if self.memory.has_drafter and not number and not any(handle.drafting for _, handle in rows):
            kind = dataclasses.replace(kind, keep_drafter_input=False)
        return StepBatch(rows, widths, kind, count)

    def plan(self, rows: Sequence[tuple[int, Handle]], widths: Sequence[int]) -> np.ndarray:
        plan = self.empty_plan(self.size_for(len(rows)))
        for row, (slot, handle), width in zip(self._rows(rows, len(plan)), rows, widths, strict=True):
            assert handle.table is not None
            plan[row, :2] = slot, width
            plan[row, 2:] = self.memory.row(handle.table)
        return plan

    def costs(self, batch: StepBatch, size: int, table: CostTable | None, num_active: int) -> np.ndarray:
        """Return the packed costs of a batch of this size, empty unless its steps are adaptive."""
        if not batch.kind.adaptive or table is None:
            return batch.kind.no_costs(size)
        return table.packed(num_active, size, batch.kind.num_drafts)

    def empty_plan(self, size: int) -> np.ndarray:
        return step_plan((), (), np.full((size, sum(self.memory.table_widths)), -1, np.int32), self.config.slots)

    def by_row(self, rows: Sequence[tuple[int, Handle]], size: int) -> tuple[Handle | None, ...]:
        """List the requests of a batch by its rows."""
        by_row: list[Handle | None] = [None] * size
        for row, (_, handle) in zip(self._rows(rows, size), rows, strict=True):
            by_row[row] = handle
        return tuple(by_row)

    def chunk_plan(self, pieces: Sequence[PromptPiece[Handle]], shape: tuple[int, int]) -> np.ndarray:
        """Write the plan of a pass over pieces of prompts. shape: (prompts, rows per prompt)."""
        size, length = shape
        tables = np.full((size, sum(self.memory.table_widths)), -1, np.int32)
        token_ids = []
        for row, piece in enumerate(pieces):
            token_ids.append(piece.key.computed_ids[max(piece.begin - 1, 0) : piece.begin + piece.count])
            assert piece.key.table is not None
            tables[row] = self.memory.row(piece.key.table)
        return chunk_plan(token_ids, [piece.begin for piece in pieces], length, tables)

    def _rows(self, rows: Sequence[tuple[int, Handle]], size: int) -> list[int]:
        return [slot for slot, _ in rows] if size == self.config.slots else list(range(len(rows)))
