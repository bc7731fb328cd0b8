"""Turn Ctrl-C into a flag that loops check, because an exception at an arbitrary point gets lost or breaks code.

Python raises KeyboardInterrupt between any two instructions of the main thread. In a callback (of JAX at each garbage
collection, of ctypes, of finalisers) the exception is printed or dropped, and the run goes on. During an import, or
with work in flight, the process crashes. So the handler sets a flag, and `check` raises at safe points: at every
dispatch, and before anything that takes seconds.

Only the command line installs the handler (`handled`). In other programs the flag is never set, and signals are theirs.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EXIT_CODE = 130  # a shell's code for a process that SIGINT ended
SHOW_CURSOR = b"\x1b[?25h"  # progress on a terminal hides the cursor

_pressed = False
_waiting = False
_answered = 0  # presses before a `forget`


@contextmanager
def handled(until_exit: bool = False) -> Iterator[None]:
    """Make the first Ctrl-C set the flag, and the second end the process.

    until_exit: the process ends after the block, and libraries clean up; Ctrl-C then ends it at once, without a
    traceback.

    The second acts at once, even during a compilation: a thread reads each signal as it arrives, whereas a handler in
    Python waits until the main thread returns from a library. Does nothing outside of the main thread, or if Ctrl-C is
    ignored (as in a shell script's background jobs).
    """
    global _pressed, _answered
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
        signal.signal(signal.SIGINT, signal.SIG_DFL if until_exit else handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
        thread.join()
        os.close(reading)
        _pressed, _answered = False, 0


@contextmanager
def waiting() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt at once, for a block that waits for a person or another process."""
    global _waiting
    check()
    _waiting = True
    try:
        yield
    finally:
        _waiting = False


def pressed() -> bool:
    """Whether Ctrl-C was pressed since the last `forget`."""
    return _pressed


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed since the last `forget`."""
    if _pressed:
        raise KeyboardInterrupt


def forget() -> None:
    """Clear the flag after the interrupted work has ended, so that the next Ctrl-C is again the first."""
    global _pressed, _answered
    if _pressed:
        _answered += 1  # before the flag, so that each press counts once
        _pressed = False


def _note(*_: Any) -> None:
    global _pressed
    _pressed = True
    if _waiting:
        raise KeyboardInterrupt


def _end_at_the_second(reading: int) -> None:
    """Read signal numbers until the pipe closes; end the process at the second SIGINT since the last `forget`."""
    pressed = 0
    while numbers := os.read(reading, 64):
        pressed += numbers.count(signal.SIGINT)
        if pressed > 1 + _answered:
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), SHOW_CURSOR)
            os._exit(EXIT_CODE)
