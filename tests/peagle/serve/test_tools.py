"""Tools: rendered by the chat template, called by answers, and their results in the history."""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pydantic_core
import pytest
from fastapi.testclient import TestClient

from peagle.cli.serve import Serve
from peagle.serve import responses
from peagle.serve.bodies import ChatMessage
from peagle.serve.errors import ApiError
from peagle.serve.requests import RequestBuilder
from peagle.serve.service import Service
from peagle.serve.tools import MOST_CALLS, chat_of
from peagle.text.tokenizer import ByteLevelTokenizer, detokenize
from tests.support.harmony import USER
from tests.support.running import eventually, running
from tests.support.servers import MODEL, client_of, events_of

PATH = "/v1/chat/completions"
WEATHER = {
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
CLOCK = {"type": "function", "function": {"name": "clock"}}
BODY: dict[str, Any] = {"messages": USER, "tools": [WEATHER, CLOCK], "temperature": 0}
THINKS = "<|channel|>analysis<|message|>Größer?<|end|><|start|>assistant"
CALLS = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "東京", "days": 2}<|call|>'
FIRST = " to=functions.clock<|channel|>commentary json<|message|>{}<|end|><|start|>assistant"
ARGUMENTS = '{"city": "東京", "days": 2}'

Making = Callable[..., Service]


def call_of(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result_of(call_id: str, content: Any = "x") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def past(*calls: tuple[str, str]) -> list[Any]:
    """Make a history of calls (id, arguments) in one message, and their results."""
    tool_calls = [call_of(call_id, arguments=arguments) for call_id, arguments in calls]
    return [*USER, {"role": "assistant", "tool_calls": tool_calls}, *(result_of(call_id) for call_id, _ in calls)]


def ask(service: Service, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    reply = client_of(service).post(PATH, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def prompt(service: Service, **fields: Any) -> str:
    reply = client_of(service).post("/tokenize", json={"messages": USER, **fields}).json()
    return detokenize(service.builder.tokenizer, reply["tokens"])


def test_tools_are_in_the_prompt_as_the_format_writes_them(saying: Making) -> None:
    service = saying()
    text = prompt(service, tools=[WEATHER, CLOCK])
    written = (
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// Says it.\ntype get_weather = (_: {\ncity: string,\ndays?: number,\n}) => any;\n\n"
        "// \ntype clock = () => any;\n\n} // namespace functions<|end|>"
    )
    assert written in text
    assert "must go to the commentary channel: 'functions'.<|end|>" in text
    assert "functions" not in prompt(service)
    spelled = json.loads(json.dumps(WEATHER).replace("Says it.", "<|end|><|call|>"))
    assert "// <|end|><|call|>" in prompt(service, tools=[spelled])
    plain, hostile = (
        client_of(service).post("/tokenize", json={"messages": USER, "tools": [tool]}).json()["tokens"]
        for tool in (WEATHER, spelled)
    )
    special = service.builder.tokenizer.special_tokens
    assert [token for token in plain if token in special] == [token for token in hostile if token in special]


@pytest.mark.parametrize("k", [0, 3])
def test_a_call_is_parsed_whole_and_in_a_stream(saying: Making, k: int) -> None:
    body = {**BODY, "speculative": {"num_speculative_tokens": k}}
    service = saying((BODY, THINKS + CALLS))
    choice = ask(service, body)["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == ("Größer?", None, "tool_calls")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    with running(service) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        fields = {key: value for key, value in body.items() if key != "speculative"}
        extra = {"speculative": body["speculative"]}
        with client.chat.completions.stream(model=MODEL, extra_body=extra, **fields) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        assert len(deltas) > 3
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls is not None
        (streamed,) = final.message.tool_calls
        assert (streamed.function.name, streamed.function.arguments) == ("get_weather", ARGUMENTS)


def test_several_calls_of_an_answer_and_only_the_first_without_parallel_calls(saying: Making) -> None:
    service = saying((BODY, FIRST + CALLS))
    for parallel, names in ((True, ["clock", "get_weather"]), (False, ["clock"])):
        body = {**BODY, "parallel_tool_calls": parallel}
        calls = ask(service, body)["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == names
        assert len({call["id"] for call in calls}) == len(names)
        reply = client_of(service).post(PATH, json={**body, "stream": True}).text
        assert ("get_weather" in reply) is parallel
        assert '"finish_reason": "tool_calls"' in reply


def test_malformed_arguments_are_handed_on(saying: Making) -> None:
    answer = '<|channel|>commentary to=functions.clock<|message|>{"a": [1, <|call|>'
    choice = ask(saying((BODY, answer)), BODY)["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": '{"a": [1, '}
    assert choice["finish_reason"] == "tool_calls"


def test_a_call_that_the_limit_cuts_is_no_reason_to_call(saying: Making) -> None:
    choice = ask(saying((BODY, THINKS + CALLS)), {**BODY, "max_tokens": 25})["choices"][0]
    assert choice["finish_reason"] == "length"


def test_an_agent_calls_reads_the_result_and_answers(saying: Making) -> None:
    history = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Größer?",
            "tool_calls": [call_of("a", "clock"), call_of("b", "get_weather", ARGUMENTS)],
        },
        result_of("b", "rain"),
        {**result_of("a", [{"type": "text", "text": 'no"on'}]), "name": "clock"},
    ]
    body = {**BODY, "messages": history, "tools": [CLOCK]}
    service = saying((body, "<|channel|>final<|message|>Rain at noon.<|return|>"))
    assert ask(service, body)["choices"][0]["message"]["content"] == "Rain at noon."
    text = prompt(service, messages=history, tools=[CLOCK])
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Größer?<|end|>"
        "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.clock to=assistant<|channel|>commentary<|message|>"no\\"on"<|end|>'
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>"
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
        "<|start|>assistant"
    )


def test_the_example_in_the_help_calls_a_tool_and_answers_from_its_result(saying: Making) -> None:
    text = re.sub(r"\[/?cyan\]", "", Serve.__doc__ or "")
    question, continued = (json.loads(body) for body in re.findall(r"chat/completions --json '([^']*)'", text))
    # the call's header ends the prompt, as a call is required
    service = saying((question, "{}<|call|>"), (continued, "<|channel|>final<|message|>It is noon.<|return|>"))
    # greedy, as the toy's script is likeliest, not certain
    first, second = (ask(service, {**body, "temperature": 0})["choices"][0] for body in (question, continued))
    assert first["finish_reason"] == "tool_calls"
    (call,) = first["message"]["tool_calls"]
    (sent,) = continued["messages"][1]["tool_calls"]
    assert call["function"] == sent["function"] == {"name": "clock", "arguments": "{}"}
    assert second["message"]["content"] == "It is noon."


@pytest.mark.parametrize("spelling", ["reasoning", "reasoning_content"])
def test_a_history_is_as_the_harmony_format_has_it(saying: Making, spelling: str) -> None:
    """Compare with text after openai/harmony, docs/format.md ("Handling tool calls", chains of thought).

    The template of the tests has no "# Instructions" and other white space: from the user's message on they compare.
    """
    call = call_of("a", "get_weather", '{"city": "Rome"}')
    working = [
        *USER,
        {"role": "assistant", spelling: "Need to use function get_weather.", "tool_calls": [call]},
        result_of("a", '{"sunny": true}'),
    ]
    answered: list[Any] = [*USER, {"role": "assistant", spelling: "Easy.", "content": "Hi."}, *USER]
    service = saying()

    def shown(messages: list[Any]) -> str:
        text = prompt(service, messages=messages, tools=[WEATHER])
        return text[text.index("<|start|>user") :]

    format_has = (
        "<|start|>user<|message|>hello<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Rome"}<|call|><|start|>functions.get_weather to=assistant'
        '<|channel|>commentary<|message|>{"sunny": true}<|end|><|start|>assistant'
    )
    differences = {  # of the template from the format
        # the recipient in the role, which the format allows, and no <|constrain|>
        "assistant<|channel|>commentary to=functions.get_weather <|constrain|>json": (
            "assistant to=functions.get_weather<|channel|>commentary json"
        ),
        # a result is a string of JSON, whatever is in it
        '{"sunny": true}': json.dumps('{"sunny": true}'),
    }
    for theirs, ours in differences.items():
        assert theirs in format_has
        format_has = format_has.replace(theirs, ours)
    assert shown(working) == format_has
    # an answer's analysis is dropped in the next turn
    assert shown(answered) == (
        "<|start|>user<|message|>hello<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|end|>"
        "<|start|>user<|message|>hello<|end|><|start|>assistant"
    )


def turn(*calls: tuple[str, str, str], thinks: str = "", says: str | None = None) -> list[Any]:
    """Make a past step of the assistant: calls (name, arguments, result) of one message, or a final message."""
    if says is not None:
        return [{"role": "assistant", "content": says, "reasoning": thinks}]
    tool_calls = [call_of(f"{name}{number}", name, arguments) for number, (name, arguments, _) in enumerate(calls)]
    results = [result_of(call["id"], result) for call, (_, _, result) in zip(tool_calls, calls, strict=True)]
    return [{"role": "assistant", "content": None, "reasoning": thinks, "tool_calls": tool_calls}, *results[::-1]]


def written(messages: list[Any]) -> str:
    """Write a history as the harmony format has it, after openai/harmony, docs/format.md, from the first user on.

    An analysis is kept if it led to calls and no final message came after it. A call comes directly before its result.
    Header of calls and quotes of results are those of GPT-OSS's template.
    """
    text = ""
    for place, message in enumerate(messages):
        if message["role"] == "user":
            text += f"<|start|>user<|message|>{message['content']}<|end|>"
        if message["role"] != "assistant":
            continue
        if "tool_calls" not in message:
            text += f"<|start|>assistant<|channel|>final<|message|>{message['content']}<|end|>"
            continue
        later = messages[place + 1 :]
        final = any(following["role"] == "assistant" and "tool_calls" not in following for following in later)
        if message["reasoning"] and not final:
            text += f"<|start|>assistant<|channel|>analysis<|message|>{message['reasoning']}<|end|>"
        for call in message["tool_calls"]:
            (result,) = (following["content"] for following in later if following.get("tool_call_id") == call["id"])
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            text += f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"
            text += f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{json.dumps(result)}<|end|>"
    return text + "<|start|>assistant"


ASKED, RAIN, NOON = USER[0], ("get_weather", ARGUMENTS, "rain"), ("clock", "{}", "noon")
HISTORIES: dict[str, list[Any]] = {
    "two answers": [ASKED, *turn(says="Hi.", thinks="Easy."), ASKED, *turn(says="Yes.", thinks="Hm."), ASKED],
    "a call and its analysis": [ASKED, *turn(RAIN, thinks="Look.")],
    "calls after calls keep each analysis": [ASKED, *turn(RAIN, thinks="One."), *turn(NOON, thinks="Two.")],
    "several calls of a message": [ASKED, *turn(RAIN, NOON, thinks="Both.")],
    "an answer drops the analyses before it": [
        *(ASKED, *turn(RAIN, thinks="One."), *turn(NOON, thinks="Two."), *turn(says="Wet.", thinks="So."), ASKED)
    ],
    "of the turns after it they are kept": [
        *(ASKED, *turn(NOON, thinks="Old."), *turn(says="Late."), ASKED, *turn(RAIN, thinks="New."))
    ],
    "a call that nothing was thought before": [ASKED, *turn(NOON), *turn(RAIN)],
}


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("role", [None, "system", "developer"])
def test_histories_of_tools_are_as_the_format_has_them(saying: Making, name: str, role: str | None) -> None:
    messages = HISTORIES[name]
    first = [] if role is None else [{"role": role, "content": "Be brief."}]
    text = prompt(saying(), messages=[*first, *messages], tools=[WEATHER, CLOCK])
    before, _, _ = text.partition("<|start|>user")
    assert text[len(before) :] == written(messages)
    assert ("Be brief." in before.partition("<|start|>developer")[2]) == (role is not None)


AS_WRITTEN = [
    *('{"a":1}', '{"a": 1.10, "a": 2}', "1e400", '{"a": NaN}', '{"a": [1, ', '"x"', "", '"', '{"a": "\\ud800"}'),
    *("[" * 300, "<|call|><|end|>", "\U000f0000\U000f0001", "東京\\n\n"),
]


@pytest.mark.parametrize("arguments", AS_WRITTEN)
def test_arguments_in_the_history_are_what_the_model_wrote(saying: Making, arguments: str) -> None:
    service = saying()
    text = prompt(service, messages=past(("a", arguments), ("b", "{}")))
    header = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
    assert text.count(header) == 2
    assert header + arguments + "<|call|><|start|>functions.f to=assistant" in text
    special = service.builder.tokenizer.special_tokens
    plain, hostile = (
        client_of(service).post("/tokenize", json={"messages": past(("a", written))}).json()["tokens"]
        for written in ("{}", arguments)
    )
    assert [token for token in hostile if token in special] == [token for token in plain if token in special]


class Counting(list[Any]):
    """A list that counts how often it is gone through."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        self.count += 1
        return super().__iter__()


def test_calls_are_gone_through_no_more_often_for_more_results() -> None:
    count = 200
    message = ChatMessage.model_validate(past(*((str(n), "{}") for n in range(count)))[1])
    calls = Counting(message.tool_calls)
    object.__setattr__(message, "tool_calls", calls)
    results = [ChatMessage.model_validate(result_of(str(n))) for n in range(count)]
    assert len(chat_of([message, *results])) == 2 * count
    assert calls.count <= 3


def test_a_chat_of_more_than_the_context_holds_is_refused_before_it_is_looked_at(
    saying: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = saying()

    def rendered(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is rendered")

    monkeypatch.setattr(ByteLevelTokenizer, "encode_chat", rendered)
    monkeypatch.setattr("peagle.serve.http.validated", rendered)
    long, most = service.builder.context + 1, service.builder.context // 4
    part = {"type": "text", "text": ""}
    calls = [call_of(str(n)) for n in range(most)]
    error = ask(service, {"messages": [*USER] * (most + 1)}, 400)["error"]
    assert f"{most + 1} messages, calls and parts are given; expected at most {most}" in error["message"]
    for messages in (
        [*USER, {"role": "assistant", "tool_calls": calls}],
        [{"role": "user", "content": ""}] * long,
        [{"role": "user", "content": [part] * long}],
        past(*((str(n), "") for n in range(long // 2))),
    ):
        for path in (PATH, "/tokenize"):
            error = client_of(service).post(path, json={"messages": messages}).json()["error"]
            assert f"messages, calls and parts are given; expected at most {most}" in error["message"]
            assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    error = client_of(service).post("/v1/responses", json={"input": [{"role": "user", "content": ""}] * long}).json()
    assert error["error"]["param"] == "input"


def test_more_calls_than_a_template_renders_soon_are_refused() -> None:
    messages = [
        ChatMessage.model_validate(message) for message in past(*((str(n), "{}") for n in range(MOST_CALLS + 1)))
    ]
    with pytest.raises(ApiError, match="messages holds 513 calls; expected at most 512"):
        chat_of(messages)


def test_bodies_are_read_outside_of_the_event_loop(saying: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    read, as_chat = pydantic_core.from_json, responses.as_chat

    def recorded(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*arguments)

        return call

    monkeypatch.setattr(pydantic_core, "from_json", recorded(read))
    monkeypatch.setattr(responses, "as_chat", recorded(as_chat))
    client = client_of(saying())
    for path, body in (
        (PATH, {"messages": USER, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        assert client.post(path, json=body).status_code == 200
    assert len(threads) >= 6
    assert {name.rpartition("_")[0] for name in threads} == {"tokenizer"}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": schema}
    return schema


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        (nested(40), "tools.0.function.parameters has more than 32 levels"),
        (nested(190), "tools.0.function.parameters has more than 32 levels"),
        ({"enum": list(range(6000))}, "the parameters of the tools hold more than 5000 values"),
        ({"a": [[]] * 6000}, "the parameters of the tools hold more than 5000 values"),
    ],
)
def test_schemas_of_too_much_are_refused(saying: Making, parameters: Any, part: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for path in (PATH, "/tokenize"):
        error = client_of(saying()).post(path, json={"messages": USER, "tools": [tool]}).json()["error"]
        assert part in error["message"]
        assert error["param"] == "tools.0.function.parameters"


def test_a_template_that_fails_on_tools_blames_them(saying: Making) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}
    error = ask(saying(), {**BODY, "tools": [bad]}, 400)["error"]
    assert error["message"].startswith("the model's chat template refuses the tools: ")
    assert error["param"] == "tools"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_clients_own_stop_token_cuts_is_no_reason_to_call(
    saying: Making, harmony: ByteLevelTokenizer, stream: bool
) -> None:
    (comma,) = harmony.encode(",")
    (call,) = harmony.encode("<|call|>", special_tokens=True)
    service = saying((BODY, THINKS + CALLS))
    for own, reason in ((comma, "stop"), (call, "tool_calls")):
        body = {**BODY, "stop_token_ids": [own], "stream": stream}
        text = client_of(service).post(PATH, json=body).text
        assert "get_weather" in text
        assert f'"finish_reason": "{reason}"' in text


def test_no_tool_is_offered_with_the_choice_none(saying: Making) -> None:
    service = saying(({"messages": USER}, "<|channel|>final<|message|>Hi.<|return|>"))
    with_none = ask(service, {**BODY, "tool_choice": "none"})
    assert with_none["choices"][0]["message"]["content"] == "Hi."
    assert with_none["usage"]["prompt_tokens"] == ask(service, {"messages": USER})["usage"]["prompt_tokens"]


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "clock"}}, "required"])
def test_a_function_that_must_be_called_is_called(saying: Making, choice: Any) -> None:
    body = {**BODY, "tools": [CLOCK], "tool_choice": choice}
    service = saying((body, "{}<|call|>"))
    answered = ask(service, body)["choices"][0]
    assert answered["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    assert answered["finish_reason"] == "tool_calls"
    chunks = client_of(service).post(PATH, json={**body, "stream": True}).text
    assert chunks.count('"name": "clock"') == 1


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
BOOK = {"type": "function", "function": {"name": "book", "parameters": TRIP}}
STRICT = {"type": "function", "function": {**BOOK["function"], "strict": True}}  # type: ignore[dict-item]
WRONG = '{"città": "Paris", "days": 77, "extra": [1]}'


def is_a_trip(arguments: str) -> bool:
    trip = json.loads(arguments)
    days, people = trip["days"], trip.get("with", [])
    good = trip["città"] in ("東京", "Rome") and type(days) is int and 1 <= days <= 9
    return good and {*trip} <= {"città", "days", "with"} and all(type(person["who"]) is bool for person in people)


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice["message"].get("tool_calls", ()):
        del call["id"]
    return choice


NAMED = {"type": "function", "function": {"name": "book"}}
HEADER = "<|channel|>commentary to=functions.book <|constrain|>json<|message|>"
BINDING: list[tuple[dict[str, Any], str]] = [
    ({"tools": [BOOK, CLOCK], "tool_choice": NAMED}, ""),
    ({"tools": [STRICT], "tool_choice": "required"}, ""),
    ({"tools": [CLOCK, BOOK], "tool_choice": "required"}, THINKS + HEADER),
    ({"tools": [STRICT, CLOCK]}, THINKS + HEADER),
    ({"tools": [STRICT]}, " to=functions.book<|channel|>commentary json<|message|>"),
]


@pytest.mark.parametrize(("fields", "before"), BINDING)
def test_arguments_follow_the_schema_whatever_the_model_would_write(
    saying: Making, fields: dict[str, Any], before: str
) -> None:
    service = saying(({**BODY, **fields}, before + WRONG + "<|call|>"), k=7)
    greedy, sampled = {"temperature": 0}, {"temperature": 3, "seed": 5, "max_tokens": 48}
    for sampling in (greedy, sampled):
        replies = []
        for k in (0, 3, 7):
            body = {**BODY, **fields, **sampling, "speculative": {"num_speculative_tokens": k}}
            choice = without_ids(ask(service, body)["choices"][0])
            replies.append(choice)
            if sampling is greedy or choice["finish_reason"] == "tool_calls":
                (call,) = choice["message"]["tool_calls"]
                assert (call["function"]["name"], choice["finish_reason"]) == ("book", "tool_calls")
                assert is_a_trip(call["function"]["arguments"])
        assert replies[0] == replies[1] == replies[2]


@pytest.mark.parametrize("answer", ["<|channel|>final<|message|>so {!<|return|>", THINKS + CALLS])
def test_beside_a_strict_function_answers_and_other_calls_are_free(saying: Making, answer: str) -> None:
    """The model may answer, and call what is not strict, as without the strict function."""
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    body, replies = {**BODY, "tools": [WEATHER, STRICT]}, []
    for tools in ([WEATHER, STRICT], [WEATHER, BOOK]):
        service = saying((body, preamble + answer), k=7)
        replies.append(without_ids(ask(service, {**body, "tools": tools})["choices"][0]))
    assert replies[0] == replies[1]


def tool_of(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


@pytest.mark.parametrize("kind", ["null", "string", "array", "integer", ["string", "null"], [], 5, {}])
@pytest.mark.parametrize("fields", [{}, {"tool_choice": "required"}])
def test_parameters_that_are_no_object_are_refused(saying: Making, kind: Any, fields: dict[str, Any]) -> None:
    error = ask(saying(), {**BODY, **fields, "tools": [CLOCK, tool_of({"type": kind})]}, 400)["error"]
    assert error["param"] == "tools.1.function.parameters.type"
    assert error["message"].startswith("tools.1.function.parameters.type is ")
    assert "expected 'object'" in error["message"]


STRING = {"type": "string"}
NOT_OBJECTS: list[Any] = [
    {"enum": ["x", 1]}, {"const": None}, {"anyOf": [STRING, {"type": "array"}]}, {"allOf": [STRING]},
    {"$ref": "#/$defs/a", "$defs": {"a": STRING}},
]  # fmt: skip


@pytest.mark.parametrize("parameters", NOT_OBJECTS)
def test_bound_parameters_that_only_others_than_objects_meet_are_refused(saying: Making, parameters: Any) -> None:
    required = {"tools": [tool_of(parameters)], "tool_choice": "required"}
    for fields in (required, {"tools": [tool_of(parameters, strict=True)]}):
        error = ask(saying(), {**BODY, **fields}, 400)["error"]
        assert error["param"] == "tools.0.function.parameters"
        assert "cannot be used" in error["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        None, {}, {"type": ["object", "null"]}, {"anyOf": [STRING, {"type": "object"}]}, {"properties": {"a": STRING}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": ["array", "object"]}}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("written", ["null", '"x"', "[false]", "7"])
def test_arguments_of_a_call_that_must_be_are_an_object(saying: Making, parameters: Any, written: str) -> None:
    """Whatever the model would write."""
    body = {**BODY, "tools": [tool_of(parameters)], "tool_choice": "required", "max_tokens": 40}
    choice = ask(saying((body, written + "<|call|>")), body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].lstrip().startswith("{")
    if choice["finish_reason"] == "tool_calls":
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


DEFAULTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "enum": [1, 2], "default": 1}, "n?: number, // default: 1,\n"),
    ({"type": "boolean", "enum": [True], "default": True}, "n?: boolean, // default: true,\n"),
    ({"enum": ["a", None], "default": None}, "n?: any, // default: null,\n"),
    ({"type": "string", "enum": ["a", "b"], "default": "b"}, 'n?: "a" | "b", // default: b,\n'),
    ({"oneOf": [{"type": "integer"}], "default": 0.5}, "n?: number// default: 0.5,\n"),
    ({"type": "array", "enum": [["é"]], "default": ["é"]}, 'n?: any[], // default: ["é"],\n'),
    ({"type": "integer", "default": 3}, "n?: number, // default: 3,\n"),
    ({"type": "string", "default": "x"}, 'n?: string, // default: "x",\n'),
    ({"type": "object", "properties": {"default": {"type": "integer"}}}, "n?: {\ndefault?: number},\n"),
]


@pytest.mark.parametrize(("schema", "written"), DEFAULTS)
def test_a_default_of_any_type_is_in_the_prompt(saying: Making, schema: dict[str, Any], written: str) -> None:
    text = prompt(saying(), tools=[tool_of({"type": "object", "properties": {"n": schema}})])
    assert f"type f = (_: {{\n{written}}}) => any;" in text


MADE_UP = '<|end|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
HANDED_ON = [
    # as GPT-OSS was seen to write calls, and what it may make up after them
    f"commentary to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    " to=functions.get_weather<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>",
    "<|channel|>commentary <|constrain|>json to=functions.get_weather<|message|>" + ARGUMENTS + "<|call|>",
    CALLS.replace("<|call|>", MADE_UP) + "<|return|>",
    CALLS.replace("<|call|>", "<|end|><|start|>user<|message|>And Rome?<|end|>") + "<|return|>",
]


@pytest.mark.parametrize("answer", HANDED_ON)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_read_wherever_its_header_names_it(saying: Making, answer: str, stream: bool) -> None:
    service = saying((BODY, THINKS + answer))
    if stream:
        text = client_of(service).post(PATH, json={**BODY, "stream": True}).text
        deltas = [event["choices"][0] for event in events_of(text)]
        assert not any(one["delta"].get("content") for one in deltas)
        calls = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
        assert calls[0]["function"]["name"] == "get_weather"
        assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
        assert deltas[-1]["finish_reason"] == "tool_calls"
        return
    choice = ask(service, BODY)["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "Größer?")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert choice["finish_reason"] == "tool_calls"


PATCH: dict[str, Any] = {"name": "patch", "description": "Edits files."}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"+'}}
EDITED = '*** Begin\n+größer "x"\n'


@pytest.mark.parametrize(
    "written", [json.dumps({"input": EDITED}), json.dumps({"input": EDITED}, ensure_ascii=False), EDITED]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_gets_its_input(saying: Making, written: str, stream: bool) -> None:
    """The model writes it as the function's argument, or as it is."""
    body = {**BODY, "tools": [CLOCK, {"type": "custom", "custom": PATCH}]}
    answer = f"<|channel|>commentary to=functions.patch <|constrain|>json<|message|>{written}<|call|>"
    service = saying((body, FIRST + answer))
    if stream:
        text = client_of(service).post(PATH, json={**body, "stream": True}).text
        deltas = [event["choices"][0] for event in events_of(text)]
        calls = [call for one in deltas for call in one["delta"].get("tool_calls", ()) if call["index"] == 1]
        assert (calls[0]["type"], calls[0]["custom"]) == ("custom", {"name": "patch", "input": ""})
        assert "".join(call["custom"]["input"] for call in calls) == EDITED
        return
    first, second = ask(service, body)["choices"][0]["message"]["tool_calls"]
    assert first["function"]["name"] == "clock"
    assert second == {"id": second["id"], "type": "custom", "custom": {"name": "patch", "input": EDITED}}


def test_a_custom_tool_is_a_function_of_a_text_in_the_prompt(saying: Making) -> None:
    call = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": EDITED}}
    history = [*USER, {"role": "assistant", "tool_calls": [call]}, result_of("a", "done")]
    text = prompt(saying(), messages=history, tools=[{"type": "custom", "custom": {**PATCH, "format": LARK}}])
    told = 'Edits files.\n\nThe input follows this grammar (lark):\nstart: "x"+'
    assert f"// {told}\ntype patch = (_: {{\ninput: string,\n}}) => any;" in text
    written = json.dumps({"input": EDITED}, ensure_ascii=False)
    assert f"to=functions.patch<|channel|>commentary json<|message|>{written}<|call|>" in text


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "patch"}}])
def test_a_custom_tool_can_be_what_must_be_called(saying: Making, choice: Any) -> None:
    body = {**BODY, "tools": [{"type": "custom", "custom": PATCH}], "tool_choice": choice}
    written = json.dumps({"input": EDITED}, ensure_ascii=False)
    answered = ask(saying((body, written + "<|call|>")), body)["choices"][0]
    assert answered["message"]["tool_calls"][0]["custom"] == {"name": "patch", "input": EDITED}
    assert answered["finish_reason"] == "tool_calls"
    wrong = {**body, "tool_choice": {"type": "function", "function": {"name": "patch"}}}
    assert "names 'patch', which is not among the tools" in ask(saying(), wrong, 400)["error"]["message"]


INSTRUCTED = "<|start|>developer<|message|># Instructions\n\n"


@pytest.mark.parametrize("roles", [("system", "developer"), ("developer", "developer"), ("system", "system")])
def test_instructions_are_in_the_prompt_wherever_they_stand(saying: Making, roles: tuple[str, str]) -> None:
    first, second = ({"role": role, "content": content} for role, content in zip(roles, ("One.", "hello"), strict=True))
    service = saying()
    together = prompt(service, messages=[first, second, *USER], tools=[CLOCK])
    assert f"{INSTRUCTED}One.\n\nhello\n\n# Tools" in together
    assert together.endswith("<|start|>user<|message|>hello<|end|><|start|>assistant")
    apart = prompt(service, messages=[first, *USER, second, *USER, second], tools=[CLOCK])
    later = f"<|start|>user<|message|>hello<|end|>{INSTRUCTED}hello<|end|>"
    assert apart.endswith(f"<|end|>{later}{later}<|start|>assistant")
    assert f"{INSTRUCTED}One.\n\n# Tools" in apart
    alone = prompt(service, messages=[*USER, second])
    assert alone.endswith(f"{later}<|start|>assistant")


def test_a_template_that_renders_instructions_anywhere_writes_them_itself(client: TestClient, tokenizer: Any) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "developer", "user", "developer", "user")]
    ids = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    written = "".join(f"<|start|>{message['role']}<|message|>{message['role']}<|end|>" for message in messages)
    assert written in detokenize(tokenizer, ids)


EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high"}
EFFORTS |= {"xhigh": "high", "max": "high"}


@pytest.mark.parametrize("effort", EFFORTS)
def test_efforts_that_the_model_does_not_know_are_the_next_ones(
    saying: Making, effort: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = saying(log=logging.getLogger("notes"))
    assert f"\nReasoning: {EFFORTS[effort]}\n" in prompt(service, reasoning_effort=effort)
    with caplog.at_level(logging.INFO, "notes"):
        for _ in range(2):
            ask(service, {"messages": USER, "reasoning_effort": effort, "max_tokens": 1})
            body = {"input": "hello", "reasoning": {"effort": effort}, "max_output_tokens": 1}
            assert client_of(service).post("/v1/responses", json=body).json()["reasoning"]["effort"] == effort
    notes = [json.loads(record.message)["note"] for record in caplog.records if "note" in record.message]
    mapped = f"the reasoning effort {effort} is not one of GPT-OSS: the prompt says {EFFORTS[effort]}"
    assert notes == ([mapped] if EFFORTS[effort] != effort else [])


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, about its own message
def test_what_the_client_parsed_comes_back(saying: Making) -> None:
    """A message of openai's `parse`, with what it read of the arguments, is part of the next chat."""

    class Where(pydantic.BaseModel):
        city: str

    tool: Any = openai.pydantic_function_tool(Where)
    arguments = '{"city":"Rome"}'
    called_before = {"role": "assistant", "reasoning": "Größer?", "tool_calls": [call_of("a", "Where", arguments)]}
    history = [*USER, called_before, result_of("a", "rain")]
    first = {"messages": USER, "tools": [tool]}
    service = saying(
        (first, THINKS + f"<|channel|>commentary to=functions.Where <|constrain|>json<|message|>{arguments}<|call|>"),
        ({**first, "messages": history}, f"<|channel|>final<|message|>{arguments}<|return|>"),
    )
    with running(service) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        options: Any = {"model": MODEL, "tools": [tool], "response_format": Where, "temperature": 0}
        called = client.chat.completions.parse(messages=USER, **options).choices[0].message
        assert called.tool_calls is not None
        assert called.tool_calls[0].function.parsed_arguments == Where(city="Rome")
        result = result_of(called.tool_calls[0].id, "rain")
        for message in (called, called.model_dump()):
            answer = client.chat.completions.parse(messages=[*USER, message, result], **options).choices[0].message
            assert answer.parsed == Where(city="Rome")
        for message in (answer, answer.model_dump()):
            again = [*history, message, *USER]
            assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=1)  # type: ignore[call-overload]


def test_a_schema_that_cannot_bind_a_call_is_named(saying: Making) -> None:
    parameters = {"$ref": "http://127.0.0.1:1/x", "properties": {}}
    remote = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    strict = {"type": "function", "function": {**remote["function"], "strict": True}}  # type: ignore[dict-item]
    service = saying()
    client = client_of(service)
    for fields in ({"tools": [CLOCK, strict]}, {"tools": [CLOCK, remote], "tool_choice": "required"}):
        error = ask(service, {**BODY, **fields}, 400)["error"]
        assert error["param"] == "tools.1.function.parameters"
        assert error["message"].startswith("tools.1.function.parameters: the JSON schema cannot be used: ")
    free = client.post(PATH, json={**BODY, "tools": [CLOCK, remote], "max_tokens": 1})
    assert free.status_code == 200
    both = {**BODY, "tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert ask(service, both, 400)["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice is 'sometimes'; expected 'none'"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "names 'g', which is not among"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice is given without tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type is 'web_search'; expected 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name is 'a b'"),
        ({"tools": [CLOCK, CLOCK]}, "tools.1.function.name is 'clock', as that of"),
        ({"tools": [CLOCK] * 129}, "tools has 129 items"),
        ({"functions": [{"name": "f"}]}, "functions is not supported"),
        ({"messages": [*USER, result_of("a")]}, "messages.1 is a tool's result"),
        ({"messages": past(("a", "{}"))[1:2]}, "messages.0.tool_calls.0 has no result"),
        ({"messages": [*past(("a", "{}"))[1:2], result_of("b")]}, "messages.1.tool_call_id is 'b'"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages.0.tool_call_id is not"),
        (
            {"messages": past(("a", "{}"), ("a", "{}"))},
            "messages.1.tool_calls.1.id is 'a', as that of a call before it; expected its own",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(saying: Making, fields: dict[str, Any], part: str) -> None:
    error = ask(saying(), {**BODY, **fields}, 400)["error"]
    assert part in error["message"]
    assert "\n" not in error["message"]
    assert error["param"].partition(".")[0] in fields


def test_a_template_without_tools_refuses_them_in_a_line(shared: Service) -> None:
    reply = client_of(shared).post(PATH, json=BODY)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("tools are not supported here: the model's chat template has")
    assert isinstance(shared.builder, RequestBuilder)
    assert not shared.builder.takes_tools


STOPS = [
    # stop strings, what is left of the content; reasoning, headers and calls have none
    (["analysis"], "so final."),
    (["message"], "so final."),
    (["Fin"], "so final."),
    (["\n"], "so final."),
    (["final"], "so "),
    (["!<|end|>", "!so"], "so final."),  # across messages
    (["assistant", "al."], "so fin"),
    (["."], "so final"),
]


@pytest.mark.parametrize(("stop", "content"), STOPS)
@pytest.mark.parametrize("k", [0, 3])
def test_stop_strings_end_the_content_alone(saying: Making, stop: list[str], content: str, k: int) -> None:
    reasoning = "Fin al,\n assistant!"
    answer = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant<|channel|>final<|message|>so final."
    service = saying(({"messages": USER}, answer + "<|return|>"))
    body = {"messages": USER, "temperature": 0, "stop": stop, "speculative": {"num_speculative_tokens": k}}
    choice = ask(service, body)["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (reasoning, content)
    assert choice["finish_reason"] == "stop"
    events = events_of(client_of(service).post(PATH, json={**body, "stream": True}).text)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == reasoning
    assert "".join(delta.get("content", "") for delta in deltas) == content
    eventually(lambda: service.loop.num_open == 0)


@pytest.mark.parametrize("stop", ["\n", "{", "city", "<|call|>"])
def test_stop_strings_cut_no_call(saying: Making, stop: str) -> None:
    choice = ask(saying((BODY, THINKS + CALLS)), {**BODY, "stop": stop})["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert choice["finish_reason"] == "tool_calls"
