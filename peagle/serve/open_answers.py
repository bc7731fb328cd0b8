"""Collect the answers of one HTTP request: text and counts from the engine's chunks."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from peagle.answers.result import Assembler, Counters, Piece, Result
from peagle.engine.request import Request, TokenChunk
from peagle.measure.metrics import speculative_decoding_block, total
from peagle.serve.engine_loop import Job, Loop
from peagle.serve.errors import ApiError
from peagle.serve.metrics import AnswerMetrics, Metrics
from peagle.serve.replies import Figures, TokenOrigin, Usage
from peagle.text.channels import CALL
from peagle.text.tokenizer import Tokenizer


class OpenAnswers:
    """Submit requests to the engine and read their answers. Raises as `Loop.submit` does.

    channels: parse the answers' channels; stop strings then apply to content messages. constraint: the field of the
    grammar, named in its errors. decode=False: max_tokens is 0, so only the prompt is echoed.
    """

    def __init__(
        self,
        loop: Loop,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        channels: bool = False,
        constraint: str | None = None,
        decode: bool = True,
    ) -> None:
        self._constraint = constraint
        self._assemblers = [
            Assembler(
                request,
                request.limit_drafts(loop.config.num_speculative_tokens),
                tokenizer,
                time.perf_counter(),
                channels=channels,
                own_stops=_own_stops(request, loop.stop_token_ids, tokenizer),
                index=index,
            )
            for index, request in enumerate(requests)
        ]
        self._call = (loop.submit if decode else loop.echo)(requests)
        num_answers = 1 + max(request.index for request in requests)  # to each prompt
        self._counted = [AnswerMetrics(metrics, assembler, num_answers) for assembler in self._assemblers]

    async def chunks(self) -> AsyncGenerator[Piece, None]:
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


class TokenTexts:
    """The text, kind and origin of each token of an answer, for the page.

    A character of several tokens is the text of the last of them. A token outside of messages, such as a control token,
    has no text.
    """

    def __init__(self) -> None:
        self._origins: list[str] = []  # of the tokens that were read
        self._num_shown = 0

    def of(self, piece: Piece) -> list[TokenOrigin]:
        """Return the waiting tokens up to the last one that has text; all of them at the answer's end."""
        self._origins += piece.origins
        tokens: list[TokenOrigin] = []
        for delta in piece.deltas:
            for token in delta.tokens:
                tokens += self._hidden(token.number)
                tokens.append({"text": token.text, "kind": delta.kind, "origin": self._origins[token.number]})
                self._num_shown = token.number + 1
        return tokens if piece.finish_reason is None else tokens + self._hidden(len(self._origins))

    def _hidden(self, end: int) -> list[TokenOrigin]:
        """Return the waiting tokens before this number, without text."""
        start, self._num_shown = self._num_shown, max(self._num_shown, end)
        return [{"text": "", "kind": "hidden", "origin": origin} for origin in self._origins[start:end]]


def usage(results: Sequence[Result]) -> Usage:
    """Count tokens. A prompt with n answers counts once."""
    prompts = [result for result in results if result.request.index == 0]
    prompt = sum(len(result.request.prompt_ids) for result in prompts)
    completion = sum(len(result.output_ids) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens for result in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(result.num_reasoning_tokens for result in results)},
    }


def pooled(results: Sequence[Result]) -> Counters:
    return total([result.counters for result in results])


def figures(results: Sequence[Result]) -> dict[str, Figures]:
    """Return the reply's field `metrics`, with counts of its steps under vLLM's names; no field in plain decoding."""
    counters = pooled(results)
    if not counters.num_speculative_tokens:
        return {}
    block: Any = speculative_decoding_block(counters)
    del block["num_plain_steps"]  # vLLM has none
    return {"metrics": {"speculative_decoding": block}}
