"""/v1/responses: what the model reads, what the openai client gets, whole and in a stream, and what is refused."""

import json
import logging
from collections.abc import Callable
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from peagle.serve.request_log import RequestLog
from peagle.serve.shared_state import SharedState
from peagle.text.tokenizer import Tokenizer
from tests.support.harmony import USER, called, final, instructed, said, thought
from tests.support.servers import CHAT, MODEL, RESPONSES, answer, client_of, error_of, openai_of, stream

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Says it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": []},
    "strict": False,
}
CHAT_TOOL = {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}
BODY: dict[str, Any] = {"input": "hello", "temperature": 0}
TOOLS: dict[str, Any] = {**BODY, "tools": [TOOL]}
THINKS = "<|channel|>analysis<|message|>Größer?<|end|><|start|>assistant"
LOOKS = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALLS = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "x"}<|call|>'
TEXT = "The 東京 answer."
SAYS = f"{THINKS}<|channel|>final<|message|>{TEXT}<|return|>"
Making = Callable[..., SharedState]
Prompt = Callable[..., str]


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}", **fields}


def result(call_id: str, output: Any = "x") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def output(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


# --- what the model reads ---------------------------------------------------------------------------------------------

GO_ON = {"role": "user", "content": "go on"}
HI, ON = said("hello"), said("go on")
# items after a user's first message, and the prompt after it
HISTORIES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "results in another order": (
        [reasoning("Both."), call("a"), call("b"), result("b", "y"), result("a")],
        thought("Both.") + called("a") + called("b", result="y"),
    ),
    "a result after each call": ([call("a"), result("a"), call("b"), result("b")], called("a") + called("b")),
    "a message before the results": ([call("a"), GO_ON, result("a")], called("a") + ON),
    "a call between a call and its result": (
        [call("a"), call("b"), result("a"), reasoning("More."), call("c"), result("b"), result("c")],
        called("a") + called("b") + thought("More.") + called("c"),
    ),
    "an id used again": (
        [call("a"), result("a"), output("Done."), GO_ON, call("a"), result("a", "y")],
        called("a") + final("Done.") + ON + called("a", result="y"),
    ),
    "reasoning alone": ([reasoning("Hm."), output("Done."), GO_ON], final("Done.") + ON),
    "reasoning without its text": (
        [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None}, call("a"), result("a")],
        called("a"),
    ),
    "reasoning and a message before a call": (
        [reasoning("I look. "), output("Let me see."), reasoning("Now."), call("a"), result("a")],
        thought("I look. Now.\n\nLet me see.") + called("a"),
    ),
    "two messages": (
        [output("Done."), {"role": "assistant", "content": "And more."}],
        final("Done.") + final("And more."),
    ),
    "a result of parts": (
        [call("a"), result("a", [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}])],
        called("a", result="xy"),
    ),
    "a refusal": (
        [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "Done."}]}, GO_ON],
        final("Done.") + ON,
    ),
    "a message with its id and status": (
        [{**output("Done."), "id": "msg_1", "status": "completed"}, {**GO_ON, "type": "message"}],
        final("Done.") + ON,
    ),
    "instructions in the midst": (
        [output("Done."), {"role": "developer", "content": "Be kind."}, GO_ON],
        final("Done.") + instructed("Be kind.") + ON,
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_are_taken_in_any_order(prompt: Prompt, name: str) -> None:
    items, written = HISTORIES[name]
    assert prompt(input=[*USER, *items]).endswith(f"<|end|>{HI}{written}<|start|>assistant")


SYSTEM, DEVELOPER = ({"role": role, "content": f"As {role}."} for role in ("system", "developer"))
NAMED = {"type": "function", "name": "get_weather"}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"instructions": "Be brief."}, instructed("Be brief.\n\n")),
        ({"instructions": "Be brief.", "input": [SYSTEM]}, instructed("Be brief.\n\nAs system.\n\n")),
        (
            {"instructions": "Be brief.", "input": [SYSTEM, DEVELOPER, *USER]},
            instructed("Be brief.\n\nAs system.\n\nAs developer.\n\n") + HI,
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "Reasoning: low"),
        ({"tools": [TOOL]}, "// Says it.\ntype get_weather = (_: {\ncity?: string,\n}) => any;"),
        ({"tools": [TOOL], "tool_choice": "none"}, "final. Channel must be included for every message.<|end|>" + HI),
        ({"tools": [TOOL], "tool_choice": NAMED}, " to=functions.get_weather<|channel|>commentary json<|message|>"),
    ],
)
def test_parameters_reach_the_prompt(prompt: Prompt, fields: dict[str, Any], part: str) -> None:
    assert part in prompt(**{"input": "hello", **fields})


@pytest.mark.parametrize("written", [LOOKS + CALLS, THINKS + THINKS + CALLS, THINKS + LOOKS + THINKS + CALLS])
def test_a_servers_own_output_comes_back_as_in_a_chat(saying: Making, prompt: Prompt, written: str) -> None:
    client = client_of(saying((TOOLS, THINKS + written)))
    (choice,) = answer(client, CHAT, {"messages": USER, "tools": [CHAT_TOOL], "temperature": 0})["choices"]
    message = {key: value for key, value in choice["message"].items() if value is not None}
    rain = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    items = answer(client, RESPONSES, TOOLS)["output"]
    text = prompt(input=[*USER, *items, result(items[-1]["call_id"], "rain")], tools=[TOOL])
    assert text == prompt(messages=[*USER, message, rain], tools=[CHAT_TOOL])
    assert [text.count(part) for part in ("Größer?", "I look.")] == [
        (THINKS + written).count(part) for part in ("Größer?", "I look.")
    ]


# --- what clients get -------------------------------------------------------------------------------------------------


def test_a_response_has_reasoning_text_and_usage(saying: Making, harmony: Tokenizer) -> None:
    client = openai_of(saying((BODY, SAYS)))
    response = client.responses.create(model=MODEL, **BODY, store=False)
    assert (response.status, response.error, response.output_text) == ("completed", None, TEXT)
    thinks, message = response.output
    assert (thinks.type, [part.text for part in thinks.content]) == ("reasoning", ["Größer?"])  # type: ignore[union-attr]
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")  # type: ignore[union-attr]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len(harmony.encode("Größer?"))
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


EVENTS = """\
response.created
response.in_progress
response.output_item.added
response.content_part.added
response.reasoning_text.delta
response.reasoning_text.done
response.content_part.done
response.output_item.done
response.output_item.added
response.content_part.added
response.output_text.delta
response.output_text.done
response.content_part.done
response.output_item.done
response.completed
"""


def test_the_events_are_in_order_and_make_the_response(saying: Making) -> None:
    with openai_of(saying((BODY, SAYS))).responses.stream(model=MODEL, **BODY) as received:
        events = list(received)
        response = received.get_final_response()
    kinds = [event.type for event in events]
    assert [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before] == EVENTS.split()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text == TEXT
    assert len(deltas) > 3
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] == [item.id for item in response.output]
    assert (added[1].content, done[1].content[0].text) == ([], TEXT)  # type: ignore[union-attr]


def test_an_answer_that_the_limit_cuts_is_incomplete(saying: Making) -> None:
    client = openai_of(saying((BODY, SAYS)))
    options: Any = {"model": MODEL, **BODY, "max_output_tokens": 12}
    *_, last = client.responses.create(**options, stream=True)
    assert last.type == "response.incomplete"
    for response in (client.responses.create(**options), last.response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.usage.output_tokens == 12
        assert response.output[-1].status == "incomplete"


def test_parameters_reach_the_engine(client: TestClient) -> None:
    """Over the toy target, whose answers a temperature changes."""

    def text(**fields: Any) -> str:
        return answer(client, RESPONSES, {**BODY, "max_output_tokens": 40, **fields})["output"][-1]["content"][0][
            "text"
        ]

    seeded = {"temperature": 1.5, "seed": 3}
    assert len({text(), text(**seeded), text(**{**seeded, "seed": 4}), text(**seeded, top_p=0.5)}) == 4
    assert text(**seeded) == text(**seeded)
    k = {"speculative": {"num_speculative_tokens": 1}}
    assert text() == text(**k)
    echoed = answer(client, RESPONSES, {**BODY, **k, "metadata": {"a": "b"}, "user": "me", "instructions": None})
    assert echoed["metrics"]["speculative_decoding"]["num_spec_tokens"] == 1
    assert (echoed["metadata"], echoed["user"], echoed["store"]) == ({"a": "b"}, "me", False)


JSON = '{"city": "東京", "days": 2}'
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema", [None, OBJECT, {**OBJECT, "required": ["city"], "properties": {"city": {"enum": ["x"]}}}]
)
def test_the_format_of_the_text_binds_the_final_message_as_in_a_chat(
    saying: Making, schema: dict[str, Any] | None
) -> None:
    client = client_of(saying((BODY, f"{THINKS}<|channel|>final<|message|>{JSON}<|return|>")))
    schemas = {"name": "n", "schema": schema}
    of_response = {"type": "json_object"} if schema is None else {"type": "json_schema", **schemas}
    of_chat = of_response if schema is None else {"type": "json_schema", "json_schema": schemas}
    chat = {"messages": USER, "temperature": 0, "max_tokens": 90, "response_format": of_chat}
    (choice,) = answer(client, CHAT, chat)["choices"]
    response = answer(client, RESPONSES, {**BODY, "max_output_tokens": 90, "text": {"format": of_response}})
    assert response["output"][-1]["content"][0]["text"] == choice["message"]["content"]
    assert response["text"]["format"] == of_response
    assert (choice["message"]["content"] == JSON) == (schema is None)


@pytest.mark.parametrize("parallel", [True, False])
def test_several_calls_and_only_the_first_without_parallel_calls(saying: Making, parallel: bool) -> None:
    client = client_of(saying((TOOLS, THINKS + CALLS.replace("<|call|>", "<|end|><|start|>assistant") + CALLS)))
    response = answer(client, RESPONSES, {**TOOLS, "parallel_tool_calls": parallel})
    assert [item["type"] for item in response["output"]] == ["reasoning"] + ["function_call"] * (1 + parallel)


@pytest.mark.parametrize("to", ["functions.crm.get", "crm.get"])
def test_a_tool_of_a_namespace_is_called_by_both_names(saying: Making, prompt: Prompt, to: str) -> None:
    namespace = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [{**TOOL, "name": "get"}]}
    body = {**BODY, "tools": [TOOL, namespace]}
    client = client_of(saying((body, f"<|channel|>commentary to={to} json<|message|>{{}}<|call|>")))
    assert "// Customers.\nSays it.\ntype crm.get = (_: {\n" in prompt(**body)
    (item,) = answer(client, RESPONSES, body)["output"]
    assert (item["name"], item["namespace"], item["arguments"]) == ("get", "crm", "{}")
    assert called("crm.get") in prompt(**{**body, "input": [*USER, item, result(item["call_id"])]})


# as Codex asks: instructions, what it may do, where it is, what to do; its shell, its patches, and what OpenAI hosts
PATCH = '*** Begin Patch\n*** Add File: größe.txt\n+"x"\n*** End Patch\n'
CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/</cwd>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    ],
    "tools": [
        {**TOOL, "name": "shell", "output_schema": {"type": "object"}, "defer_loading": False},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files. Do not wrap the patch in JSON.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin"},
        },
        {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "", "parameters": {"type": "object"}},
        {"type": "namespace", "name": "functions", "description": "", "tools": [{**TOOL, "name": "plan"}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "client_metadata": {"session": "1"},
}


INPUT = "response.custom_tool_call_input"


@pytest.mark.parametrize("argument", [json.dumps({"input": PATCH}), PATCH])
def test_codex_calls_its_tools(saying: Making, prompt: Prompt, argument: str, caplog: pytest.LogCaptureFixture) -> None:
    plans = "<|channel|>commentary to=functions.plan json<|message|>{}<|end|><|start|>assistant"
    patches = f"<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>{argument}<|call|>"
    body = {**CODEX, "temperature": 0}
    text = prompt(**body)
    assert "# Instructions\n\nYou are a coding agent.\n\nAsk before.\n\n# Tools" in text
    assert [name in text for name in ("shell = ", "apply_patch = ", "plan = ", "web", "image")] == [True] * 3 + [
        False
    ] * 2
    client = client_of(saying((body, THINKS + plans + patches), log=RequestLog(logging.getLogger("notes"))))
    with caplog.at_level(logging.INFO, "notes"):
        events, _ = stream(client, RESPONSES, body), stream(client, RESPONSES, body)
    assert [json.loads(message)["note"] for message in caplog.messages if '"note"' in message] == [  # each once
        "tools of the type web_search are not available here: they are left out",
        "tools of the type image_generation are not available here: they are left out",
        "tools of the type tool_search are not available here: they are left out",
        "the prompt shows grammars of custom tools to the model; they do not constrain the inputs",
    ]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    thinks, plan, patch = items
    assert thinks["type"] == "reasoning"
    assert (plan["type"], plan["name"], plan["namespace"]) == ("function_call", "plan", "functions")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert "".join(event["delta"] for event in events if event["type"] == f"{INPUT}.delta") == PATCH
    assert [event["input"] for event in events if event["type"] == f"{INPUT}.done"] == [PATCH]
    assert (events[-1]["type"], events[-1]["response"]["output"]) == ("response.completed", items)
    assert openai.types.responses.Response.model_validate(events[-1]["response"]).output[2].type == "custom_tool_call"

    # its next turn
    patched = {"type": "custom_tool_call_output", "call_id": patch["call_id"], "name": "apply_patch", "output": "ok"}
    again = prompt(**{**body, "input": [*CODEX["input"], *items, patched, result(plan["call_id"], "planned")]})
    written = called("apply_patch", json.dumps({"input": PATCH}, ensure_ascii=False), "ok")
    assert again.endswith(thought("Größer?") + called("plan", result="planned") + written + "<|start|>assistant")


# --- what is refused --------------------------------------------------------------------------------------------------

IMAGE = {"role": "user", "content": [{"type": "input_image"}]}
LARK = {"type": "grammar", "syntax": "lark"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # fields of the body, the field that is named, a part of the message
    ({"store": True}, "store", "is true, but no responses are kept here; set it to false"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "; send the whole conversation in input"),
    ({"conversation": "c"}, "conversation", "is not supported here (it is 'c'); send its items in input, or a prev"),
    ({"prompt": {"id": "a"}}, "prompt", "send its text in instructions or input"),
    ({"background": True}, "background", "is not supported"),
    ({"truncation": "none"}, "truncation", "is not supported"),
    ({"truncation": "auto", "input": "x" * 3000}, "input", "the prompt has 3228 tokens"),
    ({"n": 2}, "n", "is not supported"),
    ({"include": ["everything"]}, "include.0", "is 'everything'; expected"),
    ({"top_logprobs": 2}, "top_logprobs", "is given without 'message.output_text.logprobs'"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "is 'loud'; expected 'low', 'medium' or 'high'"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "is 'xml'"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "is missing; expected it with"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema", "is given with the type 'text'"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#/x"}}}},
        *("text.format.schema", "the JSON schema"),
    ),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort", "is 'extreme'; expected 'none', 'minimal', 'low'"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "is 'long'; expected 'auto', 'concise' or 'detailed'"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "is 'all_turns'; expected 'auto' or 'current_turn'"),
    ({"tools": [{"type": "browse"}]}, "tools.0.type", "is 'browse'; expected 'function', 'custom', 'namespace' or"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name", "is 'a b'"),
    ({"tools": [{**TOOL, "parameters": {"type": "null"}}]}, "tools.0.parameters.type", "is 'null'; expected 'object'"),
    (
        {"tools": [{**TOOL, "strict": True, "parameters": {"$ref": "#/x", "properties": {}}}]},
        *("tools.0.parameters", "the JSON schema cannot be used"),
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{**TOOL, "name": "a b"}]}]},
        *("tools.0.tools.0.name", "is 'n.a b'"),
    ),
    ({"tools": [{"type": "custom", "name": "n", "format": LARK}]}, "tools.0.format.definition", "is missing"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "is 'mcp'; expected 'function' or 'custom'"),
    ({"tool_choice": "required"}, "tool_choice", "is given without tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "is given without tools"),
    (
        {"tools": [{"type": "custom", "name": "n"}], "tool_choice": {"type": "custom", "name": "other"}},
        *("tool_choice", "names 'other', which is not among the tools"),
    ),
    ({"input": 5}, "input", "is 5; expected a text or a list of items"),
    ({"input": []}, "input", "is empty"),
    ({"input": [{"type": "item_reference"}]}, "input.0.id", "is missing"),
    ({"input": [{"type": "web_search_call"}]}, "input.0.type", "is 'web_search_call'; expected 'message', 'function_"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "is 'robot'"),
    ({"input": [IMAGE]}, "input.0.content.0.type", "is 'input_image'; expected"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input.0.arguments", "is missing"),
    ({"input": [result("a")]}, "input", "input.0 is a tool's result, but no call precedes it"),
    ({"input": [call("a")]}, "input", "input.0 has no result; send a function_call_output with the call_id 'a'"),
    (
        {"input": [call("a"), result("a"), result("a")]},
        "input.2.call_id",
        "is 'a'; expected the id of a call before it",
    ),
    (
        {"instructions": "Be brief.", "input": [SYSTEM, *USER, reasoning("x"), call("a"), call("a")]},
        *("input.4.call_id", "is 'a', but an earlier call has this id"),
    ),
    ({"input": [GO_ON] * 3000}, "input", "3000 items and parts are given; expected at most 512"),
    ({"max_output_tokens": 0}, "max_output_tokens", "is 0"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "expected max_output_tokens of at most"),
    ({"temperature": -1}, "temperature", "is -1"),
]


@pytest.mark.parametrize(("fields", "field", "part"), REFUSED)
def test_impossible_body_is_refused_by_field(agent: TestClient, fields: dict[str, Any], field: str, part: str) -> None:
    error = error_of(agent.post(RESPONSES, json={**BODY, **fields}))
    assert error["param"] == field
    assert part in error["message"]
