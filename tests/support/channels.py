"""A tokenizer with the control tokens of the harmony format, and a token for each byte."""

import re
from collections.abc import Iterable, Sequence

from peagle.text.channels import CONTROL
from tests.support.pairs import ByteTokenizer

IDS = {name: 256 + number for number, name in enumerate(CONTROL)}
Stream = Sequence[str]  # of an answer: a control token, or a text


class HarmonyTokenizer(ByteTokenizer):
    """A token for each byte, and the control tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.special_tokens = {token_id: name for name, token_id in IDS.items()}

    def token_bytes(self, token_id: int) -> bytes:
        return self.special_tokens[token_id].encode() if token_id > 255 else bytes([token_id])


def ids(stream: Iterable[str]) -> tuple[int, ...]:
    """Encode; text that spells a control token with a space in front is text."""
    return tuple(i for part in stream for i in ([IDS[part]] if part in IDS else part.encode("latin-1")))


def split(text: str) -> Stream:
    """Cut a text at the control tokens that it spells."""
    return [part for part in re.split("(" + "|".join(map(re.escape, CONTROL)) + ")", text) if part]


PROMPT = ids(["<|start|>", "user", "<|message|>", "Hi", "<|end|>", "<|start|>", "assistant"])
