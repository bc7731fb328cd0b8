"""The README's tables, made from the runs they show.

    python -m scripts.readme_tables            # rewrites what stands between the marks
    python -m scripts.readme_tables --check    # only says whether that would change anything (exit code 1)

A table stands between two comments, the first of which names its kind and its run:

    <!-- peers results/2026-11-21_cpu_bench_peers -->
    ...
    <!-- end of peers -->
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peagle.ops.errors import InputError
from scripts.peers.roster import OURS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MARKED = re.compile(r"<!-- (?P<kind>\w+) (?P<run>results/\S+) -->\n.*?<!-- end of (?P=kind) -->", re.DOTALL)

Json = dict[str, Any]


def peers(run: Json) -> list[str]:
    """Plain decoding of each checkpoint over its peers', and what verifying costs (scripts.bench_peers)."""
    widths = [str(width) for width in run["config"]["widths"] if width > 1]
    lines = [
        f"| model | plain decoding | over llama.cpp | over transformers | cost of verifying {', '.join(widths)} rows |",
        "|---|---|---|---|---|",
    ]
    for checkpoint in run["checkpoints"]:
        rows = {row["engine"]: row for row in run["rows"] if row["checkpoint"] == checkpoint["name"]}
        ours = rows[OURS]
        # of several forms of a peer its fastest: where ours is ahead by least
        others = [row for name, row in rows.items() if name.startswith("transformers")]
        fastest = min(others, key=lambda row: float(row["ours_over_peer_decode"]["median"]), default=None)
        lines.append(
            f"| {checkpoint['name']}, {_count(checkpoint['parameters'])} parameters "
            f"| {_figures(ours['decode_tok_per_s']['median'])} tok/s "
            f"| {_ahead(rows.get('llama.cpp'))} | {_ahead(fastest)} "
            f"| {', '.join(format(ours['v'][width]['median'], '.2f') for width in widths)} |"
        )
    return lines


def speedup(run: Json) -> list[str]:
    """Speculation with each K over plain decoding (scripts/sweep_acceptance.py)."""
    lines = [
        "| K | against own plain decoding, pooled | median of prompts (95 %) | prompts slower for sure "
        "| acceptance length (without loops) |",
        "|---|---|---|---|---|",
    ]
    for row in run["rows"]:
        if row["k"] == 0:
            continue
        low, high = row["speedup_median_interval"]
        quiet = row["acceptance_length_without_loops"]
        lines.append(
            f"| {row['k']} | {row['speedup_pooled']:.2f} | {row['speedup_median']:.2f} ({low:.2f}..{high:.2f}) "
            f"| {row['slower_prompts']} of {row['num_outputs']} "
            f"| {row['acceptance_length']:.2f} ({'-' if quiet is None else format(quiet, '.2f')}) |"
        )
    return lines


KINDS: dict[str, Callable[[Json], list[str]]] = {"peers": peers, "speedup": speedup}


def rendered(readme: str, root: Path = ROOT) -> str:
    """The text with every marked table made anew. Raises InputError for an unknown kind and for a run that is not
    there."""

    def table(found: re.Match[str]) -> str:
        kind, run = found["kind"], found["run"]
        if kind not in KINDS:
            raise InputError(f"a table of kind {kind!r}; expected one of {', '.join(KINDS)}")
        try:
            record = json.loads((root / run / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"the table {kind} of {run}: its run.json cannot be read: {error}") from None
        return "\n".join([f"<!-- {kind} {run} -->", *KINDS[kind](record), f"<!-- end of {kind} -->"])

    return MARKED.sub(table, readme)


def _count(parameters: int) -> str:
    size, unit = (parameters / 1e9, "G") if parameters >= 1e9 else (parameters / 1e6, "M")
    return f"{_figures(size)} {unit}"


def _figures(value: float) -> str:
    """Without a fraction from 10 on."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _ahead(row: Json | None) -> str:
    if row is None:
        return "-"
    ratio = row["ours_over_peer_decode"]
    digits = 0 if ratio["median"] >= 10 else 2
    return f"{ratio['median']:.{digits}f} ({ratio['min']:.{digits}f}..{ratio['max']:.{digits}f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the tables are stale")
    check = parser.parse_args().check
    readme = README.read_text(encoding="utf-8")
    try:
        made = rendered(readme)
    except InputError as error:
        print(f"readme_tables: error: {error}", file=sys.stderr)
        return 2
    if check:
        return 0 if made == readme else 1
    README.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
