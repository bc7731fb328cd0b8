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
from peagle.serve.metrics import AnswerMetrics, Metrics
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
        formatter.results = self.results
        self._assemblers = [
            Assembler(
                request,
                request.limit_drafts(loop.config.num_speculative_tokens),
                formatter.tokenizer,
                time.perf_counter(),
                channels=channels,
                own_stops=_own_stops(request, loop.stop_token_ids, formatter.tokenizer),
                index=index,
            )
            for index, request in enumerate(requests)
        ]
        self._call = (loop.submit if decode else loop.echo)(requests)
        num_answers = 1 + max(request.index for request in requests)  # to each prompt
        self._counted = [AnswerMetrics(metrics, assembler, num_answers) for assembler in self._assemblers]

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
            self._count_ends("error")
            if error.status == 400 and error.param is None:  # while decoding, only a grammar can be bad input
                error.param = self._constraint
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Abort the requests that have not ended."""
        self._call.close()
        self._count_ends("abort")

    def _count_ends(self, reason: str) -> None:
        for counted in self._counted:
            counted.end(reason)

    def results(self) -> list[Result]:
        return [assembler.result() for assembler in self._assemblers]

    def _read(self, job: Job, chunk: TokenChunk) -> Piece:
        piece = self._assemblers[job.index].add(chunk)
        self._counted[job.index].add(piece)
        if piece.finish_reason != chunk.finish_reason:  # a stop string ended the answer
            self._call.abort(job)
        return piece


def _own_stops(request: Request, model: Sequence[int], tokenizer: Tokenizer | None) -> set[int]:
    """Return the request's stop tokens that are not the model's.

    `RequestBuilder` adds the end of a call, but it is the model that ends its answer there.
    """
    special = {} if tokenizer is None else tokenizer.special_tokens
    return {token for token in request.stop_token_ids or () if token not in model and special.get(token) != CALL}
