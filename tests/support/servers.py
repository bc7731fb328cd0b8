"""A server over a pair, in the test's process; each reply is checked against its type."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired

import fastapi.routing
import openai
import pydantic
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from peagle.config import PrefixCacheSize
from peagle.pair import Pair
from peagle.serve import replies
from peagle.serve.app import ENDPOINTS, create_app, document
from peagle.serve.engine_loop import EngineLoop
from peagle.serve.request_builder import RequestBuilder
from peagle.serve.shared_state import SharedState
from tests.support.pairs import SPECIALS

# an application is made for each of hundreds of servers; nearly all of its time goes into the types of replies
fastapi.routing.create_model_field = functools.cache(fastapi.routing.create_model_field)  # type: ignore[attr-defined]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CONTEXT, SLOTS, K = 256, 2, 3
MODEL = "toy"
DATE = "2025-08-05"
DOCUMENT: dict[str, Any] = {}  # made with the first application
TYPES: dict[tuple[str, str], Any] = {
    **{("POST", path): pydantic.TypeAdapter(endpoint.reply) for path, endpoint in ENDPOINTS.items()},
    ("POST", "/tokenize"): pydantic.TypeAdapter(replies.Tokenized),
    ("POST", "/detokenize"): pydantic.TypeAdapter(replies.Detokenized),
    ("GET", "/v1/responses/{response_id}"): pydantic.TypeAdapter(replies.Response),
    ("DELETE", "/v1/responses/{response_id}"): pydantic.TypeAdapter(replies.DeletedResponse),
    ("GET", "/v1/responses/{response_id}/input_items"): pydantic.TypeAdapter(replies.InputItems),
    ("GET", "/v1/models"): pydantic.TypeAdapter(replies.Models),
    ("GET", "/v1/models/{name}"): pydantic.TypeAdapter(replies.ModelCard),
    ("GET", "/tokenizer_info"): pydantic.TypeAdapter(replies.TokenizerInfo),
    ("GET", "/health"): pydantic.TypeAdapter(replies.Health),
}


class ChatChunk(replies.Head):
    """An event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[replies.ChatChunkChoice]
    usage: NotRequired[replies.Usage | None]


class CompletionChunk(replies.Head):
    """An event of a completion's stream."""

    object: Literal["text_completion"]
    choices: list[replies.CompletionChunkChoice]
    usage: NotRequired[replies.Usage | None]


ERROR: Any = pydantic.TypeAdapter(replies.Error)
EVENTS: dict[str, Any] = {
    CHAT: pydantic.TypeAdapter(ChatChunk | replies.Error),
    COMPLETIONS: pydantic.TypeAdapter(CompletionChunk | replies.Error),
    RESPONSES: pydantic.TypeAdapter(replies.ResponseEvent),
}
HARMONY_SPECIALS = (*SPECIALS, "<|call|>", "<|constrain|>")
HARMONY_TEMPLATE = (Path(__file__).parent / "harmony.jinja").read_text(encoding="utf-8")


def service_of(
    pair: Pair,
    max_queue: int = 64,
    k: int | str = K,
    context: int = CONTEXT,
    slots: int = SLOTS,
    replicas: int = 1,
    kv_memory: int | None = None,
    prefix_cache: PrefixCacheSize = 1_000_000,
    **options: Any,
) -> SharedState:
    # several tests have engines of one shape, and each engine has one driver
    pair.engines.clear()
    pair = dataclasses.replace(pair, replicas=(pair,) * (replicas - 1))
    shape: dict[str, Any] = {"context": context, "slots": slots, "k_per_request": True}
    config = pair.engine_config(k, kv_memory=kv_memory, prefix_cache=prefix_cache, **shape)
    builder = RequestBuilder(pair, context, DATE, config.num_drafts)
    return SharedState(EngineLoop(pair.engine(config), max_queue), builder, MODEL, **options)


class Client(TestClient):
    """A client that holds the events of streams to their types, if the test reads the stream as a whole."""

    __test__ = False

    def request(self, *arguments: Any, **options: Any) -> Any:
        reply = super().request(*arguments, **options)
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            for line in reply.content.split(b"\n"):
                if line.startswith(b"data: {"):
                    EVENTS[reply.request.url.path].validate_json(line.removeprefix(b"data: "))
        return reply


def events_of(stream: str) -> list[dict[str, Any]]:
    """Read the events of a stream, without [DONE]."""
    return [json.loads(line.removeprefix("data: ")) for line in stream.split("\n") if line.startswith("data: {")]


def answer(client: Any, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Post a body that the server takes, and return its reply."""
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(client: Any, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Post a body that the server takes, and return the events of its stream."""
    reply = client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert path == RESPONSES or reply.text.endswith("\n\ndata: [DONE]\n\n")
    return events_of(reply.text)


def error_of(reply: Any, status: int = 400) -> dict[str, Any]:
    """Return the error of a refusal, which is one short line in OpenAI's form."""
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    assert "Traceback" not in reply.text
    return error


def chat_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the deltas of a chat's stream to its choice, as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": ""}
    calls: dict[int, dict[str, Any]] = {}
    entries: list[Any] = []
    reason = None
    for choice in (event["choices"][0] for event in events if event["choices"]):
        delta = choice["delta"]
        for key in ("content", "reasoning"):
            message[key] += delta.get(key, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls[call["index"]] = {key: value for key, value in call.items() if key != "index"}
                continue
            kind = calls[call["index"]]["type"]
            ((key, text),) = call[kind].items()
            calls[call["index"]][kind][key] += text
        entries += (choice["logprobs"] or {"content": []})["content"]
        reason = choice["finish_reason"] or reason
    return {**message, "tool_calls": list(calls.values()), "logprobs": entries, "finish_reason": reason}


def client_of(service: SharedState) -> TestClient:
    """Make a client that holds every reply to its published type."""
    app = create_app(service)
    if not DOCUMENT:
        DOCUMENT.update(document(app, needs_key=False))
    client = Client(app, raise_server_exceptions=False)
    client.event_hooks = {"response": [has_its_type]}
    return client


def openai_of(service: SharedState) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=client_of(service))


def has_its_type(reply: Any) -> None:
    """Check a JSON reply, and that its status is published, for what the document describes."""
    path, method = reply.request.url.path, reply.request.method
    published = re.sub("(?<=/v1/models/).+", "{name}", path)
    published = re.sub("(?<=/v1/responses/)[^/]+", "{response_id}", published)
    if (method, published) not in TYPES or reply.status_code == 500:
        return
    assert str(reply.status_code) in DOCUMENT["paths"][published][method.lower()]["responses"]
    if reply.headers["content-type"] == "application/json":
        good = reply.is_success or published == "/health"
        (TYPES[method, published] if good else ERROR).validate_json(reply.read())


def values(client: Any) -> dict[tuple[str, ...], float]:
    """Read the metrics of a server, by name and labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    labels = ("finished_reason", "position", "le")
    return {
        (sample.name, *(sample.labels[label] for label in labels if label in sample.labels)): sample.value
        for family in families
        for sample in family.samples
    }
