"""A soak: for some minutes more clients than a server has room for. Every answer is checked.

Many clients leave, some send what must be refused, and one reads nothing of its streams. What must hold: an answer
equals the one that the same request gets alone, up to where its client left; what is wrong is refused, with the status
that says so; afterwards no slot is held, nothing waits to be sent, all slots answer, and memory has not grown.
"""

import http.client
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from peagle.ops.errors import InputError
from scripts.runs import Json
from scripts.serving.client import RefusedError, leave_unread, samples_of, stall, status_of, stream, whole
from scripts.serving.servers import Server

LEAVING, BAD = 0.3, 0.1  # shares of the requests
UNREAD_S = 30.0  # before a client that reads nothing leaves
FREE_S = 30.0  # for the slots of those that left last
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
LONGEST_WAIT_S = 0.25  # after status 429, and before a client that waits for a whole answer leaves
SAMPLES = 100  # of memory
UNREAD = {"logprobs": 20, "n": 2, "ignore_eos": True, "stream": True}  # many bytes a token
# what must be refused: status, method, path, body, headers
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


@dataclass
class Found:
    """What a soak has seen. wrong: what the first few wrong answers were."""

    answered: int = 0
    left: int = 0
    bad: int = 0  # requests that were refused, as they must be
    unread: int = 0  # streams of which nothing was read
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


def bodies(prompts: Sequence[Sequence[int]], tokens_out: int) -> list[Json]:
    """Make requests that differ: greedy or seeded, with penalties, log-probabilities, stop strings, grammars, own K."""
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
    asked: Sequence[Json],
    clients: int,
    seconds: float,
    seed: int,
    slots: int,
    longest: int,
    turns: int = 1,
) -> Json:
    """Run it; return its figures. Raises InputError if the server does not answer a request alone.

    longest: tokens of an answer of which nothing is read. turns: requests of each client, however long they take.
    """
    try:
        expected = [whole(server.url, body) for body in asked]
    except (RefusedError, OSError, http.client.HTTPException) as error:
        raise InputError(f"{server.url} does not answer: {error or type(error).__name__}") from None
    found, end = Found(), time.monotonic() + seconds
    randoms = [random.Random(f"{seed} {place}") for place in range(clients)]
    threads = [
        threading.Thread(target=_client, args=(server.url, asked, expected, rng, end, turns, found)) for rng in randoms
    ]
    threads.append(threading.Thread(target=_reads_nothing, args=(server.url, asked[0], longest, end, found)))
    for thread in threads:
        thread.start()
    _watch_memory(server, end, seconds, found)
    for thread in threads:
        thread.join()
    leaked = _held(server)
    after = [_text(lambda body=body: whole(server.url, body)) for body in asked[:slots]]
    wrong = len(found.wrong) + sum(text != known for text, known in zip(after, expected, strict=False))
    return {
        "clients": clients, "slots": slots, "seconds": seconds, "answered": found.answered, "left": found.left,
        "bad": found.bad, "unread": found.unread, "refused": found.refused, "wrong": wrong,
        "failed": len(found.failed), "leaked_slots": leaked, **_counted(server),
        "first_wrong": (found.failed + found.wrong)[:3], "memory_growth_frac": growth(found.memory_bytes),
        "memory_bytes": found.memory_bytes[-1] if found.memory_bytes else None,
    }  # fmt: skip


def _text(ask: Callable[[], str]) -> str | None:
    try:
        return ask()
    except (RefusedError, OSError, http.client.HTTPException):
        return None


def _client(
    url: str,
    asked: Sequence[Json],
    expected: Sequence[str],
    rng: random.Random,
    end: float,
    turns: int,
    found: Found,
) -> None:
    """Ask until the end, and so many times at least, each time for another answer."""
    turn = 0
    while time.monotonic() < end or turn < turns:
        turn += 1
        if rng.random() < BAD:
            _ask_badly(url, rng, found)
            continue
        place = rng.randrange(len(asked))
        try:
            text, left = _ask(url, asked[place], rng)
        except RefusedError as error:
            if error.status == http.client.TOO_MANY_REQUESTS:
                found.add("refused")
                time.sleep(rng.uniform(0, LONGEST_WAIT_S))
            else:
                found.fail(error)
            continue
        except (OSError, http.client.HTTPException) as error:
            found.fail(error)
            continue
        found.add("left" if left else "answered")
        known = expected[place]
        if text != known and not (left and known.startswith(text)):
            with found.lock:
                found.wrong.append(f"request {place}: {text[:80]!r}; expected {known[:80]!r}")


def _ask_badly(url: str, rng: random.Random, found: Found) -> None:
    """Send a request that must be refused."""
    expected, method, path, body, headers = rng.choice(REFUSED)
    try:
        status = status_of(url, method, path, body, headers)
    except (OSError, http.client.HTTPException) as error:
        found.fail(error)
        return
    if status == expected:
        found.add("bad")
    else:
        found.fail(InputError(f"{method} {path} {body[:80]!r}: status {status}; expected {expected}"))


def _reads_nothing(url: str, body: Json, longest: int, end: float, found: Found) -> None:
    """Ask for long streams until the end, and read nothing of them."""
    while (left := end - time.monotonic()) > 0:
        try:
            stall(url, {**body, **UNREAD, "max_tokens": longest}, min(UNREAD_S, left))
        except RefusedError as error:
            if error.status != http.client.TOO_MANY_REQUESTS:
                found.fail(error)
            time.sleep(LONGEST_WAIT_S)
        except (OSError, http.client.HTTPException) as error:
            found.fail(error)
        else:
            found.add("unread")


def _ask(url: str, body: Json, rng: random.Random) -> tuple[str, bool]:
    """Ask once, whole or streamed; return (the text, whether the client left before its end)."""
    leaves = rng.random() < LEAVING
    if rng.random() < 0.5:
        arrivals = rng.randrange(8) if leaves else -1
        reply = stream(url, body, lambda count: count == arrivals)
        return reply.text, reply.left
    if not leaves:
        return whole(url, body), False
    leave_unread(url, body, rng.uniform(0, LONGEST_WAIT_S))
    return "", True


def _watch_memory(server: Server, end: float, seconds: float, found: Found) -> None:
    while time.monotonic() < end:
        if (size := server.memory_bytes()) is not None:
            found.memory_bytes.append(size)
        time.sleep(seconds / SAMPLES)


def _held(server: Server) -> int:
    """Count the requests that the server still holds although no client waits."""
    end = time.monotonic() + FREE_S
    while (health := server.health())["requests_running"] + health["requests_waiting"]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return int(health["requests_running"] + health["requests_waiting"])


def _counted(server: Server) -> Json:
    """Return what the server counts: replies with a status of 500 or more, cut streams, bytes that still wait."""
    samples = samples_of(server)

    def total(name: str, counts: Callable[[Mapping[str, str]], bool] = lambda _: True) -> float:
        return sum(sample.value for sample in samples if sample.name == name and counts(sample.labels))

    return {
        "server_errors": total("http_requests_total", lambda labels: labels["status"] >= "500"),
        "cut_streams": total("peagle:cut_streams_total"),
        "unsent_bytes": total("peagle:unsent_bytes"),
    }


def growth(sizes: Sequence[int]) -> float | None:
    """Return how much the last tenth is above the second one, by medians; None of fewer than 20 samples."""
    tenth = len(sizes) // 10
    if tenth < 2:
        return None
    return statistics.median(sizes[-tenth:]) / statistics.median(sizes[tenth : 2 * tenth]) - 1
