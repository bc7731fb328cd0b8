"""Connections, and what is around a body: clients that stall, forms of targets, encodings, replies that are counted."""

import asyncio
import contextlib
import gzip
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Counter, Gauge

from peagle.serve.app import create_app
from peagle.serve.metrics import Metrics
from peagle.serve.request_log import MOST_NOTES, RequestLog
from peagle.serve.server import Connection, ServerOptions
from peagle.serve.shared_state import SharedState
from peagle.serve.transport import EventStream
from tests.support.running import eventually, received, running
from tests.support.servers import CHAT, RESPONSES, client_of, error_of, values

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [40, 41, 42], "max_tokens": 5, "temperature": 0}
Make = Callable[..., SharedState]


# --- connections ------------------------------------------------------------------------------------------------------


def test_a_client_that_reads_nothing_of_its_replies_loses_its_connection(make: Make) -> None:
    service = make()
    many = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000  # their replies are more than sockets hold
    with running(service, unread_s=0.2, unread=service.metrics.unread.inc) as server, server.connect() as connection:
        threading.Thread(target=_sent, args=(connection, many)).start()
        eventually(lambda: _value(service, "peagle:unread_connections_total") == 1)
        eventually(lambda: not server.server.server_state.connections)


def _sent(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the server has closed it
        connection.sendall(data)


def _value(service: SharedState, name: str) -> float | None:
    return values(TestClient(create_app(service))).get((name,))


def test_a_client_that_reads_slowly_keeps_its_connection() -> None:
    """As long as it reads anything between two looks."""
    timers: list[Any] = []
    sizes, closed = iter([900, 800, 799, 10, 10]), list[str]()

    def call_later(_: float, call: Callable[..., None], *arguments: Any) -> Any:
        timers.append(lambda: call(*arguments))
        return SimpleNamespace(cancel=timers.clear)

    transport: Any = SimpleNamespace(
        get_extra_info=lambda *_: None,
        set_write_buffer_limits=lambda **_: None,
        get_write_buffer_size=lambda: next(sizes),
        close=lambda: closed.append("close"),
        abort=lambda: closed.append("abort"),
    )
    config = uvicorn.Config(FastAPI(), log_config=None)
    config.load()
    state, loop = uvicorn.server.ServerState(), SimpleNamespace(call_later=call_later)
    options = ServerOptions(unread=lambda: closed.append("unread"))
    connection: Any = Connection(config, state, {}, loop, options=options)
    connection.connection_made(transport)
    timers.clear()  # that of the headers
    connection.pause_writing()
    for _ in range(3):
        timers.pop()()
        assert not closed
    timers.pop()()
    assert closed == ["unread", "abort"]
    assert not timers


# --- streams ----------------------------------------------------------------------------------------------------------


class Client:
    """A client of a stream over ASGI, that reads while `reads` is set."""

    def __init__(self, reads: bool) -> None:
        self.body, self.complete, self.reads = b"", False, asyncio.Event()
        if reads:
            self.reads.set()

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
            self.body += message["body"]
            self.complete = not message["more_body"]


def metrics_of(registry: CollectorRegistry) -> Metrics:
    """Make the metrics of streams alone."""
    metrics = object.__new__(Metrics)
    metrics.unsent, metrics.cut = Gauge("size", "", registry=registry), Counter("cut", "", registry=registry)
    return metrics


def stream_of(events: AsyncGenerator[str, None], close: Callable[[], None] = lambda: None) -> EventStream:
    return EventStream(events, close, metrics_of(CollectorRegistry()), 1000)


def test_a_stream_that_nobody_reads_ends_its_requests_and_says_why(make: Make) -> None:
    service = make(max_unsent=3000)
    body = json.dumps({**BODY, "max_tokens": 200, "n": 2, "logprobs": 20, "stream": True}).encode()
    scope = {
        "type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost")], "http_version": "1.1", "scheme": "http", "root_path": "",
    }  # fmt: skip

    async def run() -> bytes:
        client, bodies = Client(reads=False), iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            return next(bodies, None) or await client.receive()

        replying = asyncio.ensure_future(create_app(service)(scope, receive, client.send))
        while service.loop.num_open or not _value(service, "peagle:cut_streams_total"):
            await asyncio.sleep(0.01)
        assert not replying.done()  # the client may yet read why
        assert _value(service, "peagle:unsent_bytes") < 3000
        client.reads.set()
        await replying
        assert client.complete
        return client.body

    body_sent = asyncio.run(asyncio.wait_for(run(), 60))
    *_, error, done = body_sent.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    assert "more than 3000 bytes of this stream waited" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
    assert len(body_sent) < 8000
    assert _value(service, "peagle:unsent_bytes") == 0
    assert 'finished_reason="abort",model_name="toy"} 2.0' in service.metrics.text().decode()


def test_a_stream_without_an_event_is_kept_open_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies and clients give up what is silent: a request waits for its slot, or its prompt is long."""
    monkeypatch.setattr("peagle.serve.transport.SILENCE_S", 0.01)
    told = asyncio.Event()

    async def events() -> AsyncGenerator[str, None]:
        await told.wait()
        yield "data: a\n\n"

    async def run() -> bytes:
        client = Client(reads=True)
        replying = asyncio.ensure_future(stream_of(events())({}, client.receive, client.send))
        while client.body.count(b": waiting\n\n") < 2:
            await asyncio.sleep(0.01)
        told.set()
        await replying
        assert client.complete
        return client.body

    assert asyncio.run(asyncio.wait_for(run(), 60)).replace(b": waiting\n\n", b"") == b"data: a\n\n"


def test_a_stream_that_fails_on_its_own_is_not_complete() -> None:
    async def events() -> AsyncGenerator[str, None]:
        yield "data: a\n\n"
        raise RuntimeError("a fault")

    async def run() -> None:
        client, closed = Client(reads=True), list[int]()
        with pytest.raises(RuntimeError, match="a fault"):
            await stream_of(events(), lambda: closed.append(1))({}, client.receive, client.send)
        assert (client.body, client.complete, closed) == (b"data: a\n\n", False, [1])

    asyncio.run(asyncio.wait_for(run(), 60))


# --- requests ---------------------------------------------------------------------------------------------------------


def test_head_is_get_without_a_body(make: Make) -> None:
    with running(make()) as server:
        for path in ("/health", "/v1/models", "/v1/models/toy", "/metrics", "/openapi.json", "/"):
            whole, head = httpx.get(server.url + path), httpx.head(server.url + path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == whole.headers["content-type"]
        assert httpx.head(server.url + PATH).status_code == 405


TARGETS = {
    "http://localhost:1/v1/models": 200,
    "HTTP://127.0.0.1/v1/models?a=b": 200,
    "http://me:secret@localhost/v1/models/toy": 200,
    "http://localhost/v1/models/t%6fy": 200,
    "http://localhost": 200,
    "http://evil.example/v1/models": 403,  # and not by the header, as a proxy reads it
    "http://localhost/v1/nothing": 404,
    "http://[/v1/models": 404,
    "ftp://localhost/v1/models": 404,
    "v1/models": 404,
    "*": 404,
}


def test_a_target_may_be_a_url(make: Make) -> None:
    statuses = {}
    with running(make(hosts=())) as server:
        for target in TARGETS:
            connection = server.connect()
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            statuses[target] = int(received(connection).split()[1])
    assert statuses == TARGETS


PLAIN = {  # as clients join a base URL and a path, with a slash on both sides or at the end
    "/v1/models/": "/v1/models",
    "/v1/models/toy/": "/v1/models/toy",
    "//v1//models": "/v1/models",
    "/health/": "/health",
    "//": "/",
}


def test_a_path_may_have_more_slashes(client: TestClient) -> None:
    client = TestClient(client.app, follow_redirects=False)  # the other one knows the types of plain paths only
    for path, plain in PLAIN.items():
        assert client.get(f"http://testserver{path}").content == client.get(plain).content
    assert client.post(f"{PATH}/", json=BODY).status_code == 200


MEANT = {
    "/chat/completions": CHAT,
    "/v1/v1/chat/completions": CHAT,
    "/v1/chat/completions/chat/completions": CHAT,
    "/api/v1/completions": PATH,
    "/models": "/v1/models",
    "/v1/tokenize": "/tokenize",
}


def test_a_path_with_another_start_is_refused_with_the_one_that_was_meant(client: TestClient) -> None:
    for path, meant in MEANT.items():
        cause = ": clients add its end to a base URL that ends in /v1, once" if meant.startswith("/v1") else ""
        assert error_of(client.post(path, json=BODY), 404)["message"] == (
            f"POST {path}: Not Found; expected {meant}{cause}"
        )


def test_each_reply_has_the_id_of_its_request(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    service = make(log=RequestLog(logging.getLogger("ids")))
    client = client_of(service)
    with caplog.at_level(logging.INFO, "ids"):
        reply = client.post(PATH, json=BODY, headers={"X-Request-Id": "mine-1/e"})
    assert reply.headers["x-request-id"] == json.loads(caplog.messages[0])["request_id"] == "mine-1/e"
    others = [client.post(PATH, json=BODY, headers={"X-Request-Id": bad}) for bad in ("", "a b", "x" * 201)]
    others += [client.get("/health"), client.get("/nothing"), client.post(PATH, json={**BODY, "stream": True})]
    service.health = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    others.append(client.get("/health"))
    assert [reply.status_code for reply in others] == [200, 200, 200, 200, 404, 200, 500]
    made = {reply.headers["x-request-id"] for reply in others}
    assert len(made) == len(others)
    assert all(re.fullmatch("req_[0-9a-f]{32}", request_id) for request_id in made)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_body_may_be_in_any_encoding_of_unicode(client: TestClient, encoding: str) -> None:
    body = {"prompt": "größer 東京"}
    expected = client.post("/tokenize", json=body).json()
    written = json.dumps(body, ensure_ascii=False).encode(encoding)
    assert client.post("/tokenize", content=written).json() == expected


def test_an_encoded_body_is_refused_by_its_encoding(client: TestClient) -> None:
    body = gzip.compress(json.dumps(BODY).encode())
    for path in (PATH, CHAT, RESPONSES, "/tokenize", "/detokenize"):
        reply = client.post(path, content=body, headers={"Content-Encoding": "gzip"})
        error = error_of(reply, 415)
        assert "content encoding is 'gzip'; expected none: send plain JSON" in error["message"]
        assert reply.headers["accept-encoding"] == "identity"
        assert client.post(path, json={}, headers={"Content-Encoding": "identity"}).status_code == 400


REPLIES = {
    ("GET", "/v1/models/toy"): ("/v1/models/{name:path}", "GET", "200"),
    ("GET", "/nothing"): ("none", "GET", "404"),
    ("POST", PATH): (PATH, "POST", "400"),
    ("MADE-UP", "/metrics"): ("/metrics", "other", "405"),
    ("GET", "/health"): ("/health", "GET", "500"),
}


def test_what_clients_make_up_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(logging.getLogger("notes"))
    with caplog.at_level(logging.INFO, "notes"):
        for number in range(MOST_NOTES + 9):
            log.note(f"a keyword {number}", "a keyword 0")
    assert len(caplog.messages) == MOST_NOTES


def test_replies_are_counted_by_route_not_by_what_clients_make_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures of the server, too."""
    service = make()
    monkeypatch.setattr(service, "health", lambda: 1 / 0)
    client = client_of(service)
    for (method, path), (handler, label, status) in REPLIES.items():
        assert str(client.request(method, path).status_code) == status
        text = service.metrics.text().decode()
        labels = f'handler="{handler}",method="{label}"'
        assert f'http_requests_total{{{labels},status="{status[0]}xx"}} 1.0' in text
        assert f"http_request_duration_seconds_count{{{labels}}} 1.0" in text
