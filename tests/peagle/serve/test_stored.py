"""Responses that the server keeps: turns that go on from them, what is returned of them, how many are kept."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import openai
import pytest

from peagle.engine.request import Request
from peagle.serve.app import ENDPOINTS
from peagle.serve.request_body import TOKENS_OF_A_MESSAGE
from peagle.serve.shared_state import SharedState
from peagle.serve.stored import ResponseStore, StoredItem
from peagle.text.tokenizer import detokenize
from tests.support.harmony import LONG, USER, called
from tests.support.servers import MODEL, RESPONSES, answer, client_of, error_of, openai_of, stream

Making = Callable[..., SharedState]
Prompt = Callable[..., str]
TOOL: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
BODY: dict[str, Any] = {"input": "hello", "temperature": 0}
TOOLS: dict[str, Any] = {**BODY, "tools": [TOOL]}
THINKS = "<|channel|>analysis<|message|>Größer?<|end|><|start|>assistant"
CALLS = f"{THINKS}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{{}}<|call|>"
TEXT = "The 東京 answer."
SAYS = f"{THINKS}<|channel|>final<|message|>{TEXT}<|return|>"
GO_ON = {"role": "user", "content": "go on"}


def store(most: int = 1_000_000, ttl_s: int = 60, **options: Any) -> ResponseStore:
    return ResponseStore(most, ttl_s, **options)


def result(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "rain"}


def reference(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


class Reader:
    """A client of a service, and the prompts that its model reads."""

    def __init__(self, service: SharedState) -> None:
        self.client, self._submit, self._service = client_of(service), service.loop.submit, service
        self._read: list[str] = []
        service.loop.submit = self._record  # type: ignore[method-assign]

    def _record(self, requests: Sequence[Request], *more: Any) -> Any:
        self._read += [detokenize(self._service.builder.tokenizer, request.prompt_ids) for request in requests]
        return self._submit(requests, *more)

    def answer(self, **fields: Any) -> dict[str, Any]:
        return answer(self.client, RESPONSES, {**TOOLS, **fields})

    def prompt(self, **fields: Any) -> str:
        """Return what the model reads of a body with these fields."""
        self.answer(max_output_tokens=1, **fields)
        return self._read[-1]


# --- turns ------------------------------------------------------------------------------------------------------------


def test_a_turn_goes_on_from_a_response_or_from_references_as_from_the_whole_history(
    saying: Making, prompt: Prompt
) -> None:
    """Over turns with a call; a later response knows all before it."""
    reader = Reader(saying((TOOLS, CALLS), responses=store()))
    first = reader.answer()
    assert first["store"] is True
    output = first["output"]
    assert [item["type"] for item in output] == ["reasoning", "function_call"]
    rain = result(output[-1]["call_id"])
    whole = [*USER, *output, rain]
    expected = prompt(**{**TOOLS, "input": whole})
    assert called("look", result="rain") in expected
    references = [*USER, *map(reference, output), rain]
    assert reader.prompt(input=references) == expected
    assert reader.prompt(input=[*USER, *({"id": item["id"]} for item in output), rain]) == expected
    assert reader.prompt(input=[rain], previous_response_id=first["id"]) == expected

    second, again = reader.answer(input=[rain], previous_response_id=first["id"]), reader.answer(input=references)
    assert second["previous_response_id"] == first["id"]
    for response in (second, again):
        whole = [*USER, *output, rain, *response["output"], GO_ON]
        assert reader.prompt(input="go on", previous_response_id=response["id"]) == prompt(**{**TOOLS, "input": whole})


def test_instructions_and_tools_are_those_of_the_turn(saying: Making, prompt: Prompt) -> None:
    reader = Reader(saying((BODY, SAYS), responses=store()))
    first = reader.answer(instructions="Be brief.")
    read = reader.prompt(tools=[], input=[GO_ON], previous_response_id=first["id"])
    assert read == prompt(**BODY | {"input": [*USER, *first["output"], GO_ON]})


def test_a_history_that_is_not_complete_is_refused_by_the_id_of_its_item(saying: Making) -> None:
    client = client_of(saying((TOOLS, CALLS), responses=store()))
    first = answer(client, RESPONSES, TOOLS)
    call = first["output"][-1]
    error = error_of(client.post(RESPONSES, json={**TOOLS, "previous_response_id": first["id"], "input": "go on"}))
    assert f"has no result; send a function_call_output with the call_id '{call['call_id']}'" in error["message"]
    assert error["message"].startswith(call["id"])


@pytest.mark.parametrize("keeps", [True, False])
def test_missing_response_is_refused_with_the_cure(saying: Making, keeps: bool) -> None:
    """Never by leaving it out, for then the model would not know the history."""
    client = client_of(saying(responses=store(cure="raise --most") if keeps else ResponseStore()))
    cure = ", or raise --most" if keeps else ""
    gone = {**BODY, "previous_response_id": "resp_1"}
    error = error_of(client.post(RESPONSES, json=gone))
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert error["message"].endswith(f"; send the whole conversation in input{cure}")
    error = error_of(client.post(RESPONSES, json={"input": [GO_ON, {"type": "item_reference", "id": "msg_1"}]}), 404)
    assert error["param"] == "input.1.id"
    assert "is 'msg_1', an item that is " in error["message"]
    assert error["message"].endswith(f"; send the item itself, as the response had it{cure}")
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        error = error_of(client.request(method, f"{RESPONSES}/resp_1{path}"), 404)
        assert error["message"].startswith("the response 'resp_1' is not kept")
    assert answer(client, RESPONSES, {**BODY, "store": False})["store"] is False
    assert answer(client, RESPONSES, BODY)["store"] is keeps


def test_a_response_is_only_for_the_key_that_made_it(saying: Making) -> None:
    client = client_of(saying((BODY, SAYS), responses=store(), keys=("one", "two")))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    kept = client.post(RESPONSES, json=BODY, headers=one).json()
    path = f"{RESPONSES}/{kept['id']}"
    next_turn = {**BODY, "previous_response_id": kept["id"]}
    referring = {"input": [*USER, reference(kept["output"][0]), GO_ON]}
    error_of(client.get(path, headers=two), 404)
    error_of(client.delete(path, headers=two), 404)
    error_of(client.post(RESPONSES, json=next_turn, headers=two))
    error_of(client.post(RESPONSES, json=referring, headers=two), 404)
    for method, url, body in (("POST", RESPONSES, next_turn), ("POST", RESPONSES, referring), ("GET", path, None)):
        assert client.request(method, url, json=body, headers=one).status_code == 200


# --- what is returned of them -----------------------------------------------------------------------------------------


def test_the_openai_client_gets_lists_and_deletes_what_it_made(saying: Making) -> None:
    client = openai_of(saying((BODY, SAYS), responses=store()))
    response = client.responses.create(model=MODEL, **BODY, include=["message.output_text.logprobs"], top_logprobs=2)
    assert client.responses.retrieve(response.id).model_dump() == response.model_dump()
    second = client.responses.create(model=MODEL, input="go on", previous_response_id=response.id)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))  # a page each
    assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
    assert [item.id for item in items[1:3]] == [item.id for item in response.output]
    assert (items[0].content[0].text, items[3].content[0].text) == ("hello", "go on")  # type: ignore[union-attr]
    newest = [item.id for item in client.responses.input_items.list(second.id)]
    assert newest == [item.id for item in reversed(items)]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="is not kept"):
        client.responses.retrieve(response.id)
    client.responses.create(model=MODEL, input="go on", previous_response_id=second.id)  # it has what it needs


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *((f"limit={limit}", "limit") for limit in ("0", "101", "x", "-1", "9" * 5000)),
        ("order=up", "order"),
        ("after=a", "after"),
    ],
)
def test_a_bad_page_is_refused(saying: Making, query: str, param: str) -> None:
    client = client_of(saying(responses=store()))
    kept = answer(client, RESPONSES, BODY)
    path = f"{RESPONSES}/{kept['id']}"
    assert error_of(client.get(f"{path}/input_items?{query}"))["param"] == param
    assert error_of(client.get(f"{path}?stream=true"))["param"] == "stream"


@pytest.mark.parametrize("streamed", [False, True])
def test_kept_response_equals_the_reply(saying: Making, streamed: bool) -> None:
    """Also of an answer that the limit cut, with a custom tool."""
    body = {**BODY, "max_output_tokens": 12, "tools": [{"type": "custom", "name": "patch"}], "metadata": {"a": "b"}}
    client = client_of(saying((body, SAYS), responses=store()))
    sent = stream(client, RESPONSES, body)[-1]["response"] if streamed else answer(client, RESPONSES, body)
    assert (sent["status"], sent["store"]) == ("incomplete", True)
    assert client.get(f"{RESPONSES}/{sent['id']}").json() == sent


def test_a_stream_that_its_client_leaves_is_kept_as_far_as_it_was_computed(saying: Making) -> None:
    """Clients refer to the items that they have read, also after a stop by their user."""
    service = saying((BODY, SAYS), responses=store())
    first: list[str] = []

    async def run() -> None:
        body = json.dumps({**BODY, "stream": True}).encode()
        generation = await ENDPOINTS[RESPONSES].generation(service, body)
        events = generation.events()
        async for event in events:
            first.append(event)
            if "output_text.delta" in event:
                break
        await events.aclose()
        service.finish(generation, RESPONSES)

    asyncio.run(run())
    created = json.loads(first[0].split("data: ")[1].split("\n")[0])["response"]
    client = client_of(service)
    kept = client.get(f"{RESPONSES}/{created['id']}").json()
    assert kept["status"] == "cancelled"
    assert [item["status"] for item in kept["output"]] == ["completed", "incomplete"]
    text = kept["output"][-1]["content"][0]["text"]
    assert TEXT.startswith(text)
    assert text
    references = {"input": [*map(reference, kept["output"]), GO_ON]}
    for fields in (references, {"input": "go on", "previous_response_id": kept["id"]}):
        assert answer(client, RESPONSES, {**BODY, **fields})["status"] == "completed"


def test_a_response_that_fails_is_kept(saying: Making) -> None:
    service = saying((BODY, SAYS), responses=store())
    service.loop.engine.executor.prefill = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    client = client_of(service)
    first, *_, last = stream(client, RESPONSES, BODY)
    assert (first["type"], last["type"]) == ("response.created", "response.failed")
    assert "division by zero" in last["response"]["error"]["message"]
    assert client.get(f"{RESPONSES}/{last['response']['id']}").json() == last["response"]


# --- how much a body may name -----------------------------------------------------------------------------------------


def refused_as_too_much(service: SharedState, **fields: Any) -> str:
    error = error_of(client_of(service).post(RESPONSES, json={**BODY, **fields}))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    return error["message"]


def thinking(name: str, size: int) -> dict[str, Any]:
    """Make an item that takes no place in the prompt."""
    return {"type": "reasoning", "id": name, "content": [{"type": "reasoning_text", "text": "x" * size}]}


def test_kept_items_have_no_more_bytes_than_a_body_each_time_they_are_named(saying: Making) -> None:
    service = saying(responses=store(), max_body=10_000)
    first = answer(client_of(service), RESPONSES, {"input": [*USER, thinking("rs_1", 4000)]})
    once, twice = [reference({"id": "rs_1"})], [reference({"id": "rs_1"})] * 2
    answer(client_of(service), RESPONSES, {"input": [*USER, *twice]})
    told = refused_as_too_much(service, input=[*USER, *once, *twice])
    assert "; expected at most 10000, as of a body: name fewer" in told
    answer(client_of(service), RESPONSES, {"input": once, "previous_response_id": first["id"]})
    refused_as_too_much(service, input=twice, previous_response_id=first["id"])


@pytest.mark.parametrize("kind", ["previous", "reference"])
def test_parts_of_kept_items_count_as_those_of_a_body(saying: Making, kind: str) -> None:
    service = saying(responses=store())
    most = LONG // TOKENS_OF_A_MESSAGE  # items and parts

    def message(num_parts: int) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "input_text", "text": ""}] * num_parts}

    first = answer(client_of(service), RESPONSES, {**BODY, "input": [{**message(most - 10), "id": "msg_1"}]})
    before = {"previous_response_id": first["id"]} if kind == "previous" else {}
    named = [] if kind == "previous" else [reference({"id": "msg_1"})]
    answer(client_of(service), RESPONSES, {**BODY, **before, "input": [*named, message(5)]})
    told = refused_as_too_much(service, **before, input=[*named, message(9)])
    assert told.startswith(f"{most + 1} items and parts are given; expected at most {most}")


# --- how many are kept ------------------------------------------------------------------------------------------------


def item(name: str, size: int = 1000) -> dict[str, Any]:
    return {"id": name, "text": "x" * size}


def kept(store: ResponseStore, names: Sequence[str]) -> list[str]:
    """Return which of these responses are kept, without using them."""
    return [name for name in names if ("", name) in store._responses]


def test_responses_that_were_used_longest_ago_make_room() -> None:
    responses = store(9_000)
    for name in "abc":
        assert responses.keep("", [], {"id": name, "output": [item(f"of {name}")]})
    assert responses.size < 9_000
    responses.response("", "a")
    assert responses.keep("", [], {"id": "d", "output": [item("of d")]})
    assert kept(responses, "abcd") == ["a", "c", "d"]
    assert not responses.keep("", [], {"id": "e", "output": [item("of e", 9_000)]})  # and nothing makes room for it
    assert kept(responses, "acde") == ["a", "c", "d"]
    for name in "acd":
        responses.remove("", name)
    assert (responses.size, responses._items) == (0, {})


def test_a_response_is_kept_for_a_time_after_its_last_use() -> None:
    now = [0.0]
    responses = store(ttl_s=10, clock=lambda: now[0])
    for name in "ab":
        responses.keep("", [], {"id": name, "output": [item(f"of {name}")]})
    now[0] = 6
    responses.response("", "a")
    now[0] = 11
    responses.item("", "of a", "input")
    assert kept(responses, "ab") == ["a"]
    now[0] = 17
    with pytest.raises(Exception, match="is not kept here, or not any more"):
        responses.response("", "a")
    assert (responses.size, responses._items) == (0, {})


def test_an_item_counts_once_in_however_many_responses() -> None:
    responses, items = store(300_000), list[StoredItem]()
    for number in range(100):
        assert responses.keep("", items, {"id": str(number), "output": [item(f"item {number}")]})
        items = [*responses.response("", str(number)).conversation]
    assert kept(responses, ["0", "99"]) == ["0", "99"]
    assert len(items) == 100


def test_an_item_is_found_as_long_as_a_response_has_it_whatever_others_have_its_id() -> None:
    """Clients send items back with their ids; a later one with an id is found first."""
    responses = store()
    responses.keep("", [], {"id": "a", "output": [item("x")]})
    (original,) = responses.response("", "a").output
    edited = StoredItem.of(item("x", 7))
    responses.keep("", [edited], {"id": "b", "output": []})
    assert responses.item("", "x", "input") is edited
    responses.remove("", "b")
    assert responses.item("", "x", "input") is original
    responses.remove("", "a")
    assert (responses.size, responses._items) == (0, {})


def test_it_takes_no_more_memory_than_it_counts() -> None:
    responses, name = store(1_000_000), "{}" + "東" * 500
    tracemalloc.start()
    try:
        for number in range(200):
            items = [StoredItem.of(item(name.format(f"in {number} {place}"), 50)) for place in range(10)]
            responses.keep("", items, {"id": f"{number}", "output": [item(name.format(f"out {number}"), 50)]})
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.4 * responses.size < used < responses.size
