"""Intervals cover the true value, keep groups together, and agree with numpy draw by draw."""

import numpy as np
import pytest

from peagle.measure.estimates import RESAMPLES, Estimate, estimate, estimate_median, ratio


def test_intervals_cover_the_true_value() -> None:
    """For 200 samples of a known distribution, about 95 % of the intervals hold the true value."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        steps = rng.integers(5, 50, 40)
        rate = estimate(np.stack([rng.binomial(steps, 0.6), steps], axis=1), ratio)
        assert rate is not None
        inside += (rate.low or 1) <= 0.6 <= (rate.high or 0)
    assert 180 <= inside <= 199
    assert estimate(np.zeros((0, 2)), ratio) is None
    assert estimate(np.zeros((3, 2)), ratio) is None  # 0 / 0
    assert estimate(np.array([[1.0, 1], [2, 1]]), ratio) == Estimate(1.5, None, None)  # too few for an interval


def test_rows_of_a_group_stay_together() -> None:
    """Ten groups of five equal rows give the interval of ten rows."""
    values = np.stack([np.random.default_rng(0).normal(0, 1, 10), np.ones(10)], axis=1)
    alone = estimate(values, ratio)
    grouped = estimate(np.repeat(values, 5, axis=0), ratio, [i // 5 for i in range(50)])
    apart = estimate(np.repeat(values, 5, axis=0), ratio)
    assert alone is not None
    assert grouped is not None
    assert apart is not None
    assert (grouped.low, grouped.high) == pytest.approx((alone.low, alone.high))
    assert (apart.high or 0) - (apart.low or 0) < 0.6 * ((alone.high or 0) - (alone.low or 0))


def test_medians_are_those_of_draws() -> None:
    """Against numpy's median, draw by draw, for conversations of one, two and three requests."""
    rng = np.random.default_rng(3)
    groups = [0, 1, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 8, 9]
    values = rng.normal(0, 1, len(groups)).round(1).tolist()  # some are equal
    members = [[value for value, mine in zip(values, groups, strict=True) if mine == group] for group in range(10)]
    picks = np.random.default_rng(0).integers(0, 10, (RESAMPLES, 10))
    draws = [np.median([value for group in pick for value in members[group]]) for pick in picks]
    median = estimate_median(values, groups)
    assert median is not None
    assert median.value == np.median(values)
    assert (median.low, median.high) == tuple(np.quantile(draws, (0.025, 0.975)))
    assert estimate_median([4.0, 1.0, 2.0, 1.0], [0, 1, 2, 3]) == Estimate(1.5, None, None)  # too few for an interval
    assert estimate_median([], []) is None
