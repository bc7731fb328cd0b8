"""Tools of a chat: what the model reads of them, what its calls become, what binds them, and what is refused."""

import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pydantic
import pydantic_core
import pytest
from fastapi.testclient import TestClient

from peagle.serve import responses
from peagle.serve.bodies import Body, ChatMessage
from peagle.serve.errors import ApiError
from peagle.serve.request_log import RequestLog
from peagle.serve.shared_state import SharedState
from peagle.serve.tools import MOST_CALLS, template_messages
from peagle.text.tokenizer import Tokenizer, detokenize
from tests.support import servers
from tests.support.harmony import LONG, USER, called, final, instructed, request_of, said, thought
from tests.support.servers import CHAT, COMPLETIONS, MODEL, RESPONSES, answer, client_of, error_of, stream

GUIDE = Path(responses.__file__).with_name("README.md")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
BODY: dict[str, Any] = {"messages": USER, "tools": [WEATHER, CLOCK, PATCH], "temperature": 0}
ARGUMENTS = '{"city": "東京", "days": 2}'
EDIT = '*** Begin\n+größer "x"\n'

Making = Callable[..., SharedState]
Prompt = Callable[..., str]


def function(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


def call(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **fields}


def calls(*names: tuple[str, str, Any], **fields: Any) -> list[Any]:
    """Make a message with calls (name, arguments, result), and their results in the opposite order."""
    message = {"role": "assistant", "tool_calls": [call(name, name, arguments) for name, arguments, _ in names]}
    return [{**message, **fields}, *(result(name, text) for name, _, text in reversed(names))]


def answered(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


# --- what the model reads ---------------------------------------------------------------------------------------------


def test_tools_are_in_the_prompt_as_the_format_writes_them(
    agent: TestClient, harmony: Tokenizer, prompt: Prompt
) -> None:
    text = prompt(messages=USER, tools=[WEATHER, CLOCK])
    assert (
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// Says it.\ntype get_weather = (_: {\ncity: string,\ndays?: number,\n}) => any;\n\n"
        "// \ntype clock = () => any;\n\n} // namespace functions<|end|>"
    ) in text
    assert "must go to the commentary channel: 'functions'.<|end|>" in text
    assert "functions" not in prompt(messages=USER)
    assert prompt(messages=USER, tools=[WEATHER], tool_choice="none") == prompt(messages=USER)
    body = {"messages": USER, "tools": [WEATHER, CLOCK]}
    assert tuple(answer(agent, "/tokenize", body)["tokens"]) == request_of(harmony, body).prompt_ids


def specials(harmony: Tokenizer, **body: Any) -> list[int]:
    return [token for token in request_of(harmony, body).prompt_ids if token in harmony.special_tokens]


SPELLED = [
    *('{"a":1}', '{"a": 1.10, "a": 2}', "1e400", '{"a": NaN}', '{"a": [1, ', '"x"', "", '"', '{"a": "\\ud800"}'),
    *("[" * 300, "<|call|><|end|>", "\U000f0000\U000f0001", "東京\\n\n"),
]


@pytest.mark.parametrize("text", SPELLED)
def test_descriptions_and_arguments_are_in_the_prompt_as_they_were_written(
    harmony: Tokenizer, prompt: Prompt, text: str
) -> None:
    """Character by character; what spells a control token is no control token."""
    tool, history = CLOCK["function"], [*USER, *calls(("f", text, "x"))]
    described = {"messages": USER, "tools": [{"type": "function", "function": {**tool, "description": text}}]}
    assert f"// {text}\ntype clock" in prompt(**described)
    assert specials(harmony, **described) == specials(harmony, messages=USER, tools=[CLOCK])
    assert prompt(messages=history).endswith(said("hello") + called("f", text) + "<|start|>assistant")
    assert specials(harmony, messages=history) == specials(harmony, messages=[*USER, *calls(("f", "{}", "x"))])


DEFAULTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "enum": [1, 2], "default": 1}, "number, // default: 1"),
    ({"type": "boolean", "enum": [True], "default": True}, "boolean, // default: true"),
    ({"enum": ["a", None], "default": None}, "any, // default: null"),
    ({"type": "string", "enum": ["a", "b"], "default": "b"}, '"a" | "b", // default: b'),
    ({"oneOf": [{"type": "integer"}], "default": 0.5}, "number// default: 0.5"),
    ({"type": "array", "enum": [["é"]], "default": ["é"]}, 'any[], // default: ["é"]'),
    ({"type": "integer", "default": 3}, "number, // default: 3"),
    ({"type": "string", "default": "x"}, 'string, // default: "x"'),
    ({"type": "object", "properties": {"default": {"type": "integer"}}}, "{\ndefault?: number}"),
]


def test_a_default_of_any_type_is_in_the_prompt(prompt: Prompt) -> None:
    properties = {f"n{number}": schema for number, (schema, _) in enumerate(DEFAULTS)}
    written = "".join(f"n{number}?: {text},\n" for number, (_, text) in enumerate(DEFAULTS))
    text = prompt(messages=USER, tools=[function({"type": "object", "properties": properties})])
    assert f"type f = (_: {{\n{written}}}) => any;" in text


def test_a_custom_tool_is_a_function_of_a_text_in_the_prompt(prompt: Prompt) -> None:
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"+'}}
    past = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": EDIT}}
    history = [*USER, {"role": "assistant", "tool_calls": [past]}, result("a", "done")]
    text = prompt(messages=history, tools=[{"type": "custom", "custom": {**PATCH["custom"], "format": lark}}])
    told = 'Edits files.\n\nThe input follows this grammar (lark):\nstart: "x"+'
    assert f"// {told}\ntype patch = (_: {{\ninput: string,\n}}) => any;" in text
    assert called("patch", json.dumps({"input": EDIT}, ensure_ascii=False), "done") in text


RAIN, NOON = ("get_weather", ARGUMENTS, "rain"), ("clock", "{}", 'no"on')
HI = said("hello")
# messages, and the prompt after openai/harmony, docs/format.md ("Handling tool calls", chains of thought): an analysis
# is kept if it led to calls and no final message came after it, and a call stands directly before its result
HISTORIES: dict[str, tuple[list[Any], str]] = {
    "answers without their analyses": (
        [*USER, answered("Hi.", reasoning="Easy."), *USER, answered("Yes.", reasoning="Hm."), *USER],
        HI + final("Hi.") + HI + final("Yes.") + HI,
    ),
    "a call and its analysis": ([*USER, *calls(RAIN, reasoning="Look.")], HI + thought("Look.") + called(*RAIN)),
    "the other name of an analysis": (
        [*USER, *calls(NOON, reasoning_content="Look.", content=None)],
        HI + thought("Look.") + called(*NOON),
    ),
    "no analysis": ([*USER, *calls(NOON), *calls(RAIN)], HI + called(*NOON) + called(*RAIN)),
    "calls after calls": (
        [*USER, *calls(RAIN, reasoning="One."), *calls(NOON, reasoning="Two.")],
        HI + thought("One.") + called(*RAIN) + thought("Two.") + called(*NOON),
    ),
    "several calls of a message": (
        [*USER, *calls(RAIN, NOON, reasoning="Both.")],
        HI + thought("Both.") + called(*RAIN) + called(*NOON),
    ),
    "an answer after calls": (
        [*USER, *calls(RAIN, reasoning="One."), *calls(NOON), answered("Wet.", reasoning="So."), *USER],
        HI + called(*RAIN) + called(*NOON) + final("Wet.") + HI,
    ),
    "calls after that answer": (
        [*USER, *calls(NOON, reasoning="Old."), answered("Late."), *USER, *calls(RAIN, reasoning="New.")],
        HI + called(*NOON) + final("Late.") + HI + thought("New.") + called(*RAIN),
    ),
    "a result of parts, with its tool's name": (
        [*USER, *calls(NOON)[:1], result("clock", [{"type": "text", "text": 'no"on'}], name="clock")],
        HI + called(*NOON),
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_of_tools_are_as_the_format_has_them(prompt: Prompt, name: str) -> None:
    messages, written = HISTORIES[name]
    text = prompt(messages=messages, tools=[CLOCK])
    assert text[text.index("<|start|>user") :] == written + "<|start|>assistant"


@pytest.mark.parametrize("roles", [("system", "developer"), ("developer", "developer"), ("system", "system")])
def test_instructions_are_in_the_prompt_wherever_they_stand(prompt: Prompt, roles: tuple[str, str]) -> None:
    first, second = ({"role": role, "content": content} for role, content in zip(roles, ("One.", "hello"), strict=True))
    together = prompt(messages=[first, second, *USER], tools=[CLOCK])
    assert "<|start|>developer<|message|># Instructions\n\nOne.\n\nhello\n\n# Tools" in together
    assert together.endswith(f"<|end|>{HI}<|start|>assistant")
    apart = prompt(messages=[first, *USER, second, *USER, second], tools=[CLOCK])
    assert "<|start|>developer<|message|># Instructions\n\nOne.\n\n# Tools" in apart
    assert apart.endswith(f"<|end|>{HI}{instructed('hello')}{HI}{instructed('hello')}<|start|>assistant")
    assert prompt(messages=[*USER, second]).endswith(f"{HI}{instructed('hello')}<|start|>assistant")


def test_a_template_that_renders_instructions_anywhere_writes_them_itself(client: TestClient, tokenizer: Any) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "developer", "user", "developer", "user")]
    ids = answer(client, "/tokenize", {"messages": messages})["tokens"]
    assert "".join(said(message["role"], message["role"]) for message in messages) in detokenize(tokenizer, ids)


EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high"}
EFFORTS |= {"xhigh": "high", "max": "high"}


def test_efforts_that_the_model_does_not_know_are_the_next_ones(
    prompt: Prompt, saying: Making, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so once for each."""
    client = client_of(saying(log=RequestLog(logging.getLogger("notes"))))
    with caplog.at_level(logging.INFO, "notes"):
        for effort, known in EFFORTS.items():
            assert f"\nReasoning: {known}\n" in prompt(messages=USER, reasoning_effort=effort)
            for _ in range(2):
                body = {"input": "hello", "reasoning": {"effort": effort}, "max_output_tokens": 1}
                assert answer(client, RESPONSES, body)["reasoning"]["effort"] == effort
    notes = [json.loads(message)["note"] for message in caplog.messages if "note" in message]
    assert [note.split()[3] for note in notes] == [effort for effort, known in EFFORTS.items() if effort != known]


# --- what answers become ----------------------------------------------------------------------------------------------

ASSISTANT = "<|start|>assistant"
THINKS = f"<|channel|>analysis<|message|>Größer?<|end|>{ASSISTANT}"
CALLS = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
TWO = f" to=functions.clock<|channel|>commentary json<|message|>{{}}<|end|>{ASSISTANT}{CALLS}"
RESULT = '<|end|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
EDITS = "<|channel|>commentary to=functions.patch <|constrain|>json<|message|>"
FINAL = f"<|channel|>analysis<|message|>Größer?<|end|>{ASSISTANT}<|channel|>final<|message|>so final.<|return|>"
CLOCKS, RAINS = ("clock", "{}"), ("get_weather", ARGUMENTS)
REQUIRED: dict[str, Any] = {"tools": [CLOCK], "tool_choice": "required"}
CHOSEN: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "clock"}}}
CUSTOM: dict[str, Any] = {"tool_choice": {"type": "custom", "custom": {"name": "patch"}}}
INPUT, ESCAPED = (json.dumps({"input": EDIT}, ensure_ascii=ascii) for ascii in (False, True))
CUT = '{"city": "東京"'
# fields of the body, what the model writes; the content, the calls, and the reason of the end
ANSWERS: dict[str, tuple[dict[str, Any], str, str | None, list[tuple[str, str]], str]] = {
    "a call": ({}, THINKS + CALLS, None, [RAINS], "tool_calls"),
    "several calls": ({}, TWO, None, [CLOCKS, RAINS], "tool_calls"),
    "several, but not in parallel": ({"parallel_tool_calls": False}, TWO, None, [CLOCKS], "tool_calls"),
    "no JSON": ({}, CALLS.replace(ARGUMENTS, "[1, "), None, [("get_weather", "[1, ")], "tool_calls"),
    "a made-up result": ({}, CALLS.replace("<|call|>", RESULT) + "<|return|>", None, [RAINS], "tool_calls"),
    "a call that the limit cuts": ({"max_tokens": 55}, CALLS, None, [("get_weather", CUT + ",")], "length"),
    "a stop token in a call": ({"stop_token_ids": [","]}, CALLS, None, [("get_weather", CUT)], "stop"),
    "a stop token that ends calls": ({"stop_token_ids": ["<|call|>"]}, CALLS, None, [RAINS], "tool_calls"),
    "stop strings in a call": ({"stop": ["\n", "{", "city", "<|call|>"]}, CALLS, None, [RAINS], "tool_calls"),
    "stop strings elsewhere": ({"stop": ["analysis", "message", "Größ", "assistant"]}, FINAL, "so final.", [], "stop"),
    "stop strings in the content": ({"stop": ["never", "final"]}, FINAL, "so ", [], "stop"),
    "stop strings across messages": ({"stop": ["?<|end|>", "?so"]}, FINAL, "so final.", [], "stop"),
    "no tool to choose from": ({"tool_choice": "none"}, FINAL, "so final.", [], "stop"),
    "the one tool that must be called": (REQUIRED, "{}<|call|>", None, [CLOCKS], "tool_calls"),
    "a function that must be called": (CHOSEN, "{}<|call|>", None, [CLOCKS], "tool_calls"),
    "a custom tool that must be called": (CUSTOM, INPUT + "<|call|>", None, [("patch", EDIT)], "tool_calls"),
    "an input as an argument": ({}, EDITS + ESCAPED + "<|call|>", None, [("patch", EDIT)], "tool_calls"),
    "an input as it is": ({}, f"{EDITS}{EDIT}<|call|>", None, [("patch", EDIT)], "tool_calls"),
}  # fmt: skip


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    """List the calls of a message, (name, arguments or input)."""
    tool_calls = choice.get("tool_calls", [])
    assert len({tool_call["id"] for tool_call in tool_calls}) == len(tool_calls)
    return [tuple(tool_call[tool_call["type"]].values()) for tool_call in tool_calls]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_whole_and_in_a_stream(saying: Making, harmony: Tokenizer, name: str) -> None:
    """Whole with drafts, and in a stream without."""
    fields, written, content, expected, reason = ANSWERS[name]
    if "stop_token_ids" in fields:
        (token,) = fields["stop_token_ids"]
        fields = {"stop_token_ids": harmony.encode(token, special_tokens=True)[-1:]}
    body = {**BODY, **fields}
    client = client_of(saying((body, written)))
    (choice,) = answer(client, CHAT, body)["choices"]
    message = choice["message"]
    assert (message["content"], calls_of(message), choice["finish_reason"]) == (content, expected, reason)
    assert message.get("reasoning", "") == ("Größer?" if "Größer?" in written else "")
    streamed = servers.chat_of(stream(client, CHAT, {**body, "speculative": {"num_speculative_tokens": 0}}))
    assert (streamed["content"], calls_of(streamed), streamed["finish_reason"]) == (content or "", expected, reason)
    assert streamed["reasoning"] == message.get("reasoning", "")


def test_the_guides_example_calls_a_tool_and_answers_from_its_result(saying: Making) -> None:
    examples = re.findall(r"```json\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    question, continued = map(json.loads, examples)
    # the call's header ends the prompt, as a call is required
    client = client_of(
        saying((question, "{}<|call|>"), (continued, "<|channel|>final<|message|>It is noon.<|return|>"))
    )
    # greedy, as the toy's script is likeliest, not certain
    first, second = (answer(client, CHAT, {**body, "temperature": 0})["choices"] for body in (question, continued))
    (sent,) = continued["messages"][1]["tool_calls"]
    assert calls_of(first[0]["message"]) == [tuple(sent["function"].values())] == [CLOCKS]
    assert second[0]["message"]["content"] == "It is noon."


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, about its own message
def test_parsed_calls_are_accepted_as_input(saying: Making) -> None:
    """A message of openai's `parse`, with what it read of the arguments, is part of the next chat."""

    class Where(pydantic.BaseModel):
        city: str

    tool: Any = openai.pydantic_function_tool(Where)
    arguments = '{"city":"Rome"}'
    history = [*USER, *calls(("Where", arguments, "rain"), reasoning="Größer?")]
    first = {"messages": USER, "tools": [tool]}
    service = saying(
        (first, THINKS + f"<|channel|>commentary to=functions.Where <|constrain|>json<|message|>{arguments}<|call|>"),
        ({**first, "messages": history}, f"<|channel|>final<|message|>{arguments}<|return|>"),
    )
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client_of(service))
    options: Any = {"model": MODEL, "tools": [tool], "response_format": Where, "temperature": 0}
    with client.chat.completions.stream(messages=USER, **options) as events:
        message = events.get_final_completion().choices[0].message
    for question in (message, client.chat.completions.parse(messages=USER, **options).choices[0].message):
        assert question.tool_calls is not None
        assert question.tool_calls[0].function.parsed_arguments == Where(city="Rome")
        for past in (question, question.model_dump()):
            messages = [*USER, past, result(question.tool_calls[0].id, "rain")]
            reply = client.chat.completions.parse(messages=messages, **options).choices[0].message
            assert reply.parsed == Where(city="Rome")
    for past in (reply, reply.model_dump()):
        assert client.chat.completions.create(model=MODEL, messages=[*history, past, *USER], max_tokens=1)


# --- what binds arguments ---------------------------------------------------------------------------------------------

TRIP = {
    "type": "object",
    "properties": {
        "città": {"enum": ["東京", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "with": {"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 2},
    },
    "required": ["città", "days"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"who": {"type": "boolean"}}, "required": ["who"]}},
}
FREE, STRICT = function(TRIP), function(TRIP, strict=True)
WRONG = '{"città": "Paris", "days": 77, "extra": [1]}<|call|>'
HEADER = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CHOSEN_F = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"const": "x"}}}
BINDING: list[tuple[dict[str, Any], str]] = [
    # fields, what the model writes before the arguments
    ({"tools": [FREE, CLOCK], **CHOSEN_F}, ""),
    ({"tools": [STRICT], "tool_choice": "required"}, ""),
    ({"tools": [CLOCK, FREE], "tool_choice": "required"}, THINKS + HEADER),
    ({"tools": [STRICT, CLOCK]}, THINKS + HEADER),
    ({"tools": [STRICT]}, " to=functions.f<|channel|>commentary json<|message|>"),
    # a format is one of texts, and an answer that must be a call has none
    ({"tools": [FREE], "tool_choice": "required", "response_format": {"type": "json_object"}}, ""),
    ({"tools": [FREE, CLOCK], **CHOSEN_F, "response_format": FORMAT}, ""),
    ({"tools": [CLOCK, FREE], "tool_choice": "required", "response_format": FORMAT}, THINKS + HEADER),
    # what cannot be enforced is left out where the tool is not strict, and the rest holds
    ({"tools": [function({**TRIP, "not": {"required": ["with"]}})], "tool_choice": "required"}, ""),
]


def is_a_trip(arguments: str) -> bool:
    trip = json.loads(arguments)
    days, people = trip["days"], trip.get("with", [])
    good = trip["città"] in ("東京", "Rome") and type(days) is int and 1 <= days <= 9
    return good and {*trip} <= {"città", "days", "with"} and all(type(person["who"]) is bool for person in people)


@pytest.mark.parametrize(("fields", "before"), BINDING)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 3, "seed": 5, "max_tokens": 48}])
def test_arguments_follow_the_schema_whatever_the_model_would_write(
    saying: Making, fields: dict[str, Any], before: str, sampling: dict[str, Any]
) -> None:
    client = client_of(saying(({**BODY, **fields}, before + WRONG)))
    answers = []
    for k in (0, 3):
        body = {**BODY, **fields, **sampling, "speculative": {"num_speculative_tokens": k}}
        (choice,) = answer(client, CHAT, body)["choices"]
        answers.append((calls_of(choice["message"]), choice["finish_reason"]))
    assert answers[0] == answers[1]
    calls, reason = answers[0]
    if not sampling or reason == "tool_calls":
        ((name, arguments),) = calls
        assert (name, reason) == ("f", "tool_calls")
        assert is_a_trip(arguments)


@pytest.mark.parametrize("written", ["<|channel|>final<|message|>so {!<|return|>", THINKS + CALLS])
def test_beside_a_strict_function_answers_and_other_calls_are_free(saying: Making, written: str) -> None:
    """The model may answer, and call what is not strict, as without the strict function."""
    body, choices = {**BODY, "tools": [WEATHER, STRICT]}, []
    client = client_of(saying((body, f"<|channel|>commentary<|message|>I look.<|end|>{ASSISTANT}{written}")))
    for tools in ([WEATHER, STRICT], [WEATHER, FREE]):
        (choice,) = answer(client, CHAT, {**body, "tools": tools})["choices"]
        choices.append((choice["message"]["content"], calls_of(choice["message"]), choice["finish_reason"]))
    assert choices[0] == choices[1]


STRING = {"type": "string"}
OBJECTS: list[tuple[Any, str]] = [
    # parameters, what the model would write
    (None, "7"),
    ({}, '"x"'),
    ({"type": ["object", "null"]}, "null"),
    ({"anyOf": [STRING, {"type": "object"}]}, '"x"'),
    ({"properties": {"a": STRING}}, "null"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": ["array", "object"]}}}, "[false]"),
]


@pytest.mark.parametrize(("parameters", "written"), OBJECTS)
def test_arguments_of_a_call_that_must_be_are_an_object(saying: Making, parameters: Any, written: str) -> None:
    body = {**BODY, "tools": [function(parameters)], "tool_choice": "required", "max_tokens": 40}
    (choice,) = answer(client_of(saying((body, written + "<|call|>"))), CHAT, body)["choices"]
    ((_, arguments),) = calls_of(choice["message"])
    assert arguments.lstrip().startswith("{")
    if choice["finish_reason"] == "tool_calls":
        assert isinstance(json.loads(arguments), dict)


# --- what is refused --------------------------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": schema}
    return schema


REMOTE = {"$ref": "http://127.0.0.1:1/x", "properties": {}}
NOT_OBJECTS: list[Any] = [
    *({"enum": ["x", 1]}, {"const": None}, {"anyOf": [STRING, {"type": "array"}]}, {"allOf": [STRING]}),
    {"$ref": "#/$defs/a", "$defs": {"a": STRING}},
]
BOUND: list[Any] = [(parameters, "the JSON schema cannot be used: ") for parameters in [*NOT_OBJECTS, REMOTE]]
PARAMETERS = "tools.0.function.parameters"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # fields of the body, the field that is named, a part of the message
    ({"tool_choice": "sometimes"}, "tool_choice", "is 'sometimes'; expected 'none'"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "names 'g', which is not among"),
    ({"tool_choice": {"type": "function", "function": {"name": "patch"}}}, "tool_choice", "names 'patch', which is"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "is given without tools"),
    *(
        ({**REQUIRED, "guided_regex": "a", **more}, "tool_choice", "a call, which guided_regex cannot constrain")
        for more in ({}, {"response_format": {"type": "text"}})
    ),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "is 'web_search'; expected 'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "is 'a b'"),
    ({"tools": [CLOCK, CLOCK]}, "tools.1.function.name", "is 'clock', but an earlier tool"),
    ({"tools": [CLOCK] * 129}, "tools", "has 129 items"),
    ({"functions": [{"name": "f"}]}, "functions", "is not supported"),
    ({"messages": [*USER, result("a")]}, "messages", "messages.1 is a tool's result"),
    ({"messages": calls(NOON)[:1]}, "messages", "messages.0.tool_calls.0 has no result"),
    ({"messages": [*calls(NOON)[:1], result("b")]}, "messages.1.tool_call_id", "is 'b'"),
    ({"messages": [*calls(NOON)[:1], result("clock", name="f")]}, "messages.1.name", "is 'f', but the call is one of"),
    ({"messages": [{**USER[0], "tool_call_id": "a"}]}, "messages.0.tool_call_id", "is not supported in"),
    ({"messages": calls(NOON, NOON)}, "messages.0.tool_calls.1.id", "is 'clock', but an earlier call has this id"),
    ({"tools": [function({"properties": 5})]}, "tools", "the model's chat template refuses the tools: "),
    ({"tools": [function(nested(40))]}, PARAMETERS, "has more than 32 levels"),
    ({"tools": [function(nested(190))]}, PARAMETERS, "has more than 32 levels"),
    ({"tools": [function({"enum": [*range(6000)]})]}, PARAMETERS, "of the tools hold more than 5000 values"),
    ({"tools": [function({"a": [[]] * 6000})]}, PARAMETERS, "of the tools hold more than 5000 values"),
    *(
        ({"tools": [function({"type": kind})]}, f"{PARAMETERS}.type", "expected 'object'")
        for kind in ("null", "string", "array", "integer", ["string", "null"], [], 5, {})
    ),
    *(({"tools": [function(schema, strict=True)]}, PARAMETERS, part) for schema, part in BOUND),
    *(({"tools": [function(schema)], "tool_choice": "required"}, PARAMETERS, part) for schema, part in BOUND),
    (
        {"tools": [CLOCK, function({"properties": {"a": {"uniqueItems": True}}}, strict=True)]},
        "tools.1.function.parameters",
        "the JSON schema cannot be used: uniqueItems at #/properties/a is not supported; leave it out",
    ),
]


@pytest.mark.parametrize(("fields", "field", "part"), REFUSED)
def test_bad_tools_are_refused_by_field(agent: TestClient, fields: dict[str, Any], field: str, part: str) -> None:
    error = error_of(agent.post(CHAT, json={**BODY, **fields}))
    assert error["param"] == field
    assert part in error["message"]


def test_schemas_are_free_where_they_bind_nothing(agent: TestClient) -> None:
    answer(agent, CHAT, {**BODY, "tools": [CLOCK, function(REMOTE)], "max_tokens": 1})


def test_a_template_without_tools_refuses_them_in_a_line(client: TestClient) -> None:
    error = error_of(client.post(CHAT, json=BODY))
    assert error["message"].startswith("tools are not supported here: the model's chat template has none")


def test_a_chat_of_more_than_the_context_holds_is_refused_before_it_is_looked_at(
    agent: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(Tokenizer, "encode_chat", looked_at)
    monkeypatch.setattr(Body, "model_validate", looked_at)
    empty, most = {"role": "user", "content": ""}, LONG // 4
    many: dict[str, list[Any]] = {
        "messages": [empty] * (most + 1),
        "parts": [{**empty, "content": [{"type": "text", "text": ""}] * most}],
        "calls": [{"role": "assistant", "tool_calls": [call(str(number)) for number in range(most)]}],
    }
    for messages in many.values():
        for path in (CHAT, "/tokenize"):
            error = error_of(agent.post(path, json={"messages": messages}))
            assert f"{most + 1} messages, calls and parts are given; expected at most {most}" in error["message"]
            assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert error_of(agent.post(RESPONSES, json={"input": many["messages"]}))["param"] == "input"


def test_more_calls_than_a_template_renders_soon_are_refused() -> None:
    messages = calls(*((str(number), "{}", "x") for number in range(MOST_CALLS + 1)))
    with pytest.raises(ApiError, match="messages holds 513 calls; expected at most 512"):
        template_messages([ChatMessage.model_validate(message) for message in messages])


def test_bodies_are_read_outside_of_the_event_loop(agent: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def recorded(function: Any) -> Any:
        def recording(*arguments: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*arguments)

        return recording

    monkeypatch.setattr(pydantic_core, "from_json", recorded(pydantic_core.from_json))
    monkeypatch.setattr(responses, "as_chat", recorded(responses.as_chat))
    answer(agent, CHAT, {"messages": USER, "max_tokens": 1})
    answer(agent, COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    answer(agent, RESPONSES, {"input": "a", "max_output_tokens": 1})
    answer(agent, "/tokenize", {"prompt": "a"})
    answer(agent, "/detokenize", {"tokens": [5]})
    assert len(threads) == 6
    assert {name.rpartition("_")[0] for name in threads} == {"tokenizer"}
