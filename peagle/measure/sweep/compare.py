"""Compare two runs on the same prompts: is a difference real?

Requests are paired, so the difficulty of prompts cancels out. A difference is real if its 95 % bootstrap interval
excludes zero, as one in twenty does by chance. Speed-ups are over plain decoding of the same run, so runs of other
machines or days can be compared. A difference of speed-ups must, besides, be beyond the spread of repeats: all repeats
of one run lie above all of the other.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from peagle.base.errors import InputError
from peagle.measure.estimates import Estimate, Statistic, estimate, ratio, ratio_of_ratios
from peagle.measure.sweep.figures import PLAIN_SECONDS, RATES, SECONDS, Pairing, pairings
from peagle.measure.sweep.plan import Variant, Workload
from peagle.measure.sweep.store import Folder

Pairs = Sequence[tuple[Pairing, Pairing]]  # a request in the first run and in the second


@dataclasses.dataclass(frozen=True)
class Change:
    """A figure in two runs."""

    first: float
    second: float
    difference: Estimate  # second - first
    repeats_apart: bool = True  # False: of a speed-up, the repeats of the two runs overlap

    @property
    def equal(self) -> bool:
        """Whether all requests have the same figure in both runs."""
        return self.difference.value == self.difference.low == self.difference.high == 0

    @property
    def real(self) -> bool:
        low, high = self.difference.low, self.difference.high
        return self.repeats_apart and low is not None and high is not None and (low > 0 or high < 0)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The changes of a variant in a workload. None: no request has the figure in both runs."""

    workload: Workload
    label: str
    num_requests: int
    speedup: Change | None
    acceptance_length: Change | None


def differences(first: Folder, second: Folder) -> list[Difference]:
    """Compare acceptance length and speed-up of each workload and variant of both runs, one request at a time.

    Variants are the same if K, draft vocabulary, window and drafter are; if each run has one drafter, these may differ.
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
    compared = [difference for difference in compared if difference.speedup or difference.acceptance_length]
    if not compared:
        raise InputError(f"{first.path} and {second.path} cannot be compared: they have no workload and K in common")
    return compared


def _check(first: Folder, second: Folder) -> None:
    plans = first.plan, second.plan

    def refuse(why: str, of_first: object, of_second: object) -> InputError:
        return InputError(f"{first.path} and {second.path} cannot be compared: {why} ({of_first} and {of_second})")

    targets = [plan.fingerprints["target"][:12] for plan in plans]
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
    speedup = _change(timed, lambda pairing: pairing.times.sum(axis=0)[list(RATES)], ratio_of_ratios)
    return Difference(
        workload,
        label,
        len(pairs),
        speedup and dataclasses.replace(speedup, repeats_apart=_repeats_apart(timed)),
        _change(drafted, _tokens_and_steps, ratio),
    )


def _change(
    pairs: Pairs, row: Callable[[Pairing], Sequence[float] | np.ndarray], statistic: Statistic
) -> Change | None:
    """Compute the change of a statistic; None if it is not defined. row: the columns of a request in a run."""
    table = np.array([[*row(first), *row(second)] for first, second in pairs], np.float64)

    def change(sums: np.ndarray) -> np.ndarray:
        first, second = np.split(sums, 2, axis=1)
        return statistic(second) - statistic(first)

    estimated = estimate(table, change, [first.request.row for first, _ in pairs])
    if estimated is None:
        return None
    first, second = (float(statistic(half)[0]) for half in np.split(table.sum(axis=0)[None], 2, axis=1))
    return Change(first, second, estimated)


def _tokens_and_steps(pairing: Pairing) -> tuple[float, float]:
    return float(pairing.counters.num_emitted), float(pairing.counters.num_steps)


def _repeats_apart(timed: Pairs) -> bool:
    """Test whether the speed-ups of all repeats of one run lie above those of the other.

    Resampling requests cannot show that a whole repeat was slow.
    """
    speedups = []
    for of_run in zip(*timed, strict=True):
        times = np.sum([pairing.times for pairing in of_run], axis=0)
        speedups.append(times[:, PLAIN_SECONDS] / times[:, SECONDS])
    first, second = speedups
    return bool(first.min() > second.max() or first.max() < second.min())
