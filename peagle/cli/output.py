"""Output files, which are written whole or not at all, and lines in a terminal."""

import errno
import os
import stat
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from peagle.base.errors import InputError
from peagle.base.files import encoded, reason_of, write_text_whole

STANDARD_OUTPUT = "-"


def say(level: str, message: str) -> None:
    """Print a message as one line on standard error. level: warning or error."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(message.split()))
    text = wrapped(f"peagle: {level}: {line}", Console(stderr=True))
    sys.stderr.write(f"{text}\n")  # at once, since other threads write lines, too
    sys.stderr.flush()


def show_lines(lines: Iterable[str], indent: int = 0, style: str | None = None) -> None:
    """Print lines on standard output; a terminal gets them `wrapped`."""
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(wrapped(line, console, indent), markup=False, style=style)


def wrapped(text: str, console: Console, indent: int = 0) -> str:
    """Break lines between words at the width of a terminal; elsewhere return them as they are.

    indent: spaces before a continued line.
    """
    if not console.is_terminal:
        return text
    margin = " " * min(indent, console.width // 2)
    return "\n".join(
        textwrap.fill(
            line, console.width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False, tabsize=4
        )
        for line in text.split("\n")
    )


def output_file(name: str | None, flag: str) -> "OutputFile | None":
    """Return the output file of an option; None if the option is not given."""
    return None if name is None else OutputFile(name, flag)


class OutputFile:
    """A file to write at the end of a run; "-" is standard output. Nothing is created until `write`.

    Raises InputError at once if the file cannot be written.
    """

    def __init__(self, name: str, flag: str) -> None:
        self._name, self._flag = name, flag
        self.path = Path(name).resolve()  # writing through a link replaces its target, not the link
        if name != STANDARD_OUTPUT:
            self._check()

    def write(self, text: str) -> None:
        """Write exactly this text, or leave the file as it was."""
        if self._name == STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            if self._is_device():
                self.path.write_bytes(encoded(text))
            else:
                write_text_whole(self.path, text)
        except OSError as error:
            raise self._error(reason_of(error)) from None

    def _check(self) -> None:
        if not self._name or self.path.is_dir():
            raise self._error("it is a directory" if self._name else "its name is empty")
        try:
            if self.path.exists():
                if not os.access(self.path, os.W_OK):
                    raise self._error("no permission to write it")
                if self._is_device():
                    return
            descriptor, probe = tempfile.mkstemp(prefix=".peagle-", dir=self.path.parent)
            os.close(descriptor)
            os.unlink(probe)
        except OSError as error:
            raise self._error(reason_of(error)) from None

    def _is_device(self) -> bool:
        """Return whether the path is a device or a pipe, to which text is written in place."""
        return self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode)

    def _error(self, why: str) -> InputError:
        expected = "a file in a directory that exists and that can be written to"
        if why == os.strerror(errno.ENOSPC):
            expected = "room for it: free some, or name a file elsewhere"
        return InputError(f"{self._flag} {self._name} cannot be written: {why}; expected {expected}")
