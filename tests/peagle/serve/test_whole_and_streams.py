"""What a stream adds up to is the whole answer, and log-probabilities are its text's, whatever a model writes."""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from peagle.answers.result import Piece
from peagle.base.strict_json import dumps
from peagle.engine.request import Request, TokenChunk, TokenLogprobs
from peagle.engine.resolved import ResolvedConfig
from peagle.serve.bodies import ChatBody
from peagle.serve.chat import ChatFormatter
from peagle.serve.completions import CompletionFormatter
from peagle.serve.engine_loop import Call, Loop
from peagle.serve.formatter import Formatter
from peagle.serve.generation import Generation
from peagle.serve.metrics import Metrics
from peagle.serve.request_body import parse
from peagle.serve.response_bodies import ResponsesBody
from peagle.serve.response_chat import as_chat
from peagle.serve.responses import ResponsesFormatter
from peagle.text.tokenizer import Tokenizer, detokenize
from tests.support.harmony import CALL, RETURN, USER
from tests.support.servers import HARMONY_SPECIALS, MODEL, K, chat_of, events_of

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
PARTIAL = st.sampled_from([b"", b"\xe6", b"\x9d", b"\xf0\x9f"])
STOPS = st.sampled_from([(), ("\n",), ("so", "größ"), ("京",), ("so viel, g", "<|end|>")])
TOOLS: Any = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "g"},
    {"type": "namespace", "name": "n", "description": "Of n.", "tools": [{"type": "function", "name": "f"}]},
]
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "g"}}]


class Chunks(Loop):
    """A loop whose engine gives one request these tokens, in cuts that end here."""

    status = "ok"

    def __init__(self, ids: Sequence[int], ends: Sequence[int], stop_token: int | None) -> None:
        super().__init__(ResolvedConfig(K, slots=1, context=1000), (RETURN, CALL), 1)
        places = sorted({0, len(ids), *(end for end in ends if end < len(ids))})
        self._cuts = [ids[start:end] for start, end in itertools.pairwise(places)] or [()]
        self._stop = stop_token

    async def run(self, function: Callable[[], Any]) -> Any:
        return function()

    async def expect_ready(self) -> None:
        pass

    def check(self, request: Request) -> None:
        pass

    def submit(self, requests: Sequence[Request]) -> Call:
        call = Call(requests)
        (job,) = call.jobs
        for number, cut in enumerate(self._cuts, 1):
            last = number == len(self._cuts)
            tokens = (*cut, *([self._stop] if last and self._stop is not None else []))
            reason: Any = None if not last else "length" if self._stop is None else "stop"
            scored = () if job.request.logprobs is None else tokens
            logprobs = tuple(TokenLogprobs(token, -float(token), ((token, -1.0),)) for token in scored)
            call.put(job, TokenChunk(job.request, tokens, 0.0, finish_reason=reason, logprobs=logprobs))
        return call


def read(generation: Generation) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (the whole reply, the events of the stream) that a formatter makes of the same answer."""
    form, entries, read = generation.formatter, list[Any](), generation.formatter.read

    def recorded(piece: Piece) -> Any:
        entries.extend(new := read(piece))
        return new

    async def read_all() -> str:
        return "".join([event async for event in generation.events()])

    form.read = recorded  # type: ignore[method-assign]
    events = events_of(asyncio.run(read_all()))
    return json.loads(dumps(form.reply(entries))), events


@dataclass(frozen=True)
class Answer:
    """What a model writes: a text, and bytes after it that are part of a character; its chunks, and what ends it."""

    text: str
    partial: bytes = b""
    ends: Sequence[int] = ()  # of chunks, in tokens
    stop: tuple[str, ...] = ()
    end: int | None = RETURN  # the token after it; None: the limit ends it

    def ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        of = {tokenizer.token_bytes(token): token for token in range(len(HARMONY_SPECIALS), 300)}
        partial = (of[bytes([byte])] for byte in self.partial)
        return (*tokenizer.encode(self.text, special_tokens=True), *partial)

    def generation(self, form: Formatter, channels: bool = True, stop: bool = True) -> Generation:
        tokenizer = form.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.encode("<|start|>user<|message|>hi<|end|><|start|>assistant", special_tokens=True)
        request = Request(
            prompt, 1000, stop=self.stop if stop else (), logprobs=1 if getattr(form, "logprobs", True) else None
        )
        loop = Chunks(self.ids(tokenizer), self.ends, self.end)
        return Generation(loop, [request], form, Metrics(loop, MODEL), channels=channels)


WRITTEN = st.builds(Answer, ANSWERS, PARTIAL, st.lists(st.integers(0, 60)), STOPS, st.sampled_from([None, RETURN]))


def joined(entries: Sequence[Mapping[str, Any]]) -> bytes:
    return bytes(byte for entry in entries for byte in entry["bytes"])


def is_aligned(text: str, entries: Sequence[Mapping[str, Any]], stopped: bool) -> bool:
    """Test whether tokens are those of a text; after a stop string the last one may go on."""
    decoded = joined(entries).decode("utf-8", "replace")
    if not stopped:
        return decoded == text
    return decoded.startswith(text) and not joined(entries[:-1]).decode("utf-8", "replace").startswith(text or " ")


@given(WRITTEN)
def test_a_chats_stream_is_its_whole_answer(harmony: Tokenizer, written: Answer) -> None:
    body = parse(ChatBody, json.dumps({"messages": USER, "tools": CHAT_TOOLS}).encode())
    form = ChatFormatter(MODEL, harmony, logprobs=True, tools=body.tools, token_origins=True)
    generation = written.generation(form)
    whole, events = read(generation)
    (choice,) = whole["choices"]
    message, streamed = choice["message"], chat_of(events)
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning"] == message.get("reasoning", "")
    assert streamed["tool_calls"] == message.get("tool_calls", [])
    assert streamed["logprobs"] == choice["logprobs"]["content"]
    assert streamed["finish_reason"] == choice["finish_reason"]

    content = message["content"] or ""
    (result,) = generation.results()
    stopped = result.finish_reason == "stop" and result.output_ids[-1:] != (written.end,)
    assert is_aligned(content, choice["logprobs"]["content"], stopped)
    assert not any(text in content for text in written.stop)
    tokens = [token for event in events for part in event["choices"] for token in part.get("tokens", [])]
    shown = "".join(token["text"] for token in tokens if token["kind"] == "content")
    assert shown.startswith(content) or "\N{REPLACEMENT CHARACTER}" in content
    assert len(tokens) <= len(written.ids(harmony))


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


@given(WRITTEN)
def test_a_responses_stream_is_its_whole_answer(harmony: Tokenizer, written: Answer) -> None:
    """There are no stop strings in it."""
    fields = {"input": "hi", "tools": TOOLS, "include": ["message.output_text.logprobs"]}
    body = parse(ResponsesBody, json.dumps(fields).encode())
    chat = as_chat(body)
    form = ResponsesFormatter(MODEL, harmony, body=body, tools=chat.body.tools, tool_names=chat.tool_names)
    whole, events = read(written.generation(form, stop=False))
    assert events[-1]["response"] == whole
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = response_of_stream(events)
    assert [item["id"] for item in items] == [item["id"] for item in whole["output"]]
    for item, streamed in zip(whole["output"], items, strict=True):
        assert streamed["text"] == text_of(item)
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [other for other in done if other["id"] == item["id"]] == [item]
        if item["type"] == "message":
            assert streamed["logprobs"] == item["content"][0]["logprobs"]
            assert is_aligned(text_of(item), streamed["logprobs"], stopped=False)


@given(WRITTEN)
def test_a_completions_stream_is_its_whole_answer(harmony: Tokenizer, written: Answer) -> None:
    ids = written.ids(harmony)
    whole, events = read(written.generation(CompletionFormatter(MODEL, harmony, logprobs=True), channels=False))
    (choice,) = whole["choices"]
    streamed = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(part["text"] for part in streamed) == choice["text"]
    columns = choice["logprobs"]
    for key, entries in columns.items():
        assert [entry for part in streamed if part["logprobs"] for entry in part["logprobs"][key]] == entries
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


def test_the_deltas_and_the_message_of_a_chat(harmony: Tokenizer) -> None:
    """Reasoning has two names. The first delta of a call has its id and name, and the others its arguments."""
    parts = [
        "<|channel|>analysis<|message|>Größer?<|end|><|start|>assistant",
        "<|channel|>final<|message|>The 東京",
        " answer<|end|><|start|>assistant to=functions.find<|channel|>commentary<|message|>",
        '{"a": ',
        "1}",
    ]
    ends = itertools.accumulate(len(harmony.encode(part, special_tokens=True)) for part in parts)
    written = Answer("".join(parts), ends=[*ends])
    whole, events = read(written.generation(ChatFormatter(MODEL, harmony)))
    choices = [event["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    call_id = deltas[4]["tool_calls"][0]["id"]
    assert call_id.startswith("call_")
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning": "Größer?", "reasoning_content": "Größer?"},
        {"content": "The 東京"},
        {"content": " answer"},
        {
            "tool_calls": [
                {"index": 0, "id": call_id, "type": "function", "function": {"name": "find", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 7 + ["tool_calls"]
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "The 東京 answer",
                "refusal": None,
                "tool_calls": [
                    {"id": call_id, "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
                ],
                "reasoning": "Größer?",
                "reasoning_content": "Größer?",
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]


def test_an_answer_cut_off_in_its_reasoning_has_no_content(harmony: Tokenizer) -> None:
    written = Answer("<|channel|>analysis<|message|>Hm", ends=[2], end=None)
    whole, events = read(written.generation(ChatFormatter(MODEL, harmony)))
    (choice,), streamed = whole["choices"], chat_of(events)
    message = choice["message"]
    assert (message["content"], message["reasoning"], choice["finish_reason"]) == ("", "Hm", "length")
    assert (streamed["content"], streamed["reasoning"], streamed["finish_reason"]) == ("", "Hm", "length")
