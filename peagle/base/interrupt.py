"""Turn Ctrl-C, SIGTERM and SIGHUP into a flag that loops check, so that every command ends at a safe point.

Python raises KeyboardInterrupt between any two instructions of the main thread. In a callback (of JAX at each garbage
collection, of ctypes, of finalisers) the exception is printed or dropped, and the run goes on. During an import, or
with work in flight, the process crashes. So the handler sets a flag, and `check` raises at safe points: at every
dispatch, and before anything that takes seconds. A supervisor's SIGTERM and a closed terminal's SIGHUP end a command
in the same way, with what it has by then.

Only the command line installs the handler (`handled`). In other programs the flag is never set, and signals are theirs.
"""

import math
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_CODE = 128 + signal.SIGINT  # a shell's code for a process that SIGINT ended
APART_S = 0.5  # between two signals that are not one
SHOW_CURSOR = b"\x1b[?25h"  # progress on a terminal hides the cursor

_pressed = 0  # the signal that set the flag; 0: none
_waiting = False
_answered = 0  # presses before a `forget`


class Signals:
    """Count signals, those that come at once as one.

    A shell hands SIGHUP of a closed terminal to its job, and then the kernel does; supervisors signal a process and its
    group, or with two signals at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._counted_s = -math.inf

    def add(self) -> bool:
        """Count a signal that has just come; return False if it is one with the last."""
        now = time.monotonic()
        if now - self._counted_s < APART_S:
            return False
        self.count, self._counted_s = self.count + 1, now
        return True


def heeded() -> list[signal.Signals]:
    """Return the signals that end a command: SIGNALS, but not those that are ignored.

    A shell script ignores SIGINT in its background jobs, and nohup ignores SIGHUP.
    """
    return [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextmanager
def handled(until_exit: bool = False) -> Iterator[None]:
    """Make the first signal set the flag, and the second end the process.

    until_exit: the process ends after the block, and libraries clean up; a signal then ends it at once, without a
    traceback.

    The second acts at once, even during a compilation: a thread reads each signal as it arrives, whereas a handler in
    Python waits until the main thread returns from a library. Does nothing outside of the main thread.
    """
    global _pressed, _answered
    numbers = heeded()
    if not numbers or threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=_end_at_the_second, args=(reading,), daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if until_exit else handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
        thread.join()
        os.close(reading)
        _pressed, _answered = 0, 0


@contextmanager
def waiting() -> Iterator[None]:
    """Let a signal raise KeyboardInterrupt at once, for a block that waits for a person or another process."""
    global _waiting
    check()
    _waiting = True
    try:
        yield
    finally:
        _waiting = False


def pressed() -> bool:
    """Whether a signal came since the last `forget`."""
    return _pressed > 0


def check() -> None:
    """Raise KeyboardInterrupt if a signal came since the last `forget`."""
    if _pressed:
        raise KeyboardInterrupt


def exit_code() -> int:
    """Return the code of a process that the signal ended, as a shell counts it: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + _pressed if _pressed else EXIT_CODE


def forget() -> None:
    """Clear the flag after Ctrl-C has ended some work of a command that goes on; the next one is again the first.

    SIGTERM and SIGHUP are for the whole command, so they stay.
    """
    global _pressed, _answered
    if _pressed == signal.SIGINT:
        _answered += 1  # before the flag, so that each press counts once
        _pressed = 0


def _note(number: int, _frame: Any) -> None:
    global _pressed
    _pressed = _pressed or number
    if number == signal.SIGHUP:
        _leave_closed_terminal()
    if _waiting:
        raise KeyboardInterrupt


def _leave_closed_terminal() -> None:
    """Drop what is printed from now on to a terminal that has been closed, because writing to it fails."""
    for descriptor in (1, 2):
        try:
            lost = stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor)
        except OSError:  # it was closed before
            continue
        if lost:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _end_at_the_second(reading: int) -> None:
    """Read signal numbers until the pipe closes; end the process at the second (`Signals`) since the last `forget`.

    A server's own handlers may replace `_note` for a while; signals are then theirs to count.
    """
    signals = Signals()
    while numbers := os.read(reading, 64):
        for number in numbers:
            if signal.getsignal(number) is _note and signals.add() and signals.count > 1 + _answered:
                if sys.stderr.isatty():
                    os.write(sys.stderr.fileno(), SHOW_CURSOR)
                os._exit(128 + number)
