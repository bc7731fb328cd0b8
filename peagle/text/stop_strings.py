"""Find stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Cut a text before its first stop string. Hold back the end of the text while it may begin one.

    Example, for the stop string "END": "an E" gives "an ", "at" then gives "Eat", "E" gives "", and "ND" ends it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""  # the longest end of the text that begins a stop string
        self.complete = False  # whether a stop string has ended the text

    def add(self, piece: str) -> str:
        """Add a piece and return the text that no stop string can cut any more."""
        if self.complete:
            return ""
        text = self._held + piece
        if matches := [start for stop in self._stop if (start := text.find(stop)) >= 0]:
            self._held, self.complete = "", True
            return text[: min(matches)]
        longest = max(map(len, self._stop), default=0)
        starts = range(max(0, len(text) - longest + 1), len(text))
        start = next((i for i in starts if any(stop.startswith(text[i:]) for stop in self._stop)), len(text))
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """Return the text held back, after the end of the text."""
        held, self._held = self._held, ""
        return held
