"""The channels of an answer: reasoning, content and calls apart, whole and in a stream, however tokens were cut."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from peagle.engine.request import FinishReason, Request, TokenLogprobs
from peagle.ops.strict_json import dumps
from peagle.result import Result
from peagle.serve.chat import ChatFormatter
from peagle.serve.outputs import OutputChunk
from peagle.text.channels import ChannelParser
from peagle.text.tokenizer import ByteLevelTokenizer

ANSWER = (
    "<|channel|>analysis<|message|>Größer?<|end|><|start|>assistant<|channel|>final<|message|>The 東京 answer"
    "<|end|><|start|>assistant to=functions.find<|channel|>commentary<|message|>"
    '{"a": 1}'
)


def ids(tokenizer: ByteLevelTokenizer, text: str) -> tuple[int, ...]:
    return tokenizer.encode(text, special_tokens=True)


def read(
    tokenizer: ByteLevelTokenizer, answer: str, sizes: Sequence[int], reason: FinishReason = "stop"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (the choices of a stream, the whole choice) of an answer whose tokens arrive in cuts of these sizes."""
    prompt = ids(tokenizer, "<|start|>user<|message|>hi<|end|><|start|>assistant")
    form, parser = ChatFormatter("toy", tokenizer, logprobs=True), ChannelParser(tokenizer, prompt)
    output = ids(tokenizer, answer)
    logprobs = {number: TokenLogprobs(token, -1.0, ()) for number, token in enumerate(output)}
    tokens, parts = output, []
    for size in itertools.cycle(sizes):
        cut, tokens = tokens[:size], tokens[size:]
        deltas = (*parser.add(cut), *([] if tokens else parser.finish()))
        parts.append(OutputChunk(0, cut, deltas, logprobs, None if tokens else reason, ("plain",) * len(cut)))
        if not tokens:
            break
    choices = [choice for part in parts for choice in form.read(part)]
    result = Result(Request(prompt, 100), 0, output, answer, reason, 0.0, 0.0, 1.0)
    return json.loads(dumps(choices)), json.loads(dumps(form.whole([result])["choices"][0]))


@pytest.mark.parametrize("sizes", [[1], [2, 3], [1, 7], [1000]])
def test_channels_are_apart_in_the_stream_and_in_the_whole(tokenizer: ByteLevelTokenizer, sizes: list[int]) -> None:
    choices, whole = read(tokenizer, ANSWER, sizes)
    message = whole["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Größer?"
    assert message["content"] == "The 東京 answer"
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "find", "arguments": '{"a": 1}'}
    assert whole["finish_reason"] == "tool_calls"

    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    for key, text in (("reasoning", "Größer?"), ("reasoning_content", "Größer?"), ("content", "The 東京 answer")):
        assert "".join(delta.get(key, "") for delta in deltas) == text
    calls = [part for delta in deltas for part in delta.get("tool_calls", [])]
    first, *others = calls
    assert first == {**first, "index": 0, "type": "function", "function": {"name": "find", "arguments": ""}}
    assert first["id"].startswith("call_")
    assert all(part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"} for part in others)
    assert "".join(part["function"]["arguments"] for part in calls) == '{"a": 1}'
    assert (deltas[-1], choices[-1]["finish_reason"]) == ({}, "tool_calls")

    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]
    assert bytes(byte for entry in streamed for byte in entry["bytes"]).decode() == "The 東京 answer"
    for choice in choices:
        assert choice["logprobs"] is None or choice["delta"].get("content")


def test_an_answer_cut_off_in_its_reasoning_has_no_content(tokenizer: ByteLevelTokenizer) -> None:
    choices, whole = read(tokenizer, "<|channel|>analysis<|message|>Hm", [2], reason="length")
    assert whole["message"]["content"] == ""
    assert whole["message"]["reasoning"] == "Hm"
    assert whole["finish_reason"] == choices[-1]["finish_reason"] == "length"
    assert all(not choice["delta"].get("content") for choice in choices)
