"""Measure an engine's loop: time per dispatch, and idle time of the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from peagle.engine.host.in_flight import InFlight
from peagle.engine.host.scheduler import DispatchTimes


@dataclass
class LoopTimes:
    """Host overhead of the loop: how long the device was idle while requests ran.

    gap_s is an upper bound: a gap counts from when the previous dispatch was last seen running.
    """

    gap_s: float = 0.0
    busy_s: float = 0.0  # from each dispatch until it was read; overlaps count once

    @property
    def gap_frac(self) -> float | None:
        total = self.gap_s + self.busy_s
        return self.gap_s / total if total else None


@dataclass
class LoopClock:
    """The times of a loop, and of dispatches for its scheduler. All times are of time.perf_counter()."""

    times: LoopTimes = field(default_factory=LoopTimes)
    latest: DispatchTimes = field(default_factory=DispatchTimes)
    last_read_s: float | None = None  # None: no request is left, so an idle device is no gap

    def stop(self) -> None:
        """Count no gap until the next dispatch is read."""
        self.last_read_s = None

    def reset(self) -> None:
        """Forget all times but the latest dispatches'."""
        self.times, self.last_read_s = LoopTimes(), None

    def sending(self, now: float, in_flight: Sequence[InFlight]) -> None:
        """Count the time in which the device may have waited for the dispatch that is sent now."""
        last = in_flight[-1] if in_flight else None
        if last is not None and not last.ready:
            return
        busy_until = [self.last_read_s] if self.last_read_s is not None else []
        busy_until += [last.sent_s] if last is not None else []
        if busy_until:
            self.times.gap_s += now - max(busy_until)

    def read(self, sent: InFlight, now: float) -> None:
        """Record the time of a chunk or a step, since the end of the previous dispatch."""
        seconds = now - max(sent.sent_s, self.last_read_s or 0.0)
        self.last_read_s = now
        self.times.busy_s += seconds
        if sent.batch is None:
            self.latest = replace(self.latest, chunk_s=seconds)
        elif sent.batch.kind.masked:
            self.latest = replace(self.latest, masked_s=seconds)
        else:
            self.latest = replace(self.latest, step_s=seconds / sent.batch.count)
