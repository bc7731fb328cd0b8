"""Measure `peagle serve`: one request at a time, many at once, beside the engine without a server and llama.cpp's.

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
import collections
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import peagle
from peagle.checkpoints import DEMO, HELD_OUT, resolve
from peagle.engine.handle import Handle
from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request
from peagle.measure.pages import Block, heading
from peagle.measure.provenance import num_threads
from peagle.measure.sweep.plan import K, parse_ks
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.pair import Pair
from peagle.result import Counters
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import load_tokenizer
from scripts.peers.bystanders import Bystanders
from scripts.peers.gguf_file import write_gguf
from scripts.runs import (
    Json,
    Progress,
    RawLines,
    add_run_options,
    cell,
    new_parser,
    new_record,
    numbers,
    rotated,
    run_scenario,
    table,
    where,
    write_run,
)
from scripts.serving import servers
from scripts.serving.client import Counted, Reply, figures, together
from scripts.serving.servers import Server
from target.load import inspect_target

PLAIN, PEER = "plain", "llama.cpp"


@dataclass(frozen=True)
class Load:
    """The requests of one round."""

    clients: int
    requests: int
    tokens_in: int
    tokens_out: int
    rounds: int
    engine_alone: bool = False
    single: bool = False  # long requests, one at a time

    @property
    def context(self) -> int:
        return self.tokens_in + self.tokens_out


@dataclass(frozen=True)
class ServedPair:
    """The models of the servers. drafts: K by variant. directory: the target's, with a tokenizer."""

    checkpoint: Path
    vocab_size: int
    directory: str
    drafter: str | None
    drafts: Mapping[str, K]
    gguf: Path | None = None

    def options(self, variant: str, load: Load) -> list[str]:
        """Make the options of `peagle serve`."""
        k = self.drafts[variant]
        drafter = ["--drafter", self.drafter] if self.drafter is not None and k != 0 else []
        options = ["--target", self.directory, *drafter, "-k", str(k), "--slots", str(load.clients)]
        return [*options, "--context", str(load.context), "--prefix-cache", "0"]

    def config(self, options: argparse.Namespace) -> Json:
        """Collect the options for run.json; paths are shortened to names."""
        config = {name: value for name, value in vars(options).items() if name not in ("out", "peer")}
        drafter = None if self.drafter is None else Path(self.drafter).name
        return config | {"target": Path(options.target).name, "drafter": drafter}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the models that are served."""
    parser.add_argument("--target", default=DEMO, help="a target's directory (default: the demo's)")
    parser.add_argument("--drafter", help="a drafter's directory, or ngram (default: the demo's with it, else none)")
    parser.add_argument("-k", default="3,auto", help="drafts of a step, as 1-3,5,auto (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of random prompts (default %(default)s)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_run_options(parser, 3, "after one that warms up")
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
    return run_scenario("serve", parser, bench, arguments)


def bench(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    loads = checked_loads(options)
    with tempfile.TemporaryDirectory() as scratch:
        models = prepared(
            options, loads, Path(scratch), with_gguf=options.peer is not None and not is_url(options.peer)
        )
        raw = RawLines(options.out)
        raw.extend(measure(options, models, loads))
    rows = [summary(raw.lines, load, variant) for load in loads for variant in variants(models, options.peer)]
    record = new_record(typed, models.config(options), rows=rows)
    write_run(options.out, record, page(record))
    return 0


def checked_loads(options: argparse.Namespace) -> list[Load]:
    """List the loads. Raises InputError for bad options."""
    expect_new(options.out)
    for option in ("tokens_in", "round_requests", "round_in", "rounds"):
        if (value := getattr(options, option)) < 1:
            raise InputError(f"--{option.replace('_', '-')} is {value}; expected 1 or more")
    if min(options.tokens_out, options.round_out) < 2:
        raise InputError("--tokens-out and --round-out must be 2 or more, since times between tokens are measured")
    if options.requests < 0:
        raise InputError(f"--requests is {options.requests}; expected 0 or more")
    if options.peer is not None and not is_url(options.peer):
        servers.check_binary(options.peer)
    alone = numbers("--engine-alone", options.engine_alone)
    rounds = [
        Load(n, max(options.round_requests, n), options.round_in, options.round_out, options.rounds, n in alone)
        for n in numbers("--clients", options.clients)
    ]
    single = Load(1, options.requests, options.tokens_in, options.tokens_out, 1, single=True)
    return [single, *rounds] if options.requests else rounds


def is_url(peer: str) -> bool:
    return peer.startswith(("http://", "https://"))


def prepared(options: argparse.Namespace, loads: Sequence[Load], scratch: Path, with_gguf: bool = False) -> ServedPair:
    """Choose the variants; make a tokenizer and a GGUF file if needed.

    Raises InputError for a negative seed, and for a target with too few positions.
    """
    if options.seed < 0:
        raise InputError(f"--seed is {options.seed}; expected 0 or more")
    ks, checkpoint = parse_ks(options.k), resolve(options.target, "target")
    config = inspect_target(checkpoint).config
    longest = max(load.context for load in loads)
    if longest > config.max_positions:
        raise InputError(f"{checkpoint} has {config.max_positions} positions; expected {longest} or more")
    drafter = options.drafter or (DEMO if options.target == DEMO else None)
    drafts: dict[str, K] = {PLAIN: 0}
    if drafter is not None:
        drafts |= {f"K = {k}": k for k in ks}
    directory, tokens = options.target, servers.byte_level_tokens(config.vocab_size)
    if options.target != DEMO and load_tokenizer(checkpoint) is None:
        directory = str(scratch / checkpoint.resolve().name)
        servers.with_tokenizer(checkpoint, tokens, Path(directory))
    gguf = scratch / "model.gguf" if with_gguf else None
    if gguf is not None:
        write_gguf(checkpoint, gguf, tokens)
    return ServedPair(checkpoint, config.vocab_size, directory, drafter, drafts, gguf)


def variants(models: ServedPair, peer: str | None) -> list[str]:
    return [*models.drafts, *([] if peer is None else [PEER])]


def prompts(checkpoint: Path, vocab_size: int, load: Load, seed: int) -> list[list[int]]:
    """Make prompts of one length: ends of joined held-out chats, or random tokens."""
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        rng = np.random.default_rng([seed, load.tokens_in])
        return [rng.integers(0, vocab_size, load.tokens_in).tolist() for _ in range(load.requests)]
    conversations = read_prompt_file(HELD_OUT, strict=True).conversations
    chats = [conversation.encode((), tokenizer, Rendering()) for conversation in conversations]
    token_ids = []
    for number in range(load.requests):
        ids: list[int] = []
        for place in itertools.count(number):  # join prompts until they are long enough
            ids = [*chats[place % len(chats)], *ids]
            if len(ids) >= load.tokens_in:
                break
        token_ids.append(ids[-load.tokens_in :])
    return token_ids


def body_of(prompt: Sequence[int], load: Load, variant: str) -> Json:
    """Make a request with exactly tokens_out tokens. The peer caches prompts by default."""
    extra = {"cache_prompt": False} if variant == PEER else {}
    options = {"max_tokens": load.tokens_out, "temperature": 0, "ignore_eos": True}
    return {"prompt": list(prompt), **options, **extra}


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
    drafts, adaptive = pair.num_drafts(k)
    shape = pair.engine_config(drafts, slots=load.clients, context=load.context, adaptive=adaptive, k_per_request=True)
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
    progress.begin(load.rounds * len(places))
    for number in range(load.rounds + 1):
        now = load if number else replace(load, tokens_out=min(load.tokens_out, 8))
        chosen = prompts if number else prompts[: load.clients]
        for variant, place in rotated(places, number):
            if number:
                progress.part(f"{load.clients} clients: {variant}, {place}")
            if place == "server":
                line = by_server(running[variant], [body_of(prompt, now, variant) for prompt in chosen], now, variant)
            else:
                line = figures(by_engine(engines[variant], chosen, now))
            if number:
                yield {**asdict(load), "round": number, "variant": variant, "place": place, **line}


def by_server(server: Server, bodies: Sequence[Json], load: Load, variant: str) -> Json:
    """Measure a server's round, with both sides' processor time and the server's counts."""
    before = None if variant == PEER else Counted.by(server)
    pids = [] if server.pid is None else [server.pid]
    with Bystanders(os.getpid(), *pids) as others:
        server_s, client_s = server.cpu_s(), time.process_time()
        replies = together(server.url, bodies, load.clients)
        client_s, after_s = time.process_time() - client_s, server.cpu_s()
    line = figures(replies) | {"client_cpu_s": client_s, "others_frac": others.frac}
    line["server_cpu_s"] = None if server_s is None or after_s is None else after_s - server_s
    return line | ({} if before is None else Counted.after(server, before, len(bodies)).since(before))


def by_engine(engine: AnyEngine, prompts: Sequence[Sequence[int]], load: Load) -> list[Reply]:
    """Measure a round of an engine, with the order of `together`."""
    queues = [collections.deque(prompts[place :: load.clients]) for place in range(load.clients)]
    handles: list[Handle] = []
    started: dict[Handle, tuple[int, float]] = {}
    times: dict[Handle, list[float]] = {}
    steps: dict[Handle, Counters] = {}
    k = engine.config.num_speculative_tokens

    def begin(client: int) -> None:
        if queues[client]:
            request = Request(tuple(queues[client].popleft()), load.tokens_out, stop_token_ids=())
            now = time.perf_counter()
            handle = engine.add(request)
            started[handle], times[handle], steps[handle] = (client, now), [], Counters.of((), k)
            handles.append(handle)

    for client in range(load.clients):
        begin(client)
    for handle, chunk in engine.run(handles):
        if chunk.token_ids:
            times[handle].append(chunk.time_s)
        steps[handle] += Counters.of(chunk.steps, k)
        if chunk.finish_reason is not None:
            begin(started[handle][0])
    engine.settle()
    return [
        Reply(
            started[handle][1],
            tuple(times[handle]),
            len(handle.output_ids),
            num_steps=steps[handle].num_steps,
            num_accepted=steps[handle].num_accepted,
        )
        for handle in handles
    ]


def summary(raw: Sequence[Json], load: Load, variant: str) -> Json:
    """Take medians over rounds of one load and variant; ratios are taken within a round."""

    def of(name: str, place: str = "server", other: str = variant) -> list[float]:
        key = {**asdict(load), "variant": other, "place": place}
        lines = [line for line in raw if all(line[field] == value for field, value in key.items())]
        return [line[name] for line in lines if line.get(name) is not None]

    def median(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    def over(others: Sequence[float], ours: Sequence[float] | None = None) -> float | None:
        mine = of("tok_per_s") if ours is None else ours
        return median([a / b for a, b in zip(mine, others, strict=True)]) if others else None

    names = (
        *("tok_per_s", "ttft_p50_s", "itl_p50_s", "itl_p99_s", "acceptance_length", "client_cpu_s", "server_cpu_s"),
        *("seconds", "others_frac", "own_itl_p50_s", "own_itl_mean_s", "own_ttft_mean_s", "own_tpot_s"),
    )
    ttft = zip(of("ttft_p50_s"), of("ttft_p50_s", "engine"), strict=False)
    return {
        **asdict(load),
        "variant": variant,
        **{name: median(of(name)) for name in names},
        "over_plain": over(of("tok_per_s", other=PLAIN)) if variant != PLAIN else None,
        "over_peer": over(of("tok_per_s", other=PEER)) if variant != PEER else None,
        "engine_tok_per_s": median(of("tok_per_s", "engine")),
        "over_engine": over(of("tok_per_s", "engine")),
        "ttft_more_s": median([served - alone for served, alone in ttft]),
    }


def page_head(title: str, record: Json) -> list[Block]:
    """Lay out the title, the command, the models and the machine."""
    config, source = record["config"], record["provenance"]
    models = f"Target {config['target']}, drafter {config['drafter'] or 'none'}; {where(source)}."
    return [heading(title, 1), f"`{source['command']}`", models]


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    single, shared = ([row for row in record["rows"] if row["single"] == kind] for kind in (True, False))
    return [
        *page_head("The server", record),
        *(single_blocks(single) if single else []),
        *shared_blocks(shared),
        *engine_blocks(shared),
    ]


def single_blocks(rows: Sequence[Json]) -> list[Block]:
    """Lay out the load of one request at a time."""
    row = rows[0]
    text = (
        f"{row['tokens_in']} tokens in, {row['tokens_out']} out, {row['requests']} requests, one at a time. itl is the "
        "time between two arrivals of tokens, however many come together; tpot that of a token after the first. By the "
        "server's own count (/metrics; the median is interpolated in its bucket); the client's medians beside it."
    )
    columns = {
        "": lambda row: str(row["variant"]),
        "itl p50, ms": cell("own_itl_p50_s", ".1f", 1e3),
        "itl mean, ms": cell("own_itl_mean_s", ".1f", 1e3),
        "tpot, ms": cell("own_tpot_s", ".2f", 1e3),
        "client's itl p50, ms": cell("itl_p50_s", ".1f", 1e3),
        "ttft p50, ms": cell("ttft_p50_s", ".1f", 1e3),
        "tok/s": cell("tok_per_s", ".0f"),
        "over plain": cell("over_plain"),
        "acceptance length": cell("acceptance_length"),
    }
    return [heading("One request at a time"), text, table(rows, columns)]


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
        "clients": lambda row: str(row["clients"]),
        "": lambda row: str(row["variant"]),
        "tok/s": cell("tok_per_s", ".0f"),
        "over plain": cell("over_plain"),
        **({"over llama.cpp": cell("over_peer")} if peer else {}),
        "ttft p50, ms": cell("ttft_p50_s", ".1f", 1e3),
        "itl p50, ms": cell("itl_p50_s", ".1f", 1e3),
        "itl p99, ms": cell("itl_p99_s", ".1f", 1e3),
        "acceptance length": cell("acceptance_length"),
        "others' share of the machine": cell("others_frac"),
    }
    return [heading("Many at once"), text, table(rows, columns)]


def engine_blocks(rows: Sequence[Json]) -> list[Block]:
    """Lay out the server beside the engine alone."""
    alone = [row for row in rows if row["engine_tok_per_s"] is not None]
    if not alone:
        return []
    text = (
        "The same requests, decoded by the same engine in the client's process. Processor seconds of a round of the "
        "server's; a client and its server share the machine."
    )
    columns = {
        "clients": lambda row: str(row["clients"]),
        "": lambda row: str(row["variant"]),
        "tok/s": cell("tok_per_s", ".0f"),
        "engine's tok/s": cell("engine_tok_per_s", ".0f"),
        "server over engine": cell("over_engine", ".3f"),
        "ttft more, ms": cell("ttft_more_s", ".1f", 1e3),
        "round, s": cell("seconds"),
        "server's processor, s": cell("server_cpu_s"),
        "client's processor, s": cell("client_cpu_s"),
    }
    return [heading("The server over the engine alone"), text, table(alone, columns)]
