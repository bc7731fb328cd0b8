"""Run the engine in a thread of its own, for the HTTP requests of an event loop.

Only this thread drives the engine. In turn it adds new requests, runs a step, and delivers the chunks with one wake-up
of the event loop per step. The event loop never waits for a step.
"""

import abc
import asyncio
import collections
import concurrent.futures
import functools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

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
class Job:
    """A request of a call. index: in the call. handle: None until the thread has added the request to the engine."""

    call: "Call"
    index: int
    request: Request
    hand_off: HandOff | None = None
    handle: Handle | None = None
    aborted: bool = False
    cancel: Callable[[], object] = lambda: None  # ends it in the engine; never waits
    submitted_s: float = field(default_factory=time.perf_counter)

    def abort(self) -> None:
        self.aborted = True  # first: `_add_new` sets the handle, then reads this
        self.cancel()


class Call:
    """The engine's requests of one HTTP request. Use it in the event loop that submitted them."""

    loop: asyncio.AbstractEventLoop  # that one; an `EngineLoop` needs it

    def __init__(self, requests: Sequence[Request]) -> None:
        self.jobs = [Job(self, index, request) for index, request in enumerate(requests)]
        self._left = {*self.jobs}
        self._queue: asyncio.Queue[tuple[Job, TokenChunk | ApiError]] = asyncio.Queue()

    def put(self, job: Job, chunk: TokenChunk | ApiError) -> None:
        self._queue.put_nowait((job, chunk))

    async def chunks(self) -> AsyncGenerator[tuple[Job, TokenChunk], None]:
        """Yield (job, chunk) as chunks arrive, until each request has ended or was aborted.

        Raises the ApiError that arrives if the engine fails, or a model's outputs are not finite.
        """
        while self._left:
            job, chunk = await self._queue.get()
            if isinstance(chunk, ApiError):
                raise chunk
            if job in self._left:
                if chunk.finish_reason is not None:
                    self._left.discard(job)
                yield job, chunk

    def abort(self, job: Job) -> None:
        """End a request, and yield no more chunks of it. Does nothing if it has ended. Never waits."""
        self._left.discard(job)
        job.abort()

    def close(self) -> None:
        """Abort all requests."""
        for job in self.jobs:
            self.abort(job)


class Loop(abc.ABC):
    """Runs the requests of a server: an `EngineLoop`, or a peagle.cluster.fleet.Fleet of other processes."""

    def __init__(self, config: ResolvedConfig, stop_token_ids: Sequence[int], most_open: int) -> None:
        self.config, self.stop_token_ids, self.most_open = config, stop_token_ids, most_open
        self.failure: str | None = None
        self.num_open = 0  # requests that have not ended

    @property
    def num_running(self) -> int:
        return min(self.num_open, self.config.slots)

    @property
    def num_waiting(self) -> int:
        return self.num_open - self.num_running

    @property
    @abc.abstractmethod
    def status(self) -> Status: ...

    @abc.abstractmethod
    async def expect_ready(self) -> None:
        """Wait a short time for models that are loaded. Raises ApiError if they are not loaded then."""

    @abc.abstractmethod
    def check(self, request: Request) -> None:
        """Raise InputError for a request that cannot run."""

    @abc.abstractmethod
    def submit(self, requests: Sequence[Request]) -> Call:
        """Queue all requests, or none. Call this in the event loop that reads the chunks.

        Raises ApiError if the queue is full or the engine has failed, and InputError for a request that cannot run.
        """

    @abc.abstractmethod
    async def run(self, function: Callable[[], T]) -> T:
        """Call a function that needs the weights, between two steps. Raises as the function and `submit` do."""

    def echo(self, requests: Sequence[Request]) -> Call:
        """Return a call whose answers have no tokens, since they only echo the prompts. Raises as `check` does."""
        call = Call(requests)
        for job in call.jobs:
            self.check(job.request)
            call.put(job, TokenChunk(job.request, (), time.perf_counter(), finish_reason="length"))
        return call

    def check_room(self, count: int) -> None:
        """Raise ApiError if there is no room for `count` more requests."""
        if count > self.most_open:
            message = f"{count} answers are requested at once; expected at most {self.most_open}: ask for fewer"
            raise ApiError(400, message, "n")
        if self.num_open + count > self.most_open:
            message = f"{self.num_open} requests are running or waiting, and at most {self.most_open} may"
            raise ApiError(429, f"{message}; try again later", retry_after_s=RETRY_AFTER_S)


class EngineLoop(Loop):
    """An engine and its thread. At most `slots` + max_queue requests may be open."""

    def __init__(self, engine: AnyEngine, max_queue: int) -> None:
        super().__init__(engine.config, engine.stop_token_ids, engine.config.slots + max_queue)
        self.engine, self.draining = engine, False
        self._lock = threading.Condition()
        self._new: collections.deque[Job] = collections.deque()
        self._tasks: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = collections.deque()
        self._running: dict[Handle, Job] = {}  # of the thread only
        self.count_step: Callable[[int], object] = lambda _: None  # called by the thread with the tokens of a step
        self._closing = False
        self._last_step_s = time.monotonic()
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

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

    def check(self, request: Request) -> None:
        self.engine.check(request)

    def submit(self, requests: Sequence[Request], hand_offs: Sequence[HandOff | None] = ()) -> Call:
        """See Loop. hand_offs: of requests that another engine has prefilled."""
        call = Call(requests)
        for job, hand_off in zip(call.jobs, hand_offs or [None] * len(requests), strict=True):
            self.engine.check(job.request, hand_off)
            job.hand_off, job.cancel = hand_off, functools.partial(self._cancel, job)
        call.loop = asyncio.get_running_loop()
        with self._lock:
            self._enter(len(requests))
            self._new.extend(call.jobs)
            self._lock.notify()
        return call

    def _cancel(self, job: Job) -> None:
        """End a job's request before the next dispatch."""
        if job.handle is not None:
            self.engine.abort(job.handle)

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in the engine's thread, between two steps. Raises as the function and `submit` do."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            self._enter(1)
            self._tasks.append((function, future))
            self._lock.notify()
        return await asyncio.wrap_future(future)

    def _enter(self, count: int) -> None:
        """Count `count` more open requests or tasks. Raises ApiError for too many. The caller holds the lock."""
        if self.failure is not None:
            raise self._engine_failed()
        if self.draining:
            raise ApiError(503, "the server is shutting down; send the request to another one")
        self.check_room(count)
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
            job.abort()

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
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, TokenChunk | ApiError]]] = {}
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

    def _send(self, loop: asyncio.AbstractEventLoop, items: list[tuple[Job, TokenChunk | ApiError]]) -> None:
        def put() -> None:
            for job, item in items:
                job.call.put(job, item)

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
