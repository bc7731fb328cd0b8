"""The OpenAPI document of the routes, made from the models that check their bodies and from the shapes of replies."""

from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema

from peagle.serve import shapes
from peagle.serve.responses import ResponsesBody
from peagle.serve.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

# what a path takes and gives
POSTED: dict[str, tuple[type[pydantic.BaseModel], type[shapes.Shape]]] = {
    "/v1/chat/completions": (ChatBody, shapes.ChatCompletion),
    "/v1/completions": (CompletionBody, shapes.Completion),
    "/v1/responses": (ResponsesBody, shapes.Response),
    "/tokenize": (TokenizeBody, shapes.Tokenized),
    "/detokenize": (DetokenizeBody, shapes.Detokenized),
}
READ: dict[str, type[shapes.Shape] | None] = {  # None: text
    "/v1/models": shapes.Models,
    "/v1/models/{model}": shapes.ModelCard,
    "/tokenizer_info": shapes.TokenizerInfo,
    "/health": shapes.Health,
    "/metrics": None,
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
EVENT = {  # of a stream
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "additionalProperties": False,
}
REFUSALS = {  # of every path, then of those that take a body, then of those that run requests
    401: "No key, or a wrong one.",
    403: "A page of another site.",
    404: "Another model.",
    400: "The request cannot be run.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    415: "The body has a content encoding.",
    429: "The queue is full; try again later.",
    503: "The server shuts down, or its engine has failed.",
}


def document(needs_key: bool) -> dict[str, Any]:
    """Make the document. needs_key: clients send a key."""
    taken = [(kind, "validation") for kind, _ in POSTED.values()]
    replies = (*(reply for _, reply in POSTED.values()), *READ.values(), shapes.Error)
    models: Any = [*taken, *((kind, "serialization") for kind in replies if kind is not None)]
    names, found = models_json_schema(models, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for path, (body, reply) in POSTED.items():
        content = {"application/json": {"schema": names[reply, "serialization"]}}
        content |= {"text/event-stream": {"schema": EVENT}} if path in STREAMS else {}
        asked = {"required": True, "content": {"application/json": {"schema": names[body, "validation"]}}}
        statuses = [400, 408, 413, 415, *([429, 503] if path in STREAMS else [])]
        paths[path] = {"post": {**_operation(path, content, statuses), "requestBody": asked}}
    for path, shape in READ.items():
        schema = {"type": "string"} if shape is None else names[shape, "serialization"]
        content = {"text/plain" if shape is None else "application/json": {"schema": schema}}
        paths[path] = {"get": _operation(path, content, [400] if path == "/tokenizer_info" else [])}
    paths["/health"]["get"]["responses"]["503"] = {
        "description": "It cannot answer requests.",
        "content": paths["/health"]["get"]["responses"]["200"]["content"],
    }
    paths["/v1/models/{model}"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    schemas = found.get("$defs", {})
    components: dict[str, Any] = {"schemas": schemas}
    security: dict[str, Any] = {}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        security = {"security": [{"key": []}]}
    head = {"openapi": "3.1.0", "info": {"title": "peagle", "version": "1"}}
    return {**head, "paths": paths, "components": components, **security}


def _operation(path: str, content: dict[str, Any], statuses: list[int]) -> dict[str, Any]:
    """Describe a request of a path. statuses: of its own refusals."""
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in (401, 403, 404, *statuses):
        responses[str(status)] = {"description": REFUSALS[status], "content": error}
    return {"operationId": path.strip("/").replace("/", "_"), "responses": responses}
