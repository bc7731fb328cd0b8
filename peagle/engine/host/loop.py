"""Drive an engine for all threads that wait for its tokens.

`AnyEngine.add`, `abort`, `run`, `follow` and `warm_up` are thread-safe. The engine has no thread of its own: one of the
waiting threads takes the turn, runs iterations of the loop, and puts the chunks of all requests into their inboxes.
A thread of its own was 14 % slower at one step per dispatch, as fast at 24. A server drives the loop from one thread
(peagle.serve.engine_loop).
"""

import abc
import collections
import contextlib
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from peagle.engine.auto.widths import CostTable
from peagle.engine.grammar import GrammarError
from peagle.engine.host.handle import Chunks, Handle
from peagle.engine.host.handoff import HandOff
from peagle.engine.host.timing import LoopTimes
from peagle.engine.memory.kv_memory import PageUse, PrefixCacheUse
from peagle.engine.request import Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig

if TYPE_CHECKING:
    from peagle.engine.host.engine import Engine

TURN_S = 0.005  # a reader waits for the turn so long before it looks into its inbox again
Measuring = Callable[[int, int], object]  # (finished runs, all runs)


class AnyEngine(abc.ABC):
    """An `Engine`, or several with one queue (peagle.engine.devices.replicas), for callers of any thread."""

    def __init__(self, config: ResolvedConfig, stop_token_ids: Sequence[int]) -> None:
        self.config, self.stop_token_ids = config, tuple(stop_token_ids)
        self._lock = threading.Lock()  # guards all that a step changes
        self._turn = threading.Lock()  # the thread that drives the loop holds it
        self._entry = threading.RLock()  # a warm-up holds it, to keep requests out
        self._to_abort: collections.deque[Handle] = collections.deque()

    # --- what an engine implements ----------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def one(self) -> "Engine":
        """One engine on its own devices, to inspect and to measure."""

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Whether some request has not ended."""

    @property
    @abc.abstractmethod
    def compile_s(self) -> float:
        """Seconds of compilation."""

    @property
    @abc.abstractmethod
    def times(self) -> LoopTimes:
        """Host overhead of the loop."""

    @property
    @abc.abstractmethod
    def costs(self) -> CostTable | None:
        """Measured times of steps, by which an adaptive engine drafts; None: not measured."""

    @property
    @abc.abstractmethod
    def prefix_cache_use(self) -> PrefixCacheUse | None:
        """Hits and bytes of the prefix cache so far; None without one."""

    @property
    @abc.abstractmethod
    def page_use(self) -> PageUse:
        """The pages of keys and values, and how many of them requests hold."""

    @property
    @abc.abstractmethod
    def num_preemptions(self) -> int:
        """How often a request lost its pages to an earlier one, and was computed again."""

    @abc.abstractmethod
    def check(self, request: Request, hand_off: HandOff | None = None) -> None:
        """Raise InputError, before any work, for a request that cannot run, or cannot continue from this hand-off."""

    @abc.abstractmethod
    def add(self, request: Request, timeout_s: float | None = None, hand_off: HandOff | None = None) -> Handle:
        """Put a request in the queue. After timeout_s seconds it ends with the tokens it has.

        hand_off: from an engine that began the request. Chunks then hold only later tokens, and the message is dropped
        as soon as the request has a slot, or ends. Raises InputError for a request that cannot run, EngineError if the
        engine has failed.
        """

    @abc.abstractmethod
    def settle(self) -> None:
        """If no request is left, wait for the device, so that no work runs into the next measurement."""

    @abc.abstractmethod
    def warm_up(
        self,
        sampled: bool = False,
        measuring: Measuring = lambda *_: None,
        full_logits: bool = False,
        constrained: bool = False,
        alone: bool = False,
    ) -> None:
        """Compile and run once every program that requests need, so that later times include no compilation.

        sampled, full_logits, constrained: some request is not greedy, needs full logits, has a grammar. alone: the
        engine has one slot and no request waits for it, so programs of a crowd are left out. An adaptive engine then
        measures step costs, once, and calls measuring(finished runs, all runs) before each run. Does nothing while the
        engine has a request: programs then compile at their first dispatch.
        """

    @abc.abstractmethod
    def memory_bytes(self) -> tuple[int, int, int]:
        """Compute the bytes of (keys and values, state of slots, logits of a step) on one device; allocate nothing.

        CPU devices share one memory, so theirs are added up. A target over several devices shards its pages; each
        device has a copy of the rest.
        """

    @abc.abstractmethod
    def _step(self) -> Chunks:
        """Run an iteration of the loop; the caller holds _lock."""

    @abc.abstractmethod
    def _finish_aborted(self) -> None:
        """End the requests that `abort` has queued; the caller holds _lock."""

    # --- what callers use -------------------------------------------------------------------------------------------

    def add_all(self, requests: Sequence[Request]) -> list[Handle]:
        """Put all requests in the queue, or none if one of them cannot run."""
        for request in requests:
            self.check(request)
        return [self.add(request) for request in requests]

    def abort(self, handle: Handle) -> None:
        """End a request, if it has not ended, and drop its unread tokens.

        Never waits, so an event loop or a finaliser may call it: during a step, the request ends before the next one.
        """
        handle.has_reader = False
        if handle.finished is not None:
            return
        self._to_abort.append(handle)
        if self._lock.acquire(blocking=False):
            try:
                self._finish_aborted()
            finally:
                self._lock.release()

    def step(self) -> Chunks:
        """Send the next dispatch and read the previous one.

        For a single driver; others call `run`, `follow` or `generate`. Returns [] if no request is left, or nothing has
        arrived yet. Raises EngineError if the device failed, and after Ctrl-C KeyboardInterrupt, before it sends
        anything (peagle.ops.interrupt).
        """
        with self._lock:
            return self._step()

    def follow(self, handle: Handle) -> Iterator[TokenChunk]:
        """Yield the chunks of a request until it ends. A reader that stops early aborts it.

        Raises InputError if a model's outputs are not finite, GrammarError if its grammar cannot be followed.
        """
        for _, chunk in self.run([handle]):
            yield chunk
        if handle.error is not None and handle.has_reader:
            raise handle.error

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, TokenChunk]]:
        """Decode the requests; yield (index in the list, chunk) as chunks arrive.

        A reader that stops early aborts the rest. Raises InputError as `run` does.
        """
        handles = self.add_all(requests)
        index = {handle: number for number, handle in enumerate(handles)}
        try:
            with contextlib.closing(self.run(handles)) as chunks:
                for handle, chunk in chunks:
                    yield index[handle], chunk
        finally:
            self.settle()

    def run(self, handles: Collection[Handle]) -> Generator[tuple[Handle, TokenChunk]]:
        """Yield (handle, chunk) as chunks arrive, until all of the requests have ended.

        Meanwhile the reader may abort requests and add handles to `handles`. A reader that stops early aborts the rest.
        Raises InputError if a model's outputs are not finite, except for an aborted request. A grammar that cannot be
        followed raises nothing: the last chunk of its request has the error.
        """
        read: set[Handle] = set()
        try:
            while left := [handle for handle in handles if handle not in read]:
                ended = self._wait_for(left)
                for handle in left:
                    while handle.inbox:
                        chunk = handle.inbox.popleft()
                        if chunk.finish_reason is not None:
                            ended.add(handle)
                        yield handle, chunk
                    error = handle.error if handle in ended and handle.has_reader else None
                    if error is not None and not isinstance(error, GrammarError):
                        raise error
                read |= ended
        finally:
            for handle in [handle for handle in handles if handle.finished is None]:
                self.abort(handle)

    def _wait_for(self, handles: Sequence[Handle]) -> set[Handle]:
        """Drive the loop, or let another thread do it, until a chunk of one of these arrives.

        Returns the handles that have ended with all chunks delivered. Only the thread that has the turn knows them:
        meanwhile, for others, an ended request may still lack its last chunk.
        """
        while True:
            if self._turn.acquire(timeout=TURN_S):
                try:
                    if not any(handle.inbox or handle.finished for handle in handles):
                        self._advance()
                    if any(handle.inbox or handle.finished for handle in handles):
                        return {handle for handle in handles if handle.finished is not None}
                finally:
                    self._turn.release()
            elif any(handle.inbox for handle in handles):
                return set()

    def _advance(self) -> None:
        """Run an iteration of the loop; deliver its chunks before an abort can add one."""
        with self._lock:
            for handle, chunk in self._step():
                handle.inbox.append(chunk)
