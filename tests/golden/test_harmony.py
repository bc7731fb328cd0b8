"""Channels against what openai-harmony made of the same tokens (python -m scripts.golden.harmony), any cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.text.channels import CONTROL, ChannelParser
from scripts.golden.harmony import GOLDEN
from tests.support.pairs import ByteTokenizer

ABOUT, *LINES = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
PROMPT = ("<|start|>", "assistant")


class RecordedTokenizer(ByteTokenizer):
    """The tokens of the record, and of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        tokens = [*PROMPT, *CONTROL, *(token for line in LINES for token in line["tokens"])]
        self.ids = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
        self.special_tokens = {self.ids[name]: name for name in CONTROL}
        self._bytes = [token.encode("latin-1") for token in self.ids]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]


TOKENIZER = RecordedTokenizer()


def expected(messages: list[Any]) -> list[tuple[str, str, str | None]]:
    """Read the record's messages as (kind, text, tool)."""
    found = []
    for channel, recipient, text in messages:
        if recipient is not None and recipient.startswith("functions."):
            found.append(("tool_call", text, recipient.removeprefix("functions.")))
        elif text:
            found.append(("reasoning" if channel == "analysis" else "content", text, None))
    return found


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_messages_are_those_of_openai_harmony(line: dict[str, Any]) -> None:
    ids = [TOKENIZER.ids[token] for token in line["tokens"]]

    @given(st.sets(st.integers(0, len(ids))))
    @settings(max_examples=20)
    def check(cuts: set[int]) -> None:
        parser = ChannelParser(TOKENIZER, [TOKENIZER.ids[token] for token in PROMPT])
        ends = sorted({*cuts, len(ids)})
        deltas = [
            delta for start, end in zip([0, *ends], ends, strict=False) for delta in parser.add(ids[start:end])
        ] + parser.finish()
        messages: dict[int, tuple[str, str, str | None]] = {}
        for delta in deltas:
            _, text, _ = messages.get(delta.message, ("", "", None))
            tool = None if delta.call is None else delta.call.name
            messages[delta.message] = delta.kind, text + delta.text, tool
        assert list(messages.values()) == expected(line["messages"])

    check()


def test_the_record_covers_what_it_should() -> None:
    """Each kind, characters that are cut by tokens, control tokens inside messages, answers that were cut off."""
    assert ABOUT["recorded"] == {"openai-harmony": "0.0.8"}
    assert {kind for line in LINES for kind, _, _ in expected(line["messages"])} == {
        "reasoning",
        "content",
        "tool_call",
    }
    assert any(b"\x8e".decode("latin-1") == token[-1] for line in LINES for token in line["tokens"])
    assert any("<|message|>" in text for line in LINES for _, _, text in line["messages"])
    assert {line["tokens"][-1] in CONTROL for line in LINES} == {True, False}
    assert GOLDEN.stat().st_size < 50_000
