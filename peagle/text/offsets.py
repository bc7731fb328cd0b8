"""The text of an answer's tokens, and where each of them stands in it."""

import collections
from typing import NamedTuple

from peagle.text.tokenizer import Detokenizer, Tokenizer


class TokenOffset(NamedTuple):
    """A token of an answer.

    number: in the answer. offset: of the first character that it is a part of, in the answer's text. text: what it
    completes. Example: the tokens "a", "b\\xe6" and "\\x9d\\xb1" of "ab東" have offsets 0, 1, 2 and texts a, b, 東.
    """

    number: int
    offset: int
    text: str = ""


class AnswerText(Detokenizer):
    """Detokenize an answer token by token. The tokens wait here until `take` matches them with text that is shown."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._waiting: collections.deque[TokenOffset] = collections.deque()
        self._num_tokens = self._length = 0  # tokens and characters that were read

    def read(self, token_id: int) -> str:
        """Return the text that a token completes."""
        data = self._token_bytes(token_id)
        starts_character = bool(data) and data[0] & 0xC0 != 0x80
        before = self.flush() if self._held and starts_character else ""
        text = before + self._decode(data)
        self._waiting.append(TokenOffset(self._num_tokens, self._length + len(before), text))
        self._num_tokens += 1
        self._length += len(text)
        return text

    def take(self, start: int, end: int | None = None) -> tuple[TokenOffset, ...]:
        """Return and drop the tokens in start <= offset < end (None: no end). Drop those before start."""
        taken = []
        while self._waiting and (end is None or self._waiting[0].offset < end):
            token = self._waiting.popleft()
            if token.offset >= start:
                taken.append(token)
        return tuple(taken)
