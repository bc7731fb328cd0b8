"""Run the requests of a service in engines of other processes. Nothing of Ray in here.

Aggregated, a replica computes the prompt and decodes. Disaggregated, one prefills, and another decodes:

    request ──► prefill ──► first token, hand-off ──► decode ──► chunks ──► reply

If a prefilling replica is lost, its prefill is repeated. If a decoding replica is lost, its answers end with an error:
the client may send the request again.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from peagle.cluster.config import PATIENCE_S
from peagle.engine.admission import check_grammar
from peagle.engine.request import Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.errors import InputError
from peagle.serve.errors import ApiError
from peagle.serve.loop import LOADING_RETRY_S, Chunks, Found, Status, check_room, read_chunks

PREFILL_TRIES = 3
LOOKS_S, SOON_S = 5.0, 0.5  # between looks at the replicas: if they answer, if not
ANSWERS_S = 30.0  # within which a replica answers, on a busy machine, too
LOADING_PATIENCE_S, LOADING_POLL_S = 5.0, 0.05  # that a request waits for the first replica
LOADING = "no replica of the fleet answers yet: it loads its models; send the request again"
LOST = "the process that decoded this answer was lost; send the request again"
LOST_PROMPT = "the processes that computed this prompt were lost; send the request again"


class ReplicaLost(Exception):
    """The called process has ended, or cannot be reached."""


@runtime_checkable
class ReplicaCalls(Protocol):
    """Engines elsewhere. `prefill` and `decode` raise ReplicaLost, InputError and ApiError."""

    disaggregated: bool

    async def ping(self) -> None:
        """Return as soon as a replica of each role has answered; one that loads its models does not."""
        ...

    async def prefill(self, request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        """Return (the chunk of the first token, the hand-off; None if the request has ended)."""
        ...

    def decode(self, request: Request, hand_off: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of a request, after its hand-off if there is one; end it if the reader leaves."""
        ...


@dataclass(frozen=True)
class FleetEngine:
    """The engines elsewhere, as far as requests are checked here. Refuses the requests that they would refuse."""

    config: ResolvedConfig
    vocab_size: int
    stop_token_ids: tuple[int, ...] = ()

    def check(self, request: Request) -> None:
        self.config.check(request, self.vocab_size)
        stops = self.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
        check_grammar(request, stops, self.vocab_size)


@dataclass(eq=False)
class FleetCall:
    """Requests of one HTTP request (peagle.serve.loop.Submitted)."""

    requests: Sequence[Request]
    queue: Chunks = field(default_factory=asyncio.Queue)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """See peagle.serve.loop.Call."""
        return read_chunks(self.queue, len(self.requests), self._aborted)

    def _aborted(self, place: int) -> bool:
        return self.tasks[place].cancelled() or self.tasks[place].cancelling() > 0

    def abort(self, place: int) -> None:
        """End a request. Does nothing if it has ended. Never waits."""
        self.tasks[place].cancel()

    def close(self) -> None:
        for place in range(len(self.tasks)):
            self.abort(place)


class Fleet:
    """Engines of other processes, in place of peagle.serve.loop.EngineLoop.

    most_open: requests at once. patience_s: without a chunk for so long, an answer ends with an error, since no replica
    may be left. A fleet is loading until a `look` finds that replicas answer.
    """

    def __init__(
        self, replicas: ReplicaCalls, engine: FleetEngine, most_open: int, patience_s: float = PATIENCE_S
    ) -> None:
        self.engine, self.most_open, self.patience_s = engine, most_open, patience_s
        self.failure: str | None = None
        self._replicas, self._open, self._answers = replicas, 0, False

    @property
    def num_running(self) -> int:
        """Requests that have not ended. Only the engines know which of them wait for a slot."""
        return self._open

    @property
    def num_waiting(self) -> int:
        return 0

    @property
    def status(self) -> Status:
        """Whether replicas answered the last look."""
        return "ok" if self._answers else "loading"

    async def look(self, within_s: float = ANSWERS_S) -> None:
        """Find out whether replicas answer. One that is lost meanwhile may be one of several."""
        try:
            async with asyncio.timeout(within_s):
                while not await self._pinged():
                    await asyncio.sleep(SOON_S)
            self._answers = True
        except Exception:  # of Ray, or none answered in time
            self._answers = False

    async def _pinged(self) -> bool:
        with contextlib.suppress(ReplicaLost):
            await self._replicas.ping()
            return True
        return False

    async def watch(self) -> None:
        """Look again and again, without end."""
        while True:
            await self.look()
            await asyncio.sleep(LOOKS_S if self._answers else SOON_S)

    async def expect_ready(self) -> None:
        """Wait a while for replicas that load their models. Raises ApiError if none answers."""
        end = time.monotonic() + LOADING_PATIENCE_S
        while not self._answers:
            if time.monotonic() > end:
                raise ApiError(503, LOADING, retry_after_s=LOADING_RETRY_S)
            await asyncio.sleep(LOADING_POLL_S)

    def submit(self, requests: Sequence[Request]) -> FleetCall:
        """Send all requests off, or none. Raises like EngineLoop.submit."""
        for request in requests:
            self.engine.check(request)
        check_room(len(requests), self._open, self.most_open)
        call = FleetCall(requests)
        self._open += len(requests)
        for place, request in enumerate(requests):
            task = asyncio.get_running_loop().create_task(self._run(call, place, request))
            task.add_done_callback(self._ended)
            call.tasks.append(task)
        return call

    async def run(self, function: Callable[[], Found]) -> Found:  # noqa: ARG002
        """Raise ApiError: the weights are elsewhere."""
        message = "log-probabilities of prompts are not computed by a fleet; leave out echo or logprobs"
        raise ApiError(400, message, "echo")

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._open -= 1
        if not task.cancelled():
            task.exception()

    async def _run(self, call: FleetCall, place: int, request: Request) -> None:
        """Run one request, and put its chunks or its error into the call's queue."""

        def end(status: int, message: str) -> None:
            call.queue.put_nowait((place, ApiError(status, message)))

        ended = False
        try:
            async for chunk in self._chunks(request):
                ended = chunk.finish_reason is not None
                call.queue.put_nowait((place, dataclasses.replace(chunk, request=request, time_s=time.perf_counter())))
            if not ended:
                end(503, LOST)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            end(503, LOST)  # the process elsewhere was told to stop
        except ApiError as error:
            call.queue.put_nowait((place, error))
        except InputError as error:
            call.queue.put_nowait((place, ApiError.of(error)))
        except ReplicaLost:
            end(503, LOST)
        except TimeoutError:
            end(503, f"no process of the fleet has answered for {self.patience_s:g} seconds; send the request again")
        except Exception as error:
            end(500, f"the fleet failed at this request: {' '.join(str(error).split())[:500]}")

    async def _chunks(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        hand_off: np.ndarray | None = None
        if self._replicas.disaggregated:
            chunk, hand_off = await self._prefilled(request)
            if hand_off is None:
                yield chunk
                return
            yield dataclasses.replace(chunk, finish_reason=None)
        chunks = self._replicas.decode(request, hand_off)
        del hand_off  # it may be large, and lives as long as anybody holds it
        async with contextlib.aclosing(chunks):
            while True:
                try:
                    async with asyncio.timeout(self.patience_s):
                        chunk = await anext(chunks)
                except StopAsyncIteration:
                    return
                yield chunk

    async def _prefilled(self, request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        """Prefill; try again if the replica is lost, since the client has received nothing."""
        async with asyncio.timeout(self.patience_s):
            for _ in range(PREFILL_TRIES):
                with contextlib.suppress(ReplicaLost):
                    return await self._replicas.prefill(request)
        raise ApiError(503, LOST_PROMPT)
