"""A cheap client, which takes the server hardly any time: streamed completions, a thread per client.

It records when requests were sent and when their tokens arrived.
"""

import contextlib
import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from peagle.base.errors import InputError
from peagle.base.strict_json import dumps
from scripts.runs import Json

PATH = "/v1/completions"
JSON_BODY = {"Content-Type": "application/json"}
PATIENCE_S = 600.0


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
    num_emitted: int = 0  # tokens of these steps
    left: bool = False


@contextlib.contextmanager
def sent(
    url: str,
    body: Json | bytes,
    method: str = "POST",
    path: str = PATH,
    headers: Mapping[str, str] = JSON_BODY,
    receive_buffer: int | None = None,
) -> Iterator[http.client.HTTPConnection]:
    """Send a request, and close the connection at the end of the context.

    receive_buffer: bytes that the system reads ahead; it is set before connecting.
    """
    parts = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=PATIENCE_S)) as connection:
        if receive_buffer is not None:
            connection.sock = socket.socket()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.sock.settimeout(PATIENCE_S)
            connection.sock.connect((parts.hostname, parts.port))
        connection.request(method, parts.path + path, body if isinstance(body, bytes) else dumps(body), dict(headers))
        yield connection


def reply_of(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """Wait for the head of a reply. Raises RefusedError for an error."""
    reply = connection.getresponse()
    if reply.status == http.client.OK:
        return reply
    body = reply.read()
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:200]
    raise RefusedError(reply.status, message)


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
    with sent(url, body, method, path, {**JSON_BODY, **headers}) as connection:
        reply = connection.getresponse()
        reply.read()
        return reply.status


def stream(url: str, body: Json, leave: Callable[[int], bool] = lambda _: False) -> Reply:
    """Request a completion as a stream, and read it to its end.

    leave: whether to leave, by the number of arrivals. Raises RefusedError for an error.
    """
    started, left = time.perf_counter(), False
    times: list[float] = []
    texts: list[str] = []
    usage: Json = {}
    drafts: Json = {}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with sent(url, streamed) as connection:
        for line in reply_of(connection):
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RefusedError(http.client.OK, event["error"]["message"])
                if text := "".join(choice.get("text") or "" for choice in event.get("choices", ())):
                    times.append(time.perf_counter())
                    texts.append(text)
                usage = event.get("usage") or usage
                drafts = event.get("metrics", {}).get("speculative_decoding", drafts)
            if left := leave(len(times)):
                break
    steps = drafts.get("num_spec_steps", 0)
    emitted = steps + drafts.get("num_accepted_draft_tokens", 0) - drafts.get("num_truncated_tokens", 0)
    return Reply(started, tuple(times), usage.get("completion_tokens", 0), "".join(texts), steps, emitted, left)


def together(url: str, bodies: Sequence[Json], clients: int) -> list[Reply]:
    """Send completions from several clients at once, one after the other by client.

    Raises InputError for a refusal, and for an answer without exactly max_tokens tokens.
    """

    def client(first: int) -> list[Reply]:
        return [stream(url, body) for body in bodies[first::clients]]

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
    steps = sum(reply.num_steps for reply in replies)
    return {
        "seconds": seconds,
        "tok_per_s": sum(reply.num_tokens for reply in replies) / seconds,
        "ttft_p50_s": float(np.median([reply.times_s[0] - reply.started_s for reply in replies])),
        "itl_p50_s": float(np.quantile(itl, 0.5)) if len(itl) else None,
        "itl_p99_s": float(np.quantile(itl, 0.99)) if len(itl) else None,
        "acceptance_length": sum(reply.num_emitted for reply in replies) / steps if steps else None,
    }
