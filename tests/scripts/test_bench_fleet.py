"""What a hand-off adds is the difference of one prompt; routes are compared within a round; pages have both."""

import argparse
import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from peagle.measure.pages import markdown
from scripts import bench_fleet, bench_routing, measure_handoff
from scripts.bench_fleet import ALONE, APART, BOTH, FIGURES, added, alone
from scripts.fleet_sim.simulation import Arrival, Costs, Curve, Served
from scripts.serving.client import Reply

MADE = {
    "command": "python", "cpu": "a CPU", "num_threads": 2, "time": "now",
    "device": {"platform": "cpu"}, "packages": {"jaxlib": "1"},
}  # fmt: skip
COSTS = Costs(
    prompt_s=Curve(((1.0, 0.01),)),
    step_s={0: Curve(((1.0, 0.01),))},
    message_bytes=Curve(((1.0, 1000.0),)),
    pack_s=Curve(((1024.0, 0.002),)),
    load_s=Curve(((1024.0, 0.003),)),
    network_bytes_per_s=1e9,
    network_s=0.001,
)


def test_prompts_go_alone_to_both_fleets_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []

    @contextlib.asynccontextmanager
    async def started(roles: Sequence[Any], *_: object) -> AsyncIterator[str]:
        yield "both" if len(roles) == 1 else "apart"

    async def play(trace: list[Arrival], replicas: str, *_: object) -> tuple[list[Served], list[Any]]:
        sent.append((replicas, trace[0].prompt_tokens))
        return [Served(trace[0], [(0.25, 1), (0.5, 3), (0.75, 3)])], []

    monkeypatch.setattr(bench_fleet, "started", started)
    monkeypatch.setattr(bench_fleet, "play", play)
    asked: Any = argparse.Namespace(target="", drafter="", k=3, slots=2, context=1, alone=2)
    shape: Any = None
    lines = asyncio.run(alone(asked, [1, 2, 3], shape))
    assert [replicas for replicas, _ in sent[:: 2 * len(ALONE)]] == ["both", "apart", "both"]
    assert [(line["prompt"], line["prompt_tokens"]) for line in lines[::2]] == [
        (number, length) for number in range(2) for length in ALONE
    ]  # without those that warm up
    assert {(line["first"], line["next"]) for line in lines} == {(250, 500)}


def test_what_a_hand_off_adds_is_the_median_of_differences_of_the_same_prompt() -> None:
    lines = [
        {"prompt": prompt, "prompt_tokens": length, "apart": apart, "first": first + 2 * apart, "next": 10 * first}
        for prompt, first in enumerate((5.0, 9.0, 70.0))
        for length in ALONE
        for apart in (False, True)
    ]
    found = {each["prompt_tokens"]: each for each in added(lines, COSTS)}
    line = found[1024]
    assert (line["first"], line["first added"]["value"], line["next added"]["value"]) == (9, 2, 0)
    assert line["counted"] == pytest.approx(2 + 2 * (1.024 + 1) + 3)
    figures = [
        {"trace": trace, "fleet": str(fleet), "figure": name, "real": {"median": 8.0, "lowest": 7.0, "highest": 9.0},
         "simulated": 6.0, "ratio": 0.75}
        for trace in ("mixed", "long prompts") for fleet in (BOTH, APART) for name in FIGURES
    ]  # fmt: skip
    config = {"k": 3, "slots": 8, "context": 4352, "requests": 9, "requests_per_s": 2.0, "long": 6, "rounds": 2}
    text = markdown(
        bench_fleet.page(
            {"config": config | {"alone": 3}, "figures": figures, "hand_off": list(found.values()), "provenance": MADE}
        )
    )
    assert "| 1024 | 9.0 | 2.0 | 90.0 | 0.0 | 9.0 |" in text
    assert "| mixed | 2 of both | ttft p50 | 8.0 (7.0..9.0) | 6.0 | 0.75 |" in text


def test_a_turn_begins_with_all_that_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []

    def stream(_: str, body: dict[str, Any]) -> Reply:
        prompts.append(body["prompt"])
        return Reply(1.0, (1.5, 2.0), 48, "an answer", num_prompt=100, num_cached=30 * (len(prompts) - 1))

    monkeypatch.setattr(bench_routing, "stream", stream)
    asked: Any = argparse.Namespace(conversations=1, turns=3, think=0.0, max_new_tokens=48)
    found = bench_routing.played(asked, "url", ["a", "b", "c"], 0)
    assert found == {"known_frac": pytest.approx(0.45), "ttft_p50_s": 0.5, "ttft_p90_s": 0.5}
    assert all(after.startswith(before + "an answer\n") for before, after in itertools.pairwise(prompts))
    assert len(prompts) == 3


def test_routes_are_compared_within_a_round() -> None:
    raw = [
        {"round": number, "route": route, "known_frac": known, "ttft_p50_s": ttft, "ttft_p90_s": 2 * ttft}
        for number, (ttft, other) in enumerate(((0.1, 0.2), (0.3, 0.4), (0.5, 0.8)))
        for route, known, ttft in (("prefix", 0.6, ttft), ("load", 0.4, other))
    ]
    found = bench_routing.summary(raw)
    assert found["prefix"]["ttft_p50_s"] == {"median": 0.3, "lowest": 0.1, "highest": 0.5}
    assert found["ratio"]["ttft_p90_s"]["median"] == pytest.approx(0.625)
    config = {"replicas": 2, "slots": 4, "prefix_cache_bytes": 1 << 20, "k": 3, "conversations": 6, "turns": 5}
    config |= {"think": 0.5, "max_new_tokens": 48, "rounds": 3}
    text = markdown(bench_routing.page({"config": config, "figures": found, "provenance": MADE}))
    assert "| by load | 0.40 (0.40..0.40) | 400 (200..800) | 800 (400..1600) |" in text
    assert "| ratio in a round | 1.50 (1.50..1.50) | 0.62 (0.50..0.75) |" in text


def test_a_measured_hand_off_has_its_page() -> None:
    spread = {"median": 2.5, "lowest": 2.0, "highest": 3.0}
    figures = {"message_bytes": 104_000_000} | dict.fromkeys(
        ("pack_gb_per_s", "load_gb_per_s", "peak_over_message"), spread
    )
    record = {"config": {"tokens": 4096, "rounds": 9}, "figures": figures, "provenance": MADE}
    text = markdown(measure_handoff.page(record))
    assert "a message of 104 MB" in text
    assert "| packing, GB/s | 2.50 (2.00..3.00) |" in text


def test_numbers_that_cannot_be_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for script, options in (
        (bench_fleet, ["--alone", "0"]),
        (bench_fleet, ["--context", "4096"]),
        (bench_routing, ["--turns", "1"]),
        (measure_handoff, ["--rounds", "0"]),
    ):
        assert script.main(["--out", str(tmp_path / "run"), *options]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
