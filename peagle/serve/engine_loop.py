"""Run the engine in a thread of its own, for the HTTP requests of an event loop.

Only this thread drives the engine. In turn it adds new requests, runs a step, and delivers the chunks with one wake-up
of the event loop per step. The event loop never waits for a step.
"""

import asyncio
import collections
import concurrent.futures
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.grammar import GrammarError
from peagle.engine.host.handle import Handle
from peagle.engine.host.handoff import HandOff
from peagle.engine.request import Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig
from peagle.serve.errors import ApiError

STALLED_S = 120.0  # time without a step, while requests are open, after which the engine is stalled
RETRY_AFTER_S = 1  # if the queue is full
LOADING_RETRY_S = 5  # if models are loading, which takes minutes

T = TypeVar("T")
Status = Literal["ok", "loading", "failed", "stalled", "draining"]


@dataclass(eq=False)
class _Job:
    """A request of a call. index: in the call. handle: None until the thread has added the request to the engine."""

    call: "EngineCall"
    index: int
    request: Request
    hand_off: HandOff | None = None
    handle: Handle | None = None
    aborted: bool = False
    submitted_s: float = field(default_factory=time.perf_counter)


ChunkQueue = asyncio.Queue[tuple[int, TokenChunk | ApiError]]  # (index of the request in its call, chunk)


async def read_chunks(
    queue: ChunkQueue, count: int, aborted: Callable[[int], bool]
) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Yield (index, chunk) of requests 0..count - 1 as chunks arrive, until each has ended or was aborted.

    Raises an ApiError that arrives.
    """
    left = set(range(count))
    while left := {index for index in left if not aborted(index)}:
        index, chunk = await queue.get()
        if isinstance(chunk, ApiError):
            raise chunk
        if index in left:
            if chunk.finish_reason is not None:
                left.discard(index)
            yield index, chunk


def check_room(count: int, num_open: int, most: int) -> None:
    """Raise ApiError if there is no room for `count` more requests: at most `most` may be open."""
    if count > most:
        raise ApiError(400, f"{count} answers are requested at once; expected at most {most}: ask for fewer", "n")
    if num_open + count > most:
        message = f"{num_open} requests are running or waiting, and at most {most} may; try again later"
        raise ApiError(429, message, retry_after_s=RETRY_AFTER_S)


@dataclass(eq=False)
class EngineCall:
    """The engine's requests of one HTTP request. Use it in the event loop that submitted them."""

    engine: AnyEngine
    loop: asyncio.AbstractEventLoop
    jobs: list[_Job] = field(default_factory=list)
    queue: ChunkQueue = field(default_factory=asyncio.Queue)

    def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """Yield (index of the request, chunk) as chunks arrive, until each request has ended or was aborted.

        Raises ApiError if the engine fails, or a model's outputs are not finite.
        """
        return read_chunks(self.queue, len(self.jobs), lambda index: self.jobs[index].aborted)

    def abort(self, index: int) -> None:
        """End a request before the next dispatch. Does nothing if it has ended. Never waits."""
        job = self.jobs[index]
        # set this, then read the handle: `_add_new` does it in the other order, so that one of the two aborts
        job.aborted = True
        if job.handle is not None:
            self.engine.abort(job.handle)

    def close(self) -> None:
        """Abort all requests."""
        for index in range(len(self.jobs)):
            self.abort(index)


@runtime_checkable
class Call(Protocol):
    """The requests that a `Loop` runs for one HTTP request (see `EngineCall`)."""

    def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]: ...

    def abort(self, index: int) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class EngineInfo(Protocol):
    """The part of an engine that HTTP code uses. It is known even if the engine is in another process."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def config(self) -> ResolvedConfig: ...
    def check(self, request: Request) -> None: ...


@runtime_checkable
class Loop(Protocol):
    """Runs the requests of a server: an `EngineLoop`, or a peagle.cluster.fleet.Fleet of other processes."""

    failure: str | None

    @property
    def engine(self) -> EngineInfo: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def status(self) -> Status: ...
    async def expect_ready(self) -> None: ...
    def submit(self, requests: Sequence[Request]) -> Call: ...
    async def run(self, function: Callable[[], T]) -> T: ...


class EngineLoop:
    """An engine and its thread. At most `slots` + max_queue requests may be open."""

    def __init__(self, engine: AnyEngine, max_queue: int) -> None:
        self.engine, self.max_queue = engine, max_queue
        self.failure: str | None = None
        self.draining = False
        self._lock = threading.Condition()
        self._new: collections.deque[_Job] = collections.deque()
        self._tasks: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = collections.deque()
        self._running: dict[Handle, _Job] = {}  # of the thread only
        self.count_step: Callable[[int], object] = lambda _: None  # called by the thread with the tokens of a step
        self.num_open = 0  # jobs and tasks that have not ended
        self._closing = False
        self._last_step_s = time.monotonic()
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return min(self.num_open, self.engine.config.slots)

    @property
    def num_waiting(self) -> int:
        return self.num_open - self.num_running

    @property
    def status(self) -> Status:
        """The state of the thread. "stalled": requests are open, and no step has ended for STALLED_S."""
        if self.failure is not None:
            return "failed"
        if self.num_open and time.monotonic() - self._last_step_s > STALLED_S:
            return "stalled"
        return "draining" if self.draining else "ok"

    async def expect_ready(self) -> None:
        """Do nothing: the engine is loaded and warmed up."""

    def submit(self, requests: Sequence[Request], hand_offs: Sequence[HandOff | None] = ()) -> EngineCall:
        """Queue all requests, or none. Call this in the event loop that reads the chunks.

        hand_offs: of requests that another engine has prefilled. Raises ApiError if the queue is full or the engine has
        failed, and InputError for a request that cannot run.
        """
        call = EngineCall(self.engine, asyncio.get_running_loop())
        pairs = zip(requests, hand_offs or [None] * len(requests), strict=True)
        for index, (request, hand_off) in enumerate(pairs):
            self.engine.check(request, hand_off)
            call.jobs.append(_Job(call, index, request, hand_off))
        with self._lock:
            self._enter(len(requests))
            self._new.extend(call.jobs)
            self._lock.notify()
        return call

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in the engine's thread, between two steps. Raises as the function and `submit` do."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            self._enter(1)
            self._tasks.append((function, future))
            self._lock.notify()
        return await asyncio.wrap_future(future)

    def _enter(self, count: int) -> None:
        """Count `count` more open requests. Raises ApiError if it cannot take them all. The caller holds the lock."""
        if self.failure is not None:
            raise self._engine_failed()
        if self.draining:
            raise ApiError(503, "the server is shutting down; send the request to another one")
        check_room(count, self.num_open, self.engine.config.slots + self.max_queue)
        if not self.num_open:
            self._last_step_s = time.monotonic()
        self.num_open += count

    def stop(self, message: str) -> None:
        """Refuse further requests, and end the open ones with this message."""
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
                self.engine.step()
                self._deliver()
                self._last_step_s = time.monotonic()
        except BaseException as error:  # the thread ends: no request may wait for it
            self._fail(" ".join(str(error).split()) or type(error).__name__)

    def _wait(self) -> bool:
        """Wait for a request or a task; return False if the thread is to end."""
        if not self.num_open:
            self.engine.settle()
        with self._lock:
            self._lock.wait_for(lambda: self.num_open or self._closing)
            return not (self._closing and not self.num_open)

    def _add_new(self) -> None:
        while self._new:
            with self._lock:
                job = self._new[0]
                if not job.aborted:
                    job.handle = self.engine.add(job.request, hand_off=job.hand_off)
                    job.handle.added_s = job.submitted_s  # before its first step, which reads it
                    job.hand_off = None
                    self._running[job.handle] = job
                self._new.popleft()
                self.num_open -= job.handle is None
            if job.aborted and job.handle is not None:
                self.engine.abort(job.handle)

    def _run_task(self) -> None:
        """Run one task only, so that tasks and steps alternate."""
        if not self._tasks:
            return
        function, future = self._tasks.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        with self._lock:
            self.num_open -= 1

    def _deliver(self) -> None:
        """Send the chunks of a step to their event loops, and forget requests that have ended."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job, TokenChunk | ApiError]]] = {}
        ended, num_tokens = [], 0
        for handle, job in self._running.items():
            items = by_loop.setdefault(job.call.loop, [])
            if handle.error is not None:
                status = 400 if isinstance(handle.error, GrammarError) else 500
                items.append((job, ApiError(status, str(handle.error))))
            while handle.inbox:
                chunk = handle.inbox.popleft()
                num_tokens += len(chunk.token_ids) + (0 if chunk.queued_s is None else len(chunk.request.prompt_ids))
                if handle.error is None:
                    items.append((job, chunk))
            if handle.finished is not None:
                ended.append(handle)
        if num_tokens:
            self.count_step(num_tokens)
        with self._lock:
            for handle in ended:
                del self._running[handle]
            self.num_open -= len(ended)
        for loop, items in by_loop.items():
            if items:
                self._send(loop, items)

    def _send(self, loop: asyncio.AbstractEventLoop, items: list[tuple[_Job, TokenChunk | ApiError]]) -> None:
        def put() -> None:
            for job, item in items:
                job.call.queue.put_nowait((job.index, item))

        try:
            loop.call_soon_threadsafe(put)
        except RuntimeError:  # the event loop is closed: nobody reads the chunks
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
            self.num_open = 0
        for job in jobs:
            self._send(job.call.loop, [(job, self._engine_failed())])
        for _, future in tasks:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._engine_failed())

    def _engine_failed(self) -> ApiError:
        return ApiError(503, f"{self.failure}; the server must be started again")
