"""What drafting and verifying cost on this machine with this pair: measured with the very program that will run, kept
in a file beside the user's other caches, and measured again wherever anything they depend on is another.

A machine that is busy for a moment gives costs that are wrong for a long time, so the first runs measure each once
more, and what counts is the median of what they found. Where all steps of a dispatch share a choice, what dispatches
take while requests are decoded corrects it (`Running`).
"""

import collections
import dataclasses
import hashlib
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from peagle.config import Ladder, SpeculationConfig
from peagle.ops import kernels
from peagle.ops.files import cache_directory, keep
from peagle.ops.strict_json import dumps
from peagle.policy import Costs
from peagle.provenance import cpu_model, device, num_threads
from peagle.state import FRESH_ROOM, StepOutput

SCHEMA = 11
ENOUGH_S, ENOUGH_WHOLE_S = 2.5, 5.0  # rounds go on until they took this long together; those of whole steps
TOO_LONG_S = 60.0  # one round is enough then
FEWEST_ROUNDS, MOST_ROUNDS = 4, 24
MEASUREMENTS = 5  # of as many runs
FEWEST_DISPATCHES = 2  # that are timed of each run of steps that choose, if it does not end before
QUICK = 0.2  # the quantile over rounds that counts of those: what else the machine does can only add to a time
NOW = 8  # newest dispatches that say how fast the machine is
RECENT = 24  # dispatches of a rung that its running cost is made of
WORTH = 8  # of them, that what was measured beforehand stands for in the beginning

Choice = tuple[int, ...]  # what policy.hold takes
Steps = Generator[tuple[StepOutput, float]]  # of dispatch after dispatch: what it decided, when the host knew
Run = Callable[[Choice], Steps]
InTurn = Callable[[Iterator[int]], Steps]  # of dispatches of these rungs


def measure(ladder: Ladder, run: Run, steps_per_dispatch: int) -> Costs:
    """The costs of each rung. `run` is the loop over steps that all make the same choice, and gives what each dispatch
    decided and when the host knew.

    Drafting on rung r costs (draft r, verify none) - plain; verifying on it, (draft r, verify r) less that. Resuming
    costs what steps that verify one rung, each after a rest, take more than that many such steps and plain ones.
    """
    rungs = range(1, len(ladder))
    rested = (1, 1, FRESH_ROOM)
    choices: list[Choice] = [(0, 0), *((rung, 0) for rung in rungs), *((rung, rung) for rung in rungs)]
    dispatches = dict.fromkeys(choices, 1)
    # all that a rest and the steps around it take, as often as another is timed
    dispatches[rested] = -(-(FRESH_ROOM + 1) // steps_per_dispatch)
    times = _times(run, dispatches)
    ms = {choice: _step_ms(timed) for choice, timed in times.items()}
    # more never costs less: what says so is noise
    draft = np.maximum.accumulate([0.0, *(ms[rung, 0] - ms[0, 0] for rung in rungs)])
    verify = np.maximum.accumulate([ms[0, 0], *(ms[rung, rung] - draft[rung] for rung in rungs)])
    share = statistics.median(each.verifying / each.steps for each in times[rested])
    unrested = share * ms[1, 1] + (1 - share) * ms[0, 0]
    resume = max(ms[rested] - unrested, 0.0) / share if share else 0.0
    return _costs(draft, verify, resume)


def measure_whole_steps(ladder: Ladder, run: InTurn) -> Costs:
    """As `measure`, where all steps of a dispatch draft and verify the same number of tokens: a step is not told apart
    into drafting and verifying, all of it is in verify_ms. `run` is the loop over dispatches of the rungs it is given;
    resuming costs what the first dispatch behind a plain one takes more than others of its rung.

    Dispatches of all rungs follow each other in random order, so that all have the same machine, whatever its rhythm.
    One that the host reads late makes the next look quick, the more so the quicker it is; so the median counts.
    """
    times: list[list[float]] = [[] for _ in ladder]
    resuming: list[tuple[int, _Time]] = []  # first dispatches behind a plain one
    random, began = np.random.default_rng(0), time.perf_counter()
    while not _enough(min(map(len, times)), began, ENOUGH_WHOLE_S):
        rungs = random.permutation(2 * list(range(len(ladder)))).tolist()
        timed = _timed(run(iter(rungs)), len(rungs) - 1)
        skipped = min(1, len(timed) - 1)  # what begins a run
        for place, each in enumerate(timed[skipped:-1] or timed[skipped:], skipped):  # the last may end it
            if place > 0 and rungs[place - 1] == 0 < rungs[place]:
                resuming.append((rungs[place], each))
            else:
                times[rungs[place]].append(each.step_ms)
    ms = np.array([statistics.median(each) for each in times])
    ms[1:] = _smooth(ladder[1:], ms[1:])
    more = [each.taken_ms - each.steps * ms[rung] for rung, each in resuming]
    return _whole_steps(ms, max(statistics.median(more), 0.0) if more else 0.0)


def _smooth(num_drafts: Sequence[int], ms: np.ndarray) -> np.ndarray:
    """The straight line through all (Theil and Sen's, which one that stands out does not move): where steps are as
    quick as these, a draft costs what the one before it does. In sweeps of 300 requests the demo's steps with 1 to 7
    drafts are within 3 % of a line, most within 1 %, on both CPUs; what five seconds show beside that is what else the
    machine did, 15 % and more."""
    if len(ms) < 3:
        return ms
    from scipy.stats import theilslopes  # takes a second to import

    line = theilslopes(ms, num_drafts, method="joint")
    return np.maximum(line.intercept + line.slope * np.asarray(num_drafts), np.min(ms) / 2)


class Running:
    """The costs of whole steps as relations that hold now: those measured beforehand, corrected by what dispatches took
    since. A busy machine slows all rungs down together, which changes nothing of what pays; so what is learned of a
    rung is how its time over the measured one compares with that of the dispatches, of any rung, before it. A number
    of drafts that did not run became dearer or cheaper as others did."""

    def __init__(self, measured: Costs) -> None:
        self._measured = np.asarray(measured.verify_ms, np.float64)
        self._resume_ms = float(measured.resume_ms)
        self._level = collections.deque[float](maxlen=NOW)  # times over those expected, of any rung
        self._own = [collections.deque([1.0] * WORTH, maxlen=RECENT) for _ in self._measured]
        self._ran: set[int] = set()

    def see(self, rung: int, num_steps: int, ms: float, resumed: bool = False) -> None:
        """A dispatch of so many steps of this rung took so long; `resumed`: the one before it was plain."""
        expected = num_steps * self._measured[rung] + (self._resume_ms if resumed else 0.0)
        slowness = ms / expected
        if self._level:
            self._own[rung].append(slowness / statistics.median(self._level))
            self._ran.add(rung)
        self._level.append(slowness / statistics.median(self._own[rung]))

    def costs(self) -> Costs:
        own = np.array([statistics.median(recent) for recent in self._own])
        drafted = sorted(self._ran - {0})
        untried = sorted(set(range(1, len(own))) - self._ran)
        if drafted:
            own[untried] = np.median(own[drafted])
        return _whole_steps(self._measured * own, self._resume_ms)


def _step_ms(timed: Sequence["_Time"]) -> float:
    """Milliseconds of a step: the quick ones among the times."""
    return float(np.quantile([each.step_ms for each in timed], QUICK))


def _whole_steps(ms: np.ndarray, resume_ms: float) -> Costs:
    """Fewer drafts never cost more: what says so is what else the machine did, which can only add to a time."""
    return _costs(np.zeros(len(ms)), np.minimum.accumulate(ms[::-1])[::-1], resume_ms)


def _costs(draft_ms: np.ndarray, verify_ms: np.ndarray, resume_ms: float) -> Costs:
    return Costs(*(np.asarray(part, np.float32) for part in (draft_ms, verify_ms, resume_ms)))


def _times(run: Run, dispatches: dict[Choice, int]) -> dict[Choice, list["_Time"]]:
    """Times of each choice over rounds in which they take turns: those between two dispatches that the host reads while
    the next is on its way, so what begins and ends a run is in none of them. `dispatches` says how many times
    FEWEST_DISPATCHES of each are timed together."""
    times: dict[Choice, list[_Time]] = {choice: [] for choice in dispatches}
    began, rounds = time.perf_counter(), 0
    while not _enough(rounds - 1, began, ENOUGH_S):  # the first does not count
        for choice, number in dispatches.items():
            timed = _time(run(choice), FEWEST_DISPATCHES * number)
            if rounds:
                times[choice].append(timed)
        rounds += 1
    return times


def _enough(rounds: int, began: float, enough_s: float) -> bool:
    """Whether so many rounds since then need no further one: enough of them, or after a while what there is. Where
    caches are large, a round takes as long as it takes to make them."""
    took_s = time.perf_counter() - began
    fewest = FEWEST_ROUNDS if took_s < TOO_LONG_S else 1
    return rounds >= MOST_ROUNDS or (rounds >= fewest and took_s > enough_s)


@dataclass(frozen=True)
class _Time:
    """What some dispatches took."""

    taken_ms: float
    steps: int
    verifying: int  # steps that verified a draft

    @property
    def step_ms(self) -> float:
        return self.taken_ms / self.steps


def _time(run: Steps, dispatches: int) -> _Time:
    """Of so many dispatches behind the first, fewer where the run ends before. A run that ends in its first dispatch is
    timed as a whole."""
    timed = _timed(run, dispatches + 1)
    counted = timed[1:] or timed
    return _Time(*map(sum, zip(*map(dataclasses.astuple, counted), strict=True)))


def _timed(run: Steps, most: int) -> list[_Time]:
    """The first dispatches in which a step ran, each from when the host knew of the one before it."""
    last = time.perf_counter()
    timed: list[_Time] = []
    for found, now in run:
        ran = np.any(found.num_accepted >= 0, axis=1)
        if np.any(ran):
            verifying = ran & np.any(found.num_verified > 0, axis=1)
            timed.append(_Time((now - last) * 1e3, int(np.sum(ran)), int(np.sum(verifying))))
        last = now
        if len(timed) == most:
            break
    run.close()
    return timed


def identity(target: Any, drafter: Any, config: SpeculationConfig, steps_per_dispatch: int) -> dict[str, Any]:
    """All that the costs depend on, as JSON: the shapes of both models and of the run, the machine, the versions."""
    leaves, tree = jax.tree.flatten((target, drafter))
    geometry = f"{tree} {[(leaf.shape, str(leaf.dtype)) for leaf in leaves]}"
    return {
        "schema": SCHEMA,
        "models": hashlib.sha256(geometry.encode()).hexdigest(),
        "ladder": list(config.ladder),
        "batch_size": config.batch_size,
        "capacity": 1 << (config.capacity - 1).bit_length(),  # about
        "sampling": "greedy" if config.sampling.greedy else "drafts" if config.sampling.draft_sampling else "target",
        **({} if config.sampling.synthetic_acceptance is None else {"synthetic": True}),
        "steps_per_dispatch": steps_per_dispatch,
        "kernels": kernels.in_words(),
        "device": device(),
        "cpu": cpu_model(),
        "num_threads": num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ("peagle", "jaxlib")},
    }


def directory() -> Path:
    """Where costs are kept."""
    return cache_directory("costs")


def typical(measured: Sequence[Costs]) -> Costs:
    """The median of each cost in plain steps of its own measurement, times the median plain step. A machine is now
    quicker, now slower: medians of milliseconds would set plain steps of one moment beside drafts of another."""
    plain_ms = [float(each.verify_ms[0]) for each in measured]

    def median(*each: Any) -> np.ndarray:
        relative = [np.asarray(ms) / plain for ms, plain in zip(each, plain_ms, strict=True)]
        return np.asarray(np.median(relative, axis=0) * np.median(plain_ms), np.float32)

    return Costs(*(median(*part) for part in zip(*(vars(each).values() for each in measured), strict=True)))


def load(known: dict[str, Any]) -> list[Costs]:
    """The costs that earlier runs measured for exactly this, MEASUREMENTS at most; none where there are none, or a file
    that is not as it should be."""
    shape = {"draft_ms": (len(known["ladder"]),), "verify_ms": (len(known["ladder"]),), "resume_ms": ()}
    try:
        kept = json.loads(_path(known).read_text(encoding="utf-8"))
        found = [{name: np.asarray(each[name], np.float32) for name in shape} for each in kept["measured"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    whole = all(
        each[name].shape == shape[name] and np.isfinite(each[name]).all() and each[name].min() >= 0
        for each in found
        for name in shape
    )
    if not whole or kept.get("identity") != known or any(each["verify_ms"].min() <= 0 for each in found):
        return []
    return [Costs(**each) for each in found[:MEASUREMENTS]]


def save(known: dict[str, Any], measured: Sequence[Costs]) -> bool:
    """Whether the costs could be kept for the next run."""
    kept = {
        "identity": known,
        "measured": [
            {name: np.round(np.asarray(ms, np.float64), 6).tolist() for name, ms in vars(each).items()}
            for each in measured
        ],
    }
    return keep(_path(known), (dumps(kept, indent=1) + "\n").encode())


def _path(known: dict[str, Any]) -> Path:
    return directory() / f"{hashlib.sha256(dumps(known, sort_keys=True).encode()).hexdigest()[:24]}.json"
