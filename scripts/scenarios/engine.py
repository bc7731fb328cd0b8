"""Measure the engine: one and many requests, prompts, arrivals, prefixes, memory; compared with another checkout's.

    peagle random S /tmp/S
    python -m scripts.bench engine --out RUN --before CHECKOUT demo /tmp/S

A model runs in one process for this checkout, and in one for CHECKOUT, whose kernels must be compiled. They take turns
by case and round, one at a time. Tokens are random and equal on both sides. The demo drafts with its P-EAGLE, other
models with n-grams.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from peagle.base.errors import InputError
from peagle.base.files import expect_new
from peagle.loading.checkpoints import DEMO
from peagle.measure.reports import Block
from scripts import runs
from scripts.peers.remote import Child
from scripts.runs import ROOT, Json, Lines, Progress, Run

NOW, BEFORE = "now", "before"
SLOTS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (512, 2048)
SHARE = 0.25  # of the contexts' memory
WARM_UP = "warm_up"  # a call that is timed in the round that warms up, and only there


@dataclasses.dataclass(frozen=True)
class Case:
    """A measurement: its row on the page, its figure (by name) and the worker's call.

    over: the row that its figure is divided by; only this checkout runs such a case. None: it is divided by the other
    checkout's.
    """

    name: str
    figure: str
    call: str
    arguments: Json
    over: str | None = None


def cases(long: int) -> Iterator[Case]:
    """Yield the cases. long: tokens before the answer of a long request."""
    for k in (0, 3):
        drafts = f"K = {k}" if k else "plain"
        yield Case(f"one request, {drafts}", "tok_per_s", "one", _one(1, k, 40, 300))
        yield Case(f"one request after {long:,} tokens, {drafts}", "tok_per_s", "one", _one(1, k, long, 100))
    in_32 = "one request in an engine of 32 slots"
    yield Case(in_32, "tok_per_s", "one", _one(32, 0, 40, 300), over="one request, plain")
    for number, requests in enumerate(SLOTS):
        arguments = {"requests": requests, "k": 0, "prompt": 40, "new": 100}
        over = None if requests in (1, 32) else _many(SLOTS[number - 1])
        yield Case(_many(requests), "tok_per_s", "many", arguments, over)
    for tokens in PROMPTS:
        yield Case(f"a prompt of {tokens:,} tokens: until its first token", "ttft_s", "prompt", {"tokens": tokens})
    prompts = {"requests": 16, "k": 0, "prompt": 60, "new": 2}
    yield Case("16 prompts of 60 tokens: until all have a first token", "last_first_token_s", "many", prompts)
    yield Case("a second turn after 2,048 tokens", "ttft_s", "turn", {"history": 2048, "question": 20})
    at_random = "60 requests that arrive at random, with one of 4,096 tokens among them: 99 % of waits for a token"
    arrivals = {"requests": 60, "slots": 8, "prompt": 40, "new": 60, "long": 4096, "load": 0.8}
    yield Case(at_random, "itl_p99_s", "arrivals", arrivals)
    several = "64 requests of 200 to 6,000 tokens"
    memory = {"requests": 64, "least": 200, "most": 6000, "new": 100}
    yield Case(several, "tok_per_s", "memory", {**memory, "frac": None})
    yield Case(f"{several} in {SHARE:.0%} of their memory", "tok_per_s", "memory", {**memory, "frac": SHARE}, several)
    yield Case("warm-up of 32 slots, K = 3", "warm_up_s", WARM_UP, {"slots": 32, "k": 3, "context": 4096})


def _one(slots: int, k: int, prompt: int, new: int) -> Json:
    return {"slots": slots, "k": k, "prompt": prompt, "new": new}


def _many(requests: int) -> str:
    return f"{requests} request{'s' if requests > 1 else ''} at once, all tokens"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="demo, or directories of checkpoints")
    runs.add_run_options(parser, 5, "after one that warms up")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout, to compare with")
    parser.add_argument("--long", type=int, default=8000, help="tokens before a long answer (default %(default)s)")
    parser.add_argument("--only", default="", help="cases whose names begin with this")
    parser.add_argument(
        "--skip", metavar="TEXT", action="append", default=[], help="leave out cases whose names hold this; repeatable"
    )


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    expect_new(options.out)
    runs.expect_least(1, options, "rounds")
    if options.before is not None and not (options.before / "peagle").is_dir():
        raise InputError(f"--before {options.before} has no peagle/; expected a checkout of this project")
    chosen = [case for case in cases(options.long) if case.name.startswith(options.only)]
    chosen = [case for case in chosen if not any(text in case.name for text in options.skip)]
    if not chosen:
        raise InputError(f"no case is left; expected --only {options.only!r} to begin a case's name, and --skip to fit")
    run, progress = Run(options.out, typed, {"rounds": options.rounds}), Progress()
    roots = {NOW: ROOT} | ({BEFORE: options.before.resolve()} if options.before else {})
    for target in options.targets:
        run.extend(measure(target, roots, chosen, options.rounds, progress))
    progress.end()
    run.write(page, rows=rows(run.lines, chosen))
    return 0


def measure(
    target: str, roots: dict[str, Path], chosen: Sequence[Case], rounds: int, progress: Progress
) -> Iterator[Json]:
    """Yield a line per measurement of one target. Round 0 warms up and has compile times."""
    name = target if target == DEMO else Path(target).name
    worker = str(Path(__file__).with_name("engine_worker.py"))
    with ExitStack() as running:
        children = {}
        for side, root in roots.items():
            progress(f"{name}: {side} loads")
            command = [sys.executable, worker, target, "" if target == DEMO else "ngram"]
            children[side] = running.enter_context(Child(f"{name}, {side}", command, root))
        progress.begin((rounds + 1) * len(chosen))
        for number in range(rounds + 1):
            for case in chosen:
                progress.part(f"{name}, {case.name}")
                for side in runs.rotated(list(children), number):
                    if (side == NOW or case.over is None) and (number == 0 or case.call != WARM_UP):
                        line = {"model": name, "case": case.name, "side": side, "round": number}
                        yield line | children[side].call(case.call, **case.arguments)


def rows(lines: Sequence[Json], chosen: Sequence[Case]) -> list[Json]:
    """Make a row per model and case: spreads over rounds, of figures and of their ratios within a round."""
    made = []
    for model in dict.fromkeys(line["model"] for line in lines):
        for case in chosen:
            timed = Lines(line for line in lines if line["round"] or case.call == WARM_UP)
            sides = {side: {"model": model, "case": case.name, "side": side} for side in (NOW, BEFORE)}
            row = {"model": model, "case": case.name, "figure": case.figure}
            row |= {side: runs.spread(timed.values(case.figure, **of)) for side, of in sides.items()}
            below = sides[BEFORE] if case.over is None else {**sides[NOW], "case": case.over}
            made.append(row | {"ratio": timed.over(case.figure, sides[NOW], below), "over_the_row": case.over})
    return made


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    return [
        *runs.title("The engine", record),
        f"Random tokens, greedy, {record['config']['rounds']} rounds after one that warms up; medians, with the least "
        "and the greatest. The checkouts take turns; ratios are taken within a round: this checkout over the other, or "
        "over the row that the table names. Tokens a second, or seconds.",
        runs.table(record["rows"], "model", "case", "figure", NOW, BEFORE, "ratio", "over_the_row"),
    ]
