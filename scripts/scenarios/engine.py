"""Compare `peagle bench` of this checkout with another's.

    peagle random S /tmp/S
    python -m scripts.bench engine --out RUN --before CHECKOUT demo /tmp/S
    python -m scripts.bench engine --out RUN --before CHECKOUT --options "-p 0 -t 1 --context 8000" demo

The checkouts take turns: in every round each runs `peagle bench` in a process of its own. The other's kernels must be
compiled.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from peagle.base.errors import InputError
from peagle.base.files import expect_new
from peagle.loading.checkpoints import from_anywhere
from peagle.measure.reports import Block
from scripts import runs
from scripts.runs import ROOT, Json, Lines, Run, turns

NOW, BEFORE = "now", "before"
OPTIONS = "-p 512,2048 -n 64 -t 1,4 --slots 1,8,32 --repeats 3"
TEST = ("kind", "size", "context", "slots", "num_speculative_tokens")  # what names a test of `peagle bench`


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="demo, or directories of checkpoints")
    runs.add_run_options(parser, 5)
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT", help="another checkout")
    parser.add_argument("--options", default=OPTIONS, help="of peagle bench, as one word (default %(default)r)")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    expect_new(options.out)
    runs.expect_least(1, options, "rounds")
    if not (options.before / "peagle").is_dir():
        raise InputError(f"--before {options.before} has no peagle/; expected a checkout of this project")
    run = Run(options.out, typed, {"rounds": options.rounds, "options": options.options})
    sides = {NOW: ROOT, BEFORE: options.before.resolve()}
    for target in options.targets:
        for number, side in turns([*sides], options.rounds, warm_up=False):
            runs.say(f"{target}, round {number}, {side}")
            run.extend({"side": side, "round": number, **line} for line in bench(sides[side], target, options.options))
    runs.say("")
    run.write(page, rows=rows(run.lines))
    return 0


def bench(checkout: Path, target: str, options: str) -> Iterator[Json]:
    """Run a checkout's `peagle bench`; yield its tests. Raises InputError with its last line if it fails."""
    command = [sys.executable, "-m", "peagle", "bench", from_anywhere(target), *shlex.split(options), "--json", "-"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        # one that is killed prints nothing
        lines = [f"it ended with status {done.returncode}", *done.stderr.strip().splitlines()]
        raise InputError(f"peagle bench in {checkout.name}: {lines[-1]}")
    for test in json.loads(done.stdout)["tests"]:
        named = {name: test[name] for name in TEST}
        yield {"model": Path(target).name, **named, "ms_per_pass": test["ms_per_pass"]["median"]}


def rows(lines: Sequence[Json]) -> list[Json]:
    """Make a row per model and test: spreads over rounds, of times and of their ratios within a round."""
    of_rounds, table = Lines(lines), []
    names = ("model", *TEST)
    for test in dict.fromkeys(tuple(line[name] for name in names) for line in lines):
        own = dict(zip(names, test, strict=True))
        sides = {side: {**own, "side": side} for side in (NOW, BEFORE)}
        row = {**own, **{f"{side}_ms": runs.spread(of_rounds.values("ms_per_pass", **sides[side])) for side in sides}}
        table.append(row | {"speedup": of_rounds.over("ms_per_pass", sides[BEFORE], sides[NOW])})
    return table


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    return [
        *runs.title("The engine", record),
        f"`peagle bench {record['config']['options']}` of this checkout and of another, {record['config']['rounds']} "
        "rounds in turns: medians, with the least and the greatest. Times of a pass, or of a prompt. Speedup: within a "
        "round, the other checkout's time over this one's.",
        runs.table(record["rows"], "model", *TEST, f"{NOW}_ms", f"{BEFORE}_ms", "speedup"),
    ]
