"""Two runs on the same prompts: is a difference real?

Requests are paired, so what makes one prompt easier than another cancels out; a difference is called real where the
95 % bootstrap interval of the paired difference leaves out zero; of many differences one in twenty does so by chance.
Speed-ups are each over plain decoding of the same run, so that two machines, or two days, may be compared; one is real
only where, too, each repeat of the one run is beyond all of the other's.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from peagle.measure.sweep.figures import (
    Estimate,
    Pairing,
    Statistic,
    estimate,
    pairings,
    ratio,
    ratio_of_ratios,
    timed_sums,
)
from peagle.measure.sweep.folder import Folder
from peagle.measure.sweep.plan import Arm, Setting
from peagle.ops.errors import InputError

Row = Callable[[Pairing], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of the second run less the first, at one setting and arm."""

    setting: Setting
    label: str
    figure: str
    first: float
    second: float
    difference: Estimate
    num_requests: int

    repeats_apart: bool = True  # of a speed: each of the one run is beyond all of the other

    @property
    def equal(self) -> bool:
        """Whether every request gave the same."""
        return self.difference.value == self.difference.low == self.difference.high == 0

    @property
    def real(self) -> bool:
        low, high = self.difference.low, self.difference.high
        return self.repeats_apart and low is not None and high is not None and (low > 0 or high < 0)


Key = tuple[Setting, Arm]  # of an arm among those of two runs; its drafter is known by its files


def differences(first: Folder, second: Folder) -> list[Difference]:
    """For each setting and arm of both runs (the same K, draft vocabulary, window and drafter; where each run has one
    drafter, whatever it is): acceptance length, and pooled speed-up.

    Raises InputError where the runs cannot be compared: another target, other prompts, another cap of tokens, nothing
    in common.
    """
    _check(first, second)
    whatever = len(first.plan.drafters) == len(second.plan.drafters) == 1
    left, right = (_by_arm(folder, whatever) for folder in (first, second))
    found = [
        difference
        for where, (label, some) in left.items()
        if where in right
        for difference in _differences(where[0], label, some, right[where][1])
    ]
    if not found:
        raise InputError(f"{first.path} and {second.path} cannot be compared: they have no setting and K in common")
    return found


def _check(first: Folder, second: Folder) -> None:
    one, two = first.plan, second.plan

    def refuse(what: str, of_one: object, of_two: object) -> InputError:
        return InputError(f"{first.path} and {second.path} cannot be compared: {what} ({of_one} and {of_two})")

    targets = [plan.fingerprints["target"][:12] for plan in (one, two)]
    if targets[0] != targets[1]:
        raise refuse("another target", f"{one.target} {targets[0]}", f"{two.target} {targets[1]}")
    sets = [{source.name: source.sha256 for source in plan.sources} for plan in (one, two)]
    shared = sets[0].keys() & sets[1].keys()
    if not shared or any(sets[0][name] != sets[1][name] for name in shared):
        raise refuse("other prompts", ", ".join(sets[0]), ", ".join(sets[1]))
    if one.max_new_tokens != two.max_new_tokens:
        raise refuse("another cap of new tokens", one.max_new_tokens, two.max_new_tokens)


Asking = Mapping[tuple[int, ...], Pairing]  # requests by their prompts


def _by_arm(folder: Folder, whatever: bool) -> dict[Key, tuple[str, Asking]]:
    """(label, requests) of each arm that speculates."""
    prints = folder.plan.fingerprints

    def known(arm: Arm) -> Arm:
        return dataclasses.replace(arm, drafter=None if whatever else prints.get(f"drafter {arm.drafter}", arm.drafter))

    return {
        (setting, known(arm)): (
            folder.plan.label(arm),
            {each.asked.prompt_ids: each for each in some},
        )
        for (setting, arm), some in pairings(folder).items()
        if some and arm.speculates
    }


def _differences(
    setting: Setting,
    label: str,
    left: Asking,
    right: Asking,
) -> Iterator[Difference]:
    both = [(left[prompt], right[prompt]) for prompt in left if prompt in right]
    drafted = [(a, b) for a, b in both if a.counters.num_steps and b.counters.num_steps]
    timed = [(a, b) for a, b in both if a.timed and b.timed]
    kinds: tuple[tuple[str, Sequence[tuple[Pairing, Pairing]], Row, Statistic], ...] = (
        ("acceptance length", drafted, _length, ratio),
        ("speed-up", timed, timed_sums, ratio_of_ratios),
    )
    for figure, pairs, row, statistic in kinds:
        if not pairs:
            continue
        table = np.array([[*row(a), *row(b)] for a, b in pairs], np.float64)
        half = table.shape[1] // 2

        def less(sums: np.ndarray, statistic: Statistic = statistic, half: int = half) -> np.ndarray:
            return statistic(sums[:, half:]) - statistic(sums[:, :half])

        sums = table.sum(axis=0)[None]
        one, two = (float(statistic(part)[0]) for part in (sums[:, :half], sums[:, half:]))
        apart = figure != "speed-up" or _repeats_apart(timed)
        if (found := estimate(table, less, [a.asked.row for a, _ in pairs])) is not None:
            yield Difference(setting, label, figure, one, two, found, len(pairs), apart)


def _length(each: Pairing) -> tuple[float, float]:
    """Tokens and steps."""
    counters = each.counters
    return float(counters.num_accepted + counters.num_steps), float(counters.num_steps)


def _repeats_apart(timed: Sequence[tuple[Pairing, Pairing]]) -> bool:
    """Whether the speed-ups of one run's repeats all lie beyond those of the other's. What slows a whole repeat down is
    shared by its requests, so that resampling requests does not see it."""
    spans = []
    for side in (0, 1):
        repeats = zip(*(pair[side].timed for pair in timed), strict=False)
        speedups = [
            sum(plain.decode_s or 0.0 for _, plain in repeat) / sum(fast.decode_s or 0.0 for fast, _ in repeat)
            for repeat in repeats
        ]
        spans.append((min(speedups), max(speedups)))
    (low, high), (other_low, other_high) = spans
    return low > other_high or high < other_low
