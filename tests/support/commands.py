"""Commands in the test's process, and their refusals."""

from collections.abc import Iterable

import pytest

from peagle.cli import main

Captured = tuple[int, str, str]  # exit code, standard output, standard error


def words(*parts: object) -> list[str]:
    """Split options that are written in one text; other objects are one word."""
    return [word for part in parts for word in (part.split() if isinstance(part, str) else [str(part)])]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Captured:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(result: Captured, *parts: str) -> None:
    """Expect exit code 2, and one line on standard error with these parts."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("peagle: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for part in parts:
        assert part in err, err


def all_refused(
    capsys: pytest.CaptureFixture[str], command: Iterable[str], table: Iterable[tuple[Iterable[str], str]]
) -> None:
    """Expect a command to refuse each of these arguments, with a part of its line."""
    for arguments, part in table:
        refused(run(capsys, *command, *arguments), part)
