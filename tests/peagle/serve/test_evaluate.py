"""`peagle evaluate`: its exit code is the gate's, a run goes on where it ended, a server answers as the pair does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import peagle.cli.serve
import peagle.serve.batch
from peagle.cli import main
from peagle.serve.shared_state import SharedState
from peagle.text.tokenizer import Tokenizer
from tests.support.commands import all_refused
from tests.support.pairs import press_ctrl_c_at, toy_pair
from tests.support.running import running

ANSWERS, SCORES = "answers.jsonl", "scores.json"


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., int]:
    """Ask the toy pair, or another answerer, three questions with these answers."""
    pair = toy_pair(tokenizer)
    monkeypatch.setattr("peagle.cli.models.load_pair", lambda *_: pair)
    monkeypatch.setattr(peagle.cli.serve, "_warm_up", lambda *_: None)  # takes longer than all the answers
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def start(out: Path, reference: float, *options: str, numbers: tuple[str, ...] = ("1", "2", "3")) -> int:
        rows = [{"question": f"What is {i}?", "answer": f"#### {number}"} for i, number in enumerate(numbers)]
        (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fixed = ["--slots", "2", "-n", "24", "--reference", str(reference)]
        return main(["evaluate", str(tmp_path / "questions.jsonl"), str(out), *fixed, *options])

    return start


def contents(out: Path) -> dict[str, str]:
    rows = map(json.loads, (out / ANSWERS).read_text("utf-8").splitlines())
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}


def test_the_gate_passes_fails_and_asks_nothing_twice(
    evaluate: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert evaluate(out, 0.0, "-k", "3") == 0
    assert "with drafts are the plain ones, for all questions" in capfd.readouterr().out
    before = (out / ANSWERS).read_bytes()
    assert before.count(b"\n") == 6
    assert evaluate(out, 100.0, "-k", "3") == 1  # the answers are noise
    assert "threshold    32.85 %: FAILED" in capfd.readouterr().out
    assert json.loads((out / SCORES).read_text())["passed"] is False
    assert (out / ANSWERS).read_bytes() == before
    rows = [json.loads(line) for line in before.splitlines()]
    for row in rows:
        row["response"]["body"]["choices"][0]["message"]["content"] += " 7"
    (out / ANSWERS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate(out, 100.0, "-k", "3", numbers=("7", "7", "7")) == 0
    rows[3]["response"]["body"]["choices"][0]["message"]["content"] = "it is 7"
    (out / ANSWERS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    capfd.readouterr()
    assert evaluate(out, 100.0, "-k", "3", numbers=("7", "7", "7")) == 1
    question = rows[3]["custom_id"].split()[0]
    assert f"DIFFER with drafts and plainly for 1 questions: {question}\n" in capfd.readouterr().out


def test_a_server_answers_as_the_pair_does(evaluate: Any, make: Callable[..., SharedState], tmp_path: Path) -> None:
    assert evaluate(tmp_path / "pair", 0.0, "-k", "3") == 0
    with running(make()) as server:
        assert evaluate(tmp_path / "server", 0.0, "--server", f"{server.url}/v1") == 0
        assert evaluate(tmp_path / "once", 0.0, "--server", server.url, "--no-baseline") == 0
    expected = contents(tmp_path / "pair")
    assert contents(tmp_path / "server") == expected
    assert contents(tmp_path / "once") == {name: text for name, text in expected.items() if "plain" not in name}


def test_ctrl_c_keeps_the_answers(
    evaluate: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, peagle.serve.batch, "_write", 2)
        assert evaluate(out, 0.0, "-k", "3") == 130
    assert "of 6 lines are done; the same command resumes" in capfd.readouterr().err
    # a line that the interruption ended with an error is asked again
    kept = [line for line in (out / ANSWERS).read_text().splitlines() if "server_error" not in line]
    assert kept
    assert evaluate(out, 0.0, "-k", "3") == 0
    assert set(kept) <= {*(out / ANSWERS).read_text().splitlines()}
    assert len(contents(out)) == 6


def test_impossible_evaluation_is_refused_in_one_line(
    evaluate: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert evaluate(out, 0.0, "-k", "3") == 0
    capfd.readouterr()
    source, other = str(tmp_path / "questions.jsonl"), str(tmp_path / "other")
    table = (
        ([source, other, "--reference", "101"], "--reference is 101.0; expected percent, 0 to 100"),
        ([source, str(out), "--reference", "9", "-n", "25"], "other questions, or was begun with other options"),
        ([str(tmp_path / "none"), other, "--reference", "9"], "cannot be read"),
        ([source, other, "--reference", "9", "--server", "localhost:8000"], "expected a URL as http://127.0.0.1:8000"),
        ([source, other, "--reference", "9", "--server", "http://127.0.0.1:9"], "expected a running server"),
        ([source, other, "--reference", "9", "--server", "http://h", "-k", "3"], "leave out --num-speculative-tokens"),
    )
    all_refused(capfd, ["evaluate"], table)
