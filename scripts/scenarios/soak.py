"""Soak `peagle serve`: more clients than it has room for, for some minutes; every answer is checked.

    python -m scripts.bench soak --out RUN --minutes 10

Many clients leave, some send invalid requests, and one reads nothing of its streams. An answer must equal that of the
same request alone, up to where its client left; an invalid request must be refused with the right status. Afterwards no
slot is held, nothing waits to be sent, all slots answer, memory has not grown, and a server that has just started is
not faster: both answer the same requests in turns.
"""

import argparse
import http.client
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from peagle.base.errors import InputError
from peagle.base.files import expect_new
from peagle.measure.reports import Block, Table
from scripts import runs
from scripts.runs import Json, Run, header, text_of
from scripts.serving import servers
from scripts.serving.client import RefusedError, leave_unread, stall, status_of, stream, whole
from scripts.serving.models import Load, add_model_options, page_title, prepared, prompts
from scripts.serving.servers import Server

SLOTS, PROMPTS, TOKENS_IN, TOKENS_OUT = 4, 24, 128, 64
LONG_IN, LONG_OUT = 1500, 3000  # tokens of long prompts, and of unread answers
LEAVING, BAD = 0.3, 0.1  # shares of the requests
ROUNDS, PASSES = 15, 5  # compared with a fresh server; in a round each answers all requests so often
UNREAD_S = 30.0  # until a client that reads nothing leaves
FREE_S = 30.0  # for the slots of the clients that left last
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
LONGEST_WAIT_S = 0.25  # after status 429, and until a client that waits for a whole answer leaves
SAMPLES = 100  # of memory
UNREAD = {"logprobs": 20, "n": 2, "ignore_eos": True, "stream": True}  # many bytes a token
ERRORS = (RefusedError, OSError, http.client.HTTPException)
# the kinds of valid requests
KINDS: tuple[Json, ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2, "logprobs": 2},
    {"temperature": 0, "speculative": {"num_speculative_tokens": 0}},
    {"temperature": 0, "stop": ["\n\n"]},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"temperature": 1.0, "seed": 3, "guided_regex": "[a-f ]{9,99}"},
)
# invalid requests: status, method, path, body, headers
REFUSED: tuple[tuple[int, str, str, bytes, dict[str, str]], ...] = (
    (400, "POST", "/v1/completions", b"{", {}),
    (400, "POST", "/v1/completions", b'{"prompt": "a", "temperature": -1}', {}),
    (400, "POST", "/v1/completions", b'{"prompt": "a", "response_format": {"type": "json_schema"}}', {}),
    (400, "POST", "/v1/completions", b'{"prompt": "' + b"x y " * 500_000 + b'"}', {}),
    (400, "POST", "/v1/chat/completions", b'{"messages": []}', {}),
    (400, "POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "unheard_of": 1}', {}),
    (400, "POST", "/v1/responses", b'{"input": "a", "seed": 1e40}', {}),
    (400, "POST", "/tokenize", b"{}", {}),
    (404, "POST", "/v1/completions", b'{"prompt": "a", "model": "another"}', {}),
    (404, "GET", "/v1/nothing", b"", {}),
    (405, "GET", "/v1/completions", b"", {}),
    (403, "GET", "/v1/models", b"", {"Host": "evil.example"}),
    (403, "GET", "/v1/models", b"", {"Origin": "http://evil.example"}),
    (413, "POST", "/v1/completions", b" " * 4_000_001, {}),
    (415, "POST", "/v1/completions", b"{}", {"Content-Encoding": "gzip"}),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    runs.add_run_options(parser)
    add_model_options(parser)
    parser.add_argument("--minutes", type=float, default=10, help="default %(default)s")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Soak a server with the last K and a small prefix cache, which is soon full."""
    expect_new(options.out)
    if not 0 < options.minutes < 1e6:
        raise InputError(f"--minutes is {options.minutes}; expected a number above 0")
    short = Load(SLOTS, PROMPTS, TOKENS_IN, 2 * TOKENS_OUT, 1)
    long = replace(short, requests=SLOTS, tokens_in=LONG_IN, tokens_out=LONG_OUT)
    with tempfile.TemporaryDirectory() as scratch:
        models = prepared(options, [short, long], Path(scratch))
        variant = [*models.drafts][-1]
        texts = [
            text for load in (short, long) for text in prompts(models.checkpoint, models.vocab_size, load, options.seed)
        ]
        serve = [*models.options(variant, long, prefix_cache="64MB"), "--max-queue", str(SLOTS)]
        clients = 2 * SLOTS + 2  # two more than slots and queue have room for
        with servers.ours(*serve) as server:
            bodies = mixed_bodies(texts, TOKENS_OUT)
            counts = soak(server, bodies, clients, options.minutes * 60, options.seed, SLOTS, LONG_OUT)
            with servers.ours(*serve) as fresh:
                counts["speed_over_fresh"] = over_fresh(server, fresh, bodies, SLOTS)
        Run(options.out, typed, models.config(options)).write(page, soak={"variant": variant, **counts})
    return 0


def mixed_bodies(prompts: Sequence[Sequence[int]], tokens_out: int) -> list[Json]:
    """Make different requests: greedy, seeded, with penalties, stop strings, grammars, own K."""
    return [
        {"prompt": list(prompt), "max_tokens": tokens_out // 2 + 7 * number % tokens_out, **KINDS[number % len(KINDS)]}
        for number, prompt in enumerate(prompts)
    ]


def soak(
    server: Server,
    bodies: Sequence[Json],
    clients: int,
    seconds: float,
    seed: int,
    slots: int,
    longest: int,
    turns: int = 1,
) -> Json:
    """Run the soak; return its figures. Raises InputError if the server does not answer.

    longest: tokens of an unread answer. turns: the fewest requests of a client, whatever their time.
    """
    try:
        expected = [whole(server.url, body) for body in bodies]
    except ERRORS as error:
        raise InputError(f"{server.url} does not answer: {error or type(error).__name__}") from None
    crowd = Crowd(server.url, bodies, expected, time.monotonic() + seconds, turns)
    threads = [
        threading.Thread(target=crowd.client, args=(random.Random(f"{seed} {number}"),)) for number in range(clients)
    ]
    threads.append(threading.Thread(target=crowd.reads_nothing, args=(longest,)))
    for thread in threads:
        thread.start()
    sizes = []
    while time.monotonic() < crowd.end:
        sizes.append(server.memory_bytes())
        time.sleep(seconds / SAMPLES)
    for thread in threads:
        thread.join()
    memory = [size for size in sizes if size is not None]
    leaked = held_requests(server)
    after = [text_or_none(server.url, body) for body in bodies[:slots]]
    wrong = len(crowd.wrong) + sum(text != known for text, known in zip(after, expected, strict=False))
    return {
        "clients": clients,
        "slots": slots,
        "minutes": seconds / 60,
        **{name: crowd.counts[name] for name in ("answered", "left", "bad", "unread", "refused")},
        "wrong": wrong,
        "failed": len(crowd.failed),
        "leaked_slots": leaked,
        **server_counts(server),
        "memory_growth_frac": growth(memory),
        "memory_bytes": memory[-1] if memory else None,
        "first_wrong": (crowd.failed + crowd.wrong)[:3],
    }


@dataclass
class Crowd:
    """Clients that send random requests until `end`, and what became of them.

    counts: answered; left, by their clients; bad, invalid ones that were refused; unread; refused, with a full queue.
    """

    url: str
    bodies: Sequence[Json]
    expected: Sequence[str]
    end: float
    turns: int
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # descriptions of wrong answers
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, rng: random.Random) -> None:
        """Send requests until the end, and at least `turns` of them."""
        turn = 0
        while time.monotonic() < self.end or turn < self.turns:
            turn += 1
            self.try_to(self.send_invalid if rng.random() < BAD else self.send, rng)

    def reads_nothing(self, longest: int) -> None:
        """Request long streams until the end, and read nothing of them."""

        def send(_: random.Random) -> str:
            stall(self.url, {**self.bodies[0], **UNREAD, "max_tokens": longest}, min(UNREAD_S, left))
            return "unread"

        rng = random.Random(longest)
        while (left := self.end - time.monotonic()) > 0:
            self.try_to(send, rng)

    def try_to(self, send: Callable[[random.Random], str], rng: random.Random) -> None:
        """Send a request and count its outcome; wait a little if the queue was full."""
        try:
            outcome = send(rng)
        except ERRORS as error:
            if not isinstance(error, RefusedError) or error.status != http.client.TOO_MANY_REQUESTS:
                with self.lock:
                    self.failed.append(str(error) or type(error).__name__)
                return
            outcome = "refused"
            time.sleep(rng.uniform(0, LONGEST_WAIT_S))
        with self.lock:
            self.counts[outcome] += 1

    def send(self, rng: random.Random) -> str:
        """Send a request, whole or streamed, and compare its text; some clients leave early."""
        number = rng.randrange(len(self.bodies))
        body, known = self.bodies[number], self.expected[number]
        leaves, text = rng.random() < LEAVING, ""
        if rng.random() < 0.5:
            arrivals = rng.randrange(8) if leaves else -1
            reply = stream(self.url, body, lambda count: count == arrivals)
            text, leaves = reply.text, reply.left
        elif leaves:
            leave_unread(self.url, body, rng.uniform(0, LONGEST_WAIT_S))
        else:
            text = whole(self.url, body)
        if text != known and not (leaves and known.startswith(text)):
            with self.lock:
                self.wrong.append(f"request {number}: {text[:80]!r}; expected {known[:80]!r}")
        return "left" if leaves else "answered"

    def send_invalid(self, rng: random.Random) -> str:
        """Send an invalid request. Raises HTTPException for another status than the right one."""
        expected, method, path, body, headers = rng.choice(REFUSED)
        status = status_of(self.url, method, path, body, headers)
        if status != expected:
            raise http.client.HTTPException(f"{method} {path} {body[:80]!r}: status {status}; expected {expected}")
        return "bad"


def text_or_none(url: str, body: Json) -> str | None:
    try:
        return whole(url, body)
    except ERRORS:
        return None


def held_requests(server: Server) -> int:
    """Count the requests that the server holds without a waiting client."""
    end = time.monotonic() + FREE_S
    while True:
        health = server.health()
        held = int(health["requests_running"] + health["requests_waiting"])
        if not held or time.monotonic() > end:
            return held
        time.sleep(0.05)


def server_counts(server: Server) -> Json:
    """Return the server's counters of errors, cut streams and unsent bytes."""
    samples = server.samples()

    def total(name: str, least_status: str = "") -> float:
        return sum(s.value for s in samples if s.name == name and s.labels.get("status", "") >= least_status)

    return {
        "server_errors": total("http_requests_total", "5xx"),
        "cut_streams": total("peagle:cut_streams_total"),
        "unsent_bytes": total("peagle:unsent_bytes"),
    }


def over_fresh(server: Server, fresh: Server, bodies: Sequence[Json], slots: int) -> Json:
    """Compare the speed of a server with that of one that has just started: both answer all bodies, in turns."""

    def answer_all(url: str) -> float:
        began = time.monotonic()
        with ThreadPoolExecutor(slots) as pool:
            list(pool.map(lambda body: whole(url, body), [*bodies] * PASSES))
        return time.monotonic() - began

    seconds: dict[str, list[float]] = {server.url: [], fresh.url: []}
    for number, url in runs.turns([*seconds], ROUNDS):
        taken = answer_all(url)
        if number:
            seconds[url].append(taken)
    return runs.spread(runs.ratios(seconds[fresh.url], seconds[server.url]))


def growth(sizes: Sequence[int]) -> float | None:
    """Compare the medians of the last and second tenth; None for fewer than 20 samples."""
    tenth = len(sizes) // 10
    if tenth < 2:
        return None
    return statistics.median(sizes[-tenth:]) / statistics.median(sizes[tenth : 2 * tenth]) - 1


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    counts = record["soak"]
    text = (
        "Requests that are greedy, seeded, with penalties, log-probabilities, stop strings, grammars, long prompts and "
        "K of their own, streamed and whole; 3 of 10 clients leave at a random moment. Every answer is compared with "
        "its request's alone, up to where its client left. Answered: read to their ends. Bad: invalid requests, 1 of "
        "10, that were refused with the right status. Unread: streams of one more client. "
        "Refused: with status 429, since the queue was full. Memory growth: the last tenth of the time over its second "
        f"tenth. Speed over fresh: afterwards, over that of a server that has just started, {ROUNDS} rounds in turns."
    )
    names = [name for name in counts if name != "first_wrong"]
    table = Table(("", ""), [(header(name), text_of(counts, name)) for name in names])
    return [*page_title("A soak of the server", record), text, table]
