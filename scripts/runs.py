"""A script's run: its command line, its requests, its progress, and its folder.

The folder holds run.json, raw.jsonl, README.md and pictures; scripts.publish puts it into results/ in short.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from peagle.checkpoints import DEMO, HELD_OUT
from peagle.engine.request import Request
from peagle.measure import pages
from peagle.measure.metrics import Spread
from peagle.measure.provenance import provenance, tuning
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.pair import Pair
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering

Json = dict[str, Any]
Item = TypeVar("Item")
ROOT = Path(__file__).parents[1]


def new_parser(text: str | None) -> argparse.ArgumentParser:
    """Make the parser of a script whose docstring is its help."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def in_one_line(name: str, run: Callable[[], int]) -> int:
    """Run a script and return its exit code; 2, and one line on standard error, for bad input."""
    try:
        return run()
    except (InputError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2


def run_scenario(
    name: str,
    parser: argparse.ArgumentParser,
    bench: Callable[[argparse.Namespace, list[str]], int],
    arguments: Sequence[str] | None,
) -> int:
    """Run a scenario on its options and the words after `python -m scripts.bench`."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    return in_one_line(f"bench {name}", lambda: bench(parser.parse_intermixed_args(typed), [name, *typed]))


def new_record(typed: Sequence[str], config: Json, **parts: Any) -> Json:
    """Make the record of a scenario's run; `typed`: the words after `python -m scripts.bench`."""
    return {"schema": 1, "provenance": origin("scripts.bench", typed), "config": config, **parts}


def numbers(option: str, typed: str) -> list[int]:
    """Parse numbers of 1 or more, separated by commas; sorted, without repeats."""
    try:
        values = sorted({int(number) for number in typed.split(",")})
    except ValueError:
        raise InputError(f"{option} is {typed!r}; expected numbers with commas between, such as 1,2,4,8") from None
    if values[0] < 1:
        raise InputError(f"{option} is {typed!r}; expected numbers of 1 or more")
    return values


def at_largest_k(rows: Sequence[Json]) -> list[Json]:
    """Select a sweep's rows of chat prompts at its largest fixed K."""
    fixed = [row for row in rows if not row["raw"] and isinstance(row["k"], int)]
    largest = max((row["k"] for row in fixed), default=None)
    return [row for row in fixed if row["k"] == largest]


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Rotate the items by the round's number, so that drift affects all equally."""
    turn = number % len(items)
    return [*items[turn:], *items[:turn]]


def table(rows: Iterable[Json], columns: Mapping[str, Callable[[Json], str]]) -> pages.Table:
    """Make a page's table. columns: {header: format of a row's cell}."""
    return pages.Table(tuple(columns), [[text(row) for text in columns.values()] for row in rows])


def cell(name: str, form: str = ".2f", factor: float = 1.0) -> Callable[[Json], str]:
    """Format a number of a row; "-" if it is not known."""
    return lambda row: "-" if row[name] is None else format(factor * row[name], form)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest for a record."""
    return dataclasses.asdict(Spread.of(values))


def spread_text(figure: Json, form: str) -> str:
    """Format a spread of a record."""
    return Spread(**figure).text(lambda value: format(value, form))


def add_run_options(parser: argparse.ArgumentParser, rounds: int = 0, of: str = "") -> None:
    """Add the options of the output folder and, if there are rounds, of their number."""
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"{of} (default %(default)s)".lstrip())


def add_prompt_options(parser: argparse.ArgumentParser, num_prompts: int = 60, max_new_tokens: int = 256) -> None:
    """Add the options of the target, its prompts and the length of answers."""
    parser.add_argument("--target", default=DEMO, help="a target's directory (default: the demo's)")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT, help="JSON lines (default: the demo's held-out ones)")
    parser.add_argument("--num-prompts", type=int, default=num_prompts, help="how many of them (default %(default)s)")
    parser.add_argument(
        "-n", "--max-new-tokens", type=int, default=max_new_tokens, help="per prompt (default %(default)s)"
    )


def add_drafter_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of the drafter."""
    parser.add_argument("--drafter", default=DEMO, help="a drafter's directory (default: the demo's)")


def prompted(arguments: argparse.Namespace, pair: Pair) -> list[Request]:
    """Make the requests of the prompt options. Raises InputError for fewer than one."""
    if arguments.num_prompts < 1:
        raise InputError(f"--num-prompts is {arguments.num_prompts}; expected 1 or more")
    return first_requests(pair, arguments.prompts, arguments.num_prompts, arguments.max_new_tokens)


def first_requests(pair: Pair, prompts: Path, num_prompts: int, max_new_tokens: int) -> list[Request]:
    """Make requests of the first turns of a file's first prompts, in the chat template."""
    return [
        pair.request(conversation, [], Rendering(), max_new_tokens=max_new_tokens, index=index)
        for index, conversation in enumerate(read_prompt_file(prompts, strict=True).conversations[:num_prompts])
    ]


def origin(module: str, arguments: Sequence[str] | None = None) -> Json:
    """Collect the provenance of a run of `python -m module`, with its command line.

    The environment's variables that change the run come first; absolute paths are shortened to names. arguments: as
    typed, by default sys.argv's.
    """
    typed = sys.argv[1:] if arguments is None else arguments
    named = [Path(word).name if Path(word).is_absolute() else word for word in typed]
    return provenance() | {"command": " ".join([*tuning(), shlex.join(["python", "-m", module, *named])])}


def where(source: Json) -> str:
    """Describe a run's machine, versions and time."""
    device = source["device"]
    on_cpu = device["platform"] == "cpu"
    machine = f"{source['cpu']}, {source['num_threads']} threads" if on_cpu else device["kind"]
    commit = f", commit {source['git']['commit'][:10]}" if source.get("git") else ""
    return f"{machine}; jaxlib {source['packages']['jaxlib']}{commit}; {source['time']}"


class Progress:
    """One line on standard error, overwritten: the current part, and the time left for `total` parts."""

    def __init__(self, prefix: str = "", total: int = 0) -> None:
        self._prefix, self._total, self._done = prefix, total, 0
        self._longest, self._started = 0, time.monotonic()

    def __call__(self, what: str) -> None:
        line = " ".join(filter(None, (self._prefix, what)))
        self._longest = max(self._longest, len(line))
        print(f"\r{line:<{self._longest}}", end="", file=sys.stderr, flush=True)

    def begin(self, total: int) -> None:
        """Count parts from here on."""
        self._total, self._done, self._started = total, 0, time.monotonic()

    def part(self, what: str) -> None:
        """Show the part that begins now, with the time left if one is done."""
        took = time.monotonic() - self._started
        left = f", {took / self._done * (self._total - self._done):.0f} s left" if self._done else ""
        self(f"{self._done + 1} of {self._total}: {what}{left}")
        self._done += 1

    def end(self) -> None:
        """Finish the line."""
        self("done")
        print(file=sys.stderr)


class RawLines:
    """raw.jsonl of a new run, written line by line, so that a stopped run has lost nothing."""

    def __init__(self, out: Path) -> None:
        self.lines: list[Json] = []
        self._path = out / "raw.jsonl"
        out.mkdir(parents=True)

    def add(self, line: Json) -> None:
        """Append a line."""
        self.lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(dumps(line) + "\n")

    def extend(self, lines: Iterable[Json]) -> None:
        """Append lines as they come."""
        for line in lines:
            self.add(line)


def write_run(out: Path, record: Json, blocks: Sequence[pages.Block], show: bool = True) -> None:
    """Write run.json, README.md and pictures into the folder. show: print the page, too."""
    text = pages.markdown(blocks)
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, content in {"README.md": text, **pages.pictures(blocks)}.items():
        (out / name).write_text(content, encoding="utf-8")
    if show:
        print(text)
