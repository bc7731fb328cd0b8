"""Costs are measured with the loop's own programs, kept for exactly what they were measured for, and used."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle import costs, generate, policy
from peagle.autoregressive import NoDrafter
from peagle.config import SpeculationConfig
from peagle.generate import STEPS_THAT_SHARE_A_CHOICE, Engine, Request
from peagle.ngram import NGram
from peagle.policy import Costs
from peagle.state import StepOutput
from tests.peagle.toys import CONFIG, tiny_target

CONFIGURATION = SpeculationConfig(2, capacity=64, adaptive=True)
REQUEST = Request(0, (1, 2, 3, 4), 20)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is really measured takes as many rounds on every machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("ENOUGH_S", "ENOUGH_WHOLE_S"):
        monkeypatch.setattr(costs, name, 0.0)
    return tmp_path / "peagle" / "costs"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def plain_step(ms: float) -> Costs:
    """Drafts cost nothing, a step of any width this."""
    return Costs(jnp.zeros((3,)), jnp.full((3,), ms), jnp.zeros(()))


def engine(target) -> Engine:
    return Engine(target, NGram(), CONFIGURATION, stop_token_ids=(3,), steps_per_dispatch=2)


@pytest.mark.usefixtures("cache")
def test_the_first_runs_measure_them_and_the_next_take_the_median(target, monkeypatch: pytest.MonkeyPatch) -> None:
    first, told = engine(target), []
    first.warm_up([REQUEST], measuring=lambda: told.append("first"))
    assert told == ["first"]
    assert first.costs is not None
    assert first.costs_found is not None
    assert first.costs_found.startswith("measured in")
    draft, verify = np.asarray(first.costs.draft_ms), np.asarray(first.costs.verify_ms)
    assert draft.shape == verify.shape == (3,)
    assert draft[0] == 0 < verify[0]
    assert list(draft) == sorted(draft)
    assert list(verify) == sorted(verify)
    assert first.costs.resume_ms >= 0

    busy = [9.0, 2.0, 1.0, 3.0]  # what the other runs measure of a plain step
    monkeypatch.setattr(costs, "measure", lambda *_: plain_step(busy.pop()))
    known = costs.identity(target, NGram(), CONFIGURATION, 2)
    costs.save(known, [plain_step(0.5)])
    for seen in (1.75, 1.0, 1.5, 2.0):
        asked = engine(target)
        asked.warm_up([REQUEST])
        assert asked.costs is not None
        assert asked.costs.verify_ms[0] == seen
    last = engine(target)
    last.warm_up([REQUEST], measuring=lambda: told.append("last"))
    assert not busy
    assert told == ["first"]
    assert last.costs_found == "kept from earlier runs"
    assert last.costs is not None
    np.testing.assert_allclose(last.costs.verify_ms, 2.0)
    assert [e.token_ids for e in last.generate([REQUEST])]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("steps_per_dispatch", [2, STEPS_THAT_SHARE_A_CHOICE])
def test_nobody_holds_the_caches_while_the_next_are_made(target, monkeypatch, steps_per_dispatch: int) -> None:
    """They may be all the memory that is left."""
    warm = dataclasses.replace(engine(target), steps_per_dispatch=steps_per_dispatch)
    warm.plain = Engine(target, NoDrafter(), CONFIGURATION.plain, steps_per_dispatch=steps_per_dispatch)
    shape = target.init_cache(1, CONFIGURATION.capacity, CONFIGURATION.draft_places + 1)[-1].key.shape
    held = []
    start = Engine._start

    def counted(self: Engine, *arguments: Any) -> Any:
        held.append(sum(array.shape == shape for array in jax.live_arrays()))
        return start(self, *arguments)

    monkeypatch.setattr(Engine, "_start", counted)
    warm.warm_up([REQUEST])
    list(warm.generate([REQUEST]))
    assert len(held) > 5
    assert set(held) == {held[0]}


@pytest.mark.parametrize("took_s", [1.0, 59.0, 61.0])
def test_where_a_round_takes_long_one_is_enough(monkeypatch: pytest.MonkeyPatch, took_s: float) -> None:
    monkeypatch.setattr(costs.time, "perf_counter", lambda: took_s)
    assert not costs._enough(0, 0.0, 0.5)
    assert costs._enough(1, 0.0, 0.5) == (took_s > costs.TOO_LONG_S)
    assert costs._enough(costs.FEWEST_ROUNDS, 0.0, 0.5)
    assert not costs._enough(costs.FEWEST_ROUNDS, 0.0, 100.0)
    assert costs._enough(costs.MOST_ROUNDS, 0.0, 100.0)


def fake(steps: int, rung: int, seconds: float, clock: list[float]) -> costs.Steps:
    """Four dispatches of as many steps; every fourth step drafts; the first dispatch takes ten times as long."""
    for number in range(4):
        clock[0] += seconds * (10 if number == 0 else 1)
        verified = np.where(np.arange(steps) % 4 == 0, rung, 0)[:, None]
        ones = np.ones((steps, 1), np.int32)
        none = np.zeros((steps, 1, 2), np.int32)
        yield StepOutput(ones, 0 * ones, verified, ones < 0, none, none, none), clock[0]


def test_what_begins_and_ends_a_run_is_in_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps take 1 ms, drafting .5 a rung, verifying 2 a rung, the first step after a rest .25 more."""
    clock = [0.0]
    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[0])

    def run(choice: costs.Choice) -> costs.Steps:
        drafted, verified, *pause = choice
        ms = 1 + 0.5 * drafted + 2 * verified
        if pause:
            ms = 0.75 + 0.25 * (ms + 0.25)
        return fake(8, verified, 8e-3 * ms, clock)

    found = costs.measure((0, 1, 2), run, 8)
    np.testing.assert_allclose(found.draft_ms, [0, 0.5, 1.0], atol=1e-6)
    np.testing.assert_allclose(found.verify_ms, [1, 3, 5], atol=1e-6)
    np.testing.assert_allclose(found.resume_ms, 0.25, atol=1e-6)


@pytest.mark.parametrize("dispatches", [1, 2, 3, 4, 5, 9, 100])
def test_where_steps_share_a_choice_whole_steps_are_timed_in_turn(
    dispatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain steps take 1 ms, each draft 2 more; behind plain ones the first step takes 4 more, which a run of a single
    dispatch does not show. What begins a run takes 50 more, its last dispatch holds one step and takes 10 more; now and
    then the host is late for a dispatch by 3 ms, and the next one looks as much quicker."""
    clock, sent = [0.0], itertools.count()
    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[0])

    def run(rungs: Iterator[int]) -> costs.Steps:
        before, late = 0, 0.0
        clock[0] += 0.05 * (dispatches > 1)
        for number in range(dispatches):
            rung, ends = next(rungs), number > 1 and number == dispatches - 1
            ran = np.arange(8) < (1 if ends else 8)
            ms = int(ran.sum()) * (1 + 2 * rung) + 4 * (number > 0 and before == 0 < rung) + 10 * ends
            late, before = 3e-3 * (next(sent) % 11 == 5) - late, rung
            clock[0] += 1e-3 * ms + late
            ones = np.ones((8, 1), np.int32)
            none = np.zeros((8, 1, 2), np.int32)
            yield StepOutput(ones, np.where(ran, 0, -1)[:, None], rung * ones, ones < 0, none, none, none), clock[0]

    found = costs.measure_whole_steps((0, 1, 2), run)
    np.testing.assert_allclose(found.draft_ms, 0)
    np.testing.assert_allclose(found.verify_ms, [1, 3, 5], atol=1e-6)
    np.testing.assert_allclose(found.resume_ms, 4 * (dispatches > 1), atol=1e-6)


def test_a_number_of_drafts_that_stands_out_does_not_count() -> None:
    numbers, straight = (1, 2, 3, 4, 5, 7), np.array([2.0, 3.0, 4.0, 5.0, 6.0, 8.0])
    np.testing.assert_allclose(costs._smooth(numbers, straight), straight)
    for place in range(len(numbers)):
        off = straight.copy()
        off[place] *= 1.3
        np.testing.assert_allclose(costs._smooth(numbers, off), straight, rtol=0.05)
    np.testing.assert_allclose(costs._smooth((1, 2), off[:2]), off[:2], err_msg="two are a line")
    falling = costs._smooth((1, 2, 3), np.array([4.0, 3.0, 2.0]))
    assert falling.min() > 0


MEASURED = Costs(jnp.zeros((4,)), jnp.asarray([1.0, 4.0, 5.0, 6.0]), jnp.zeros(()))


def see_in_turn(running: costs.Running, plain_ms: float, drafted_ms: float) -> None:
    """Plain dispatches and those of two drafts until the past is forgotten; now and then, three times as slow."""
    for number in range(3 * costs.RECENT):
        running.see(0, 8, 8 * plain_ms * (3 if number % 7 == 2 else 1))
        running.see(2, 8, 8 * drafted_ms * (3 if number % 5 == 4 else 1))


def test_what_was_measured_in_a_busy_moment_is_corrected_by_what_dispatches_take() -> None:
    running = costs.Running(MEASURED)
    np.testing.assert_allclose(running.costs().verify_ms, MEASURED.verify_ms)
    see_in_turn(running, 1.0, 2.5)
    found = running.costs()
    np.testing.assert_allclose(found.verify_ms[:3:2], [1, 2.5])
    assert found.verify_ms[1] <= found.verify_ms[2] <= found.verify_ms[3] < 6, "others drift as those that ran"
    see_in_turn(running, 1.0, 7.0)
    found = running.costs()
    np.testing.assert_allclose(found.verify_ms[2] / found.verify_ms[0], 7.0)


def test_plain_steps_that_were_measured_too_dear_are_corrected_too() -> None:
    running = costs.Running(MEASURED)
    see_in_turn(running, 0.5, 5.0)
    found = running.costs()
    np.testing.assert_allclose(found.verify_ms[2] / found.verify_ms[0], 10.0)


@pytest.mark.parametrize("rungs", [(0,), (2,), (0, 2)])
def test_a_machine_that_is_slower_as_a_whole_changes_no_cost(rungs: tuple[int, ...]) -> None:
    running = costs.Running(MEASURED)
    for number in range(4 * costs.RECENT):
        rung = rungs[number % len(rungs)]
        running.see(rung, 8, 8 * float(MEASURED.verify_ms[rung]) * (1 + number // costs.RECENT))
    np.testing.assert_allclose(running.costs().verify_ms, MEASURED.verify_ms)


def test_what_resuming_takes_is_not_taken_for_what_steps_take() -> None:
    running = costs.Running(dataclasses.replace(MEASURED, resume_ms=jnp.asarray(9.0)))
    for _ in range(4 * costs.RECENT):
        running.see(0, 8, 8 * 1.0)
        running.see(2, 8, 8 * 5.0 + 9.0, resumed=True)
        running.see(2, 8, 8 * 5.0)
    found = running.costs()
    np.testing.assert_allclose(found.verify_ms, MEASURED.verify_ms)
    assert found.resume_ms == 9


@pytest.mark.usefixtures("cache")
def test_a_request_goes_by_what_those_before_it_took(target) -> None:
    engine = Engine(target, NGram(), CONFIGURATION, steps_per_dispatch=8)
    engine.warm_up([REQUEST])
    assert engine.costs is not None
    assert engine._running_costs is not None
    plain_ms = float(engine.costs.verify_ms[0])
    see_in_turn(engine._running_costs, plain_ms, 1e3 * plain_ms)
    list(engine.generate([REQUEST]))
    assert engine._outlooks is not None
    used = engine._outlooks[0].costs.verify_ms
    np.testing.assert_allclose(used[2] / used[0], 1e3, rtol=1e-5)

    given = Engine(target, NGram(), CONFIGURATION, steps_per_dispatch=8, costs=plain_step(1.0))
    list(given.generate([REQUEST]))
    assert given._outlooks is not None
    assert given._outlooks[1].costs.verify_ms[2] == 1.0, "what was given stays"


@pytest.mark.usefixtures("cache")
def test_dispatches_of_a_request_that_a_rest_outlasts_are_seen_too(target, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine(target, NoDrafter(), CONFIGURATION.plain, steps_per_dispatch=8)
    engine = Engine(target, NGram(), CONFIGURATION, steps_per_dispatch=8, plain=plain)
    request = dataclasses.replace(REQUEST, max_new_tokens=41)
    engine.warm_up([request])
    list(engine.generate([request]))
    seen: list[int] = []
    monkeypatch.setattr(engine._running_costs, "see", lambda rung, *_: seen.append(rung))
    monkeypatch.setattr(generate._InFlight, "ready", lambda _: False)  # whatever the host was late for
    monkeypatch.setattr(Engine, "_rests_through", lambda *_: True)
    list(engine.generate([request]))
    assert seen == [0] * 4, "of five dispatches, the first of which has none before it"


@pytest.mark.usefixtures("cache")
def test_a_run_that_ends_in_its_first_dispatch_has_costs(target) -> None:
    engine = Engine(target, NGram(), dataclasses.replace(CONFIGURATION, capacity=8), steps_per_dispatch=32)
    engine.warm_up([Request(0, (1,), 6)])
    assert engine.costs is not None
    assert np.isfinite(engine.costs.verify_ms).all()
    assert engine.costs.verify_ms[0] > 0


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("steps_per_dispatch", [1, 32])
def test_a_context_without_room_for_a_step_needs_no_costs(target, steps_per_dispatch: int) -> None:
    narrow = dataclasses.replace(CONFIGURATION, capacity=2)
    engine = Engine(target, NGram(), narrow, steps_per_dispatch=steps_per_dispatch)
    request = Request(0, (1,), 1)
    (only,) = engine.generate([request])
    assert len(only.token_ids) == 1
    assert engine.costs_found == "not measured: the context has no room for a step"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: kept["identity"].update(cpu="another machine"),
        lambda kept: kept["measured"][0].update(draft_ms=[0, 1]),
        lambda kept: kept["measured"][0].update(verify_ms=[1, float("nan"), 3]),
        lambda kept: kept["measured"][0].update(verify_ms=[0, 0, 0]),
        lambda kept: kept["measured"][0].update(resume_ms=-1),
        lambda kept: kept["measured"][0].update(resume_ms=[1, 2]),
        lambda kept: kept["measured"][0].pop("verify_ms"),
        lambda kept: kept.pop("measured"),
    ],
)
def test_what_is_not_as_it_should_be_is_not_used(target, cache: Path, spoil) -> None:
    known = costs.identity(target, NGram(), CONFIGURATION, 1)
    assert not costs.load(known)
    assert costs.save(known, [Costs.even(CONFIGURATION.ladder)])
    assert costs.load(known)
    (file,) = cache.iterdir()
    kept = json.loads(file.read_text())
    spoil(kept)
    file.write_text(json.dumps(kept))
    assert not costs.load(known)
    file.write_text("{")
    assert not costs.load(known)


def test_another_pair_shape_or_run_has_other_costs(target) -> None:
    known = costs.identity(target, NGram(), CONFIGURATION, 1)
    assert costs.identity(tiny_target(1), NGram(), CONFIGURATION, 1) == known, "weights do not matter"
    others = [
        costs.identity(target, NGram(longest=2), CONFIGURATION, 1),
        costs.identity(target.replace(aux_layer_ids=(0,)), NGram(), CONFIGURATION, 1),
        costs.identity(target, NGram(), dataclasses.replace(CONFIGURATION, batch_size=2), 1),
        costs.identity(target, NGram(), dataclasses.replace(CONFIGURATION, num_speculative_tokens=1), 1),
        costs.identity(target, NGram(), CONFIGURATION, 4),
    ]
    assert len({json.dumps(other) for other in [known, *others]}) == 6


def test_a_cache_that_cannot_be_written_is_said(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    asked = engine(target)
    asked.warm_up([REQUEST])
    assert asked.costs is not None
    assert asked.costs_found is not None
    assert "cannot be written" in asked.costs_found


def test_given_costs_are_taken(target, cache: Path) -> None:
    given = dataclasses.replace(engine(target), costs=plain_step(1.0))
    assert CONFIG.vocab_size > 0
    given.warm_up([REQUEST])
    list(given.generate([REQUEST]))
    assert given.costs_found is None
    assert not cache.exists()


def test_measurements_of_quick_and_of_slow_moments_are_compared_within_themselves() -> None:
    """Five runs of one day: by milliseconds a step with seven drafts would take 8.9 plain ones, and never pay."""
    plain, seven = (0.115, 0.112, 0.070, 0.170, 0.173), (0.600, 0.584, 1.05, 1.03, 1.02)
    measured = [
        Costs(np.zeros(2, np.float32), np.asarray(ms, np.float32), np.asarray(2 * ms[0], np.float32))
        for ms in zip(plain, seven, strict=True)
    ]
    typical = costs.typical(measured)
    np.testing.assert_allclose(typical.verify_ms, [0.115, 0.115 * 1.02 / 0.173], rtol=1e-6)
    np.testing.assert_allclose(typical.resume_ms, 0.23, rtol=1e-6)
    assert policy.can_pay((0, 7), typical)
    assert all(part.dtype == np.float32 for part in vars(typical).values())
