"""Known bad inputs get an error object in OpenAI's form, that names the field."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from peagle.serve.bodies import NEUTRAL, ChatBody, CompletionBody
from peagle.serve.response_bodies import ResponsesBody
from tests.support.servers import client_of, has_its_type

ALL = CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
}
BAD: list[tuple[str, dict[str, Any], str]] = [
    # fields, a part of the message
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function is missing"),
    (CHAT, {"tool_choice": "required"}, "tool_choice is given without tools"),
    (CHAT, {"speculative": {"num_speculative_tokens": 4}}, "is 4; expected 0 (plain decoding) to 3, the server's K"),
    (CHAT, {"speculative": {"num_speculative_tokens": -1}}, "is -1; expected 0"),
    (CHAT, {"speculative": {"k": 1}}, "speculative.k is not supported"),
    (COMPLETIONS, {"speculative": True}, "speculative is True"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template is not supported"),
    (CHAT, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern is not supported"),
    (CHAT, {"unheard_of": 1}, "unheard_of is not supported"),
    (CHAT, {"prompt": "hi"}, "prompt is not supported"),
    (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation is True; expected"),
    (CHAT, {"stream_options": {"include_usage": True}}, "without stream"),
    (CHAT, {"messages": []}, "messages is empty"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0 is a tool's result"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages.0.content.0.type is 'image_url'; expected 'text' or 'refusal'",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type is missing"),
    (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0 is 'x'; expected an object"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": 5}]}]},
        "messages.0.content.1.text is 5; expected a text",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]},
        "messages.0.content.0.more is not supported here",
    ),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content is 5; expected a text or a list of"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function is missing"),
    (CHAT, {"messages": [{"role": "user"}]}, "no content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages.0.refusal is not supported in"),
    (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages.0.audio is not supported here"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {}}]}, "messages.0.function_call is not supported"),
    (CHAT, {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages.0.role is 'function'"),
    (CHAT, {"messages": "hi"}, "messages is 'hi'; expected a list"),
    (CHAT, {"stream_options": 1}, "stream_options is 1; expected an object"),
    (CHAT, {"user": 1}, "user is 1; expected a text"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs is given without"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "expected 0..20"),
    (CHAT, {"logprobs": 3}, "logprobs is 3"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
    (CHAT, {"reasoning_effort": "extreme"}, "reasoning_effort is 'extreme'"),
    (COMPLETIONS, {"prompt": ""}, "prompt is empty"),
    (COMPLETIONS, {"prompt": [""]}, "prompt is empty"),
    (COMPLETIONS, {"prompt": []}, "prompt is empty"),
    (COMPLETIONS, {"prompt": [[]]}, "is empty"),
    (COMPLETIONS, {"prompt": 5}, "prompt is 5; expected a text"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "token id -1; expected 0..319"),
    (COMPLETIONS, {"prompt": [320]}, "token id 320; expected 0..319"),
    (COMPLETIONS, {"prompt": [10**30]}, "expected 0..319"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 65}, "65 prompts"),
    (COMPLETIONS, {"prompt": ["a"] * 16, "n": 16}, "at once"),
    (COMPLETIONS, {"prompt": "x y " * 300}, "has 1200 tokens, but the context holds 256"),
    (COMPLETIONS, {"max_tokens": 300}, "expected max_tokens of at most"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens is 0"),
    (COMPLETIONS, {"max_tokens": -1, "echo": True}, "max_tokens is -1"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens is -1"),
    (COMPLETIONS, {"max_tokens": 2.5}, "max_tokens is 2.5"),
    (COMPLETIONS, {"min_tokens": 2}, "min_tokens is 2; expected at most 1"),
    (COMPLETIONS, {"min_tokens": -1}, "min tokens are -1"),
    (COMPLETIONS, {"n": 0}, "n is 0"),
    (COMPLETIONS, {"n": -1}, "n is -1"),
    (COMPLETIONS, {"n": 17}, "n is 17"),
    (COMPLETIONS, {"n": "2"}, "n is '2'"),
    (COMPLETIONS, {"temperature": -0.1}, "temperature is -0.1"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature is 'hot'"),
    (COMPLETIONS, {"temperature": True}, "temperature is True"),
    (COMPLETIONS, {"top_p": 0}, "top-p is 0"),
    (COMPLETIONS, {"top_p": 1.5}, "top-p is 1.5"),
    (COMPLETIONS, {"top_k": -2}, "top-k is -2"),
    (COMPLETIONS, {"min_p": 2}, "min-p is 2"),
    *((path, {"seed": 2**64}, "seed is 18446744073709551616; expected an integer of 64 bits") for path in ALL),
    (COMPLETIONS, {"seed": -(2**63) - 1}, "seed is -9223372036854775809; expected"),
    (COMPLETIONS, {"seed": 1.5}, "seed is 1.5; expected an integer"),
    (COMPLETIONS, {"presence_penalty": 3}, "presence penalty is 3"),
    (COMPLETIONS, {"frequency_penalty": -3}, "frequency penalty is -3"),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition penalty is 0"),
    *((COMPLETIONS, {"logit_bias": {key: 1}}, "token ids as keys") for key in ("a", "-1", "１", "1_0", "9" * 5000)),
    (COMPLETIONS, {"logit_bias": {"320": 1}}, "logit_bias holds token id 320"),
    (COMPLETIONS, {"logit_bias": {str(token): 1 for token in range(301)}}, "logit bias is set for 301 tokens"),
    (COMPLETIONS, {"logprobs": 21}, "expected 0..20"),
    (COMPLETIONS, {"stop": ""}, "is empty"),
    (COMPLETIONS, {"stop": ["a"] * 65}, "65 stop strings"),
    (COMPLETIONS, {"stop": ["a"] * 500_000}, "500000 stop strings"),
    (COMPLETIONS, {"stop": "a" * 1025}, "1025 characters"),
    (COMPLETIONS, {"stop": 1}, "stop is 1; expected a text"),
    (COMPLETIONS, {"stop_token_ids": [320]}, "stop_token_ids holds token id 320"),
    (COMPLETIONS, {"stop_token_ids": list(range(17))}, "stop tokens"),
    (COMPLETIONS, {"suffix": "x"}, "suffix is not supported"),
    (COMPLETIONS, {"best_of": 2}, "best_of is not supported"),
    (CHAT, {"max_completion_tokens": 300, "max_tokens": None}, "expected max_completion_tokens of at most"),
    (CHAT, {"messages": [{"role": "user", "content": "x y " * 300}]}, "but the context holds 256"),
]
RAW: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"[1]", "expected a JSON object"),
    (b'"x"', "expected a JSON object"),
    (b"\xff\xfe", "not valid JSON"),
    (b'{"prompt": "\\ud800"}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature is nan"),
    (b'{"prompt": "a", "temperature": Infinity}', "temperature is inf"),
    (b'{"prompt": "a", "presence_penalty": -Infinity}', "presence_penalty is -inf"),
    (b'{"prompt": "a", "top_p": NaN}', "top_p is nan"),
    (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "logit_bias.1 is nan"),
    (b'{"prompt": "a", "seed": 1e400}', "seed is inf"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
    (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "not valid JSON"),
]


def refused(reply: Any, status: int, part: str) -> None:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert part in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    assert "Traceback" not in reply.text


@pytest.mark.parametrize(("path", "fields", "part"), BAD, ids=[f"{str(fields)[:40]}" for _, fields, _ in BAD])
def test_a_bad_field_is_refused_by_name(client: TestClient, path: str, fields: dict[str, Any], part: str) -> None:
    reply = client.post(path, json={**GOOD[path], **fields})
    refused(reply, 400, part)
    assert reply.json()["error"]["param"].partition(".")[0] in fields


@pytest.mark.parametrize(("body", "part"), RAW)
def test_a_bad_body_is_refused(client: TestClient, body: bytes, part: str) -> None:
    refused(client.post(COMPLETIONS, content=body), 400, part)


LONG = "é " * 20_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": ["a", LONG], "echo": True, "max_tokens": 0}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        (CHAT, {"messages": [{"role": "assistant", "content": LONG}, {"role": "user", "content": "b"}]}),
        (RESPONSES, {"input": LONG}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"prompt": LONG, "add_special_tokens": False}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    ],
)
def test_a_text_that_the_context_cannot_hold_is_refused_by_its_size(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    """Before it is encoded, for which all clients would wait: its tokens are not known exactly."""
    reply = client.post(path, json=body)
    refused(reply, 400, "has 60")
    refused(reply, 400, "tokens or more, but the context holds 256 positions; expected at most 255 tokens")
    assert reply.json()["error"]["param"] in body
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        (COMPLETIONS, {"prompt": [40] * 100_000}, "prompt has 100000 items; expected at most 256"),
        (COMPLETIONS, {"prompt": [[40], [40] * 257]}, "prompt has 257 items; expected at most 256"),
        ("/detokenize", {"tokens": [40] * 100_000}, "tokens has 100000 items; expected at most 256"),
        (CHAT, {**GOOD[CHAT], "tools": [{}] * 129}, "tools has 129 items; expected at most 128"),
        (RESPONSES, {**GOOD[RESPONSES], "tools": [{}] * 129}, "tools has 129 items; expected at most 128"),
    ],
)
def test_more_items_than_may_be_are_refused_by_their_number(
    client: TestClient, path: str, body: dict[str, Any], part: str
) -> None:
    """Before the type of each is checked."""
    refused(client.post(path, json=body), 400, part)


def test_of_several_prompts_the_first_that_is_too_long_is_refused(client: TestClient) -> None:
    """Without a look at the others, which may be many."""
    refused(client.post(COMPLETIONS, json={"prompt": ["a", "x y " * 300, LONG]}), 400, "prompt 2 has 1200 tokens")


@pytest.mark.parametrize("text", ["a\0b", "\u202eabc\u200d", "😀" * 20, "\x1b[2J", "\ufffe"])
def test_hostile_text_is_only_text(client: TestClient, text: str) -> None:
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    for path, field in ((CHAT, {"messages": [{"role": "user", "content": text}]}), (COMPLETIONS, {"prompt": text})):
        assert client.post(path, json={**field, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_nulls_and_neutral_values_ask_for_nothing(client: TestClient, path: str) -> None:
    neutral = {"tools": None, "response_format": {"type": "text"}, "seed": None, "stop": None, "user": "someone"}
    assert client.post(path, json={**GOOD[path], **neutral}).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_what_clients_send_together_is_accepted_together(client: TestClient, path: str) -> None:
    fields: dict[str, Any] = {"prompt_cache_key": "a", "safety_identifier": "b", "user": "c"}
    if path == RESPONSES:
        fields["text"] = {"format": {"type": "text"}, "verbosity": "medium"}
    else:
        fields |= {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    reply = client.post(path, json={**GOOD[path], **fields})
    assert reply.status_code == 200, reply.text


def test_another_model_is_not_found(client: TestClient) -> None:
    refused(client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "model": "gpt-4"}), 404, "expected 'toy'")
    refused(client.get("/v1/models/gpt-4"), 404, "'gpt-4' is not served")
    assert client.get("/v1/models/toy").json() == client.get("/v1/models").json()["data"][0]


def test_other_routes_and_methods_are_error_objects(client: TestClient) -> None:
    refused(client.get("/v1/nothing"), 404, "GET /v1/nothing: Not Found")
    refused(client.get(COMPLETIONS), 405, "Method Not Allowed")
    refused(client.post("/v1/embeddings", json={}), 404, "Not Found")


def test_a_large_body_is_refused_before_it_is_read(make: Any) -> None:
    client = client_of(make(max_body=1000))
    refused(client.post(COMPLETIONS, content=b" " * 1001), 413, "more than 1000 bytes")
    parts = (b" " * 600 for _ in range(2))  # without a length
    refused(client.post(COMPLETIONS, content=parts), 413, "more than 1000 bytes")
    assert client.post(COMPLETIONS, json=GOOD[COMPLETIONS]).status_code == 200


def test_every_route_that_works_needs_the_key(make: Any) -> None:
    client = client_of(make(keys=("first", "schlüssel")))
    routes = [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/toy"),
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("POST", "/v1/responses"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        ("GET", "/openapi.json"),
        ("GET", "/metrics"),
    ]
    wrong = [{}, {"Authorization": "Bearer other"}, {"Authorization": "Basic first"}, {"Authorization": "Bearer "}]
    for method, path in routes:
        for headers in wrong:
            refused(client.request(method, path, headers=headers, json={}), 401, "key is missing or wrong")
    for key in ("first", "schlüssel"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.get("/health").status_code == 200


def test_the_published_schema_names_each_field(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    for path, kind in ((CHAT, ChatBody), (COMPLETIONS, CompletionBody), (RESPONSES, ResponsesBody)):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert schemas[body.rpartition("/")[2]]["properties"].keys() == kind.model_fields.keys()
    names = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert names <= schemas.keys()


def test_a_name_that_leads_to_this_machine_is_not_its_own(make: Any) -> None:
    """A page of evil.example whose address has become 127.0.0.1 has the origin and the host of evil.example."""
    client = client_of(make(hosts=("chat.example",)))
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[",
        "a b",
        "",
    ):
        headers = {"Host": host, "Origin": f"http://{host}"}
        refused(client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers=headers), 403, "expected localhost")
    for host in ("localhost:8000", "LOCALHOST", "127.0.0.1", "127.0.0.1:80", "[::1]:8000", "chat.example:8000"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_pages_of_other_sites_are_refused(client: TestClient) -> None:
    for origin in ("http://evil.example", "null", "http://testserver:81"):
        refused(client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers={"Origin": origin}), 403, "may not use")
    assert client.get("/v1/models", headers={"Origin": "http://testserver"}).status_code == 200
    proxied = {"Origin": "https://public.example", "Sec-Fetch-Site": "same-origin"}
    assert client.get("/v1/models", headers=proxied).status_code == 200


def test_pages_of_sites_that_are_allowed_may_use_it(make: Any) -> None:
    """With the headers that browsers ask for; a preflight has no key."""
    client = client_of(make(origins=("https://chat.example",), keys=("key",)))
    origin = {"Origin": "https://chat.example"}
    access = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = client.options(COMPLETIONS, headers={**origin, **access})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    reply = client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers={**origin, "Authorization": "Bearer key"})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"
    refused(client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers=origin), 401, "key")
    other = {"Origin": "https://other.example"}
    refused(client.post(COMPLETIONS, headers={**other, "Authorization": "Bearer key"}), 403, "may not use")
    assert "access-control-allow-origin" not in client.options(COMPLETIONS, headers={**other, **access}).headers
    anyone = client_of(make(origins=("*",)))
    reply = anyone.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers=other)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")


def test_requests_are_logged_without_what_they_say(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(make(log=logging.getLogger("requests")))
    with caplog.at_level(logging.INFO, "requests"):
        client.post(COMPLETIONS, json={"prompt": "secret words", "max_tokens": 3})
    (record,) = caplog.records
    assert '"completion_tokens": 3' in record.message
    assert "secret" not in record.message


HOSTILE: list[Any] = [
    *(0, 1, -1, 2, 2**31, 2**63, 10**40, -(10**40), 0.5, -0.0, 1e308, 1e-308, True, False),
    *("", "a", "\0", "1", "NaN", "../../etc/passwd", "{{ 7 * 7 }}", "http://127.0.0.1/", "🎉" * 50),
    *([], [[]], [None], [0], [-1], ["a"], [{}], [[1], 2], [[[1]]]),
    *({}, {"a": 1}, {"1": "x"}, {"1": 10**40}, {"type": "text"}, {"include_usage": 1}, {"role": "user", "content": {}}),
]


def post_all(client: TestClient, path: str, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """Post thousands of bodies within the server's event loop: the client changes threads eight times for each."""
    transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)

    async def post() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url=str(client.base_url)) as within:
            return [await within.post(path, json=body) for body in bodies]

    assert client.portal is not None
    return client.portal.call(post)


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, ChatBody), (COMPLETIONS, CompletionBody), (RESPONSES, ResponsesBody)]
)
def test_no_value_of_any_field_is_more_than_an_error_object(client: TestClient, path: str, kind: Any) -> None:
    served = 0
    fields = [(field, value) for field in (*kind.model_fields, *NEUTRAL, "other") for value in HOSTILE]
    replies = post_all(client, path, [{**GOOD[path], field: value} for field, value in fields])
    for (field, _), reply in zip(fields, replies, strict=True):
        has_its_type(reply)
        if reply.status_code == 200:
            served += 1
        elif reply.status_code != 404 or field != "model":
            refused(reply, 400, "")
    assert served > 50
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "field"), [("/tokenize", "prompt"), ("/tokenize", "messages"), ("/detokenize", "tokens")]
)
def test_no_value_breaks_the_tokenizers_routes(client: TestClient, path: str, field: str) -> None:
    for value in HOSTILE:
        reply = client.post(path, json={field: value})
        if reply.status_code != 200:
            refused(reply, 400, "")
