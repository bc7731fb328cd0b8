"""Bodies as OpenAI's own client types them: no field of a message, an item or a tool is unknown here."""

import typing
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic
import pytest
from fastapi.testclient import TestClient
from openai.types import chat, shared_params
from openai.types import responses as of_responses
from openai.types.chat import chat_completion_custom_tool_param as custom_tool
from openai.types.chat import chat_completion_message_custom_tool_call_param as custom_call
from openai.types.chat import chat_completion_message_function_tool_call_param as function_call
from openai.types.responses import (
    namespace_tool_param,
    response_custom_tool_call_output_param,
    response_input_item_param,
    response_reasoning_item_param,
)

from peagle.serve import bodies, response_bodies
from tests.support.servers import CHAT, RESPONSES, answer, error_of

MARK = {"mode": "explicit"}
# what the client types, what the server reads, fields that only null or nothing may be in
KINDS: list[tuple[Any, type[pydantic.BaseModel], set[str]]] = [
    (chat.ChatCompletionDeveloperMessageParam, bodies.ChatMessage, set()),
    (chat.ChatCompletionSystemMessageParam, bodies.ChatMessage, set()),
    (chat.ChatCompletionUserMessageParam, bodies.ChatMessage, set()),
    (chat.ChatCompletionAssistantMessageParam, bodies.ChatMessage, {"audio", "function_call"}),
    (chat.ChatCompletionToolMessageParam, bodies.ChatMessage, set()),
    (chat.ChatCompletionContentPartTextParam, bodies.TextPart, set()),
    (chat.ChatCompletionContentPartRefusalParam, bodies.RefusalPart, set()),
    (function_call.ChatCompletionMessageFunctionToolCallParam, bodies.PastFunctionCall, set()),
    (function_call.Function, bodies.CalledFunction, set()),
    (custom_call.ChatCompletionMessageCustomToolCallParam, bodies.PastCustomCall, set()),
    (custom_call.Custom, bodies.CalledCustom, set()),
    (chat.ChatCompletionFunctionToolParam, bodies.FunctionTool, set()),
    (shared_params.FunctionDefinition, bodies.Function, set()),
    (custom_tool.ChatCompletionCustomToolParam, bodies.CustomTool, set()),
    (custom_tool.Custom, bodies.Custom, set()),
    (custom_tool.CustomFormatGrammar, bodies.CustomFormat, set()),
    (custom_tool.CustomFormatGrammarGrammar, bodies.Syntax, set()),
    (chat.ChatCompletionNamedToolChoiceParam, bodies.NamedFunction, set()),
    (of_responses.EasyInputMessageParam, response_bodies.InputMessage, set()),
    (response_input_item_param.Message, response_bodies.InputMessage, set()),
    (of_responses.ResponseOutputMessageParam, response_bodies.InputMessage, set()),
    (of_responses.ResponseInputTextParam, response_bodies.InputText, set()),
    (of_responses.ResponseOutputTextParam, response_bodies.PastText, set()),
    (of_responses.ResponseOutputRefusalParam, bodies.RefusalPart, set()),
    (of_responses.ResponseFunctionToolCallParam, response_bodies.InputCall, set()),
    (response_input_item_param.FunctionCallOutput, response_bodies.InputResult, set()),
    (of_responses.ResponseCustomToolCallParam, response_bodies.InputCustomCall, set()),
    (response_custom_tool_call_output_param.ResponseCustomToolCallOutputParam, response_bodies.InputResult, set()),
    (of_responses.ResponseReasoningItemParam, response_bodies.InputReasoning, set()),
    (response_input_item_param.ItemReference, response_bodies.ItemReference, set()),
    (response_reasoning_item_param.Content, response_bodies.ReasoningText, set()),
    (of_responses.FunctionToolParam, response_bodies.OfferedFunction, set()),
    (of_responses.CustomToolParam, response_bodies.OfferedCustom, set()),
    (of_responses.NamespaceToolParam, response_bodies.Namespace, set()),
    (namespace_tool_param.ToolFunction, response_bodies.OfferedFunction, set()),
]


def names_of(kind: type[pydantic.BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


@pytest.mark.parametrize(("theirs", "ours", "refused"), KINDS)
def test_each_field_of_the_clients_types_is_known(
    theirs: Any, ours: type[pydantic.BaseModel], refused: set[str]
) -> None:
    fields = theirs.__required_keys__ | theirs.__optional_keys__
    assert fields - names_of(ours) == refused


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
    assert known - set(bodies.HOSTED) == {"function", "custom", "namespace"}


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


@pytest.mark.parametrize("messages", CHATS)
def test_messages_with_all_their_fields_are_taken(agent: TestClient, messages: Sequence[dict[str, Any]]) -> None:
    answer(agent, CHAT, {"messages": messages, "max_tokens": 1})


INPUT_TEXT = {"type": "input_text", "text": "a", "prompt_cache_breakpoint": MARK}
MESSAGE = {"type": "message", "status": "completed", "phase": None}
OUTPUT = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [], "parsed": {"a": 1}}
DIRECT = {"type": "direct"}
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


@pytest.mark.parametrize("items", ITEMS)
def test_items_with_all_their_fields_are_taken(agent: TestClient, items: Sequence[dict[str, Any]]) -> None:
    answer(agent, RESPONSES, {"input": items, "max_output_tokens": 1})


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
