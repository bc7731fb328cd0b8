"""uvicorn with a drain: after SIGTERM or Ctrl-C it waits for open answers until a deadline or a second signal."""

import asyncio
import contextlib
import functools
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import fastapi
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.serve.access import is_loopback
from peagle.serve.engine_loop import EngineLoop

AFTER_DEADLINE_S = 5  # to send the errors before connections are cut
DEADLINE = "the server is shutting down, and this answer was not complete in time"


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0: a free one. Connections wait until the server accepts them.

    Call this before a model is loaded, so that a second server on the port fails at once. Raises InputError if the
    address is not available.
    """
    with contextlib.ExitStack() as failed:
        try:
            family, (address, _, *scope) = addresses(host)[0]
            listener = failed.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port, *scope))
            listener.listen()
        except (OSError, OverflowError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise InputError(
                f"--host {host} --port {port} cannot be listened on: {why}; expected an address of this machine and a "
                "free port from 0 to 65535"
            ) from None
        failed.pop_all()
    return listener


def addresses(host: str) -> list[tuple[int, tuple[Any, ...]]]:
    """Resolve a name or an address to (family, socket address), IPv4 first. Raises OSError."""
    name = host.removeprefix("[").removesuffix("]")
    resolved = socket.getaddrinfo(name or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return sorted(((family, address) for family, *_, address in resolved), key=lambda pair: pair[0] != socket.AF_INET)


def on_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on this name or address."""
    try:
        _, (address, *_) = addresses(host)[0]
        return is_loopback(address)
    except (OSError, UnicodeError):  # no server can listen on it
        return False


def url(address: socket.socket) -> str:
    host, port, *_ = address.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# not uvicorn's choice: httptools drops the host of a URL as target, which the check of hosts must see
class Connection(H11Protocol):
    """A client's connection. Closes if the client stalls; between requests uvicorn closes it after keep_alive_s."""

    _headers_timer: Any = None
    _reader_timer: Any = None

    def __init__(self, *arguments: Any, options: "ServerOptions", **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._options = options

    def connection_made(self, transport: Any) -> None:  # asyncio.Transport, or uvloop's
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # call pause_writing as soon as the client does not keep up
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._headers_timer = _cancel(self._headers_timer)
        elif self._headers_timer is None:
            self._expect_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader_timer = _cancel(self._reader_timer)

    def connection_lost(self, error: Exception | None) -> None:
        self._headers_timer, self._reader_timer = _cancel(self._headers_timer), _cancel(self._reader_timer)
        super().connection_lost(error)

    def _expect_headers(self) -> None:
        self._headers_timer = self.loop.call_later(self._options.headers_s, self.transport.close)

    def _expect_reader(self, before: int | None = None) -> None:
        """Check again after unread_s; close if the client has read nothing since. before: bytes unsent at that time."""
        unsent = self.transport.get_write_buffer_size()
        if before is None or unsent < before:
            self._reader_timer = self.loop.call_later(self._options.unread_s, self._expect_reader, unsent)
        else:
            self._options.unread()
            self.transport.abort()  # `close` would wait until the client reads


def _cancel(timer: Any) -> Any:  # asyncio.TimerHandle, or uvloop's
    """Cancel a timer, if there is one. Return None, its new value."""
    if timer is not None:
        timer.cancel()
    return None


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class ServerOptions:
    """Timeouts and callbacks of a server."""

    drain_s: int = 30  # for open answers, at the end
    keep_alive_s: int = 75  # for the next request of a connection
    headers_s: float = 60.0  # for the headers of a request, from its first byte or from the start of the connection
    unread_s: float = 60.0  # for a client to read anything of a reply
    ready: Callable[[str], None] = _nothing  # called with the URL as soon as the server accepts connections
    note: Callable[[str], None] = _nothing  # called with lines about the drain
    unread: Callable[[], None] = _nothing  # called for a connection that is closed because its client reads nothing


class Server(uvicorn.Server):
    """A server that drains after SIGTERM or SIGINT. Unlike uvicorn's it does not raise the signal again."""

    def __init__(self, app: fastapi.FastAPI, loop: EngineLoop, options: ServerOptions) -> None:
        connection: Any = functools.partial(Connection, options=options)
        config = uvicorn.Config(
            app,
            http=connection,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=options.keep_alive_s,
            timeout_graceful_shutdown=options.drain_s + AFTER_DEADLINE_S,
        )
        super().__init__(config)
        self._engine_loop, self._options = loop, options
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._signals = interrupt.Signals()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  a signal handler's two
        """Begin the drain; end it at a second signal.

        A signal handler must take no lock, so the event loop stops the engine.
        """
        if not self._signals.add():
            return
        if not self.should_exit or self._event_loop is None:
            self.should_exit = True
        else:
            self._event_loop.call_soon_threadsafe(self._stop_now)

    def _stop_now(self) -> None:
        assert self._event_loop is not None
        self._cut("the server was stopped before this answer was complete")
        self._event_loop.call_later(AFTER_DEADLINE_S, setattr, self, "force_exit", True)

    def _cut(self, message: str) -> None:
        if count := self._engine_loop.num_open:
            self._options.note(f"cutting {_counted(count)} off")
        self._engine_loop.stop(message)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP while serving, in place of peagle.base.interrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in interrupt.heeded()}
        try:
            interrupt.check()  # raises if a signal came before these handlers
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if sockets and self.started:
            self._options.ready(url(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine_loop.draining = True
        if count := self._engine_loop.num_open:
            within = f"{_counted(count)} under way may take up to {self._options.drain_s} s"
            self._options.note(f"shutting down: {within}; another Ctrl-C or SIGTERM cuts them off")
        deadline = asyncio.get_running_loop().call_later(self._options.drain_s, self._cut, DEADLINE)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()


def _counted(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"
