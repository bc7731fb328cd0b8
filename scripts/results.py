"""A script's run: a folder with run.json, raw.jsonl, README.md, pictures (scripts.publish puts it into results/)."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peagle.measure.provenance import provenance, tuning
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps


def in_one_line(name: str, run: Callable[[], int]) -> int:
    """The exit code of what a script does; of bad input and of files that cannot be used 2, and a line that says so."""
    try:
        return run()
    except (InputError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2


def origin(module: str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """What goes with every number of a run of `python -m module`: its command line among it, with what the environment
    changes before it. `arguments` are those as typed, sys.argv's by default."""
    typed = sys.argv[1:] if arguments is None else arguments
    return provenance() | {"command": " ".join([*tuning(), shlex.join(["python", "-m", module, *typed])])}


class RawLines:
    """raw.jsonl of a new run, a line at a time: what is known is kept, whatever stops the run."""

    def __init__(self, out: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._path = out / "raw.jsonl"
        out.mkdir(parents=True)

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(dumps(line) + "\n")


def write_run(out: Path, record: dict[str, Any], raw: Sequence[dict[str, Any]], page: str) -> None:
    """The new folder holds run.json, raw.jsonl (a line each) and README.md, which is shown, too."""
    kept = RawLines(out)
    for line in raw:
        kept.add(line)
    write_page(out, record, page)


def write_page(out: Path, record: dict[str, Any], page: str, show: bool = True) -> None:
    """The folder, whose raw lines are there, holds run.json and README.md, which is shown, too, if asked for."""
    (out / "run.json").write_text(dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(page, encoding="utf-8")
    if show:
        print(page)
