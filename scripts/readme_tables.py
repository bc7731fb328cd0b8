"""Make the tables of README.md and results/README.md from the runs they show.

    python -m scripts.readme_tables            # rewrites what stands between the marks
    python -m scripts.readme_tables --check    # writes nothing; exit code 1 if a table is stale

A table stands between two comments. The first names its kind and its run, or, for the list of all runs, their folder:

    <!-- peers results/2026-11-24_cpu_bench_peers -->
    ...
    <!-- end of peers -->
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from peagle.measure.pages import Table, markdown
from peagle.measure.sweep.page import acceptance_text, estimate_text
from peagle.measure.sweep.plan import AUTO
from peagle.ops.errors import InputError
from scripts.peers.roster import OURS
from scripts.runs import Json, in_one_line, new_parser, spread_text

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, ROOT / "results" / "README.md")
MARKED = re.compile(r"<!-- (?P<kind>\w+) (?P<run>results(?:/\S+)?) -->\n.*?<!-- end of (?P=kind) -->", re.DOTALL)


def peers(folder: Path) -> Table:
    """Show plain decoding of each checkpoint over its peers', and the cost of verifying (scripts.bench_peers)."""
    run = _record(folder)
    widths = [str(width) for width in run["config"]["widths"] if width > 1]
    verifying = f"cost of verifying {', '.join(widths)} rows"
    lines = []
    for checkpoint in run["checkpoints"]:
        rows = {row["engine"]: row for row in run["rows"] if row["checkpoint"] == checkpoint["name"]}
        ours = rows[OURS]
        # of several forms of a peer its fastest: ours is ahead of it by least
        others = [row for name, row in rows.items() if name.startswith("transformers")]
        fastest = min(others, key=lambda row: float(row["ours_over_peer_decode"]["median"]), default=None)
        lines.append(
            [
                f"{checkpoint['name']}, {_count(checkpoint['parameters'])} parameters",
                f"{_figures(ours['decode_tok_per_s']['median'])} tok/s",
                _ahead(rows.get("llama.cpp")),
                _ahead(fastest),
                ", ".join(format(ours["v"][width]["median"], ".2f") for width in widths),
            ]
        )
    return Table(("model", "plain decoding", "over llama.cpp", "over transformers", verifying), lines)


def speedup(folder: Path) -> Table:
    """Show speculation with each K over plain decoding in a sweep's first setting, its drafters side by side."""
    rows = _record(folder)["rows"]
    setting = [rows[0][key] for key in SETTING]
    arms = {(row["k"], _drafter(row)): row for row in rows if row["k"] and [row[key] for key in SETTING] == setting}
    drafters = list(dict.fromkeys(drafter for _, drafter in arms))
    header = ["K"]
    for drafter in drafters:
        header += [f"{drafter}: speed-up (95 %), slower for sure", "acceptance"]
    lines = [[str(k), *(cell for drafter in drafters for cell in _gained(arms.get((k, drafter))))] for k in SHOWN]
    return Table(header, lines)


def at_largest_k(rows: Sequence[Json]) -> list[Json]:
    """Pick a sweep's rows of chat prompts at the largest fixed K, of which tables show the tasks, too."""
    fixed = [row for row in rows if not row["raw"] and row["k"] != AUTO]
    return [row for row in fixed if row["k"] == max(each["k"] for each in fixed)]


def _drafter(row: Json) -> str:
    """Take K from the label."""
    return str(row["label"]).partition(", ")[2] or "one drafter"


def _gained(row: Json | None) -> tuple[str, str]:
    """Make two cells: how much faster, on how many requests surely slower; and the acceptance length."""
    if row is None:
        return "-", "-"
    return f"{estimate_text(row['speedup'])}, {row['num_slower']}", acceptance_text(row)


def runs(folder: Path) -> Table:
    """List every run of a folder: what it shows, when, by which commit's code, where, and the command that made it."""
    lines = []
    for path in sorted(folder.glob("*/run.json")):
        run = _record(path.parent)
        origin = run["sittings"][0] if "sittings" in run else run["provenance"]
        title = (path.parent / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        device = origin["device"]
        where = f"{origin['cpu']}, {origin['num_threads']} threads" if device["platform"] == "cpu" else device["kind"]
        command = origin["command"] if isinstance(origin["command"], str) else " ".join(origin["command"])
        name = path.parent.name.split("_", 2)[-1].replace("_", " ")
        lines.append(
            [
                f"[{title}: {name}]({path.parent.name}/README.md)",
                origin["time"][:10],
                origin["git"]["commit"][:10] if origin["git"] else "-",
                f"{where}; jaxlib {origin['packages']['jaxlib']}",
                f"`{command}`",
            ]
        )
    return Table(("run", "when", "code", "where", "command"), lines)


SHOWN = (1, 2, 3, 4, 5, 7, AUTO)  # K of a sweep; the run's page has all
SETTING = ("prompts", "raw", "temperature")
KINDS: dict[str, Callable[[Path], Table]] = {"peers": peers, "speedup": speedup, "runs": runs}


def rendered(text: str, root: Path = ROOT) -> str:
    """Make every marked table anew. Raises InputError for an unknown kind, and for a run that is not there."""

    def table(found: re.Match[str]) -> str:
        kind, run = found["kind"], found["run"]
        if kind not in KINDS:
            raise InputError(f"a table of kind {kind!r}; expected one of {', '.join(KINDS)}")
        try:
            text = markdown([KINDS[kind](root / run)])
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"the table {kind} of {run}: its run.json cannot be read: {error!r}") from None
        return f"<!-- {kind} {run} -->\n{text}<!-- end of {kind} -->"

    return MARKED.sub(table, text)


def _record(folder: Path) -> Json:
    found: Json = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return found


def _count(parameters: int) -> str:
    size, unit = (parameters / 1e9, "G") if parameters >= 1e9 else (parameters / 1e6, "M")
    return f"{_figures(size)} {unit}"


def _figures(value: float) -> str:
    """Format without a fraction from 10 on."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _ahead(row: Json | None) -> str:
    if row is None:
        return "-"
    ratio = row["ours_over_peer_decode"]
    digits = 0 if ratio["median"] >= 10 else 2
    return spread_text(ratio, f".{digits}f")


def main() -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is stale")
    check = parser.parse_args().check

    def run() -> int:
        written = {page: page.read_text(encoding="utf-8") for page in PAGES}
        made = {page: rendered(text) for page, text in written.items()}
        if check:
            return 0 if made == written else 1
        for page, text in made.items():
            page.write_text(text, encoding="utf-8")
        return 0

    return in_one_line("readme_tables", run)


if __name__ == "__main__":
    sys.exit(main())
