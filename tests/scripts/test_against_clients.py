"""The script that calls the server by others' clients; those that are not installed here are its own to miss."""

import json
from pathlib import Path

import pytest

from scripts.against_clients import CLIENTS, by_openai, main, task_files


def test_the_tasks_are_complete(tmp_path: Path) -> None:
    files = task_files(tmp_path)
    questions = [json.loads(line) for line in files["questions.jsonl"].splitlines()]
    assert all(each["answer"] in each["choices"] for each in questions)
    assert len({each["question"] for each in questions}) == len(questions) > 10


def test_what_is_missing_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CLIENTS, "no-such-client", by_openai)
    assert main(["--out", str(tmp_path / "new")]) == 2
    assert "is not installed; see --help" in capsys.readouterr().err
    assert main(["--out", str(tmp_path)]) == 2
