"""A real server on a free port of this machine, in a thread."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from peagle.serve.app import create_app
from peagle.serve.server import Server, ServerOptions, listen, url
from peagle.serve.service import Service

PATIENCE_S = 60.0


def eventually(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


class Running:
    """A server that listens at `url`."""

    def __init__(self, service: Service, address: socket.socket, options: ServerOptions) -> None:
        self.service, self.url = service, url(address)
        self.server = Server(create_app(service), service.loop, options)
        self._thread = threading.Thread(target=self.server.run, args=([address],))
        self._thread.start()
        eventually(lambda: self.server.started)

    def end(self) -> None:
        """Do what SIGTERM does."""
        self.server.should_exit = True

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def running(service: Service, **options: Any) -> Iterator[Running]:
    """Run a server. options: of ServerOptions."""
    with listen("127.0.0.1", 0) as address:
        running_server = Running(service, address, ServerOptions(**options))
        try:
            yield running_server
        finally:
            running_server.end()
            running_server.join()


class Gate:
    """Holds the engine's thread between two steps, and records dispatches."""

    def __init__(self, service: Service) -> None:
        self._open, self._engine = threading.Event(), service.loop.engine
        self.dispatched: list[object] = []
        step, scheduler = self._engine.step, self._engine._scheduler
        choose = scheduler.next
        self._open.set()

        def held_step() -> object:
            assert self._open.wait(PATIENCE_S)
            return step()

        def recorded(*arguments: Any) -> Any:
            action = choose(*arguments)
            if action is not None:
                self.dispatched.append(action)
            return action

        self._engine.step, scheduler.next = held_step, recorded  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
