"""Bodies as OpenAI's own client types them, and past messages as other servers and clients write them."""

import typing
from collections.abc import Callable, Iterator
from typing import Any

import pydantic
import pytest
from fastapi.testclient import TestClient
from openai.types import chat, shared_params
from openai.types import responses as of_responses
from openai.types.chat import chat_completion_custom_tool_param as custom_tool
from openai.types.responses import (
    namespace_tool_param,
)

from peagle.serve import bodies, response_bodies
from tests.support.harmony import USER, called, final, said, thought
from tests.support.servers import CHAT, RESPONSES, error_of

Prompt = Callable[..., str]
MARK = {"mode": "explicit"}
# what the client types and what the server reads, apart from past messages, whose unknown fields have no effect
KINDS: list[tuple[Any, type[pydantic.BaseModel]]] = [
    (chat.ChatCompletionFunctionToolParam, bodies.FunctionTool),
    (shared_params.FunctionDefinition, bodies.Function),
    (custom_tool.ChatCompletionCustomToolParam, bodies.CustomTool),
    (custom_tool.Custom, bodies.Custom),
    (custom_tool.CustomFormatGrammar, bodies.CustomFormat),
    (custom_tool.CustomFormatGrammarGrammar, bodies.Syntax),
    (chat.ChatCompletionNamedToolChoiceParam, bodies.NamedFunction),
    (of_responses.FunctionToolParam, response_bodies.OfferedFunction),
    (of_responses.CustomToolParam, response_bodies.OfferedCustom),
    (of_responses.NamespaceToolParam, response_bodies.Namespace),
    (namespace_tool_param.ToolFunction, response_bodies.OfferedFunction),
]


def names_of(kind: type[pydantic.BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


@pytest.mark.parametrize(("theirs", "ours"), KINDS)
def test_each_field_of_the_clients_types_is_known(theirs: Any, ours: type[pydantic.BaseModel]) -> None:
    assert theirs.__required_keys__ | theirs.__optional_keys__ <= names_of(ours)


def kinds_of(union: Any) -> Iterator[str]:
    """Yield the values of `type` in a union of typed dicts."""
    for kind in typing.get_args(union):
        yield from _literals(typing.get_type_hints(kind).get("type"))


def _literals(hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    else:
        for inner in typing.get_args(hint):
            yield from _literals(inner)


def test_each_tool_of_a_response_is_offered_or_left_out() -> None:
    known = set(kinds_of(of_responses.ToolParam))
    assert known - set(response_bodies.HOSTED) == {"function", "custom", "namespace"}


READ = {
    *("message", "reasoning", "function_call", "function_call_output"),
    "custom_tool_call",
    "custom_tool_call_output",
    "item_reference",
}


def test_each_item_of_a_response_is_read_or_refused_by_its_type(agent: TestClient) -> None:
    kinds = set(kinds_of(of_responses.ResponseInputItemParam))
    assert kinds > READ
    for kind in sorted(kinds - READ):
        reply = agent.post(RESPONSES, json={"input": [{"role": "user", "content": "a"}, {"type": kind}]})
        error = error_of(reply)
        assert error["message"].startswith(f"input.1.type is '{kind}'; ")
        assert (error["param"], error["code"]) == ("input.1.type", "unsupported_parameter")


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
CUSTOM = {"id": "b", "type": "custom", "custom": {"name": "g", "input": "x"}}
TEXT = {"type": "text", "text": "a", "prompt_cache_breakpoint": MARK, "cache_control": {"type": "ephemeral"}}
NULLS = {"audio": None, "function_call": None, "refusal": None, "annotations": [], "parsed": None}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": [TEXT], "name": "s"}, {"role": "developer", "content": "b", "name": "d"}],
    [{"role": "user", "content": [TEXT, TEXT], "name": "bob", "cache_control": {"type": "ephemeral"}}],
    [{"role": "assistant", "content": "a", "name": "n", **NULLS}, {"role": "user", "content": "b"}],
    [{"role": "assistant", "content": [TEXT, {"type": "refusal", "refusal": "no"}], **NULLS}],
    [{"role": "assistant", "content": None, **NULLS, "refusal": "no"}, {"role": "user", "content": "b"}],
    [
        {"role": "assistant", "content": None, **NULLS, "tool_calls": [CALL, CUSTOM], "parsed": {"a": 1}},
        {"role": "tool", "tool_call_id": "b", "content": [TEXT]},
        {"role": "tool", "tool_call_id": "a", "content": "y"},
        {"role": "developer", "content": "later"},
        {"role": "user", "content": "go on"},
    ],
]


INPUT_TEXT = {"type": "input_text", "text": "a", "prompt_cache_breakpoint": MARK}
MESSAGE = {"type": "message", "status": "completed", "phase": None}
OUTPUT = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [], "parsed": {"a": 1}}
DIRECT = {"type": "direct"}
CALL_ITEM = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
RESULT_ITEM = {"type": "function_call_output", "call_id": "a", "output": "x"}
ITEMS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "phase": "final_answer"}],
    [{**MESSAGE, "role": "developer", "content": [INPUT_TEXT]}],
    [{**MESSAGE, "role": "assistant", "id": "m", "content": [OUTPUT, {"type": "refusal", "refusal": "no"}]}],
    [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": None},
        {"type": "function_call", "id": "c", "call_id": "a", "name": "f", "arguments": "{}", "status": "completed",
         "caller": DIRECT, "namespace": "n", "async": False, "parsed_arguments": {}},
        {"type": "custom_tool_call", "id": "d", "call_id": "b", "name": "g", "input": "x", "caller": DIRECT},
        {"role": "user", "content": "and"},
        {"type": "custom_tool_call_output", "id": "e", "call_id": "b", "output": [INPUT_TEXT]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call_output", "id": None, "call_id": "a", "output": "r", "name": "f", "namespace": "n",
         "caller": DIRECT, "status": "completed"},
    ],
]  # fmt: skip


def with_more(value: Any) -> Any:
    """Add fields that nobody knows to each object."""
    if isinstance(value, list):
        return [with_more(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {**{key: with_more(inner) for key, inner in value.items()}, "unheard_of": {"a": [1]}, "index": "x"}


@pytest.mark.parametrize("messages", CHATS)
def test_a_chat_is_read_without_the_fields_of_other_servers(prompt: Prompt, messages: list[Any]) -> None:
    assert prompt(messages=with_more(messages)) == prompt(messages=messages)


@pytest.mark.parametrize("items", ITEMS)
def test_a_response_is_read_without_the_fields_of_other_servers(prompt: Prompt, items: list[Any]) -> None:
    assert prompt(input=with_more(items)) == prompt(input=items)


def parts(*texts: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Make parts of (type, field, text)."""
    return [{"type": kind, field: text} for kind, field, text in texts]


FUNCTION = {"name": "f", "arguments": "{}"}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "x", "is_error": False}
# a past message as it comes back from clients of other servers, with the result of its call; the prompt after USER
THEIRS: dict[str, tuple[dict[str, Any], str]] = {
    "OpenRouter": (
        {"content": "", "refusal": None, "reasoning": "Hm.", "tool_calls": [{**CALL, "index": 0}],
         "reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "format": "unknown", "index": 0}]},
        thought("Hm.") + called("f"),
    ),
    "LiteLLM": (
        {"content": None, "function_call": None, "provider_specific_fields": {"refusal": None}, "audio": {},
         "reasoning_content": "Hm.", "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}],
         "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION, "provider_specific_fields": {"s": 1}}]},
        thought("Hm.") + called("f"),
    ),
    "Gemini": (
        {"tool_calls": [{"id": "a", "function": FUNCTION, "extra_content": {"google": {"thought_signature": "s"}}}]},
        called("f"),
    ),
    "Anthropic's blocks": (
        {"content": parts(("thinking", "thinking", "Hm."), ("text", "text", "So."), ("redacted_thinking", "data", "s")),
         "tool_calls": [CALL]},
        thought("Hm.\n\nSo.") + called("f"),
    ),
    "LangChain's blocks": (
        {"content": parts(("reasoning", "reasoning", "Hm."), ("text", "text", "So.")), "tool_calls": [CALL]},
        thought("Hm.\n\nSo.") + called("f"),
    ),
    "AI SDK": ({"content": parts(("reasoning", "text", "Hm."), ("text", "text", "So."))}, final("So.")),
    "Agents SDK for JS": (
        {"id": "m", "content": [{"type": "output_text", "text": "So.", "role": "assistant", "refusal": None}]},
        final("So."),
    ),
    "a choice": ({"content": "So.", "finish_reason": "stop", "index": 0, "annotations": [{"type": "x"}]}, final("So.")),
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_a_past_message_of_another_server_is_read(prompt: Prompt, name: str) -> None:
    message, written = THEIRS[name]
    results = [RESULT] if "tool_calls" in message else []
    text = prompt(messages=[*USER, {"role": "assistant", **message}, *results])
    assert text.endswith(f"{said('hello')}{written}<|start|>assistant")


def test_reasoning_in_parts_of_a_past_response_is_read(prompt: Prompt) -> None:
    content = parts(("reasoning", "text", "Hm."), ("output_text", "text", "So."), ("input_text", "text", " Yes."))
    items = [{"role": "assistant", "content": content}, CALL_ITEM, {**RESULT_ITEM, "is_error": True}]
    text = prompt(input=[*USER, *items])
    assert text.endswith(f"{thought('Hm.' + chr(10) * 2 + 'So. Yes.')}{called('f')}<|start|>assistant")


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "data:,"}}),
        (CHAT, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
        (CHAT, {"type": "file", "file": {"file_id": "a"}}),
        (RESPONSES, {"type": "input_image", "detail": "auto", "image_url": "data:,"}),
        (RESPONSES, {"type": "input_file", "file_id": "a"}),
    ],
)
def test_a_part_that_is_no_text_is_named_with_its_field(agent: TestClient, path: str, part: dict[str, Any]) -> None:
    field, text = ("messages", TEXT) if path == CHAT else ("input", {"type": "input_text", "text": "a"})
    error = error_of(agent.post(path, json={field: [{"role": "user", "content": [text, part]}]}))
    assert error["message"].startswith(f"{field}.0.content.1.type is '{part['type']}'; expected ")
    assert error["param"] == f"{field}.0.content.1.type"
