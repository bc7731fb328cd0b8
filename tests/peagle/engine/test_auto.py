"""What auto chooses and learns: pure functions of counts and times."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.auto.choose import Choice, Drafts, choose_drafts, choose_widths, gains_of
from peagle.engine.auto.costs import CostTable, StepCosts
from peagle.engine.auto.learn import DRAFT_STEPS, learn, learn_from_plain_steps, update
from peagle.engine.auto.state import FIRST_PROFIT, LOSS_FRAC, MOST_PAUSE, AutoState, Averages, Slots, pause_after
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


def averages_of(auto: AutoState, **values: object) -> Averages:
    """Values of the slots: those named, the state's own for others."""
    shapes = auto.slots
    return shapes.replace(**{n: jnp.broadcast_to(jnp.asarray(v), getattr(shapes, n).shape) for n, v in values.items()})


def nothing_known(auto: AutoState, **known: object) -> Averages:
    none = jax.tree.map(lambda average: jnp.zeros(average.shape, bool), auto.slots)
    return none.replace(**{n: jnp.broadcast_to(jnp.asarray(v), getattr(none, n).shape) for n, v in known.items()})


@functools.partial(jax.jit, static_argnames="times")
def taught(auto: AutoState, slots: Slots, times: int, values: dict[str, object], known: dict[str, object]) -> AutoState:
    """Learn these values, where they are known, so many times."""

    def once(_: int, auto: AutoState) -> AutoState:
        return update(auto, slots, averages_of(auto, **values), nothing_known(auto, **known), 1)

    return jax.lax.fori_loop(0, times, once, auto)


run_choose_widths = jax.jit(choose_widths)


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
    widths = run_choose_widths(jnp.asarray(survival), jnp.asarray(limits), slots_of(2, costs, rate))

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


def test_a_drafts_chance_is_its_confidence_times_how_often_such_drafts_were_right() -> None:
    """Of source 1 in slot 0, first drafts are right half as often as they claim, and others are not known."""
    auto, slots = AutoState.start(2, K, 2), slots_of(2)
    draft = DraftOutput(jnp.zeros((2, K), jnp.int32), confidence=jnp.asarray([[0.8, 0.5, 0.9]] * 2))
    limits = jnp.full((2,), K)
    survival = Drafts.of(auto, slots, 1, draft, limits).survival
    np.testing.assert_allclose(survival, [np.cumprod([0.8, 0.5, 0.9])] * 2, rtol=1e-5)
    known = jnp.zeros((2, 2, K), bool).at[0, 1, 0].set(True)
    values = {"right": 0.4, "confidence": 0.8}
    auto = taught(auto, slots, int(8 * DRAFT_STEPS), values, {"right": known, "confidence": known})
    survival = Drafts.of(auto, slots, 1, draft, limits).survival
    np.testing.assert_allclose(survival, np.cumprod([[0.4, 0.5, 0.9], [0.8, 0.5, 0.9]], axis=1), rtol=1e-2)
    np.testing.assert_allclose(Drafts.of(auto, slots, 0, draft, limits).survival[0], survival[1], rtol=1e-2)
    begun = auto.entered(jnp.asarray([False, True]))  # as other greedy requests; nothing is known of sampled ones
    first = Drafts.of(begun, slots, 1, draft, limits).survival[:, 0]
    assert 0.4 <= float(first[0]) < 0.5
    assert float(first[1]) == pytest.approx(0.8)


def test_a_draft_counts_where_its_token_is_known_and_all_before_it_were_right() -> None:
    """Whether it was verified or not: here one draft is verified, which is right, and the next token is known."""
    auto, slots = AutoState.start(1, K, 2), slots_of(1)
    ids = jnp.asarray([[[5, 6, 7], [4, 6, 7]]])  # of both sources; the tokens are 5, 6
    num, confidence = jnp.asarray([[K, K]]), jnp.full((1, 2, K), 0.5).at[0, 1, 0].set(0.3)
    sources = Drafts(ids, confidence, num, jnp.zeros((1, 2, K)), jnp.zeros((1, 2, K)))
    choice = Choice(jnp.asarray([1]), ids[:, 0], num[:, 0], jnp.asarray([0]), sources, jnp.float32(0))
    after = learn(auto, slots, choice, jnp.asarray([1]), jnp.asarray([1]), jnp.asarray([[5, 6]]))
    rose = np.sign(np.asarray(after.slots.right - auto.slots.right))[0]
    assert rose.tolist() == [[1, 1, 0], [-1, 0, 0]]
    without_match = sources.replace(confidence=confidence.at[0, 1].set(0.0))
    after = learn(auto, slots, choice.replace(sources=without_match), *map(jnp.asarray, ([1], [1], [[5, 6]])))
    np.testing.assert_array_equal(after.slots.right[0, 1], auto.slots.right[0, 1])


def test_a_confidence_that_is_not_finite_teaches_nothing() -> None:
    auto, slots = AutoState.start(1, K, 1), slots_of(1, costs_of(1, [0, 1.0, 1.2, 1.4, 1.6]))
    draft = DraftOutput(jnp.ones((1, K), jnp.int32), confidence=jnp.asarray([[jnp.nan, 0.5, jnp.inf]]))
    drafts = Drafts.of(auto, slots, 0, draft, jnp.asarray([K]))
    sources = jax.tree.map(lambda leaf: leaf[:, None], drafts)
    choice = Choice(jnp.asarray([K]), drafts.token_ids, drafts.num, jnp.asarray([0]), sources, jnp.float32(0))
    after = learn(auto, slots, choice, jnp.asarray([K]), jnp.asarray([K]), jnp.ones((1, K + 1), jnp.int32))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_gains_follow_a_slots_drafts_and_drift_back_without_them() -> None:
    """Slot 0 is greedy, slot 1 sampled; the third position is never drafted."""
    begun, slots = AutoState.start(2, K, 1), slots_of(2, sampled=(False, True))
    gains, two = jnp.asarray([[0.9, 0.8, 0.7], [0.0, 0.0, 0.0]]), jnp.asarray([[True, True, False]] * 2)
    auto, before = taught(begun, slots, 400, {"gains": gains}, {"gains": two}), np.asarray(begun.slots.gains)
    for averages in (auto.slots, auto.kinds):
        np.testing.assert_allclose(averages.gains[:, :2], gains[:, :2], atol=0.02)
        np.testing.assert_allclose(averages.gains[:, 2], before[:, 2], atol=1e-3)
    for _ in range(40):
        auto = learn_from_plain_steps(auto, slots, jnp.asarray(32))
    np.testing.assert_allclose(auto.slots.gains, before, rtol=0.02)


def test_tries_that_do_not_pay_are_so_rare_that_they_lose_a_small_share_of_the_time() -> None:
    """A slot that begins has the profit of the requests of its kind; slot 1 did not try."""
    sampled = jnp.asarray([True, False])
    auto, slots = AutoState.start(2, K, 1), slots_of(2, sampled=(True, False))
    assert auto.pauses.tolist() == [0, 0]
    auto = taught(auto, slots, 400, {"profit": -0.3}, {"profit": sampled})
    np.testing.assert_allclose(auto.slots.profit, [-0.3, FIRST_PROFIT], rtol=1e-3)
    pauses = auto.entered(sampled).pauses
    assert 0.3 / (int(pauses[0]) + 1) == pytest.approx(LOSS_FRAC, rel=0.1)
    assert pauses[1] == 0
    assert pause_after(jnp.asarray([-9.0, 2.0])).tolist() == [MOST_PAUSE, 0]
    waited = learn_from_plain_steps(dataclasses.replace(auto, pauses=pauses), slots, jnp.asarray(5))
    assert waited.pauses.tolist() == [int(pauses[0]) - 5, 0]


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
    dear = CostTable({1: ((1, 1.0), (4, 3.5))}, {1: ((0, 0.0), (3, 9.0))})
    assert dear.can_gain(1, K)
    assert not dear.can_gain(1, K, by_drafter=True)
    for broken in ({}, {"verify": {"1": [[1, 1.0]]}, "draft": {}}, {"verify": {}, "draft": {}}):
        with pytest.raises((ValueError, KeyError)):
            CostTable.from_json(broken)
