"""This project beside transformers and llama.cpp on the same random checkpoints: speed of plain decoding and of verify
passes, and how far each one's logits are from a float32 reference.

    peagle random M /tmp/M
    python -m scripts.bench_peers --out RUN --llama-python LLAMA/bin/python /tmp/M

On a GPU all compute in bfloat16 there, and transformers decodes with the faster of its two caches: one that grows, and
a static one, whose passes it compiles.

Every engine is a process of its own; they take turns round by round, so that a drift of the machine falls on all.

With --requests 1,4,8,16,32 so many requests are also decoded together: by ours in an engine of as many slots, by
llama.cpp in batches of as many sequences.

llama.cpp runs under a Python that has llama-cpp-python, best in an environment of its own (`pip install
llama-cpp-python` compiles it); the checkpoint is written as GGUF for it, MXFP4 experts bit for bit. An engine whose
packages are missing is left out, and the page says so.

Afterwards `--out` (which must not exist yet) holds run.json (provenance, configuration, a row per checkpoint and
engine), raw.jsonl (a line per measurement) and README.md (the tables).
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.loading import MOST_STEPS_PER_DISPATCH
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.ops.strict_json import dumps
from scripts.peers.figures import floors, others, rows
from scripts.peers.measure import CHECKED_WIDE, Settings, measure
from scripts.peers.ours import budget_of_many
from scripts.peers.page import page
from scripts.peers.roster import DEFAULT, MOST_REQUESTS, NAMES, OURS, unavailable
from scripts.results import in_one_line, origin
from target.load import inspect_target


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="directories, one or several")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--llama-python", metavar="PATH", help="a Python that has llama-cpp-python")
    parser.add_argument(
        "--engines", default=",".join(DEFAULT), help=f"of {', '.join(NAMES)}, with commas (default %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default %(default)s")
    parser.add_argument("-n", "--new-tokens", type=int, default=64, help="decoded each time (default %(default)s)")
    parser.add_argument("--widths", default="1,2,4,8", help="rows of verify passes (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="for passes of one width, each time (default %(default)s)"
    )
    parser.add_argument("--check-tokens", type=int, default=64, help="whose logits are compared (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all tokens (default %(default)s)")
    parser.add_argument(
        "--requests", metavar="N,...", help="also decode so many requests together, such as 1,4,8,16,32 (default: none)"
    )
    given = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU's memory
    return in_one_line("bench_peers", lambda: bench(parser.parse_intermixed_args(arguments), given))


def bench(arguments: argparse.Namespace, typed: list[str]) -> int:
    """Everything is checked and the configuration written before anything runs."""
    names, left_out = engines(arguments.engines, arguments.llama_python)
    settings = Settings(
        tuple(path.name for path in arguments.checkpoints),
        names,
        arguments.prompt_tokens,
        arguments.new_tokens,
        numbers("--widths", arguments.widths, 1),
        arguments.rounds,
        arguments.seconds,
        arguments.check_tokens,
        arguments.seed,
        numbers("--requests", arguments.requests) if arguments.requests is not None else (),
    )
    check(settings, arguments.checkpoints)
    expect_new(arguments.out)
    for engine, why in left_out.items():
        print(f"{engine} is left out: {why}", file=sys.stderr)
    record: dict[str, Any] = {
        "schema": 1,
        "provenance": origin("scripts.bench_peers", shown(typed)),
        "config": asdict(settings),
        "left_out": left_out,
        "checkpoints": [],
        "rows": [],
    }
    arguments.out.mkdir(parents=True)
    write(arguments.out / "run.json", dumps(record, indent=1) + "\n")
    for number, checkpoint in enumerate(arguments.checkpoints, start=1):
        say = Progress(f"{number}/{len(arguments.checkpoints)}")
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
        with (arguments.out / "raw.jsonl").open("a", encoding="utf-8") as raw:
            raw.writelines(dumps({"checkpoint": checkpoint.name, **line}) + "\n" for line in measured.lines)
        write(arguments.out / "run.json", dumps(record, indent=1) + "\n")
    text = page(record)
    write(arguments.out / "README.md", text)
    print(text)
    return 0


def engines(named: str, llama_python: str | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """(the engines to compare, ours among them; those left out, with the reason)."""
    wanted = named.split(",")
    if unknown := [name for name in wanted if name not in NAMES]:
        raise InputError(f"--engines names {unknown[0]!r}; expected names of {', '.join(NAMES)} with commas between")
    wanted = list(dict.fromkeys([OURS, *wanted]))
    reasons = {name: unavailable(name, llama_python) for name in wanted}
    left_out = {name: why for name, why in reasons.items() if why is not None}
    return tuple(name for name in wanted if name not in left_out), left_out


def numbers(option: str, typed: str, *also: int) -> tuple[int, ...]:
    """The numbers that were typed for an option, and those that are always among them, in order."""
    try:
        found = sorted({int(number) for number in typed.split(",")} | {*also})
    except ValueError:
        raise InputError(f"{option} is {typed!r}; expected numbers with commas between, such as 1,2,4,8") from None
    if found[0] < 1:
        raise InputError(f"{option} is {typed!r}; expected numbers of 1 or more")
    return tuple(found)


def check(settings: Settings, checkpoints: list[Path]) -> None:
    """Raises InputError for settings that cannot be run, and for checkpoints that are none or too short."""
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


def shown(typed: list[str]) -> list[str]:
    """The arguments; of existing paths only their names, which is all that counts elsewhere."""
    return [Path(word).name if Path(word).is_absolute() else word for word in typed]


class Progress:
    """One line on standard error, overwritten."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._longest, self._started = prefix, 0, time.monotonic()

    def __call__(self, what: str) -> None:
        line = f"{self._prefix} {what}"
        self._longest = max(self._longest, len(line))
        print(f"\r{line:<{self._longest}}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """The line is finished, and says how long all of it took."""
        self(f"done in {time.monotonic() - self._started:.0f} s")
        print(file=sys.stderr)


def write(path: Path, text: str) -> None:
    """The file holds the text."""
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
