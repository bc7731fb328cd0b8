"""Disconnects, a full queue, failures and the end of the server, over real connections."""

import json
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jax.numpy as jnp
import pytest
from fastapi.testclient import TestClient

from peagle.base import interrupt
from peagle.serve import engine_loop
from peagle.serve.app import create_app
from peagle.serve.shared_state import SharedState
from peagle.text.tokenizer import Tokenizer
from tests.support.pairs import toy_pair
from tests.support.running import Gate, Running, eventually, received, received_until, running
from tests.support.servers import COMPLETIONS, SLOTS, answer, client_of, error_of, service_of

BODY: dict[str, Any] = {"prompt": [40, 41, 42], "max_tokens": 30, "temperature": 0}
Make = Callable[..., SharedState]


def send(server: Running, cut: int | None = None, **fields: Any) -> socket.socket:
    """Send a request, or so many bytes of its body, and leave its answer unread."""
    body = json.dumps({**BODY, **fields}).encode()
    connection = server.connect()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:cut])
    return connection


def post(server: Running, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + COMPLETIONS, json={**BODY, **fields}, timeout=60)


def is_idle(service: SharedState) -> bool:
    engine = service.loop.engine
    return service.loop.num_open == 0 and not engine.busy and engine.page_use.held_frac == 0


def test_it_answers_below_a_prefix(shared: SharedState) -> None:
    """As Ray Serve mounts it with a route_prefix."""
    answer(TestClient(create_app(shared), root_path="/models"), f"/models{COMPLETIONS}", BODY)


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_before_the_next_dispatch(make: Make, stream: bool) -> None:
    service = make()
    gate = Gate(service)
    with running(service) as server:
        gate.close()
        connection = send(server, stream=stream, max_tokens=250)
        eventually(lambda: gate.added)  # the engine has it, and waits at the gate
        connection.close()
        eventually(lambda: gate.aborted)
        gate.open()
        eventually(lambda: is_idle(service))
        assert gate.dispatched == []
        assert post(server).status_code == 200


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
        assert len(post(server).json()["choices"][0]["text"]) == 30
    assert 'finished_reason="abort"' in service.metrics.text().decode()


def test_a_body_that_never_ends_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.serve.request_body.BODY_PATIENCE_S", 0.05)
    with running(make()) as server:
        reply = received_until(send(server, cut=5), b"}")
    assert b"408 Request Timeout" in reply
    assert b"was not complete within 0.05 seconds" in reply


def test_headers_that_never_end_cost_their_connection(make: Make) -> None:
    """Those of a first request, and of one after an answer. An answer itself may take longer, as may a pause."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    service = make()
    gate = Gate(service)

    def health(connection: socket.socket) -> bytes:
        connection.sendall(head + b"\r\n")
        reply = b""
        while b"}" not in reply:  # its head may arrive alone
            reply += connection.recv(65536) or b"cut}"
        return reply

    with running(service, headers_s=1.0) as server, server.connect() as pausing:
        gate.close()
        long, stalled, again = send(server, stream=True), server.connect(), server.connect()
        eventually(lambda: service.loop.num_open)
        assert b"200 OK" in health(pausing)
        assert b"200 OK" in health(again)
        for connection in (stalled, again):
            connection.sendall(head)
            assert received(connection) == b""
        assert b"200 OK" in health(pausing)
        gate.open()
        assert b"cut" not in received_until(long, b"[DONE]")


# --- a full queue, and failures ---------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_a_time_and_nothing_is_lost(make: Make) -> None:
    """And the event loop answers while the engine does not."""
    service = make(max_queue=1)
    gate = Gate(service)
    with running(service) as server, ThreadPoolExecutor() as pool:
        gate.close()
        replies = [pool.submit(post, server) for _ in range(SLOTS + 1)]
        eventually(lambda: service.loop.num_open == SLOTS + 1)
        assert httpx.get(server.url + "/health").json()["requests_waiting"] == 1
        refused = post(server)
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert error_of(post(server, n=SLOTS + 2))  # never possible
        gate.open()
        texts = [reply.result().json()["choices"][0]["text"] for reply in replies]
    assert len(set(texts)) == 1


def test_after_the_engine_failed_every_request_gets_an_error_and_health_is_red(make: Make) -> None:
    service = make()
    gate = Gate(service)
    assert client_of(service).get("/health").json()["status"] == "ok"
    gate.close()

    def broken(*_: object) -> None:
        raise RuntimeError("the device\nis gone")

    with running(service) as server, ThreadPoolExecutor() as pool:
        service.loop.engine.executor.prefill = broken  # type: ignore[method-assign, assignment]
        streamed, whole = send(server, stream=True), pool.submit(post, server)
        eventually(lambda: service.loop.num_open == 2)
        gate.open()
        assert b"the device is gone" in received_until(streamed, b"[DONE]")
        for reply in (whole.result(), post(server)):
            error = error_of(reply, 503)
            assert error["type"] == "server_error"
            assert "the device is gone" in error["message"]
        health = httpx.get(server.url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "the device is gone" in health.json()["error"]


def test_outputs_that_are_not_finite_cost_only_their_own_request(tokenizer: Tokenizer) -> None:
    pair = toy_pair(tokenizer)
    target = pair.target.replace(table=pair.target.table.at[300].set(jnp.nan))  # type: ignore[attr-defined]
    service = service_of(type(pair)(target, target, pair.drafter, tokenizer, (1,)))
    client = client_of(service)
    assert "not finite" in error_of(client.post(COMPLETIONS, json={**BODY, "prompt": [300]}), 500)["message"]
    answer(client, COMPLETIONS, BODY)
    assert client.get("/health").status_code == 200
    service.loop.close()


def test_work_without_a_step_for_long_is_seen(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    gate = Gate(service)
    with running(service) as server:
        gate.close()
        with send(server):
            eventually(lambda: service.loop.num_open)
            monkeypatch.setattr(engine_loop, "STALLED_S", -1.0)
            assert httpx.get(server.url + "/health").json()["status"] == "stalled"
            monkeypatch.undo()
            gate.open()
            eventually(lambda: is_idle(service))
        assert httpx.get(server.url + "/health").json()["status"] == "ok"


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_end_waits_for_open_answers(make: Make) -> None:
    service = make()
    gate = Gate(service)
    with running(service) as server, ThreadPoolExecutor() as pool:
        gate.close()
        reply = pool.submit(post, server)
        eventually(lambda: service.loop.num_open)
        server.end()
        eventually(lambda: service.loop.status == "draining")
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        gate.open()
        assert reply.result().json()["usage"]["completion_tokens"] == 30
        server.join()


def test_after_the_deadline_open_answers_get_an_error(make: Make) -> None:
    service = make()
    gate = Gate(service)
    with running(service, drain_s=0) as server:
        gate.close()
        connection = send(server, stream=True)
        eventually(lambda: service.loop.num_open)
        server.end()
        assert b"shutting down" in received_until(connection, b"[DONE]")
        gate.open()
        server.join()
    eventually(lambda: is_idle(service))


def test_a_second_signal_cuts_answers_off_and_says_so(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "APART_S", 0)
    service, said = make(), list[str]()
    gate = Gate(service)
    with running(service, note=said.append) as server:
        gate.close()
        streamed, whole = send(server, stream=True), send(server)
        eventually(lambda: service.loop.num_open == 2)
        for count, number in enumerate((signal.SIGTERM, signal.SIGINT), 1):
            server.server.handle_exit(number, None)
            eventually(lambda count=count: len(said) == count)
        assert b"stopped before" in received(streamed)
        assert b"503 Service" in received(whole)
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
        connection, half = send(server, stream=stream), send(server, cut=5)
        eventually(lambda: service.loop.num_open and len(server.server.server_state.tasks) == 2)
        server.end()
        server.server.force_exit = True
        server.join()
        reply = received(connection)
        assert stream or b"503 Service Unavailable" in reply
        assert b"stopped before this request was answered" in received(half)
        gate.open()
    assert "Traceback" not in caplog.text
    eventually(lambda: is_idle(service))
