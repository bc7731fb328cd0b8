"""uvicorn with a drain: after SIGTERM or Ctrl-C, open answers may end before a deadline; then they get an error."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import fastapi
import uvicorn

from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.serve.loop import EngineLoop

AFTER_DEADLINE_S = 5  # for the error to be sent, before connections are cut


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address, port 0 for a free one. Connections are refused until `serve` listens.

    Raises InputError if the address cannot be had.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"--host {host} --port {port} cannot be listened on: {why}; expected an address of this machine and a free "
            "port from 0 to 65535"
        ) from None
    return found


def serve(
    app: fastapi.FastAPI, loop: EngineLoop, address: socket.socket, drain_s: int, ready: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Calls `ready` with the URL as soon as connections are accepted."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s + AFTER_DEADLINE_S,
    )
    Server(config, loop, drain_s, ready).run([address])


def url(address: socket.socket) -> str:
    """Return the URL of an address."""
    host, port, *_ = address.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """A server that ends when asked, without a second signal to its own process."""

    def __init__(
        self, config: uvicorn.Config, loop: EngineLoop, drain_s: int, ready: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(config)
        self._engine_loop, self._drain_s, self._ready = loop, drain_s, ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while serving; a second SIGINT is left to peagle.ops.interrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            interrupt.check()  # Ctrl-C before these handlers
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and self.started:
            self._ready(url(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine_loop.draining = True
        message = "the server is shutting down, and this answer was not complete in time"
        deadline = asyncio.get_running_loop().call_later(self._drain_s, self._engine_loop.stop, message)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
