"""What the scripts share: their options, requests, rounds, progress, and the folder of a run.

The folder holds raw.jsonl (a line per measurement), run.json (provenance, options, rows) and README.md (the page). The
name of a figure ends with its unit, which decides how pages show it.
"""

import argparse
import dataclasses
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from peagle.base.errors import InputError
from peagle.base.strict_json import dumps
from peagle.engine.request import Request
from peagle.measure import reports
from peagle.measure.metrics import Spread
from peagle.measure.provenance import origin_text, provenance, tuning
from peagle.measure.record import Json as Json
from peagle.measure.record import append
from peagle.measure.record import turns as turns
from peagle.pair import Pair
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering

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


def expect_least(least: int, options: argparse.Namespace, *names: str) -> None:
    """Raise InputError for an option below a bound."""
    for name in names:
        if (value := getattr(options, name)) < least:
            raise InputError(f"--{name.replace('_', '-')} is {value}; expected {least} or more")


def numbers(
    option: str, typed: str, least: float = 1, most: float = math.inf, kind: Callable[[str], Any] = int
) -> list[Any]:
    """Parse numbers within bounds, separated by commas; sorted, without repeats."""
    try:
        values = sorted({kind(number) for number in typed.split(",")})
    except ValueError:
        raise InputError(f"{option} is {typed!r}; expected numbers with commas between, such as 1,2,4,8") from None
    if not least <= values[0] <= values[-1] <= most:
        bounds = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
        raise InputError(f"{option} is {typed!r}; expected numbers {bounds}")
    return values


def first_requests(pair: Pair, prompts: Path, num_prompts: int, max_new_tokens: int) -> list[Request]:
    """Make requests of the first turns of a file's first prompts, in the chat template."""
    return [
        pair.request(conversation, [], Rendering(), max_new_tokens=max_new_tokens, index=index)
        for index, conversation in enumerate(read_prompt_file(prompts, strict=True).conversations[:num_prompts])
    ]


# --- rounds ---------------------------------------------------------------------------------------------------------


def ratios(values: Iterable[float], others: Iterable[float]) -> list[float]:
    """Divide figures by others of the same rounds."""
    return [value / other for value, other in zip(values, others, strict=True)]


def spread(values: Sequence[float]) -> Json | None:
    """Return median, lowest and highest for a record; None of nothing."""
    return dataclasses.asdict(Spread.of(values)) if values else None


class Lines:
    """Lines of measurements, each with its round."""

    def __init__(self, lines: Iterable[Json]) -> None:
        self._lines = sorted(lines, key=lambda line: line["round"])

    def of(self, **fields: Any) -> list[Json]:
        """Return the lines with these values, by round."""
        return [line for line in self._lines if all(line.get(name) == value for name, value in fields.items())]

    def values(self, figure: str, **fields: Any) -> list[float]:
        """Return a figure of each round; none if it is not known."""
        return [line[figure] for line in self.of(**fields) if line.get(figure) is not None]

    def over(self, figure: str, fields: Json, others: Json) -> Json | None:
        """Divide a figure of lines by that of others, within rounds; None if one side has none."""
        values, by = self.values(figure, **fields), self.values(figure, **others)
        return spread(ratios(values, by)) if values and by else None


def say(what: str) -> None:
    """Show the part that begins now, on one line of standard error, overwritten."""
    print(f"\r\x1b[K{what}", end="" if what else "\n", file=sys.stderr, flush=True)


# --- a run's folder -------------------------------------------------------------------------------------------------


def origin(module: str, typed: Sequence[str]) -> Json:
    """Collect the provenance of a run of `python -m module`, with its command line as typed.

    The environment's variables that change the run come first; absolute paths are shortened to names.
    """
    words = [Path(word).name if Path(word).is_absolute() else word for word in typed]
    return provenance() | {"command": " ".join([*tuning(), shlex.join(["python", "-m", module, *words])])}


class Run:
    """The folder of a new run. raw.jsonl is written line by line, so that a stopped run has lost nothing."""

    def __init__(self, out: Path, typed: Sequence[str], config: Json, module: str = "scripts.bench") -> None:
        self.lines: list[Json] = []
        self.record: Json = {"schema": 1, "provenance": origin(module, typed), "config": config}
        self._out = out
        out.mkdir(parents=True)

    def extend(self, lines: Iterable[Json]) -> None:
        """Append lines as they come."""
        for line in lines:
            self.lines.append(line)
            append(self._out / "raw.jsonl", [line])

    def write(self, page: Callable[[Json], Sequence[reports.Block]], show: bool = True, **parts: Any) -> None:
        """Write run.json with these parts, and the page that follows from it. show: print it, too."""
        self.record |= parts
        (self._out / "run.json").write_text(dumps(self.record, indent=1) + "\n", encoding="utf-8")
        text = reports.markdown(page(self.record))
        (self._out / "README.md").write_text(text, encoding="utf-8")
        if show:
            print(text)


# --- a page ---------------------------------------------------------------------------------------------------------

# what ends a figure's name: the unit in which a page shows it, and how many of these it has
UNITS = (("_per_s", "/s", 1), ("_ms", ", ms", 1), ("_s", ", ms", 1e3), ("_bytes", ", MB", 1e-6), ("_frac", ", %", 100))


def title(text: str, record: Json, models: str = "") -> list[reports.Block]:
    """Lay out a page's title, the command, the models and the machine."""
    source = record["provenance"]
    about = "; ".join(filter(None, (models, origin_text(source), source["time"])))
    return [reports.heading(text, 1), f"`{source['command']}`", f"{about}."]


def table(rows: Sequence[Json], *names: str) -> reports.Table:
    """Make a table of some fields of rows, a column each, unless no row has it."""
    known = [name for name in names if any(row.get(name) is not None for row in rows)]
    return reports.Table([header(name) for name in known], [[text_of(row, name) for name in known] for row in rows])


def text_of(row: Json, name: str) -> str:
    """Format a field, a number or spread in the unit that its name ends with; empty if it is not known."""
    value, factor = row.get(name), next((factor for end, _, factor in UNITS if name.endswith(end)), None)
    if isinstance(value, dict) and value["lowest"] < value["highest"]:
        return Spread(**value).text(lambda one: number_text((factor or 1) * one))
    value = value["median"] if isinstance(value, dict) else value
    if isinstance(value, float) or (isinstance(value, int) and factor):
        return number_text((factor or 1) * value)
    return "" if value is None else str(value)


def number_text(value: float) -> str:
    """Format a number with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def header(name: str) -> str:
    """Make a column's header of a field's name."""
    end, unit = next(((end, unit) for end, unit, _ in UNITS if name.endswith(end)), ("", ""))
    return name.removesuffix(end).replace("_", " ") + unit
