"""Ctrl-C: the first sets a flag, which `check` raises; nothing is changed for whoever did not ask for it."""

import signal
import threading
from collections.abc import Callable

import pytest

from peagle.ops import interrupt


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_is_raised_where_it_is_checked_and_nowhere_else() -> None:
    with interrupt.handled():
        interrupt.check()
        press()
        assert interrupt.asked()
        for _ in range(2):  # whoever catches it has not undone it
            with pytest.raises(KeyboardInterrupt):
                interrupt.check()
    interrupt.check()
    assert not interrupt.asked()


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


def test_what_waits_for_a_person_is_left_at_once() -> None:
    with interrupt.handled(), pytest.raises(KeyboardInterrupt), interrupt.waiting():
        press()
    with interrupt.handled():
        press()
        with pytest.raises(KeyboardInterrupt), interrupt.waiting():
            raise AssertionError("it was pressed before")


def test_where_it_is_ignored_it_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt.handled():
            press()
            assert not interrupt.asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_of_a_program_may_run_commands_and_signals_are_still_the_programs() -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with interrupt.handled():
                interrupt.check()
        except BaseException as error:  # whatever it is, the main thread is told
            failed.append(error)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
    assert signal.getsignal(signal.SIGINT) is before
