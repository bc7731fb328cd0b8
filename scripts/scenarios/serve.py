"""Measure `peagle serve`: one request at a time, many at once; compared with the engine alone and llama.cpp's.

    python -m scripts.bench serve --out RUN                                         # the demo pair, minutes
    python -m scripts.bench serve --out RUN --target /tmp/M --clients 1,8 --requests 5 --peer LLAMA/bin/llama-server

First one request at a time, 1000 tokens in and 1000 out; then rounds of shorter ones from several clients (--clients),
who send a request after the end of the last one. Every server is a process with a slot per client; plain decoding and
every K of `-k` take turns, round by round. With --engine-alone 1,8 the engine in this process decodes the same
requests: the difference is the server's. Answers have a fixed number of tokens, and no prompt is cached.

--peer: the program llama-server, which reads the same checkpoint as a GGUF file, or the URL of a running one. It comes
with llama.cpp and with the source package of llama-cpp-python (cmake -S vendor/llama.cpp -B build -DLLAMA_CURL=OFF;
cmake --build build -t llama-server). A checkpoint without a tokenizer gets a generated one.

Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl and README.md.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import peagle
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.request import Request
from peagle.measure.provenance import num_threads
from peagle.measure.reports import Block, heading
from peagle.measure.sweep.plan import K
from peagle.ops.files import expect_new
from peagle.pair import Pair
from peagle.result import follow, submit
from scripts import runs
from scripts.peers.bystanders import Bystanders
from scripts.runs import Json, Progress, RawLines, cell
from scripts.serving import servers
from scripts.serving.client import Reply, counts_of, counts_since, figures, own_figures, together
from scripts.serving.models import PLAIN, Load, ServedPair, add_model_options, page_title, prepared, prompts
from scripts.serving.servers import Server

PEER = "llama.cpp"
FIGURES = (  # of which a row has the medians
    *("tok_per_s", "ttft_p50_s", "itl_p50_s", "itl_p99_s", "acceptance_length", "client_cpu_s", "server_cpu_s"),
    *("seconds", "others_frac", "own_itl_p50_s", "own_itl_mean_s", "own_ttft_mean_s", "own_tpot_s"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    runs.add_run_options(parser, 3, "after one that warms up")
    add_model_options(parser)
    parser.add_argument("--requests", type=int, default=20, help="one at a time; 0: none (default %(default)s)")
    parser.add_argument("--tokens-in", type=int, default=1000, help="of their prompts (default %(default)s)")
    parser.add_argument("--tokens-out", type=int, default=1000, help="of their answers (default %(default)s)")
    parser.add_argument("--clients", default="1,8,32", help="requests at once (default %(default)s)")
    parser.add_argument("--round-requests", type=int, default=32, help="at least, a round (default %(default)s)")
    parser.add_argument("--round-in", type=int, default=128, help="tokens of their prompts (default %(default)s)")
    parser.add_argument("--round-out", type=int, default=256, help="tokens of their answers (default %(default)s)")
    parser.add_argument("--engine-alone", default="1,8", help="of --clients, those to compare (default %(default)s)")
    parser.add_argument("--peer", metavar="PROGRAM|URL", help="llama.cpp's server (default: none)")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    loads = loads_of(options)
    with tempfile.TemporaryDirectory() as scratch:
        with_gguf = options.peer is not None and not is_url(options.peer)
        models = prepared(options, loads, Path(scratch), with_gguf)
        raw = RawLines(options.out)
        raw.extend(measure(options, models, loads))
    rows = [summary(raw.lines, load, variant) for load in loads for variant in variants(models, options.peer)]
    record = runs.new_record(typed, models.config(options), rows=rows)
    runs.write_run(options.out, record, page(record))
    return 0


def loads_of(options: argparse.Namespace) -> list[Load]:
    """List the loads. Raises InputError for bad options."""
    expect_new(options.out)
    runs.expect_least(1, options, "tokens_in", "round_requests", "round_in", "rounds")
    runs.expect_least(2, options, "tokens_out", "round_out")  # times between tokens are measured
    runs.expect_least(0, options, "requests")
    if options.peer is not None and not is_url(options.peer):
        servers.check_binary(options.peer)
    alone = runs.numbers("--engine-alone", options.engine_alone)
    rounds = [
        Load(n, max(options.round_requests, n), options.round_in, options.round_out, options.rounds, n in alone)
        for n in runs.numbers("--clients", options.clients)
    ]
    single = Load(1, options.requests, options.tokens_in, options.tokens_out, 1, single=True)
    return [single, *rounds] if options.requests else rounds


def is_url(peer: str) -> bool:
    return peer.startswith(("http://", "https://"))


def variants(models: ServedPair, peer: str | None) -> list[str]:
    return [*models.drafts, *([] if peer is None else [PEER])]


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, models: ServedPair, loads: Sequence[Load]) -> Iterator[Json]:
    """Measure loads on servers with a slot per client; yield a line per round and variant."""
    progress, pair = Progress(), None
    for load in loads:
        with contextlib.ExitStack() as stack:
            progress(f"{load.clients} clients: servers start")
            running = {
                variant: stack.enter_context(started(options, models, variant, load))
                for variant in variants(models, options.peer)
            }
            engines = {}
            if load.engine_alone:
                pair = pair or peagle.load(models.directory, models.drafter)
                engines = {variant: engine_of(pair, k, load) for variant, k in models.drafts.items()}
            texts = prompts(models.checkpoint, models.vocab_size, load, options.seed)
            yield from rounds(load, texts, running, engines, progress)
    progress.end()


@contextlib.contextmanager
def started(options: argparse.Namespace, models: ServedPair, variant: str, load: Load) -> Iterator[Server]:
    """Start the server of a variant; a peer may run already."""
    if variant != PEER:
        with servers.ours(*models.options(variant, load)) as server:
            yield server
    elif models.gguf is None:
        yield Server(options.peer.rstrip("/"))
    else:
        threads = num_threads() or 1
        with servers.llama_server(options.peer, models.gguf, load.clients, load.context, threads) as server:
            yield server


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
    progress: Progress,
) -> Iterator[Json]:
    """Yield a line per round, variant and place (server, engine). Round 0 warms up."""
    places = [(variant, "server") for variant in running] + [(variant, "engine") for variant in engines]
    progress.begin((load.rounds + 1) * len(places))
    short = replace(load, tokens_out=min(load.tokens_out, 8))
    for number, (variant, place) in runs.turns(places, load.rounds):
        progress.part(f"{load.clients} clients: {variant}, {place}")
        now, token_ids = (load, prompts) if number else (short, prompts[: load.clients])
        if place == "server":
            line = by_server(running[variant], [body_of(prompt, now, variant) for prompt in token_ids], now, variant)
        else:
            line = figures(by_engine(engines[variant], token_ids, now))
        if number:
            yield {**asdict(load), "round": number, "variant": variant, "place": place, **line}


def body_of(prompt: Sequence[int], load: Load, variant: str) -> Json:
    """Make a request with exactly tokens_out tokens. The peer caches prompts by default."""
    extra = {"cache_prompt": False} if variant == PEER else {}
    options = {"max_tokens": load.tokens_out, "temperature": 0, "ignore_eos": True}
    return {"prompt": list(prompt), **options, **extra}


def by_server(server: Server, bodies: Sequence[Json], load: Load, variant: str) -> Json:
    """Measure a server's round, with both sides' processor time and the server's counters."""
    before = None if variant == PEER else counts_of(server)
    pids = [] if server.pid is None else [server.pid]
    with Bystanders(os.getpid(), *pids) as others:
        server_s, client_s = server.cpu_s(), time.process_time()
        replies = together(server.url, bodies, load.clients)
        client_s, after_s = time.process_time() - client_s, server.cpu_s()
    line = figures(replies) | {"client_cpu_s": client_s, "others_frac": others.frac}
    line["server_cpu_s"] = None if server_s is None or after_s is None else after_s - server_s
    return line | ({} if before is None else own_figures(counts_since(server, before, len(bodies))))


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


def summary(raw: Sequence[Json], load: Load, variant: str) -> Json:
    """Take medians over rounds of one load and variant; ratios are taken within a round."""

    def of(name: str, place: str = "server", other: str = variant) -> list[float]:
        key = {**asdict(load), "variant": other, "place": place}
        lines = [line for line in raw if all(line[field] == value for field, value in key.items())]
        return [line[name] for line in lines if line.get(name) is not None]

    def median(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    def over(others: Sequence[float]) -> float | None:
        return median(runs.ratios(of("tok_per_s"), others)) if others else None

    more_s = [served - alone for served, alone in zip(of("ttft_p50_s"), of("ttft_p50_s", "engine"), strict=False)]
    return {
        **asdict(load),
        "variant": variant,
        **{name: median(of(name)) for name in FIGURES},
        "over_plain": over(of("tok_per_s", other=PLAIN)) if variant != PLAIN else None,
        "over_peer": over(of("tok_per_s", other=PEER)) if variant != PEER else None,
        "engine_tok_per_s": median(of("tok_per_s", "engine")),
        "over_engine": over(of("tok_per_s", "engine")),
        "ttft_more_s": median(more_s),
    }


# --- the page -------------------------------------------------------------------------------------------------------

MS = (".1f", 1e3)  # seconds as milliseconds
COLUMNS = {
    "": cell("variant"),
    "tok/s": cell("tok_per_s", ".0f"),
    "over plain": cell("over_plain", ".2f"),
    "ttft p50, ms": cell("ttft_p50_s", *MS),
    "acceptance length": cell("acceptance_length", ".2f"),
}


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    single, shared = ([row for row in record["rows"] if row["single"] == kind] for kind in (True, False))
    return [
        *page_title("The server", record),
        *(single_blocks(single) if single else []),
        *shared_blocks(shared),
        *engine_blocks([row for row in shared if row["engine_tok_per_s"] is not None]),
    ]


def single_blocks(rows: Sequence[Json]) -> list[Block]:
    """Lay out the load of one request at a time."""
    row = rows[0]
    text = (
        f"{row['tokens_in']} tokens in, {row['tokens_out']} out, {row['requests']} requests, one at a time. itl is the "
        "time between two arrivals of tokens, however many come together; tpot that of a token after the first. By the "
        "server's own count (/metrics; the median is interpolated in its bucket); the client's medians are next to it."
    )
    own = {
        "": COLUMNS[""],
        "itl p50, ms": cell("own_itl_p50_s", *MS),
        "itl mean, ms": cell("own_itl_mean_s", *MS),
        "tpot, ms": cell("own_tpot_s", ".2f", 1e3),
        "client's itl p50, ms": cell("itl_p50_s", *MS),
    }
    return [heading("One request at a time"), text, runs.table(rows, own | COLUMNS)]


def shared_blocks(rows: Sequence[Json]) -> list[Block]:
    """Lay out the loads of many clients."""
    row = rows[0]
    text = (
        f"{row['tokens_in']} tokens in, {row['tokens_out']} out, as many slots as clients; medians over "
        f"{row['rounds']} rounds, in which all take turns, ratios of the same round. Tokens over the time from the "
        "first request to the last token, prefill included."
    )
    peer = any(row["variant"] == PEER for row in rows)
    columns = {
        "clients": cell("clients"),
        **{name: COLUMNS[name] for name in ("", "tok/s", "over plain")},
        **({"over llama.cpp": cell("over_peer", ".2f")} if peer else {}),
        "ttft p50, ms": COLUMNS["ttft p50, ms"],
        "itl p50, ms": cell("itl_p50_s", *MS),
        "itl p99, ms": cell("itl_p99_s", *MS),
        "acceptance length": COLUMNS["acceptance length"],
        "others' share of the machine": cell("others_frac", ".2f"),
    }
    return [heading("Many at once"), text, runs.table(rows, columns)]


def engine_blocks(rows: Sequence[Json]) -> list[Block]:
    """Lay out the server compared with the engine alone."""
    if not rows:
        return []
    text = (
        "The same requests, decoded by the same engine in the client's process. Processor seconds of a round of the "
        "server's; a client and its server share the machine."
    )
    columns = {
        "clients": cell("clients"),
        "": COLUMNS[""],
        "tok/s": COLUMNS["tok/s"],
        "engine's tok/s": cell("engine_tok_per_s", ".0f"),
        "server over engine": cell("over_engine", ".3f"),
        "ttft more, ms": cell("ttft_more_s", *MS),
        "round, s": cell("seconds", ".2f"),
        "server's processor, s": cell("server_cpu_s", ".2f"),
        "client's processor, s": cell("client_cpu_s", ".2f"),
    }
    return [heading("The server over the engine alone"), text, runs.table(rows, columns)]
