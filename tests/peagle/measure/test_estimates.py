"""Intervals cover the true value, keep groups together, and hold the spread between rounds."""

import numpy as np
import pytest
from scipy.stats import ttest_ind

from peagle.measure.estimates import Estimate, estimate, over_rounds, ratio, widened


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


def test_intervals_over_rounds_cover_the_true_ratio() -> None:
    """Three noisy rounds a side, of runs as fast as each other: about 95 % of the intervals hold 1, as scipy's do."""
    rng, inside = np.random.default_rng(2), 0
    for _ in range(500):
        first, second = np.exp(rng.normal(0.3, 0.1, (2, 3)))
        low, high = over_rounds(second.tolist(), first.tolist()) or (0, 0)
        test = ttest_ind(np.log(second), np.log(first), equal_var=False).confidence_interval(0.95)
        assert (low, high) == pytest.approx(np.exp([test.low, test.high]))
        inside += low <= 1 <= high
    assert 465 <= inside <= 495


def test_rounds_by_hand() -> None:
    assert over_rounds([1.5, 1.5, 1.5]) == pytest.approx((1.5, 1.5))
    assert over_rounds([3.0, 3.0, 3.0], [2.0, 2.0, 2.0]) == pytest.approx((1.5, 1.5))
    assert over_rounds([1.5, 1.5]) is over_rounds([1.5, 1.5, 1.5], [2.0]) is None, "too few rounds"
    figure = Estimate(1.2, 1.1, 1.3)
    assert widened(figure, (1.15, 1.6)) == Estimate(1.2, 1.1, 1.6)
    assert widened(figure, None) == widened(Estimate(1.2), (1.0, 1.3)) == Estimate(1.2)
    assert [Estimate(1.2, *ends).is_not_1 for ends in ((1.1, 1.3), (0.9, 1.3), (0.7, 0.9), ())] == [
        True,
        False,
        True,
        False,
    ]
