"""Random arrivals are played in the engine; figures are of rounds, ratios of one round."""

from pathlib import Path

import pytest

from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.measure.pages import markdown
from scripts.bench_arrivals import figures, main, page, play, summary
from tests.support.pairs import toy_pair


def test_what_arrives_is_decoded_whoever_comes_when() -> None:
    engine = Engine(toy_pair(None).target, None, ResolvedConfig(0, 2, 96, prefill_chunk=8))
    arrivals = [(Request((3, number), 6, index=number), 0.02 * (3 - number)) for number in range(3)]
    long = Request(tuple(range(30)), 4, index=3)
    played = play(engine, [*arrivals, (long, 0.0)])
    assert [len(each["itl_s"]) for each in played] == [5, 5, 5, 3]
    assert all(each["ttft_s"] > 0 for each in played)
    assert not engine.busy
    found = figures(played, long)
    assert found["ttft_s"] == played[3]["ttft_s"]
    assert found["itl_p50_s"] <= found["itl_p99_s"]
    assert "ttft_s" not in figures(played[:3], long)


def test_ratios_are_of_a_round_and_medians_over_rounds() -> None:
    raw: list[dict[str, object]] = []
    for number, (p50, p99) in enumerate(((1.0, 4.0), (2.0, 6.0), (4.0, 8.0))):
        raw.append({"round": number, "long": False, "itl_p50_s": p50, "itl_p99_s": 2 * p50})
        raw.append({"round": number, "long": True, "itl_p50_s": p50, "itl_p99_s": p99, "ttft_s": 3 * p99})
        raw.append({"round": number, "long": "alone", "ttft_s": p99})
    found = summary(raw)
    assert found["p99_with_over_p50_without"] == 3.0
    assert found["ttft_over_alone"] == 3.0
    assert found["itl_p99_with_s"] == 6.0
    config = {"num_prompts": 3, "load": 0.8, "requests_per_s": 2.0, "slots": 2, "k": "3", "chunk": 8, "long": 30}
    made = {"command": "python", "cpu": "a CPU", "num_threads": 2, "git": {"commit": "0123456789"}, "time": "now"}
    made |= {"device": {"platform": "cpu"}, "packages": {"jaxlib": "1"}}
    text = markdown(page({"config": config | {"rounds": 3}, "figures": found, "provenance": made}))
    assert "| p99 with it over the median without it | 3.00 |" in text
    assert "commit 0123456789" in text


def test_numbers_that_cannot_be_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options in (["--rounds", "0"], ["--long", "0"], ["--load", "0"], ["--num-prompts", "0"]):
        assert main(["--out", str(tmp_path / "run"), *options]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
