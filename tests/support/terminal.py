"""Commands in a terminal of their own, as a person runs them."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CTRL_C = b"\x03"
FAR_S = 600  # a process that has not ended by then never will

# a process with the toy pair in place of a loaded one
TOY_PROCESS = """
import sys
import peagle.cli.processes
import peagle.cli.speculate
from peagle.cli import main
from tests.support.pairs import toy_pair
peagle.cli.processes.load_models = lambda *a, **b: toy_pair(None)
sys.exit(main(sys.argv[1:]))
"""
HELD_BY_IT = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""
# JAX's callback at a garbage collection is one of the places where an exception is printed and lost
IN_A_CALLBACK = """
import gc, time
import peagle.cli.display
from peagle.base import interrupt

def wait(phase, _):
    gc.callbacks.remove(wait)
    print("press", flush=True)
    while not interrupt.pressed():
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
        command = [sys.executable, "-c", HELD_BY_IT + code, *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, **ends)
        os.close(screen)
        self.shown = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self.close()

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
        return self.wait()

    def wait(self) -> int:
        """The exit code of a process whose terminal is closed."""
        return self._process.wait(FAR_S)

    def close(self) -> None:
        """Close the terminal, as when its window or connection goes."""
        if self._keyboard >= 0:
            os.close(self._keyboard)
        self._keyboard = -1

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._keyboard], [], [], FAR_S)
        assert ready, f"it neither says anything nor ends: {self.shown!r}"
        try:
            more = os.read(self._keyboard, 1 << 16)
        except OSError:  # Linux's end of a terminal that nobody holds any more
            more = b""
        self.shown += more
        return more
