"""Ctrl-C ends every command with what is there by then, and with 130; in a terminal, as a person presses it.

No test looks at how long that takes: what has to be under way when the key is pressed waits for the key.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import peagle.loading.fit
from peagle.cli import main
from peagle.cli.display import Display
from tests.support.commands import last_of_each
from tests.support.pairs import press_ctrl_c_at
from tests.support.terminal import CTRL_C, IN_A_CALLBACK, TOY_PROCESS, Terminal

pytestmark = pytest.mark.compile

GENERATE = ("speculate", "-k", "0", "--target", "toy", "--prompt-ids", "50", "-n", "380")
SPECULATE = ("speculate", "--target", "toy", "--drafter", "ngram", "--prompt-ids", "50", "-n", "380", "-k", "1")


def test_the_second_ends_it_at_once_whatever_it_is_doing() -> None:
    with Terminal(
        IN_A_CALLBACK.format(then="interrupt.APART_S = 0; print('again', flush=True); time.sleep(1e6)") + TOY_PROCESS,
        *GENERATE,
    ) as terminal:
        terminal.wait_for(b"press")
        terminal.press(CTRL_C)
        terminal.wait_for(b"again")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert b"finish" not in terminal.shown
    assert terminal.shown.endswith(b"\x1b[?25h"), "the cursor is back"


def test_waiting_for_a_person_to_type_is_left_at_once() -> None:
    code = "import peagle.cli.speculate as run\nread = run._read_standard_input\n"
    code += "run._read_standard_input = lambda: (print('type', flush=True), read())[1]\n"
    with Terminal(code + TOY_PROCESS, "speculate", "-k", "0", "--target", "demo", "-") as terminal:
        terminal.wait_for(b"type")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert b"Traceback" not in terminal.shown


@pytest.mark.parametrize("stage", [1, 2])  # compiling, decoding
def test_before_the_first_token_there_is_nothing_to_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: Any, stage: int
) -> None:
    monkeypatch.setattr("peagle.cli.processes.load_models", lambda *_, **__: toy)
    press_ctrl_c_at(monkeypatch, Display, "run_stage", stage)
    assert main([*SPECULATE, "--no-baseline"]) == 130
    shown = capsys.readouterr()
    assert shown.out.strip() == ""
    assert "interrupted before the first token" in shown.err


def test_what_is_done_before_anything_looks_ends_with_130_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, toy: Any
) -> None:
    """The last lines are being written: they are."""
    monkeypatch.setattr("peagle.cli.processes.load_models", lambda *_, **__: toy)
    press_ctrl_c_at(monkeypatch, Display, "end_all")
    out = tmp_path / "out.json"
    assert main(last_of_each([*SPECULATE, "-n", "5", "--json", str(out)])) == 130
    assert json.loads(out.read_text())["requests"][0]["finish_reason"] == "length"
    assert "the same tokens" in capsys.readouterr().err


def test_parity_ends_before_it_loads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("peagle.cli.processes.load_models", lambda *_, **__: pytest.fail("it loads"))
    press_ctrl_c_at(monkeypatch, peagle.loading.fit, "check_fit")
    assert main(["parity"]) == 130
    assert capsys.readouterr().out == ""
