"""The engine in a thread of its own, and calls to it from event loops.

Only the thread drives the engine: it adds waiting requests, runs a step, and hands over the chunks with one wake-up of
the event loop per step. Event loops never wait for a step.
"""

import asyncio
import collections
import concurrent.futures
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from peagle.engine.grammar import GrammarError
from peagle.engine.handle import Handle
from peagle.engine.handoff import HandOff
from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig
from peagle.serve.errors import ApiError

STALLED_S = 120.0  # without a step while requests wait; longer than any compilation seen
RETRY_AFTER_S = 1
LOADING_RETRY_S = 5  # while models are loaded, which takes minutes

Found = TypeVar("Found")
Status = Literal["ok", "loading", "failed", "stalled", "draining"]


@dataclass(eq=False)
class _Job:
    """A request of a call. `handle` is None until the thread has added it to the engine."""

    call: "Call"
    place: int
    request: Request
    hand_off: HandOff | None = None
    handle: Handle | None = None
    aborted: bool = False


Chunks = asyncio.Queue[tuple[int, TokenChunk | ApiError]]  # with the numbers of their requests


async def read_chunks(
    queue: Chunks, count: int, aborted: Callable[[int], bool]
) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Yield the chunks of requests 0..count - 1 as they arrive, until each has ended or was aborted.

    Raises an ApiError that arrives.
    """
    left = set(range(count))
    while left := {place for place in left if not aborted(place)}:
        place, chunk = await queue.get()
        if isinstance(chunk, ApiError):
            raise chunk
        if place in left:
            if chunk.finish_reason is not None:
                left.discard(place)
            yield place, chunk


def check_room(count: int, num_open: int, most: int) -> None:
    """Raise ApiError if `count` more requests than the open ones are more than `most`."""
    if count > most:
        raise ApiError(400, f"{count} answers are asked for at once; expected at most {most}: ask for fewer", "n")
    if num_open + count > most:
        message = f"{num_open} requests are running or waiting, and at most {most} may; try again later"
        raise ApiError(429, message, retry_after_s=RETRY_AFTER_S)


@dataclass(eq=False)
class Call:
    """The requests of one HTTP request, and their chunks. Read it in the event loop that made it."""

    engine: AnyEngine
    loop: asyncio.AbstractEventLoop
    jobs: list[_Job] = field(default_factory=list)
    queue: Chunks = field(default_factory=asyncio.Queue)

    def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """Yield (number of the request, chunk) as chunks arrive, until each request has ended or was aborted.

        Raises ApiError if the engine fails, or a model's outputs are not finite.
        """
        return read_chunks(self.queue, len(self.jobs), lambda place: self.jobs[place].aborted)

    def abort(self, place: int) -> None:
        """End a request before the next dispatch. Does nothing if it has ended. Never waits."""
        job = self.jobs[place]
        job.aborted = True  # before the handle is read: the thread does the two in the other order
        if job.handle is not None:
            self.engine.abort(job.handle)

    def close(self) -> None:
        for place in range(len(self.jobs)):
            self.abort(place)


@runtime_checkable
class Submitted(Protocol):
    """See `Call`."""

    def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]: ...

    def abort(self, place: int) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Checks(Protocol):
    """The part of an engine that builders of requests use."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def config(self) -> ResolvedConfig: ...
    def check(self, request: Request) -> None: ...


@runtime_checkable
class Loop(Protocol):
    """Runs the requests of a service: `EngineLoop`, or engines elsewhere (peagle.cluster.fleet)."""

    failure: str | None

    @property
    def engine(self) -> Checks: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def status(self) -> Status: ...
    async def expect_ready(self) -> None: ...
    def submit(self, requests: Sequence[Request]) -> Submitted: ...
    async def run(self, function: Callable[[], Found]) -> Found: ...


class EngineLoop:
    """One engine, its thread, and a queue of at most max_queue requests beyond those in slots."""

    def __init__(self, engine: AnyEngine, max_queue: int) -> None:
        self.engine, self.max_queue = engine, max_queue
        self.failure: str | None = None
        self.draining = False
        self._lock = threading.Condition()
        self._new: collections.deque[_Job] = collections.deque()
        self._tasks: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = collections.deque()
        self._running: dict[Handle, _Job] = {}  # the thread's own
        self._open = 0  # jobs and tasks that have not ended
        self._closing = False
        self._last_step_s = time.monotonic()
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        return self._open

    @property
    def num_running(self) -> int:
        return min(self._open, self.engine.config.slots)

    @property
    def num_waiting(self) -> int:
        return self._open - self.num_running

    @property
    def status(self) -> Status:
        """The thread's state; "stalled": requests wait, and no step ended for STALLED_S."""
        if self.failure is not None:
            return "failed"
        if self._open and time.monotonic() - self._last_step_s > STALLED_S:
            return "stalled"
        return "draining" if self.draining else "ok"

    async def expect_ready(self) -> None:
        """Do nothing: the engine was loaded and warmed up before."""

    def submit(self, requests: Sequence[Request], hand_offs: Sequence[HandOff | None] = ()) -> Call:
        """Queue all requests, or none. Call it in the event loop that reads the chunks.

        hand_offs: of prefilled requests. Raises ApiError if the queue is full or the engine has failed, InputError for
        a request that cannot run.
        """
        begun = hand_offs or [None] * len(requests)
        for request, hand_off in zip(requests, begun, strict=True):
            self.engine.check(request, hand_off)
        call = Call(self.engine, asyncio.get_running_loop())
        pairs = enumerate(zip(requests, begun, strict=True))
        call.jobs = [_Job(call, place, request, hand_off) for place, (request, hand_off) in pairs]
        with self._lock:
            self._enter(len(requests))
            self._new.extend(call.jobs)
            self._lock.notify()
        return call

    async def run(self, function: Callable[[], Found]) -> Found:
        """Call a function in the engine's thread, between two steps. Raises like the function and `submit`."""
        future: concurrent.futures.Future[Found] = concurrent.futures.Future()
        with self._lock:
            self._enter(1)
            self._tasks.append((function, future))
            self._lock.notify()
        return await asyncio.wrap_future(future)

    def _enter(self, count: int) -> None:
        """Count requests. Raises ApiError if there is no room for all of them."""
        if self.failure is not None:
            raise self._failed()
        if self.draining:
            raise ApiError(503, "the server is shutting down; send the request to another one")
        check_room(count, self._open, self.engine.config.slots + self.max_queue)
        if not self._open:
            self._last_step_s = time.monotonic()
        self._open += count

    def stop(self, message: str) -> None:
        """Refuse further requests, and end the open ones with this error."""
        with self._lock:
            self.draining = True
            jobs = [*self._new, *self._running.values()]
        for job in jobs:
            self._send(job.call.loop, [(job, ApiError(503, message))])
            job.call.close()

    def close(self) -> None:
        self.stop("the server was stopped")
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            while self._wait():
                self._add_new()
                self._run_task()
                self._step()
                self._hand_over()
                self._last_step_s = time.monotonic()
        except BaseException as error:  # no request may wait for a thread that is gone
            self._fail(" ".join(str(error).split()) or type(error).__name__)

    def _step(self) -> None:
        """Run a step. Apart from `_drive`, whose idle frame would keep a request alive; a hand-off is large."""
        for handle, chunk in self.engine.step():
            handle.inbox.append(chunk)

    def _wait(self) -> bool:
        """Wait for a request; return False at the thread's end."""
        if not self._open:
            self.engine.settle()
        with self._lock:
            self._lock.wait_for(lambda: self._open or self._closing)
            return not (self._closing and not self._open)

    def _add_new(self) -> None:
        while self._new:
            with self._lock:
                job = self._new[0]
                if not job.aborted:
                    job.handle = self.engine.add(job.request, hand_off=job.hand_off)
                    job.hand_off = None
                    self._running[job.handle] = job
                self._new.popleft()
                self._open -= job.handle is None
            if job.aborted and job.handle is not None:
                self.engine.abort(job.handle)

    def _run_task(self) -> None:
        """Run one task, so that tasks and steps alternate."""
        if not self._tasks:
            return
        function, future = self._tasks.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        with self._lock:
            self._open -= 1

    def _hand_over(self) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job, TokenChunk | ApiError]]] = {}
        ended = []
        for handle, job in self._running.items():
            items = by_loop.setdefault(job.call.loop, [])
            if handle.error is not None:
                status = 400 if isinstance(handle.error, GrammarError) else 500
                items.append((job, ApiError(status, str(handle.error))))
                handle.inbox.clear()
            while handle.inbox:
                items.append((job, handle.inbox.popleft()))
            if handle.finished is not None:
                ended.append(handle)
        with self._lock:
            for handle in ended:
                del self._running[handle]
            self._open -= len(ended)
        for loop, items in by_loop.items():
            if items:
                self._send(loop, items)

    def _send(self, loop: asyncio.AbstractEventLoop, items: list[tuple[_Job, TokenChunk | ApiError]]) -> None:
        def put() -> None:
            for job, item in items:
                job.call.queue.put_nowait((job.place, item))

        try:
            loop.call_soon_threadsafe(put)
        except RuntimeError:  # the event loop is closed, so nobody reads these
            for job, _ in items:
                job.call.close()

    def _fail(self, message: str) -> None:
        with self._lock:
            self.failure = message
            jobs = [*self._new, *self._running.values()]
            self._new.clear()
            self._running.clear()
            tasks = [*self._tasks]
            self._tasks.clear()
            self._open = 0
        for job in jobs:
            self._send(job.call.loop, [(job, self._failed())])
        for _, future in tasks:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._failed())

    def _failed(self) -> ApiError:
        return ApiError(503, f"{self.failure}; the server must be started again")
