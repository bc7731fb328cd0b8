"""Compile an engine's programs ahead of its requests; measure what parts of a step cost.

Every program runs once over a batch without slots, which needs no request.
"""

import dataclasses
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jaxlib
import numpy as np

from peagle.engine.auto.widths import CostTable, StepCosts
from peagle.engine.host.handoff import Fingerprints
from peagle.engine.host.loop import Measuring
from peagle.engine.host.pass_plans import chunk_plan, step_plan
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.masks import all_allowed
from peagle.engine.step.state import SlotParams
from peagle.engine.step.step_kinds import StepKind
from peagle.ops import interrupt, native
from peagle.ops.attention import PAGE_SIZE
from peagle.ops.files import cache_directory, write_cached
from peagle.ops.processors import thread_times
from peagle.ops.strict_json import dumps

if TYPE_CHECKING:
    from peagle.engine.host.engine import Engine

LEAST_ROUNDS, MOST_ROUNDS, MOST_S = 7, 12, 1.0  # for one number of active slots
AGREEMENT = 1.1  # rounds end if the two shortest times of each case differ by this factor or less
# largest share of their time that threads may have waited for processors; on two busy cores 0.58 to 0.81 were measured,
# even in rounds that agreed
MOST_WAITING = 0.5


class WarmUp:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._warm: set[object] = set()
        self.steady = True  # whether the times of `measure_costs` agreed

    def compile(self, sampled: bool, full_logits: bool, constrained: bool, alone: bool = False) -> bool:
        """Run once the programs that such requests need (`AnyEngine.warm_up`); return whether some of them are new."""
        engine, batches = self._engine, self._engine.batches
        kinds = self._step_kinds(sampled, full_logits, alone)
        missing = {(kind, size) for kind in kinds for size in batches.sizes} - self._warm
        split = set()
        if constrained:
            kinds = {batches.kind(drafts, sampled=True, full_logits=True) for drafts in batches.program_drafts}
            split = {("split", kind, size) for kind in kinds for size in batches.sizes} - self._warm
        fully = {"full first token"} - self._warm if full_logits or constrained else set()
        prompts = {("prompts", with_drafter) for with_drafter in self._prefills(alone)} - self._warm
        # the largest programs first, because they take longest to compile
        by_size = sorted(missing, key=lambda program: (-program[1], -program[0].num_drafts, str(program[0])))
        steps = [(batches.empty_plan(size), kind) for kind, size in by_size]
        with engine.executor.compiling_steps(steps):
            for _, with_drafter in sorted(prompts):
                self._prefill(with_drafter)
            if fully:
                self._choose_fully()
        for plan, kind in steps:
            interrupt.check()
            engine.executor.steps(plan, kind.no_costs(len(plan)), 1, kind)
        if constrained and engine.config.adaptive:
            for size in batches.sizes:  # a split step begins with it
                engine.executor.absorb(batches.empty_plan(size))
        for _, kind, size in sorted(split, key=str):
            interrupt.check()
            self._split_step(kind, size)
        engine.executor.settle()
        new = missing | split | fully | prompts
        self._warm |= new
        return bool(new)

    def _step_kinds(self, sampled: bool, full_logits: bool, alone: bool) -> set[StepKind]:
        """List the variants of whole steps that such requests take."""
        engine, batches = self._engine, self._engine.batches
        drafts, adaptive, costs = batches.program_drafts, engine.config.adaptive, engine.costs
        kinds: set[StepKind] = set()
        if adaptive and costs is None:  # the costs are those of greedy steps
            kinds = {batches.kind(number, sampled=False) for number in drafts}
            if alone:
                return kinds  # the costs decide which others are needed
        if alone and costs is not None:
            gains = costs.can_gain(1, engine.config.num_drafts)
            drafts = tuple(number for number in drafts if (number > 0) == gains)
        kinds |= {batches.kind(number, sampled, full_logits) for number in drafts}
        if engine.drafter is not None:
            plain = {kind for kind in kinds if not kind.num_drafts}
            if not adaptive:  # then only requests that never draft take plain steps
                kinds -= plain
            kinds |= {dataclasses.replace(kind, keep_drafter_input=False) for kind in plain}
        return kinds

    def _prefills(self, alone: bool) -> set[bool]:
        """List how prompts are prefilled: with the drafter or without it."""
        engine = self._engine
        # without a prefix cache, requests that never draft are prefilled without the drafter
        some_without = not alone and not engine.config.prefix_cache and 0 in engine.batches.program_drafts
        return {engine.drafter is not None, *([False] if some_without else [])}

    def _prefill(self, with_drafter: bool) -> None:
        engine, config = self._engine, self._engine.config
        tables = sum(engine.memory.table_widths)
        row = SlotParams.of(Request((0,), 1), (), engine.target.vocab_size)
        for count, length in config.pass_shapes:
            interrupt.check()
            plan = chunk_plan((), (), length, np.full((count, tables), -1, np.int32))
            engine.executor.prefill(plan, with_drafter)
            absent = np.full((count,), config.slots, np.int32)
            ones = np.ones((count,), np.int32)
            engine.executor.admit((0,), absent, ones, -ones, [row])
        if engine.executor.reads_tokens:
            engine.executor.read_tokens(0, (0,))

    def _choose_fully(self) -> None:
        """Choose the first token of a request of full logits, for no slot."""
        engine, ones = self._engine, np.ones((1,), np.int32)
        request = Request((0,), 1, logprobs=0)
        assert request.full_logits
        params = SlotParams.of(request, (), engine.target.vocab_size)
        engine.executor.admit((0,), engine.config.slots * ones, ones, -ones, [params])

    def _split_step(self, kind: StepKind, size: int) -> None:
        engine = self._engine
        plan = engine.batches.empty_plan(size)
        costs = kind.no_costs(size)
        engine.executor.propose(plan, costs, kind)
        engine.executor.verify(plan)
        masks = all_allowed(size, kind.num_drafts + 1, engine.target.vocab_size)
        engine.executor.accept_and_commit(plan, costs, masks, np.zeros((size,), np.int32), kind)

    def stored_costs(self) -> CostTable | None:
        """Return the costs stored for such an engine on this machine; None if there are none."""
        return None if (store := self._store) is None else read_costs(store)

    def costs(self, measuring: Measuring) -> CostTable:
        """Measure the costs, and store them unless the machine was busy."""
        before = thread_times()
        costs = self.measure_costs(measuring)
        # on a busy machine, measure again next time
        quiet = self.steady and thread_times().waiting_frac(before) <= MOST_WAITING
        if quiet and (store := self._store) is not None:
            write_cached(store, dumps(costs.to_json(), indent=1).encode())  # if the cache is writable
        return costs

    @property
    def _store(self) -> Path | None:
        return store_for(self._engine.config, self._engine.fingerprints)

    def measure_costs(self, measuring: Measuring) -> CostTable:
        """Measure steps at 1, 2, 4, ... active slots that have pages, in units of a plain step of that many slots.

        Rounds of all cases repeat until the two shortest times of each case agree; their mean counts, since noise only
        adds to a time. If some never agree, the machine is busy, and `steady` is False.
        """
        slots, k = self._engine.config.slots, self._engine.config.num_drafts
        numbers = [1 << power for power in range(slots.bit_length()) if 1 << power <= slots]
        numbers = [number for number in numbers if self._fitting(number) is not None]
        verify, draft = {}, {}
        for done, active in enumerate(numbers):
            cases, rounds = _cases(active, k), list[dict[_Case, float]]()
            with self._prefilled(active) as prompts:
                started = time.perf_counter()
                while len(rounds) < LEAST_ROUNDS or (
                    len(rounds) < MOST_ROUNDS and time.perf_counter() < started + MOST_S and _differ(rounds)
                ):
                    measuring(done * MOST_ROUNDS + len(rounds), len(numbers) * MOST_ROUNDS)
                    turn = len(rounds) % len(cases)
                    rounds.append(self._measure_round(prompts, cases[turn:] + cases[:turn]))
            self.steady &= not _differ(rounds)
            seconds = {case: statistics.mean(sorted(by[case] for by in rounds)[:2]) for case in cases}
            times = {case: value / seconds[_PLAIN] for case, value in seconds.items()}
            # drafting alone: a step that drafts and verifies nothing
            drafted = times[_Case(active, k, 0)]
            unverified = [case for case in times if case.num_drafts and not case.verified]
            draft[active] = tuple(sorted((case.count, max(times[case] - 1.0, 0.0)) for case in unverified))
            verify[active] = (
                (active, 1.0),
                *sorted(
                    (active + case.verified, max(1.0 + times[case] - drafted, 1.0))
                    for case in times
                    if case.slots == active and case.verified
                ),
            )
        self._engine.executor.relearn()
        return CostTable(verify, draft)

    def _fitting(self, active: int) -> tuple[int, int, int] | None:
        """Choose (prompt tokens, steps, tokens in all) for one of this many slots; None if there are too few pages."""
        config, memory = self._engine.config, self._engine.memory
        width, ahead = config.num_drafts + 1, memory.sizing.num_lookahead_tokens
        pages = memory.num_pages[0] // active
        room = min(config.context, pages * PAGE_SIZE - ahead) - 2
        steps = max(1, min(config.steps_per_dispatch, room // (2 * width)))
        length = max(1, min(config.pass_shapes[0][1], room - steps * width))
        whole = min(length + steps * width, config.context) + ahead
        return None if memory.sizing.pages_of(whole) > pages else (length, steps, whole)

    @contextmanager
    def _prefilled(self, active: int) -> Iterator["_Prompts"]:
        """Prefill prompts of random tokens for this many slots."""
        engine, memory = self._engine, self._engine.memory
        sizes = self._fitting(active)
        assert sizes is not None
        length, steps, whole = sizes
        rng = np.random.default_rng(active)
        tables = [memory.open((), with_drafter=True) for _ in range(active)]
        try:
            for table in tables:
                tokens = rng.integers(0, engine.target.vocab_size, length).tolist()
                reserved = memory.pool.reserve(table, length)
                plan = chunk_plan([tokens], [0], engine.config.pass_shapes[0][1], memory.row(table)[None])
                engine.executor.prefill(plan, with_drafter=True)
                # free the pages that windows have left behind, so that there are enough for all slots
                memory.publish(table, tokens, length, length, known=False)
                reserved &= memory.pool.reserve(table, whole)
                assert reserved, "`_fitting` counted a page for every slot"
            rows = np.full((engine.batches.size_for(active), sum(memory.table_widths)), -1, np.int32)
            rows[:active] = [memory.row(table) for table in tables]
            yield _Prompts(active, length, steps, rows)
        finally:
            for table in tables:
                memory.pool.free(table)

    def _measure_round(self, prompts: "_Prompts", cases: Sequence["_Case"]) -> dict["_Case", float]:
        engine, active, size = self._engine, prompts.count, len(prompts.rows)
        k = engine.config.num_drafts
        params = SlotParams.of(Request((0,) * prompts.length, engine.config.context), (), engine.target.vocab_size)
        lengths, unknown = np.asarray([prompts.length], np.int32), np.asarray([-1], np.int32)
        seconds = {}
        for case in cases:
            for slot in range(active):  # set it back to the end of its prompt
                engine.executor.admit([0], np.asarray([slot], np.int32), lengths, unknown, [params])
            engine.executor.settle()
            widths = [case.num_drafts] * case.slots + [0] * (active - case.slots)
            plan = step_plan(range(active), widths, prompts.rows, engine.config.slots)
            kind = engine.batches.kind(k if case.num_drafts else 0, sampled=False)
            costs = case.forcing(active, size, k).pack() if case.num_drafts else kind.no_costs(size)
            started = time.perf_counter()
            jax.block_until_ready(engine.executor.steps(plan, costs, prompts.steps, kind))
            seconds[case] = time.perf_counter() - started
        return seconds


@dataclasses.dataclass(frozen=True)
class _Prompts:
    count: int
    length: int
    steps: int  # that fit into their pages
    rows: np.ndarray  # their tables, as rows of a plan


@dataclasses.dataclass(frozen=True)
class _Case:
    """Steps in which `slots` slots draft num_drafts tokens each and verify `width`, or together verify `rows`.

    No slots: steps that look up and choose. No drafts: plain steps.
    """

    slots: int
    num_drafts: int
    width: int
    rows: int | None = None

    @property
    def count(self) -> int:
        """Number of drafted tokens."""
        return self.slots * self.num_drafts

    @property
    def verified(self) -> int:
        return self.slots * self.width if self.rows is None else self.rows

    def forcing(self, active: int, size: int, k: int) -> StepCosts:
        """Make costs by which a step verifies this many drafts."""
        costs = StepCosts.unknown(size, k)
        rows = np.arange(costs.verify.size)
        return StepCosts(np.where(rows == active + self.verified, 0.0, 1e6).astype(np.float32), costs.draft)


_PLAIN = _Case(0, 0, 0)


def _differ(rounds: Sequence[dict[_Case, float]]) -> bool:
    """Whether the two shortest times of some case differ."""
    shortest = (sorted(by[case] for by in rounds)[:2] for case in rounds[0])
    return any(second > AGREEMENT * first for first, second in shortest)


def _cases(active: int, k: int) -> list[_Case]:
    """List the cases at this many active slots: plain steps, numbers of verified and of drafted tokens."""
    widths = sorted({0, 1, 2, 3, 5, k} & set(range(k + 1)))
    cases = [_PLAIN, _Case(0, k, 0), *(_Case(active, k, width) for width in widths)]
    if k > 1:
        cases.append(_Case(active, 1, 0))
    if active > 1:
        cases += [_Case(active, k, 0, rows=1), _Case(1, k, 0)]
    return cases


# --- costs on disk ----------------------------------------------------------------------------------------------------


def store_for(config: ResolvedConfig, fingerprints: Fingerprints) -> Path | None:
    """Return the file of an engine's costs on this machine; None for models that were not loaded from files."""
    if not fingerprints.target:
        return None
    device = jax.devices()[0]
    parts = {
        "models": [fingerprints.target, fingerprints.drafter],
        "engine": [config.slots, config.num_drafts, config.steps_per_dispatch],
        "machine": [platform.node(), device.device_kind, len(jax.devices()), os.cpu_count(), native.status()[0]],
        "versions": [jaxlib.__version__],
    }
    digest = hashlib.sha256(dumps(parts).encode()).hexdigest()[:24]
    return cache_directory("costs") / f"{digest}.json"


def read_costs(path: Path) -> CostTable | None:
    """Read costs; None if the file is missing or malformed."""
    try:
        return CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
