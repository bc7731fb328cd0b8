"""The format of streams over HTTP: what is sent, in which order, and that its parts are the whole answer."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.servers import CHAT, COMPLETIONS, stream

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "temperature": 0},
    COMPLETIONS: {"prompt": [40, 41, 42], "max_tokens": 30, "temperature": 0},
}


@pytest.mark.parametrize("path", BODIES)
def test_each_chunk_may_have_the_usage_so_far(client: TestClient, path: str) -> None:
    """As guidellm asks for: it counts tokens by it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = stream(client, path, {**BODIES[path], "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in parts]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert parts[-1]["usage"] == last["usage"]
    alone = {**BODIES[path], "stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in chunk for chunk in stream(client, path, alone))


def test_each_token_has_its_origin_if_it_is_asked_for(client: TestClient) -> None:
    choices = [chunk["choices"][0] for chunk in stream(client, CHAT, {**BODIES[CHAT], "return_token_origins": True})]
    tokens = [token for choice in choices for token in choice.get("tokens", [])]
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    assert "".join(token["text"] for token in tokens) == content
    assert tokens[0]["origin"] == "prefill"
    assert {token["origin"] for token in tokens[1:]} == {"1", "2", "3", "recovered", "bonus"}
