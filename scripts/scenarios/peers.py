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
from scripts.peers.figures import floors, others, rows
from scripts.peers.measure import CHECKED_WIDE, Settings, measure
from scripts.peers.ours import budget_of_many
from scripts.peers.page import page
from scripts.peers.roster import DEFAULT, MOST_REQUESTS, NAMES, OURS, unavailable
from scripts.runs import Progress, RawLines, add_run_options, new_parser, new_record, numbers, run_scenario, write_run
from target.load import inspect_target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="directories, one or several")
    add_run_options(parser, 5, "after one that warms up")
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
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU's memory
    return run_scenario("peers", parser, bench, arguments)


def bench(arguments: argparse.Namespace, typed: list[str]) -> int:
    """Check everything, then measure; figures are written after every checkpoint."""
    names, left_out = engines(arguments.engines, arguments.llama_python)
    settings = Settings(
        tuple(path.name for path in arguments.checkpoints),
        names,
        arguments.prompt_tokens,
        arguments.new_tokens,
        tuple(sorted({1, *numbers("--widths", arguments.widths)})),
        arguments.rounds,
        arguments.seconds,
        arguments.check_tokens,
        arguments.seed,
        () if arguments.requests is None else tuple(numbers("--requests", arguments.requests)),
    )
    check(settings, arguments.checkpoints)
    expect_new(arguments.out)
    for engine, why in left_out.items():
        print(f"{engine} is left out: {why}", file=sys.stderr)
    record = new_record(typed, asdict(settings), left_out=left_out, checkpoints=[], rows=[])
    raw = RawLines(arguments.out)
    for number, checkpoint in enumerate(arguments.checkpoints, start=1):
        say = Progress(f"{number}/{len(arguments.checkpoints)} {checkpoint.name}:")
        measured = measure(checkpoint, settings, arguments.llama_python or "", say)
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
        write_run(arguments.out, record, page(record), show=number == len(arguments.checkpoints))
    return 0


def engines(named: str, llama_python: str | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return (the engines to compare, with ours; {engine left out: reason})."""
    names = list(dict.fromkeys([OURS, *named.split(",")]))
    if unknown := [name for name in names if name not in NAMES]:
        raise InputError(f"--engines names {unknown[0]!r}; expected names of {', '.join(NAMES)} with commas between")
    reasons = {name: unavailable(name, llama_python) for name in names}
    left_out = {name: why for name, why in reasons.items() if why is not None}
    return tuple(name for name in names if name not in left_out), left_out


def check(settings: Settings, checkpoints: list[Path]) -> None:
    """Raise InputError for impossible settings, and for checkpoints with too few positions."""
    if settings.rounds < 1 or settings.prompt_tokens < 1 or settings.new_tokens < 2:
        raise InputError("--rounds and --prompt-tokens must be 1 or more, --new-tokens 2 or more")
    if not 0 < settings.seconds < math.inf:
        raise InputError(f"--seconds is {settings.seconds}; expected a number above 0")
    if settings.check_tokens < 2 * CHECKED_WIDE or settings.check_tokens % (2 * CHECKED_WIDE):
        raise InputError(f"--check-tokens is {settings.check_tokens}; expected a multiple of {2 * CHECKED_WIDE}")
    if settings.seed < 0:
        raise InputError(f"--seed is {settings.seed}; expected 0 or more")
    if len(set(settings.checkpoints)) < len(settings.checkpoints):
        raise InputError("two checkpoints have the same name; expected directories with names of their own")
    most = max(settings.requests, default=1)
    if most > MOST_REQUESTS:
        raise InputError(f"--requests names {most}; expected at most {MOST_REQUESTS}, which llama.cpp decodes together")
    longest = settings.prompt_tokens + max(settings.new_tokens, settings.check_tokens) + max(settings.widths)
    if settings.requests:
        budget = budget_of_many(most, settings.prompt_tokens, settings.new_tokens, MOST_STEPS_PER_DISPATCH)
        longest = max(longest, settings.prompt_tokens + budget)
    for checkpoint in checkpoints:
        room = inspect_target(checkpoint).config.max_positions
        if longest > room:
            raise InputError(f"{checkpoint} has {room} positions; expected {longest} or more: ask for fewer tokens")
