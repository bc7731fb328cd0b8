"""Dispatches that were sent and not yet read; how long they take, and how long the device waits for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from peagle.engine.host.handle import Handle
from peagle.engine.host.scheduler import DispatchTimes
from peagle.engine.host.step_batches import StepBatch


@dataclass(frozen=True)
class InFlight:
    """What a dispatch computes, and for whom: it carries its own map from rows to requests."""

    batch: StepBatch | None  # None: a chunk of prompts
    result: jax.Array
    requests: tuple[Handle | None, ...]  # of each row of the result; () if a chunk completed no prompt
    sent_s: float

    @property
    def most_tokens(self) -> int:
        """The most tokens that its steps add to a request."""
        return 0 if self.batch is None else self.batch.count * (self.batch.kind.num_drafts + 1)

    @property
    def ready(self) -> bool:
        return bool(self.result.is_ready())  # type: ignore[attr-defined]

    def wait(self) -> np.ndarray:
        """Wait for the result and copy it to the host, if a request has a row of it."""
        if self.requests:
            return np.asarray(self.result)
        jax.block_until_ready(self.result)
        return np.zeros((0,), np.int32)


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
