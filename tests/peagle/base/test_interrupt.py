"""Ctrl-C, SIGTERM and SIGHUP: the first sets a flag, which `check` raises; without `handled` nothing changes."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from peagle.base import interrupt
from tests.support.terminal import FAR_S, ROOT, Terminal

CLOSED = """
import sys, time
from peagle.base import interrupt
with interrupt.handled(), open(sys.argv[1], "w") as kept:
    print("ready", flush=True)
    while not interrupt.pressed():
        time.sleep(0.01)
    print("it ends", flush=True)
    print("it ends", file=sys.stderr, flush=True)
    kept.write("whole")
    sys.exit(interrupt.exit_code())
"""


def press(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_is_raised_by_check_alone(number: int, code: int) -> None:
    with interrupt.handled():
        interrupt.check()
        press(number)
        assert interrupt.pressed()
        for _ in range(2):  # catching it does not clear the flag
            with pytest.raises(KeyboardInterrupt):
                interrupt.check()
        assert interrupt.exit_code() == code
    interrupt.check()
    assert not interrupt.pressed()


@pytest.mark.parametrize(
    ("number", "continues"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, False)]
)
def test_only_ctrl_c_ends_less_than_the_command(number: int, continues: bool) -> None:
    with interrupt.handled():
        press(number)
        interrupt.forget()
        assert interrupt.pressed() is not continues


@pytest.mark.parametrize("ends", [lambda: None, interrupt.check], ids=["in peace", "by a check"])
def test_afterwards_signals_are_as_they_were(ends: Callable[[], None]) -> None:
    before, threads = signal.getsignal(signal.SIGINT), threading.active_count()
    try:
        with interrupt.handled():
            press()
            ends()
    except KeyboardInterrupt:
        pass
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads
    with pytest.raises(KeyboardInterrupt):
        press()


def test_waiting_for_input_ends_at_once() -> None:
    with interrupt.handled(), pytest.raises(KeyboardInterrupt), interrupt.waiting():
        press()
    with interrupt.handled():
        press()
        with pytest.raises(KeyboardInterrupt), interrupt.waiting():
            raise AssertionError("it was pressed before")


@pytest.mark.parametrize("ignored", interrupt.SIGNALS)
def test_an_ignored_signal_stays_ignored_and_the_others_count(ignored: signal.Signals) -> None:
    """A script's background job ignores SIGINT, one under nohup SIGHUP."""
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        with interrupt.handled():
            press(ignored)
            assert not interrupt.pressed()
            press(next(number for number in interrupt.SIGNALS if number != ignored))
            assert interrupt.pressed()
    finally:
        signal.signal(ignored, before)


@pytest.mark.parametrize("numbers", list(itertools.product(interrupt.SIGNALS, repeat=2)))
def test_the_second_ends_the_process(numbers: tuple[int, int]) -> None:
    assert ended_by(numbers, "time.sleep(1e6)", "interrupt.APART_S = 0") == 128 + numbers[1]


@pytest.mark.parametrize("numbers", list(itertools.product(interrupt.SIGNALS, repeat=2)))
def test_signals_at_once_are_one(numbers: tuple[int, int]) -> None:
    """As many as come, so that what is done is kept."""
    assert ended_by([*numbers, *numbers], "sys.exit(7)", "interrupt.APART_S = 1e6") == 7


def test_signals_of_a_server_are_its_own_to_count() -> None:
    server = "signal.signal(signal.SIGTERM, lambda *_: told.append(1))"
    assert ended_by([signal.SIGTERM] * 3, "sys.exit(len(told))", server) == 3


def test_after_the_terminal_has_been_closed_printing_fails_no_more(tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and writing to the terminal is an error from then on."""
    with Terminal(CLOSED, str(tmp_path / "kept")) as terminal:
        terminal.wait_for(b"ready")
        terminal.close()
        assert terminal.wait() == 129
    assert (tmp_path / "kept").read_text() == "whole"


def test_a_shell_between_hands_the_closing_on_and_the_kernel_does_again(tmp_path: Path) -> None:
    code = "import os, sys; os.execvp('bash', ['bash', '--norc', '-i'])"
    child, kept = tmp_path / "child.py", tmp_path / "kept"
    os.mkfifo(kept)  # its end is that of the job, which only the shell can wait for
    reading = os.open(kept, os.O_RDONLY | os.O_NONBLOCK)
    child.write_text(CLOSED.replace("with", "interrupt.APART_S = 1e6\nwith", 1))
    with Terminal(code) as terminal:
        terminal.press(f"PYTHONPATH={ROOT} {sys.executable} {child} {kept}\n".encode())
        terminal.wait_for(b"ready\r\n")
        terminal.close()
        os.set_blocking(reading, True)
        with open(reading) as file:
            assert file.read() == "whole"


def ended_by(numbers: Sequence[int], last: str, before: str = "pass") -> int:
    """Run a process that gets these signals under `handled`, between two statements; return its exit code."""
    lines = ["import os, signal, sys, time", "from peagle.base import interrupt", "told = []"]
    lines += ["with interrupt.handled():", f"    {before}"]
    lines += [f"    os.kill(os.getpid(), {int(number)})" for number in numbers]
    code = "\n".join([*lines, f"    {last}"])
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=FAR_S).returncode


def test_commands_in_threads_leave_signals_to_the_program() -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with interrupt.handled():
                interrupt.check()
        except BaseException as error:  # hand any error to the main thread
            failed.append(error)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
    assert signal.getsignal(signal.SIGINT) is before
