"""Ctrl-C: the first sets a flag, which `check` raises; without `handled` nothing changes."""

import signal
import threading
from collections.abc import Callable

import pytest

from peagle.ops import interrupt


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_is_raised_by_check_alone() -> None:
    with interrupt.handled():
        interrupt.check()
        press()
        assert interrupt.pressed()
        for _ in range(2):  # catching it does not clear the flag
            with pytest.raises(KeyboardInterrupt):
                interrupt.check()
    interrupt.check()
    assert not interrupt.pressed()


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


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt.handled():
            press()
            assert not interrupt.pressed()
    finally:
        signal.signal(signal.SIGINT, before)


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
