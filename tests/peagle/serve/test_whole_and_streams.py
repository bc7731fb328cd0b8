"""What a stream adds up to is the whole answer, and log-probabilities are its text's, whatever a model writes."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.request import Request, TokenChunk, TokenLogprobs
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.strict_json import dumps
from peagle.serve.bodies import ChatBody
from peagle.serve.chat import ChatFormatter
from peagle.serve.completions import CompletionFormatter
from peagle.serve.formatter import ResponseFormatter
from peagle.serve.http import parse
from peagle.serve.outputs import OutputCollector
from peagle.serve.response_bodies import ResponsesBody
from peagle.serve.responses import ResponsesFormatter, as_chat
from peagle.text.tokenizer import ByteLevelTokenizer, detokenize
from tests.support.harmony import CALL, RETURN, USER, says
from tests.support.pairs import SPECIALS
from tests.support.servers import HARMONY_SPECIALS, MODEL, K, client_of, events_of

INPUT = '{"input": "d\\u00e9j\\u00e0"}'
PARTS = [  # of answers: control tokens, what headers hold, texts, bytes of incomplete characters
    *HARMONY_SPECIALS,
    *("assistant", "user", "functions.f", "final", "analysis", "commentary", " to=functions.f", " to=functions.g"),
    *(" json", "{}", '{"a": "東', '"}', INPUT, "so viel ", "東京", "\n", "f", "🎉"),
]
MESSAGES = [  # whole ones
    "<|channel|>analysis<|message|>Größer?\n<|end|><|start|>assistant",
    "<|channel|>commentary<|message|>Ich sehe nach.<|end|><|start|>assistant",
    'commentary to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": "東"}<|end|><|start|>assistant',
    f"<|channel|>commentary to=functions.g json<|message|>{INPUT}<|end|><|start|>assistant",
    "<|channel|>commentary to=functions.g<|message|>no JSON<|end|><|start|>assistant",
    '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"rain"<|end|><|start|>assistant',
    "<|channel|>final<|message|>東京 so viel, größer 🎉\n",
]
ANSWERS = st.lists(st.sampled_from(MESSAGES), max_size=4).flatmap(
    lambda whole: st.lists(st.sampled_from(PARTS), max_size=8).map(lambda parts: "".join([*whole, *parts]))
)
PARTIAL = (b"\xe6", b"\x9d", b"\xf0\x9f")
STOPS = st.sampled_from([(), ("\n",), ("so", "größ"), ("京",), ("so viel, g", "<|end|>")])
TOOLS: Any = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "g"},
    {"type": "namespace", "name": "n", "description": "Of n.", "tools": [{"type": "function", "name": "f"}]},
]
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "g"}}]


class Checked:
    """The engine of `Chunks`."""

    stop_token_ids = (RETURN, CALL)
    config = ResolvedConfig(K, slots=1, context=1000)

    def check(self, request: Request) -> None:
        pass


class Chunks:
    """A loop whose engine gives one request these tokens, in cuts that end here."""

    failure, num_running, num_waiting, status = None, 0, 0, "ok"

    def __init__(self, ids: Sequence[int], ends: Sequence[int], stop_token: int | None) -> None:
        self.engine = Checked()
        places = sorted({0, len(ids), *(end for end in ends if end < len(ids))})
        self._cuts = [ids[start:end] for start, end in itertools.pairwise(places)] or [()]
        self._stop, self._aborted = stop_token, False

    async def run(self, function: Callable[[], Any]) -> Any:
        return function()

    async def expect_ready(self) -> None:
        pass

    def submit(self, requests: Sequence[Request]) -> "Chunks":
        (self._request,) = requests
        return self

    async def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        for number, cut in enumerate(self._cuts, 1):
            if self._aborted:
                return
            last = number == len(self._cuts)
            tokens = (*cut, *([self._stop] if last and self._stop is not None else []))
            reason = None if not last else "length" if self._stop is None else "stop"
            logprobs = tuple(TokenLogprobs(token, -float(token), ((token, -1.0),)) for token in tokens)
            yield 0, TokenChunk(self._request, tokens, 0.0, finish_reason=reason, logprobs=logprobs)  # type: ignore[arg-type]

    def abort(self, place: int) -> None:
        assert place == 0
        self._aborted = True

    def close(self) -> None:
        pass


def read(form: ResponseFormatter, answers: OutputCollector) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (the whole reply, the events of the stream) that a form makes of the same answer."""

    async def read_all() -> str:
        text = form.begin()
        async for chunk in answers.chunks():
            text += "".join(map(form.event, form.read(chunk)))
        return text + form.end(answers.results())

    events = events_of(asyncio.run(read_all()))
    return json.loads(dumps(form.whole(answers.results()))), events


def answers_of(
    tokenizer: ByteLevelTokenizer, answer: Sequence[int], ends: Sequence[int], stop: Sequence[str], end: int | None
) -> OutputCollector:
    prompt = tokenizer.encode("<|start|>user<|message|>hi<|end|><|start|>assistant", special_tokens=True)
    request = Request(prompt, 1000, stop=tuple(stop), logprobs=1)
    loop: Any = Chunks(answer, ends, end)
    return OutputCollector(loop, [request], tokenizer, channels=True)


def encoded(tokenizer: ByteLevelTokenizer, text: str, partial: bytes) -> tuple[int, ...]:
    """Encode an answer, and bytes after it that are part of a character."""
    of = {tokenizer.token_bytes(token): token for token in range(len(HARMONY_SPECIALS), 300)}
    return (*tokenizer.encode(text, special_tokens=True), *(of[bytes([byte])] for byte in partial))


def joined(entries: Sequence[Mapping[str, Any]]) -> bytes:
    return bytes(byte for entry in entries for byte in entry["bytes"])


def is_aligned(text: str, entries: Sequence[Mapping[str, Any]], stopped: bool) -> bool:
    """Test whether tokens are those of a text; after a stop string the last one may go on."""
    decoded = joined(entries).decode("utf-8", "replace")
    if not stopped:
        return decoded == text
    return decoded.startswith(text) and not joined(entries[:-1]).decode("utf-8", "replace").startswith(text or " ")


def chat_of_stream(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the deltas of a chat's stream to its choice, as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": ""}
    calls: dict[int, dict[str, Any]] = {}
    entries: list[Any] = []
    reason = None
    for choice in (event["choices"][0] for event in events if event["choices"]):
        delta = choice["delta"]
        for key in ("content", "reasoning"):
            message[key] += delta.get(key, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls[call["index"]] = {key: value for key, value in call.items() if key != "index"}
                continue
            kind = calls[call["index"]]["type"]
            ((key, text),) = call[kind].items()
            calls[call["index"]][kind][key] += text
        entries += (choice["logprobs"] or {"content": []})["content"]
        reason = choice["finish_reason"] or reason
    return {**message, "tool_calls": list(calls.values()), "logprobs": entries, "finish_reason": reason}


@given(ANSWERS, st.sampled_from([b"", *PARTIAL]), st.lists(st.integers(0, 60)), STOPS, st.sampled_from([None, RETURN]))
def test_a_chats_stream_is_its_whole_answer(
    harmony: ByteLevelTokenizer, text: str, partial: bytes, ends: list[int], stop: tuple[str, ...], end: int | None
) -> None:
    ids = encoded(harmony, text, partial)
    body = parse(ChatBody, json.dumps({"messages": USER, "tools": CHAT_TOOLS}).encode())
    answers = answers_of(harmony, ids, ends, stop, end)
    form = ChatFormatter(MODEL, harmony, logprobs=True, tools=body.tools, token_origins=True)
    whole, events = read(form, answers)
    (choice,) = whole["choices"]
    message, streamed = choice["message"], chat_of_stream(events)
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning"] == message.get("reasoning", "")
    assert streamed["tool_calls"] == message.get("tool_calls", [])
    assert streamed["logprobs"] == choice["logprobs"]["content"]
    assert streamed["finish_reason"] == choice["finish_reason"]

    content = message["content"] or ""
    (result,) = answers.results()
    stopped = result.finish_reason == "stop" and result.output_ids[-1:] != (end,)
    assert is_aligned(content, choice["logprobs"]["content"], stopped)
    assert not any(one in content for one in stop)
    tokens = [token for event in events for one in event["choices"] for token in one.get("tokens", [])]
    shown = "".join(token["text"] for token in tokens if token["kind"] == "content")
    assert shown.startswith(content) or "\N{REPLACEMENT CHARACTER}" in content
    assert len(tokens) <= len(ids)


def response_of_stream(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add up the events of a response's stream to its output: texts of items, and log-probabilities of messages."""
    items: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            item = event["item"]
            items[item["id"]] = {**item, "text": "", "logprobs": []}
        elif event["type"].endswith(".delta"):
            items[event["item_id"]]["text"] += event["delta"]
            items[event["item_id"]]["logprobs"] += event.get("logprobs", [])
    return list(items.values())


def text_of(item: Mapping[str, Any]) -> str:
    (part,) = item.get("content", [{"text": item.get("arguments", item.get("input"))}])
    return part["text"]


@given(ANSWERS, st.sampled_from([b"", *PARTIAL]), st.lists(st.integers(0, 60)), st.sampled_from([None, RETURN]))
def test_a_responses_stream_is_its_whole_answer(
    harmony: ByteLevelTokenizer, text: str, partial: bytes, ends: list[int], end: int | None
) -> None:
    fields = {"input": "hi", "tools": TOOLS, "include": ["message.output_text.logprobs"]}
    body = parse(ResponsesBody, json.dumps(fields).encode())
    chat = as_chat(body)
    answers = answers_of(harmony, encoded(harmony, text, partial), ends, (), end)
    form = ResponsesFormatter(MODEL, harmony, body=body, tools=chat.body.tools, tool_names=chat.tool_names)
    whole, events = read(form, answers)
    assert events[-1]["response"] == whole
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = response_of_stream(events)
    assert [item["id"] for item in items] == [item["id"] for item in whole["output"]]
    for item, streamed in zip(whole["output"], items, strict=True):
        assert streamed["text"] == text_of(item)
        (done,) = (
            event
            for event in events
            if event["type"] == "response.output_item.done" and event["item"]["id"] == item["id"]
        )
        assert done["item"] == item
        if item["type"] == "message":
            assert streamed["logprobs"] == item["content"][0]["logprobs"]
            assert is_aligned(text_of(item), streamed["logprobs"], stopped=False)


@given(ANSWERS, st.sampled_from([b"", *PARTIAL]), st.lists(st.integers(0, 60)), STOPS, st.sampled_from([None, RETURN]))
def test_a_completions_stream_is_its_whole_answer(
    harmony: ByteLevelTokenizer, text: str, partial: bytes, ends: list[int], stop: tuple[str, ...], end: int | None
) -> None:
    ids = encoded(harmony, text, partial)
    request = Request((40,), 1000, stop=stop, logprobs=1)
    loop: Any = Chunks(ids, ends, end)
    answers = OutputCollector(loop, [request], harmony)
    whole, events = read(CompletionFormatter(MODEL, harmony, logprobs=True), answers)
    (choice,) = whole["choices"]
    streamed = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(one["text"] for one in streamed) == choice["text"]
    columns = choice["logprobs"]
    for key, entries in columns.items():
        assert [entry for one in streamed if one["logprobs"] for entry in one["logprobs"][key]] == entries
    count = len(columns["tokens"])
    assert [-token for token in columns["token_logprobs"]] == list(ids[:count])
    shown = detokenize(harmony, ids[:count])
    if choice["text"] == detokenize(harmony, ids):
        assert count == len(ids)
    else:
        assert shown.startswith(choice["text"])
        assert not detokenize(harmony, ids[: max(count - 1, 0)]).startswith(choice["text"] or " ")
    for offset, token in zip(columns["text_offset"], ids, strict=False):
        whole_token = harmony.token_bytes(token).decode("utf-8", "ignore")
        assert choice["text"][offset:].startswith(whole_token[: len(choice["text"]) - offset])


@pytest.fixture
def scripted(harmony: ByteLevelTokenizer) -> Iterator[Any]:
    """A client of a server that thinks, writes a stop string's first part, and answers."""
    answer = "".join((MESSAGES[0], MESSAGES[1], MESSAGES[6]))
    service = says(harmony, ({"messages": USER}, answer + "<|return|>"))
    yield client_of(service)
    service.loop.close()


CONTENT = "Ich sehe nach.東京 so viel, größer 🎉\n"


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    ("stop", "text"), [([], CONTENT), (["\n"], CONTENT[:-1]), (["viel, größer?"], CONTENT), (["größ"], CONTENT[:26])]
)
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_the_contents(scripted: Any, k: int, stop: list[str], text: str, stream: bool) -> None:
    """Over HTTP: no control token, no header, no reasoning, nothing of a stop string."""
    body = {"messages": USER, "temperature": 0, "logprobs": True, "top_logprobs": 1, "stop": stop, "stream": stream}
    reply = scripted.post("/v1/chat/completions", json={**body, "speculative": {"num_speculative_tokens": k}})
    if stream:
        choice = chat_of_stream(events_of(reply.text))
        content, entries = choice["content"], choice["logprobs"]
    else:
        (choice,) = reply.json()["choices"]
        content, entries = choice["message"]["content"], choice["logprobs"]["content"]
    assert content == text
    assert is_aligned(content, entries, stopped=text != CONTENT)
    assert not {entry["token"] for entry in entries} & {*SPECIALS, "final"}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_response_are_its_texts(scripted: Any, stream: bool) -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = {"input": "hello", "temperature": 0, **include, "stream": stream}
    reply = scripted.post("/v1/responses", json=body)
    output = events_of(reply.text)[-1]["response"]["output"] if stream else reply.json()["output"]
    messages = [item["content"][0] for item in output if item["type"] == "message"]
    assert [part["text"] for part in messages] == ["Ich sehe nach.", CONTENT[14:]]
    for part in messages:
        assert joined(part["logprobs"]).decode() == part["text"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    without = scripted.post("/v1/responses", json={"input": "hello", "temperature": 0}).json()
    assert all(not item["content"][0]["logprobs"] for item in without["output"] if item["type"] == "message")
