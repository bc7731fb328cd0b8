"""The tokens of a piece of an answer's text."""

import collections
from typing import NamedTuple


class TokenPlace(NamedTuple):
    """A token by its number in the answer, and where in the answer's text it stands (`TokenPlaces`)."""

    number: int
    place: int


def begins_character(data: bytes) -> bool:
    """Return whether a token's bytes begin with the first byte of a character."""
    return bool(data) and data[0] & 0xC0 != 0x80


class TokenPlaces:
    """Match the tokens of an answer with its text, which is released in pieces.

    A token's place is that of the first character that it is a part of. Example: the tokens "a", "b\\xe6" and
    "\\x9d\\xb1" of the text "ab東" stand at 0, 1 and 2.
    """

    def __init__(self) -> None:
        self._places: collections.deque[int] = collections.deque()  # of the tokens that were not taken
        self._first = 0  # the number of the first of them

    def add(self, place: int) -> None:
        self._places.append(place)

    def take(self, start: int, end: int | None = None) -> tuple[TokenPlace, ...]:
        """Return and drop the tokens from start to before end (None: to the last). Drop those before start."""
        taken = []
        while self._places and (end is None or self._places[0] < end):
            place = self._places.popleft()
            if place >= start:
                taken.append(TokenPlace(self._first, place))
            self._first += 1
        return tuple(taken)
