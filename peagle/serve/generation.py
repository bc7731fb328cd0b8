"""One HTTP request that the model answers, from its admission to the last event of its reply."""

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from peagle.answers.result import Assembler, Piece, Result
from peagle.engine.request import Request, TokenChunk
from peagle.serve.engine_loop import Job, Loop
from peagle.serve.errors import ApiError
from peagle.serve.formatter import Formatter
from peagle.serve.metrics import WHOLE, Metrics
from peagle.text.channels import CALL
from peagle.text.tokenizer import Tokenizer


class Generation:
    """The running requests of a body, and the formatter of their reply. Raises as `Loop.submit` does.

    channels: parse the answers' channels; stop strings then apply to content messages. constraint: the field of the
    grammar, named in its errors. decode=False: max_tokens is 0, so only the prompt is echoed.
    """

    def __init__(
        self,
        loop: Loop,
        requests: Sequence[Request],
        formatter: Formatter,
        metrics: Metrics,
        *,
        stream: bool = False,
        channels: bool = False,
        constraint: str | None = None,
        decode: bool = True,
    ) -> None:
        self.stream, self.formatter, self._constraint = stream, formatter, constraint
        num_answers = 1 + max(request.index for request in requests)  # to each prompt
        self._answers = [
            Answer(
                Assembler(
                    request,
                    request.limit_drafts(loop.config.num_speculative_tokens),
                    formatter.tokenizer,
                    time.perf_counter(),
                    channels=channels,
                    own_stops=_own_stops(request, loop.stop_token_ids, formatter.tokenizer),
                    index=index,
                ),
                metrics,
                num_answers,
            )
            for index, request in enumerate(requests)
        ]
        formatter.answers, formatter.results = [answer.assembler for answer in self._answers], self.results
        self._call = (loop.submit if decode else loop.echo)(requests)

    async def reply(self) -> Mapping[str, Any]:
        """Read the answers to their end, and make the reply."""
        async with contextlib.aclosing(self.pieces()) as pieces:
            return self.formatter.reply([entry async for piece in pieces for entry in self.formatter.read(piece)])

    async def events(self) -> AsyncGenerator[str, None]:
        """Write the events of a stream. An error becomes an event."""
        formatter = self.formatter
        try:
            async with contextlib.aclosing(self.pieces()) as pieces:
                if begun := formatter.begin():
                    yield begun
                async for piece in pieces:
                    if events := "".join(map(formatter.event, formatter.read(piece))):
                        yield events
            yield formatter.end()
        except ApiError as error:
            yield formatter.failed(error)
        finally:
            formatter.close()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield pieces until all answers have ended. Aborts the requests if the reader stops early."""
        try:
            async with contextlib.aclosing(self._call.chunks()) as chunks:
                async for job, chunk in chunks:
                    yield self._read(job, chunk)
        except ApiError as error:
            self._end("error")
            if error.status == 400 and error.param is None:  # while decoding, only a grammar can be bad input
                error.param = self._constraint
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Abort the requests that have not ended."""
        self._call.close()
        self._end("abort")

    def _end(self, reason: str) -> None:
        for answer in self._answers:
            answer.end(reason)

    def results(self) -> list[Result]:
        return [answer.result() for answer in self._answers]

    def _read(self, job: Job, chunk: TokenChunk) -> Piece:
        piece = self._answers[job.index].read(chunk)
        if piece.finish_reason != chunk.finish_reason:  # a stop string ended the answer
            self._call.abort(job)
        return piece


class Answer:
    """One answer, which is counted while it arrives."""

    def __init__(self, assembler: Assembler, metrics: Metrics, num_answers: int) -> None:
        """num_answers: to the prompt."""
        self.assembler, self._metrics, self._num_answers = assembler, metrics, num_answers
        self.result = assembler.result
        self._queued_s: float | None = None  # None: not begun
        self._last_s: float | None = None
        self._ended = False

    def read(self, chunk: TokenChunk) -> Piece:
        metrics, piece = self._metrics, self.assembler.add(chunk)
        if self._queued_s is None and (chunk.token_ids or chunk.queued_s is not None):
            self._begin(chunk)
        if piece.token_ids:
            metrics.count(generation_tokens=len(piece.token_ids))
            if self._last_s is None:
                metrics.observe(time_to_first_token_seconds=chunk.time_s - self.assembler.started_s)
            else:
                metrics.observe(inter_token_latency_seconds=chunk.time_s - self._last_s)
            self._last_s = chunk.time_s
        metrics.count_steps(piece.steps)
        if piece.finish_reason is not None:
            self.end(piece.finish_reason)
        return piece

    def end(self, reason: str) -> None:
        """Count the end of the answer, once. An answer that was cut short has no figures of a whole one."""
        if self._ended:
            return
        self._ended = True
        self._metrics.count_end(reason)
        if reason in WHOLE:
            self._observe(self.result())

    def _begin(self, chunk: TokenChunk) -> None:
        """Count the prompt. What had no slot was not computed."""
        self._queued_s, length = chunk.queued_s or 0.0, len(self.assembler.request.prompt_ids)
        self._metrics.count(
            prompt_tokens=length, prefix_cache_queries=length, prefix_cache_hits=chunk.num_cached_tokens
        )

    def _observe(self, result: Result) -> None:
        observe, queued_s = self._metrics.observe, self._queued_s or 0.0
        observe(
            request_prompt_tokens=len(result.request.prompt_ids),
            request_generation_tokens=len(result.output_ids),
            request_params_max_tokens=result.request.max_new_tokens,
        )
        if result.request.index == 0:
            observe(request_params_n=self._num_answers)
        if result.ttft_s is None or result.decode_s is None:
            return
        e2e_s = result.ttft_s + result.decode_s
        observe(
            e2e_request_latency_seconds=e2e_s,
            request_queue_time_seconds=queued_s,
            request_prefill_time_seconds=result.ttft_s - queued_s,
            request_decode_time_seconds=result.decode_s,
            request_inference_time_seconds=e2e_s - queued_s,
        )
        if result.tpot_s is not None:
            observe(request_time_per_output_token_seconds=result.tpot_s)


def _own_stops(request: Request, model: Sequence[int], tokenizer: Tokenizer | None) -> set[int]:
    """Return the request's stop tokens that are not the model's.

    `RequestBuilder` adds the end of a call, but it is the model that ends its answer there.
    """
    special = {} if tokenizer is None else tokenizer.special_tokens
    return {token for token in request.stop_token_ids or () if token not in model and special.get(token) != CALL}
