"""Measure `peagle serve`: one request at a time, many at once, beside the engine without a server and llama.cpp's.

    python -m scripts.bench_serve --out RUN                                         # the demo pair, minutes
    python -m scripts.bench_serve --out RUN --target /tmp/M --clients 1,8 --requests 5 --peer LLAMA/bin/llama-server
    python -m scripts.bench_serve --out RUN --soak 10

First 1000 tokens in and 1000 out, one request at a time; then rounds of shorter ones by so many clients at once
(`--clients`), each client's next as soon as its last has ended. Every server is a process of its own with as many slots
as there are clients; plain decoding and each K of `-k` take turns, round by round. With --engine-alone 1,8 the same
requests are also decoded by the engine in this process, so that the difference is the server's. No answer ends before
its last token, and no prompt is cached.

--peer: the program llama-server, which gets the same checkpoint as a GGUF file, or the URL of a running one. It comes
with llama.cpp; the source package of llama-cpp-python holds it, too (cmake -S vendor/llama.cpp -B build
-DLLAMA_CURL=OFF; cmake --build build -t llama-server). A checkpoint without a tokenizer gets a made one.

--soak N: for N minutes twice as many clients as slots, 3 of 10 requests left by their clients, 1 of 10 wrong, with long
prompts, grammars and a client that reads nothing; nothing else is run.

Afterwards `--out` (which must not exist yet) holds run.json, raw.jsonl and README.md.
"""

import argparse
import collections
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import peagle
from peagle.checkpoints import DEMO, HELD_OUT, resolve
from peagle.engine.handle import Handle
from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request
from peagle.measure.provenance import num_threads
from peagle.measure.sweep.plan import K, parse_ks
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.pair import Pair
from peagle.result import Counters
from peagle.text.prompt_files import read_prompt_file
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import load_tokenizer
from scripts.long_prompts import documentation
from scripts.peers.bystanders import Bystanders
from scripts.peers.gguf_file import write_gguf
from scripts.peers.measure import rotated
from scripts.runs import Json, Progress, RawLines, add_run_options, in_one_line, new_parser, numbers, origin, write_run
from scripts.serving import servers
from scripts.serving.client import Counted, Reply, figures, together
from scripts.serving.page import PEER, PLAIN, page
from scripts.serving.servers import Server
from scripts.serving.soak import bodies, soak
from target.load import inspect_target

SOAK_SLOTS, SOAK_PROMPTS, SOAK_OUT = 4, 24, 64
SOAK_LONG_IN, SOAK_LONG_OUT = 1500, 3000  # tokens of long prompts, and of answers that nobody reads


@dataclass(frozen=True)
class Load:
    """Requests of one round: so many, by so many clients at once."""

    clients: int
    requests: int
    tokens_in: int
    tokens_out: int
    rounds: int
    engine_alone: bool = False
    single: bool = False  # the long requests that come one at a time

    @property
    def context(self) -> int:
        return self.tokens_in + self.tokens_out


@dataclass(frozen=True)
class Models:
    """What is served. drafts: K by arm. directory: with a tokenizer."""

    directory: str
    drafter: str | None
    drafts: Mapping[str, K]
    gguf: Path | None = None

    def options(self, arm: str, load: Load) -> list[str]:
        """Make the options of `peagle serve`."""
        k = self.drafts[arm]
        drafter = ["--drafter", self.drafter] if self.drafter is not None and k != 0 else []
        found = ["--target", self.directory, *drafter, "-k", str(k), "--slots", str(load.clients)]
        return [*found, "--context", str(load.context), "--prefix-cache", "0"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_run_options(parser, 3, "after one that warms up")
    parser.add_argument("--target", default=DEMO, help="a target's directory (default: the demo's)")
    parser.add_argument("--drafter", help="a drafter's directory, or ngram (default: the demo's with it, else none)")
    parser.add_argument("-k", default="3,auto", help="drafts of a step, as 1-3,5,auto (default %(default)s)")
    parser.add_argument("--requests", type=int, default=20, help="one at a time; 0: none (default %(default)s)")
    parser.add_argument("--tokens-in", type=int, default=1000, help="of each of these (default %(default)s)")
    parser.add_argument("--tokens-out", type=int, default=1000, help="of each of these (default %(default)s)")
    parser.add_argument("--clients", default="1,8,32", help="requests at once (default %(default)s)")
    parser.add_argument("--round-requests", type=int, default=32, help="at least, a round (default %(default)s)")
    parser.add_argument("--round-in", type=int, default=128, help="tokens of their prompts (default %(default)s)")
    parser.add_argument("--round-out", type=int, default=256, help="tokens of their answers (default %(default)s)")
    parser.add_argument("--engine-alone", default="1,8", help="of --clients, those to compare (default %(default)s)")
    parser.add_argument("--peer", metavar="PROGRAM|URL", help="llama.cpp's server (default: none)")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="soak instead")
    parser.add_argument("--seed", type=int, default=0, help="of random prompts, and of the soak (default %(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    return in_one_line("bench_serve", lambda: bench(parser.parse_args(arguments), given))


def bench(asked: argparse.Namespace, given: list[str]) -> int:
    """Check everything before anything runs, then measure."""
    check(asked)
    checkpoint, loads = resolve(asked.target, "target"), plan(asked)
    files = inspect_target(checkpoint)
    longest = max(load.context for load in loads)
    if longest > files.config.max_positions:
        raise InputError(f"{checkpoint} has {files.config.max_positions} positions; expected {longest} or more")
    with tempfile.TemporaryDirectory() as scratch:
        models = prepared(asked, checkpoint, files.config.vocab_size, Path(scratch))
        raw = RawLines(asked.out)
        if asked.soak is not None:
            record = {"soak": soaked(asked, models, checkpoint, files.config.vocab_size)}
        else:
            measured(
                asked, models, loads, lambda load: prompts(checkpoint, files.config.vocab_size, load, asked.seed), raw
            )
            record = {"rows": [summary(raw.lines, load, arm) for load in loads for arm in arms(models, asked.peer)]}
    config = {key: value for key, value in vars(asked).items() if key not in ("out", "peer")}
    config |= {
        "target": Path(asked.target).name,
        "drafter": None if models.drafter is None else Path(models.drafter).name,
    }
    head = {"schema": 1, "provenance": origin("scripts.bench_serve", given), "config": config}
    record = {**head, **record}
    write_run(asked.out, record, page(record))
    return 0


def check(asked: argparse.Namespace) -> None:
    """Raise InputError for options that cannot be run."""
    expect_new(asked.out)
    least = {"--tokens-in": asked.tokens_in, "--round-requests": asked.round_requests, "--round-in": asked.round_in}
    least |= {"--rounds": asked.rounds}
    for option, value in least.items():
        if value < 1:
            raise InputError(f"{option} is {value}; expected 1 or more")
    if min(asked.tokens_out, asked.round_out) < 2:
        raise InputError("--tokens-out and --round-out must be 2 or more, since times between tokens are measured")
    if asked.requests < 0 or asked.seed < 0:
        raise InputError("--requests and --seed must be 0 or more")
    if asked.soak is not None and not 0 < asked.soak < 1e6:
        raise InputError(f"--soak is {asked.soak}; expected minutes above 0")
    if asked.peer is not None and not is_url(asked.peer):
        servers.check_binary(asked.peer)
    parse_ks(asked.k)


def is_url(peer: str) -> bool:
    return peer.startswith(("http://", "https://"))


def plan(asked: argparse.Namespace) -> list[Load]:
    """List the loads: one request at a time, then rounds by clients."""
    alone = set(numbers("--engine-alone", asked.engine_alone))
    clients = numbers("--clients", asked.clients)
    if asked.soak is not None:
        short = Load(SOAK_SLOTS, SOAK_PROMPTS, asked.round_in, 2 * SOAK_OUT, 1)
        tokens_in = max(SOAK_LONG_IN, asked.round_in)
        return [short, replace(short, requests=SOAK_SLOTS, tokens_in=tokens_in, tokens_out=SOAK_LONG_OUT)]
    rounds = [
        Load(count, max(asked.round_requests, count), asked.round_in, asked.round_out, asked.rounds, count in alone)
        for count in clients
    ]
    single = Load(1, asked.requests, asked.tokens_in, asked.tokens_out, 1, single=True)
    return [single, *rounds] if asked.requests else rounds


def prepared(asked: argparse.Namespace, checkpoint: Path, vocab_size: int, scratch: Path) -> Models:
    """Choose the arms; make a tokenizer and a GGUF file where they are needed."""
    drafter = asked.drafter or (DEMO if asked.target == DEMO else None)
    drafts: dict[str, K] = {PLAIN: 0}
    if drafter is not None:
        drafts |= {f"K = {k}": k for k in parse_ks(asked.k)}
    directory, tokens = asked.target, servers.made_tokens(vocab_size)
    if asked.target != DEMO and load_tokenizer(checkpoint) is None:
        directory = str(scratch / checkpoint.resolve().name)
        servers.with_tokenizer(checkpoint, tokens, Path(directory))
    gguf = None
    if asked.peer is not None and not is_url(asked.peer) and asked.soak is None:
        gguf = scratch / "model.gguf"
        write_gguf(checkpoint, gguf, tokens)
    return Models(directory, drafter, drafts, gguf)


def arms(models: Models, peer: str | None) -> list[str]:
    return [*models.drafts, *([] if peer is None else [PEER])]


def prompts(checkpoint: Path, vocab_size: int, load: Load, seed: int) -> list[list[int]]:
    """Make the prompts of a load, of one length: documentation and a held-out prompt in the chat template.

    Without a tokenizer, random tokens.
    """
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        rng = np.random.default_rng([seed, load.tokens_in])
        return [rng.integers(0, vocab_size, load.tokens_in).tolist() for _ in range(load.requests)]
    chats = [each.encode((), tokenizer, Rendering()) for each in read_prompt_file(HELD_OUT, strict=True).conversations]
    before, found = tokenizer.encode(documentation()), []
    for number in range(load.requests):
        chat = chats[number % len(chats)]
        first = number * max(len(before) - load.tokens_in, 0) // load.requests
        found.append([*before[first : first + load.tokens_in], *chat][-load.tokens_in :])
    return found


def body_of(prompt: Sequence[int], load: Load, arm: str) -> Json:
    """Make a request of exactly so many tokens. The peer keeps prompts unless it is told not to."""
    extra = {"cache_prompt": False} if arm == PEER else {}
    options = {"max_tokens": load.tokens_out, "temperature": 0, "ignore_eos": True}
    return {"prompt": list(prompt), **options, **extra}


def measured(
    asked: argparse.Namespace,
    models: Models,
    loads: Sequence[Load],
    prompts_of: Callable[[Load], list[list[int]]],
    raw: RawLines,
) -> None:
    """Measure every load on servers of as many slots; write a line a round and arm."""
    say, pair = Progress(), None
    for load in loads:
        with contextlib.ExitStack() as stack:
            say(f"{load.clients} clients: servers start")
            found = {arm: stack.enter_context(started(asked, models, arm, load)) for arm in arms(models, asked.peer)}
            engines = {}
            if load.engine_alone:
                pair = pair or peagle.load(models.directory, models.drafter)
                engines = {arm: engine_of(pair, k, load) for arm, k in models.drafts.items()}
            for line in rounds(load, prompts_of(load), found, engines, say):
                raw.add(line)
    say.end()


@contextlib.contextmanager
def started(asked: argparse.Namespace, models: Models, arm: str, load: Load) -> Iterator[Server]:
    """Start the server of an arm, or find the peer's."""
    if arm != PEER:
        with servers.ours(*models.options(arm, load)) as server:
            yield server
    elif models.gguf is None:
        yield Server(asked.peer.rstrip("/"))
    else:
        threads = num_threads() or 1
        with servers.llama_server(asked.peer, models.gguf, load.clients, load.context, threads) as server:
            yield server


def engine_of(pair: Pair, k: K, load: Load) -> AnyEngine:
    """Make the engine that a server with this K has, here."""
    drafts, adaptive = pair.num_drafts(k)
    shape = pair.engine_config(drafts, slots=load.clients, context=load.context, adaptive=adaptive, k_per_request=True)
    engine = pair.engine(shape)
    engine.warm_up()
    return engine


def rounds(
    load: Load,
    given: Sequence[Sequence[int]],
    found: Mapping[str, Server],
    engines: Mapping[str, AnyEngine],
    say: Progress,
) -> Iterator[Json]:
    """Yield a line for each round, arm and place, server or engine. Round 0 warms up, with short answers."""
    places = [(arm, "server") for arm in found] + [(arm, "engine") for arm in engines]
    say.begin(load.rounds * len(places))
    for number in range(load.rounds + 1):
        now = load if number else replace(load, tokens_out=min(load.tokens_out, 8))
        some = given if number else given[: load.clients]
        for arm, place in rotated(places, number):
            if number:
                say.part(f"{load.clients} clients: {arm}, {place}")
            if place == "server":
                line = by_server(found[arm], [body_of(prompt, now, arm) for prompt in some], now, arm)
            else:
                line = figures(by_engine(engines[arm], [tuple(prompt) for prompt in some], now))
            if number:
                yield {**asdict(load), "round": number, "arm": arm, "place": place, **line}


def by_server(server: Server, asked: Sequence[Json], load: Load, arm: str) -> Json:
    """Send the requests of a round; add the processor time of both sides, and what the server counts itself."""
    before = None if arm == PEER else Counted.by(server)
    pids = [] if server.pid is None else [server.pid]
    with Bystanders(os.getpid(), *pids) as others:
        server_s, client_s = server.cpu_s(), time.process_time()
        replies = together(server.url, asked, load.clients)
        client_s, after_s = time.process_time() - client_s, server.cpu_s()
    found = figures(replies) | {"client_cpu_s": client_s, "others_frac": others.frac}
    found["server_cpu_s"] = None if server_s is None or after_s is None else after_s - server_s
    return found | ({} if before is None else Counted.after(server, before, len(asked)).since(before))


def by_engine(engine: AnyEngine, given: Sequence[tuple[int, ...]], load: Load) -> list[Reply]:
    """Decode as `together` asks: so many requests at a time, each client's next as soon as its last has ended."""
    queues = [collections.deque(given[place :: load.clients]) for place in range(load.clients)]
    handles: list[Handle] = []
    of: dict[Handle, tuple[int, float]] = {}
    times: dict[Handle, list[float]] = {}
    steps: dict[Handle, Counters] = {}
    k = engine.config.num_speculative_tokens

    def begin(client: int) -> None:
        if queues[client]:
            request = Request(queues[client].popleft(), load.tokens_out, stop_token_ids=())
            now = time.perf_counter()
            handle = engine.add(request)
            of[handle], times[handle], steps[handle] = (client, now), [], Counters.of((), k)
            handles.append(handle)

    for client in range(load.clients):
        begin(client)
    for handle, chunk in engine.run(handles):
        if chunk.token_ids:
            times[handle].append(chunk.time_s)
        steps[handle] += Counters.of(chunk.steps, k)
        if chunk.finish_reason is not None:
            begin(of[handle][0])
    engine.settle()
    return [
        Reply(
            of[each][1], tuple(times[each]), len(each.output_ids), "", steps[each].num_steps, steps[each].num_accepted
        )
        for each in handles
    ]


def summary(raw: Sequence[Json], load: Load, arm: str) -> Json:
    """Take medians over rounds of one load and arm; ratios are of the same round."""

    def of(name: str, place: str = "server", other: str = arm) -> list[float]:
        wanted = {**asdict(load), "arm": other, "place": place}
        lines = [line for line in raw if all(line[key] == value for key, value in wanted.items())]
        return [line[name] for line in lines if line.get(name) is not None]

    def median(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    def over(others: Sequence[float], ours: Sequence[float] | None = None) -> float | None:
        mine = of("tok_per_s") if ours is None else ours
        return median([a / b for a, b in zip(mine, others, strict=True)]) if others else None

    names = ("tok_per_s", "ttft_p50_s", "itl_p50_s", "itl_p99_s", "acceptance_length", "client_cpu_s", "server_cpu_s")
    names += ("seconds", "others_frac", "own_itl_p50_s", "own_itl_mean_s", "own_ttft_mean_s", "own_tpot_s")
    ttft = zip(of("ttft_p50_s"), of("ttft_p50_s", "engine"), strict=False)
    return {
        **asdict(load),
        "arm": arm,
        **{name: median(of(name)) for name in names},
        "over_plain": over(of("tok_per_s", other=PLAIN)) if arm != PLAIN else None,
        "over_peer": over(of("tok_per_s", other=PEER)) if arm != PEER else None,
        "engine_tok_per_s": median(of("tok_per_s", "engine")),
        "over_engine": over(of("tok_per_s", "engine")),
        "ttft_more_s": median([served - alone for served, alone in ttft]),
    }


def soaked(asked: argparse.Namespace, models: Models, checkpoint: Path, vocab_size: int) -> Json:
    """Soak a server of the last arm, with a small prefix cache that is soon full."""
    loads = plan(asked)
    load, arm = loads[-1], [*models.drafts][-1]
    given = bodies([prompt for load in loads for prompt in prompts(checkpoint, vocab_size, load, asked.seed)], SOAK_OUT)
    options = [*models.options(arm, load), "--prefix-cache", "64MB", "--max-queue", str(load.clients)]
    clients = 2 * load.clients + 2  # as many as slots and queue have room for, and two more
    with servers.ours(*options, "--max-unsent", "100000") as server:
        found = soak(server, given, clients, asked.soak * 60, asked.seed, load.clients, SOAK_LONG_OUT)
    return {"arm": arm, **found}


if __name__ == "__main__":
    sys.exit(main())
