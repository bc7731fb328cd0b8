"""Measure this project beside transformers and vLLM on the same random checkpoints.

    peagle random M /tmp/M
    python -m scripts.bench peers --out RUN /tmp/M
    python -m scripts.bench peers --out RUN --vllm-python VLLM/bin/python --engines peagle,vllm --requests 1,8,32,64 \
        --drafters p-eagle,eagle3 -k 5 --prompt-tokens 512 /tmp/20b

It measures plain decoding, verify passes, and the difference of an engine's logits from a float32 reference. On a GPU
all compute in bfloat16, and transformers decodes with the faster of its caches: a growing one, and a static one with
compiled passes. Every engine is a process of its own; they take turns round by round, so that drift of the machine
affects all equally. --requests 1,4,8,16,32 also decodes so many requests together: ours in an engine with a slot for
each. --drafters also times steps with drafters of random weights. `scripts.bench llama` compares with llama.cpp.

vLLM runs under a Python that has it, best in an environment of its own. It reads the checkpoint, on a CPU a copy
without MXFP4 (scripts/golden/vllm.py says how to install it there); it has no verify passes or logits here. On a GPU
the engines share its memory. The page names engines that are left out because their packages are missing.

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
from peagle.workflows.random_checkpoint import LEAST_LAYERS
from scripts import runs
from scripts.peers.figures import floors, others, rows
from scripts.peers.measure import CHECKED_WIDE, Settings, measure
from scripts.peers.ours import budget_of_many
from scripts.peers.page import page
from scripts.peers.roster import DEFAULT, DRAFTERS, NAMES, OURS, unavailable
from scripts.runs import Progress, RawLines
from target.load import inspect_target


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="directories, one or several")
    runs.add_run_options(parser, 5, "after one that warms up")
    parser.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM")
    parser.add_argument(
        "--engines", default=",".join(DEFAULT), help=f"of {', '.join(NAMES)}, with commas (default %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default %(default)s")
    parser.add_argument("-n", "--new-tokens", type=int, default=64, help="decoded each time (default %(default)s)")
    parser.add_argument("--widths", default="1,2,4,8", help="rows of verify passes (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="for passes of one width, each time (default %(default)s)"
    )
    parser.add_argument(
        "--check-tokens",
        type=int,
        default=64,
        help="whose logits are compared with float32's, of four bytes a parameter; 0: none (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all tokens (default %(default)s)")
    parser.add_argument(
        "--requests", metavar="N,...", help="also decode so many requests together, such as 1,4,8,16,32 (default: none)"
    )
    parser.add_argument("--drafters", metavar="NAME,...", help=f"of {', '.join(DRAFTERS)} (default: none)")
    parser.add_argument("-k", "--num-drafts", type=int, default=5, help="of a step (default %(default)s)")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything, then measure; figures are written after every checkpoint."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU's memory
    names, left_out = engines(options.engines, options.vllm_python)
    settings = settings_of(options, names)
    expect_new(options.out)
    for engine, why in left_out.items():
        print(f"{engine} is left out: {why}", file=sys.stderr)
    record = runs.new_record(typed, asdict(settings), left_out=left_out, checkpoints=[], rows=[])
    raw = RawLines(options.out)
    for number, checkpoint in enumerate(options.checkpoints, start=1):
        say = Progress(f"{number}/{len(options.checkpoints)} {checkpoint.name}:")
        measured = measure(checkpoint, settings, options.vllm_python, say)
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


def engines(named: str, vllm_python: str | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return (the engines to compare, with ours; {engine left out: reason})."""
    names = list(dict.fromkeys([OURS, *named.split(",")]))
    if unknown := [name for name in names if name not in NAMES]:
        raise InputError(f"--engines names {unknown[0]!r}; expected names of {', '.join(NAMES)} with commas between")
    reasons = {name: unavailable(name, vllm_python) for name in names}
    left_out = {name: why for name, why in reasons.items() if why is not None}
    return tuple(name for name in names if name not in left_out), left_out


def settings_of(options: argparse.Namespace, engines: tuple[str, ...]) -> Settings:
    """Make the settings. Raises InputError for impossible ones, and for checkpoints with too few positions."""
    runs.expect_least(1, options, "rounds", "prompt_tokens", "num_drafts")
    runs.expect_least(2, options, "new_tokens")
    runs.expect_least(0, options, "seed")
    if not 0 < options.seconds < math.inf:
        raise InputError(f"--seconds is {options.seconds}; expected a number above 0")
    if options.check_tokens < 0 or options.check_tokens % (2 * CHECKED_WIDE):
        raise InputError(f"--check-tokens is {options.check_tokens}; expected 0 or a multiple of {2 * CHECKED_WIDE}")
    drafters = () if options.drafters is None else tuple(dict.fromkeys(options.drafters.split(",")))
    if unknown := [name for name in drafters if name not in DRAFTERS]:
        raise InputError(f"--drafters names {unknown[0]!r}; expected names of {', '.join(DRAFTERS)}")
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
        drafters,
        options.num_drafts if drafters else 0,
    )
    if len(set(settings.checkpoints)) < len(settings.checkpoints):
        raise InputError("two checkpoints have the same name; expected directories with names of their own")
    longest = settings.context
    if settings.requests:
        budget = budget_of_many(
            max(settings.requests), settings.prompt_tokens, settings.new_tokens, MOST_STEPS_PER_DISPATCH
        )
        longest = max(longest, settings.prompt_tokens + budget)
    for checkpoint in options.checkpoints:
        config = inspect_target(checkpoint).config
        if longest > (room := config.max_positions):
            raise InputError(f"{checkpoint} has {room} positions; expected {longest} or more: ask for fewer tokens")
        if drafters and config.num_layers < LEAST_LAYERS:
            raise InputError(
                f"{checkpoint} has {config.num_layers} layers; expected {LEAST_LAYERS} or more, of which a drafter "
                "reads three"
            )
    return settings
