"""Figures with 95 % intervals: by bootstrap over groups such as conversations, by Student's t over rounds."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import stdtrit

from peagle.measure.metrics import figure_text

RESAMPLES = 2000
FEWEST = 8  # groups that an interval by bootstrap needs
FEWEST_ROUNDS = 3  # that an interval over rounds needs; of two it would be wider than any figure

Statistic = Callable[[np.ndarray], np.ndarray]  # column sums of R tables [R, c] -> [R]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; None: there were too few groups or rounds for one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_not_1(self) -> bool:
        """Whether the interval of a ratio excludes 1."""
        return self.low is not None and self.high is not None and (self.low > 1 or self.high < 1)


def estimate_text(figure: Estimate | None, digits: int = 2) -> str:
    """Format a figure with its interval, as 1.19 (1.14..1.24); "-" if it is undefined."""
    if figure is None:
        return "-"
    value, low, high = (figure_text(end, f".{digits}f") for end in (figure.value, figure.low, figure.high))
    return value if figure.low is None else f"{value} ({low}..{high})"


def estimate(table: np.ndarray, statistic: Statistic, groups: Sequence[int] | None = None) -> Estimate | None:
    """Estimate a statistic of the column sums of a table [n, c]; None if it is not a number.

    groups[i] is the group of row i; resampling draws whole groups (None: single rows). Equal numbers of groups give
    equal draws. (scipy.stats.bootstrap knows no groups, and one draw without a denominator costs it the interval.)
    """
    if not len(table):
        return None
    names, group_of = np.unique(np.arange(len(table)) if groups is None else groups, return_inverse=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(table.sum(axis=0)[None])[0])
        if not np.isfinite(value):
            return None
        if len(names) < FEWEST:
            return Estimate(value)
        sums = np.zeros((len(names), table.shape[1]))
        np.add.at(sums, group_of, table)
        draws = statistic(_draw_counts(len(names)) @ sums)
    if np.isinf(draws).any():  # a draw's denominator is zero
        return Estimate(value)
    low, high = np.nanquantile(draws, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def over_rounds(rounds: Sequence[float], others: Sequence[float] = ()) -> tuple[float, float] | None:
    """Return the interval of the mean of positive figures, one a round, or of its ratio to the mean of `others`.

    By Welch's t of their logarithms. None for fewer than FEWEST_ROUNDS.
    """
    sides = [np.log(side) for side in ((rounds, others) if others else (rounds,))]
    if any(len(side) < FEWEST_ROUNDS for side in sides):
        return None
    variances = np.array([side.var(ddof=1) / len(side) for side in sides])
    middle, reach = sides[0].mean() - sum(side.mean() for side in sides[1:]), 0.0
    if variances.any():
        freedom = variances.sum() ** 2 / sum(variances**2 / [len(side) - 1 for side in sides])
        reach = float(stdtrit(freedom, 0.975)) * float(variances.sum()) ** 0.5
    return float(np.exp(middle - reach)), float(np.exp(middle + reach))


def widened(figure: Estimate, interval: tuple[float, float] | None) -> Estimate:
    """Widen a figure's interval to hold another one; it has none if either is missing."""
    if figure.low is None or figure.high is None or interval is None:
        return Estimate(figure.value)
    return Estimate(figure.value, min(figure.low, interval[0]), max(figure.high, interval[1]))


@functools.lru_cache(maxsize=32)
def _draw_counts(num_groups: int) -> np.ndarray:
    """Draw groups with replacement, and count how often each is drawn; [RESAMPLES, num_groups]."""
    picks = np.random.default_rng(0).integers(0, num_groups, (RESAMPLES, num_groups))
    counts = np.zeros((RESAMPLES, num_groups))
    np.add.at(counts, (np.arange(RESAMPLES)[:, None], picks), 1)
    return counts


def ratio(sums: np.ndarray) -> np.ndarray:
    """Divide column 0 by column 1."""
    return sums[:, 0] / sums[:, 1]


def ratio_of_ratios(sums: np.ndarray) -> np.ndarray:
    """Divide column 0 / column 1 by column 2 / column 3."""
    return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
