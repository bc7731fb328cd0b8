"""The demo pair's card shows a sweep's figures by task."""

from typing import Any

from peagle.measure.pages import markdown
from scripts.demo.build import DEMO
from scripts.demo.card import ACCEPTANCE, LIMITS, acceptance_text, by_task
from scripts.demo.corpus import PACKAGES
from scripts.runs import ROOT


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def row(k: int | str, *parts: str) -> dict[str, Any]:
    figures = {"acceptance_length": estimate(2.0 + len(parts)), "speedup": estimate(1.0)}
    by_category = [
        {"part": part, "num_requests": 5, "looping_frac": 0.2, **figures, "without_loops": figures} for part in parts
    ]
    return {"k": k, "raw": False, "temperature": 0.0, "drafter": "demo", "by_category": by_category}


def test_tasks_are_shown_at_the_largest_k_that_is_fixed() -> None:
    text = markdown(by_task([row(0), row(1, "change"), row(3, "change", "write"), row("auto", "change", "write")]))
    assert text.startswith("By task, chat prompts, K = 3:\n")
    lines = [line for line in text.splitlines() if line.startswith(("| change", "| write"))]
    assert len(lines) == 2
    assert "| 5 | 20% | 4.00 (3.90..4.10) | 4.00 (3.90..4.10) | 1.00 (0.90..1.10) |" in lines[0]


def test_prompts_without_tasks_make_no_table() -> None:
    assert by_task([row(0), row(3)]) == []


def test_the_card_shows_its_run() -> None:
    text = (DEMO / "README.md").read_text(encoding="utf-8").split(ACCEPTANCE)[1].split(LIMITS)[0]
    runs = text.partition(" More: ")[2].partition(".\n")[0].split(", ")
    assert acceptance_text([ROOT / run for run in runs]) == text, "run python -m scripts.demo.card --sweep"


def test_the_notice_names_every_text_of_the_card() -> None:
    card = " ".join((DEMO / "README.md").read_text(encoding="utf-8").split())
    named = card.partition("these packages: ")[2].partition(". Held out")[0].split(", ")
    assert len(named) == 1 + len(PACKAGES)
    notice = " ".join((ROOT / "NOTICE").read_text(encoding="utf-8").split())
    assert all(f" {each.replace('python ', 'CPython ')}" in notice for each in named)
