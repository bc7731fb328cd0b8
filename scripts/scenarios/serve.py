"""Measure `peagle serve`: one request at a time, many at once; compared with the engine alone and llama.cpp's.

    python -m scripts.bench serve --out RUN                                         # the demo pair, minutes
    python -m scripts.bench serve --out RUN --clients 1,8 --requests 5 --peer LLAMA
    python -m scripts.bench serve --out RUN --clients 1 --tokens-in 1000 --tokens-out 1000     # long ones

Each client sends a request after the end of its last one. Every server is a process with a slot per client; plain
decoding and every K of `-k` take turns, round by round. With --engine-alone 1,8 the engine in this process decodes the
same requests: the difference is the server's. Answers have a fixed number of tokens, and no prompt is cached.

--peer: a folder of llama.cpp, as the source package of llama-cpp-python has one, in which its server was compiled
(cmake -S LLAMA -B LLAMA/build -DLLAMA_CURL=OFF; cmake --build LLAMA/build -t llama-server). It reads the same
checkpoint as a GGUF file.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import peagle
from peagle.answers.result import follow, submit
from peagle.base.errors import InputError
from peagle.base.files import expect_new
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.request import Request
from peagle.measure.provenance import num_threads
from peagle.measure.reports import Block
from peagle.measure.sweep.plan import K
from peagle.pair import Pair
from scripts import runs
from scripts.runs import Json, Lines, Run
from scripts.serving import servers
from scripts.serving.client import Reply, figures, together
from scripts.serving.models import PLAIN, Load, ServedPair, add_model_options, page_title, prepared, prompts
from scripts.serving.servers import Server

PEER = "llama.cpp"
BINARY = "build/bin/llama-server"  # in a folder of llama.cpp
LOAD = ("clients", "tokens_in", "tokens_out", "variant")  # columns that name a row
FIGURES = ("tok_per_s", "ttft_p50_s", "itl_p50_s", "itl_p99_s", "acceptance_length")  # of a row: spreads over rounds


def add_options(parser: argparse.ArgumentParser) -> None:
    runs.add_run_options(parser, 3, "after one that warms up")
    add_model_options(parser)
    parser.add_argument("--clients", default="1,8,32", help="requests at once (default %(default)s)")
    parser.add_argument("--requests", type=int, default=32, help="at least, a round (default %(default)s)")
    parser.add_argument("--tokens-in", type=int, default=128, help="of their prompts (default %(default)s)")
    parser.add_argument("--tokens-out", type=int, default=256, help="of their answers (default %(default)s)")
    parser.add_argument("--engine-alone", default="1,8", help="of --clients, those to compare (default %(default)s)")
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="llama.cpp, with its server (default: none)")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    loads = loads_of(options)
    with tempfile.TemporaryDirectory() as scratch:
        models = prepared(options, loads, Path(scratch), options.peer)
        run = Run(options.out, typed, models.config(options))
        run.extend(measure(options, models, loads))
    run.write(page, rows=[row_of(run.lines, load, name) for load in loads for name in variants(models, options.peer)])
    return 0


def loads_of(options: argparse.Namespace) -> list[Load]:
    """List the loads. Raises InputError for bad options."""
    expect_new(options.out)
    runs.expect_least(1, options, "rounds", "requests", "tokens_in")
    runs.expect_least(2, options, "tokens_out")  # times between tokens are measured
    if options.peer is not None and not (options.peer / BINARY).exists():
        raise InputError(f"--peer {options.peer} has no {BINARY}; expected a folder of llama.cpp with it")
    alone = runs.numbers("--engine-alone", options.engine_alone)
    shape = (options.tokens_in, options.tokens_out, options.rounds)
    return [
        Load(clients, max(options.requests, clients), *shape, clients in alone)
        for clients in runs.numbers("--clients", options.clients)
    ]


def variants(models: ServedPair, peer: Path | None) -> list[str]:
    return [*models.drafts, *([] if peer is None else [PEER])]


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, models: ServedPair, loads: Sequence[Load]) -> Iterator[Json]:
    """Measure loads on servers with a slot per client; yield a line per round and variant."""
    pair = None
    for load in loads:
        with contextlib.ExitStack() as stack:
            runs.say(f"{load.clients} clients: servers start")
            running = {
                variant: stack.enter_context(started(options, models, variant, load))
                for variant in variants(models, options.peer)
            }
            engines = {}
            if load.engine_alone:
                pair = pair or peagle.load(models.target, models.drafter)
                engines = {variant: engine_of(pair, k, load) for variant, k in models.drafts.items()}
            texts = prompts(models.checkpoint, load)
            yield from rounds(load, texts, running, engines)
    runs.say("")


def started(
    options: argparse.Namespace, models: ServedPair, variant: str, load: Load
) -> contextlib.AbstractContextManager[Server]:
    """Start the server of a variant, until the context ends."""
    if variant != PEER:
        return servers.ours(*models.options(variant, load))
    assert models.gguf is not None
    shape = (load.clients, load.context, num_threads() or 1)
    return servers.llama_server(options.peer / BINARY, models.gguf, *shape)


def engine_of(pair: Pair, k: K, load: Load) -> AnyEngine:
    """Make the engine of a server with this K in this process."""
    shape = pair.engine_config(k, slots=load.clients, context=load.context, k_per_request=True)
    engine = pair.engine(shape)
    engine.warm_up()
    return engine


def rounds(
    load: Load,
    prompts: Sequence[Sequence[int]],
    running: Mapping[str, Server],
    engines: Mapping[str, AnyEngine],
) -> Iterator[Json]:
    """Yield a line per round, variant and place (server, engine). Round 0 warms up."""
    places = [(variant, "server") for variant in running] + [(variant, "engine") for variant in engines]
    short = replace(load, tokens_out=min(load.tokens_out, 8))
    for number, (variant, place) in runs.turns(places, load.rounds):
        runs.say(f"{load.clients} clients, round {number}: {variant}, {place}")
        now, token_ids = (load, prompts) if number else (short, prompts[: load.clients])
        if place == "server":
            bodies = [body_of(prompt, now, variant) for prompt in token_ids]
            replies = together(running[variant].url, bodies, now.clients)
        else:
            replies = by_engine(engines[variant], token_ids, now)
        if number:
            yield {**asdict(load), "round": number, "variant": variant, "place": place, **figures(replies)}


def body_of(prompt: Sequence[int], load: Load, variant: str) -> Json:
    """Make a request with exactly tokens_out tokens. The peer caches prompts by default."""
    extra = {"cache_prompt": False} if variant == PEER else {}
    options = {"max_tokens": load.tokens_out, "temperature": 0, "ignore_eos": True}
    return {"prompt": list(prompt), **options, **extra}


def by_engine(engine: AnyEngine, prompts: Sequence[Sequence[int]], load: Load) -> list[Reply]:
    """Measure a round of an engine: a request begins when one ends, so many at once as clients."""
    waiting = [Request(tuple(prompt), load.tokens_out, stop_token_ids=()) for prompt in prompts]
    assemblers = submit(engine, waiting[: load.clients], None)
    del waiting[: load.clients]
    for assembler, _ in follow(engine, assemblers):
        if assembler.finish_reason is not None and waiting:
            assemblers |= submit(engine, [waiting.pop(0)], None)
    engine.settle()
    return [
        Reply(
            result.started_s,
            result.times_s,
            len(result.output_ids),
            num_steps=result.counters.num_steps,
            num_emitted=result.counters.num_emitted,
        )
        for result in (assembler.result() for assembler in assemblers.values())
    ]


def row_of(raw: Sequence[Json], load: Load, variant: str) -> Json:
    """Take spreads over rounds of one load and variant; ratios are taken within a round."""
    lines, place = Lines(raw), {**asdict(load), "place": "server"}
    own = {**place, "variant": variant}
    row = {**asdict(load), "variant": variant} | {name: runs.spread(lines.values(name, **own)) for name in FIGURES}
    others = {"over_plain": {**place, "variant": PLAIN}, "over_peer": {**place, "variant": PEER}}
    others["over_engine"] = {**own, "place": "engine"}
    return row | {name: lines.over("tok_per_s", own, other) for name, other in others.items() if other != own}


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    text = (
        "As many slots as clients; medians over rounds, in which all take turns, ratios of the same round. tok/s: "
        "tokens over the time from the first request to the last token, prefill included. itl: the time between two "
        "arrivals of tokens, however many come together. The engine alone decodes the same requests in the client's "
        "process. A client and its server share the machine."
    )
    ratios = ("over_plain", "over_peer", "over_engine")
    return [*page_title("The server", record), text, runs.table(record["rows"], *LOAD, *ratios, *FIGURES)]
