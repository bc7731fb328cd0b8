"""Prompts are measured by engine and length; ratios are of a round, medians over rounds."""

from pathlib import Path

import pytest

from peagle.measure.pages import markdown
from scripts.bench_prompts import BLOCKED, Json, figures, main, page


def lines() -> list[Json]:
    """Make measurements of three rounds, of which the first warms up: blocked takes 2 and then 4 times as long."""
    made: list[Json] = []
    for number, (ours, blocked) in enumerate(((99.0, 1.0), (1.0, 2.0), (2.0, 8.0))):
        line = {"model": "M", "round": number, "length": 8}
        made.append(line | {"engine": "peagle", "prefill_s": ours, "bytes": 7 - number})
        made.append(line | {"engine": BLOCKED, "prefill_s": blocked, "bytes": 9})
        made.append(
            {"model": "M", "round": number, "engine": "peagle", "turn": 2, "hit_s": 0.5, "miss_s": 1.0 + number}
        )
    return made


def test_the_first_round_gives_memory_and_no_time() -> None:
    found = figures(lines())["M"]
    assert found["prompts"]["8"]["peagle"] == {"tokens_per_s": 8 / 1.5, "ours_over": 1.0, "bytes": 7}
    assert found["prompts"]["8"][BLOCKED] == {"tokens_per_s": 8 / 5, "ours_over": 3.0, "bytes": 9}
    assert found["hit_over_miss"] == pytest.approx((0.5 / 2 + 0.5 / 3) / 2)


def test_the_page_names_who_is_left_out() -> None:
    made = {"command": "python", "cpu": "a CPU", "num_threads": 2, "git": {"commit": "0123456789"}, "time": "now"}
    made |= {"device": {"platform": "cpu"}, "packages": {"jaxlib": "1"}}
    config = {"rounds": 2, "history": 8, "left_out": {"llama.cpp": "no --llama-python was given"}}
    text = markdown(page({"config": config, "figures": figures(lines()), "provenance": made}))
    assert "| 8 | peagle, blocked | 2 | 3.00 | 0 MB |" in text
    assert "Left out: llama.cpp, since no --llama-python was given." in text


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options in (["--rounds", "0"], ["--lengths", "x"], ["--lengths", "0"]):
        assert main(["--out", str(tmp_path / "run"), *options, str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert not (tmp_path / "run").exists()
