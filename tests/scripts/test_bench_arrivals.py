"""Random arrivals are played in the engine; figures are of rounds, ratios of one round."""

from pathlib import Path

import pytest

from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.measure.pages import markdown
from scripts.scenarios.arrivals import figures, main, page, play, summary
from tests.support.pairs import toy_pair


def test_requests_are_decoded_in_any_order_of_arrival() -> None:
    engine = Engine(toy_pair(None).target, None, ResolvedConfig(0, 2, 96, prefill_chunk=8))
    arrivals = [(Request((3, number), 6, index=number), 0.02 * (3 - number)) for number in range(3)]
    long = Request(tuple(range(30)), 4, index=3)
    played = play(engine, [*arrivals, (long, 0.0)])
    assert [len(request["itl_s"]) for request in played] == [5, 5, 5, 3]
    assert all(request["ttft_s"] > 0 for request in played)
    assert not engine.busy
    quantiles = figures(played, long)
    assert quantiles["ttft_s"] == played[3]["ttft_s"]
    assert quantiles["itl_p50_s"] <= quantiles["itl_p99_s"]
    assert "ttft_s" not in figures(played[:3], long)


def test_ratios_are_of_a_round_and_medians_over_rounds() -> None:
    raw: list[dict[str, object]] = []
    for number, (p50, p99) in enumerate(((1.0, 4.0), (2.0, 6.0), (4.0, 8.0))):
        raw.append({"round": number, "long": False, "itl_p50_s": p50, "itl_p99_s": 2 * p50})
        raw.append({"round": number, "long": True, "itl_p50_s": p50, "itl_p99_s": p99, "ttft_s": 3 * p99})
        raw.append({"round": number, "long": "alone", "ttft_s": p99})
    medians = summary(raw)
    assert medians["p99_with_over_p50_without"] == 3.0
    assert medians["ttft_over_alone"] == 3.0
    assert medians["itl_p99_with_s"] == 6.0
    config = {"num_prompts": 3, "load": 0.8, "requests_per_s": 2.0, "slots": 2, "k": "3", "chunk": 8, "long": 30}
    source = {"command": "python", "cpu": "a CPU", "num_threads": 2, "git": {"commit": "0123456789"}, "time": "now"}
    source |= {"device": {"platform": "cpu"}, "packages": {"jaxlib": "1"}}
    text = markdown(page({"config": config | {"rounds": 3}, "figures": medians, "provenance": source}))
    assert "| p99 with it over the median without it | 3.00 |" in text
    assert "commit 0123456789" in text


def test_bad_numbers_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options in (["--rounds", "0"], ["--long", "0"], ["--load", "0"], ["--num-prompts", "0"]):
        assert main(["--out", str(tmp_path / "run"), *options]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
