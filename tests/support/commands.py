"""Commands in the test's process, and their refusals."""

from collections.abc import Iterable

import pytest

from peagle.cli import main

Captured = tuple[int, str, str]  # exit code, standard output, standard error


REPEATED = ("--data", "--prompt-file", "--stop")  # options of several values


def last_of_each(line: Iterable[str]) -> list[str]:
    """Drop all but the last value of an option that takes one, which a command refuses."""
    kept: list[str] = []
    for word in line:
        name = word.partition("=")[0]
        if name in kept and name.startswith("-") and name not in ("-", *REPEATED):
            start = kept.index(name)
            value = kept[start + 1 : start + 2]
            del kept[start : start + 1 + sum(text[:1] != "-" or text[1:2] in "0123456789" for text in value)]
        kept.append(word)
    return kept


def words(*parts: object) -> list[str]:
    """Split options that are written in one text; other objects are one word. Of an option the last value counts."""
    return last_of_each(word for part in parts for word in (part.split() if isinstance(part, str) else [str(part)]))


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
        refused(run(capsys, *last_of_each([*command, *arguments])), part)
