"""Bodies, keys and disconnects: the parts of HTTP that every route shares."""

import asyncio
import contextlib
import hmac
import ipaddress
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.ops.strict_json import dumps
from peagle.serve.errors import ApiError
from peagle.text.prompts import brief

ANY_ORIGIN = "*"
BODY_PATIENCE_S = 60.0
STOPPED = "the server was stopped before this request was answered"
Found = TypeVar("Found")


async def read_body(request: Request, most: int) -> bytes:
    """Read a body of at most `most` bytes.

    Raises ApiError for a larger one, before it is read, and for one that is not complete after BODY_PATIENCE_S.
    """
    try:
        async with asyncio.timeout(BODY_PATIENCE_S):
            return await _read_body(request, most)
    except TimeoutError:
        message = f"the body was not complete within {BODY_PATIENCE_S:g} seconds; send it at once"
        raise ApiError(408, message) from None


async def _read_body(request: Request, most: int) -> bytes:
    error = ApiError(413, f"the body has more than {most} bytes, the most that this server reads; send less")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise error
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise error
        parts.append(part)
    return b"".join(parts)


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Raise ApiError without one of the keys as a bearer token. Takes equally long for any token of one length."""
    if not keys:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    token = given.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
    if not sum(hmac.compare_digest(token, key.encode("utf-8")) for key in keys):
        message = "the key is missing or wrong; send it as Authorization: Bearer KEY"
        raise ApiError(401, message, None, "invalid_api_key")


def check_origin(request: Request, allowed: Sequence[str]) -> None:
    """Raise ApiError for a request of another site's page: a browser would send it from its visitor's machine."""
    origin, host = request.headers.get("origin"), request.headers.get("host")
    own = request.headers.get("sec-fetch-site") == "same-origin"  # behind a proxy that changes the host
    if origin is None or origin in allowed or ANY_ORIGIN in allowed:
        return
    if origin.partition("://")[2] != host and not own:
        raise ApiError(403, f"pages of {brief(origin)} may not use this server; open the page that it serves at /")


def check_host(request: Request, hosts: Sequence[str] | None) -> None:
    """Raise ApiError for a request to another host than these, and than this machine by a loopback name; None: any.

    A site whose name leads to a visitor's own machine ("DNS rebinding") has pages of the server's own origin.
    """
    if hosts is None:
        return
    given = request.headers.get("host", "")
    with contextlib.suppress(ValueError):  # no address
        given = urllib.parse.urlsplit(f"//{given}").hostname or ""
    host = given.rstrip(".")
    if host in ("localhost", *hosts) or is_loopback(host):
        return
    message = f"the host is {brief(host)}; expected localhost: a server without keys answers to no other name"
    raise ApiError(403, f"{message}; start it with --api-key-file, or name this site with --allow-origin")


def is_loopback(address: str) -> bool:
    """Test whether a text is an IP address of this machine's loopback."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


async def until_disconnect(receive: Receive, work: Awaitable[Found]) -> Found:
    """Await the work; cancel it as soon as the client leaves.

    Raises ClientDisconnect if it left before the end.
    """
    task, listening = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, listening), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, listening):
            each.cancel()
        await asyncio.gather(task, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class CancelledQuietly:
    """Answer a request that is cancelled, since the server ends before its client, and leave no traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            error = ApiError(503, STOPPED)
            with contextlib.suppress(RuntimeError):  # the reply had begun
                await JsonReply(error.body(), error.status)(scope, receive, send)


class JsonReply(Response):
    """A JSON value, in which a number that is not finite is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content, ensure_ascii=False).encode("utf-8", "replace")


class EventStream(Response):
    """A stream of events that ends with its client, even while no event is sent."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        """`close` is called at the end, whether or not the events were begun."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002  all three are given
        receive: Receive,
        send: Send,
    ) -> None:
        async def pump() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode("utf-8"), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await until_disconnect(receive, pump())
        except (ClientDisconnect, OSError, asyncio.CancelledError):  # cancelled: the server ends before its client
            return
        finally:
            self._close()
