"""Find the first stop string in a text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Cut a text before the first of its stop strings.

    Holds back an end of the text that may begin a stop string, so nothing that was returned has to be taken back.
    Example, for the stop string "END": "an E" gives "an ", "at" then gives "Eat", "E" gives "", and "ND" ends it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""  # the longest end of the text that begins a stop string
        self.complete = False  # whether the text has ended before a stop string

    def add(self, piece: str) -> str:
        """Return the text that is certain with this piece and was not before.

        If the piece completes several stop strings, the one that begins first counts.
        """
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
