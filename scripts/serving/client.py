"""A cheap client, which takes the server hardly any time: streamed completions, a thread per client.

It records when requests were sent and when their tokens arrived, and reads the server's own counts.
"""

import contextlib
import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from scripts.runs import Json
from scripts.serving.servers import Server

PATH = "/v1/completions"
PATIENCE_S = 600.0
COUNTED_S = 5.0  # for a server to count a request after its last event
ITL, TTFT, E2E = (
    "vllm:inter_token_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds",
)


class RefusedError(Exception):
    """A reply with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Reply:
    """An answer. times_s: arrivals, of one or more tokens. left: the client left before the end."""

    started_s: float
    times_s: tuple[float, ...]
    num_tokens: int
    text: str = ""
    num_steps: int = 0  # that drafted
    num_accepted: int = 0
    left: bool = False


@dataclass
class _Read:
    """The events of a stream."""

    times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: Json = field(default_factory=dict)
    drafted: Json = field(default_factory=dict)

    def event(self, data: bytes) -> None:
        value = json.loads(data)
        if "error" in value:
            raise RefusedError(http.client.OK, value["error"]["message"])
        text = "".join(choice.get("text") or "" for choice in value.get("choices", ()))
        if text:
            self.times_s.append(time.perf_counter())
            self.texts.append(text)
        self.usage = value.get("usage") or self.usage
        self.drafted = value.get("metrics", {}).get("speculative_decoding", self.drafted)


@contextlib.contextmanager
def sent(url: str, body: Json, receive_buffer: int | None = None) -> Iterator[http.client.HTTPConnection]:
    """Send a completion, and close the connection at the end of the context.

    receive_buffer: bytes that the system reads ahead; it is set before connecting.
    """
    parts = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=PATIENCE_S)) as connection:
        if receive_buffer is not None:
            connection.sock = socket.socket()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.sock.settimeout(PATIENCE_S)
            connection.sock.connect((parts.hostname, parts.port))
        connection.request("POST", parts.path + PATH, dumps(body), {"Content-Type": "application/json"})
        yield connection


def reply_of(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """Wait for the head of a reply. Raises RefusedError for an error."""
    reply = connection.getresponse()
    if reply.status != http.client.OK:
        raise RefusedError(reply.status, _message(reply.read()))
    return reply


def whole(url: str, body: Json) -> str:
    """Request a completion that is not streamed; return its text. Raises RefusedError."""
    with sent(url, body) as connection:
        text: str = json.loads(reply_of(connection).read())["choices"][0]["text"]
        return text


def leave_unread(url: str, body: Json, seconds: float) -> None:
    """Request a completion, and leave after some seconds without reading anything."""
    with sent(url, body):
        time.sleep(seconds)


def stall(url: str, body: Json, seconds: float) -> None:
    """Request a stream, and read only its head for some seconds. Raises RefusedError."""
    with sent(url, body, receive_buffer=4096) as connection:
        reply_of(connection)
        time.sleep(seconds)


def status_of(url: str, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> int:
    """Send any request; return the status of its reply."""
    parts = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=PATIENCE_S)) as connection:
        connection.request(method, parts.path + path, body, {"Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        reply.read()
        return reply.status


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def stream(url: str, body: Json, leave: Callable[[int], bool] = lambda _: False) -> Reply:
    """Request a completion as a stream, and read it to its end.

    leave: whether to leave, by the number of arrivals. Raises RefusedError for an error.
    """
    started, read, left = time.perf_counter(), _Read(), False
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with sent(url, streamed) as connection:
        for line in reply_of(connection):
            if line.startswith(b"data: {"):
                read.event(line[len(b"data: ") :])
            if leave(len(read.times_s)):
                left = True
                break
    return Reply(
        started,
        tuple(read.times_s),
        read.usage.get("completion_tokens", 0),
        "".join(read.texts),
        read.drafted.get("num_spec_steps", 0),
        read.drafted.get("num_accepted_draft_tokens", 0),
        left,
    )


def together(url: str, bodies: Sequence[Json], clients: int) -> list[Reply]:
    """Send completions from several clients at once, one after the other by client.

    Raises InputError for a refusal, and for an answer without exactly max_tokens tokens.
    """

    def client(place: int) -> list[Reply]:
        return [stream(url, body) for body in bodies[place::clients]]

    with ThreadPoolExecutor(clients) as pool:
        try:
            all_replies = [reply for replies in pool.map(client, range(clients)) for reply in replies]
        except (RefusedError, OSError, http.client.HTTPException) as error:
            raise InputError(f"{url} does not answer as expected: {error or type(error).__name__}") from None
    lengths = {body["max_tokens"] for body in bodies}
    if others := {reply.num_tokens for reply in all_replies} - lengths:
        raise InputError(f"{url} answered with {others.pop()} tokens; expected {max(lengths)}")
    return all_replies


def figures(replies: Sequence[Reply]) -> Json:
    """Summarise a round: tokens from the first request to the last token a second, ttft, itl."""
    seconds = max(reply.times_s[-1] for reply in replies) - min(reply.started_s for reply in replies)
    itl = np.concatenate([np.diff(reply.times_s) for reply in replies])
    ttft = [reply.times_s[0] - reply.started_s for reply in replies]
    steps = sum(reply.num_steps for reply in replies)
    return {
        "seconds": seconds,
        "tok_per_s": sum(reply.num_tokens for reply in replies) / seconds,
        "ttft_p50_s": float(np.median(ttft)),
        "itl_p50_s": float(np.quantile(itl, 0.5)) if len(itl) else None,
        "itl_p99_s": float(np.quantile(itl, 0.99)) if len(itl) else None,
        "acceptance_length": 1 + sum(reply.num_accepted for reply in replies) / steps if steps else None,
    }


def samples_of(server: Server) -> list[Sample]:
    """Read /metrics."""
    families = text_string_to_metric_families(server.get("/metrics").decode())
    return [sample for family in families for sample in family.samples]


@dataclass(frozen=True)
class Counted:
    """The counters of a server of ours since its start. itl: (most seconds, count) of its histogram."""

    requests: float
    tokens: float
    itl: tuple[tuple[float, float], ...]
    itl_s: float
    ttft_s: float
    e2e_s: float

    @classmethod
    def by(cls, server: Server) -> "Counted":
        """Read /metrics."""
        samples = samples_of(server)

        def total(name: str) -> float:
            return sum(sample.value for sample in samples if sample.name == name)

        buckets = [(float(sample.labels["le"]), sample.value) for sample in samples if sample.name == f"{ITL}_bucket"]
        sums = (total(f"{name}_sum") for name in (ITL, TTFT, E2E))
        return cls(total(f"{E2E}_count"), total("vllm:generation_tokens_total"), tuple(buckets), *sums)

    @classmethod
    def after(cls, server: Server, before: "Counted", requests: int) -> "Counted":
        """Read /metrics after it counts so many more requests. Raises InputError if it never does."""
        end = time.monotonic() + COUNTED_S
        while (counted := cls.by(server)).requests < before.requests + requests:
            if time.monotonic() > end:
                raise InputError(f"{server.url}/metrics counts {counted.requests - before.requests:g} of {requests}")
            time.sleep(0.01)
        return counted

    def since(self, before: "Counted") -> Json:
        """Compute the server's own figures of the requests since another count.

        The median of itl is interpolated in its bucket, as by Prometheus' histogram_quantile.
        """
        itl = [(most, count - earlier) for (most, count), (_, earlier) in zip(self.itl, before.itl, strict=True)]
        intervals, requests = itl[-1][1], self.requests - before.requests
        decoding = (self.e2e_s - before.e2e_s) - (self.ttft_s - before.ttft_s)
        return {
            "own_itl_p50_s": quantile(itl, 0.5) if intervals else None,
            "own_itl_mean_s": (self.itl_s - before.itl_s) / intervals if intervals else None,
            "own_ttft_mean_s": (self.ttft_s - before.ttft_s) / requests,
            "own_tpot_s": decoding / (self.tokens - before.tokens - requests),
        }


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """Interpolate a quantile of cumulative buckets (upper bound, count)."""
    rank, low, below = share * buckets[-1][1], 0.0, 0.0
    for most, count in buckets:
        if count >= rank:
            return low if np.isinf(most) else low + (most - low) * (rank - below) / (count - below)
        low, below = most, count
    raise AssertionError("the last bucket counts all")
