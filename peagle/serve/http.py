"""HTTP code that all routes share: bodies, keys, hosts, streams and disconnects."""

import asyncio
import collections
import contextlib
import hmac
import ipaddress
import json
import logging
import re
import time
import urllib.parse
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic
import pydantic_core
from fastapi import Request, Response
from prometheus_client import Counter, Gauge
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response as StarletteResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.base.settings import brief
from peagle.base.strict_json import dumps
from peagle.serve.bodies import MOST_PROMPTS, MOST_TOOLS, Body
from peagle.serve.errors import ApiError
from peagle.serve.metrics import Metrics

ANY_ORIGIN = "*"
BODY_PATIENCE_S = 60.0
STOPPED = "the server was stopped before this request was answered"
UNREAD = "more than {} bytes of this stream waited for its client; read it faster, or ask for less"
COMMENT = b": waiting\n\n"  # a comment of server-sent events, which clients skip
METHODS, OTHER, NO_ROUTE = ("GET", "POST", "DELETE", "OPTIONS"), "other", "none"  # labels of the metrics of replies
REQUEST_ID = "X-Request-Id"  # header of a request, and of its reply
VALID_ID = re.compile(r"[!-~]{1,200}")
TOKENS_OF_A_MESSAGE = 4  # the fewest, in harmony: start, role, channel or text, end
# lists of messages or items -> the fields of an item that are lists, too
INNER_LISTS = {"messages": ("tool_calls", "content"), "input": ("content", "output")}
EXPECTED = {  # by field, for fields of several types
    "prompt": "expected a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "expected a text or a list of texts",
    "input": "expected a text or a list of items",
    "tool_choice": "expected 'none', 'auto', 'required', or a tool by its name",
    "content": "expected a text or a list of parts",  # of any message
    "output": "expected a text or a list of parts",
}
T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=Body)


async def read_body(request: Request, most: int) -> bytes:
    """Read a body of at most `most` bytes.

    Raises ApiError for a larger body, an encoded one, and one that is incomplete after BODY_PATIENCE_S.
    """
    encoding = request.headers.get("content-encoding", "")
    if encoding.lower() not in ("", "identity"):
        raise ApiError(415, f"the body's content encoding is {brief(encoding)}; expected none: send plain JSON")
    too_large = ApiError(413, f"the body has more than {most} bytes, the most that this server reads; send less")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_PATIENCE_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        message = f"the body was not complete within {BODY_PATIENCE_S:g} seconds; send it at once"
        raise ApiError(408, message) from None
    return bytes(body)


def parse(kind: type[BodyT], body: bytes, context: int | None = None) -> BodyT:
    """Parse the JSON of a body. Raises ApiError with the name of the wrong field.

    context: in positions. Refuses more messages, calls and parts than it can hold before it checks their types.
    """
    try:
        fields = read_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}; expected an object in UTF-8") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body is {brief(fields)}; expected a JSON object")
    if context is not None:
        _check_count(fields, context)
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _refusal(error, kind.cures) from None


def read_json(body: bytes) -> Any:
    """Parse JSON in UTF-8, UTF-16 or UTF-32, with or without a byte order mark. Raises ValueError."""
    encoding = json.detect_encoding(body)
    return pydantic_core.from_json(body if encoding == "utf-8" else body.decode(encoding))


def _check_count(fields: dict[str, Any], context: int) -> None:
    """Raise ApiError for more ids, messages, calls and parts than the context can hold, and for too many tools.

    To check their types would block the one thread that encodes texts for seconds.
    """
    limits = {"prompt": max(context, MOST_PROMPTS), "tokens": context, "tools": MOST_TOOLS}
    for name, most in limits.items():
        items = fields.get(name)
        for prompt in (items, *(items if isinstance(items, list) else ())):  # a prompt may be a list of lists
            if isinstance(prompt, list) and len(prompt) > most:
                code = None if name == "tools" else "context_length_exceeded"
                raise ApiError(400, f"{name} has {len(prompt)} items; expected at most {most}", name, code)
    for name in INNER_LISTS:
        items = fields.get(name)
        if not isinstance(items, list):
            continue
        check_messages(sum(count_parts(item, name) for item in items if isinstance(item, dict)), context, name)


def count_parts(item: Mapping[str, Any], name: str) -> int:
    """Count an item, its calls and its parts. name: of the field of the body that has the item."""
    inner = (item.get(key) for key in INNER_LISTS[name])
    return 1 + sum(len(parts) for parts in inner if isinstance(parts, list))


def check_messages(count: int, context: int, name: str) -> None:
    """Raise ApiError for more messages, calls and parts than the context can hold. name: of their field."""
    most = max(1, context // TOKENS_OF_A_MESSAGE)
    if count > most:
        things = "items" if name == "input" else "messages, calls"
        message = f"{count} {things} and parts are given; expected at most {most}, since the context holds"
        raise ApiError(400, f"{message} {context} tokens", name, "context_length_exceeded")


def _refusal(error: pydantic.ValidationError, cures: Mapping[str, str]) -> ApiError:
    """Make the error of the first wrong field. cures: see Body."""
    first, *_ = error.errors(include_url=False)
    # pydantic's location also has the branches of unions: "str", and the tags in brackets
    path = [str(part) for part in first["loc"] if isinstance(part, int) or not (part == "str" or "[" in part)]
    name, value, is_union = ".".join(path) or "the body", first["input"], first["type"] == "union_tag_invalid"
    if is_union and isinstance(value, dict):
        if value.get("type") is None:
            return ApiError.missing(f"{name}.type")
        tags = re.sub(r"[\[\]]", "", first["ctx"]["expected_tags"])
        message = f"{name}.type is {brief(value['type'])}; expected {' or '.join(tags.rsplit(', ', 1))}"
        return ApiError(400, message, f"{name}.type", "unsupported_parameter")
    if first["type"] == "extra_forbidden":
        cure = cures.get(name, "leave it out")
        return ApiError(
            400, f"{name} is not supported here (it is {brief(value)}); {cure}", name, "unsupported_parameter"
        )
    if first["type"] == "missing":
        return ApiError.missing(name)
    field = path[-1] if path and path[-1] in ("content", "output") else name
    expected = "expected an object" if is_union else EXPECTED.get(field, _in_plain_words(first["msg"]))
    return ApiError(400, f"{name} is {brief(value)}; {expected}", name, "invalid_type")


def _in_plain_words(message: str) -> str:
    """Rewrite a message of pydantic: it says "string" and "dictionary"."""
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", message.removeprefix("Value error, "))
    return (
        message.replace("Input should be", "expected")
        .replace("a valid string", "a text")
        .replace("a valid i", "an i")
        .replace("a valid ", "a ")
    )


def check_key(request: Request, keys: Sequence[str]) -> str:
    """Return the key that is the bearer token; an empty text if no key is required. Raises ApiError for another one.

    The time depends on no character of the token.
    """
    if not keys:
        return ""
    kind, _, credentials = request.headers.get("authorization", "").partition(" ")
    token = credentials.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
    matches = [key for key in keys if hmac.compare_digest(token, key.encode("utf-8"))]
    if not matches:
        message = "the key is missing or wrong; send it as Authorization: Bearer KEY"
        raise ApiError(401, message, None, "invalid_api_key")
    return matches[0]


def check_origin(request: Request, allowed: Sequence[str], refused: Callable[[str], None]) -> None:
    """Raise ApiError for a request that a browser sends for a page of another site. refused: called with the site."""
    origin, host = request.headers.get("origin"), request.headers.get("host")
    own = request.headers.get("sec-fetch-site") == "same-origin"  # a proxy may have changed the host
    if origin is None or origin in allowed or ANY_ORIGIN in allowed:
        return
    if origin.partition("://")[2] != host and not own:
        refused(origin)
        raise ApiError(403, f"pages of {brief(origin)} may not use this server; open the page that it serves at /")


def check_host(request: Request, hosts: Sequence[str] | None) -> None:
    """Raise ApiError for a request to a host that is neither loopback nor one of these; None: allow any host.

    Prevents DNS rebinding: if a site's name resolves to the visitor's machine, its pages have the server's own origin.
    """
    if hosts is None:
        return
    host = request.headers.get("host", "")
    with contextlib.suppress(ValueError):  # malformed: compare it as it is
        host = urllib.parse.urlsplit(f"//{host}").hostname or ""
    host = host.rstrip(".")
    if host in ("localhost", *hosts) or is_loopback(host):
        return
    message = f"the host is {brief(host)}; expected localhost: a server without keys answers to no other name"
    raise ApiError(403, f"{message}; start it with --api-key-file, or name this site with --allow-origin")


def is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


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


@dataclass(frozen=True)
class Unsent:
    """The limits of streams, and metrics of bytes that wait for their clients.

    size: such bytes of all streams. cut: streams that ended because more than `most` bytes of them waited. silence_s:
    seconds without an event before a comment is sent.
    """

    size: Gauge
    cut: Counter
    most: int
    silence_s: float = 10.0


class EventStream(Response):
    """Server-sent events. Stops reading the generator as soon as the client disconnects.

    The generator is read without waiting for the client; its events wait as bytes. If more than `unsent.most` bytes
    wait, ApiError is raised in the generator, and its next event is the stream's last.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], close: Callable[[], None], unsent: Unsent) -> None:
        """close: called at the end, even if no event was read."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._unsent = events, close, unsent
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
                    if self._size > self._unsent.most:
                        self._unsent.cut.inc()
                        self._drop()
                        self._put(await events.athrow(ApiError(408, UNREAD.format(self._unsent.most))))
                        return
        finally:
            self._waiting.put_nowait(None)

    async def _next(self) -> bytes | None:
        """Return the next event, or a comment after a silence, since proxies close silent streams; None at the end."""
        try:
            async with asyncio.timeout(self._unsent.silence_s):
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
        self._unsent.size.inc(size)


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


class Sites(CORSMiddleware):
    """Let pages of these sites use the routes from any network. refused: called with another site at its preflight."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], refused: Callable[[str], None]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", REQUEST_ID],
        )
        self.allow_private_network = True  # an option of newer versions only
        self._refused = refused

    def preflight_response(self, request_headers: Headers) -> StarletteResponse:
        response, origin = super().preflight_response(request_headers), request_headers["origin"]
        if not self.is_allowed_origin(origin):
            self._refused(origin)
        elif "access-control-request-private-network" in request_headers:
            response.headers["access-control-allow-private-network"] = "true"
        return response


class Refusals:
    """Log counts of requests that are refused under load: a line at once, then at most one every pause_s."""

    def __init__(self, log: logging.Logger | None, pause_s: float = 5.0) -> None:
        self._log, self._pause_s, self._pausing = log, pause_s, False
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, status: int) -> None:
        """Count a refusal. Call this in the server's event loop."""
        self._counts[status] += 1
        if not self._pausing:
            self._write()

    def _write(self) -> None:
        self._pausing = bool(self._counts)
        if self._counts:
            if self._log is not None:
                self._log.info(dumps({"time": utc_now(), "refused": self._counts}))
            self._counts = collections.Counter()
            asyncio.get_running_loop().call_later(self._pause_s, self._write)


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
