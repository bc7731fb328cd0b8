"""Records of measurements: lines of JSON, appended as they come, so that a killed run loses at most a line.

A figure's name ends with its unit: _s, _ms, _per_s, _bytes, _frac.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from peagle.base.errors import InputError
from peagle.base.files import reason_of
from peagle.base.strict_json import dumps

Json = dict[str, Any]
Item = TypeVar("Item")


def append(path: Path, lines: Iterable[Json]) -> None:
    """Append lines in one write, so that they stay together; a last one that was cut off is removed.

    Only one process may write to a file. Raises InputError.
    """
    try:
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write("".join(dumps(line) + "\n" for line in lines).encode())
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {reason_of(error)}; what was measured before is kept: make room, then resume"
        ) from None


def read(path: Path, make: Callable[[Json], Item]) -> Iterator[Item]:
    """Make an item of every line, except of a last one that was cut off; none without the file.

    Raises InputError for a line that is no JSON object, or for which `make` raises KeyError, TypeError or ValueError.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield make(dict(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise InputError(f"{path} line {number} is damaged ({why}); remove the line, and resume the run") from None


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Begin with another item in each round, so that drift of the machine affects all equally."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def turns(items: Sequence[Item], rounds: int, warm_up: bool = True) -> Iterator[tuple[int, Item]]:
    """Yield (round, item), each item once a round (`rotated`); round 0 warms up."""
    for number in range(0 if warm_up else 1, rounds + 1):
        yield from ((number, item) for item in rotated(items, number))
