"""Schedule requests: queue, slots, and the next dispatch, a chunk of prompts or steps.

Host code without JAX and without a clock: times are arguments. First come, first served. A request has a slot from its
first chunk on. Chunks alternate with steps of the decoding slots, so that neither starves. Short prompts share a pass.
"""

import collections
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

STEPS_SHARE = 0.5  # time of the steps between two chunks, over the time of a chunk
LONGEST_DISPATCH_S = 0.012  # of steps: slow steps come in shorter dispatches, so that tokens arrive in time
WAITING_SHARE = 4  # while a request waits for a slot, divide the steps of a dispatch by this
KEPT_SPEED = 0.8  # share of their speed that requests without a grammar keep while one with a grammar runs
MOST_BETWEEN_MASKED = 64  # most whole steps between two masked ones
MASKED_UNMEASURED = 16  # after so many masked steps a whole step runs, and is timed again

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class PromptPiece(Generic[Key]):
    """Tokens begin .. begin + count - 1 of a prompt; `last`: they complete it. count 0: all of it is cached."""

    key: Key
    begin: int
    count: int
    last: bool


@dataclass(frozen=True)
class Chunk(Generic[Key]):
    """Compute pieces of prompts in one pass of `shape`: (prompts, rows per prompt)."""

    pieces: tuple[PromptPiece[Key], ...]
    shape: tuple[int, int]


@dataclass(frozen=True)
class Steps:
    """Run at most `count` steps of all decoding slots without a grammar.

    masked: run one step of all decoding slots, cut so that the host can compute masks in between.
    """

    count: int
    masked: bool = False


@dataclass(frozen=True)
class DispatchTimes:
    """Seconds of the latest chunk, step and masked step; 0: not measured yet."""

    chunk_s: float = 0.0
    step_s: float = 0.0
    masked_s: float = 0.0


@dataclass
class _Progress:
    length: int  # of the prompt
    done: int  # its tokens in pages


@dataclass
class Scheduler(Generic[Key]):
    """The queue and the slots of an engine."""

    slots: int
    shapes: Sequence[tuple[int, int]]  # of passes over prompts: (prompts, rows per prompt), the first for one prompt
    steps_per_dispatch: int
    _waiting: collections.deque[tuple[Key, int]] = field(default_factory=collections.deque, init=False)
    _by_slot: list[Key | None] = field(init=False)
    _progress: dict[Key, _Progress] = field(default_factory=dict, init=False)  # of prefilling requests, in order
    _steps_due: bool = field(default=False, init=False)  # a chunk was sent, and no steps since
    _constrained: set[Key] = field(default_factory=set, init=False)  # requests with a grammar
    _owed: int = field(default=0, init=False)  # whole steps before the next masked one
    _cuts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._by_slot = [None] * self.slots

    def add(self, key: Key, length: int, constrained: bool = False, first: bool = False) -> None:
        """Put a request in the queue. length: of its prompt. constrained: by a grammar. first: before all others."""
        (self._waiting.appendleft if first else self._waiting.append)((key, length))
        if constrained:
            self._constrained.add(key)

    def remove(self, key: Key) -> None:
        self._constrained.discard(key)
        self._progress.pop(key, None)
        if key in self._by_slot:
            self._by_slot[self._by_slot.index(key)] = None
        else:
            self._waiting = collections.deque(entry for entry in self._waiting if entry[0] != key)

    @property
    def decoding(self) -> list[tuple[int, Key]]:
        """(slot, request) of the requests that take steps."""
        return [(slot, key) for slot, key in enumerate(self._by_slot) if key is not None and key not in self._progress]

    @property
    def prefilling(self) -> list[Key]:
        """Requests whose prompts are not complete, in the order in which they began."""
        return list(self._progress)

    @property
    def num_active(self) -> int:
        return len(self.decoding)

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot, the prefilling ones included."""
        return self.slots - self._by_slot.count(None)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def next(self, times: DispatchTimes, begin: Callable[[Key], int | None] = lambda _: 0) -> Chunk[Key] | Steps | None:
        """Choose the next dispatch and count it as sent; None: there is nothing to do.

        begin: called before a request gets a slot; returns the number of its cached tokens, or None if there is no
        memory for it yet.
        """
        while self._waiting and None in self._by_slot:
            key, length = self._waiting[0]
            if not self._joins(length):
                break
            known = begin(key)
            if known is None:
                break
            self._waiting.popleft()
            self._by_slot[self._by_slot.index(None)] = key
            self._progress[key] = _Progress(length, known)
        if self._progress and not (self._steps_due and self.num_active):
            self._steps_due = True
            return self._chunk()
        self._steps_due = False
        return self._steps(times) if self.num_active else None

    def _joins(self, length: int) -> bool:
        """Whether a prompt begins now: no other is being prefilled, or all are short enough to share a pass.

        A prompt that waits for the others to be complete can use their pages.
        """
        lengths = [progress.length for progress in self._progress.values()]
        return not lengths or any(
            len(lengths) < count and max(*lengths, length) <= rows for count, rows in self.shapes[1:]
        )

    def _chunk(self) -> Chunk[Key]:
        """Take the earliest prompt; others share its pass if they are as short."""
        keys, shape = [next(iter(self._progress))], self.shapes[0]
        for count, rows in self.shapes[1:]:
            short = [key for key in self._progress if self._piece(key, rows).last][:count]
            if keys[0] in short and len(short) > len(keys):
                keys, shape = short, (count, rows)
        pieces = tuple(self._piece(key, shape[1]) for key in keys)
        for piece in pieces:
            self._progress[piece.key].done += piece.count
            if piece.last:
                del self._progress[piece.key]
        return Chunk(pieces, shape)

    def _piece(self, key: Key, rows: int) -> PromptPiece[Key]:
        done, length = self._progress[key].done, self._progress[key].length
        count = min(rows - (done > 0), length - done)
        return PromptPiece(key, done, count, done + count == length)

    def _steps(self, times: DispatchTimes) -> Steps:
        """Choose steps: masked ones while a request has a grammar, and whole steps of the others in between."""
        num_constrained = sum(key in self._constrained for _, key in self.decoding)
        if not num_constrained:
            return Steps(self._num_steps(times))
        if self._owed and num_constrained < self.num_active:
            count = min(self._owed, self._num_steps(times))
            self._owed -= count
            return Steps(count)
        self._cuts += 1
        self._owed = self._steps_between_masked(times)
        return Steps(1, masked=True)

    def _steps_between_masked(self, times: DispatchTimes) -> int:
        """Count the whole steps n between two masked ones, so that requests without a grammar keep KEPT_SPEED.

        They keep (n + 1) step_s / (masked_s + n step_s). For a small model, a masked step takes several times as long
        as a whole one. n has a limit, so that requests with a grammar advance.
        """
        least = int(self._cuts % MASKED_UNMEASURED == 0)
        if not (times.step_s and times.masked_s):
            return 1
        missing, gained = KEPT_SPEED * times.masked_s - times.step_s, (1 - KEPT_SPEED) * times.step_s
        if missing <= 0:
            return least
        return MOST_BETWEEN_MASKED if missing >= MOST_BETWEEN_MASKED * gained else math.ceil(missing / gained)

    def _num_steps(self, times: DispatchTimes) -> int:
        prefilling = bool(self._progress)
        most = float(self.steps_per_dispatch // (WAITING_SHARE if self._waiting and not prefilling else 1))
        if times.step_s:
            most = min(most, LONGEST_DISPATCH_S / times.step_s)
        if prefilling:
            most = min(most, STEPS_SHARE * times.chunk_s / times.step_s if times.step_s else 1.0)
        return max(1, round(most))
