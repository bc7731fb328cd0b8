"""Measure what parts of a step cost, and keep it for later runs on this machine."""

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax
import jaxlib
import numpy as np

from peagle.base.files import cache_directory, write_cached
from peagle.base.processors import thread_times
from peagle.base.strict_json import dumps
from peagle.engine.auto.costs import CostTable, StepCosts
from peagle.ops import native

LEAST_ROUNDS, MOST_ROUNDS, MOST_S = 7, 12, 1.0  # for one number of active slots
AGREEMENT = 1.1  # rounds end if the two shortest times of each case differ by this factor or less
# largest share of their time that threads may have waited for processors; on two busy cores 0.58 to 0.81 were measured,
# even in rounds that agreed
MOST_WAITING = 0.5


@dataclass(frozen=True)
class Case:
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


PLAIN = Case(0, 0, 0)
Measuring: TypeAlias = Callable[[int, int], object]  # (finished runs, all runs)
# prepares this many active slots; yields a function that runs the steps of a case there and returns the seconds
Timing: TypeAlias = Callable[[int], AbstractContextManager[Callable[[Case], float]]]


def measure_costs(
    numbers: Sequence[int], k: int, timing: Timing, store: Path | None, measuring: Measuring
) -> CostTable:
    """Measure steps at these numbers of active slots, in units of a plain step of that many slots.

    store: the file to keep the costs in, unless the machine is busy: then they are measured again next time.
    """
    before = thread_times()
    costs, steady = _measure(numbers, k, timing, measuring)
    if steady and thread_times().waiting_frac(before) <= MOST_WAITING and store is not None:
        write_cached(store, dumps(costs.to_json(), indent=1).encode())  # if the cache is writable
    return costs


def _measure(numbers: Sequence[int], k: int, timing: Timing, measuring: Measuring) -> tuple[CostTable, bool]:
    """Return (the costs, whether all times agreed).

    Rounds of all cases repeat until the two shortest times of each case agree; their mean counts, since noise only
    adds to a time. If some never agree, the machine is busy.
    """
    verify, draft, steady = {}, {}, True
    for done, active in enumerate(numbers):
        cases, rounds = _cases(active, k), list[dict[Case, float]]()
        with timing(active) as seconds_of:
            started = time.perf_counter()
            while len(rounds) < LEAST_ROUNDS or (
                len(rounds) < MOST_ROUNDS and time.perf_counter() < started + MOST_S and _differ(rounds)
            ):
                measuring(done * MOST_ROUNDS + len(rounds), len(numbers) * MOST_ROUNDS)
                turn = len(rounds) % len(cases)
                rounds.append({case: seconds_of(case) for case in cases[turn:] + cases[:turn]})
        steady &= not _differ(rounds)
        seconds = {case: statistics.mean(sorted(by[case] for by in rounds)[:2]) for case in cases}
        times = {case: value / seconds[PLAIN] for case, value in seconds.items()}
        # drafting alone: a step that drafts and verifies nothing
        drafted = times[Case(active, k, 0)]
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
    return CostTable(verify, draft), steady


def _differ(rounds: Sequence[dict[Case, float]]) -> bool:
    """Whether the two shortest times of some case differ."""
    shortest = (sorted(by[case] for by in rounds)[:2] for case in rounds[0])
    return any(second > AGREEMENT * first for first, second in shortest)


def _cases(active: int, k: int) -> list[Case]:
    """List the cases at this many active slots: plain steps, numbers of verified and of drafted tokens."""
    widths = sorted({0, 1, 2, 3, 5, k} & set(range(k + 1)))
    cases = [PLAIN, Case(0, k, 0), *(Case(active, k, width) for width in widths)]
    if k > 1:
        cases.append(Case(active, 1, 0))
    if active > 1:
        cases += [Case(active, k, 0, rows=1), Case(1, k, 0)]
    return cases


# --- costs on disk ----------------------------------------------------------------------------------------------------


def store_for(models: Sequence[str], models_text: str, engine: Sequence[int]) -> Path | None:
    """Return the file of an engine's costs on this machine; None for models that were not loaded from files.

    models: fingerprints of target and drafter. models_text: how they run (`Executor`). engine: what else steps depend
    on: slots, K, steps per dispatch.
    """
    if not models[0]:
        return None
    device = jax.devices()[0]
    parts = {
        "models": list(models),
        "models_text": models_text,
        "engine": list(engine),
        "machine": [platform.node(), device.device_kind, len(jax.devices()), os.cpu_count(), native.status()[0]],
        "versions": [jaxlib.__version__],
    }
    digest = hashlib.sha256(dumps(parts).encode()).hexdigest()[:24]
    return cache_directory("costs") / f"{digest}.json"


def read_costs(path: Path) -> CostTable | None:
    """Read stored costs; None if the file is missing or malformed."""
    try:
        return CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
