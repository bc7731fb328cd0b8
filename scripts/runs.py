"""What the scripts share: their options, requests, rounds, progress, and the folder of a run.

The folder holds run.json, raw.jsonl, README.md and pictures.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from peagle.checkpoints import DEMO, HELD_OUT
from peagle.engine.request import Request
from peagle.measure import reports
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


# --- options --------------------------------------------------------------------------------------------------------


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


def last_line(log: IO[bytes]) -> str:
    """Return the last line that a process printed."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


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


def expect_least(least: int, options: argparse.Namespace, *names: str) -> None:
    """Raise InputError for an option below a bound."""
    for name in names:
        if (value := getattr(options, name)) < least:
            raise InputError(f"--{name.replace('_', '-')} is {value}; expected {least} or more")


def numbers(option: str, typed: str) -> list[int]:
    """Parse numbers of 1 or more, separated by commas; sorted, without repeats."""
    try:
        values = sorted({int(number) for number in typed.split(",")})
    except ValueError:
        raise InputError(f"{option} is {typed!r}; expected numbers with commas between, such as 1,2,4,8") from None
    if values[0] < 1:
        raise InputError(f"{option} is {typed!r}; expected numbers of 1 or more")
    return values


def prompted(options: argparse.Namespace, pair: Pair) -> list[Request]:
    """Make the requests of the prompt options. Raises InputError for fewer than one."""
    expect_least(1, options, "num_prompts")
    return first_requests(pair, options.prompts, options.num_prompts, options.max_new_tokens)


def first_requests(pair: Pair, prompts: Path, num_prompts: int, max_new_tokens: int) -> list[Request]:
    """Make requests of the first turns of a file's first prompts, in the chat template."""
    return [
        pair.request(conversation, [], Rendering(), max_new_tokens=max_new_tokens, index=index)
        for index, conversation in enumerate(read_prompt_file(prompts, strict=True).conversations[:num_prompts])
    ]


# --- rounds ---------------------------------------------------------------------------------------------------------


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Begin with another item in each round, so that drift of the machine affects all equally."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def turns(items: Sequence[Item], rounds: int, warm_up: bool = True) -> Iterator[tuple[int, Item]]:
    """Yield (round, item), each item once a round (`rotated`); round 0 warms up."""
    for number in range(0 if warm_up else 1, rounds + 1):
        yield from ((number, item) for item in rotated(items, number))


def ratios(values: Iterable[float], others: Iterable[float]) -> list[float]:
    """Divide figures by others of the same rounds."""
    return [value / other for value, other in zip(values, others, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest for a record."""
    return dataclasses.asdict(Spread.of(values))


def spread_text(figure: Json, form: str) -> str:
    """Format a spread of a record."""
    return Spread(**figure).text(lambda value: format(value, form))


class Progress:
    """One line on standard error, overwritten: the current part, and the time left for `total` parts."""

    def __init__(self, prefix: str = "", total: int = 0) -> None:
        self._prefix, self._longest = prefix, 0
        self.begin(total)

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


# --- a run's folder -------------------------------------------------------------------------------------------------


def origin(module: str, typed: Sequence[str]) -> Json:
    """Collect the provenance of a run of `python -m module`, with its command line as typed.

    The environment's variables that change the run come first; absolute paths are shortened to names.
    """
    words = [Path(word).name if Path(word).is_absolute() else word for word in typed]
    return provenance() | {"command": " ".join([*tuning(), shlex.join(["python", "-m", module, *words])])}


def new_record(typed: Sequence[str], config: Json, **parts: Any) -> Json:
    """Make the record of a scenario's run; `typed`: the words after `python -m scripts.bench`."""
    return {"schema": 1, "provenance": origin("scripts.bench", typed), "config": config, **parts}


def where(source: Json) -> str:
    """Describe a run's machine, versions and time."""
    device = source["device"]
    on_cpu = device["platform"] == "cpu"
    machine = f"{source['cpu']}, {source['num_threads']} threads" if on_cpu else device["kind"]
    commit = f", commit {source['git']['commit'][:10]}" if source.get("git") else ""
    return f"{machine}; jaxlib {source['packages']['jaxlib']}{commit}; {source['time']}"


class RawLines:
    """raw.jsonl of a new run, written line by line, so that a stopped run has lost nothing."""

    def __init__(self, out: Path) -> None:
        self.lines: list[Json] = []
        self._path = out / "raw.jsonl"
        out.mkdir(parents=True)

    def extend(self, lines: Iterable[Json]) -> None:
        """Append lines as they come."""
        for line in lines:
            self.lines.append(line)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(dumps(line) + "\n")


def write_run(out: Path, record: Json, blocks: Sequence[reports.Block], show: bool = True) -> None:
    """Write run.json, README.md and pictures into the folder. show: print the page, too."""
    text = reports.markdown(blocks)
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, content in {"README.md": text, **reports.pictures(blocks)}.items():
        (out / name).write_text(content, encoding="utf-8")
    if show:
        print(text)


def title(text: str, record: Json, models: str = "") -> list[reports.Block]:
    """Lay out a page's title, the command, the models and the machine."""
    source = record["provenance"]
    about = f"{models}; {where(source)}." if models else f"{where(source)}."
    return [reports.heading(text, 1), f"`{source['command']}`", about]


def table(rows: Iterable[Json], columns: Mapping[str, Callable[[Json], str]]) -> reports.Table:
    """Make a page's table. columns: {header: format of a row's cell}."""
    return reports.Table(tuple(columns), [[text(row) for text in columns.values()] for row in rows])


def cell(name: str, form: str = "", factor: float = 1.0) -> Callable[[Json], str]:
    """Format a value of a row, a number if there is a form; "-" if it is not known."""
    return lambda row: "-" if row[name] is None else format(factor * row[name], form) if form else str(row[name])
