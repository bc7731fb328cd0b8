"""Assemble the result of one request from the engine's chunks: text, counters and figures.

An undefined figure (a rate over no steps, tokens per second of one token) is None, never NaN or zero. Times are
readings of time.perf_counter() in seconds, without compilation, because the engine is warmed up before.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from peagle.base.errors import InputError
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.host.handle import Handle
from peagle.engine.request import FinishReason, Request, StepRecord, TokenChunk, TokenLogprobs
from peagle.text.channels import ChannelParser, Delta
from peagle.text.offsets import TokenOffset
from peagle.text.tokenizer import Tokenizer

LOOPING_ABOVE = 0.3  # the loop share above which an output loops
LOOP_GRAM = 4


@dataclass(frozen=True)
class Counters:
    """Raw counts of steps, before the output is cut at a stop token, a stop string or the budget.

    A step verifies at least one draft; the plain steps of an adaptive engine are counted apart.
    """

    num_speculative_tokens: int  # K, the most drafts of a step
    histogram: tuple[int, ...]  # [K + 1]: steps that accepted i drafts
    verified: tuple[int, ...]  # [K]: steps that verified draft i
    num_plain_steps: int = 0
    tried: tuple[int, ...] = ()  # [K]: steps that verified draft i and accepted all before it
    num_proposed: int = 0  # drafts, verified or not
    num_looked_up: int = 0  # accepted drafts of the lookup drafter: n-grams of the text so far
    num_truncated: int = 0  # tokens that the steps decided after the output's end

    @classmethod
    def of(cls, steps: Iterable[StepRecord], num_drafts: int, num_truncated: int = 0) -> "Counters":
        histogram, plain = [0] * (num_drafts + 1), 0
        verified, tried = [0] * num_drafts, [0] * num_drafts
        num_proposed = num_looked_up = 0
        for step in steps:
            width = len(step.draft_token_ids)
            num_proposed += step.num_drafted
            num_looked_up += step.num_accepted if step.source else 0
            if width == 0:
                plain += 1
                continue
            histogram[step.num_accepted] += 1
            for index in range(width):
                verified[index] += 1
                tried[index] += index <= step.num_accepted
        counts = tuple(histogram), tuple(verified), plain, tuple(tried), num_proposed, num_looked_up
        return cls(num_drafts, *counts, num_truncated)

    def __add__(self, other: "Counters") -> "Counters":
        """Add up the counts of equal K. Raises ValueError for another K."""
        k, other_k = self.num_speculative_tokens, other.num_speculative_tokens
        if k != other_k:
            raise ValueError(f"counters of K = {k} and {other_k} cannot be pooled")
        sums: list[Any] = [
            a + b if isinstance(a, int) else tuple(c + d for c, d in zip(a, b, strict=True))
            for a, b in zip(astuple(self)[1:], astuple(other)[1:], strict=True)
        ]
        return Counters(k, *sums)

    @property
    def num_steps(self) -> int:
        return sum(self.histogram)

    @property
    def num_drafted(self) -> int:
        """Number of verified drafts; steps * K if every step verifies K."""
        return sum(self.verified)

    @property
    def num_accepted(self) -> int:
        return sum(accepted * steps for accepted, steps in enumerate(self.histogram))

    @property
    def num_emitted(self) -> int:
        """Number of tokens of the steps in the output: accepted drafts, and a recovered or bonus token a step."""
        return self.num_accepted + self.num_steps - self.num_truncated

    @property
    def acceptance_length(self) -> float | None:
        """emitted / steps."""
        return ratio(self.num_emitted, self.num_steps)

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / steps, as in vLLM: counts what was truncated, too."""
        return None if not self.num_steps else 1 + self.num_accepted / self.num_steps

    @property
    def acceptance_rate(self) -> float | None:
        return ratio(self.num_accepted, self.num_drafted)

    @property
    def acceptance_rate_per_position(self) -> tuple[float | None, ...]:
        """[i]: steps that accepted draft i / all steps; None if no step verified it.

        Unconditional, so it never rises with i.
        """
        return tuple(
            ratio(accepted, self.num_steps if verified else 0)
            for accepted, verified in zip(self.accepted_per_position, self.verified, strict=True)
        )

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """[i]: steps that accepted draft i."""
        return tuple(sum(self.histogram[i + 1 :]) for i in range(self.num_speculative_tokens))


@dataclass(frozen=True)
class Result:
    """The result of one request. num_speculative_tokens 0: plain decoding."""

    request: Request
    num_speculative_tokens: int
    output_ids: tuple[int, ...]  # including the stop token, or the token that completed a stop string
    text: str | None  # without stop token and stop string; None without a tokenizer
    finish_reason: FinishReason | None  # None: unfinished or interrupted
    started_s: float
    first_s: float | None  # time of the first token
    last_s: float | None
    steps: tuple[StepRecord, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each output token, if requested
    num_cached_tokens: int = 0  # prompt tokens that were in the prefix cache
    num_reasoning_tokens: int = 0  # of the output, if its channels were parsed
    times_s: tuple[float, ...] = ()  # when tokens arrived, once per dispatch
    error: str | None = None  # if finish_reason is "error": why the request could not follow its grammar

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def counters(self) -> Counters:
        return Counters.of(self.steps, self.num_speculative_tokens, self.num_truncated)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of the output per step, without the one of prefill; None in plain decoding."""
        return self.counters.acceptance_length if self.num_speculative_tokens else None

    @property
    def num_truncated(self) -> int:
        """Number of tokens that steps decided after a stop token, a stop string or the budget.

        emitted = 1 + sum(num_accepted + 1) - truncated; the first 1 is the token of prefill.
        """
        decided = sum(step.num_accepted + 1 for step in self.steps)
        return 1 + decided - len(self.output_ids) if self.output_ids else 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def decode_s(self) -> float | None:
        return None if self.first_s is None or self.last_s is None else self.last_s - self.first_s

    @property
    def total_s(self) -> float:
        """Seconds from the start to the last token."""
        return 0.0 if self.last_s is None else self.last_s - self.started_s

    @property
    def tok_per_s(self) -> float | None:
        """(emitted - 1) / (time of the last token - time of the first)."""
        return ratio(max(len(self.output_ids) - 1, 0), self.decode_s or 0.0) if len(self.output_ids) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first: (time of the last - time of the first) / (emitted - 1)."""
        return None if not (rate := self.tok_per_s) else 1 / rate

    @property
    def loop_share(self) -> float | None:
        """1 - distinct / total of the output's 4-grams of token ids; None below 4 tokens."""
        distinct, total = loop_grams(self.output_ids)
        return None if not total else 1 - distinct / total

    @property
    def loops(self) -> bool:
        """Whether the output repeats itself: its loop share is above LOOPING_ABOVE."""
        return (self.loop_share or 0.0) > LOOPING_ABOVE


@dataclass(slots=True)
class Piece:
    """What a chunk adds to an answer: tokens, and the text that they complete.

    parts, if requested: (text, origin) of each token. An accepted draft's origin is its position in the step, from 1;
    that of the target's own tokens (recovered, bonus, plain) is 0.
    """

    chunk: TokenChunk
    token_ids: tuple[int, ...] = ()  # up to the answer's end
    deltas: Sequence[Delta] = ()
    parts: Sequence[tuple[str, int]] = ()
    steps: tuple[StepRecord, ...] = ()  # those that began before the answer's end
    finish_reason: FinishReason | None = None  # set in the last piece
    at_stop: bool = False  # the last token is a stop token
    cut: bool = False  # a stop string, or a stop token that is the request's own, ended the answer
    logprobs: Sequence[TokenLogprobs] = ()  # of all tokens of the answer so far, if the request sets logprobs
    index: int = 0  # of the answer in a reply

    @property
    def text(self) -> str:
        return text_of(self.deltas)

    @property
    def origins(self) -> tuple[str, ...]:
        """The origin of each token but the stop token."""
        return origins(self.chunk)[: len(self.token_ids) - self.at_stop]

    def logprobs_of(self, delta: Delta) -> list[tuple[TokenOffset, TokenLogprobs]]:
        return [(token, self.logprobs[token.number]) for token in delta.tokens] if self.logprobs else []


class Assembler:
    """Assemble one request's answer from its chunks, and end it before the first stop string.

    `add` returns new text, `result` the figures so far. The answer does not depend on how its tokens are divided into
    chunks. It ends with the token that completes a stop string; its text ends before the stop string that begins first.
    No stop string ends in the first `min_tokens` tokens, as in vLLM. Text that may begin a stop string is held back
    until that is decided or the request ends. An incomplete character at the end, and the stop token, complete no stop
    string.
    """

    def __init__(
        self,
        request: Request,
        num_speculative_tokens: int,
        tokenizer: Tokenizer | None,
        started_s: float,
        by_token: bool = False,
        channels: bool = False,
        own_stops: Collection[int] = (),
        index: int = 0,
    ) -> None:
        """by_token: pieces have parts. Raises InputError for stop strings without a tokenizer.

        channels: parse them; otherwise the answer is a single message of content, with control tokens spelled out.
        own_stops: the request's stop tokens that are not the model's. index: of the answer in a reply.
        """
        refuse_stop_strings_without(tokenizer, request.stop)
        self.request, self.num_speculative_tokens, self.started_s = request, num_speculative_tokens, started_s
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprobs] = []  # of each output token, if requested
        self._by_token, self._own_stops, self._index = by_token, own_stops, index
        self._parser: ChannelParser | None = None
        if tokenizer is not None:
            self._parser = ChannelParser(
                tokenizer,
                request.prompt_ids if channels else (),
                stop=request.stop,
                min_tokens=request.sampling.min_tokens,
                offsets=channels or request.logprobs is not None,
            )
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._steps: list[StepRecord] = []
        self._times: list[float] = []
        self.num_cached_tokens = 0
        self._error: str | None = None

    def add(self, chunk: TokenChunk) -> Piece:
        """Add a chunk; the last one also releases text that was held back. Drops chunks after the end."""
        if self.finish_reason is not None:
            return Piece(chunk)
        steps, at_stop = chunk.steps, chunk.finish_reason == "stop" and bool(chunk.token_ids)
        token_ids = chunk.token_ids[:-1] if at_stop else chunk.token_ids
        deltas, parts = self._read(chunk, token_ids)
        if self._parser is not None and self._parser.complete:
            token_ids, at_stop, cut = token_ids[: self._parser.num_tokens - len(self._ids)], False, True
            end = len(self.request.prompt_ids) + len(self._ids) + len(token_ids) - 1
            steps = tuple(step for step in steps if step.length < end)
            self.finish_reason = "stop"
        else:
            token_ids, cut = chunk.token_ids, at_stop and chunk.token_ids[-1] in self._own_stops
            self.finish_reason, self._error = chunk.finish_reason, chunk.error
        self._ids += token_ids
        self.logprobs += chunk.logprobs[: len(token_ids)]
        self._steps += steps
        if token_ids:
            self._times.append(chunk.time_s)
        self.num_cached_tokens += chunk.num_cached_tokens
        self._texts.append(text_of(deltas))
        ends, index, logprobs = self.finish_reason, self._index, self.logprobs
        return Piece(chunk, token_ids, deltas, parts, steps, ends, at_stop, cut, logprobs, index)

    def close(self) -> str:
        """Release the held-back text of a request that ends unfinished."""
        text = text_of(self._parser.finish()) if self.finish_reason is None and self._parser is not None else ""
        self._texts.append(text)
        return text

    @property
    def num_output_tokens(self) -> int:
        return len(self._ids)

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    def result(self) -> Result:
        return Result(
            request=self.request,
            num_speculative_tokens=self.num_speculative_tokens,
            output_ids=tuple(self._ids),
            text=None if self._parser is None else "".join(self._texts),
            finish_reason=self.finish_reason,
            started_s=self.started_s,
            first_s=self._times[0] if self._times else None,
            last_s=self._times[-1] if self._times else None,
            steps=tuple(self._steps),
            logprobs=tuple(self.logprobs),
            num_cached_tokens=self.num_cached_tokens,
            num_reasoning_tokens=self.num_reasoning_tokens,
            times_s=tuple(self._times),
            error=self._error,
        )

    def _read(self, chunk: TokenChunk, token_ids: tuple[int, ...]) -> tuple[list[Delta], list[tuple[str, int]]]:
        """Return (deltas, parts) of a chunk's tokens."""
        parser, last = self._parser, chunk.finish_reason is not None
        if parser is None:
            numbers = range(len(self._ids), len(self._ids) + len(token_ids))
            tokens = tuple(TokenOffset(number, 0) for number in numbers if self.request.logprobs is not None)
            return [Delta("content", "", 0, tokens=tokens)] if tokens else [], []
        if not self._by_token:
            return parser.add(token_ids, last=last), []
        by_token = [parser.add((token_id,)) for token_id in token_ids] + ([parser.finish()] if last else [])
        drafted = [int(origin) if origin.isdigit() else 0 for origin in origins(chunk)[: len(token_ids)]]
        return [*itertools.chain(*by_token)], [*zip(map(text_of, by_token), [*drafted, 0], strict=False)]


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join([delta.text for delta in deltas])


def origins(chunk: TokenChunk) -> tuple[str, ...]:
    """Name each token's origin: "prefill", "plain", an accepted draft's position from 1, "recovered", "bonus"."""
    if not chunk.steps:
        return ("prefill",) * len(chunk.token_ids)
    origins: list[str] = []
    for step in chunk.steps:
        origins += [str(place + 1) for place in range(step.num_accepted)]
        drafted = len(step.draft_token_ids)
        origins.append("plain" if not drafted else "bonus" if step.num_accepted == drafted else "recovered")
    return tuple(origins[: len(chunk.token_ids)])


def refuse_stop_strings_without(tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
    """Raise InputError for stop strings without a tokenizer."""
    if stop and tokenizer is None:
        raise InputError(
            "stop strings are text, but the target's directory has no tokenizer.json; leave them out, or add the file",
            "stop",
        )


def loop_grams(token_ids: Sequence[int]) -> tuple[int, int]:
    grams = [tuple(token_ids[i : i + LOOP_GRAM]) for i in range(len(token_ids) - LOOP_GRAM + 1)]
    return len(set(grams)), len(grams)


def submit(
    engine: AnyEngine, requests: Sequence[Request], tokenizer: Tokenizer | None, by_token: bool = False
) -> dict[Handle, Assembler]:
    """Add the requests to an engine, each with an Assembler; none if one cannot be run."""
    now, k = time.perf_counter(), engine.config.num_drafts
    assemblers = [Assembler(request, request.limit_drafts(k), tokenizer, now, by_token) for request in requests]
    return dict(zip(engine.add_all(requests), assemblers, strict=True))


def follow(engine: AnyEngine, assemblers: Mapping[Handle, Assembler]) -> Generator[tuple[Assembler, Piece]]:
    """Yield (assembler, piece) for each chunk as it arrives, until all requests have ended.

    Aborts a request in the engine after a stop string. The caller may add requests to `assemblers` while it iterates;
    if it stops early, the rest is aborted. Raises InputError as `Engine.run` does.
    """
    with contextlib.closing(engine.run(assemblers)) as chunks:
        for handle, chunk in chunks:
            assembler = assemblers[handle]
            if assembler.finish_reason is not None:  # a chunk after the end
                continue
            piece = assembler.add(chunk)
            if assembler.finish_reason != chunk.finish_reason:
                engine.abort(handle)
            yield assembler, piece


def decode(
    engine: AnyEngine,
    requests: Sequence[Request],
    tokenizer: Tokenizer | None,
    decoded: Callable[[Piece], object] = lambda _: None,
) -> list[Result]:
    """Decode the requests to their ends and return their results, in order. Calls `decoded` with each new piece.

    Raises InputError as `Engine.run` does.
    """
    assemblers = submit(engine, requests, tokenizer)
    try:
        for _, piece in follow(engine, assemblers):
            decoded(piece)
    finally:
        engine.settle()
    return [assembler.result() for assembler in assemblers.values()]


def ratio(numerator: int | float, denominator: int | float) -> float | None:
    return numerator / denominator if denominator else None
