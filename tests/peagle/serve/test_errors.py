"""What is refused: bad fields, bodies, keys, hosts and sites get an error object in OpenAI's form."""

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from peagle.serve.bodies import NEUTRAL, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from peagle.serve.request_log import RequestLog
from peagle.serve.response_bodies import ResponsesBody
from tests.support.servers import CHAT, COMPLETIONS, RESPONSES, answer, client_of, error_of, has_its_type

pytestmark = pytest.mark.compile

BODIES: dict[str, Any] = {CHAT: ChatBody, COMPLETIONS: CompletionBody, RESPONSES: ResponsesBody}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
}

# --- fields -----------------------------------------------------------------------------------------------------------


def said(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **fields}]}


TEXT = {"type": "text", "text": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
OF_CHATS: list[tuple[dict[str, Any], str]] = [
    # fields, a part of the message
    ({"messages": []}, "messages is empty"),
    ({"messages": "hi"}, "messages is 'hi'; expected a list"),
    ({"messages": [{"role": "user"}]}, "no content"),
    (said("x", "robot"), "messages.0.role"),
    (said("x", "function", name="f"), "messages.0.role is 'function'"),
    (said(5), "messages.0.content is 5; expected a text or a list of"),
    (said(["x"]), "messages.0.content.0 is 'x'; expected an object"),
    (said([{"text": "x"}]), "messages.0.content.0.type is missing"),
    (said([TEXT, {"type": "text", "text": 5}]), "messages.0.content.1.text is 5; expected a text"),
    ({"tools": [{**TOOL, "more": 1}]}, "tools.0.more is not supported here"),
    (said("x", refusal="no"), "messages.0.refusal is not supported in"),
    (said("x", "assistant", audio={"id": "a"}), "messages.0.audio is not supported here"),
    (said("x", images=["data:"]), "messages.0.images is not supported here"),
    (said("x", attachments=[{"url": "a"}]), "messages.0.attachments is not supported here"),
    (said("x", "assistant", function_call={"name": "f"}), "messages.0.function_call is not supported"),
    (said("x y " * 300), "but the context holds 256"),
    ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function is missing"),
    ({"speculative": {"num_speculative_tokens": 4}}, "is 4; expected 0 (plain decoding) to 3, the server's K"),
    ({"speculative": {"num_speculative_tokens": -1}}, "is -1; expected 0"),
    ({"speculative": {"k": 1}}, "speculative.k is not supported"),
    ({"chat_template": "{{ 1 }}"}, "chat_template is not supported"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern is not supported"),
    ({"unheard_of": 1}, "unheard_of is not supported here (it is 1); leave it out"),
    ({"max_token": 1}, "max_token is not supported here (it is 1); did you mean max_tokens?"),
    ({"stream_options": {"include_usages": True}}, "(it is True); did you mean include_usage?"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]}, "did you mean parameters?"),
    ({"prompt": "hi"}, "prompt is not supported"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation is True; expected"),
    ({"stream_options": {"include_usage": True}}, "without stream"),
    ({"stream_options": 1}, "stream_options is 1; expected an object"),
    ({"user": 1}, "user is 1; expected a text"),
    ({"top_logprobs": 2}, "top_logprobs is given without"),
    ({"store": True}, "store is not supported here (it is True)"),
    ({"priority": 1}, "priority is not supported"),
    ({"skip_special_tokens": False}, "skip_special_tokens is not supported"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs is not supported"),
    ({"verbosity": "loud"}, "verbosity is 'loud'; expected 'low', 'medium' or 'high'"),
    ({"metadata": {"a": 1}}, "metadata.a is 1; expected a text"),
    ({"add_special_tokens": True}, "add_special_tokens is True; expected False"),
    ({"logprobs": True, "top_logprobs": 21}, "expected 0..20"),
    ({"logprobs": 3}, "logprobs is 3"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
    ({"max_completion_tokens": 300, "max_tokens": None}, "expected max_completion_tokens of at most"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort is 'extreme'"),
    ({"functions": [{}]}, "functions is not supported here (it is [{}]); send tools"),
    *(({name: "a"}, f"{name} is not supported here (it is 'a'); leave it out") for name in ("prompt", "conversation")),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"speculative": True}, "speculative is True"),
    *(({"prompt": prompt}, "prompt is empty") for prompt in ("", [""], [])),
    ({"prompt": [[]]}, "is empty"),
    ({"prompt": 5}, "prompt is 5; expected a text"),
    *(({"prompt": prompt}, "prompt") for prompt in ([1, "a"], [True])),
    *(({"prompt": [token]}, f"token id {token}; expected 0..319") for token in (-1, 320, 10**30)),
    ({"prompt": ["a"] * 65}, "65 prompts"),
    ({"prompt": ["a"] * 16, "n": 16}, "at once"),
    ({"prompt": "x y " * 300}, "has 1200 tokens, but the context holds 256"),
    ({"max_tokens": 300}, "expected max_tokens of at most"),
    *(({"max_tokens": limit}, f"max_tokens is {limit}") for limit in (0, -1, 2.5)),
    ({"max_tokens": -1, "echo": True}, "max_tokens is -1"),
    ({"min_tokens": 2}, "min_tokens is 2; expected at most 1"),
    ({"min_tokens": -1}, "min tokens are -1"),
    *(({"n": n}, f"n is {n!r}") for n in (0, -1, 129, "2", 1.5)),
    ({"n": 128}, "128 answers are requested at once; expected at most 66: ask for fewer"),
    *(({"temperature": value}, f"temperature is {value!r}") for value in (-0.1, "hot", True)),
    ({"temperature": -1, "top_p": 0}, "temperature is -1"),
    *(({"top_p": value}, f"top-p is {value}") for value in (-0.5, 1.5)),
    ({"top_k": -2}, "top-k is -2"),
    ({"min_p": 2}, "min-p is 2"),
    ({"seed": -(2**63) - 1}, "seed is -9223372036854775809; expected"),
    ({"seed": 1.5}, "seed is 1.5; expected an integer"),
    ({"presence_penalty": 3}, "presence penalty is 3"),
    ({"frequency_penalty": -3}, "frequency penalty is -3"),
    ({"repetition_penalty": 0}, "repetition penalty is 0"),
    *(({"logit_bias": {key: 1}}, "token ids as keys") for key in ("a", "-1", "１", "1_0", "9" * 5000)),
    ({"logit_bias": {"320": 1}}, "logit_bias holds token id 320"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit bias is set for 301 tokens"),
    ({"logprobs": 21}, "expected 0..20"),
    ({"stop": ""}, "is empty"),
    *(({"stop": ["a"] * count}, f"{count} stop strings") for count in (65, 500_000)),
    ({"stop": "a" * 1025}, "1025 characters"),
    ({"stop": 1}, "stop is 1; expected a text"),
    ({"stop_token_ids": [320]}, "stop_token_ids holds token id 320"),
    ({"stop_token_ids": list(range(17))}, "stop tokens"),
    ({"suffix": "x"}, "suffix is not supported"),
    ({"best_of": 2}, "best_of is not supported"),
    ({"functions": [{}]}, "functions is not supported here (it is [{}]); leave it out"),
]
BAD = [
    *((CHAT, *row) for row in OF_CHATS),
    *((COMPLETIONS, *row) for row in OF_COMPLETIONS),
    *((path, {"seed": 2**64}, "seed is 18446744073709551616; expected an integer of 64 bits") for path in GOOD),
]


@pytest.mark.parametrize(("path", "fields", "part"), BAD, ids=[f"{str(fields)[:40]}" for _, fields, _ in BAD])
def test_a_bad_field_is_refused_by_name(client: TestClient, path: str, fields: dict[str, Any], part: str) -> None:
    error = error_of(client.post(path, json={**GOOD[path], **fields}))
    assert part in error["message"]
    assert error["param"].partition(".")[0] in fields


@pytest.mark.parametrize(
    ("body", "part"),
    [
        *((body, "not valid JSON") for body in (b"", b"{", b"\xff\xfe", b'{"prompt": "\\ud800"}')),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        *((body, "expected a JSON object") for body in (b"[1]", b'"x"')),
        (b'{"prompt": "a", "temperature": NaN}', "temperature is nan"),
        (b'{"prompt": "a", "temperature": Infinity}', "temperature is inf"),
        (b'{"prompt": "a", "presence_penalty": -Infinity}', "presence_penalty is -inf"),
        (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "logit_bias.1 is nan"),
        (b'{"prompt": "a", "seed": 1e400}', "seed is inf"),
    ],
)
def test_a_bad_body_is_refused(client: TestClient, body: bytes, part: str) -> None:
    assert part in error_of(client.post(COMPLETIONS, content=body))["message"]


LONG = "é " * 20_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": ["a", LONG], "echo": True, "max_tokens": 0}),
        (CHAT, {"messages": [*said(LONG, "assistant")["messages"], *said("b")["messages"]]}),
        (RESPONSES, {"input": LONG}),
        ("/tokenize", {"prompt": LONG, "add_special_tokens": False}),
        ("/tokenize", said(LONG)),
    ],
)
def test_a_text_that_the_context_cannot_hold_is_refused_by_its_size(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    """Before it is encoded, for which all clients would wait: its tokens are not known exactly."""
    error = error_of(client.post(path, json=body))
    assert "has 60" in error["message"]
    assert "tokens or more, but the context holds 256 positions; expected at most 255 tokens" in error["message"]
    assert error["param"] in body
    assert error["code"] == "context_length_exceeded"


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
    """Before the type of any of them is checked."""
    assert part in error_of(client.post(path, json=body))["message"]


OF_TOKENIZERS: dict[str, Any] = {"/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}
HOSTILE: list[Any] = [
    *(0, 1, -(10**40), 1e308, True, "", "1", "\0"),
    *([], [[]], [None], [-1], ["a"], [{}]),
    *({}, {"a": 1}, {"1": 10**40}, {"role": "user", "content": {}}),
]


def post_all(client: TestClient, path: str, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """Post thousands of bodies within the server's event loop: the client changes threads eight times for each."""
    transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)

    async def post() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url=str(client.base_url)) as within:
            return [await within.post(path, json=body) for body in bodies]

    assert client.portal is not None
    return client.portal.call(post)


@pytest.mark.parametrize("path", [*BODIES, *OF_TOKENIZERS])
def test_no_value_of_any_field_is_more_than_an_error_object(client: TestClient, path: str) -> None:
    kind = (BODIES | OF_TOKENIZERS)[path]
    fields = [(field, value) for field in kind.model_fields for value in HOSTILE]
    fields += [(field, value) for field in ("other", *NEUTRAL) for value in HOSTILE[::5]]
    replies = post_all(client, path, [{**GOOD.get(path, {}), field: value} for field, value in fields])
    for (field, _), reply in zip(fields, replies, strict=True):
        has_its_type(reply)
        if reply.status_code != 200:
            error_of(reply, 404 if field == "model" and reply.status_code == 404 else 400)
    assert sum(reply.status_code == 200 for reply in replies) > (30 if path in BODIES else 0)
    assert client.get("/health").status_code == 200


def test_the_published_schema_names_each_field(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    for path, kind in BODIES.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert schemas[body.rpartition("/")[2]]["properties"].keys() == kind.model_fields.keys()
    names = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert names <= schemas.keys()


# --- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a\0b", "\u202eabc\u200d", "😀" * 20, "\x1b[2J", "\ufffe"])
def test_hostile_text_is_only_text(client: TestClient, text: str) -> None:
    tokens = answer(client, "/tokenize", {"prompt": text})["tokens"]
    assert answer(client, "/detokenize", {"tokens": tokens}) == {"prompt": text}
    answer(client, CHAT, {**said(text), "max_tokens": 1})
    answer(client, COMPLETIONS, {"prompt": text, "max_tokens": 1})


def test_an_integer_may_be_written_as_a_whole_number(client: TestClient) -> None:
    """As clients write it whose numbers all are floats."""
    fields = {"max_tokens": 3, "seed": 5, "n": 2, "top_k": 4, "min_tokens": 2, "logprobs": 1}
    fields |= {"speculative": {"num_speculative_tokens": 1}}
    reply = answer(client, COMPLETIONS, {**GOOD[COMPLETIONS], **fields})
    floats = json.loads(re.sub(r": (\d)", r": \1.0", json.dumps(fields)))
    assert floats["seed"] == 5.0
    again = answer(client, COMPLETIONS, {**GOOD[COMPLETIONS], **floats})
    assert again["choices"] == reply["choices"]


ALL: dict[str, list[Any]] = {  # values of fields that have no effect
    "metadata": [{"run": "1"}],
    "service_tier": ["auto", "default", "flex", "priority"],
    "prompt_cache_retention": ["in_memory", "24h"],
    "prompt_cache_options": [{"mode": "explicit"}],
    "stream": [False],
}
HINTS: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        **ALL,
        "verbosity": ["low", "medium", "high"],
        "prediction": [{"type": "content", "content": "hi"}],
        "top_logprobs": [0],
        "stream_options": [{}, {"include_usage": False}],
        "add_special_tokens": [False],
        "tool_choice": ["auto", "none"],
    },
    COMPLETIONS: {**ALL, "add_special_tokens": [True], "echo": [False]},
    RESPONSES: {
        **ALL,
        "text": [{"verbosity": "low"}, {"verbosity": "high", "format": {"type": "text"}}],
        "reasoning": [
            {"summary": "detailed"},
            {"generate_summary": "concise"},
            {"context": "auto", "mode": "standard"},
        ],
        "include": [["web_search_call.action.sources", "file_search_call.results"]],
        "max_tool_calls": [3],
        "top_logprobs": [0],
    },
}


def said_by(path: str, reply: dict[str, Any]) -> Any:
    """Return the text of a reply."""
    if path == RESPONSES:
        return reply["output"][0]["content"][0]["text"]
    (choice,) = reply["choices"]
    return choice["text"] if path == COMPLETIONS else choice["message"]


@pytest.mark.parametrize("path", BODIES)
def test_values_that_change_nothing_are_taken(client: TestClient, path: str) -> None:
    """Each gives the answer that the body has without it."""
    body = {**GOOD[path], "temperature": 0}
    plain = said_by(path, answer(client, path, body))
    for field in NEUTRAL.keys() - BODIES[path].model_fields.keys():
        for value in NEUTRAL[field]:
            assert said_by(path, answer(client, path, {**body, field: value})) == plain, (field, value)
    for field, values in HINTS[path].items():
        for value in values:
            assert said_by(path, answer(client, path, {**body, field: value})) == plain, (field, value)


def test_requests_are_logged_without_what_they_say(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(make(log=RequestLog(logging.getLogger("requests"))))
    with caplog.at_level(logging.INFO, "requests"):
        client.post(COMPLETIONS, json={"prompt": "secret words", "max_tokens": 3})
    (message,) = caplog.messages
    assert '"completion_tokens": 3' in message
    assert "secret" not in message


# --- routes, keys, hosts and sites ------------------------------------------------------------------------------------


def test_other_models_routes_and_methods_are_error_objects(client: TestClient) -> None:
    reply = client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "model": "gpt-4"})
    assert "expected 'toy'" in error_of(reply, 404)["message"]
    assert "'gpt-4' is not served" in error_of(client.get("/v1/models/gpt-4"), 404)["message"]
    assert client.get("/v1/models/toy").json() == client.get("/v1/models").json()["data"][0]
    assert "GET /v1/nothing: Not Found" in error_of(client.get("/v1/nothing"), 404)["message"]
    assert "Not Found" in error_of(client.post("/v1/embeddings", json={}), 404)["message"]
    assert "Method Not Allowed" in error_of(client.get(COMPLETIONS), 405)["message"]


def test_a_large_body_is_refused_before_it_is_read(make: Any) -> None:
    client = client_of(make(max_body=1000))
    without_length = (b" " * 600 for _ in range(2))
    for body in (b" " * 1001, without_length):
        assert "more than 1000 bytes" in error_of(client.post(COMPLETIONS, content=body), 413)["message"]
    answer(client, COMPLETIONS, GOOD[COMPLETIONS])


ROUTES = [
    *(("POST", path) for path in (*GOOD, "/tokenize", "/detokenize")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/toy", "/tokenizer_info", "/openapi.json", "/metrics")),
]


def test_every_route_that_works_needs_the_key(make: Any) -> None:
    client = client_of(make(keys=("first", "schlüssel")))
    wrong = [{}, {"Authorization": "Bearer other"}, {"Authorization": "Basic first"}, {"Authorization": "Bearer "}]
    for method, path in ROUTES:
        for headers in wrong:
            reply = client.request(method, path, headers=headers, json={})
            assert "key is missing or wrong" in error_of(reply, 401)["message"]
    for key in ("first", "schlüssel"):
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()}).status_code == 200
    assert client.get("/health").status_code == 200


def test_a_name_that_leads_to_this_machine_is_not_its_own(make: Any) -> None:
    """A page of evil.example whose address has become 127.0.0.1 has the origin and the host of evil.example."""
    client = client_of(make(hosts=("chat.example",)))
    for host in (
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
        "[",
        "a b",
        "",
    ):
        reply = client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers={"Host": host, "Origin": f"http://{host}"})
        assert "expected localhost" in error_of(reply, 403)["message"]
    for host in ("localhost:8000", "LOCALHOST", "127.0.0.1", "127.0.0.1:80", "[::1]:8000", "chat.example:8000"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_pages_of_other_sites_are_refused(client: TestClient) -> None:
    for origin in ("http://evil.example", "null", "http://testserver:81"):
        reply = client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers={"Origin": origin})
        assert "may not use" in error_of(reply, 403)["message"]
    assert client.get("/v1/models", headers={"Origin": "http://testserver"}).status_code == 200
    proxied = {"Origin": "https://public.example", "Sec-Fetch-Site": "same-origin"}
    assert client.get("/v1/models", headers=proxied).status_code == 200


def test_pages_of_sites_that_are_allowed_may_use_it(make: Any) -> None:
    """With the headers that browsers ask for; a preflight has no key."""
    client, allow = client_of(make(origins=("https://chat.example",), keys=("key",))), "access-control-allow-origin"
    key, origin, other = (
        {"Authorization": "Bearer key"},
        {"Origin": "https://chat.example"},
        {"Origin": "https://other.example"},
    )
    access = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = client.options(COMPLETIONS, headers={**origin, **access})
    assert (preflight.status_code, preflight.headers[allow]) == (200, "https://chat.example")
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert allow not in client.options(COMPLETIONS, headers={**other, **access}).headers
    private = {**access, "Access-Control-Request-Private-Network": "true"}  # of a public page, by Chromium
    preflight = client.options(COMPLETIONS, headers={**origin, **private})
    assert (preflight.status_code, preflight.headers["access-control-allow-private-network"]) == (200, "true")
    preflight = client.options(COMPLETIONS, headers={**other, **private})
    assert (preflight.status_code, allow in preflight.headers) == (400, False)
    reply = client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers={**origin, **key})
    assert (reply.status_code, reply.headers[allow]) == (200, "https://chat.example")
    assert "key" in error_of(client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers=origin), 401)["message"]
    assert "may not use" in error_of(client.post(COMPLETIONS, headers={**other, **key}), 403)["message"]
    reply = client_of(make(origins=("*",))).post(COMPLETIONS, json=GOOD[COMPLETIONS], headers=other)
    assert (reply.status_code, reply.headers[allow]) == (200, "*")
