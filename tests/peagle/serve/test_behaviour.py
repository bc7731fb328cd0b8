"""Disconnects, a full queue, failures and the end of the server, over real connections."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import jax.numpy as jnp
import pytest
from fastapi.testclient import TestClient

from peagle.serve import loop as engine_loop
from peagle.serve.app import create_app
from peagle.serve.service import Service
from peagle.text.tokenizer import ByteLevelTokenizer
from tests.support.pairs import toy_pair
from tests.support.running import Gate, Running, eventually, running
from tests.support.servers import SLOTS, client_of, service_of

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [40, 41, 42], "max_tokens": 30, "temperature": 0}
Make = Callable[..., Service]


def address_of(server: Running) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def send(server: Running, cut: int | None = None, **fields: Any) -> socket.socket:
    """Send a request, or so many bytes of its body, and leave its answer unread."""
    body = json.dumps({**BODY, **fields}).encode()
    connection = socket.create_connection(address_of(server))
    connection.sendall(
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body[:cut]
    )
    return connection


def _all(connection: socket.socket) -> bytes:
    """Read to the end, and close."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def _reply(connection: socket.socket) -> bytes:
    """Read a reply of JSON."""
    received = b""
    while b"}" not in received:  # its head may arrive alone
        received += connection.recv(65536) or b"cut}"
    return received


def is_idle(service: Service) -> bool:
    engine = service.loop.engine
    return service.loop.num_open == 0 and not engine.busy and engine._scheduler.num_active == 0


def test_it_answers_below_a_prefix(shared: Service) -> None:
    """As Ray Serve mounts it with a route_prefix."""
    client = TestClient(create_app(shared), root_path="/models")
    assert client.post(f"/models{PATH}", json=BODY).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_before_the_next_dispatch(make: Make, stream: bool) -> None:
    service = make()
    gate = Gate(service)
    with running(service) as server:
        gate.close()
        connection = send(server, stream=stream, max_tokens=250)
        eventually(lambda: service.loop._running)  # the engine has it, and waits at the gate
        (job,) = service.loop._running.values()
        connection.close()
        eventually(lambda: job.aborted)
        gate.open()
        eventually(lambda: is_idle(service))
        assert gate.dispatched == []
        assert httpx.post(server.url + PATH, json=BODY, timeout=60).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_or_the_midst_of_its_answer_leaks_nothing(make: Make, stream: bool) -> None:
    service = make()
    gate = Gate(service)
    with running(service) as server:
        connections = [send(server, stream=stream, max_tokens=200, n=2) for _ in range(SLOTS + 2)]
        eventually(lambda: len(gate.dispatched) > 4)
        for connection in connections:
            connection.close()
        eventually(lambda: is_idle(service))
        before = httpx.post(server.url + PATH, json=BODY, timeout=60).json()["choices"][0]["text"]
        assert len(before) == 30
    assert 'finished_reason="abort"' in service.metrics.text().decode()


def test_a_full_queue_refuses_with_a_time_and_nothing_is_lost(make: Make) -> None:
    service = make(max_queue=1)
    gate = Gate(service)
    with running(service) as server:
        gate.close()
        replies: list[httpx.Response] = []

        def ask() -> None:
            replies.append(httpx.post(server.url + PATH, json=BODY, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(SLOTS + 1)]
        for thread in threads:
            thread.start()
        eventually(lambda: service.loop.num_open == SLOTS + 1)
        assert httpx.get(server.url + "/health").json()["requests_waiting"] == 1
        refused = httpx.post(server.url + PATH, json=BODY)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert httpx.post(server.url + PATH, json={**BODY, "n": SLOTS + 2}).status_code == 400  # never possible
        gate.open()
        for thread in threads:
            thread.join()
    assert [reply.status_code for reply in replies] == [200] * (SLOTS + 1)
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1


def test_after_the_engine_failed_every_request_gets_an_error_and_health_is_red(make: Make) -> None:
    service = make()
    gate = Gate(service)
    assert client_of(service).get("/health").json()["status"] == "ok"
    gate.close()

    def broken(*_: object) -> None:
        raise RuntimeError("the device\nis gone")

    with running(service) as server:
        service.loop.engine.executor.prefill = broken  # type: ignore[method-assign, assignment]
        streamed = send(server, stream=True)
        whole: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: whole.append(httpx.post(server.url + PATH, json=BODY, timeout=60)))
        thread.start()
        eventually(lambda: service.loop.num_open == 2)
        gate.open()
        thread.join()
        received = b""
        while b"[DONE]" not in received:
            received += streamed.recv(65536)
        streamed.close()
        assert b"the device is gone" in received
        for reply in (whole[0], httpx.post(server.url + PATH, json=BODY, timeout=60)):
            assert reply.status_code == 503
            assert reply.json()["error"]["type"] == "server_error"
            assert "the device is gone" in reply.json()["error"]["message"]
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failed"
        assert "the device is gone" in health.json()["error"]


def test_outputs_that_are_not_finite_cost_only_their_own_request(tokenizer: ByteLevelTokenizer) -> None:
    pair = toy_pair(tokenizer)
    target = pair.target.replace(table=pair.target.table.at[300].set(jnp.nan))  # type: ignore[attr-defined]
    service = service_of(type(pair)(target, target, pair.drafter, tokenizer, (1,)))
    client = client_of(service)
    reply = client.post(PATH, json={**BODY, "prompt": [300]})
    assert reply.status_code == 500
    assert "not finite" in reply.json()["error"]["message"]
    assert client.post(PATH, json=BODY).status_code == 200
    assert client.get("/health").status_code == 200
    service.loop.close()


def test_work_without_a_step_for_long_is_seen(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    gate = Gate(service)
    with running(service) as server:
        gate.close()
        connection = send(server)
        eventually(lambda: service.loop.num_open)
        monkeypatch.setattr(engine_loop, "STALLED_S", -1.0)
        assert httpx.get(server.url + "/health").json()["status"] == "stalled"
        monkeypatch.undo()
        gate.open()
        eventually(lambda: is_idle(service))
        connection.close()
        assert httpx.get(server.url + "/health").json()["status"] == "ok"


def test_the_end_waits_for_open_answers(make: Make) -> None:
    service = make()
    gate = Gate(service)
    with running(service) as server:
        gate.close()
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(httpx.post(server.url + PATH, json=BODY, timeout=60)))
        thread.start()
        eventually(lambda: service.loop.num_open)
        server.end()
        eventually(lambda: service.loop.status == "draining")
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        gate.open()
        thread.join()
        server.join()
    assert replies[0].json()["usage"]["completion_tokens"] == 30


def test_after_the_deadline_open_answers_get_an_error(make: Make) -> None:
    service = make()
    gate = Gate(service)
    with running(service, drain_s=0) as server:
        gate.close()
        connection = send(server, stream=True)
        eventually(lambda: service.loop.num_open)
        server.end()
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(65536)
        gate.open()
        server.join()
        connection.close()
    assert b"shutting down" in received
    eventually(lambda: is_idle(service))


def test_a_second_signal_cuts_answers_off_and_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    service, said = make(), []
    gate = Gate(service)
    with running(service, note=said.append) as server:
        gate.close()
        connection, whole = send(server, stream=True), send(server)
        eventually(lambda: service.loop.num_open == 2)
        for number in (signal.SIGTERM, signal.SIGINT):
            server.server.handle_exit(number, None)
            eventually(lambda number=number: len(said) == (1 if number == signal.SIGTERM else 2))
        assert b"stopped before" in _all(connection)
        assert b"503 Service" in _all(whole)
        gate.open()
        server.join()
    assert said == [
        "shutting down: 2 answers under way may take up to 30 s; another Ctrl-C or SIGTERM cuts them off",
        "cutting 2 answers off",
    ]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_an_end_by_force_shows_no_traceback(make: Make, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    """One client waits for its answer, and one has sent half a body."""
    service = make()
    gate = Gate(service)
    with running(service) as server:
        gate.close()
        connection = send(server, stream=stream)
        half = send(server, cut=5)
        eventually(lambda: service.loop.num_open and len(server.server.server_state.tasks) == 2)
        server.end()
        server.server.force_exit = True
        server.join()
        if not stream:
            assert b"503 Service Unavailable" in _all(connection)
        assert b"stopped before this request was answered" in _all(half)
        connection.close()
        gate.open()
    assert "Traceback" not in caplog.text
    eventually(lambda: is_idle(service))


def test_a_body_that_never_ends_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.serve.http.BODY_PATIENCE_S", 0.05)
    service = make()
    with running(service) as server, send(server, cut=5) as connection:
        received = _reply(connection)
    assert b"408 Request Timeout" in received
    assert b"was not complete within 0.05 seconds" in received


def test_headers_that_never_end_cost_their_connection(make: Make) -> None:
    """Those of a first request, and of one after an answer. An answer itself may take longer, as may a pause."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    service = make()
    gate = Gate(service)
    with running(service, headers_s=1.0) as server:
        gate.close()
        long = send(server, stream=True)
        eventually(lambda: service.loop.num_open)
        pausing, stalled, again = (socket.create_connection(address_of(server)) for _ in range(3))
        for connection in (pausing, again):
            connection.sendall(head + b"\r\n")
            assert b"200 OK" in _reply(connection)
        for connection in (stalled, again):
            connection.sendall(head)
            assert _all(connection) == b""  # until the server closes it
        pausing.sendall(head + b"\r\n")
        assert b"200 OK" in _reply(pausing)
        pausing.close()
        gate.open()
        received = b""
        while b"[DONE]" not in received:
            received += long.recv(65536) or b"cut [DONE]"
        long.close()
    assert b"cut" not in received


def test_a_reader_of_many_answers_never_waits_for_the_engine(make: Make) -> None:
    """The event loop answers while a step runs."""
    service = make()
    gate = Gate(service)
    with running(service) as server:
        gate.close()
        connections = [send(server, stream=True) for _ in range(3)]
        eventually(lambda: service.loop.num_open == 3)

        async def ask() -> int:
            async with httpx.AsyncClient() as client:
                return (await client.get(server.url + "/v1/models")).status_code

        assert asyncio.run(ask()) == 200
        gate.open()
        for connection in connections:
            connection.close()
        eventually(lambda: is_idle(service))
