"""Files, written whole or not at all, and lines on standard error."""

import errno
import os
import stat
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from peagle.ops.errors import InputError
from peagle.ops.files import encoded, reason_of, write_text_whole

STANDARD_OUTPUT = "-"


def say(what: str, message: str) -> None:
    """Print a message as one line on standard error."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(message.split()))
    print(wrapped(f"peagle: {what}: {line}", Console(stderr=True)), file=sys.stderr, flush=True)


def show_lines(lines: Iterable[str], indent: int = 0, to_stderr: bool = False, style: str | None = None) -> None:
    """Print lines, broken between words in a terminal (`wrapped`)."""
    console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(wrapped(line, console, indent), markup=False, style=style)


def wrapped(text: str, console: Console, indent: int = 0) -> str:
    """Break a text's lines between words, if it goes to a terminal. indent: spaces before a continued line."""
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
    """Return the file that an option names; None without one. Raises InputError if it cannot be written."""
    return None if name is None else OutputFile(name, flag)


class OutputFile:
    """A file to write at the end of a run; "-" is standard output. Nothing is created until `write`.

    Raises InputError at once if the file cannot be written.
    """

    def __init__(self, name: str, flag: str) -> None:
        self._name, self._flag = name, flag
        self._path = Path(name).resolve()  # a link stays a link: replace its target
        if name != STANDARD_OUTPUT:
            self._check()

    @property
    def path(self) -> Path:
        return self._path

    def write(self, text: str) -> None:
        """Write exactly this text, or leave the file as it was."""
        if self._name == STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            if self._is_device():
                self._path.write_bytes(encoded(text))
            else:
                write_text_whole(self._path, text)
        except OSError as error:
            raise self._refusal(reason_of(error)) from None

    def _check(self) -> None:
        if not self._name or self._path.is_dir():
            raise self._refusal("it is a directory" if self._name else "its name is empty")
        try:
            if self._path.exists():
                if not os.access(self._path, os.W_OK):
                    raise self._refusal("no permission to write it")
                if self._is_device():
                    return
            descriptor, probe = tempfile.mkstemp(prefix=".peagle-", dir=self._path.parent)
            os.close(descriptor)
            os.unlink(probe)
        except OSError as error:
            raise self._refusal(reason_of(error)) from None

    def _is_device(self) -> bool:
        """Return whether the path is a device or a pipe, which no file may replace."""
        return self._path.exists() and not stat.S_ISREG(self._path.stat().st_mode)

    def _refusal(self, why: str) -> InputError:
        expected = "a file in a directory that exists and that can be written to"
        if why == os.strerror(errno.ENOSPC):
            expected = "room for it: free some, or name a file elsewhere"
        return InputError(f"{self._flag} {self._name} cannot be written: {why}; expected {expected}")
