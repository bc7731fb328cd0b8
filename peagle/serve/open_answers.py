"""Collect the answers of one HTTP request: text and counts from the engine's chunks."""

import collections
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.engine.request import FinishReason, Request, TokenChunk, TokenLogprobs
from peagle.measure.metrics import speculative_decoding_block, total
from peagle.result import Assembler, Counters, Result, origins
from peagle.serve.engine_loop import Call, Loop
from peagle.serve.errors import ApiError
from peagle.serve.metrics import AnswerMetrics, Metrics
from peagle.serve.replies import Figures, TokenOrigin, Usage
from peagle.text.channels import CALL, ChannelParser, Delta
from peagle.text.offsets import TokenOffset
from peagle.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class AnswerChunk:
    """Tokens of one answer that a dispatch emitted, and the text that they complete."""

    index: int  # of the answer in the reply
    token_ids: tuple[int, ...]  # without the stop token
    deltas: tuple[Delta, ...]  # the text; if channels are not parsed, at most one delta of content
    logprobs: Mapping[int, TokenLogprobs]  # by number of the token; of the deltas' tokens, if the request sets logprobs
    finish_reason: FinishReason | None  # set in the last chunk
    origins: tuple[str, ...]  # of each token (peagle.result.origins)
    cut: bool = False  # a stop string or stop token of the request ended the answer

    def logprobs_of(self, delta: Delta) -> list[tuple[TokenOffset, TokenLogprobs]]:
        return [(token, self.logprobs[token.number]) for token in delta.tokens if token.number in self.logprobs]


class OpenAnswers:
    """Submit requests to the engine and read their answers. Raises as `Loop.submit` does.

    channels: parse the answers' channels; stop strings then apply to content messages. constraint: the field of the
    grammar, named in its errors. decode=False: max_tokens is 0, so only the prompt is echoed. metrics: count the
    answers.
    """

    def __init__(
        self,
        loop: Loop,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        channels: bool = False,
        constraint: str | None = None,
        decode: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        self._tokenizer, self._stop_token_ids = tokenizer, loop.engine.stop_token_ids
        self._channels, self._constraint = channels and tokenizer is not None, constraint
        k, started_s = loop.engine.config.num_speculative_tokens, time.perf_counter()
        self._assemblers = []
        for request in requests:
            parser = None
            if channels and tokenizer is not None:
                least = request.sampling.min_tokens
                parser = ChannelParser(tokenizer, request.prompt_ids, stop=request.stop, min_tokens=least)
            self._assemblers.append(Assembler(request, request.limit_drafts(k), tokenizer, started_s, parser=parser))
        self._call: Call = loop.submit(requests) if decode else EchoCall(loop, requests)
        self._counted: list[AnswerMetrics] = []
        if metrics is not None:
            num_answers = 1 + max(request.index for request in requests)  # to each prompt
            self._counted = [AnswerMetrics(metrics, assembler, num_answers) for assembler in self._assemblers]

    async def chunks(self) -> AsyncGenerator[AnswerChunk, None]:
        """Yield chunks until all answers have ended. Aborts the requests if the reader stops early."""
        try:
            async with contextlib.aclosing(self._call.chunks()) as chunks:
                async for index, chunk in chunks:
                    yield self._read(index, chunk)
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

    def _read(self, index: int, chunk: TokenChunk) -> AnswerChunk:
        assembler = self._assemblers[index]
        piece = assembler.add(chunk)
        if self._counted:
            self._counted[index].add(chunk, piece)
        if assembler.finish_reason != chunk.finish_reason:  # a stop string ended the answer
            self._call.abort(index)
        count = len(piece.token_ids)
        if chunk.finish_reason == "stop" and count and count == len(chunk.token_ids):
            count -= 1  # the stop token
        deltas = piece.deltas
        if not self._channels and (piece.text or piece.shown):
            deltas = (Delta("content", piece.text, 0, tokens=piece.shown),)
        numbers = [token.number for delta in deltas for token in delta.tokens] if assembler.logprobs else []
        return AnswerChunk(
            index,
            piece.token_ids[:count],
            deltas,
            {number: assembler.logprobs[number] for number in numbers},
            assembler.finish_reason,
            origins(chunk)[:count],
            assembler.cut or self._at_stop_of_request(assembler.request, chunk),
        )

    def _at_stop_of_request(self, request: Request, chunk: TokenChunk) -> bool:
        """Return whether the answer ended at a stop token of the request that is not the model's own."""
        if chunk.finish_reason != "stop" or not chunk.token_ids:
            return False
        last = chunk.token_ids[-1]
        if last in self._stop_token_ids or last not in (request.stop_token_ids or ()):
            return False
        # `RequestBuilder` adds the end of a call to stop_token_ids, but it is the model that ends its answer there
        return self._tokenizer is None or self._tokenizer.special_tokens.get(last) != CALL


class EchoCall:
    """A `Call` whose answers have no tokens, since they only echo the prompts."""

    def __init__(self, loop: Loop, requests: Sequence[Request]) -> None:
        for request in requests:
            loop.engine.check(request)
        self._requests = requests

    async def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        for index, request in enumerate(self._requests):
            yield index, TokenChunk(request, (), time.perf_counter(), finish_reason="length")

    def abort(self, index: int) -> None: ...
    def close(self) -> None: ...


class TokenTexts:
    """The text, kind and origin of each token of an answer, for the page.

    A character of several tokens is the text of the last of them. A token outside of messages, such as a control token,
    has no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer, self._message = Detokenizer(tokenizer), 0
        self._waiting: collections.deque[tuple[int, str]] = collections.deque()  # (token, origin)
        self._first = 0  # number of the first waiting token in the answer

    def of(self, chunk: AnswerChunk) -> list[TokenOrigin]:
        """Return the waiting tokens up to the last one that has text; all of them at the answer's end."""
        self._waiting.extend(zip(chunk.token_ids, chunk.origins, strict=True))
        tokens: list[TokenOrigin] = []
        for delta in chunk.deltas:
            if delta.message != self._message:
                self._detokenizer, self._message = Detokenizer(self._tokenizer), delta.message
            for token in delta.tokens:
                tokens += self._hidden(token.number)
                token_id, origin = self._next()
                text = self._detokenizer.add((token_id,))
                tokens.append({"text": text, "kind": delta.kind, "origin": origin})
        return tokens if chunk.finish_reason is None else tokens + self._hidden(self._first + len(self._waiting))

    def _next(self) -> tuple[int, str]:
        self._first += 1
        return self._waiting.popleft()

    def _hidden(self, end: int) -> list[TokenOrigin]:
        """Return the waiting tokens before this number, without text."""
        return [{"text": "", "kind": "hidden", "origin": self._next()[1]} for _ in range(self._first, end)]


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
