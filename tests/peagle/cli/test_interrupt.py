"""Ctrl-C ends every command with what is there by then, and with 130; in a terminal, as a person presses it.

No test looks at how long that takes: what has to be under way when the key is pressed waits for the key.
"""

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import peagle.cli.comparing
from peagle.cli import main
from peagle.cli.display import Display
from tests.peagle.cli.test_cli import ROOT, TOY_PROCESS
from tests.support.pairs import press_ctrl_c_at

CTRL_C = b"\x03"
FAR_S = 600  # a process that has not ended by then never will
SPECULATE = ("speculate", "--target", "toy", "--drafter", "ngram", "--prompt-ids", "50", "-n", "380", "-k", "1")

HELD_BY_IT = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""
# JAX's callback at a garbage collection is one of the places where an exception is printed and lost
IN_A_CALLBACK = """
import gc, time
import peagle.cli.display
from peagle.ops import interrupt

def wait(phase, _):
    gc.callbacks.remove(wait)
    print("press", flush=True)
    while not interrupt.asked():
        time.sleep(0.01)
    {then}

def emitted(*arguments):
    if not waited:
        waited.append(True)
        gc.callbacks.append(wait)
        gc.collect()
    show(*arguments)

waited, show = [], peagle.cli.display.Display.emitted
peagle.cli.display.Display.emitted = emitted
"""


class Terminal:
    """A process in a terminal of its own; all it shows is read."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._keyboard, screen = pty.openpty()
        ends: dict[str, Any] = {"stdin": screen, "stdout": screen, "stderr": screen, "start_new_session": True}
        command = [sys.executable, "-c", HELD_BY_IT + code, *(arguments or SPECULATE)]
        self._process = subprocess.Popen(command, cwd=ROOT, **ends)
        os.close(screen)
        self.shown = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._keyboard)

    def wait_for(self, text: bytes) -> None:
        while text not in self.shown:
            more = self._read()
            assert more, f"it ended before it said {text!r}: {self.shown!r}"

    def press(self, key: bytes) -> None:
        os.write(self._keyboard, key)

    def end(self) -> int:
        """The exit code."""
        while self._read():
            pass
        return self._process.wait(FAR_S)

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._keyboard], [], [], FAR_S)
        assert ready, f"it neither says anything nor ends: {self.shown!r}"
        try:
            more = os.read(self._keyboard, 1 << 16)
        except OSError:  # Linux's end of a terminal that nobody holds any more
            more = b""
        self.shown += more
        return more


def test_the_first_ends_the_run_though_an_exception_would_get_lost_there() -> None:
    with Terminal(IN_A_CALLBACK.format(then="raise KeyboardInterrupt") + TOY_PROCESS) as terminal:
        terminal.wait_for(b"press")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert b"finish: interrupted" in b" ".join(terminal.shown.split())  # lines are broken between words
    assert b"acceptance" in terminal.shown


def test_the_second_ends_it_at_once_whatever_it_is_doing() -> None:
    with Terminal(IN_A_CALLBACK.format(then="print('again', flush=True); time.sleep(1e6)") + TOY_PROCESS) as terminal:
        terminal.wait_for(b"press")
        terminal.press(CTRL_C)
        terminal.wait_for(b"again")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert b"finish" not in terminal.shown
    assert terminal.shown.endswith(b"\x1b[?25h"), "the cursor is back"


def test_waiting_for_a_person_to_type_is_left_at_once() -> None:
    code = "import peagle.cli.decoding as run\nread = run._read_standard_input\n"
    code += "run._read_standard_input = lambda: (print('type', flush=True), read())[1]\n"
    with Terminal(code + TOY_PROCESS, "generate", "--target", "demo", "-") as terminal:
        terminal.wait_for(b"type")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert b"Traceback" not in terminal.shown


@pytest.mark.parametrize("stage", ["compiling", "decoding"])
def test_before_the_first_token_there_is_nothing_to_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: Any, stage: str
) -> None:
    monkeypatch.setattr("peagle.cli.processes.load_models", lambda *_, **__: toy)
    press_ctrl_c_at(monkeypatch, Display, stage)
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
    assert main([*SPECULATE, "-n", "5", "--json", str(out)]) == 130
    assert json.loads(out.read_text())["requests"][0]["finish_reason"] == "length"
    assert "the same tokens" in capsys.readouterr().err


def test_parity_ends_before_it_loads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("peagle.cli.processes.load_models", lambda *_, **__: pytest.fail("it loads"))
    press_ctrl_c_at(monkeypatch, peagle.cli.comparing, "check_fit")
    assert main(["parity"]) == 130
    assert capsys.readouterr().out == ""
