"""The simulator of a fleet: queues as closed forms have them, nothing lost, and more of anything is no worse."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from peagle.ops.errors import InputError
from scripts.fleet_sim.costs import Costs, Curve, read_costs
from scripts.fleet_sim.simulation import (
    HOPS,
    Arrangement,
    Arrival,
    Lengths,
    Served,
    Target,
    highest_rate,
    poisson,
    read_trace,
    simulate,
    summary,
)

COSTS = Costs(
    prompt_s=Curve(((100.0, 0.05), (1000.0, 0.6))),
    step_s={0: Curve(((1.0, 0.004), (4.0, 0.007))), 2: Curve(((1.0, 0.006), (4.0, 0.011)))},
    message_bytes=Curve(((100.0, 1e6), (1000.0, 1e7))),
    pack_s=Curve(((100.0, 5e-4), (1000.0, 5e-3))),
    load_s=Curve(((100.0, 5e-4), (1000.0, 5e-3))),
    network_bytes_per_s=1e9,
    acceptance={2: (0.7, 0.4)},
)
LENGTHS = Lengths((20, 600), (1, 40))
TARGET = Target(1.0, 0.02)
BOTH, APART = Arrangement(0, 2), Arrangement(1, 1)


def changed(**values: object) -> Costs:
    return Costs(**{**dict(COSTS), **values})


def ttft(costs: Costs, trace: list[Arrival], fleet: Arrangement) -> np.ndarray:
    return np.asarray([served.ttft_s for served in simulate(costs, trace, fleet)])


@pytest.mark.parametrize(
    "load", [pytest.param(0.3, marks=pytest.mark.slow), pytest.param(0.6, marks=pytest.mark.slow), 0.8]
)
def test_prompts_alone_wait_as_in_m_d_1(load: float) -> None:
    """Constant prompts whose answers are one token, at random: the mean wait is load / (2 (1 - load)) of a prompt."""
    count, service_s = 12_000, 0.05
    trace = poisson(load / service_s, count, Lengths((100, 100), (1, 1)), seed=1)
    for fleet in (Arrangement(0, 1), Arrangement(1, 1)):
        wait = ttft(COSTS, trace, fleet).mean() - service_s
        assert wait == pytest.approx(service_s * load / (2 * (1 - load)), rel=0.12)


def test_two_prefill_replicas_halve_what_each_has_to_do() -> None:
    """Arrivals one by one, twice as fast as one replica: a queue that grows, or none."""
    trace = [Arrival(0.026 * number, 100, 1) for number in range(400)]
    assert ttft(COSTS, trace, Arrangement(2, 1)).max() == pytest.approx(0.05)
    assert ttft(COSTS, trace, Arrangement(1, 1))[-1] == pytest.approx(0.05 + 399 * 0.024)


@pytest.mark.parametrize("fleet", [BOTH, APART, Arrangement(2, 3, 2, 2), Arrangement(0, 1, 1)])
def test_every_token_arrives_once_in_order_and_never_before_its_request(fleet: Arrangement) -> None:
    trace = poisson(5.0, 300, LENGTHS, seed=3)
    played = simulate(COSTS, trace, fleet)
    assert [served.arrival for served in played] == trace
    assert [served.num_tokens for served in played] == [arrival.output_tokens for arrival in trace]
    for served in played:
        assert min([served.ttft_s, *served.itl_s]) >= 0
        assert served.ttft_s >= COSTS.prompt_s.at(served.arrival.prompt_tokens) * (1 - 1e-9)
        assert all(count >= 1 for _, count in served.times)


def test_requests_in_the_fleet_follow_littles_law() -> None:
    """The mean number of open requests, by sampling, is their rate times the mean of their stay."""
    played = simulate(COSTS, poisson(4.0, 1000, LENGTHS, seed=5), BOTH)
    begun, ended = (
        np.sort([at(served) for served in played]) for at in (lambda s: s.arrival.time_s, lambda s: s.times[-1][0])
    )
    moments = np.linspace(0, ended[-1], 40_000)
    sampled = (np.searchsorted(begun, moments, "right") - np.searchsorted(ended, moments, "right")).mean()
    stay = np.mean([served.times[-1][0] - served.arrival.time_s for served in played])
    assert sampled == pytest.approx(len(played) / ended[-1] * stay, rel=0.01)


def test_one_request_takes_what_its_parts_take() -> None:
    (alone,) = simulate(COSTS, [Arrival(2.0, 600, 11)], Arrangement(0, 1))
    assert alone.ttft_s == pytest.approx(COSTS.prompt_s.at(600))
    assert alone.tpot_s == pytest.approx(COSTS.step_s[0].at(1))
    (apart,) = simulate(COSTS, [Arrival(2.0, 600, 11)], APART)
    size = COSTS.message_bytes.at(600)
    hop_s, pack_s, load_s = size / 1e9, size / 2e9, size / 2e9
    assert apart.ttft_s == pytest.approx(alone.ttft_s + pack_s + hop_s)
    assert apart.itl_s[0] == pytest.approx((HOPS - 1) * hop_s + load_s + COSTS.step_s[0].at(1))
    assert sum(apart.itl_s[1:]) == pytest.approx(9 * COSTS.step_s[0].at(1))


def test_drafts_that_are_accepted_come_together() -> None:
    sure = changed(acceptance={2: (1.0, 1.0)})
    (served,) = simulate(sure, [Arrival(0.0, 100, 31)], Arrangement(0, 1, 4, 2))
    assert [count for _, count in served.times] == [1] + [3] * 10
    assert served.itl_s == pytest.approx([0.006] * 10)
    played = simulate(COSTS, [Arrival(0.0, 100, 40_001)], Arrangement(0, 1, 4, 2))
    assert len(played[0].itl_s) * (1 + 0.7 + 0.4) == pytest.approx(40_000, rel=0.02)


def test_more_of_anything_is_no_worse() -> None:
    lengths = Lengths((600, 600), (12, 12))
    slow, fast = (poisson(rate, 150, lengths, seed=2) for rate in (0.8, 2.0))
    for fleet in (BOTH, APART):
        assert ttft(COSTS, slow, fleet).mean() <= ttft(COSTS, fast, fleet).mean()
    for less, more in itertools.pairwise([Arrangement(1, 1), Arrangement(2, 1), Arrangement(4, 1)]):
        assert ttft(COSTS, fast, more).mean() <= ttft(COSTS, fast, less).mean()
    for less, more in itertools.pairwise([Arrangement(0, 1), Arrangement(0, 2), Arrangement(0, 4)]):
        assert ttft(COSTS, fast, more).mean() <= ttft(COSTS, fast, less).mean()
    networks = [changed(network_bytes_per_s=speed) for speed in (1e7, 1e8, math.inf)]
    for less, more in itertools.pairwise(networks):
        assert ttft(more, slow, APART).mean() <= ttft(less, slow, APART).mean()


def test_long_prompts_delay_streams_of_their_own_replica_alone() -> None:
    """What disaggregation is for: gaps of running answers do not hold chunks of prompts."""
    trace = [Arrival(0.0, 50, 400), *(Arrival(0.5 + 0.3 * number, 1000, 2) for number in range(3))]
    worst = {str(fleet): max(simulate(COSTS, trace, fleet)[0].itl_s) for fleet in (Arrangement(0, 1), APART)}
    assert worst["1 prefill + 1 decode"] < 0.5 * worst["1 of both"]


def test_a_summary_counts_what_meets_its_target() -> None:
    arrivals = [Arrival(0.0, 1, 3), Arrival(1.0, 1, 3)]
    played = [Served(arrivals[0], [(0.5, 1), (0.6, 2)]), Served(arrivals[1], [(3.0, 1), (3.1, 1), (5.0, 1)])]
    figures = summary(played, Target(1.0, 0.1))
    assert figures["met_frac"] == 0.5
    assert figures["tok_per_s"] == pytest.approx(6 / 5)
    assert figures["goodput_per_s"] == pytest.approx(1 / 5)
    assert figures["ttft_p50_s"] == pytest.approx(1.25)
    assert figures["itl_p50_s"] == pytest.approx(0.1)


def test_the_highest_rate_meets_its_target_and_more_does_not() -> None:
    lengths = Lengths((100, 100), (1, 1))
    rate = highest_rate(COSTS, Arrangement(0, 1), lengths, Target(0.2, 1.0), count=500)
    for factor, met in ((0.98, True), (1.1, False)):
        played = simulate(COSTS, poisson(factor * rate, 500, lengths), Arrangement(0, 1))
        assert (summary(played, Target(0.2, 1.0))["met_frac"] >= 0.9) == met
    assert highest_rate(COSTS, Arrangement(0, 1), lengths, Target(0.04, 1.0)) == 0, "a prompt alone takes longer"


def test_costs_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(COSTS.model_dump_json())
    assert read_costs(path) == COSTS


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt_s": None}, "prompt_s is None"),
        ({"prompt_s": []}, "sizes are \\[\\]"),
        ({"prompt_s": [[2, 1], [1, 1]]}, "ascending"),
        ({"prompt_s": [[2, -1]]}, "prompt_s.0.1 is -1: Input should be greater than or equal to 0"),
        ({"step_s": {"x": [[1, 1]]}}, "step_s.x"),
        ({"step_s": {"1": [[1, 1]]}}, "0 rates for K = 1"),
        ({"acceptance": {"2": [0.4, 0.7]}}, "none larger than the one before"),
        ({"network_bytes_per_s": 0.0}, "network_bytes_per_s is 0"),
        ({"network_s": -1.0}, "network_s is -1"),
        ({"chunk": 0}, "chunk is 0"),
        ({"speed": 1}, "speed is 1: Extra inputs are not permitted; expected what --measure writes"),
    ],
)
def test_costs_that_cannot_be_are_refused_in_one_line(change: dict, match: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**json.loads(COSTS.model_dump_json()), **change}))
    with pytest.raises(InputError, match=match) as raised:
        read_costs(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_files_that_are_none_are_refused_by_line(tmp_path: Path) -> None:
    for text, match in (("{}", "prompt_s: Field required"), ("x", "Invalid JSON")):
        (tmp_path / "costs.json").write_text(text)
        with pytest.raises(InputError, match=match):
            read_costs(tmp_path / "costs.json")
    path = tmp_path / "trace.jsonl"
    path.write_text("")
    with pytest.raises(InputError, match="is empty"):
        read_trace(path)
    good = '{"time_s": 2, "prompt_tokens": 3, "output_tokens": 4}\n'
    for bad in ("{}", "[]", "x", '{"time_s": -1, "prompt_tokens": 3, "output_tokens": 4}', good.replace("3", "0")):
        path.write_text(good + bad)
        with pytest.raises(InputError, match="line 2 of "):
            read_trace(path)
    path.write_text(good + good.replace("2", "1"))
    assert read_trace(path) == [Arrival(1.0, 3, 4), Arrival(2.0, 3, 4)]


def test_questions_that_make_no_sense_are_refused() -> None:
    for make in (
        lambda: Arrangement(1, 0),
        lambda: Arrangement(-1, 1),
        lambda: Lengths((0, 3), (1, 1)),
        lambda: Lengths((4, 3), (1, 1)),
        lambda: poisson(0.0, 1, LENGTHS),
        lambda: poisson(1.0, 0, LENGTHS),
        lambda: Target(0.0, 1.0),
        lambda: simulate(COSTS, [Arrival(0.0, 1, 1)], Arrangement(0, 1, 4, 5)),
    ):
        with pytest.raises(ValueError, match=r"expected|Input should be|the first is above"):
            make()
