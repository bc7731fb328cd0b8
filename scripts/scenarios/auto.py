"""Compare auto with plain decoding and fixed K, on random weights with drafts accepted by drawn chances.

    python -m scripts.bench auto --out RUN S M L

Every size has a P-EAGLE of four layers, and at least four target layers. Draft i is accepted at rate^i in the mean; the
chance of one draft is drawn, and its confidence is that chance, off by up to a tenth
(peagle.engine.step.accept.draw_synthetic). Engines decode the same random requests in turns.
"""

import argparse
import dataclasses
import itertools
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from peagle.base.errors import InputError, InputWarning
from peagle.base.files import expect_new
from peagle.config import AUTO, SamplingParams
from peagle.engine.request import Request
from peagle.engine.step.accept import NOISE
from peagle.loading.load import load
from peagle.measure.reports import Block
from peagle.pair import Pair
from peagle.workflows.random_checkpoint import (
    LEAST_LAYERS,
    P_EAGLE,
    SIZES,
    write_random_checkpoint,
    write_random_drafter,
)
from scripts import runs
from scripts.runs import Json, Run
from scripts.steps import random_request, synthetic_engine, time_steps

PROMPT_TOKENS = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sizes", nargs="+", metavar="SIZE", help=f"of {', '.join(SIZES)}")
    runs.add_run_options(parser, 5)
    parser.add_argument("--requests", default="1,8", help="at once (default %(default)s)")
    parser.add_argument("--rates", default="0.5,0.76", help="of acceptance (default %(default)s)")
    parser.add_argument("--temperatures", default="0", help="of sampling (default %(default)s)")
    parser.add_argument("-k", default="1,3,5,7", help="fixed K to compare with plain and auto (default %(default)s)")
    parser.add_argument("-n", "--new-tokens", type=int, default=192, help="a request (default %(default)s)")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    expect_new(options.out)
    runs.expect_least(1, options, "rounds", "new_tokens")
    if unknown := [size for size in options.sizes if size not in SIZES]:
        raise InputError(f"{unknown[0]} is no size; expected some of {', '.join(SIZES)}")
    rates = runs.numbers("--rates", options.rates, 0.01, 0.99, float)
    temperatures = runs.numbers("--temperatures", options.temperatures, 0, 2, float)
    ks, requests = runs.numbers("-k", options.k), runs.numbers("--requests", options.requests)
    cases = list(itertools.product(rates, temperatures, requests))
    run = Run(options.out, typed, {"rounds": options.rounds})
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            pair = random_pair(Path(scratch), size)
            for rate, temperature, count in cases:
                runs.say(f"{size}, acceptance {rate:g}, temperature {temperature:g}, {count} at once")
                shape = (options.new_tokens, PROMPT_TOKENS, SamplingParams(temperature=temperature))
                together = [random_request(pair.target.vocab_size, number, *shape) for number in range(count)]
                rows = measure(pair, rate, together, ks, options.rounds)
                run.extend({"size": size, "rate": rate, "temperature": temperature, **row} for row in rows)
    runs.say("")
    run.write(page, rows=run.lines)
    return 0


def random_pair(scratch: Path, size: str) -> Pair:
    """Write a target and a drafter of random weights, and load them."""
    config = SIZES[size]
    if config.num_layers < LEAST_LAYERS:
        config = dataclasses.replace(config, layer_types=(config.layer_types * LEAST_LAYERS)[:LEAST_LAYERS])
    write_random_checkpoint(scratch / "target", config)
    write_random_drafter(scratch / "drafter", P_EAGLE, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputWarning)  # of the missing tokenizer and stop token
        return load(scratch / "target", scratch / "drafter")


def measure(pair: Pair, rate: float, requests: Sequence[Request], ks: Sequence[int], rounds: int) -> Iterator[Json]:
    """Time plain decoding, every K and auto with these requests at once."""
    engines = {k: synthetic_engine(pair, k, len(requests), rate, PROMPT_TOKENS) for k in (0, *ks, AUTO)}
    for engine in engines.values():
        engine.warm_up(sampled=any(request.sampling.temperature > 0 for request in requests))
    yield from time_steps(engines, requests, rounds)


def at_mean_acceptance(row: Json) -> float | None:
    """Divide the tokens that a step of a fixed K emits in the mean by its time in plain steps."""
    if row["k"] in (0, AUTO):
        return None
    return sum(row["rate"] ** i for i in range(row["k"] + 1)) / row["cycle_cost"]


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    rows = [{**row, "at_mean_acceptance": at_mean_acceptance(row)} for row in record["rows"]]
    columns = ("size", "rate", "temperature", "batch", "k", "speedup", "at_mean_acceptance")
    return [
        *runs.title("auto compared with fixed K, synthetic acceptance", record),
        f"Random weights, {LEAST_LAYERS} layers or more, a P-EAGLE of four layers. Draft i is accepted at rate^i "
        "in the mean; one draft's own chance is drawn (u^((1 - r) / r), u uniform), and its confidence is that chance, "
        f"off by up to {NOISE:g}. {record['config']['rounds']} rounds in turns; speedup, over plain: the median of "
        "rounds. At mean acceptance: without the luck of the draws. Rows: of the target, each step's first and its "
        "verified drafts.",
        runs.table(rows, *columns, "step_ms", "tokens_a_step", "rows_a_token"),
    ]
