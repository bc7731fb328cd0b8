"""Serve OpenAI's HTTP interface over one engine: the routes of the FastAPI application, and the `Service` behind them.

A route parses the body (schema), makes requests of it (prompts), submits them to the engine's loop (loop) and writes
the reply, whole or as server-sent events (replies, responses).
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import fastapi
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from peagle.engine.grammar import CompiledGrammar
from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request, TokenLogprobs
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.serve.answers import Answers, pooled, usage
from peagle.serve.errors import ApiError
from peagle.serve.http import (
    CancelledQuietly,
    Counted,
    EventStream,
    JsonReply,
    PlainRequests,
    Refusals,
    Unsent,
    check_host,
    check_key,
    check_origin,
    read_body,
    until_disconnect,
    utc_now,
)
from peagle.serve.loop import Loop
from peagle.serve.metrics import Metrics
from peagle.serve.names import CHAT, Names
from peagle.serve.openapi import document
from peagle.serve.page import HEADERS, PAGE
from peagle.serve.prompts import Prompter, notes
from peagle.serve.replies import ChatForm, CompletionForm, Form
from peagle.serve.responses import ResponsesBody, ResponsesForm, as_chat
from peagle.serve.schema import ChatBody, CompletionBody, DetokenizeBody, Sampled, StreamOptions, TokenizeBody, parse
from peagle.serve.structured import constraint

DEFAULT_MAX_BODY = DEFAULT_MAX_UNSENT = 4_000_000
ROOM = (429, 503)  # statuses of requests that are refused for want of it
POLL_S = 0.02
GRAMMAR_PATIENCE_S = 10.0  # beyond it a grammar is refused
Found = TypeVar("Found")
Kind = TypeVar("Kind", ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody)


@dataclass
class Service:
    """All that the routes use. keys: empty means that none is required. origins: sites whose pages may use them.

    hosts: names of the server that requests may have, beside those of loopback; None: any. max_unsent: bytes of a
    stream that wait for its client; a stream of which more wait is ended.
    """

    loop: Loop
    prompter: Prompter
    model: str
    keys: Sequence[str] = ()
    max_body: int = DEFAULT_MAX_BODY
    origins: Sequence[str] = ()
    hosts: Sequence[str] | None = None
    log: logging.Logger | None = None  # of a JSON line for each request
    created: int = field(default_factory=lambda: int(time.time()))
    max_unsent: int = DEFAULT_MAX_UNSENT
    metrics: Metrics = field(init=False)
    unsent: Unsent = field(init=False)
    refusals: Refusals = field(init=False)
    # one thread, since the tokenizer's settings are shared
    _encoding: concurrent.futures.ThreadPoolExecutor = field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(1, "tokenizer")
    )

    _num_compiling: int = 0  # grammars
    _noted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.metrics, self.refusals = Metrics(self.loop, self.model), Refusals(self.log)
        self.unsent = Unsent(self.metrics.unsent, self.metrics.cut, self.max_unsent)

    async def encode(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """Call a function outside of the event loop: it uses the tokenizer, or takes long for a large body."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, function, *arguments)

    async def grammar(self, body: Sampled, names: Names = CHAT) -> CompiledGrammar | None:
        """Compile what constrains the answers (`Prompter.grammar`), one grammar at a time; None: nothing does.

        Raises ApiError for one that takes too long, and after a while for one that waits for another.
        """
        field = constraint(body, names)
        if field is None:
            return None
        end = time.monotonic() + GRAMMAR_PATIENCE_S
        while self._num_compiling:
            if time.monotonic() > end:
                raise ApiError(503, "grammars of other requests are being compiled; ask again later")
            await asyncio.sleep(POLL_S)
        self._num_compiling += 1
        compiled = in_daemon(self.prompter.grammar, body, names)
        compiled.add_done_callback(self._compiled)
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(compiled)), GRAMMAR_PATIENCE_S)
        except TimeoutError:
            message = f"the grammar was not compiled within {GRAMMAR_PATIENCE_S:g} seconds; make it smaller"
            raise ApiError(400, message, field) from None

    def _compiled(self, _: concurrent.futures.Future[Any]) -> None:
        self._num_compiling -= 1

    async def parse(self, kind: type[Kind], body: bytes) -> Kind:
        """Read a body outside of the event loop, and refuse another model (`peagle.serve.schema.parse`)."""
        found = await self.encode(parse, kind, body, self.prompter.context)
        self.check_model(found.model)
        return found

    async def prompt_logprobs(self, requests: Sequence[Request]) -> list[list[TokenLogprobs]]:
        """Compute the log-probabilities of each request's prompt (`Prompter.prompt_logprobs`)."""
        found: dict[tuple[int, ...], list[TokenLogprobs]] = {}
        for request in requests:
            self.loop.engine.check(request)
            if request.prompt_ids not in found:
                found[request.prompt_ids] = await self.loop.run(
                    functools.partial(self.prompter.prompt_logprobs, request)
                )
        return [found[request.prompt_ids] for request in requests]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model than the one that is served."""
        if name is not None and name != self.model:
            raise ApiError(
                404, f"the model {name[:100]!r} is not served here; expected {self.model!r}", "model", "model_not_found"
            )

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "peagle",
            "max_model_len": self.prompter.context,
        }

    def health(self) -> dict[str, Any]:
        """Describe what the engine's loop does."""
        loop = self.loop
        health = {
            "status": loop.status,
            "model": self.model,
            "requests_running": loop.num_running,
            "requests_waiting": loop.num_waiting,
            "error": loop.failure,
        }
        if isinstance(loop.engine, AnyEngine):  # else engines are elsewhere
            use = loop.engine.page_use
            health |= {"kv_cache_tokens": use.num_tokens, "kv_cache_usage": round(use.held_frac, 4)}
        return health

    def note(self, *lines: str) -> None:
        """Log each of these lines, once in the server's life."""
        for line in lines:
            if self.log is not None and line not in self._noted:
                self.log.info(dumps({"time": utc_now(), "note": line}))
            self._noted.add(line)

    def finish(self, answers: Answers, path: str, reply_id: str) -> None:
        """End the requests of a call, and count and log them. Prompts and answers are not logged."""
        answers.close()
        results = answers.results()
        self.metrics.observe(results)
        if self.log is None:
            return
        counted, first = usage(results), results[0]
        line = {
            "time": utc_now(),
            "id": reply_id,
            "path": path,
            "prompt_tokens": counted["prompt_tokens"],
            "cached_tokens": counted["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": counted["completion_tokens"],
            "finish_reasons": [result.finish_reason or "abort" for result in results],
            "ttft_s": first.ttft_s,
            "seconds": time.perf_counter() - first.started_s,
            "acceptance_length": pooled(results).acceptance_length,
        }
        self.log.info(dumps(line))


def in_daemon(function: Callable[..., Found], *arguments: Any) -> concurrent.futures.Future[Found]:
    """Call a function in a thread that nobody waits for when the process ends."""
    future: concurrent.futures.Future[Found] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def create_app(service: Service) -> fastapi.FastAPI:
    """Make the application."""
    app = fastapi.FastAPI(title="peagle", docs_url=None, redoc_url=None, openapi_url=None)

    def authorised(request: fastapi.Request) -> None:
        check_host(request, service.hosts)
        check_origin(request, service.origins)
        check_key(request, service.keys)

    if service.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )

    app.add_middleware(CancelledQuietly)
    app.add_middleware(Counted, replies=service.metrics.replies)
    app.add_middleware(PlainRequests)

    @app.get("/health")
    async def health() -> JsonReply:
        found = service.health()
        return JsonReply(found, 200 if found["status"] == "ok" else 503)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=HEADERS)

    guarded = fastapi.APIRouter(dependencies=[fastapi.Depends(authorised)])
    _add_answers(guarded, service)
    _add_tokens(guarded, service)
    _add_descriptions(guarded, service)
    app.include_router(guarded)
    _handle_errors(app, service)
    return app


def _add_answers(router: fastapi.APIRouter, service: Service) -> None:
    """Add the routes whose replies the model writes."""

    @router.post("/v1/chat/completions")
    @router.post("/v1/responses")
    @router.post("/v1/completions")
    async def answer(request: fastapi.Request) -> fastapi.Response:
        body = await read_body(request, service.max_body)
        asked = await until_disconnect(request.receive, CALLS[request.scope["route"].path](service, body))
        return await _reply(service, request, asked)


def _add_tokens(router: fastapi.APIRouter, service: Service) -> None:
    """Add the routes of the tokenizer."""

    @router.post("/tokenize")
    async def tokenize(request: fastapi.Request) -> dict[str, Any]:
        body = await service.parse(TokenizeBody, await read_body(request, service.max_body))
        ids = await service.encode(service.prompter.tokenize, body)
        return {"count": len(ids), "max_model_len": service.prompter.context, "tokens": list(ids)}

    @router.post("/detokenize")
    async def detokenize(request: fastapi.Request) -> dict[str, Any]:
        body = await service.parse(DetokenizeBody, await read_body(request, service.max_body))
        return {"prompt": await service.encode(service.prompter.detokenize, body)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> JsonReply:
        info = {**service.prompter.tokenizer.info, "tokenizer_class": "PreTrainedTokenizerFast"}
        return JsonReply({**info, "model_max_length": service.prompter.context})


def _add_descriptions(router: fastapi.APIRouter, service: Service) -> None:
    """Add the routes that describe the server: its models, its interface, its figures."""

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model_card()

    @router.get("/openapi.json")
    async def openapi() -> dict[str, Any]:
        return document(needs_key=bool(service.keys))

    @router.get("/metrics")
    async def metrics() -> fastapi.Response:
        return fastapi.Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _usage_options(body: Sampled) -> tuple[bool, bool]:
    """Return (whether the last chunk has the usage, whether each one has)."""
    options = body.stream_options or StreamOptions()
    return options.include_usage, options.include_usage and options.continuous_usage_stats


@dataclass(frozen=True)
class Asked:
    """Requests of a body that were sent to the engine, and the form of their reply. Whoever asked ends them."""

    stream: bool
    form: Form
    answers: Answers


async def ask_chat(service: Service, given: bytes) -> Asked:
    """Send the requests of a body of /v1/chat/completions."""
    body = await service.parse(ChatBody, given)
    requests = await service.encode(service.prompter.chat, body, await service.grammar(body))
    tokenizer = service.prompter.tokenizer
    form = ChatForm(service.model, tokenizer, *_usage_options(body), logprobs=body.logprobs)
    form.token_origins, form.one_call = body.return_token_origins, not body.parallel_tool_calls
    form.tools = body.tools
    service.note(*notes(body))
    answers = Answers(service.loop, requests, tokenizer, channels=True, constraint=constraint(body))
    return Asked(body.stream, form, answers)


async def ask_responses(service: Service, given: bytes) -> Asked:
    """Send the request of a body of /v1/responses."""
    body = await service.parse(ResponsesBody, given)
    chat = await service.encode(as_chat, body)
    names = chat.names
    grammar = await service.grammar(chat.body, names)
    requests = await service.encode(service.prompter.chat, chat.body, grammar, names)
    tokenizer = service.prompter.tokenizer
    form = ResponsesForm(service.model, tokenizer, asked=body, tools=chat.body.tools, tool_names=chat.tool_names)
    form.one_call = not body.parallel_tool_calls
    service.note(*chat.notes, *notes(chat.body))
    field = constraint(chat.body, names)
    answers = Answers(service.loop, requests, tokenizer, channels=True, constraint=field)
    return Asked(body.stream, form, answers)


async def ask_completions(service: Service, given: bytes) -> Asked:
    """Send the requests of a body of /v1/completions."""
    body = await service.parse(CompletionBody, given)
    requests, echoed = await service.encode(service.prompter.completion, body, await service.grammar(body))
    tokenizer = service.prompter.pair.tokenizer
    form = CompletionForm(service.model, tokenizer, *_usage_options(body), logprobs=body.logprobs is not None)
    form.echoed = echoed
    if body.echo and body.logprobs is not None:
        form.prompts = [each.prompt_ids for each in requests]
        form.prompt_logprobs = await service.prompt_logprobs(requests)
    answers = Answers(service.loop, requests, tokenizer, constraint=constraint(body), decode=not body.only_echo)
    return Asked(body.stream, form, answers)


CALLS: dict[str, Callable[[Service, bytes], Coroutine[Any, Any, Asked]]] = {
    "/v1/chat/completions": ask_chat,
    "/v1/responses": ask_responses,
    "/v1/completions": ask_completions,
}


async def _reply(service: Service, request: fastapi.Request, asked: Asked) -> fastapi.Response:
    def finish() -> None:
        service.finish(asked.answers, request.url.path, asked.form.id)

    if asked.stream:
        return EventStream(_events(asked.form, asked.answers), finish, service.unsent)
    try:
        return JsonReply(await until_disconnect(request.receive, whole(asked)))
    finally:
        finish()


async def whole(asked: Asked) -> dict[str, Any]:
    """Read the answers to their ends, and make the reply."""
    async with contextlib.aclosing(asked.answers.parts()) as parts:
        async for part in parts:
            asked.form.read(part)
    return asked.form.whole(asked.answers.results())


async def _events(form: Form, answers: Answers) -> AsyncGenerator[str, None]:
    """Make the events of a stream. An error in its midst becomes an event."""
    try:
        async with contextlib.aclosing(answers.parts()) as parts:
            if begun := form.begin():
                yield begun
            async for part in parts:
                if choices := form.read(part):
                    form.used = usage(answers.results()) if form.continuous_usage else None
                    yield "".join(map(form.event, choices))
        yield form.end(answers.results())
    except ApiError as error:
        yield form.failed(error)


def _handle_errors(app: fastapi.FastAPI, service: Service) -> None:
    """Answer every failure with an error object."""

    def reply(error: ApiError) -> JsonReply:
        if error.status in ROOM:
            service.refusals.add(error.status)
        return JsonReply(error.body(), error.status, error.headers())

    @app.exception_handler(ApiError)
    async def known(_: fastapi.Request, error: ApiError) -> JsonReply:
        return reply(error)

    @app.exception_handler(InputError)
    async def bad_input(_: fastapi.Request, error: InputError) -> JsonReply:
        return reply(ApiError.of(error))

    @app.exception_handler(HTTPException)
    async def no_route(request: fastapi.Request, error: HTTPException) -> JsonReply:
        where = f"{request.method} {request.url.path}"
        return reply(ApiError(error.status_code, f"{where[:200]}: {error.detail}"))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: fastapi.Request, __: ClientDisconnect) -> PlainTextResponse:
        return PlainTextResponse("", 499)  # nobody reads it

    @app.exception_handler(Exception)
    async def unknown(_: fastapi.Request, error: Exception) -> JsonReply:
        return reply(ApiError(500, f"the server failed at this request ({type(error).__name__}); its log has more"))
