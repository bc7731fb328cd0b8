"""The format of streams: what is sent, in which order, and that its parts are the whole answer."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.servers import events_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "temperature": 0},
    COMPLETIONS: {"prompt": [40, 41, 42], "max_tokens": 30, "temperature": 0},
}


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("\n\ndata: [DONE]\n\n")
    return events_of(reply.text)


def test_a_chat_streams_its_role_then_deltas_then_the_reason(client: TestClient) -> None:
    chunks = events(client, CHAT, BODIES[CHAT])
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", "toy")}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["delta"].keys() == {"content"} and choice["delta"]["content"] for choice in choices[1:-1])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)
    assert len(choices) - 2 < 30, "no step accepted a draft"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields", [{}, {"stop": ["$%"]}, {"n": 2, "temperature": 1, "seed": 5}, {"logprobs": True}])
def test_the_parts_are_the_whole(client: TestClient, path: str, fields: dict[str, Any]) -> None:
    if path == COMPLETIONS and "logprobs" in fields:
        fields = {"logprobs": 2}
    body = {**BODIES[path], **fields}
    whole = client.post(path, json=body).json()
    chunks = events(client, path, {**body, "stream_options": {"include_usage": True}})
    *parts, last = chunks
    assert last["choices"] == []
    assert all(part["usage"] is None for part in parts)
    whole["usage"]["prompt_tokens_details"] = last["usage"]["prompt_tokens_details"]  # it was cached by now
    assert last["usage"] == whole["usage"]
    assert last["metrics"] == whole["metrics"]
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        texts = [part["delta"].get("content", "") if path == CHAT else part["text"] for part in mine]
        assert "".join(texts) == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert texts[-1] == ""
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"] is not None:
            for key in choice["logprobs"].keys() - {"refusal"}:
                joined = [entry for part in mine if part["logprobs"] for entry in part["logprobs"][key]]
                assert joined == choice["logprobs"][key]


@pytest.mark.parametrize("path", BODIES)
def test_each_chunk_may_have_the_usage_so_far(client: TestClient, path: str) -> None:
    """As guidellm asks for: it counts tokens by it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = events(client, path, {**BODIES[path], "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in parts]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert parts[-1]["usage"] == last["usage"]
    alone = {**BODIES[path], "stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in chunk for chunk in events(client, path, alone))


def test_a_completion_streams_its_echo_first(client: TestClient) -> None:
    chunks = events(client, COMPLETIONS, {"prompt": ["ab", "cd"], "echo": True, "max_tokens": 2})
    first = {chunk["choices"][0]["index"]: chunk["choices"][0]["text"] for chunk in reversed(chunks)}
    assert first == {0: "ab", 1: "cd"}


def test_bad_input_is_refused_before_a_stream_begins(client: TestClient) -> None:
    reply = client.post(CHAT, json={**BODIES[CHAT], "stream": True, "temperature": -1})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("temperature is -1")


def test_each_token_has_its_origin_if_it_is_asked_for(client: TestClient) -> None:
    chunks = events(client, CHAT, {**BODIES[CHAT], "return_token_origins": True})
    tokens = [token for chunk in chunks for token in chunk["choices"][0].get("tokens", [])]
    content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert "".join(token["text"] for token in tokens) == content
    assert tokens[0]["origin"] == "prefill"
    assert {token["origin"] for token in tokens[1:]} == {"1", "2", "3", "recovered", "bonus"}
