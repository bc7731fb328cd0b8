"""The routes of OpenAI's HTTP interface over one engine.

request_body.py reads and checks a body (bodies.py), request_builder.py makes the engine's requests of it,
engine_loop.py runs them, and generation.py reads their answers. chat.py, completions.py and responses.py write a reply
or server-sent events.
"""

import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import fastapi
import pydantic
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from peagle.base.errors import InputError
from peagle.serve import chat, completions, responses
from peagle.serve.access import Sites, check_host, check_key, check_origin
from peagle.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from peagle.serve.chat_page import HEADERS, PAGE
from peagle.serve.engine_loop import LOADING_RETRY_S
from peagle.serve.errors import ApiError
from peagle.serve.generation import Generation
from peagle.serve.replies import (
    ChatCompletion,
    Completion,
    DeletedResponse,
    Detokenized,
    Error,
    Health,
    InputItems,
    ModelCard,
    Models,
    Response,
    Tokenized,
    TokenizerInfo,
)
from peagle.serve.request_body import read_body
from peagle.serve.response_bodies import ResponsesBody
from peagle.serve.shared_state import SharedState
from peagle.serve.stored import StoredResponse
from peagle.serve.transport import REQUEST_ID, EventStream, JsonReply, Transport, until_disconnect

LOGGED_REFUSALS = (429, 503)  # statuses of refusals under load, which the log counts
LONGEST_HINTED = 200  # characters of a path that is compared with the routes
SCHEMA = "#/components/schemas/{model}"
REFUSALS: dict[int | str, str] = {
    401: "No key, or a wrong one.",
    403: "The request comes from a page of another origin.",
    404: "Another model, or a response that is not kept.",
    400: "The request cannot be run.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    415: "The body has a content encoding.",
    429: "The queue is full; try again later.",
    503: "The server loads or shuts down, or its engine has failed.",
    "default": "Another error.",
}
BODY_STATUSES = (400, 408, 413, 415)  # of refused bodies
EVENT = {  # the schema of a stream's events
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "additionalProperties": False,
}


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A path whose replies the model writes. start: sends a body's requests to the engine."""

    body: Any
    reply: Any
    start: Callable[[SharedState, Any, str], Coroutine[Any, Any, Generation]]

    async def generation(self, shared: SharedState, body: bytes, owner: str = "") -> Generation:
        """Send the requests of a body to the engine. Raises ApiError or InputError if it refuses them.

        owner: the API key that came with it.
        """
        parsed = await shared.parse(self.body, body)
        await shared.loop.expect_ready()
        return await self.start(shared, parsed, owner)


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatBody, ChatCompletion, chat.start),
    "/v1/responses": Endpoint(ResponsesBody, Response, responses.start),
    "/v1/completions": Endpoint(CompletionBody, Completion, completions.start),
}


def create_app(shared: SharedState) -> fastapi.FastAPI:
    app = fastapi.FastAPI(
        title="peagle",
        version="1",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
    )

    def authorised(request: fastapi.Request) -> None:
        check_host(request, shared.hosts)
        check_origin(request, shared.origins, shared.log.refused_site)
        request.state.owner = check_key(request, shared.keys)

    app.add_middleware(Sites, origins=shared.origins, refused=shared.log.refused_site)
    app.add_middleware(Transport, metrics=shared.metrics)

    @app.get("/health", response_model=Health, responses={503: {"model": Health, "description": "It cannot answer."}})
    async def health() -> JsonReply:
        state = shared.health()
        retry = {"Retry-After": str(LOADING_RETRY_S)} if state["status"] == "loading" else {}
        return JsonReply(state, 200 if state["status"] == "ok" else 503, retry)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=HEADERS)

    guarded = fastapi.APIRouter(
        dependencies=[fastapi.Depends(authorised)],
        responses=_refusals(401, 403, 404, "default"),
        generate_unique_id_function=_operation_id,
    )
    _add_model_routes(guarded, shared)
    _add_stored_routes(guarded, shared)
    _add_tokenizer_routes(guarded, shared)
    _add_info_routes(guarded, shared)

    @guarded.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return document(app, needs_key=bool(shared.keys))

    app.router.routes.extend(guarded.routes)  # `include_router` would build every route a second time
    _handle_errors(app, shared)
    return app


def _add_model_routes(router: fastapi.APIRouter, shared: SharedState) -> None:
    """Add the routes whose replies the model writes."""

    async def answer(request: fastapi.Request) -> fastapi.Response:
        path, owner = request.scope["route"].path, request.state.owner
        body = await read_body(request, shared.max_body)
        generation = await until_disconnect(request.receive, ENDPOINTS[path].generation(shared, body, owner))

        def finish() -> None:
            shared.finish(generation, path, request.state.request_id)

        if generation.stream:
            return EventStream(generation.events(), finish, shared.metrics, shared.max_unsent)
        try:
            return JsonReply(await until_disconnect(request.receive, generation.reply()))
        finally:
            finish()

    stream: dict[int | str, Any] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}
    for path, endpoint in ENDPOINTS.items():
        router.add_api_route(
            path,
            answer,
            methods=["POST"],
            response_model=endpoint.reply,
            responses=_refusals(*BODY_STATUSES, 429, 503) | stream,
            openapi_extra=_body_schema(endpoint.body),
        )


def _add_stored_routes(router: fastapi.APIRouter, shared: SharedState) -> None:
    """Add the routes for responses that are kept."""
    path = "/v1/responses/{response_id}"

    def response_of(request: fastapi.Request, response_id: str) -> StoredResponse:
        return shared.responses.response(request.state.owner, response_id)

    @router.get(path, response_model=Response, responses=_refusals(400))
    async def response(request: fastapi.Request, response_id: str) -> JsonReply:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "stream is set, but a kept response has ended; leave it out", "stream")
        return JsonReply(response_of(request, response_id).as_reply())

    @router.delete(path, operation_id="delete_response")
    async def delete(request: fastapi.Request, response_id: str) -> DeletedResponse:
        shared.responses.remove(request.state.owner, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get(f"{path}/input_items", response_model=InputItems, responses=_refusals(400))
    async def input_items(request: fastapi.Request, response_id: str) -> JsonReply:
        limit, order, after = map(request.query_params.get, ("limit", "order", "after"))
        return JsonReply(response_of(request, response_id).input_page(limit, order, after))


def _add_tokenizer_routes(router: fastapi.APIRouter, shared: SharedState) -> None:
    @router.post("/tokenize", responses=_refusals(*BODY_STATUSES), openapi_extra=_body_schema(TokenizeBody))
    async def tokenize(request: fastapi.Request) -> Tokenized:
        body = await shared.parse(TokenizeBody, await read_body(request, shared.max_body))
        ids = await shared.in_tokenizer_thread(shared.builder.tokenize, body)
        return {"count": len(ids), "max_model_len": shared.builder.context, "tokens": list(ids)}

    @router.post("/detokenize", responses=_refusals(*BODY_STATUSES), openapi_extra=_body_schema(DetokenizeBody))
    async def detokenize(request: fastapi.Request) -> Detokenized:
        body = await shared.parse(DetokenizeBody, await read_body(request, shared.max_body))
        return {"prompt": await shared.in_tokenizer_thread(shared.builder.detokenize, body)}

    @router.get("/tokenizer_info", response_model=TokenizerInfo, responses=_refusals(400))
    async def tokenizer_info() -> JsonReply:
        info = {**shared.builder.tokenizer.info, "tokenizer_class": "PreTrainedTokenizerFast"}
        return JsonReply({**info, "model_max_length": shared.builder.context})


def _add_info_routes(router: fastapi.APIRouter, shared: SharedState) -> None:
    """Add the routes for models and metrics."""

    @router.get("/v1/models")
    async def models() -> Models:
        return {"object": "list", "data": [shared.model_card()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        shared.check_model(name)
        return shared.model_card()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> fastapi.Response:
        return fastapi.Response(shared.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _operation_id(route: APIRoute) -> str:
    return route.path_format.strip("/").replace("/", "_")


def _refusals(*statuses: int | str) -> dict[int | str, dict[str, Any]]:
    """Make the responses of a route that have these statuses.

    They refer to the schema of Error: for a `model` FastAPI would build a response field per route and status.
    """
    content = {"application/json": {"schema": {"$ref": SCHEMA.format(model=Error.__name__)}}}
    return {status: {"description": REFUSALS[status], "content": content} for status in statuses}


def _body_schema(body: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Declare a route's body to OpenAPI only: the route reads the body itself, to bound its size and time."""
    schema = {"$ref": SCHEMA.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: fastapi.FastAPI, needs_key: bool) -> dict[str, Any]:
    """Make the OpenAPI document of the routes, with the types of their bodies and of errors."""
    openapi = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies = [*(endpoint.body for endpoint in ENDPOINTS.values()), TokenizeBody, DetokenizeBody]
    types: list[Any] = [(kind, "validation", pydantic.TypeAdapter(kind)) for kind in (*bodies, Error)]
    _, schemas = pydantic.TypeAdapter.json_schemas(types, ref_template=SCHEMA)
    openapi["components"]["schemas"] |= schemas["$defs"]
    if needs_key:
        openapi["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        openapi["security"] = [{"key": []}]
    return openapi


def _meant(app: fastapi.FastAPI, path: str) -> str | None:
    """Return the path of a route that ends like this one, which none has: /v1/models for /models or /v1/v1/models."""
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path != "/"]
    starts = [index for index, char in enumerate(path) if char == "/" and len(path) <= LONGEST_HINTED]
    meant = (f"{prefix}{path[start:]}" for start in starts for prefix in ("/v1", ""))
    return next((path for path in meant if any(route.path_regex.match(path) for route in routes)), None)


def _handle_errors(app: fastapi.FastAPI, shared: SharedState) -> None:
    """Answer every failure with an error object."""

    async def reply(request: fastapi.Request, error: Exception) -> fastapi.Response:
        if isinstance(error, ClientDisconnect):
            return PlainTextResponse("", 499)  # nobody reads it
        if isinstance(error, HTTPException):  # of the router: no such path or method
            where = f"{request.method} {request.url.path}"
            meant = _meant(app, request.url.path) if error.status_code == 404 else None
            hint = f"; expected {meant}" if meant else ""
            if meant and meant.startswith("/v1/"):
                hint += ": clients add its end to a base URL that ends in /v1, once"
            error = ApiError(error.status_code, f"{where[:200]}: {error.detail}{hint}")
        error = ApiError.of(error)
        if error.status in LOGGED_REFUSALS:
            shared.log.refused(error.status)
        return JsonReply(error.body(), error.status, error.headers() | {REQUEST_ID: request.state.request_id})

    for kind in (ApiError, InputError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, reply)
