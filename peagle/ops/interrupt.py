"""Ctrl-C as a flag that loops look at: an exception in the middle of anything gets lost, or breaks what it falls into.

Python raises KeyboardInterrupt between any two instructions of the main thread. If a library calls these back (JAX does
at each garbage collection, ctypes, finalisers), the exception is printed or dropped and the run goes on; in a module
that is being imported, or with work in flight, the process crashes. So the handler sets a flag, and `check` raises
where everything is whole: at every dispatch, and at the beginning of whatever takes seconds.

Only the command line installs the handler (`handled`). Elsewhere, in a user's own program or its threads, the flag is
never set, and signals are theirs.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EXIT_CODE = 130  # as a shell calls the end by SIGINT
SHOW_CURSOR = b"\x1b[?25h"  # progress on a terminal hides it

_asked = False
_waiting = False
_answered = 0  # how many were followed by `forget`


@contextmanager
def handled() -> Iterator[None]:
    """Make the first Ctrl-C set the flag, and the second one end the process.

    The second one does so at once, in the middle of a compilation, too: a thread reads each signal as it comes, while
    a handler in Python waits for the library that the main thread is in. Nothing changes outside of the main thread,
    and where Ctrl-C is ignored, as in what a shell script runs in the background.
    """
    global _asked, _answered
    ignored = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=_end_at_the_second, args=(reading,), daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
        thread.join()
        os.close(reading)
        _asked, _answered = False, 0


@contextmanager
def waiting() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt at once: for what waits for a person, or for another process, to write."""
    global _waiting
    check()
    _waiting = True
    try:
        yield
    finally:
        _waiting = False


def asked() -> bool:
    """Say whether Ctrl-C was pressed."""
    return _asked


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed, however long ago."""
    if _asked:
        raise KeyboardInterrupt


def forget() -> None:
    """Go on after a Ctrl-C: what it was to end has ended, and the next one is the first again."""
    global _asked, _answered
    if _asked:
        _answered += 1  # before the flag: each is answered once
        _asked = False


def _note(*_: Any) -> None:
    global _asked
    _asked = True
    if _waiting:
        raise KeyboardInterrupt


def _end_at_the_second(reading: int) -> None:
    """Read the numbers of the signals that come, until the pipe is closed; end the process at the second SIGINT after
    the last `forget`."""
    pressed = 0
    while numbers := os.read(reading, 64):
        pressed += numbers.count(signal.SIGINT)
        if pressed > 1 + _answered:
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), SHOW_CURSOR)
            os._exit(EXIT_CODE)
