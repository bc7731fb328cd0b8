"""Measure this project beside transformers and llama.cpp on the same random checkpoints.

    peagle random M /tmp/M
    python -m scripts.bench peers --out RUN --llama-python LLAMA/bin/python /tmp/M

It measures plain decoding, verify passes, and the difference of an engine's logits from a float32 reference. On a GPU
all compute in bfloat16, and transformers decodes with the faster of its caches: a growing one, and a static one with
compiled passes. Every engine is a process of its own; they take turns round by round, so that drift of the machine
affects all equally. --requests 1,4,8,16,32 also decodes so many requests together: ours in an engine with a slot for
each, llama.cpp in batches with a sequence for each.

llama.cpp runs under a Python that has llama-cpp-python, best in an environment of its own (`pip install
llama-cpp-python` compiles it), on the checkpoint as a GGUF file, with its MXFP4 experts bit for bit. The page names
engines that are left out because their packages are missing.

Afterwards `--out` (which must not exist yet) holds run.json (provenance, configuration, a row per checkpoint and
engine), raw.jsonl (a line per measurement) and README.md (the tables).
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from peagle.loading import MOST_STEPS_PER_DISPATCH
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from scripts import runs
from scripts.peers.figures import floors, others, rows
from scripts.peers.measure import CHECKED_WIDE, Settings, measure
from scripts.peers.ours import budget_of_many
from scripts.peers.page import page
from scripts.peers.roster import DEFAULT, MOST_REQUESTS, NAMES, OURS, unavailable
from scripts.runs import Progress, RawLines
from target.load import inspect_target


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="directories, one or several")
    runs.add_run_options(parser, 5, "after one that warms up")
    parser.add_argument("--llama-python", metavar="PATH", help="a Python that has llama-cpp-python")
    parser.add_argument(
        "--engines", default=",".join(DEFAULT), help=f"of {', '.join(NAMES)}, with commas (default %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default %(default)s")
    parser.add_argument("-n", "--new-tokens", type=int, default=64, help="decoded each time (default %(default)s)")
    parser.add_argument("--widths", default="1,2,4,8", help="rows of verify passes (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="for passes of one width, each time (default %(default)s)"
    )
    parser.add_argument("--check-tokens", type=int, default=64, help="whose logits are compared (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all tokens (default %(default)s)")
    parser.add_argument(
        "--requests", metavar="N,...", help="also decode so many requests together, such as 1,4,8,16,32 (default: none)"
    )


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything, then measure; figures are written after every checkpoint."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU's memory
    names, left_out = engines(options.engines, options.llama_python)
    settings = settings_of(options, names)
    expect_new(options.out)
    for engine, why in left_out.items():
        print(f"{engine} is left out: {why}", file=sys.stderr)
    record = runs.new_record(typed, asdict(settings), left_out=left_out, checkpoints=[], rows=[])
    raw = RawLines(options.out)
    for number, checkpoint in enumerate(options.checkpoints, start=1):
        say = Progress(f"{number}/{len(options.checkpoints)} {checkpoint.name}:")
        measured = measure(checkpoint, settings, options.llama_python or "", say)
        say.end()
        record["rows"] += rows(checkpoint.name, measured, settings)
        record["checkpoints"].append(
            {
                "name": checkpoint.name,
                "parameters": measured.files.num_parameters,
                "mxfp4": measured.files.mxfp4,
                "geometry": asdict(measured.files.config),
                "v_by_bytes": floors(measured, settings),
                "others_frac": others(measured),
            }
        )
        raw.extend({"checkpoint": checkpoint.name, **line} for line in measured.lines)
        runs.write_run(options.out, record, page(record), show=number == len(options.checkpoints))
    return 0


def engines(named: str, llama_python: str | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return (the engines to compare, with ours; {engine left out: reason})."""
    names = list(dict.fromkeys([OURS, *named.split(",")]))
    if unknown := [name for name in names if name not in NAMES]:
        raise InputError(f"--engines names {unknown[0]!r}; expected names of {', '.join(NAMES)} with commas between")
    reasons = {name: unavailable(name, llama_python) for name in names}
    left_out = {name: why for name, why in reasons.items() if why is not None}
    return tuple(name for name in names if name not in left_out), left_out


def settings_of(options: argparse.Namespace, engines: tuple[str, ...]) -> Settings:
    """Make the settings. Raises InputError for impossible ones, and for checkpoints with too few positions."""
    runs.expect_least(1, options, "rounds", "prompt_tokens")
    runs.expect_least(2, options, "new_tokens")
    runs.expect_least(0, options, "seed")
    if not 0 < options.seconds < math.inf:
        raise InputError(f"--seconds is {options.seconds}; expected a number above 0")
    if options.check_tokens < 2 * CHECKED_WIDE or options.check_tokens % (2 * CHECKED_WIDE):
        raise InputError(f"--check-tokens is {options.check_tokens}; expected a multiple of {2 * CHECKED_WIDE}")
    settings = Settings(
        tuple(path.name for path in options.checkpoints),
        engines,
        options.prompt_tokens,
        options.new_tokens,
        tuple(sorted({1, *runs.numbers("--widths", options.widths)})),
        options.rounds,
        options.seconds,
        options.check_tokens,
        options.seed,
        () if options.requests is None else tuple(runs.numbers("--requests", options.requests)),
    )
    if len(set(settings.checkpoints)) < len(settings.checkpoints):
        raise InputError("two checkpoints have the same name; expected directories with names of their own")
    most = max(settings.requests, default=1)
    if most > MOST_REQUESTS:
        raise InputError(f"--requests names {most}; expected at most {MOST_REQUESTS}, which llama.cpp decodes together")
    longest = settings.prompt_tokens + max(settings.new_tokens, settings.check_tokens) + max(settings.widths)
    if settings.requests:
        budget = budget_of_many(most, settings.prompt_tokens, settings.new_tokens, MOST_STEPS_PER_DISPATCH)
        longest = max(longest, settings.prompt_tokens + budget)
    for checkpoint in options.checkpoints:
        room = inspect_target(checkpoint).config.max_positions
        if longest > room:
            raise InputError(f"{checkpoint} has {room} positions; expected {longest} or more: ask for fewer tokens")
    return settings
