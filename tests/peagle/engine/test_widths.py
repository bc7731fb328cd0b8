"""How many drafts are verified: pure functions of counts and times."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.auto.widths import (
    CALIBRATION_STEPS,
    EDGES,
    FIRST_PROFIT,
    HORIZON,
    LOSS_FRAC,
    MOST_PAUSE,
    NUM_BINS,
    CostTable,
    Learned,
    Pace,
    StepCosts,
    choose_drafts,
    choose_widths,
    gains_of,
)

K = 3


def costs_of(size: int, verify: list[float]) -> StepCosts:
    """Costs of a batch; drafting is free."""
    assert len(verify) == size * (K + 1) + 1
    return StepCosts(np.asarray(verify, np.float32), np.zeros((size * K + 1,), np.float32))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_other_choice_of_rows_is_worth_more(data: st.DataObject) -> None:
    """Against all choices of up to limits[b] drafts of two slots; times of passes are any numbers."""
    chances = st.lists(st.floats(0.01, 1.0), min_size=K, max_size=K)
    survival = np.cumprod([data.draw(chances) for _ in range(2)], axis=1).astype(np.float32)
    limits = data.draw(st.lists(st.integers(0, K), min_size=2, max_size=2))
    verify = data.draw(st.lists(st.floats(0.0, 4.0, width=32), min_size=2 * K + 3, max_size=2 * K + 3))
    rate = data.draw(st.floats(1.0, 2.0, width=32))
    costs = costs_of(2, verify)
    widths = choose_widths(
        jnp.asarray(survival), jnp.asarray(limits), jnp.asarray(2), costs, jnp.asarray(rate, jnp.float32)
    )

    def gain(choice: tuple[int, ...]) -> float:
        tokens = sum(float(survival[b, :width].sum()) for b, width in enumerate(choice))
        return tokens - rate * 2 * float(costs.verify[2 + sum(choice)])

    chosen = tuple(np.asarray(widths).tolist())
    assert all(width <= limit for width, limit in zip(chosen, limits, strict=True))
    best = max(map(gain, itertools.product(*(range(limit + 1) for limit in limits))))
    assert gain(chosen) == pytest.approx(best, abs=1e-4)


def test_without_measured_times_every_draft_is_verified() -> None:
    survival = jnp.asarray([[0.9, 0.5, 0.01]] * 2)
    for size, limits in ((1, [2]), (2, [3, 1])):
        costs = StepCosts.unknown(size, K)
        widths = choose_widths(survival[:size], jnp.asarray(limits), jnp.asarray(size), costs, jnp.ones(()))
        assert widths.tolist() == limits


def test_equal_drafts_are_taken_from_the_first_position_on() -> None:
    costs = costs_of(2, [0, 0, 1.0, 1.3, 1.6, 9, 9, 9, 9])
    widths = choose_widths(jnp.ones((2, K)), jnp.asarray([3, 3]), jnp.asarray(2), costs, jnp.ones(()))
    assert widths.tolist() == [2, 0]


def test_chances_are_those_that_were_counted() -> None:
    """By source, kind of choice, position and bin; a chance counts only after the drafts before it."""
    rng = np.random.default_rng(3)
    learned, tried, accepted = Learned.start(2, K), *np.zeros((2, 2, 2, K, NUM_BINS))
    low, high = (0.0, *EDGES), (*EDGES, 1.0)
    for _ in range(40):
        source, sampled = int(rng.integers(2)), rng.random(4) < 0.5
        bins = rng.integers(NUM_BINS, size=(4, K))
        confidence = np.asarray([[rng.uniform(low[n], high[n]) for n in row] for row in bins], np.float32)
        known, right = rng.random((4, K)) < 0.7, rng.random((4, K)) < 0.5
        of_source = (np.arange(2) == source)[None, :, None]
        both = (np.repeat(values[:, None], 2, axis=1) for values in (confidence, known, right))
        confidences, knowns, rights = map(jnp.asarray, both)
        learned = learned.count_drafts(jnp.asarray(sampled), confidences, knowns & of_source, rights)
        for row, place in itertools.product(range(4), range(K)):
            cell = source, int(sampled[row]), place, int(bins[row, place])
            tried[cell] += known[row, place]
            accepted[cell] += known[row, place] & right[row, place]
    begun = Learned.start(2, K)
    np.testing.assert_allclose(learned.tried, begun.tried + tried, rtol=1e-5)
    np.testing.assert_allclose(learned.accepted, begun.accepted + accepted, rtol=1e-5)
    confidence = np.asarray([[0.97, 0.3, 0.05]], np.float32)
    for sampled in (False, True):
        chances = (learned.accepted / learned.tried)[1, int(sampled)]
        cells = [chances[place, np.searchsorted(EDGES, confidence[0, place], side="right")] for place in range(K)]
        survival = learned.survival(1, jnp.asarray([sampled]), jnp.asarray(confidence))
        np.testing.assert_allclose(survival[0], np.cumprod(cells), rtol=1e-5)


def test_old_counts_are_forgotten() -> None:
    """After a change of the text, a few times the horizon later, the chance is the new text's."""
    learned, one = Learned.start(1, 1), jnp.ones((1, 1), bool)
    confidence, greedy = jnp.full((1, 1), 0.7), jnp.zeros((1,), bool)
    for right, chance in ((True, 1.0), (False, 0.0)):
        tried = jnp.full_like(learned.tried, HORIZON)
        learned = learned.replace(tried=tried, accepted=(1 - chance) * tried)  # type: ignore[attr-defined]
        for _ in range(40):
            learned = learned.count_drafts(
                jnp.tile(greedy, 64),
                jnp.tile(confidence, (64, 1))[:, None],
                jnp.tile(one, (64, 1))[:, None],
                jnp.full((64, 1, 1), right),
            )
        assert float(learned.survival(0, greedy, confidence)[0, 0]) == pytest.approx(chance, abs=0.02)
        assert float(jnp.max(learned.tried)) <= HORIZON


def test_recorded_counts_are_a_beginning_that_later_ones_outweigh() -> None:
    counts = tuple(tuple(tuple((1000.0, 900.0) for _ in range(NUM_BINS)) for _ in range(K + 2)) for _ in range(2))
    learned = Learned.start(2, K, counts)
    confidence = jnp.full((1, K), 0.05)
    greedy = jnp.zeros((1,), bool)
    np.testing.assert_allclose(learned.survival(0, greedy, confidence)[0], 0.85 ** np.arange(1, K + 1), atol=0.05)
    assert float(jnp.max(learned.tried)) < 100
    assert float(learned.survival(1, greedy, confidence)[0, 0]) < 0.1  # they are the first source's


def test_a_source_that_fails_here_is_trusted_less_and_recovers() -> None:
    pace, second = Pace.start(jnp.zeros((2,)), K, 2), jnp.asarray([[False, True]] * 2)
    expected, right = jnp.full((2, 2), 0.6), jnp.asarray([[True, True], [False, False]])
    for _ in range(20):
        pace = pace.record_first_drafts(expected, right, second)
    calibration = np.asarray(pace.calibration)
    assert calibration[0, 1] > 1 > 0.5 > calibration[1, 1]
    np.testing.assert_allclose(calibration[:, 0], 1)
    for _ in range(int(3 * CALIBRATION_STEPS)):
        pace = pace.record_first_drafts(expected, ~right, second)
    assert np.asarray(pace.calibration)[1, 1] > 1


def test_a_slots_gains_follow_its_drafts_and_drift_back_to_those_of_all_of_its_kind() -> None:
    learned, pace = Learned.start(1, K), Pace.start(jnp.zeros((2,)), K, 1)
    active, sampled = jnp.ones((2,), bool), jnp.asarray([False, True])
    gains = jnp.asarray([[0.9, 0.8, 0.7], [0.0, 0.0, 0.0]])
    two = jnp.asarray([[True, True, False]] * 2)
    before = np.asarray(learned.gain_of(sampled))
    assert (np.diff(before) < 0).all()
    for _ in range(12):
        pace = pace.record_steps(active, gains, two, learned.gain_of(sampled))
    np.testing.assert_allclose(pace.gain[:, :2], gains[:, :2], atol=0.02)
    np.testing.assert_allclose(pace.gain[:, 2], before[:, 2], atol=1e-6)  # nothing was drafted there
    for _ in range(400):
        pace = pace.record_steps(active, gains, jnp.zeros_like(two), learned.gain_of(sampled))
    np.testing.assert_allclose(pace.gain, before, rtol=0.02)
    for _ in range(200):
        learned = learned.update_gain(sampled, gains, two)
    np.testing.assert_allclose(learned.gain_of(sampled)[:, :2], gains[:, :2], atol=0.02)
    assert abs(float(learned.gain[0, 2]) - before[0, 2]) < 1e-3


def test_gains_begin_with_the_recorded_acceptance_of_each_kind() -> None:
    def counts(*accepted: float) -> tuple[tuple[tuple[float, float], ...], ...]:
        return tuple(((10.0, 10 * chance), *[(0.0, 0.0)] * (NUM_BINS - 1)) for chance in accepted)

    nothing = tuple(((0.0, 0.0),) * NUM_BINS for _ in range(2))
    unknown = Learned.start(1, K).gain
    gain = Learned.start(1, K, (counts(0.5, 0.8), nothing)).gain
    np.testing.assert_allclose(gain, [[0.5, 0.4, 0.4 * unknown[0, 0]], unknown[1]], rtol=1e-5)


def test_tries_that_do_not_pay_are_so_rare_that_they_lose_a_small_share_of_the_time() -> None:
    """Slot 1 did not try. A slot that begins has the profit of the requests of its kind."""
    learned, pace = Learned.start(1, K), Pace.start(jnp.full((2,), FIRST_PROFIT), K, 1)
    tried, sampled = jnp.asarray([True, False]), jnp.asarray([True, False])
    assert pace.pauses.tolist() == [0, 0]
    for _ in range(200):
        pace, learned = (
            pace.record_try(tried, jnp.asarray(-0.3)),
            learned.update_profit(sampled, tried, jnp.asarray(-0.3)),
        )
    np.testing.assert_allclose(pace.profit, [-0.3, FIRST_PROFIT], rtol=1e-3)
    assert 0.3 / (int(pace.pauses[0]) + 1) == pytest.approx(LOSS_FRAC, rel=0.1)
    assert pace.pauses[1] == 0
    np.testing.assert_allclose(learned.profit, [FIRST_PROFIT, -0.3], rtol=1e-3)
    assert Pace.start(learned.profit, K, 1).pauses.tolist() == [0, int(pace.pauses[0])]
    assert Pace.start(jnp.asarray([-9.0]), K, 1).pauses.tolist() == [MOST_PAUSE]
    for _ in range(3):
        pace = pace.record_try(tried, jnp.asarray(2.0))
    assert pace.pauses[0] == 0


def test_gains_are_survivals_beyond_the_price_of_a_row() -> None:
    costs = costs_of(1, [0, 1.0, 1.2, 1.4, 1.6])
    survival = jnp.asarray([[0.9, 0.5, 0.1]])
    for limit, expected in ((3, [0.6, 0.2, 0.0]), (1, [0.6, 0.0, 0.0])):
        gains = gains_of(survival, jnp.asarray([limit]), costs, jnp.asarray(1), jnp.asarray(1.5))
        np.testing.assert_allclose(gains, [expected], atol=1e-6)


def test_a_slot_drafts_as_many_as_are_worth_the_pass() -> None:
    """All, where one pass makes all; few, where every draft takes a pass; none, where they are worth less."""
    gains = jnp.asarray([[0.8, 0.5, 0.3], [0.8, 0.5, 0.3], [0.1, 0.1, 0.1]])
    limits, active, rate = jnp.asarray([3, 2, 3]), jnp.asarray(1), jnp.ones(())
    free = np.zeros((3 * (K + 1) + 1,), np.float32)
    for draft, expected in (
        ([0, 0.6, 0.6, 0.6], [3, 2, 0]),
        ([0, 0.4, 0.8, 1.2], [2, 2, 0]),
        ([0, 2, 2, 2], [0, 0, 0]),
    ):
        times = np.pad(np.asarray(draft, np.float32), (0, 6), mode="edge")
        chosen = choose_drafts(gains, limits, active, StepCosts(free, times), rate)
        assert chosen.tolist() == expected
    assert choose_drafts(gains, limits, active, StepCosts.unknown(3, K), rate).tolist() == [3, 2, 3]


def test_times_between_measured_ones_are_interpolated() -> None:
    table = CostTable(
        {1: ((1, 1.0), (2, 1.2), (4, 1.8)), 4: ((4, 1.0), (8, 2.0), (16, 3.0))},
        {1: ((0, 0.1), (1, 0.2), (3, 0.3)), 4: ((0, 0.0), (4, 0.4), (12, 0.5))},
    )
    alone = table.at(1, 1, K)
    np.testing.assert_allclose(alone.verify[1:], [1.0, 1.2, 1.5, 1.8], rtol=1e-6)
    np.testing.assert_allclose(alone.draft, [0.1, 0.2, 0.25, 0.3], rtol=1e-6)
    assert float(alone.of_pass(jnp.asarray(2))) == pytest.approx(0.15)
    six = table.at(6, 8, K)  # by the entry of 4, scaled
    assert float(six.verify[12]) == pytest.approx(2.0)
    assert float(six.draft[6]) == pytest.approx(0.4)
    assert CostTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    assert table.can_gain(1, K)
    assert not CostTable({1: ((1, 1.0), (4, 4.5))}, {1: ((0, 0.0), (3, 0.1))}).can_gain(1, K)
    # a drafter that is too dear: lookups may be enough
    assert CostTable({1: ((1, 1.0), (4, 3.5))}, {1: ((0, 0.0), (3, 9.0))}).can_gain(1, K)
    for broken in ({}, {"verify": {"1": [[1, 1.0]]}, "draft": {}}, {"verify": {}, "draft": {}}):
        with pytest.raises((ValueError, KeyError)):
            CostTable.from_json(broken)
