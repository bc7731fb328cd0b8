"""Compare two runs on the same prompts: is a difference real?

Requests are paired, so the difficulty of prompts cancels out. A difference is real if the 95 % bootstrap interval of
the paired difference excludes zero; of many differences one in twenty does so by chance. Speed-ups are over plain
decoding of the same run, so runs of other machines or days can be compared; a difference of speed-ups is real only if,
besides, all repeats of one run lie beyond all of the other.
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
    """A figure of the second run minus that of the first, for one workload and variant."""

    setting: Setting
    label: str
    figure: str
    first: float
    second: float
    difference: Estimate
    num_requests: int
    repeats_apart: bool = True  # of speed-ups: all repeats of one run lie beyond all of the other
    factor: Estimate | None = None  # of speed-ups: that of the second run over that of the first

    @property
    def equal(self) -> bool:
        """Whether every request has the same figure in both runs."""
        return self.difference.value == self.difference.low == self.difference.high == 0

    @property
    def real(self) -> bool:
        low, high = self.difference.low, self.difference.high
        return self.repeats_apart and low is not None and high is not None and (low > 0 or high < 0)


Key = tuple[Setting, Arm]  # identifies a variant in both runs; its drafter by its files


def differences(first: Folder, second: Folder) -> list[Difference]:
    """Compare acceptance length and pooled speed-up for each workload and variant of both runs.

    Variants are the same if K, draft vocabulary and drafter are; if each run has one drafter, it may differ. Raises
    InputError for runs of another target, other prompts or another cap of tokens, or with nothing in common.
    """
    _check(first, second)
    any_drafter = len(first.plan.drafters) == len(second.plan.drafters) == 1
    left, right = (_by_arm(folder, any_drafter) for folder in (first, second))
    found = [
        difference
        for key, (label, some) in left.items()
        if key in right
        for difference in _differences(key[0], label, some, right[key][1])
    ]
    if not found:
        raise InputError(f"{first.path} and {second.path} cannot be compared: they have no workload and K in common")
    return found


def _check(first: Folder, second: Folder) -> None:
    one, two = first.plan, second.plan

    def refuse(why: str, of_one: object, of_two: object) -> InputError:
        return InputError(f"{first.path} and {second.path} cannot be compared: {why} ({of_one} and {of_two})")

    targets = [plan.fingerprints["target"][:12] for plan in (one, two)]
    if targets[0] != targets[1]:
        raise refuse("another target", f"{one.target} {targets[0]}", f"{two.target} {targets[1]}")
    sets = [{source.name: source.sha256 for source in plan.sources} for plan in (one, two)]
    shared = sets[0].keys() & sets[1].keys()
    if not shared or any(sets[0][name] != sets[1][name] for name in shared):
        raise refuse("other prompts", ", ".join(sets[0]), ", ".join(sets[1]))
    if one.max_new_tokens != two.max_new_tokens:
        raise refuse("another cap of new tokens", one.max_new_tokens, two.max_new_tokens)


ByPrompt = Mapping[tuple[int, ...], Pairing]


def _by_arm(folder: Folder, any_drafter: bool) -> dict[Key, tuple[str, ByPrompt]]:
    """Map each variant that speculates to (its label, its requests by prompt)."""
    prints = folder.plan.fingerprints

    def known(arm: Arm) -> Arm:
        return dataclasses.replace(
            arm, drafter=None if any_drafter else prints.get(f"drafter {arm.drafter}", arm.drafter)
        )

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
    left: ByPrompt,
    right: ByPrompt,
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

        def minus(sums: np.ndarray, statistic: Statistic = statistic, half: int = half) -> np.ndarray:
            return statistic(sums[:, half:]) - statistic(sums[:, :half])

        def over(sums: np.ndarray, statistic: Statistic = statistic, half: int = half) -> np.ndarray:
            return statistic(sums[:, half:]) / statistic(sums[:, :half])

        sums, conversations = table.sum(axis=0)[None], [a.asked.row for a, _ in pairs]
        one, two = (float(statistic(part)[0]) for part in (sums[:, :half], sums[:, half:]))
        timing = figure == "speed-up"
        apart = not timing or _repeats_apart(timed)
        factor = estimate(table, over, conversations) if timing else None
        if (found := estimate(table, minus, conversations)) is not None:
            yield Difference(setting, label, figure, one, two, found, len(pairs), apart, factor)


def _length(each: Pairing) -> tuple[float, float]:
    """Return (tokens, steps)."""
    counters = each.counters
    return float(counters.num_accepted + counters.num_steps), float(counters.num_steps)


def _repeats_apart(timed: Sequence[tuple[Pairing, Pairing]]) -> bool:
    """Test whether the speed-ups of all repeats of one run lie beyond those of the other.

    A whole repeat may be slow, which resampling requests cannot show.
    """
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
