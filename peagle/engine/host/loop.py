"""Drive an engine for all threads that wait for its tokens.

`add`, `abort`, `run` and `warm_up` are thread-safe. The engine has no thread of its own: one of the waiting
threads takes the turn and runs steps, which put the chunks of all requests into their inboxes. A thread of its own was
14 % slower at one step per dispatch, as fast at 24. A server drives the loop from one thread
(peagle.serve.engine_loop).
"""

import abc
import collections
import contextlib
import threading
from collections.abc import Collection, Generator, Iterator, Sequence

from peagle.engine.auto.measure import Measuring
from peagle.engine.grammar import GrammarError
from peagle.engine.host.handle import EngineError, Handle
from peagle.engine.host.handoff import HandOff
from peagle.engine.host.warmup import Needs
from peagle.engine.request import Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig

TURN_S = 0.005  # a reader waits for the turn so long before it looks into its inbox again


class EngineBase(abc.ABC):
    """What `Engine` and `Replicas` have in common: threads add requests and read their tokens."""

    def __init__(self, config: ResolvedConfig, stop_token_ids: Sequence[int]) -> None:
        self.config, self.stop_token_ids = config, tuple(stop_token_ids)
        self._lock = threading.Lock()  # guards all that a step changes
        self._turn = threading.Lock()  # the thread that drives the loop holds it
        self._entry = threading.RLock()  # a warm-up holds it, to keep requests out
        self._to_abort: collections.deque[Handle] = collections.deque()

    @abc.abstractmethod
    def check(self, request: Request, hand_off: HandOff | None = None) -> None:
        """Raise InputError, before any work, for a request that cannot run, or cannot continue from this hand-off."""

    @abc.abstractmethod
    def add(self, request: Request, hand_off: HandOff | None = None) -> Handle:
        """Put a request in the queue.

        hand_off: from an engine that began the request. Chunks then hold only later tokens, and the message is dropped
        as soon as the request has a slot, or ends. Raises InputError for a request that cannot run, EngineError if the
        engine has failed.
        """

    @abc.abstractmethod
    def step(self) -> None:
        """Send the next dispatch, read the previous one, and put its chunks into the inboxes of their requests.

        For a single driver; others call `run` or `generate`. Does nothing if no request is left. Raises
        EngineError if the device failed, and after Ctrl-C KeyboardInterrupt, before it sends anything
        (peagle.base.interrupt).
        """

    @abc.abstractmethod
    def settle(self) -> None:
        """If no request is left, wait for the device, so that no work runs into the next measurement."""

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Whether some request has not ended."""

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
        measures step costs, once, and calls measuring(finished runs, all runs) before each run. Does nothing while
        there is a request: programs then compile at their first dispatch.
        """
        with self._entry:
            with self._lock:
                self._finish_aborted()
                if self.busy:
                    return
            self.prepare(Needs(sampled, full_logits, constrained, alone), measuring)

    @abc.abstractmethod
    def prepare(self, needs: Needs, measuring: Measuring | None) -> None:
        """Warm up (`warm_up`); the caller keeps requests out. measuring None: another engine measures the costs."""

    @abc.abstractmethod
    def _finish_aborted(self) -> None:
        """End the requests that `abort` has queued; the caller holds _lock."""

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
                self._wait_for(left)
                for handle in left:
                    if handle.finished is not None:  # its last chunk is in the inbox
                        read.add(handle)
                    while handle.inbox:
                        yield handle, handle.inbox.popleft()
                    error = handle.error if handle in read and handle.has_reader else None
                    if error is not None and not isinstance(error, GrammarError):
                        raise error
        finally:
            for handle in [handle for handle in handles if handle.finished is None]:
                self.abort(handle)

    def _wait_for(self, handles: Sequence[Handle]) -> None:
        """Drive the loop, or let another thread do it, until one of these has a chunk or has ended."""
        while not _arrived(handles):
            if self._turn.acquire(timeout=TURN_S):
                try:
                    if not _arrived(handles):
                        self.step()
                except EngineError:
                    if not _arrived(handles):  # else the next step raises it again
                        raise
                finally:
                    self._turn.release()


def _arrived(handles: Sequence[Handle]) -> bool:
    return any(handle.inbox or handle.finished for handle in handles)
