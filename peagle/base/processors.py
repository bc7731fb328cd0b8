"""Measure how long this process's threads ran, and how long they waited for a processor."""

import contextlib
from pathlib import Path
from typing import NamedTuple

TASKS = Path("/proc/self/task")


class ThreadTimes(NamedTuple):
    """Seconds, summed over live threads. waited_s: ready to run, but without a processor."""

    ran_s: float
    waited_s: float

    def waiting_frac(self, before: "ThreadTimes") -> float:
        """Return the share of waiting since `before`; 0 if no thread was ready to run."""
        ran_s, waited_s = self.ran_s - before.ran_s, self.waited_s - before.waited_s
        return waited_s / (ran_s + waited_s) if waited_s > 0 else 0.0


def thread_times() -> ThreadTimes:
    """Read Linux's scheduler statistics; zeros on a system without them."""
    ran_ns = waited_ns = 0
    for path in TASKS.glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that has ended
            ran, waited, *_ = map(int, path.read_text().split())
            ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    return ThreadTimes(ran_ns / 1e9, waited_ns / 1e9)
