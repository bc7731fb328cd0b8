"""Run the requests of a server in engines of other processes. Does not import Ray.

Aggregated, a replica prefills and decodes. Disaggregated, one replica prefills, and another one decodes. The next turn
of a conversation goes to the second one at once, which has the pages of the turns before it:

    request ──► prefill ──► first token, hand-off ──► decode ──► chunks ──► reply
    next turn ─────────────────────────────────────►  decode ──► chunks ──► reply

If a replica is lost before a request's first token, the request begins again, elsewhere. If it is lost later, its
answers end with an error: the client may send the request again.
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from peagle.base.errors import InputError
from peagle.engine.host.admission import check_grammar
from peagle.engine.request import Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig
from peagle.pair import Pair
from peagle.serve.engine_loop import LOADING_RETRY_S, Call, Job, Loop, Status, T
from peagle.serve.errors import ApiError

TRIES = 3  # of a request whose replica is lost before its first token
PROBE_S, RETRY_S = 5.0, 0.5  # between probes of the replicas: if they answer, if not
ANSWER_S = 30.0  # time for replicas to answer a probe, on a busy machine, too
LOADING_PATIENCE_S, LOADING_POLL_S = 5.0, 0.05  # time that a request waits for the first replica
LOADING = "no replica of the fleet answers yet: it loads its models; send the request again"
LOST = "the process that decoded this answer was lost; send the request again"
LOST_PROMPT = "the processes that computed this prompt were lost; send the request again"


class ReplicaLost(Exception):
    """The called process has ended, or cannot be reached."""


@runtime_checkable
class ReplicaCalls(Protocol):
    """Calls to the replicas. `prefill` and `decode` raise ReplicaLost, InputError and ApiError."""

    disaggregated: bool

    async def ping(self) -> None:
        """Return as soon as a replica of each role has answered. A replica that loads its models does not."""
        ...

    def knows(self, prompt_ids: Sequence[int]) -> bool:
        """Guess whether a replica that decodes has most of a prompt in its cache, and is not too busy for it."""
        ...

    def note_answer(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Record what the replica that decoded a request has in its cache."""
        ...

    async def prefill(self, request: Request) -> tuple[TokenChunk, np.ndarray | None]:
        """Return (the chunk of the first token, the hand-off). There is no hand-off if the request has ended."""
        ...

    def decode(self, request: Request, hand_off: np.ndarray | None) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of a request, from its hand-off if there is one. Aborts it if the reader stops early.

        Without one, prefers the replica that knows most of the prompt.
        """
        ...


class Fleet(Loop):
    """The engines of other processes, of this pair and config.

    most_open: the most requests at once. patience_s: seconds without a chunk after which an answer ends with an error,
    since there may be no replica left. The status is "loading" until replicas answer a `probe`.
    """

    def __init__(
        self, replicas: ReplicaCalls, pair: Pair, config: ResolvedConfig, most_open: int, patience_s: float
    ) -> None:
        super().__init__(config, pair.stop_token_ids, most_open)
        self._vocab_size, self.patience_s = pair.target.vocab_size, patience_s
        self._replicas, self._ready = replicas, False

    @property
    def num_running(self) -> int:
        return self.num_open  # it is not known here which of them wait for a slot

    @property
    def status(self) -> Status:
        """Whether replicas answered the last probe."""
        return "ok" if self._ready else "loading"

    async def probe(self, within_s: float = ANSWER_S) -> None:
        """Find out whether replicas answer. Tries again if the called replica is lost, since there may be others."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    with contextlib.suppress(ReplicaLost):
                        await self._replicas.ping()
                        break
                    await asyncio.sleep(RETRY_S)
            self._ready = True
        except Exception:  # of Ray, or no answer in time
            self._ready = False

    async def watch(self) -> None:
        """Probe the replicas forever."""
        while True:
            await self.probe()
            await asyncio.sleep(PROBE_S if self._ready else RETRY_S)

    async def expect_ready(self) -> None:
        """Wait a short time for replicas that load their models. Raises ApiError if none answers."""
        end = time.monotonic() + LOADING_PATIENCE_S
        while not self._ready:
            if time.monotonic() > end:
                raise ApiError(503, LOADING, retry_after_s=LOADING_RETRY_S)
            await asyncio.sleep(LOADING_POLL_S)

    def check(self, request: Request) -> None:
        """Raise InputError for a request that the replicas' engines would refuse."""
        self.config.check(request, self._vocab_size)
        stops = self.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
        check_grammar(request, stops, self._vocab_size)

    def submit(self, requests: Sequence[Request]) -> Call:
        for request in requests:
            self.check(request)
        self.check_room(len(requests))
        call = Call(requests)
        self.num_open += len(requests)
        for job in call.jobs:
            task = asyncio.get_running_loop().create_task(self._run(call, job))
            task.add_done_callback(self._count_ended)
            job.cancel = task.cancel
        return call

    async def run(self, function: Callable[[], T]) -> T:  # noqa: ARG002
        """Raise ApiError, since this process has no weights."""
        message = "log-probabilities of prompts are not computed by a fleet; leave out echo or logprobs"
        raise ApiError(400, message, "echo")

    def _count_ended(self, _: "asyncio.Task[None]") -> None:
        self.num_open -= 1

    async def _run(self, call: Call, job: Job) -> None:
        """Run one request, and put its chunks or its error into the call's queue."""
        put, ended = functools.partial(call.put, job), False
        try:
            async for chunk in self._chunks(job.request):
                ended = chunk.finish_reason is not None
                put(dataclasses.replace(chunk, request=job.request, time_s=time.perf_counter()))
            if not ended:
                put(ApiError(503, LOST))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            put(ApiError(503, LOST))  # the replica was told to stop
        except (ApiError, InputError) as error:
            put(ApiError.of(error))
        except ReplicaLost:
            put(ApiError(503, LOST))
        except TimeoutError:
            waited = f"no process of the fleet has answered for {self.patience_s:g} seconds"
            put(ApiError(503, f"{waited}; send the request again"))
        except Exception as error:
            put(ApiError(500, f"the fleet failed at this request: {' '.join(str(error).split())[:500]}"))

    async def _chunks(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        """Yield a request's chunks. Begins again if a replica is lost before the first one: the client has none."""
        for _ in range(TRIES):
            begun = False
            try:
                async with contextlib.aclosing(self._once(request)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except ReplicaLost:
                if begun:
                    raise
        raise ApiError(503, LOST_PROMPT)

    async def _once(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        replicas, prompt_ids = self._replicas, request.prompt_ids
        hand_off: np.ndarray | None = None
        answer_ids: list[int] = []
        if replicas.disaggregated and not replicas.knows(prompt_ids):
            async with asyncio.timeout(self.patience_s):
                chunk, hand_off = await replicas.prefill(request)
            if hand_off is None:
                yield chunk
                return
            answer_ids += chunk.token_ids
            yield dataclasses.replace(chunk, finish_reason=None)
        chunks = replicas.decode(request, hand_off)
        del hand_off  # it may be large: free it as soon as the replica has it
        try:
            async with contextlib.aclosing(chunks):
                while True:
                    try:
                        async with asyncio.timeout(self.patience_s):
                            chunk = await anext(chunks)
                    except StopAsyncIteration:
                        return
                    answer_ids += chunk.token_ids
                    yield chunk
        finally:
            replicas.note_answer(prompt_ids, answer_ids)
