"""Schedule requests: queue, slots, and the next dispatch, a prompt chunk or steps.

Host only.

No JAX and no clock: costs are arguments. First come, first served. One prompt at a time is in the lane; its chunks
alternate with steps of the active slots, so that neither starves. A prompt that is prefilled before a slot is free
waits in the lane and takes the first free slot. Prompts that were prefilled elsewhere are loaded, which takes time, so
these alternate with steps, too.
"""

import collections
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

STEPS_SHARE = 0.5  # time of the steps between two chunks, over the time of a chunk
LONGEST_DISPATCH_S = 0.012  # of steps: with many active rows a dispatch has fewer steps, so that tokens are not late
WAITING_SHARE = 4  # while a request waits for a slot, divide the steps of a dispatch by this
KEPT_SPEED = 0.8  # of requests without a grammar, beside some with one
MOST_BETWEEN_CUTS = 64  # whole steps
CUTS_UNMEASURED = 16  # cut steps after which a whole step is timed again

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Chunk(Generic[Key]):
    """Prefill tokens begin..begin+count-1 of a prompt; `last`: they complete it."""

    key: Key
    begin: int
    count: int
    last: bool


@dataclass(frozen=True)
class Admit(Generic[Key]):
    """Insert the prefilled prompt of the lane into a slot."""

    key: Key
    slot: int


@dataclass(frozen=True)
class Steps:
    """Run at most `count` steps of all slots but those with a grammar.

    cut: run one step of all slots, cut so that the host can make masks in its midst.
    """

    count: int
    cut: bool = False


@dataclass(frozen=True)
class Costs:
    """Seconds of the latest chunk, of the latest step and of the latest cut step; 0: none was measured yet."""

    chunk_s: float = 0.0
    step_s: float = 0.0
    cut_s: float = 0.0


@dataclass
class _Lane(Generic[Key]):
    key: Key
    length: int
    done: int
    loaded: bool = field(init=False)  # whole, when it began

    def __post_init__(self) -> None:
        self.loaded = self.done == self.length


@dataclass
class Scheduler(Generic[Key]):
    """The queue, the lane and the slots of an engine."""

    slots: int
    chunk: int
    steps_per_dispatch: int
    _waiting: collections.deque[tuple[Key, int]] = field(default_factory=collections.deque, init=False)
    _lane: _Lane[Key] | None = field(default=None, init=False)
    _held: list[Key | None] = field(init=False)
    _steps_due: bool = field(default=False, init=False)  # a chunk was sent, or a prompt loaded, and no steps since
    _constrained: set[Key] = field(default_factory=set, init=False)  # requests with a grammar
    _owed: int = field(default=0, init=False)  # whole steps before the next cut one
    _cuts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._held = [None] * self.slots

    def add(self, key: Key, prompt_length: int, constrained: bool = False) -> None:
        """Append a request to the queue. constrained: it has a grammar."""
        self._waiting.append((key, prompt_length))
        if constrained:
            self._constrained.add(key)

    def remove(self, key: Key) -> int | None:
        """Remove a request from queue, lane or slot; return the slot it frees, if it had one."""
        self._constrained.discard(key)
        if self._lane is not None and self._lane.key == key:
            self._lane = None
            return None
        if key in self._held:
            slot = self._held.index(key)
            self._held[slot] = None
            return slot
        self._waiting = collections.deque(entry for entry in self._waiting if entry[0] != key)
        return None

    @property
    def last_without_slot(self) -> Key | None:
        """The request that came last, of those in the queue and the lane."""
        if self._waiting:
            return self._waiting[-1][0]
        return None if self._lane is None else self._lane.key

    @property
    def held(self) -> tuple[Key | None, ...]:
        """Requests by slot."""
        return tuple(self._held)

    @property
    def num_active(self) -> int:
        return self.slots - self._held.count(None)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, the one in the lane included."""
        return len(self._waiting) + (self._lane is not None)

    @property
    def lane_free(self) -> bool:
        """No prompt is in the lane."""
        return self._lane is None

    def next(self, costs: Costs, begin: Callable[[Key], int] = lambda _: 0) -> Chunk[Key] | Admit[Key] | Steps | None:
        """Choose the next dispatch and count it as sent; None: there is nothing to do."""
        if self._lane is None and self._waiting:
            key, length = self._waiting.popleft()
            self._lane = _Lane(key, length, begin(key))
        lane = self._lane
        prefilled = lane is not None and lane.done == lane.length
        steps_due = self._steps_due and self.num_active > 0
        if lane is not None and prefilled and None in self._held and not (lane.loaded and steps_due):
            slot = self._held.index(None)
            self._held[slot], self._lane = lane.key, None
            self._steps_due |= lane.loaded
            return Admit(lane.key, slot)
        if lane is not None and not prefilled and not steps_due:
            start, count = lane.done, min(self.chunk - lane.done % self.chunk, lane.length - lane.done)
            lane.done += count
            self._steps_due = True
            return Chunk(lane.key, start, count, lane.done == lane.length)
        self._steps_due = False
        if not self.num_active:
            return None
        return self._steps(lane is not None and not prefilled, costs)

    def _steps(self, prefilling: bool, costs: Costs) -> Steps:
        """Choose steps: cut ones while a request has a grammar, with whole ones of the others between them."""
        num_constrained = sum(key in self._constrained for key in self._held)
        if not num_constrained:
            return Steps(self._num_steps(prefilling, costs))
        if self._owed and num_constrained < self.num_active:
            count = min(self._owed, self._num_steps(prefilling, costs))
            self._owed -= count
            return Steps(count)
        self._cuts += 1
        self._owed = self._steps_between_cuts(costs)
        return Steps(1, cut=True)

    def _steps_between_cuts(self, costs: Costs) -> int:
        """Count the whole steps n after a cut one, with which the others keep (n + 1) step_s / (cut_s + n step_s) of
        their speed: a cut step of a small model takes several times as long as a whole one. At most MOST_BETWEEN_CUTS,
        so that requests with a grammar go on."""
        least = int(self._cuts % CUTS_UNMEASURED == 0)
        if not (costs.step_s and costs.cut_s):
            return 1
        missing, gained = KEPT_SPEED * costs.cut_s - costs.step_s, (1 - KEPT_SPEED) * costs.step_s
        if missing <= 0:
            return least
        return MOST_BETWEEN_CUTS if missing >= MOST_BETWEEN_CUTS * gained else math.ceil(missing / gained)

    def _num_steps(self, prefilling: bool, costs: Costs) -> int:
        most = float(self.steps_per_dispatch // (WAITING_SHARE if self.num_waiting and not prefilling else 1))
        if costs.step_s:
            most = min(most, LONGEST_DISPATCH_S / costs.step_s)
        if prefilling:
            most = min(most, STEPS_SHARE * costs.chunk_s / costs.step_s if costs.step_s else 1.0)
        return max(1, round(most))
