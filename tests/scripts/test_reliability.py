"""Calibration is measured on drafts that count, and the running correction mends what is off."""

import json
from pathlib import Path

import numpy as np
import pytest

from scripts import reliability
from scripts.reliability import Replay, Seen, figures, seen


def test_a_draft_counts_where_all_before_it_were_right() -> None:
    line = {"confidence": [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.3, 0.2, 0.1]], "num_accepted": [1, 3, 0]}
    drafts = seen([line | {"corrected": line["confidence"]}])
    assert drafts.position.tolist() == [0, 1, 0, 1, 2, 0]
    assert drafts.confidence.tolist() == [0.9, 0.8, 0.6, 0.5, 0.4, 0.3]
    assert drafts.right.tolist() == [True, False, True, True, True, False]


def test_the_figures_of_what_is_off_by_a_fifth() -> None:
    rng = np.random.default_rng(0)
    truth = rng.random(200_000)
    right = rng.random(truth.size) < truth
    found = figures(Seen(np.zeros(truth.size, int), np.minimum(truth + 0.2, 1), truth, right))
    assert found["right"] == pytest.approx(0.5, abs=0.01)
    assert found["corrected"]["ece"] < 0.01
    assert found["corrected"]["brier"] == pytest.approx(1 / 6, abs=0.005)
    assert found["confidence"]["ece"] == pytest.approx(0.8 * 0.2 + 0.2 * 0.1, abs=0.01)


def test_the_correction_is_learnt_from_what_came_before() -> None:
    """Drafts that are right half of the time and said to be right nearly always."""
    rng = np.random.default_rng(1)
    steps = [((0.95, 0.95), 0 if rng.random() < 0.5 else 2) for _ in range(200)]
    corrected = np.array(Replay(2).corrected(steps))
    assert corrected[0] == pytest.approx(0.95)
    assert corrected[-20:, 0].mean() < 0.8


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = ["reliability", "--out", str(out), "-k", "2", "--num-prompts", "2", "-n", "12"]
    monkeypatch.setattr("sys.argv", arguments)
    assert reliability.main() == 0
    record = json.loads((out / "run.json").read_text())
    assert [row["position"] for row in record["rows"]] == [None, 1, 2]
    steps = sum(len(json.loads(line)["num_accepted"]) for line in (out / "raw.jsonl").read_text().splitlines())
    assert record["rows"][1]["drafts"] == steps
    assert (out / "reliability.png").stat().st_size > 10_000
    assert reliability.main() == 2
    assert "exists; expected a new folder" in capsys.readouterr().err
