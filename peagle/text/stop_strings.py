"""Find stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Cut a text before its first stop string. Hold back the end of the text while it may begin one.

    Example, for the stop string "END": "an E" gives "an ", "at" then gives "Eat", "E" gives "", and "ND" ends it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._firsts = tuple({string[0] for string in stop})
        self._held = ""  # the longest end of the text that begins a stop string
        self._unsearched = 0  # characters of it in which no stop string may end
        self.complete = False  # whether a stop string has ended the text

    def add(self, piece: str, search: bool = True) -> str:
        """Add a piece and return the text that no stop string can cut any more.

        search: whether a stop string may end in this piece. It may begin in an earlier one in any case.
        """
        if self.complete:
            return ""
        text = self._held + piece
        if not search:
            self._unsearched = len(text)
        unsearched = self._unsearched
        places = [text.find(stop, max(0, unsearched - len(stop) + 1) if unsearched else 0) for stop in self._stop]
        if matches := [place for place in places if place >= 0]:
            self._held, self.complete = "", True
            return text[: min(matches)]
        longest = max(map(len, self._stop), default=0)
        starts = range(max(0, len(text) - longest + 1), len(text))
        start = next((i for i in starts if text.startswith(self._firsts, i) and self._begins(text[i:])), len(text))
        self._held, self._unsearched = text[start:], max(0, self._unsearched - start)
        return text[:start]

    def _begins(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)

    def flush(self) -> str:
        """Return the text held back, after the end of the text."""
        held, self._held = self._held, ""
        return held
