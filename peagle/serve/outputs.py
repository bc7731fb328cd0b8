"""Collect the answers of one HTTP request: the engine's chunks become text, counts and figures."""

import collections
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.engine.request import FinishReason, Request, TokenChunk, TokenLogprobs
from peagle.measure.metrics import speculative_decoding_block, total
from peagle.result import Assembler, Counters, Result, origins, refuse_stop_strings_without
from peagle.serve.errors import ApiError
from peagle.serve.loop import Loop, Submitted
from peagle.serve.replies import Figures, TokenOrigin, Usage
from peagle.text.channels import CALL, ChannelParser, Delta
from peagle.text.places import TokenPlace
from peagle.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class OutputChunk:
    """One answer's tokens of a dispatch, and the text that they complete.

    deltas: the text; without parsed channels, one delta of content. logprobs: of the deltas' tokens, by their numbers,
    if the request sets them. finish_reason: of the answer's last chunk. cut: the request's own stop string or stop
    token ended the answer.
    """

    place: int
    token_ids: tuple[int, ...]  # without the stop token
    deltas: tuple[Delta, ...]
    logprobs: Mapping[int, TokenLogprobs]
    finish_reason: FinishReason | None
    origins: tuple[str, ...]  # of each token (peagle.result.origins)
    cut: bool = False

    def logprobs_of(self, delta: Delta) -> list[tuple[TokenPlace, TokenLogprobs]]:
        return [(token, self.logprobs[token.number]) for token in delta.tokens if token.number in self.logprobs]


class OutputCollector:
    """Run requests, and read their answers. Raises like EngineLoop.submit, before anything is sent.

    channels: parse the answers' channels; stop strings then apply to content messages. constraint: the field that
    constrains the answers, for errors of their grammar. decode: False for answers without tokens, which end at once.
    """

    def __init__(
        self,
        loop: Loop,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        channels: bool = False,
        constraint: str | None = None,
        decode: bool = True,
    ) -> None:
        for request in requests:
            refuse_stop_strings_without(tokenizer, request.stop)
        self.requests, self.started_s = tuple(requests), time.perf_counter()
        self._tokenizer, self._ends = tokenizer, loop.engine.stop_token_ids
        self._channels = channels and tokenizer is not None
        k = loop.engine.config.num_speculative_tokens
        self._assemblers = []
        for request in requests:
            parser = None
            if self._channels:
                assert tokenizer is not None
                parser = ChannelParser(tokenizer, request.prompt_ids, stop=request.stop)
            self._assemblers.append(
                Assembler(request, request.most_drafts(k), tokenizer, self.started_s, by_token=False, parser=parser)
            )
        self._constraint = constraint
        self._call: Submitted = loop.submit(requests) if decode else Undecoded(loop, requests)

    async def chunks(self) -> AsyncGenerator[OutputChunk, None]:
        """Yield chunks until all answers have ended; end the requests if the reader leaves."""
        try:
            async with contextlib.aclosing(self._call.chunks()) as chunks:
                async for place, chunk in chunks:
                    yield self._read(place, chunk)
        except ApiError as error:
            if error.status == 400 and error.param is None:  # while decoding, only a grammar's error is of input
                error.param = self._constraint
            raise
        finally:
            self._call.close()

    def close(self) -> None:
        self._call.close()

    def results(self) -> list[Result]:
        return [assembler.result() for assembler in self._assemblers]

    def _read(self, place: int, chunk: TokenChunk) -> OutputChunk:
        assembler = self._assemblers[place]
        piece = assembler.add(chunk)
        if assembler.finish_reason != chunk.finish_reason:  # after a stop string
            self._call.abort(place)
        count = len(piece.token_ids)
        if chunk.finish_reason == "stop" and count and count == len(chunk.token_ids):
            count -= 1
        deltas = piece.deltas
        if not self._channels and (piece.text or piece.shown):
            deltas = (Delta("content", piece.text, 0, tokens=piece.shown),)
        numbers = [token.number for delta in deltas for token in delta.tokens] if assembler.logprobs else []
        return OutputChunk(
            place,
            piece.token_ids[:count],
            deltas,
            {number: assembler.logprobs[number] for number in numbers},
            assembler.finish_reason,
            origins(chunk)[:count],
            assembler.cut or self._at_own_stop(place, chunk),
        )

    def _at_own_stop(self, place: int, chunk: TokenChunk) -> bool:
        """Return whether the answer ended at a stop token that only the request names; a call's end is the model's."""
        if chunk.finish_reason != "stop" or not chunk.token_ids:
            return False
        last = chunk.token_ids[-1]
        if last in self._ends or last not in (self.requests[place].stop_token_ids or ()):
            return False
        return self._tokenizer is None or self._tokenizer.special_tokens.get(last) != CALL


class Undecoded:
    """A `Submitted` whose answers have no tokens."""

    def __init__(self, loop: Loop, requests: Sequence[Request]) -> None:
        for request in requests:
            loop.engine.check(request)
        self._requests = requests

    async def chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        for place, request in enumerate(self._requests):
            yield place, TokenChunk(request, (), time.perf_counter(), finish_reason="length")

    def abort(self, place: int) -> None: ...
    def close(self) -> None: ...


class TokenTexts:
    """The text, kind and origin of each token of an answer.

    A character of several tokens belongs to the last of them. A token outside of messages, such as a control token,
    has no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer, self._message = Detokenizer(tokenizer), 0
        self._waiting: collections.deque[tuple[int, str]] = collections.deque()  # (token, origin)
        self._first = 0  # the number of the first that waits

    def of(self, chunk: OutputChunk) -> list[TokenOrigin]:
        """Return the tokens up to the chunk's last one with text; at the answer's end, all."""
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
        """Return the waiting tokens below this number, without their texts."""
        return [{"text": "", "kind": "hidden", "origin": self._next()[1]} for _ in range(self._first, end)]


def usage(results: Sequence[Result]) -> Usage:
    """Count tokens; a prompt with n answers counts once."""
    prompts = [result for result in results if result.request.index == 0]
    prompt, completion = (
        sum(len(result.request.prompt_ids) for result in prompts),
        sum(len(result.output_ids) for result in results),
    )
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
    """Return a reply's field with the figures of its steps, under vLLM's names; no field in plain decoding."""
    counters = pooled(results)
    if not counters.num_spec_tokens:
        return {}
    block: Any = speculative_decoding_block(counters)
    del block["num_plain_steps"]  # no name of vLLM's
    return {"metrics": {"speculative_decoding": block}}
