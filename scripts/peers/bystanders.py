"""The processor time of processes, and the share that others took during a measurement. Linux only."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from scripts.runs import Json, spread

PROC = Path("/proc")
_IDLE = (3, 4)  # fields of /proc/stat's first line that are not work: idle, waiting for a disk


def cpu_s(pid: int) -> float | None:
    """Return the processor time of a process, over all its threads; None if that is not known."""
    try:
        return _ticks_of(pid) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None


def memory_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None if that is not known."""
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _ticks_of(pid: int) -> int:
    """Count the clock ticks that a process has worked. Raises OSError if there is none."""
    own = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, own))


class Bystanders:
    """A context that measures `frac`, the share of all processors' time that other processes took.

    None if that is not known. The clock ticks every 10 ms: shares of short measurements are rough.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self.frac: float | None = None

    def __enter__(self) -> "Bystanders":
        self._started, self._before = time.monotonic(), self._ticks()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None or (after := self._ticks()) is None:
            return
        seconds = (after - self._before) / os.sysconf("SC_CLK_TCK")
        share = seconds / ((time.monotonic() - self._started) * (os.cpu_count() or 1))
        self.frac = min(max(share, 0.0), 1.0)

    def _ticks(self) -> int | None:
        """Count the clock ticks that all other processes have worked since the machine started."""
        try:
            fields = (PROC / "stat").read_text().splitlines()[0].split()[1:9]
            own = sum(map(_ticks_of, self._pids))
        except OSError:
            return None
        return sum(int(value) for i, value in enumerate(fields) if i not in _IDLE) - own


def others_of(lines: Iterable[Json]) -> Json | None:
    """Summarise the share that others took in the rounds of lines; None if it is not known."""
    return spread([line["others_frac"] for line in lines if line["round"] and line["others_frac"] is not None])
