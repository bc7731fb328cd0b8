"""Soak `peagle serve`: more clients than it has room for, for some minutes; every answer is checked.

    python -m scripts.bench soak --out RUN --minutes 10

Many clients leave, some send invalid requests, and one reads nothing of its streams. An answer must equal that of the
same request alone, up to where its client left; an invalid request must be refused with the right status. Afterwards no
slot is held, nothing waits to be sent, all slots answer, memory has not grown, and a server that has just started is
not faster: both answer the same requests in turns. `--out` (which must not exist yet) then holds run.json and
README.md.
"""

import argparse
import http.client
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from peagle.measure.pages import Block, Table
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from scripts.runs import (
    Json,
    add_run_options,
    new_parser,
    new_record,
    rotated,
    run_scenario,
    spread,
    spread_text,
    write_run,
)
from scripts.scenarios.serve import Load, add_model_options, page_head, prepared, prompts
from scripts.serving import servers
from scripts.serving.client import RefusedError, leave_unread, samples_of, stall, status_of, stream, whole
from scripts.serving.servers import Server

SLOTS, PROMPTS, TOKENS_IN, TOKENS_OUT = 4, 24, 128, 64
LONG_IN, LONG_OUT = 1500, 3000  # tokens of long prompts, and of unread answers
LEAVING, BAD = 0.3, 0.1  # shares of the requests
ROUNDS, PASSES = 15, 5  # beside a fresh server; in a round each answers all requests so often
UNREAD_S = 30.0  # until a client that reads nothing leaves
FREE_S = 30.0  # for the slots of the clients that left last
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
LONGEST_WAIT_S = 0.25  # after status 429, and until a client that waits for a whole answer leaves
SAMPLES = 100  # of memory
UNREAD = {"logprobs": 20, "n": 2, "ignore_eos": True, "stream": True}  # many bytes a token
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_run_options(parser)
    add_model_options(parser)
    parser.add_argument("--minutes", type=float, default=10, help="default %(default)s")
    return run_scenario("soak", parser, bench, arguments)


def bench(options: argparse.Namespace, typed: Sequence[str]) -> int:
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
        serve = [*models.options(variant, long), "--prefix-cache", "64MB", "--max-queue", str(SLOTS)]
        clients = 2 * SLOTS + 2  # two more than slots and queue have room for
        with servers.ours(*serve, "--max-unsent", "100000") as server:
            bodies = mixed_bodies(texts, TOKENS_OUT)
            counts = soak(server, bodies, clients, options.minutes * 60, options.seed, SLOTS, LONG_OUT)
            with servers.ours(*serve) as fresh:
                counts["over_fresh"] = over_fresh(server, fresh, bodies, SLOTS)
    record = new_record(typed, models.config(options), soak={"variant": variant, **counts})
    write_run(options.out, record, page(record))
    return 0


@dataclass
class Counts:
    """The counts of a soak. wrong: descriptions of wrong answers."""

    answered: int = 0
    left: int = 0
    bad: int = 0  # invalid requests that were refused
    unread: int = 0  # streams without a read
    refused: int = 0  # because the queue was full
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, count: int = 1) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + count)

    def fail(self, error: Exception) -> None:
        with self.lock:
            self.failed.append(str(error) or type(error).__name__)


def mixed_bodies(prompts: Sequence[Sequence[int]], tokens_out: int) -> list[Json]:
    """Make different requests: greedy, seeded, with penalties, stop strings, grammars, own K."""
    kinds: tuple[Json, ...] = (
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0, "frequency_penalty": 0.5},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2, "logprobs": 2},
        {"temperature": 0, "speculative": {"num_speculative_tokens": 0}},
        {"temperature": 0, "stop": ["\n\n"]},
        {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"temperature": 1.0, "seed": 3, "guided_regex": "[a-f ]{9,99}"},
    )
    return [
        {"prompt": list(prompt), "max_tokens": tokens_out // 2 + 7 * place % tokens_out, **kinds[place % len(kinds)]}
        for place, prompt in enumerate(prompts)
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
    except (RefusedError, OSError, http.client.HTTPException) as error:
        raise InputError(f"{server.url} does not answer: {error or type(error).__name__}") from None
    counts, end = Counts(), time.monotonic() + seconds
    randoms = [random.Random(f"{seed} {place}") for place in range(clients)]
    threads = [
        threading.Thread(target=_client, args=(server.url, bodies, expected, rng, end, turns, counts))
        for rng in randoms
    ]
    threads.append(threading.Thread(target=_reads_nothing, args=(server.url, bodies[0], longest, end, counts)))
    for thread in threads:
        thread.start()
    _watch_memory(server, end, seconds, counts)
    for thread in threads:
        thread.join()
    leaked = _held(server)
    after = [_text(lambda body=body: whole(server.url, body)) for body in bodies[:slots]]
    wrong = len(counts.wrong) + sum(text != known for text, known in zip(after, expected, strict=False))
    return {
        "clients": clients, "slots": slots, "seconds": seconds, "answered": counts.answered, "left": counts.left,
        "bad": counts.bad, "unread": counts.unread, "refused": counts.refused, "wrong": wrong,
        "failed": len(counts.failed), "leaked_slots": leaked, **_counted(server),
        "first_wrong": (counts.failed + counts.wrong)[:3], "memory_growth_frac": growth(counts.memory_bytes),
        "memory_bytes": counts.memory_bytes[-1] if counts.memory_bytes else None,
    }  # fmt: skip


def _text(read: Callable[[], str]) -> str | None:
    try:
        return read()
    except (RefusedError, OSError, http.client.HTTPException):
        return None


def _client(
    url: str,
    bodies: Sequence[Json],
    expected: Sequence[str],
    rng: random.Random,
    end: float,
    turns: int,
    counts: Counts,
) -> None:
    """Send random requests until the end, and at least `turns` of them."""
    turn = 0
    while time.monotonic() < end or turn < turns:
        turn += 1
        if rng.random() < BAD:
            _send_bad(url, rng, counts)
            continue
        place = rng.randrange(len(bodies))
        try:
            text, left = _ask(url, bodies[place], rng)
        except RefusedError as error:
            if error.status == http.client.TOO_MANY_REQUESTS:
                counts.add("refused")
                time.sleep(rng.uniform(0, LONGEST_WAIT_S))
            else:
                counts.fail(error)
            continue
        except (OSError, http.client.HTTPException) as error:
            counts.fail(error)
            continue
        counts.add("left" if left else "answered")
        known = expected[place]
        if text != known and not (left and known.startswith(text)):
            with counts.lock:
                counts.wrong.append(f"request {place}: {text[:80]!r}; expected {known[:80]!r}")


def _send_bad(url: str, rng: random.Random, counts: Counts) -> None:
    """Send an invalid request."""
    expected, method, path, body, headers = rng.choice(REFUSED)
    try:
        status = status_of(url, method, path, body, headers)
    except (OSError, http.client.HTTPException) as error:
        counts.fail(error)
        return
    if status == expected:
        counts.add("bad")
    else:
        counts.fail(InputError(f"{method} {path} {body[:80]!r}: status {status}; expected {expected}"))


def _reads_nothing(url: str, body: Json, longest: int, end: float, counts: Counts) -> None:
    """Request long streams until the end, and read nothing of them."""
    while (left := end - time.monotonic()) > 0:
        try:
            stall(url, {**body, **UNREAD, "max_tokens": longest}, min(UNREAD_S, left))
        except RefusedError as error:
            if error.status != http.client.TOO_MANY_REQUESTS:
                counts.fail(error)
            time.sleep(LONGEST_WAIT_S)
        except (OSError, http.client.HTTPException) as error:
            counts.fail(error)
        else:
            counts.add("unread")


def _ask(url: str, body: Json, rng: random.Random) -> tuple[str, bool]:
    """Send a request, whole or streamed; return (the text, whether the client left early)."""
    leaves = rng.random() < LEAVING
    if rng.random() < 0.5:
        arrivals = rng.randrange(8) if leaves else -1
        reply = stream(url, body, lambda count: count == arrivals)
        return reply.text, reply.left
    if not leaves:
        return whole(url, body), False
    leave_unread(url, body, rng.uniform(0, LONGEST_WAIT_S))
    return "", True


def _watch_memory(server: Server, end: float, seconds: float, counts: Counts) -> None:
    while time.monotonic() < end:
        if (size := server.memory_bytes()) is not None:
            counts.memory_bytes.append(size)
        time.sleep(seconds / SAMPLES)


def _held(server: Server) -> int:
    """Count the requests that the server holds without a waiting client."""
    end = time.monotonic() + FREE_S
    while (health := server.health())["requests_running"] + health["requests_waiting"]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return int(health["requests_running"] + health["requests_waiting"])


def _counted(server: Server) -> Json:
    """Return the server's counts: its errors, cut streams, unsent bytes."""
    samples = samples_of(server)

    def total(name: str, counts: Callable[[Mapping[str, str]], bool] = lambda _: True) -> float:
        return sum(sample.value for sample in samples if sample.name == name and counts(sample.labels))

    return {
        "server_errors": total("http_requests_total", lambda labels: labels["status"] >= "500"),
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

    ratios = []
    for number in range(ROUNDS + 1):
        urls = rotated([server.url, fresh.url], number)
        seconds = {url: answer_all(url) for url in urls}
        ratios.append(seconds[fresh.url] / seconds[server.url])
    return spread(ratios[1:])  # the first round warms up


def growth(sizes: Sequence[int]) -> float | None:
    """Compare the medians of the last and second tenth; None for fewer than 20 samples."""
    tenth = len(sizes) // 10
    if tenth < 2:
        return None
    return statistics.median(sizes[-tenth:]) / statistics.median(sizes[tenth : 2 * tenth]) - 1


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    counts = record["soak"]
    grown = counts["memory_growth_frac"]
    lines = [
        ("answers read to their ends", str(counts["answered"])),
        ("requests that their clients left", str(counts["left"])),
        ("streams that their client did not read", str(counts["unread"])),
        ("of these, ended by the server", f"{counts['cut_streams']:g}"),
        ("invalid requests, refused with the right status", str(counts["bad"])),
        ("refused with status 429, since the queue was full", str(counts["refused"])),
        ("other failures", str(counts["failed"])),
        ("wrong answers", str(counts["wrong"])),
        ("replies with a status of 500 or more", f"{counts['server_errors']:g}"),
        ("leaked slots", str(counts["leaked_slots"])),
        ("unsent bytes at the end", f"{counts['unsent_bytes']:g}"),
        ("growth of memory", "-" if grown is None else f"{100 * grown:.1f} %"),
        (
            f"its speed afterwards over that of a fresh server, {ROUNDS} rounds in turns",
            spread_text(counts["over_fresh"], ".2f"),
        ),
    ]
    text = (
        f"{counts['clients']} clients for {counts['seconds'] / 60:g} min on {counts['slots']} slots, "
        f"{counts['variant']}: "
        "greedy, seeded, with penalties, log-probabilities, stop strings, grammars, long prompts and K of their own, "
        "streamed and whole; 3 of 10 leave at a random moment. Every answer is compared with its request's alone, "
        "up to where its client left. 1 of 10 requests is invalid; one more client reads nothing of its streams. "
        "Memory: the last tenth of the time over its second tenth."
    )
    return [*page_head("A soak of the server", record), text, Table(("", ""), lines)]
