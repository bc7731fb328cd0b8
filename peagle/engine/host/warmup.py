"""Compile an engine's programs ahead of its requests; prepare slots in which parts of a step are timed.

Every program runs once over a batch without slots, which needs no request.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from peagle.base import interrupt
from peagle.engine.auto import measure
from peagle.engine.auto.costs import CostTable
from peagle.engine.auto.measure import Case, Measuring
from peagle.engine.host.executor import Executor
from peagle.engine.host.handoff import Fingerprints
from peagle.engine.host.pass_plans import chunk_plan, step_plan
from peagle.engine.host.step_batches import StepBatches
from peagle.engine.request import Request
from peagle.engine.step.masks import all_allowed
from peagle.engine.step.state import SlotParams
from peagle.engine.step.step_kinds import StepKind
from peagle.ops.attention import PAGE_SIZE


class Needs(NamedTuple):
    """What some requests need (`EngineBase.warm_up`)."""

    sampled: bool
    full_logits: bool
    constrained: bool
    alone: bool


class WarmUp:
    """Runs the programs of an executor before it has requests."""

    def __init__(self, executor: Executor, batches: StepBatches, fingerprints: Fingerprints) -> None:
        self._executor, self._batches = executor, batches
        self._config, self._memory = batches.config, batches.memory
        self._fingerprints, self._vocab_size = fingerprints, executor.target.vocab_size
        self._warm: set[object] = set()

    def compile(self, costs: CostTable | None, needs: Needs) -> bool:
        """Run once the programs that such requests need; return whether some of them are new."""
        executor, batches = self._executor, self._batches
        kinds = self._step_kinds(costs, needs)
        if needs.constrained:
            kinds |= {batches.kind(drafts, masked=True) for drafts in batches.program_drafts}
        missing = {(kind, size) for kind in kinds for size in batches.sizes} - self._warm
        fully = {"full first token"} - self._warm if needs.full_logits or needs.constrained else set()
        prompts = {("prompts", with_drafter) for with_drafter in self._prefills(needs.alone)} - self._warm
        # the largest programs first, because they take longest to compile
        by_size = sorted(missing, key=lambda program: (-program[1], -program[0].num_drafts, str(program[0])))
        steps = [(batches.empty_plan(size), kind) for kind, size in by_size]
        with executor.compiling_steps([(plan, kind) for plan, kind in steps if not kind.masked]):
            for _, with_drafter in sorted(prompts):
                self._prefill(with_drafter)
            if fully:
                self._admit_none(Request((0,), 1, logprobs=0))
        for plan, kind in steps:
            interrupt.check()
            if kind.masked:
                executor.masked_step(plan, kind, self._allow_all)
            else:
                executor.steps(plan, kind.no_costs(len(plan)), 1, kind)
        executor.settle()
        new = missing | fully | prompts
        self._warm |= new
        return bool(new)

    def _step_kinds(self, costs: CostTable | None, needs: Needs) -> set[StepKind]:
        """List the variants of whole steps that such requests take."""
        batches, adaptive = self._batches, self._config.adaptive
        drafts = batches.program_drafts
        kinds: set[StepKind] = set()
        if adaptive and costs is None:  # the costs are those of greedy steps
            kinds = {batches.kind(number) for number in drafts}
            if needs.alone:
                return kinds  # the costs decide which others are needed
        if needs.alone and costs is not None:
            gains = costs.can_gain(1, self._config.num_drafts)
            drafts = tuple(number for number in drafts if (number > 0) == gains)
        kinds |= {batches.kind(number, needs.sampled, needs.full_logits) for number in drafts}
        if self._executor.drafter is not None:
            plain = {kind for kind in kinds if not kind.num_drafts}
            if not adaptive:  # then only requests that never draft take plain steps
                kinds -= plain
            kinds |= {dataclasses.replace(kind, keep_drafter_input=False) for kind in plain}
        return kinds

    def _prefills(self, alone: bool) -> set[bool]:
        """List how prompts are prefilled: with the drafter or without it."""
        # without a prefix cache, requests that never draft are prefilled without the drafter
        some_without = not alone and not self._config.prefix_cache and 0 in self._batches.program_drafts
        return {self._executor.drafter is not None, *([False] if some_without else [])}

    def _prefill(self, with_drafter: bool) -> None:
        tables = sum(self._memory.table_widths)
        for count, length in self._config.pass_shapes:
            interrupt.check()
            plan = chunk_plan((), (), length, np.full((count, tables), -1, np.int32))
            self._executor.prefill(plan, with_drafter)
            self._admit_none(Request((0,), 1), count)
        if self._executor.reads_tokens:
            self._executor.read_tokens(0, (0,))

    def _admit_none(self, request: Request, count: int = 1) -> None:
        """Choose the first token of such a request, for no slot."""
        ones = np.ones((count,), np.int32)
        params = SlotParams.of(request, (), self._vocab_size)
        self._executor.admit((0,), self._config.slots * ones, ones, -ones, [params])

    def _allow_all(self, drafts: jax.Array, _: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        size, num_drafts = drafts.shape
        return all_allowed(size, num_drafts + 1, self._vocab_size), np.zeros((size,), np.int32)

    # --- what `auto` measures (peagle.engine.auto.measure) ------------------------------------------------------------

    def stored_costs(self) -> CostTable | None:
        """Return the costs stored for such an engine on this machine; None if there are none."""
        return None if (store := self._store) is None else measure.read_costs(store)

    def measured_costs(self, measuring: Measuring) -> CostTable:
        """Time steps at 1, 2, 4, ... active slots, as far as the pages hold their prompts, and store the costs."""
        slots = self._config.slots
        numbers = [1 << power for power in range(slots.bit_length()) if self._fitting(1 << power) is not None]
        costs = measure.measure_costs(numbers, self._config.num_drafts, self._timing, self._store, measuring)
        self._executor.relearn()
        return costs

    @property
    def _store(self) -> Path | None:
        config, models = self._config, (self._fingerprints.target, self._fingerprints.drafter)
        sizes = config.slots, config.num_drafts, config.steps_per_dispatch
        return measure.store_for(models, self._executor.models_text, sizes)

    def _fitting(self, active: int) -> tuple[int, int, int] | None:
        """Choose (prompt tokens, steps, tokens in all) for one of this many slots; None if there are too few pages."""
        config, memory = self._config, self._memory
        width, ahead = config.num_drafts + 1, memory.sizing.num_lookahead_tokens
        pages = memory.num_pages[0] // active
        room = min(config.context, pages * PAGE_SIZE - ahead) - 2
        steps = max(1, min(config.steps_per_dispatch, room // (2 * width)))
        length = max(1, min(config.pass_shapes[0][1], room - steps * width))
        whole = min(length + steps * width, config.context) + ahead
        return None if memory.sizing.pages_of(whole) > pages else (length, steps, whole)

    @contextmanager
    def _timing(self, active: int) -> Iterator[Callable[[Case], float]]:
        """Prefill prompts of random tokens for this many slots; yield a function that times a case there."""
        memory, sizes = self._memory, self._fitting(active)
        assert sizes is not None
        length, steps, whole = sizes
        rng = np.random.default_rng(active)
        tables = [memory.open((), with_drafter=True) for _ in range(active)]
        try:
            for table in tables:
                tokens = rng.integers(0, self._vocab_size, length).tolist()
                reserved = memory.pool.reserve(table, length)
                plan = chunk_plan([tokens], [0], self._config.pass_shapes[0][1], memory.row(table)[None])
                self._executor.prefill(plan, with_drafter=True)
                # free the pages that windows have left behind, so that there are enough for all slots
                memory.publish(table, tokens, length, length, known=False)
                reserved &= memory.pool.reserve(table, whole)
                assert reserved, "`_fitting` counted a page for every slot"
            rows = np.full((self._batches.size_for(active), sum(memory.table_widths)), -1, np.int32)
            rows[:active] = [memory.row(table) for table in tables]
            yield lambda case: self._seconds(case, active, length, steps, rows)
        finally:
            for table in tables:
                memory.pool.free(table)

    def _seconds(self, case: Case, active: int, length: int, steps: int, rows: np.ndarray) -> float:
        """Time the steps of a case. length: of each prompt. rows: tables of the slots, as rows of a plan."""
        executor, k, size = self._executor, self._config.num_drafts, len(rows)
        params = SlotParams.of(Request((0,) * length, self._config.context), (), self._vocab_size)
        lengths, unknown = np.asarray([length], np.int32), np.asarray([-1], np.int32)
        for slot in range(active):  # set it back to the end of its prompt
            executor.admit([0], np.asarray([slot], np.int32), lengths, unknown, [params])
        executor.settle()
        widths = [case.num_drafts] * case.slots + [0] * (active - case.slots)
        plan = step_plan(range(active), widths, rows, self._config.slots)
        kind = self._batches.kind(k if case.num_drafts else 0, sampled=False)
        costs = case.forcing(active, size, k).pack() if case.num_drafts else kind.no_costs(size)
        started = time.perf_counter()
        jax.block_until_ready(executor.steps(plan, costs, steps, kind))
        return time.perf_counter() - started
