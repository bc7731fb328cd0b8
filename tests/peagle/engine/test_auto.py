"""What auto chooses and learns: pure functions of counts and times."""

import dataclasses
import itertools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.auto.choose import Drafts, choose_drafts, choose_widths, gains_of
from peagle.engine.auto.costs import CostTable, StepCosts
from peagle.engine.auto.learn import CALIBRATION_STEPS, HORIZON, count_drafts, update_gains, update_profit
from peagle.engine.auto.state import EDGES, FIRST_PROFIT, LOSS_FRAC, MOST_PAUSE, NUM_BINS, AutoState, Slots
from peagle.ops.messages import DraftOutput

K = 3


def costs_of(size: int, verify: list[float]) -> StepCosts:
    """Costs of a batch; drafting is free."""
    assert len(verify) == size * (K + 1) + 1
    return StepCosts(np.asarray(verify, np.float32), np.zeros((size * K + 1,), np.float32))


def slots_of(active: int, costs: StepCosts | None = None, rate: float = 1.0, sampled: Sequence[bool] = ()) -> Slots:
    """Slots of which all are active, greedy unless named."""
    kinds = jnp.asarray(sampled or [False] * active)
    return Slots(jnp.ones((active,), bool), kinds, costs or StepCosts.unknown(active, K), jnp.float32(rate))


def survival_of(auto: AutoState, source: int, sampled: jax.Array, confidence: jax.Array) -> jax.Array:
    """The survival of drafts by the counts, in slots that begin."""
    slots = Slots(jnp.ones_like(sampled), sampled, StepCosts.unknown(len(sampled), K), 1.0)
    draft = DraftOutput(jnp.zeros(confidence.shape, jnp.int32), confidence=confidence)
    auto = auto.entered(sampled)
    return Drafts.of(auto, slots, source, draft, jnp.full(sampled.shape, confidence.shape[1])).survival


def drafts_of(confidence: jax.Array, expected: jax.Array | None = None) -> Drafts:
    """Drafts of all sources, of this confidence [B, source, K]."""
    none = jnp.zeros(confidence.shape)
    expected = none[..., 0] if expected is None else expected
    return Drafts(none, confidence, none[..., 0], expected, none, none)


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
    widths = choose_widths(jnp.asarray(survival), jnp.asarray(limits), slots_of(2, costs, rate))

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
        widths = choose_widths(survival[:size], jnp.asarray(limits), slots_of(size))
        assert widths.tolist() == limits


def test_equal_drafts_are_taken_from_the_first_position_on() -> None:
    costs = costs_of(2, [0, 0, 1.0, 1.3, 1.6, 9, 9, 9, 9])
    widths = choose_widths(jnp.ones((2, K)), jnp.asarray([3, 3]), slots_of(2, costs))
    assert widths.tolist() == [2, 0]


def test_chances_are_those_that_were_counted() -> None:
    """By source, kind of choice, position and bin; a chance counts only after the drafts before it."""
    rng = np.random.default_rng(3)
    auto, tried, accepted = AutoState.start(4, K, 2), *np.zeros((2, 2, 2, K, NUM_BINS))
    low, high = (0.0, *EDGES), (*EDGES, 1.0)
    for _ in range(40):
        source, sampled = int(rng.integers(2)), rng.random(4) < 0.5
        bins = rng.integers(NUM_BINS, size=(4, K))
        confidence = np.asarray([[rng.uniform(low[n], high[n]) for n in row] for row in bins], np.float32)
        known, right = rng.random((4, K)) < 0.7, rng.random((4, K)) < 0.5
        of_source = (np.arange(2) == source)[None, :, None]
        both = (np.repeat(values[:, None], 2, axis=1) for values in (confidence, known, right))
        confidences, knowns, rights = map(jnp.asarray, both)
        auto = count_drafts(auto, jnp.asarray(sampled), drafts_of(confidences), knowns & of_source, rights)
        for row, place in itertools.product(range(4), range(K)):
            cell = source, int(sampled[row]), place, int(bins[row, place])
            counts = known[row, place] & right[row, :place].all()
            tried[cell] += counts
            accepted[cell] += counts & right[row, place]
    begun = AutoState.start(4, K, 2)
    np.testing.assert_allclose(auto.tried, begun.tried + tried, rtol=1e-5)
    np.testing.assert_allclose(auto.accepted, begun.accepted + accepted, rtol=1e-5)
    confidence = np.asarray([[0.97, 0.3, 0.05]], np.float32)
    for sampled in (False, True):
        chances = (auto.accepted / auto.tried)[1, int(sampled)]
        cells = [chances[place, np.searchsorted(EDGES, confidence[0, place], side="right")] for place in range(K)]
        survival = survival_of(auto, 1, jnp.asarray([sampled]), jnp.asarray(confidence))
        np.testing.assert_allclose(survival[0], np.cumprod(cells), rtol=1e-5)


def test_old_counts_are_forgotten() -> None:
    """After a change of the text, a few times the horizon later, the chance is the new text's."""
    auto, many = AutoState.start(64, 1, 1), jnp.ones((64, 1, 1), bool)
    confidence, greedy = jnp.full((64, 1, 1), 0.7), jnp.zeros((64,), bool)
    for right, chance in ((True, 1.0), (False, 0.0)):
        tried = jnp.full_like(auto.tried, HORIZON)
        auto = dataclasses.replace(auto, tried=tried, accepted=(1 - chance) * tried)
        for _ in range(40):
            auto = count_drafts(auto, greedy, drafts_of(confidence), many, many & right)
        survival = survival_of(auto, 0, greedy[:1], confidence[:1, 0])
        assert float(survival[0, 0]) == pytest.approx(chance, abs=0.02)
        assert float(jnp.max(auto.tried)) <= HORIZON


def test_recorded_counts_are_a_beginning_that_later_ones_outweigh() -> None:
    counts = tuple(tuple(tuple((1000.0, 900.0) for _ in range(NUM_BINS)) for _ in range(K + 2)) for _ in range(2))
    auto, confidence, greedy = AutoState.start(1, K, 2, counts), jnp.full((1, K), 0.05), jnp.zeros((1,), bool)
    survival = survival_of(auto, 0, greedy, confidence)
    np.testing.assert_allclose(survival[0], 0.85 ** np.arange(1, K + 1), atol=0.05)
    assert float(jnp.max(auto.tried)) < 100
    assert float(survival_of(auto, 1, greedy, confidence)[0, 0]) < 0.1  # they are the first source's


def test_a_source_that_fails_here_is_trusted_less_and_recovers() -> None:
    auto, greedy = AutoState.start(2, K, 2), jnp.zeros((2,), bool)
    drafts = drafts_of(jnp.full((2, 2, K), 0.7), jnp.full((2, 2), 0.6))
    second = jnp.zeros((2, 2, K), bool).at[:, 1, 0].set(True)
    right = jnp.zeros((2, 2, K), bool).at[0, :, 0].set(True)
    for _ in range(20):
        auto = count_drafts(auto, greedy, drafts, second, right)
    calibration = np.asarray(auto.calibration)
    assert calibration[0, 1] > 1 > 0.5 > calibration[1, 1]
    np.testing.assert_allclose(calibration[:, 0], 1)
    for _ in range(int(3 * CALIBRATION_STEPS)):
        auto = count_drafts(auto, greedy, drafts, second, ~right)
    assert np.asarray(auto.calibration)[1, 1] > 1


def test_a_slots_gains_follow_its_drafts_and_drift_back_to_those_of_all_of_its_kind() -> None:
    """Slot 0 is greedy, slot 1 sampled. In the first part the averages of all are held still."""
    begun, slots = AutoState.start(2, K, 1), slots_of(2, sampled=(False, True))
    gains = jnp.asarray([[0.9, 0.8, 0.7], [0.0, 0.0, 0.0]])
    two = jnp.asarray([[True, True, False]] * 2)
    before, auto = np.asarray(begun.kind_gains), begun
    assert (np.diff(before) < 0).all()
    for drafted, num_steps in ((two, 12), (jnp.zeros_like(two), 400)):
        for _ in range(num_steps):
            auto = dataclasses.replace(update_gains(auto, slots, gains, drafted), kind_gains=begun.kind_gains)
        if drafted is two:
            np.testing.assert_allclose(auto.gains[:, :2], gains[:, :2], atol=0.02)
            np.testing.assert_allclose(auto.gains[:, 2], before[:, 2], atol=1e-3)  # nothing was drafted there
    np.testing.assert_allclose(auto.gains, before, rtol=0.02)
    for _ in range(200):
        auto = update_gains(auto, slots, gains, two)
    np.testing.assert_allclose(auto.kind_gains[:, :2], gains[:, :2], atol=0.02)
    assert abs(float(auto.kind_gains[0, 2]) - before[0, 2]) < 1e-3


def test_gains_begin_with_the_recorded_acceptance_of_each_kind() -> None:
    def counts(*accepted: float) -> tuple[tuple[tuple[float, float], ...], ...]:
        return tuple(((10.0, 10 * chance), *[(0.0, 0.0)] * (NUM_BINS - 1)) for chance in accepted)

    nothing = tuple(((0.0, 0.0),) * NUM_BINS for _ in range(2))
    unknown = AutoState.start(1, K, 1).kind_gains
    gains = AutoState.start(1, K, 1, (counts(0.5, 0.8), nothing)).kind_gains
    np.testing.assert_allclose(gains, [[0.5, 0.4, 0.4 * unknown[0, 0]], unknown[1]], rtol=1e-5)


def test_tries_that_do_not_pay_are_so_rare_that_they_lose_a_small_share_of_the_time() -> None:
    """Slot 1 did not try. A slot that begins has the profit of the requests of its kind."""
    auto, tried = AutoState.start(2, K, 1), jnp.asarray([True, False])
    sampled = tried
    assert auto.pauses.tolist() == [0, 0]
    for _ in range(200):
        auto = update_profit(auto, sampled, tried, jnp.asarray(-0.3))
    np.testing.assert_allclose(auto.profit, [-0.3, FIRST_PROFIT], rtol=1e-3)
    assert 0.3 / (int(auto.pauses[0]) + 1) == pytest.approx(LOSS_FRAC, rel=0.1)
    assert auto.pauses[1] == 0
    np.testing.assert_allclose(auto.kind_profit, [FIRST_PROFIT, -0.3], rtol=1e-3)
    assert auto.entered(~sampled).pauses.tolist() == [0, int(auto.pauses[0])]
    dear = dataclasses.replace(auto, kind_profit=jnp.asarray([-9.0, 0.0]))
    assert dear.entered(jnp.asarray([False])).pauses.tolist() == [MOST_PAUSE]
    for _ in range(3):
        auto = update_profit(auto, sampled, tried, jnp.asarray(2.0))
    assert auto.pauses[0] == 0


def test_gains_are_survivals_beyond_the_price_of_a_row() -> None:
    costs = costs_of(1, [0, 1.0, 1.2, 1.4, 1.6])
    survival = jnp.asarray([[0.9, 0.5, 0.1]])
    for limit, expected in ((3, [0.6, 0.2, 0.0]), (1, [0.6, 0.0, 0.0])):
        gains = gains_of(survival, jnp.asarray([limit]), slots_of(1, costs, 1.5))
        np.testing.assert_allclose(gains, [expected], atol=1e-6)


def test_a_slot_drafts_as_many_as_are_worth_the_pass() -> None:
    """All, where one pass makes all; few, where every draft takes a pass; none, where they are worth less."""
    gains = jnp.asarray([[0.8, 0.5, 0.3], [0.8, 0.5, 0.3], [0.1, 0.1, 0.1]])
    limits, slots = jnp.asarray([3, 2, 3]), slots_of(3)
    slots = dataclasses.replace(slots, active=jnp.asarray([True, False, False]))
    free = np.zeros((3 * (K + 1) + 1,), np.float32)
    for draft, expected in (
        ([0, 0.6, 0.6, 0.6], [3, 2, 0]),
        ([0, 0.4, 0.8, 1.2], [2, 2, 0]),
        ([0, 2, 2, 2], [0, 0, 0]),
    ):
        times = np.pad(np.asarray(draft, np.float32), (0, 6), mode="edge")
        chosen = choose_drafts(gains, limits, dataclasses.replace(slots, costs=StepCosts(free, times)))
        assert chosen.tolist() == expected
    assert choose_drafts(gains, limits, slots).tolist() == [3, 2, 3]


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
