"""Put a run into results/, in short: its page, its run.json and its pictures.

    python -m scripts.publish RUN results/NAME

RUN is the folder of a finished `peagle sweep` or of a script here, and stays as it is. The new folder holds README.md,
run.json and at most two pictures. Of a sweep, run.json keeps the plan, the provenance and the figures of tables; of
another run everything, with the folder's other .json files. Figures have six digits. Raw lines are left out. It refuses
files above the limits below.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.measure import reports
from peagle.measure.sweep import charts, layout
from peagle.measure.sweep.figures import alone, concurrent, rows
from peagle.measure.sweep.plan import Plan, short_names
from peagle.measure.sweep.store import IN_SHORT, KIND, RUN, open_run
from peagle.ops import strict_json
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from scripts.runs import Json, in_one_line, new_parser

MAX_BYTES = {"README.md": 24_000, RUN: 64_000, ".svg": 60_000, ".png": 60_000}
MAX_PICTURES = 2
DIGITS = 6
FIGURES = ("num_requests", "looping_frac", "acceptance_length", "speedup")  # of a row, and of a category
ROW = (
    *("prompts", "raw", "temperature", "k", "drafter", "draft_vocab", "label"),
    *("num_spec_steps", "num_plain_steps", "num_slower", "num_compared"),
)
AT_ONCE = (  # of a row of many requests at once
    *("prompts", "raw", "temperature", "k", "drafter", "draft_vocab", "concurrency", "drafter_window", "label"),
    *("num_requests", "num_repeats", "tok_per_s", "tok_per_s_repeats", "speedup", "speedup_repeats"),
    *("ttft_s", "itl_s", "acceptance_length", "num_spec_steps", "num_plain_steps", "equal_to_plain_frac"),
)


def publish(run: Path, out: Path) -> None:
    """Write the run in short into a new folder. Raises InputError for what cannot be published."""
    expect_new(out)
    record = _read(run / RUN)
    files = _sweep(run) if record.get("kind") == KIND else _as_it_is(run, record)
    _expect_small(run, files)
    out.mkdir(parents=True)
    for name, content in files.items():
        (out / name).write_bytes(content)


def _read(path: Path) -> Json:
    """Read a JSON object."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}); expected a file of a run") from None
    if not isinstance(record, dict):
        raise InputError(f"{path} holds no object; expected a file of a run")
    return record


def _sweep(run: Path) -> dict[str, bytes]:
    """Make a sweep's page anew, in short, with its record and pictures."""
    folder = open_run(run)
    if not folder.finished:
        raise InputError(f"{run} is not finished; expected a run that is: peagle sweep --out {run} --resume")
    if not charts.can_draw():
        raise InputError("no pictures can be drawn without matplotlib; pip install matplotlib")
    figures = rounded(rows(folder))  # so that page and run.json agree to the last digit
    blocks = layout.run_blocks(folder, figures)
    left_out = [block for block in blocks if isinstance(block, reports.Picture)][MAX_PICTURES:]
    blocks = [block for block in blocks if block not in left_out]
    entries = [row.to_json() for row in alone(figures)]
    fixed = [entry for entry in entries if not entry["raw"] and isinstance(entry["k"], int)]
    largest = max((entry["k"] for entry in fixed), default=None)
    kept = [_headline(entry, parts=entry in fixed and entry["k"] == largest) for entry in entries]
    at_once = [{name: entry[name] for name in AT_ONCE} for entry in (row.to_json() for row in concurrent(figures))]
    record = {name: value for name, value in folder.record.items() if name != "shares"}
    record |= {"by_concurrency": at_once} if at_once else {}
    texts = {"README.md": reports.markdown(blocks), RUN: _text(record | {"kind": IN_SHORT, "rows": kept})}
    return {
        name: _without_places(text, folder.plan, run).encode()
        for name, text in (texts | reports.pictures(blocks)).items()
    }


def _without_places(text: str, plan: Plan, run: Path) -> str:
    """Shorten the whole paths of models, files and the run, which are those of one machine."""
    files = [*plan.draft_vocabs, *(source.file for source in plan.sources), str(run.absolute())]
    names = dict.fromkeys(name for name in (plan.target, *plan.drafters, *files) if name and Path(name).is_absolute())
    short = dict(zip(names, short_names(list(names)), strict=True))
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, short[name])
    return text


def _headline(row: Mapping[str, Any], parts: bool) -> Json:
    """Keep the figures of a row that tables read, with or without its categories."""

    def figures(of: Mapping[str, Any]) -> Json:
        quiet = {"acceptance_length": of["without_loops"]["acceptance_length"]}
        return {name: of[name] for name in FIGURES} | {"without_loops": quiet}

    kept = {name: row[name] for name in ROW} | figures(row)
    if parts:
        kept["by_category"] = [{"part": part["part"], **figures(part)} for part in row["by_category"]]
    return kept


def _as_it_is(run: Path, record: Json) -> dict[str, bytes]:
    """Take a script's page, pictures and .json files."""
    for path in sorted(run.glob("*.json")):
        if path.name != RUN:
            record[path.stem] = _read(path)
    files = {"README.md": (run / "README.md").read_bytes(), RUN: _text(rounded(record)).encode()}
    return files | {path.name: path.read_bytes() for path in sorted(run.glob("*.svg"))}


def rounded(value: Any) -> Any:
    """Round every float in a JSON value, or in rows of figures, to DIGITS digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return dataclasses.replace(value, **{field.name: rounded(getattr(value, field.name)) for field in fields})
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return type(value)(map(rounded, value)) if isinstance(value, list | tuple) else value


def _text(record: Mapping[str, Any]) -> str:
    """Write a record as JSON with a line per name and per object of a list, for readable diffs."""
    compact = functools.partial(strict_json.dumps, separators=(",", ":"))

    def lines(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n" + ",\n".join(map(compact, value)) + "\n]"
        return compact(value)

    return "{\n" + ",\n".join(f'"{name}": {lines(value)}' for name, value in record.items()) + "\n}\n"


def _expect_small(run: Path, files: Mapping[str, bytes]) -> None:
    """Raise InputError for too many pictures, or a file above its limit."""
    pictures = [name for name in files if Path(name).suffix in MAX_BYTES]
    if len(pictures) > MAX_PICTURES:
        raise InputError(f"{run} has {len(pictures)} pictures; expected {MAX_PICTURES} at most")
    for name, content in files.items():
        most = MAX_BYTES.get(name) or MAX_BYTES[Path(name).suffix]
        if len(content) > most:
            raise InputError(f"{run / name}, in short, has {len(content)} bytes; expected {most} at most")


def main() -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("out", type=Path, help="the new folder, in results/")
    arguments = parser.parse_args()

    def run() -> int:
        publish(arguments.run, arguments.out)
        return 0

    return in_one_line("publish", run)


if __name__ == "__main__":
    sys.exit(main())
