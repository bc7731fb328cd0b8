"""The routes."""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import fastapi
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from peagle.engine.grammar import CompiledGrammar
from peagle.engine.request import Request, TokenLogprobs
from peagle.ops.errors import InputError
from peagle.ops.strict_json import dumps
from peagle.serve.answers import Answers, pooled, usage
from peagle.serve.errors import ApiError
from peagle.serve.http import EventStream, JsonReply, check_key, check_origin, read_body, until_disconnect
from peagle.serve.loop import EngineLoop
from peagle.serve.metrics import Metrics
from peagle.serve.page import HEADERS, PAGE
from peagle.serve.prompts import Prompter
from peagle.serve.replies import ChatForm, CompletionForm, Form, error_event
from peagle.serve.schema import ChatBody, CompletionBody, DetokenizeBody, Sampled, TokenizeBody, parse

DEFAULT_MAX_BODY = 4_000_000
GRAMMAR_PATIENCE_S = 10.0  # beyond it a grammar is refused
Found = TypeVar("Found")


@dataclass
class Service:
    """All that the routes use. keys: empty means that none is required."""

    loop: EngineLoop
    prompter: Prompter
    model: str
    keys: Sequence[str] = ()
    max_body: int = DEFAULT_MAX_BODY
    log: logging.Logger | None = None  # of a JSON line for each request
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(init=False)
    # one thread, since the tokenizer's settings are shared
    _encoding: concurrent.futures.ThreadPoolExecutor = field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(1, "tokenizer")
    )

    _compiling: concurrent.futures.ThreadPoolExecutor = field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(1, "grammar")
    )

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.loop, self.model)

    async def encode(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """Call a function that uses the tokenizer, outside of the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, function, *arguments)

    async def grammar(self, body: Sampled) -> CompiledGrammar | None:
        """Compile what constrains the answers (`Prompter.grammar`), in a thread of its own."""
        compiled = asyncio.get_running_loop().run_in_executor(self._compiling, self.prompter.grammar, body)
        try:
            return await asyncio.wait_for(compiled, GRAMMAR_PATIENCE_S)
        except TimeoutError:
            raise ApiError(
                400, f"the grammar was not compiled within {GRAMMAR_PATIENCE_S:g} seconds; make it smaller"
            ) from None

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
        return {
            "status": loop.status,
            "model": self.model,
            "requests_running": loop.num_running,
            "requests_waiting": loop.num_waiting,
            "error": loop.failure,
        }

    def finish(self, answers: Answers, path: str, reply_id: str) -> None:
        """End the requests of a call, and count and log them. Prompts and answers are not logged."""
        answers.close()
        results = answers.results()
        self.metrics.observe(results)
        if self.log is None:
            return
        counted, first = usage(results), results[0]
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
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


def create_app(service: Service) -> fastapi.FastAPI:
    """Make the application."""
    app = fastapi.FastAPI(title="peagle", docs_url=None, redoc_url=None, openapi_url=None)

    def authorised(request: fastapi.Request) -> None:
        check_origin(request)
        check_key(request, service.keys)

    guarded = fastapi.APIRouter(dependencies=[fastapi.Depends(authorised)])

    @app.get("/health")
    async def health() -> JsonReply:
        found = service.health()
        return JsonReply(found, 200 if found["status"] == "ok" else 503)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=HEADERS)

    @guarded.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card()]}

    @guarded.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model_card()

    @guarded.post("/v1/chat/completions")
    async def chat_completions(request: fastapi.Request) -> fastapi.Response:
        body = parse(ChatBody, await read_body(request, service.max_body))
        service.check_model(body.model)
        requests = await service.encode(service.prompter.chat, body, await service.grammar(body))
        tokenizer = service.prompter.tokenizer
        form = ChatForm(service.model, tokenizer, _include_usage(body), logprobs=body.logprobs)
        form.token_origins, form.prompts = body.return_token_origins, [each.prompt_ids for each in requests]
        return await _reply(service, request, body, form, Answers(service.loop, requests, tokenizer))

    @guarded.post("/v1/completions")
    async def completions(request: fastapi.Request) -> fastapi.Response:
        body = parse(CompletionBody, await read_body(request, service.max_body))
        service.check_model(body.model)
        requests, echoed = await service.encode(service.prompter.completion, body, await service.grammar(body))
        tokenizer = service.prompter.pair.tokenizer
        form = CompletionForm(service.model, tokenizer, _include_usage(body), logprobs=body.logprobs is not None)
        form.echoed = echoed
        if body.echo and body.logprobs is not None:
            form.prompts = [each.prompt_ids for each in requests]
            form.prompt_logprobs = await until_disconnect(request.receive, service.prompt_logprobs(requests))
        return await _reply(service, request, body, form, Answers(service.loop, requests, tokenizer))

    @guarded.post("/tokenize")
    async def tokenize(request: fastapi.Request) -> dict[str, Any]:
        body = parse(TokenizeBody, await read_body(request, service.max_body))
        service.check_model(body.model)
        ids = await service.encode(service.prompter.tokenize, body)
        return {"count": len(ids), "max_model_len": service.prompter.context, "tokens": list(ids)}

    @guarded.post("/detokenize")
    async def detokenize(request: fastapi.Request) -> dict[str, Any]:
        body = parse(DetokenizeBody, await read_body(request, service.max_body))
        service.check_model(body.model)
        return {"prompt": await service.encode(service.prompter.detokenize, body)}

    @guarded.get("/metrics")
    async def metrics() -> fastapi.Response:
        return fastapi.Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(guarded)
    _handle_errors(app)
    return app


def _include_usage(body: Sampled) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def _reply(
    service: Service, request: fastapi.Request, body: Sampled, form: Form, answers: Answers
) -> fastapi.Response:
    def finish() -> None:
        service.finish(answers, request.url.path, form.id)

    if body.stream:
        return EventStream(_events(form, answers), finish)
    try:
        return JsonReply(await until_disconnect(request.receive, _whole(form, answers)))
    finally:
        finish()


async def _whole(form: Form, answers: Answers) -> dict[str, Any]:
    """Read the answers to their ends."""
    async with contextlib.aclosing(answers.parts()) as parts:
        async for part in parts:
            form.read(part)
    return form.whole(answers.results())


async def _events(form: Form, answers: Answers) -> AsyncIterator[str]:
    """Make the events of a stream. An error in its midst becomes an event."""
    try:
        async with contextlib.aclosing(answers.parts()) as parts:
            async for part in parts:
                if choices := form.read(part):
                    yield "".join(map(form.event, choices))
    except ApiError as error:
        yield error_event(error.body())
    else:
        yield form.end(answers.results())


def _handle_errors(app: fastapi.FastAPI) -> None:
    """Answer every failure with an error object."""

    def reply(error: ApiError) -> JsonReply:
        return JsonReply(error.body(), error.status, error.headers())

    @app.exception_handler(ApiError)
    async def known(_: fastapi.Request, error: ApiError) -> JsonReply:
        return reply(error)

    @app.exception_handler(InputError)
    async def bad_input(_: fastapi.Request, error: InputError) -> JsonReply:
        return reply(ApiError(400, str(error)))

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
