"""How replies are sent: JSON, server-sent events, and what every request and reply has in common."""

import asyncio
import contextlib
import re
import time
import urllib.parse
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.base.strict_json import dumps
from peagle.serve.errors import ApiError
from peagle.serve.metrics import Metrics

STOPPED = "the server was stopped before this request was answered"
UNREAD = "more than {} bytes of this stream waited for its client; read it faster, or ask for less"
SILENCE_S = 10.0  # without an event, after which a comment is sent
COMMENT = b": waiting\n\n"  # a comment of server-sent events, which clients skip
METHODS, OTHER, NO_ROUTE = ("GET", "POST", "DELETE", "OPTIONS"), "other", "none"  # labels of the metrics of replies
REQUEST_ID = "X-Request-Id"  # header of a request, and of its reply
VALID_ID = re.compile(r"[!-~]{1,200}")
T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await the work; if the client leaves first, cancel it and raise ClientDisconnect."""
    task, listening = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, listening), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for pending in (task, listening):
            pending.cancel()
        await asyncio.gather(task, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonReply(Response):
    """A JSON value. A number that is not finite becomes null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content, ensure_ascii=False).encode("utf-8", "replace")


class EventStream(Response):
    """Server-sent events. Stops reading the generator as soon as the client disconnects.

    The generator is read without waiting for the client; its events wait as bytes. If more than `most` bytes wait,
    ApiError is raised in the generator, and its next event is the stream's last.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], close: Callable[[], None], metrics: Metrics, most: int
    ) -> None:
        """close: called at the end, even if no event was read."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._metrics, self._most = events, close, metrics, most
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the end
        self._size = 0  # bytes in it

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002  of ASGI
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        except (ClientDisconnect, OSError, asyncio.CancelledError):  # cancelled: the server ends before its client
            return
        finally:
            self._drop()
            self._close()

    async def _send(self, send: Send) -> None:
        reading = asyncio.ensure_future(self._read())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while (event := await self._next()) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await reading  # raises if the generator failed, so that the client sees an incomplete stream
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> None:
        """Read events to their end, or until too many bytes wait for the client."""
        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    self._put(event)
                    if self._size > self._most:
                        self._metrics.cut.inc()
                        self._drop()
                        self._put(await events.athrow(ApiError(408, UNREAD.format(self._most))))
                        return
        finally:
            self._waiting.put_nowait(None)

    async def _next(self) -> bytes | None:
        """Return the next event, or a comment after a silence, since proxies close silent streams; None at the end."""
        try:
            async with asyncio.timeout(SILENCE_S):
                event = await self._waiting.get()
        except TimeoutError:
            return COMMENT
        self._count(-len(event or b""))
        return event

    def _put(self, event: str) -> None:
        data = event.encode("utf-8")
        self._waiting.put_nowait(data)
        self._count(len(data))

    def _drop(self) -> None:
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._count(-self._size)

    def _count(self, size: int) -> None:
        self._size += size
        self._metrics.unsent.inc(size)


class Transport:
    """ASGI middleware: normalises requests, and counts and times replies by route and method, as vLLM does.

    HEAD becomes GET. An absolute target, which proxies send, becomes a path and a host. A path loses empty segments. A
    reply has the request's X-Request-Id, or a new one. A request that is cancelled by the end of the server gets an
    error, and no traceback is logged.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID, "")
        if not VALID_ID.fullmatch(request_id):
            request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        scope = {**scope, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
        if not scope["path"].startswith("/"):
            scope |= _of_url(scope["raw_path"].decode("latin-1"), scope["headers"])
        scope["path"] = _without_empty_segments(scope["path"], scope.get("root_path", ""))

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_reply(*_labels(scope), message["status"])
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        started_s = time.perf_counter()
        try:
            await self._app(scope, receive, counting)
        except asyncio.CancelledError:
            error = ApiError(503, STOPPED)
            with contextlib.suppress(RuntimeError):  # the reply has begun
                await JsonReply(error.body(), error.status)(scope, receive, counting)
        except Exception:  # starlette replies, outside of this middleware
            self._metrics.count_reply(*_labels(scope), 500)
            raise
        finally:
            self._metrics.time_reply(*_labels(scope), time.perf_counter() - started_s)


def _labels(scope: Scope) -> tuple[str, str]:
    """Return (route, method) of a request, for metrics."""
    method = scope["method"] if scope["method"] in METHODS else OTHER  # a client may send any word
    return getattr(scope.get("route"), "path", NO_ROUTE), method


def _of_url(target: str, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return path and headers of a request whose target is a URL: its host replaces the header's (RFC 9112, 3.2.2)."""
    try:
        url = urllib.parse.urlsplit(target)
    except ValueError:
        return {}
    if url.scheme not in ("http", "https"):
        return {}  # the router replies 404
    path, host = url.path or "/", url.netloc.rpartition("@")[2].encode("latin-1")
    others = [(name, value) for name, value in headers if name != b"host"]
    return {
        "path": urllib.parse.unquote(path),
        "raw_path": path.encode("latin-1"),
        "headers": [(b"host", host), *others],
    }


def _without_empty_segments(path: str, root: str) -> str:
    """Return a path without the slashes at its end and the doubled ones of a base URL that ends in one."""
    if not path.startswith("/"):
        return path
    path = "/" + "/".join(filter(None, path.split("/")))
    return f"{path}/" if path == root else path  # the page, where a proxy has put the server
