"""Measure auto beside plain decoding and fixed K, on random weights with drafts accepted by drawn chances.

    python -m scripts.bench auto --out RUN S M L

Every size has a P-EAGLE of four layers. Draft i is accepted at rate^i in the mean; the chance of one draft is drawn,
and its confidence is that chance, off by up to a tenth (peagle.engine.accept.draw_synthetic). Engines decode the same
random requests in turns.

Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl and README.md.
"""

import argparse
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from drafter.load import save_drafter
from drafter.params import init_params
from peagle.config import AUTO
from peagle.engine.accept import NOISE
from peagle.loading import load
from peagle.measure.pages import Block, heading
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.files import expect_new
from peagle.pair import Pair
from peagle.workflows.random_checkpoint import PARALLEL, SIZES, write_random_checkpoint
from scripts.runs import (
    Json,
    Progress,
    RawLines,
    add_run_options,
    cell,
    new_parser,
    new_record,
    numbers,
    run_scenario,
    table,
    where,
    write_run,
)
from scripts.synthetic import random_request, synthetic_engine, time_steps

PROMPT_TOKENS, NEW_TOKENS = 64, 192


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("sizes", nargs="+", metavar="SIZE", help=f"of {', '.join(SIZES)}")
    add_run_options(parser, 5)
    parser.add_argument("--requests", default="1,8", help="at once (default %(default)s)")
    parser.add_argument("--rates", default="0.5,0.76", help="of acceptance (default %(default)s)")
    parser.add_argument("-k", default="1,3,5,7", help="fixed K beside plain and auto (default %(default)s)")
    return run_scenario("auto", parser, bench, arguments)


def bench(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    expect_new(options.out)
    if unknown := [size for size in options.sizes if size not in SIZES]:
        raise InputError(f"{unknown[0]} is no size; expected some of {', '.join(SIZES)}")
    try:
        rates = [float(rate) for rate in options.rates.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1 for rate in rates) or options.rounds < 1:
        raise InputError("expected --rates between 0 and 1 with commas between, and --rounds of 1 or more")
    ks, requests = numbers("-k", options.k), numbers("--requests", options.requests)
    raw, progress = RawLines(options.out), Progress()
    progress.begin(len(options.sizes) * len(rates) * len(requests))
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            pair = random_pair(Path(scratch), size)
            for rate in rates:
                for count in requests:
                    progress.part(f"{size}, acceptance {rate:g}, {count} at once")
                    line = {"size": size, "rate": rate}
                    raw.extend(line | row for row in measure(pair, rate, count, ks, options.rounds))
    progress.end()
    record = new_record(typed, {"rounds": options.rounds}, rows=raw.lines)
    write_run(options.out, record, page(record))
    return 0


def random_pair(scratch: Path, size: str) -> Pair:
    """Write a target and a drafter of random weights, and load them."""
    config = SIZES[size]
    shape = PARALLEL.config(config)
    write_random_checkpoint(scratch / "target", config)
    params = jax.jit(lambda key: init_params(shape, key, jnp.bfloat16))(jax.random.key(3))
    save_drafter(scratch / "drafter", params, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputWarning)  # of the missing tokenizer and stop token
        return load(scratch / "target", scratch / "drafter")


def measure(pair: Pair, rate: float, count: int, ks: Sequence[int], rounds: int) -> Iterator[Json]:
    """Time plain decoding, every K and auto with so many requests at once."""
    engines = {k: synthetic_engine(pair, k, count, rate, PROMPT_TOKENS) for k in (0, *ks, AUTO)}
    for engine in engines.values():
        engine.warm_up()
    vocab_size = pair.target.vocab_size
    requests = [random_request(vocab_size, number, NEW_TOKENS, PROMPT_TOKENS) for number in range(count)]
    yield from time_steps(engines, requests, rounds)


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    source = record["provenance"]
    columns = {
        "size": lambda row: row["size"],
        "acceptance": lambda row: f"{row['rate']:g}",
        "requests": lambda row: str(row["batch"]),
        "K": lambda row: "plain" if row["k"] == 0 else str(row["k"]),
        "over plain": cell("speedup"),
        "ms a step": cell("step_ms"),
        "tokens a step": cell("tokens_a_step"),
        "rows a token": cell("rows_a_token"),
    }
    return [
        heading("auto beside fixed K, synthetic acceptance", 1),
        f"`{source['command']}`; {where(source)}.",
        "Random weights, a P-EAGLE of four layers. Draft i is accepted at acceptance^i in the mean; one draft's own "
        f"chance is drawn (u^((1 - r) / r), u uniform), and its confidence is that chance, off by up to {NOISE:g}. "
        f"{record['config']['rounds']} rounds in turns; over plain: the median of rounds. Rows: of the target, each "
        "step's first and its verified drafts.",
        table(record["rows"], columns),
    ]
