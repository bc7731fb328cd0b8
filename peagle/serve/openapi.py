"""The OpenAPI document of the routes, made from the models that check their bodies."""

from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema

from peagle.serve.responses import ResponsesBody
from peagle.serve.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

BODIES: dict[str, type[pydantic.BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
READ = {"/v1/models": "object", "/tokenizer_info": "object", "/health": "object", "/metrics": "text"}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(needs_key: bool) -> dict[str, Any]:
    """Make the document. needs_key: clients send a key."""
    _, found = models_json_schema(
        [(kind, "validation") for kind in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {
        path: {"post": _operation(path, kind.__name__, path in STREAMS)} for path, kind in BODIES.items()
    }
    for path, kind in READ.items():
        content = {"text/plain": {}} if kind == "text" else {"application/json": {"schema": {"type": "object"}}}
        paths[path] = {"get": {"operationId": path.strip("/"), "responses": _responses(content)}}
    components: dict[str, Any] = {"schemas": {**found.get("$defs", {}), "Error": _ERROR}}
    security: dict[str, Any] = {}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        security = {"security": [{"key": []}]}
    head = {"openapi": "3.1.0", "info": {"title": "peagle", "version": "1"}}
    return {**head, "paths": paths, "components": components, **security}


def _operation(path: str, name: str, streams: bool) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "operationId": path.strip("/"),
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(content | ({"text/event-stream": {}} if streams else {})),
    }


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "An error object.", "content": error},
    }
