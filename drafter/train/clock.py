"""The time of a training: how fast it is, how long it takes, and when its minutes are over."""

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping


class Clock:
    """Measure steps and the pauses between them, against a budget of minutes.

    The first step and the first pause of a kind compile, so they say nothing about the next ones. The first step and
    pauses that are `free` do not count towards the minutes.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._steps: deque[float] = deque(maxlen=50)
        self._pauses: dict[str, float] = {}  # seconds of the next one, by kind
        self._last: float | None = None  # end of the previous step, later by the pauses since then
        self._minutes_s = math.inf if minutes is None else 60 * minutes
        self._end: float | None = None  # None: before the first step

    @property
    def step_s(self) -> float | None:
        return statistics.median(self._steps) if self._steps else None

    @property
    def budget_s(self) -> float:
        """The seconds that are left of the minutes; all of them before the first step ends."""
        return self._minutes_s if self._end is None else max(0.0, self._end - time.monotonic())

    def stepped(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now
        self._end = now + self._minutes_s if self._end is None else self._end

    def paused(self, kind: str, seconds: float, again_s: float | None = None, *, free: bool = False) -> None:
        """Record seconds since the last step, which do not count as part of the next one.

        again_s: the seconds of the next such pause, if known.
        """
        self._pauses[kind] = (seconds if kind in self._pauses else 0.0) if again_s is None else again_s
        if self._last is not None:
            self._last += seconds
        if free and self._end is not None:
            self._end += seconds

    def left_s(self, steps: int, between: Mapping[str, int]) -> float | None:
        """Estimate the seconds of `steps` steps with so many pauses of each kind; None before the second step."""
        if self.step_s is None:
            return None
        seconds = steps * self.step_s + sum(count * self._pauses.get(kind, 0.0) for kind, count in between.items())
        return min(seconds, self.budget_s)
