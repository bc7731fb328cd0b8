"""Compare two runs on the same prompts: is a difference real?

Requests are paired, so the difficulty of prompts cancels out. Speed-ups are over plain decoding of the same run, so
runs of other machines or days can be compared. A difference is real if the 95 % interval of the second figure / the
first excludes 1. That of a speed-up holds both the interval over conversations (bootstrap) and the one over the rounds
of both runs (Welch's t): resampling requests cannot show that a whole round was slow.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from peagle.base.errors import InputError
from peagle.measure.estimates import Estimate, Statistic, estimate, over_rounds, ratio, ratio_of_ratios, widened
from peagle.measure.sweep.figures import RATES, Pairing, pairings, rounds_of
from peagle.measure.sweep.plan import TARGET, Variant, Workload
from peagle.measure.sweep.store import Folder

SPEEDUP, LENGTH = "speed-up", "acceptance length"
Pairs = Sequence[tuple[Pairing, Pairing]]  # a request in the first run and in the second


@dataclasses.dataclass(frozen=True)
class Change:
    """A figure in two runs."""

    first: float
    second: float
    ratio: Estimate  # second / first

    @property
    def verdict(self) -> str:
        """Whether the difference is real: yes, no, or too few (prompts or rounds to tell)."""
        return "too few" if self.ratio.low is None else "yes" if self.ratio.is_not_1 else "no"


@dataclasses.dataclass(frozen=True)
class Difference:
    """The changes of a variant's figures in a workload, of those that requests have in both runs."""

    workload: Workload
    label: str
    num_requests: int
    changes: Mapping[str, Change]  # by SPEEDUP, LENGTH


def differences(first: Folder, second: Folder) -> list[Difference]:
    """Compare acceptance length and speed-up of each workload and variant of both runs, one request at a time.

    Variants are the same if K, draft vocabulary and drafter are; if each run has one drafter, these may differ.
    Raises InputError for runs of another target, other prompts or another -n, or with nothing in common.
    """
    _check(first, second)
    any_drafter = len(first.plan.drafters) == len(second.plan.drafters) == 1
    in_first, in_second = (_by_variant(folder, any_drafter) for folder in (first, second))
    compared = [
        _difference(workload, label, [(requests[prompt], other[prompt]) for prompt in requests if prompt in other])
        for (workload, variant), (label, requests) in in_first.items()
        for _, other in [in_second.get((workload, variant), ("", {}))]
    ]
    compared = [difference for difference in compared if difference.changes]
    if not compared:
        raise InputError(f"{first.path} and {second.path} cannot be compared: they have no workload and K in common")
    return compared


def _check(first: Folder, second: Folder) -> None:
    plans = first.plan, second.plan

    def refuse(why: str, of_first: object, of_second: object) -> InputError:
        return InputError(f"{first.path} and {second.path} cannot be compared: {why} ({of_first} and {of_second})")

    targets = [plan.fingerprints[TARGET][:12] for plan in plans]
    if targets[0] != targets[1]:
        raise refuse("another target", *(f"{plan.target} {name}" for plan, name in zip(plans, targets, strict=True)))
    sets = [{source.name: source.sha256 for source in plan.sources} for plan in plans]
    shared = sets[0].keys() & sets[1].keys()
    if not shared or any(sets[0][name] != sets[1][name] for name in shared):
        raise refuse("other prompts", *map(", ".join, sets))
    if plans[0].max_new_tokens != plans[1].max_new_tokens:
        raise refuse("another cap of new tokens", *(plan.max_new_tokens for plan in plans))


def _by_variant(
    folder: Folder, any_drafter: bool
) -> dict[tuple[Workload, Variant], tuple[str, Mapping[tuple[int, ...], Pairing]]]:
    """Map each variant that speculates to (its label, its requests by prompt).

    The keys name a drafter by the fingerprint of its files, or not at all (any_drafter).
    """
    fingerprints = folder.plan.fingerprints

    def identified(variant: Variant) -> Variant:
        drafter = None if any_drafter else fingerprints.get(f"drafter {variant.drafter}", variant.drafter)
        return dataclasses.replace(variant, drafter=drafter)

    return {
        (workload, identified(variant)): (
            folder.plan.label(variant),
            {pairing.request.prompt_ids: pairing for pairing in requests},
        )
        for (workload, variant), requests in pairings(folder).items()
        if requests and variant.speculates and variant.concurrency is None
    }


def _difference(workload: Workload, label: str, pairs: Pairs) -> Difference:
    drafted = [pair for pair in pairs if all(pairing.counters.num_steps for pairing in pair)]
    timed = [pair for pair in pairs if all(pairing.times.any() for pairing in pair)]
    speedup = _change(timed, lambda pairing: pairing.times.sum(axis=0)[RATES], ratio_of_ratios)
    if speedup is not None:
        of_first, of_second = (ratio_of_ratios(rounds_of(run)[:, RATES]).tolist() for run in zip(*timed, strict=True))
        speedup = dataclasses.replace(speedup, ratio=widened(speedup.ratio, over_rounds(of_second, of_first)))
    changes = {SPEEDUP: speedup, LENGTH: _change(drafted, _tokens_and_steps, ratio)}
    return Difference(workload, label, len(pairs), {name: change for name, change in changes.items() if change})


def _change(
    pairs: Pairs, row: Callable[[Pairing], Sequence[float] | np.ndarray], statistic: Statistic
) -> Change | None:
    """Compute the change of a statistic; None if it is not defined. row: the columns of a request in a run."""
    table = np.array([[*row(first), *row(second)] for first, second in pairs], np.float64)

    def change(sums: np.ndarray) -> np.ndarray:
        first, second = np.split(sums, 2, axis=1)
        return statistic(second) / statistic(first)

    estimated = estimate(table, change, [first.request.row for first, _ in pairs])
    if estimated is None:
        return None
    first, second = (float(statistic(half)[0]) for half in np.split(table.sum(axis=0)[None], 2, axis=1))
    return Change(first, second, estimated)


def _tokens_and_steps(pairing: Pairing) -> tuple[float, float]:
    return float(pairing.counters.num_emitted), float(pairing.counters.num_steps)
