"""Compile an engine's programs ahead of its requests; measure what drafting costs.

Every program runs once over no slot. So later times include no compilation, and no request is needed.
"""

import dataclasses
import itertools
import statistics
import time
from typing import TYPE_CHECKING

import jax
import numpy as np

from peagle.engine.executor import chunk_plan, step_plan
from peagle.engine.loop import Measuring
from peagle.engine.masks import all_allowed
from peagle.engine.request import Request
from peagle.engine.state import SlotParams
from peagle.engine.step import StepKind
from peagle.ops import interrupt

if TYPE_CHECKING:
    from peagle.engine.engine import Engine

MEASURED_ROUNDS = 5


class WarmUp:
    """What an engine has compiled so far."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._warm: set[object] = set()

    def compile(self, sampled: bool, full: bool, constrained: bool) -> bool:
        """Run the programs once that requests of these sorts need; return whether some had not run before."""
        engine, batches = self._engine, self._engine.batches
        kinds = {batches.kind(drafts, sampled, full) for drafts in batches.possible_drafts}
        if engine.config.adaptive and engine.widths.costs is None:  # the costs are those of greedy steps
            kinds |= {batches.kind(drafts, sampled=False) for drafts in batches.possible_drafts}
        if engine.drafter is not None:
            plain = {kind for kind in kinds if not kind.num_drafts}
            lean = {dataclasses.replace(kind, lean=True) for kind in plain}
            # without lapses, plain steps are those of requests that never draft
            kinds = kinds | lean if batches.drafting_lapses else kinds - plain | lean
        missing = {(kind, size) for kind in kinds for size in batches.sizes} - self._warm
        cut = set()
        if constrained:
            kinds = {batches.kind(drafts, sampled=True, full=True) for drafts in batches.possible_drafts}
            cut = {("cut", kind, size) for kind in kinds for size in batches.sizes} - self._warm
        new = bool(missing or cut or "prompts" not in self._warm)
        if "prompts" not in self._warm:
            self._prompts()
        by_size = sorted(missing, key=lambda program: (program[1], str(program[0])))
        steps = [(batches.empty_plan(size), kind) for kind, size in by_size]
        if len(steps) > 1:
            engine.executor.compile_steps(steps)
        for plan, kind in steps:
            interrupt.check()
            engine.executor.steps(plan, 0.0, 1, kind)
        if missing and len(batches.possible_drafts) > 1 and engine.drafter is not None:
            for size in batches.sizes:  # plain steps run between drafted ones
                engine.executor.absorb(batches.empty_plan(size))
        for _, kind, size in sorted(cut, key=str):
            interrupt.check()
            self._cut_step(kind, size)
        engine.executor.settle()
        self._warm |= missing | cut | {"prompts"}
        return new

    def _prompts(self) -> None:
        engine, config = self._engine, self._engine.config
        tables = sum(engine.memory.widths)
        row = SlotParams.of(Request((0,), 1), (), engine.target.vocab_size)
        lean = engine.drafter is not None and not config.prefix_cache and 0 in engine.batches.possible_drafts
        for count, length in config.pass_shapes:
            interrupt.check()
            plan = chunk_plan((), (), (), length, np.full((count, tables), -1, np.int32))
            for drafts in (False, True) if lean else (engine.drafter is not None,):
                engine.executor.prefill(plan, drafts)
            absent = np.full((count,), config.slots, np.int32)
            ones = np.ones((count,), np.int32)
            engine.executor.admit((0,), absent, ones, -ones, [row])
        if engine.drafter is not None and not engine.drafter.cache_groups:
            engine.executor.learn(0, (0,))

    def _cut_step(self, kind: StepKind, size: int) -> None:
        engine = self._engine
        plan = engine.batches.empty_plan(size)
        engine.executor.propose(plan, kind)
        engine.executor.verify(plan)
        masks = all_allowed(size, kind.num_drafts + 1, engine.target.vocab_size)
        engine.executor.accept_and_commit(plan, 0.0, masks, np.zeros((size,), np.int32), kind)

    def measure_costs(self, measuring: Measuring) -> dict[int, float]:
        """Measure a drafted step in plain steps at 1, 2, 4, ... active rows.

        Medians over rounds; both programs run in each round, in alternating order.
        """
        slots = self._engine.config.slots
        rows = [1 << power for power in range(slots.bit_length()) if 1 << power <= slots]
        runs = list(itertools.product(rows, range(MEASURED_ROUNDS)))
        ratios: dict[int, list[float]] = {active: [] for active in rows}
        for done, (active, number) in enumerate(runs):
            measuring(done, len(runs))
            ratios[active].append(self._measure_once(active, number % 2 == 1))
        return {active: statistics.median(found) for active, found in ratios.items()}

    def _measure_once(self, active: int, plain_first: bool) -> float:
        """Measure the time of a drafted step over a plain one, with `active` rows of random tokens."""
        engine, config = self._engine, self._engine.config
        drafts, k = engine.widths.at(active), config.num_speculative_tokens
        shape = config.pass_shapes[0]
        room = min(config.context, engine.memory.num_tokens // active) - 2
        steps = max(1, min(config.steps_per_dispatch, room // (2 * (k + 2))))
        length = max(1, min(shape[1], room - 2 * steps * (k + 1)))
        rng = np.random.default_rng(active)
        tables = []
        for slot in range(active):
            tokens = rng.integers(0, engine.target.vocab_size, length).tolist()
            table = engine.memory.open((), drafts=True)
            tables.append(table)
            reserved = engine.memory.pool.reserve(table, min(length + 2 * steps * (k + 1) + k, config.context + k))
            assert reserved, "an idle engine has pages"
            plan = chunk_plan([tokens], [0], [0], shape[1], engine.memory.row(table)[None])
            engine.executor.prefill(plan, drafts=True)
            params = SlotParams.of(Request(tuple(tokens), config.context), (), engine.target.vocab_size)
            lengths, unknown = np.asarray([length], np.int32), np.asarray([-1], np.int32)
            engine.executor.admit([0], np.asarray([slot], np.int32), lengths, unknown, [params])
        size = engine.batches.size_for(active)
        rows = np.full((size, sum(engine.memory.widths)), -1, np.int32)
        rows[:active] = [engine.memory.row(table) for table in tables]
        seconds, drafted = {}, engine.batches.program_for(drafts)
        for num_drafts in (0, drafted) if plain_first else (drafted, 0):
            engine.executor.settle()
            started = time.perf_counter()
            widths = [drafts if num_drafts else 0] * active
            plan = step_plan(range(active), widths, rows, config.slots)
            kind = engine.batches.kind(num_drafts, sampled=False)
            kind = kind if num_drafts else dataclasses.replace(kind, lean=True)  # as rows that paused go on
            jax.block_until_ready(engine.executor.steps(plan, 0.0, steps, kind))
            seconds[num_drafts] = time.perf_counter() - started
            engine.executor.absorb(plan)
        for table in tables:
            engine.memory.pool.close(table)
        return seconds[drafted] / seconds[0]
