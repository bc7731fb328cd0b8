"""/v1/responses, as the openai client reads it: whole, in a stream, with reasoning, calls and their results."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest

from peagle.serve.http import parse
from peagle.serve.response_bodies import ResponsesBody
from peagle.serve.responses import as_chat
from peagle.serve.service import Service
from peagle.text.tokenizer import ByteLevelTokenizer, detokenize
from tests.support.running import running
from tests.support.servers import MODEL, client_of, events_of

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Says it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": []},
    "strict": False,
}
CHAT_TOOL = {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
THINKS = "<|channel|>analysis<|message|>Größer?<|end|><|start|>assistant"
SAYS = THINKS + "<|channel|>final<|message|>The 東京 answer.<|return|>"
CALLS = THINKS + '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "x"}<|call|>'
Making = Callable[..., Service]


@pytest.fixture
def asking(saying: Making) -> Iterator[Callable[..., openai.OpenAI]]:
    """Make a client of a server that gives these answers."""
    with contextlib.ExitStack() as opened:

        def making(*turns: Any) -> openai.OpenAI:
            url = opened.enter_context(running(saying(*turns))).url + "/v1"
            return opened.enter_context(openai.OpenAI(base_url=url, api_key="none", max_retries=0))

        yield making


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def called(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": f"f_{call_id}", "arguments": "{}", **fields}


def result(call_id: str, output: Any = "x") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def prompt_of(service: Service, **fields: Any) -> str:
    body = parse(ResponsesBody, json.dumps({"input": "hello", **fields}).encode())
    (request,) = service.builder.chat(as_chat(body).body)
    return detokenize(service.builder.tokenizer, request.prompt_ids)


def test_a_response_has_reasoning_text_and_usage(asking: Any, harmony: ByteLevelTokenizer) -> None:
    client = asking((CHAT, SAYS))
    response = client.responses.create(model=MODEL, input="hello", temperature=0, store=False)
    assert (response.status, response.error, response.output_text) == ("completed", None, "The 東京 answer.")
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content] == ["Größer?"]
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert response.usage.output_tokens_details.reasoning_tokens == len(harmony.encode("Größer?"))
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    listed = client.responses.create(model=MODEL, input=CHAT["messages"], temperature=0)
    assert listed.output_text == response.output_text
    assert listed.usage.input_tokens == response.usage.input_tokens


def test_the_events_are_in_order_and_make_the_response(asking: Any) -> None:
    client = asking((CHAT, SAYS))
    with client.responses.stream(model=MODEL, input="hello", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "The 東京 answer."
    kinds = [event.type for event in events]
    assert [kind for number, kind in enumerate(kinds) if number == 0 or kinds[number - 1] != kind] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "The 東京 answer."
    assert len([kind for kind in kinds if kind == "response.output_text.delta"]) > 3
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] == [item.id for item in final.output]
    assert added[1].content == []
    assert done[1].content[0].text == text


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_result_make_a_turn(asking: Any, stream: bool) -> None:
    first = {**CHAT, "tools": [CHAT_TOOL]}
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "x"}'}}
    history = [
        *CHAT["messages"],
        {"role": "assistant", "reasoning": "Größer?", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    client = asking((first, CALLS), ({**first, "messages": history}, SAYS))

    def ask(items: Any) -> Any:
        options = {"model": MODEL, "input": items, "tools": [TOOL], "temperature": 0}
        if not stream:
            return client.responses.create(**options)
        with client.responses.stream(**options) as events:
            received = list(events)
            if any(event.type == "response.function_call_arguments.delta" for event in received):
                deltas = [event.delta for event in received if event.type == "response.function_call_arguments.delta"]
                assert "".join(deltas) == '{"city": "x"}'
                (done,) = (event for event in received if event.type == "response.function_call_arguments.done")
                assert done.arguments == '{"city": "x"}'
            return events.get_final_response()

    items: list[Any] = [*CHAT["messages"]]
    response = ask(items)
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    called = response.output[1]
    assert (called.name, called.arguments, called.status) == ("get_weather", '{"city": "x"}', "completed")
    items += [item.model_dump() for item in response.output]
    items.append({"type": "function_call_output", "call_id": called.call_id, "output": "rain"})
    assert ask(items).output_text == "The 東京 answer."


PREAMBLE = THINKS + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
TWICE = THINKS + CALLS  # two messages of reasoning


@pytest.mark.parametrize("answer", [PREAMBLE + CALLS.removeprefix(THINKS), TWICE, PREAMBLE + CALLS])
def test_a_servers_own_output_comes_back_as_in_a_chat(saying: Making, answer: str) -> None:
    first = {**CHAT, "tools": [CHAT_TOOL], "temperature": 0}
    service = saying((first, answer))
    client = client_of(service)
    answered = client.post("/v1/chat/completions", json=first).json()["choices"][0]["message"]
    (call,) = answered["tool_calls"]
    message = {
        key: answered[key] for key in ("role", "content", "reasoning", "tool_calls") if answered[key] is not None
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    chat = {"messages": [*CHAT["messages"], message, result], "tools": [CHAT_TOOL]}
    output = client.post(PATH, json={"input": "hello", "tools": [TOOL], "temperature": 0}).json()["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "rain"}
    prompt = prompt_of(service, input=[*CHAT["messages"], *output, result], tools=[TOOL])
    assert prompt == detokenize(service.builder.tokenizer, client.post("/tokenize", json=chat).json()["tokens"])
    assert prompt.count("Größer?") == answer.count("Größer?")
    assert prompt.count("I look.") == answer.count("I look.")


def test_what_the_model_said_before_a_call_stays_with_the_call(saying: Making) -> None:
    """Its own output, sent back, makes the prompt that the same turn makes in a chat."""
    service = saying()
    said = [
        reasoning("I look. "),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        reasoning("Now."),
        called("a", name="clock"),
        result("a", "noon"),
    ]
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "Let me see.", "reasoning": "I look. Now.", "tool_calls": [call]}
    chat = [{"role": "user", "content": "hello"}, turn, {"role": "tool", "tool_call_id": "a", "content": "noon"}]
    tokens = client_of(service).post("/tokenize", json={"messages": chat}).json()["tokens"]
    prompt = prompt_of(service, input=[{"role": "user", "content": "hello"}, *said])
    assert prompt == detokenize(service.builder.tokenizer, tokens)
    assert "I look. Now." in prompt
    two = [*said[1:2], {"role": "assistant", "content": "And more."}]
    assert "Let me see." in (text := prompt_of(service, input=[{"role": "user", "content": "hello"}, *two]))
    assert text.index("Let me see.") < text.index("And more.")


def test_an_answer_that_the_limit_cuts_is_incomplete(asking: Any) -> None:
    client = asking((CHAT, SAYS))
    options = {"model": MODEL, "input": "hello", "temperature": 0, "max_output_tokens": 12}
    response = client.responses.create(**options)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 12
    assert response.output[-1].status == "incomplete"
    last = list(client.responses.create(**options, stream=True))[-1]
    assert last.type == "response.incomplete"
    assert last.response.usage.output_tokens == 12


def test_parameters_reach_the_prompt(saying: Making) -> None:
    service = saying()
    developer = "<|start|>developer<|message|># Instructions\n\n"
    assert f"{developer}Be brief.\n\n<|end|>" in prompt_of(service, instructions="Be brief.")
    joined = prompt_of(service, instructions="Be brief.", input=[{"role": "system", "content": "And kind."}])
    assert f"{developer}Be brief.\n\nAnd kind.\n\n<|end|>" in joined
    assert "Reasoning: low" in prompt_of(service, reasoning={"effort": "low", "summary": "auto"})
    assert "get_weather" in prompt_of(service, tools=[TOOL])
    assert "get_weather" not in prompt_of(service, tools=[TOOL], tool_choice="none")
    named = prompt_of(service, tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"})
    assert named.endswith(" to=functions.get_weather<|channel|>commentary json<|message|>")
    past = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {"role": "user", "content": "c"},
    ]
    text = prompt_of(service, input=past)
    assert (
        "user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|end|><|start|>user<|message|>c" in text
    )


def test_parameters_reach_the_engine(shared: Service) -> None:
    """Over the toy target, whose answers a temperature changes."""
    client = client_of(shared)

    def ask(**fields: Any) -> dict[str, Any]:
        body = {"input": "hello", "max_output_tokens": 40, "temperature": 0, **fields}
        reply = client.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def text(**fields: Any) -> str:
        return ask(**fields)["output"][-1]["content"][0]["text"]

    assert text() == text(speculative={"num_speculative_tokens": 1})
    seeded = {"temperature": 1.5, "seed": 3}
    assert len({text(), text(**seeded), text(**{**seeded, "seed": 4}), text(**seeded, top_p=0.5)}) == 4
    assert text(**seeded) == text(**seeded)
    assert ask(speculative={"num_speculative_tokens": 1})["metrics"]["speculative_decoding"]["num_spec_tokens"] == 1
    echoed = ask(metadata={"a": "b"}, user="me", instructions=None)
    assert (echoed["metadata"], echoed["user"], echoed["store"]) == ({"a": "b"}, "me", False)


FINAL = THINKS + '<|channel|>final<|message|>{"city": "東京", "days": 2}<|return|>'
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
    client = client_of(saying((CHAT, FINAL)))
    named = {"name": "n", "schema": schema}
    text_format = {"type": "json_object"} if schema is None else {"type": "json_schema", **named}
    form = text_format if schema is None else {"type": "json_schema", "json_schema": named}
    chat = {**CHAT, "temperature": 0, "max_tokens": 90, "response_format": form}
    expected = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    body = {"input": "hello", "temperature": 0, "max_output_tokens": 90, "text": {"format": text_format}}
    response = client.post(PATH, json=body).json()
    assert response["output"][-1]["content"][0]["text"] == expected
    assert response["text"]["format"] == text_format
    assert (expected == '{"city": "東京", "days": 2}') == (schema is None)


def test_several_calls_and_only_the_first_without_parallel_calls(saying: Making) -> None:
    answer = CALLS.replace("<|call|>", "<|end|><|start|>assistant") + CALLS.removeprefix(THINKS)
    service = saying(({**CHAT, "tools": [CHAT_TOOL]}, answer))
    for parallel, count in ((True, 2), (False, 1)):
        body = {"input": "hello", "tools": [TOOL], "temperature": 0, "parallel_tool_calls": parallel}
        response = client_of(service).post(PATH, json=body).json()
        assert [item["type"] for item in response["output"]] == ["reasoning"] + ["function_call"] * count


def written(call_id: str, output: str = "x") -> str:
    return (
        f"<|start|>assistant to=functions.f_{call_id}<|channel|>commentary json<|message|>{{}}<|call|>"
        f'<|start|>functions.f_{call_id} to=assistant<|channel|>commentary<|message|>"{output}"<|end|>'
    )


def thought(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


HI, GO_ON = {"role": "user", "content": "hello"}, {"role": "user", "content": "go on"}
SAID_HI, SAID_GO_ON = "<|start|>user<|message|>hello<|end|>", "<|start|>user<|message|>go on<|end|>"
DONE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
SAID_DONE = "<|start|>assistant<|channel|>final<|message|>Done.<|end|>"
HISTORIES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "results in another order": (
        [HI, reasoning("Both."), called("a"), called("b"), result("b", "y"), result("a")],
        SAID_HI + thought("Both.") + written("a") + written("b", "y"),
    ),
    "a result after each call": (
        [HI, called("a"), result("a"), called("b"), result("b")], SAID_HI + written("a") + written("b")
    ),
    "a message before the results": ([HI, called("a"), GO_ON, result("a")], SAID_HI + written("a") + SAID_GO_ON),
    "a call between a call and its result": (
        [HI, called("a"), called("b"), result("a"), reasoning("More."), called("c"), result("b"), result("c")],
        SAID_HI + written("a") + written("b") + thought("More.") + written("c"),
    ),
    "an id used again": (
        [HI, called("a"), result("a"), DONE, GO_ON, called("a"), result("a", "y")],
        SAID_HI + written("a") + SAID_DONE + SAID_GO_ON + written("a", "y"),
    ),
    "reasoning alone": ([HI, reasoning("Hm."), DONE, GO_ON], SAID_HI + SAID_DONE + SAID_GO_ON),
    "reasoning without its text": (
        [HI, {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None}, called("a"), result("a")],
        SAID_HI + written("a"),
    ),
    "a result of parts": (
        [HI, called("a"), result("a", [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}])],
        SAID_HI + written("a", "xy"),
    ),
    "a refusal": (
        [HI, {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "Done."}]}, GO_ON],
        SAID_HI + SAID_DONE + SAID_GO_ON,
    ),
    "instructions in the midst": (
        [HI, DONE, {"role": "developer", "content": "Be kind."}, GO_ON],
        SAID_HI + SAID_DONE + "<|start|>developer<|message|># Instructions\n\nBe kind.<|end|>" + SAID_GO_ON,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_are_taken_in_any_order(saying: Making, name: str) -> None:
    items, expected = HISTORIES[name]
    text = prompt_of(saying(), input=items)
    assert text[text.index("<|start|>user") :] == expected + "<|start|>assistant"


def test_system_and_developer_and_instructions_are_one_message(saying: Making) -> None:
    items = [{"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}, HI]
    text = prompt_of(saying(), input=items, instructions="Zero.")
    assert "<|start|>developer<|message|># Instructions\n\nZero.\n\nOne.\n\nTwo.\n\n<|end|>" + SAID_HI in text


NAMESPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [{**TOOL, "name": "get"}]}


@pytest.mark.parametrize("to", ["functions.crm.get", "crm.get"])
def test_a_tool_of_a_namespace_is_called_by_both_names(saying: Making, to: str) -> None:
    body = {"input": "hello", "tools": [TOOL, NAMESPACE], "temperature": 0}
    service = saying((body, THINKS + f"<|channel|>commentary to={to} json<|message|>{{}}<|call|>"))
    text = prompt_of(service, tools=body["tools"])
    assert "// Customers.\nSays it.\ntype crm.get = (_: {\n" in text
    output = client_of(service).post(PATH, json=body).json()["output"]
    assert (output[1]["name"], output[1]["namespace"], output[1]["arguments"]) == ("get", "crm", "{}")
    items = [HI, *output, result(output[1]["call_id"])]
    again = prompt_of(service, input=items, tools=body["tools"])
    assert "<|start|>assistant to=functions.crm.get<|channel|>commentary json<|message|>{}<|call|>" in again


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


@pytest.mark.parametrize("argument", [json.dumps({"input": PATCH}), PATCH])
def test_codex_calls_its_tools(saying: Making, argument: str, caplog: pytest.LogCaptureFixture) -> None:
    patches = f"<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>{argument}<|call|>"
    plans = "<|channel|>commentary to=functions.plan json<|message|>{}<|end|><|start|>assistant"
    greedy = {**CODEX, "temperature": 0}
    service = saying((greedy, THINKS + plans + patches), log=logging.getLogger("notes"))
    text = prompt_of(service, **{key: CODEX[key] for key in ("instructions", "input", "tools")})
    assert "# Instructions\n\nYou are a coding agent.\n\nAsk before.\n\n# Tools" in text
    assert [name for name in ("shell", "apply_patch", "plan") if f"type {name} = " in text] == [
        "shell",
        "apply_patch",
        "plan",
    ]
    assert "web_search" not in text
    assert "image" not in text
    with caplog.at_level(logging.INFO, "notes"):
        replies = [client_of(service).post(PATH, json=greedy) for _ in range(2)]
    assert replies[0].status_code == 200, replies[0].text
    notes = [json.loads(record.message)["note"] for record in caplog.records if '"note"' in record.message]
    assert notes == [
        *(
            f"tools of the type {kind} are not available here: they are left out"
            for kind in ("web_search", "image_generation", "tool_search")
        ),
        "grammars of custom tools are told to the model, and do not bind what it writes",
    ]
    events = events_of(replies[0].text)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    thinks, plan, patch = done
    assert (plan["type"], plan["name"], plan["namespace"]) == ("function_call", "plan", "functions")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH
    (input_done,) = (event for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert input_done["input"] == PATCH
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == done
    assert openai.types.responses.Response.model_validate(events[-1]["response"]).output[2].type == "custom_tool_call"

    # its next turn
    result_of_patch = {
        "type": "custom_tool_call_output",
        "call_id": patch["call_id"],
        "name": "apply_patch",
        "output": "ok",
    }
    items = [*CODEX["input"], thinks, plan, patch, result_of_patch, result(plan["call_id"], "planned")]
    again = prompt_of(service, **{**{key: CODEX[key] for key in ("instructions", "tools")}, "input": items})
    assert again.endswith(
        thought("Größer?")
        + "<|start|>assistant to=functions.plan<|channel|>commentary json<|message|>{}<|call|>"
        + '<|start|>functions.plan to=assistant<|channel|>commentary<|message|>"planned"<|end|>'
        + "<|start|>assistant to=functions.apply_patch<|channel|>commentary json<|message|>"
        + json.dumps({"input": PATCH}, ensure_ascii=False)
        + '<|call|><|start|>functions.apply_patch to=assistant<|channel|>commentary<|message|>"ok"<|end|>'
        + "<|start|>assistant"
    )


def test_a_custom_tool_is_called_as_the_client_reads_it(asking: Any) -> None:
    tools: Any = [{"type": "custom", "name": "patch", "description": "Edits."}]
    call = f"<|channel|>commentary to=functions.patch json<|message|>{json.dumps({'input': PATCH})}<|call|>"
    client = asking(({"input": "hello", "tools": tools}, THINKS + call))
    with client.responses.stream(model=MODEL, input="hello", tools=tools, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == PATCH
    assert (final.output[1].type, final.output[1].input) == ("custom_tool_call", PATCH)
    must = {"type": "custom", "name": "patch"}
    with pytest.raises(openai.BadRequestError, match="names 'other', which is not among the tools"):
        client.responses.create(model=MODEL, input="hello", tools=tools, tool_choice={**must, "name": "other"})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, about its own items
def test_what_the_client_parsed_comes_back(asking: Any) -> None:
    class Where(pydantic.BaseModel):
        city: str

    tool: Any = {"type": "function", "name": "Where", "strict": True, "parameters": Where.model_json_schema()}
    call = '<|channel|>commentary to=functions.Where json<|message|>{"city":"Rome"}<|call|>'
    history = [HI, called("a", name="Where", arguments='{"city":"Rome"}'), result("a", "rain")]
    answer = '<|channel|>final<|message|>{"city":"Rome"}<|return|>'
    client = asking(({"input": "hello", "tools": [tool]}, call), ({"input": history, "tools": [tool]}, answer))
    options: Any = {"model": MODEL, "tools": [tool], "text_format": Where, "temperature": 0}
    first = client.responses.parse(input="hello", **options).output
    assert first[0].parsed_arguments is not None
    items = [HI, *(item.model_dump() for item in first), result(first[0].call_id, "rain")]
    second = client.responses.parse(input=items, **options)
    assert second.output_parsed == Where(city="Rome")
    items += [*(item.model_dump() for item in second.output), GO_ON]
    assert client.responses.create(model=MODEL, input=items, max_output_tokens=1).error is None


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"store": True}, "store is not supported here: no response is kept"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported here"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"truncation": "auto"}, "truncation is not supported"),
        ({"include": ["file_search_call.results"]}, "include.0 is 'file_search_call.results'; expected"),
        ({"top_logprobs": 2}, "top_logprobs is given without 'message.output_text.logprobs'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity is 'low'; expected 'medium'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type is 'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema is missing; expected it with"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema is given with the type 'text'"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#/x"}}}}, "the JSON schema"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort is 'extreme'; expected 'none', 'minimal', 'low'"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary is 'detailed'"),
        ({"tools": [{"type": "browse"}]}, "tools.0.type is 'browse'; expected 'function', 'custom', 'namespace' or"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice is given without tools"),
        ({"tools": [{**TOOL, "parameters": {"type": "null"}}]}, "tools.0.parameters.type is 'null'; expected 'object'"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{**TOOL, "name": "a b"}]}]},
            "tools.0.tools.0.name is 'n.a b'",
        ),
        (
            {"tools": [{"type": "custom", "name": "n", "format": {"type": "grammar", "syntax": "lark"}}]},
            "tools.0.format.definition is missing",
        ),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type is 'mcp'; expected 'function' or 'custom'"),
        (
            {"tools": [{**TOOL, "strict": True, "parameters": {"$ref": "#/x", "properties": {}}}]},
            "tools.0.parameters: the JSON schema cannot be used",
        ),
        ({"tool_choice": "required"}, "tool_choice is given without tools"),
        ({"input": 5}, "input is 5; expected a text or a list of items"),
        ({"input": []}, "input is empty"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input.0.type is 'item_reference'; nothing is stored here: send the",
        ),
        ({"input": [{"id": "x"}]}, "input.0.type is missing"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type is 'web_search_call'; expected 'message', 'function_"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role is 'robot'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type is 'input_image'; expected",
        ),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input.0.arguments is missing"),
        ({"input": [result("a")]}, "input.0 is a tool's result, but no call precedes it"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"max_output_tokens": 10**6}, "expected max_output_tokens of at most"),
        ({"n": 2}, "n is not supported"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name is 'a b'"),
        (
            {
                "instructions": "Be brief.",
                "input": [{"role": "system", "content": "And kind."}, HI, reasoning("x"), called("a"), called("a")],
            },
            "input.4.call_id is 'a', as that of a call before it",
        ),
        ({"input": [called("a")]}, "input.0 has no result; send a function_call_output with the call_id 'a'"),
        (
            {"input": [called("a"), result("a"), result("a")]},
            "input.2.call_id is 'a'; expected the id of a call before it that has no other result",
        ),
        ({"input": [{"role": "user", "content": ""}] * 3000}, "3000 items and parts are given; expected at most 512"),
        ({"temperature": -1}, "temperature is -1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(saying: Making, fields: dict[str, Any], part: str) -> None:
    reply = client_of(saying()).post(PATH, json={"input": "hello", **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert part in error["message"]
    assert "\n" not in error["message"]
    assert error["param"].partition(".")[0] in {"input", *fields}


def test_a_failure_in_a_stream_is_an_event(saying: Making) -> None:
    service = saying((CHAT, SAYS))

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    service.loop.engine.executor.prefill = broken  # type: ignore[method-assign, assignment]
    text = client_of(service).post(PATH, json={"input": "hello", "stream": True}).text
    assert text.startswith("event: response.created\n")
    last = events_of(text)[-1]
    assert last["type"] == "response.failed"
    assert "the device is gone" in last["response"]["error"]["message"]
