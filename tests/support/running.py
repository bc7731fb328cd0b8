"""A real server on a free port of this machine, in a thread."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from peagle.serve.app import create_app
from peagle.serve.server import Server, ServerOptions, listen, url
from peagle.serve.shared_state import SharedState

PATIENCE_S = 60.0


def eventually(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


class Running:
    """A server that listens at `url`."""

    def __init__(self, service: SharedState, address: socket.socket, options: ServerOptions) -> None:
        self.service, self.url = service, url(address)
        self.server = Server(create_app(service), service.loop, options)
        self._thread = threading.Thread(target=self.server.run, args=([address],))
        self._thread.start()
        eventually(lambda: self.server.started)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)))

    def end(self) -> None:
        """Do what SIGTERM does."""
        self.server.should_exit = True

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def running(service: SharedState, **options: Any) -> Iterator[Running]:
    """Run a server. options: of ServerOptions."""
    with listen("127.0.0.1", 0) as address:
        server = Running(service, address, ServerOptions(**options))
        try:
            yield server
        finally:
            server.end()
            server.join()


def received(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def received_until(connection: socket.socket, end: bytes) -> bytes:
    """Read until this comes, and close."""
    data = b""
    with connection:
        while end not in data:
            data += connection.recv(65536) or b"cut" + end
    return data


class Gate:
    """Holds the engine's thread between two steps, and records requests, aborts and dispatches."""

    def __init__(self, service: SharedState) -> None:
        self._open, engine = threading.Event(), service.loop.engine
        self.added, self.aborted, self.dispatched = list[object](), list[object](), list[object]()
        step = engine.step
        self._open.set()

        def held_step() -> object:
            assert self._open.wait(PATIENCE_S)
            return step()

        engine.step = held_step
        for owner, name, calls in (
            (engine, "add", self.added),
            (engine, "abort", self.aborted),
            (engine.executor, "prefill", self.dispatched),
            (engine.executor, "steps", self.dispatched),
        ):
            setattr(owner, name, _recorded(getattr(owner, name), calls))

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


def _recorded(function: Callable[..., Any], calls: list[object]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **options)

    return call
