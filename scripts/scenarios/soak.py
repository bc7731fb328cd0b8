"""Soak `peagle serve`: more clients than it has room for, for some minutes; every answer is checked.

    python -m scripts.bench soak --out RUN --minutes 10

Many clients leave, some send invalid requests, and one reads nothing of its streams. An answer must equal that of the
same request alone, up to where its client left; an invalid request must be refused with the right status. Afterwards no
slot is held, nothing waits to be sent, all slots answer, and memory has not grown.
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
        texts = [text for load in (short, long) for text in prompts(models.checkpoint, load)]
        serve = [*models.options(variant, long, prefix_cache="64MB"), "--max-queue", str(SLOTS)]
        clients = 2 * SLOTS + 2  # two more than slots and queue have room for
        with servers.ours(*serve) as server:
            bodies = mixed_bodies(texts, TOKENS_OUT)
            counts = soak(server, bodies, clients, options.minutes * 60, SLOTS, LONG_OUT)
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
    rngs = [random.Random(number) for number in range(clients + 1)]
    threads = [threading.Thread(target=crowd.client, args=(rng,)) for rng in rngs[1:]]
    threads.append(threading.Thread(target=crowd.read_nothing, args=(rngs[0], longest)))
    for thread in threads:
        thread.start()
    sizes = []
    while time.monotonic() < crowd.end:
        sizes.append(server.memory_bytes())
        time.sleep(seconds / SAMPLES)
    for thread in threads:
        thread.join()
    memory = [size for size in sizes if size is not None]
    counts = {name: crowd.counts[name] for name in ("answered", "left", "bad", "unread", "refused")}
    leaked = held_requests(server)
    for number in range(slots):  # all of them still answer
        crowd.attempt(lambda _, number=number: crowd.compare(number, whole(server.url, bodies[number])), rngs[0])
    return {
        "clients": clients,
        "slots": slots,
        "minutes": seconds / 60,
        **counts,
        "wrong": len(crowd.wrong),
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
            self.attempt(self.send_invalid if rng.random() < BAD else self.send, rng)

    def read_nothing(self, rng: random.Random, longest: int) -> None:
        """Request long streams until the end, and read nothing of them."""
        body = {**self.bodies[0], **UNREAD, "max_tokens": longest}
        while (left := self.end - time.monotonic()) > 0:
            self.attempt(lambda _, left=left: stall(self.url, body, min(UNREAD_S, left)) or "unread", rng)

    def attempt(self, send: Callable[[random.Random], str], rng: random.Random) -> None:
        """Send a request and count its outcome; wait a little if the queue was full."""
        try:
            outcome = send(rng)
        except ERRORS as error:
            if not isinstance(error, RefusedError) or error.status != http.client.TOO_MANY_REQUESTS:
                self.failed.append(str(error) or type(error).__name__)
                return
            outcome = "refused"
            time.sleep(rng.uniform(0, LONGEST_WAIT_S))
        with self.lock:
            self.counts[outcome] += 1

    def send(self, rng: random.Random) -> str:
        """Send a request, whole or streamed, and compare its text; some clients leave early."""
        number, leaves = rng.randrange(len(self.bodies)), rng.random() < LEAVING
        body = self.bodies[number]
        if rng.random() < 0.5:
            arrivals = rng.randrange(8) if leaves else -1
            reply = stream(self.url, body, lambda count: count == arrivals)
            return self.compare(number, reply.text, reply.left)
        if leaves:
            leave_unread(self.url, body, rng.uniform(0, LONGEST_WAIT_S))
            return "left"
        return self.compare(number, whole(self.url, body))

    def compare(self, number: int, text: str, left: bool = False) -> str:
        """Compare an answer, up to where its client left, with its request's alone."""
        known = self.expected[number]
        if text != known and not (left and known.startswith(text)):
            self.wrong.append(f"request {number}: {text[:80]!r}; expected {known[:80]!r}")
        return "left" if left else "answered"

    def send_invalid(self, rng: random.Random) -> str:
        """Send an invalid request. Raises HTTPException for another status than the right one."""
        expected, method, path, body, headers = rng.choice(REFUSED)
        status = status_of(self.url, method, path, body, headers)
        if status != expected:
            raise http.client.HTTPException(f"{method} {path} {body[:80]!r}: status {status}; expected {expected}")
        return "bad"


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
        "tenth."
    )
    names = [name for name in counts if name != "first_wrong"]
    table = Table(("", ""), [(header(name), text_of(counts, name)) for name in names])
    return [*page_title("A soak of the server", record), text, table]
