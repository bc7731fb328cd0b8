"""The sweep: its figures follow from its raw lines, plain decoding is always in it, nothing is overwritten."""

import json
import sys
from pathlib import Path

import pytest

import peagle
from scripts import sweep_acceptance
from tests.peagle.conftest import ByteTokenizer, toy_pair


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two one two", "a", "never")))
    return path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(peagle, "load", lambda *_, **__: toy_pair(ByteTokenizer(), ()), raising=False)
    monkeypatch.setattr(sys, "argv", ["sweep_acceptance.py", *map(str, arguments)])
    return sweep_acceptance.main()


def test_a_sweep_writes_rows_that_follow_from_its_raw_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path
) -> None:
    out = tmp_path / "run"
    options = ["--num-prompts", 2, "--repeats", 2, "-n", 24, "--raw-prompts"]
    assert call(monkeypatch, "--out", out, "-k", "3,1", "--prompts", prompts, *options) == 0
    run = json.loads((out / "run.json").read_text())
    raw = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert [row["k"] for row in run["rows"]] == [0, 1, 3]
    assert len(raw) == 3 * 2 * 2
    assert str(tmp_path) not in json.dumps(run["config"]["prompts"])
    for row in run["rows"][1:]:
        accepted = [a for line in raw if line["k"] == row["k"] and line["repeat"] == 0 for a in line["accepted"]]
        assert row["num_spec_steps"] == len(accepted)
        assert row["acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
        assert row["acceptance_length"] > 1  # the toy walks in circles, which an n-gram drafter learns
        low, high = row["acceptance_length_interval"]
        assert low <= row["acceptance_length"] <= high
        assert row["outputs_equal_to_plain"] == 2
    assert run["rows"][0]["speedup_pooled"] == 1
    assert (out / "sweep.png").stat().st_size > 1000
    assert "| 3 |" in (out / "README.md").read_text()


def test_drafters_stand_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "run"
    options = ["--num-prompts", 1, "--repeats", 1, "-n", 12, "--raw-prompts", "--drafter", "runs/one,runs/two"]
    assert call(monkeypatch, "--out", out, "-k", "3", "--prompts", prompts, *options) == 0
    run = json.loads((out / "run.json").read_text())
    assert [(row["k"], row["drafter"]) for row in run["rows"]] == [(0, None), (3, "runs/one"), (3, "runs/two")]
    page = (out / "README.md").read_text()
    assert "| 3, one |" in page
    assert "| 3, two |" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", "x"], "expected numbers, or auto"),
        (["-k", "0"], "expected numbers of 1 or more, or auto"),
        (["--repeats", "0"], "must be 1 or more"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    prompts: Path,
    arguments: list[str],
    message: str,
) -> None:
    out = tmp_path / "run"
    assert call(monkeypatch, "--out", out, "--prompts", prompts, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_an_existing_folder_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path) -> None:
    (tmp_path / "run").mkdir()
    assert call(monkeypatch, "--out", tmp_path / "run", "--prompts", prompts) == 2
    assert list((tmp_path / "run").iterdir()) == []
