"""A script's run: its command line, the requests it decodes, its progress, and the folder that it writes.

The folder holds run.json, raw.jsonl, README.md and pictures; scripts.publish puts it into results/ in short.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from peagle.checkpoints import DEMO, HELD_OUT
from peagle.engine.request import Request
from peagle.measure import pages
from peagle.measure.metrics import Spread
from peagle.measure.provenance import provenance, tuning
from peagle.measure.sweep.figures import Estimate, estimate_text
from peagle.measure.sweep.plan import AUTO
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.pair import Pair
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering

Json = dict[str, Any]
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
    """Run a scenario of scripts.bench; it gets its options and the words after `python -m scripts.bench`."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    return in_one_line(f"bench {name}", lambda: bench(parser.parse_intermixed_args(typed), [name, *typed]))


def new_record(typed: Sequence[str], config: Json, **parts: Any) -> Json:
    """Make the record of a scenario's run; `typed`: the words after `python -m scripts.bench`."""
    return {"schema": 1, "provenance": origin("scripts.bench", typed), "config": config, **parts}


def numbers(option: str, typed: str) -> list[int]:
    """Read numbers of 1 or more with commas between, in order, without repeats."""
    try:
        values = sorted({int(number) for number in typed.split(",")})
    except ValueError:
        raise InputError(f"{option} is {typed!r}; expected numbers with commas between, such as 1,2,4,8") from None
    if values[0] < 1:
        raise InputError(f"{option} is {typed!r}; expected numbers of 1 or more")
    return values


def at_largest_k(rows: Sequence[Json]) -> list[Json]:
    """Select a sweep's rows of chat prompts at its largest fixed K, of which tables show the tasks, too."""
    fixed = [row for row in rows if not row["raw"] and row["k"] != AUTO]
    largest = max((row["k"] for row in fixed), default=None)
    return [row for row in fixed if row["k"] == largest]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median with the extremes, as a record has them."""
    return dataclasses.asdict(Spread.of(values))


def spread_text(figure: Json, form: str) -> str:
    """Format a spread of a record."""
    return Spread(**figure).text(lambda value: format(value, form))


def figure_text(figure: Json | None, digits: int = 2) -> str:
    """Format an estimate of a record with its interval."""
    return estimate_text(None if figure is None else Estimate(**figure), digits)


def add_run_options(parser: argparse.ArgumentParser, rounds: int = 0, of: str = "") -> None:
    """Add the options of the folder that is written, and, if it has rounds, of how many."""
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"{of} (default %(default)s)".lstrip())


def add_prompt_options(parser: argparse.ArgumentParser, num_prompts: int = 60, max_new_tokens: int = 256) -> None:
    """Add the options of the target, its prompts and the length of their answers."""
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
    """Make the requests that the prompt options name. Raises InputError for fewer than one."""
    if arguments.num_prompts < 1:
        raise InputError(f"--num-prompts is {arguments.num_prompts}; expected 1 or more")
    return first_requests(pair, arguments.prompts, arguments.num_prompts, arguments.max_new_tokens)


def first_requests(pair: Pair, prompts: Path, num_prompts: int, max_new_tokens: int) -> list[Request]:
    """Make requests of the first turns of a file's first prompts, in the chat template."""
    return [
        pair.request(conversation, [], Rendering(), max_new_tokens=max_new_tokens, index=index)
        for index, conversation in enumerate(read_prompt_file(prompts, strict=True).conversations[:num_prompts])
    ]


def prompt_config(arguments: argparse.Namespace, num_prompts: int) -> Json:
    """Collect the prompt options for run.json; of a path its name."""
    return {
        "target": Path(arguments.target).name,
        "prompts": arguments.prompts.name,
        "num_prompts": num_prompts,
        "max_new_tokens": arguments.max_new_tokens,
    }


def origin(module: str, arguments: Sequence[str] | None = None) -> Json:
    """Collect what goes with every number of a run of `python -m module`.

    The command line is part of it, after the environment's variables that change what runs; of absolute paths it keeps
    the names. `arguments` as typed: sys.argv's by default.
    """
    typed = sys.argv[1:] if arguments is None else arguments
    named = [Path(word).name if Path(word).is_absolute() else word for word in typed]
    return provenance() | {"command": " ".join([*tuning(), shlex.join(["python", "-m", module, *named])])}


def where(source: Json) -> str:
    """Say where, with what and when a run was made."""
    device = source["device"]
    on_cpu = device["platform"] == "cpu"
    machine = f"{source['cpu']}, {source['num_threads']} threads" if on_cpu else device["kind"]
    commit = f", commit {source['git']['commit'][:10]}" if source.get("git") else ""
    return f"{machine}; jaxlib {source['packages']['jaxlib']}{commit}; {source['time']}"


class Progress:
    """One line on standard error, overwritten: what goes on, and the time left for `total` parts."""

    def __init__(self, prefix: str = "", total: int = 0) -> None:
        self._prefix, self._total, self._done = prefix, total, 0
        self._longest, self._started = 0, time.monotonic()

    def __call__(self, what: str) -> None:
        line = " ".join(filter(None, (self._prefix, what)))
        self._longest = max(self._longest, len(line))
        print(f"\r{line:<{self._longest}}", end="", file=sys.stderr, flush=True)

    def begin(self, total: int) -> None:
        """Count the parts of what follows from here on."""
        self._total, self._done, self._started = total, 0, time.monotonic()

    def part(self, what: str) -> None:
        """Name the part that begins now, with the time left if one is done."""
        took = time.monotonic() - self._started
        left = f", {took / self._done * (self._total - self._done):.0f} s left" if self._done else ""
        self(f"{self._done + 1} of {self._total}: {what}{left}")
        self._done += 1

    def end(self) -> None:
        """Finish the line."""
        self("done")
        print(file=sys.stderr)


class RawLines:
    """raw.jsonl of a new run, written line by line, so that a run that stops has lost nothing."""

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
    """Write run.json, README.md and the pictures of its page into the folder; show: print the page, too."""
    text = pages.markdown(blocks)
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, content in {"README.md": text, **pages.pictures(blocks)}.items():
        (out / name).write_text(content, encoding="utf-8")
    if show:
        print(text)
