"""Figures of many requests, with 95 % bootstrap intervals over groups of them, such as conversations."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from peagle.measure.metrics import figure_text

RESAMPLES = 2000
FEWEST = 8  # groups that an interval needs

Statistic = Callable[[np.ndarray], np.ndarray]  # column sums of R tables [R, c] -> [R]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval, which needs FEWEST groups."""

    value: float
    low: float | None = None
    high: float | None = None


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
        return _with_interval(value, statistic(_draw_counts(len(names)) @ sums))


def _with_interval(value: float, draws: np.ndarray) -> Estimate:
    if np.isinf(draws).any():  # a draw's denominator is zero
        return Estimate(value)
    low, high = np.nanquantile(draws, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def estimate_median(values: Sequence[float], groups: Sequence[int]) -> Estimate | None:
    """Estimate the median of values; groups[i] is the group of value i. None without values."""
    if not values:
        return None
    names, group_of = np.unique(groups, return_inverse=True)
    if len(names) < FEWEST:
        return Estimate(float(np.median(values)))
    order = np.argsort(values)
    ordered, weights = np.asarray(values)[order], _draw_counts(len(names))[:, group_of[order]].cumsum(axis=1)
    # a draw's median is the mean of its two middle values: the first with a cumulative weight of at least half, and the
    # first with more than half
    half = weights[:, -1:] / 2
    lower, upper = (weights >= half).argmax(axis=1), (weights > half).argmax(axis=1)
    return _with_interval(float(np.median(values)), (ordered[lower] + ordered[upper]) / 2)


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
