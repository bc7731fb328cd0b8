"""Where the tokens of an answer stand in its text."""

import collections
from typing import NamedTuple


class TokenOffset(NamedTuple):
    """A token by its number in the answer, and its offset in the answer's text (`TokenOffsets`)."""

    number: int
    offset: int


def starts_character(data: bytes) -> bool:
    """Return whether a token's bytes start with the first byte of a character."""
    return bool(data) and data[0] & 0xC0 != 0x80


class TokenOffsets:
    """Match the tokens of an answer with its text, which is released in pieces.

    A token's offset is that of the first character that it is a part of. Example: the tokens "a", "b\\xe6" and
    "\\x9d\\xb1" of the text "ab東" have the offsets 0, 1 and 2.
    """

    def __init__(self) -> None:
        self._offsets: collections.deque[int] = collections.deque()  # of the tokens that were not taken
        self._first = 0  # the number of the first of them

    def add(self, offset: int) -> None:
        self._offsets.append(offset)

    def take(self, start: int, end: int | None = None) -> tuple[TokenOffset, ...]:
        """Return and drop the tokens in start <= offset < end (None: no end). Drop those before start."""
        taken = []
        while self._offsets and (end is None or self._offsets[0] < end):
            offset = self._offsets.popleft()
            if offset >= start:
                taken.append(TokenOffset(self._first, offset))
            self._first += 1
        return tuple(taken)
