"""Measure how long requests that arrive at random wait for their next token while a long prompt is among them.

    python -m scripts.bench arrivals --out RUN

The pair's held-out prompts arrive as a Poisson process at a share of what the engine can decode, measured first as a
closed batch. The same arrivals are played with one long prompt among them and without, in turns. Reported: the time
between two arrivals of tokens (itl) of the others, the long prompt's time to first token (ttft), and its ttft alone in
the engine. Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl and README.md.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from peagle.config import AUTO
from peagle.engine.handle import Handle
from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request
from peagle.loading import load
from peagle.measure.pages import Block, Table, heading
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.pair import Pair
from scripts.runs import (
    Json,
    RawLines,
    add_drafter_option,
    add_prompt_options,
    add_run_options,
    new_parser,
    new_record,
    prompt_config,
    prompted,
    run_scenario,
    where,
    write_run,
)

LONG_BUDGET = 16  # tokens of the long prompt's answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_prompt_options(parser)
    add_drafter_option(parser)
    add_run_options(parser, 5, "of both, in turns")
    parser.add_argument("-k", default=AUTO, help="drafts of a step, or auto (default %(default)s)")
    parser.add_argument("--slots", type=int, default=8, help="requests decoded at once (default %(default)s)")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long prompt (default %(default)s)")
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity (default %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a prefill chunk (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (default %(default)s)")
    return run_scenario("arrivals", parser, bench, arguments)


def bench(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    expect_new(options.out)
    if min(options.rounds, options.long, options.num_prompts) < 1 or options.load <= 0:
        raise InputError("--rounds, --long and --num-prompts must be 1 or more, --load above 0")
    pair = load(options.target, options.drafter)
    requests = prompted(options, pair)
    long = long_request(pair, options.long, len(requests))
    k, adaptive = pair.num_drafts(AUTO if options.k == AUTO else int(options.k))
    capacity = pair.capacity([*requests, long])
    shape = pair.engine_config(k, slots=options.slots, context=capacity, adaptive=adaptive, prefill_chunk=options.chunk)
    engine = pair.engine(shape)
    engine.warm_up()
    rate = options.load * requests_per_s(engine, requests)
    raw = RawLines(options.out)
    for number in range(options.rounds):
        rng = np.random.default_rng([options.seed, number])
        due = np.cumsum(rng.exponential(1 / rate, len(requests))).tolist()
        middle = due[len(due) // 3]
        for with_long in (True, False) if number % 2 else (False, True):
            extra = [(long, middle)] if with_long else []
            played = play(engine, [*zip(requests, due, strict=True), *extra])
            raw.add({"round": number, "long": with_long, **figures(played, long)})
        raw.add({"round": number, "long": "alone", "ttft_s": play(engine, [(long, 0.0)])[0]["ttft_s"]})
    named = {name: getattr(options, name) for name in ("k", "slots", "long", "load", "chunk", "rounds")}
    config = prompt_config(options, len(requests)) | named
    config |= {"drafter": Path(options.drafter).name, "requests_per_s": rate}
    record = new_record(typed, config, figures=summary(raw.lines))
    write_run(options.out, record, page(record))
    return 0


def long_request(pair: Pair, length: int, index: int) -> Request:
    """Make a prompt of so many random tokens."""
    rng = np.random.default_rng(index)
    ids = rng.integers(0, pair.target.vocab_size, length).tolist()
    return Request(tuple(ids), LONG_BUDGET, stop_token_ids=(), index=index, name="the long prompt")


def requests_per_s(engine: AnyEngine, requests: Sequence[Request]) -> float:
    """Measure how many requests the engine finishes a second if all are there at once."""
    started = time.perf_counter()
    for _ in engine.generate(requests):
        pass
    return len(requests) / (time.perf_counter() - started)


def play(engine: AnyEngine, arrivals: Sequence[tuple[Request, float]]) -> list[Json]:
    """Add every request when it is due; collect its ttft_s and itl_s, the times between arrivals of its tokens."""
    waiting = sorted(enumerate(arrivals), key=lambda entry: entry[1][1])
    added: dict[Handle, tuple[int, float]] = {}
    times: list[list[float]] = [[] for _ in arrivals]
    started = time.perf_counter()
    while waiting or engine.busy:
        now = time.perf_counter() - started
        while waiting and waiting[0][1][1] <= now:
            place, (request, due) = waiting.pop(0)
            added[engine.add(replace(request))] = place, started + due
        if not engine.busy:
            time.sleep(max(0.0, waiting[0][1][1] - (time.perf_counter() - started)))
            continue
        for handle, chunk in engine.step():
            if chunk.token_ids:
                times[added[handle][0]].append(chunk.time_s)
    engine.settle()
    since = dict(added.values())
    return [
        {"ttft_s": arrived[0] - since[place], "itl_s": np.diff(arrived).tolist()} for place, arrived in enumerate(times)
    ]


def figures(played: list[Json], long: Request) -> Json:
    """Sum up a round: the ttft of the long prompt if there is one, the other requests' itl."""
    others = played[: long.index]
    itl = np.concatenate([np.asarray(request["itl_s"]) for request in others])
    quantiles = {"itl_p50_s": float(np.quantile(itl, 0.5)), "itl_p99_s": float(np.quantile(itl, 0.99))}
    quantiles["others_ttft_s"] = statistics.median(request["ttft_s"] for request in others)
    return quantiles | ({"ttft_s": played[long.index]["ttft_s"]} if len(played) > long.index else {})


def summary(raw: Sequence[Json]) -> Json:
    """Take medians over rounds, of figures and of ratios within a round."""

    def of(kind: object, name: str) -> list[float]:
        return [line[name] for line in raw if line["long"] == kind]

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    return {
        "itl_p50_without_s": median(of(False, "itl_p50_s")),
        "itl_p99_without_s": median(of(False, "itl_p99_s")),
        "itl_p99_with_s": median(of(True, "itl_p99_s")),
        "p99_with_over_p50_without": median(
            [a / b for a, b in zip(of(True, "itl_p99_s"), of(False, "itl_p50_s"), strict=True)]
        ),
        "ttft_s": median(of(True, "ttft_s")),
        "ttft_alone_s": median(of("alone", "ttft_s")),
        "ttft_over_alone": median([a / b for a, b in zip(of(True, "ttft_s"), of("alone", "ttft_s"), strict=True)]),
    }


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, figures, source = record["config"], record["figures"], record["provenance"]
    rows = [
        ("itl of the others without it, median", f"{figures['itl_p50_without_s'] * 1e3:.1f} ms"),
        ("itl of the others without it, p99", f"{figures['itl_p99_without_s'] * 1e3:.1f} ms"),
        ("itl of the others with it, p99", f"{figures['itl_p99_with_s'] * 1e3:.1f} ms"),
        ("p99 with it over the median without it", f"{figures['p99_with_over_p50_without']:.2f}"),
        ("its ttft among the others", f"{figures['ttft_s'] * 1e3:.0f} ms"),
        ("its ttft alone", f"{figures['ttft_alone_s'] * 1e3:.0f} ms"),
        ("ratio", f"{figures['ttft_over_alone']:.2f}"),
    ]
    return [
        heading("A long prompt among requests that arrive at random", 1),
        f"{config['num_prompts']} prompts arrive as a Poisson process at {config['load']:.0%} of what the engine "
        f"decodes as a closed batch ({config['requests_per_s']:.1f} requests a second; {config['slots']} slots, K = "
        f"{config['k']}, chunks of {config['chunk']}); among them a prompt of {config['long']} tokens. Medians over "
        f"{config['rounds']} rounds, in turns with the same arrivals without it. itl is the time between two arrivals "
        "of tokens, however many come together.",
        Table(("", ""), rows),
        f"`{source['command']}`; {where(source)}.",
    ]
