"""What became of one request, from the chunks that the engine emitted: text, counters, and the figures they give.

What cannot be said (a rate over no steps, a speed from one token) is None, never NaN and never zero.
Times are readings of time.perf_counter() in seconds; compilation is in none of them (the engine is warm before).
"""

import collections
import contextlib
import itertools
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from peagle.engine.engine import Engine, Handle
from peagle.engine.request import FinishReason, Request, StepRecord, TokenChunk, TokenLogprobs
from peagle.ops.errors import InputError
from peagle.text.stop_strings import StopStrings
from peagle.text.tokenizer import Detokenizer, Tokenizer

LOOPING_ABOVE = 0.3  # an output whose loop share is higher loops
LOOP_GRAM = 4


@dataclass(frozen=True)
class Counters:
    """Raw counts of steps, before any output was cut. Steps are those that verified at least one draft; the others, of
    a run that chooses its widths, are plain steps."""

    num_spec_tokens: int  # K, the most a step drafts
    histogram: tuple[int, ...]  # K + 1 places: how many steps accepted a drafts
    verified: tuple[int, ...]  # K places: how many steps verified the draft at this place
    num_plain_steps: int = 0
    tried: tuple[int, ...] = ()  # K places: how many of those had accepted every draft before it

    @classmethod
    def of(cls, steps: Iterable[StepRecord], num_spec_tokens: int) -> "Counters":
        histogram, plain = [0] * (num_spec_tokens + 1), 0
        verified, tried = [0] * num_spec_tokens, [0] * num_spec_tokens
        for step in steps:
            width = len(step.draft_token_ids)
            if width == 0:
                plain += 1
                continue
            histogram[step.num_accepted] += 1
            for place in range(width):
                verified[place] += 1
                tried[place] += place <= step.num_accepted
        return cls(num_spec_tokens, tuple(histogram), tuple(verified), plain, tuple(tried))

    def __add__(self, other: "Counters") -> "Counters":
        """Pooled: counts add up. Both must have the same K."""
        if self.num_spec_tokens != other.num_spec_tokens:
            raise ValueError(f"counters of K = {self.num_spec_tokens} and {other.num_spec_tokens} cannot be pooled")
        return Counters(
            self.num_spec_tokens,
            tuple(a + b for a, b in zip(self.histogram, other.histogram, strict=True)),
            tuple(a + b for a, b in zip(self.verified, other.verified, strict=True)),
            self.num_plain_steps + other.num_plain_steps,
            tuple(a + b for a, b in zip(self.tried, other.tried, strict=True)),
        )

    @property
    def num_steps(self) -> int:
        return sum(self.histogram)

    @property
    def num_drafted(self) -> int:
        """Drafts that were verified: steps * K, where every step verifies K."""
        return sum(self.verified)

    @property
    def num_accepted(self) -> int:
        """sum over a of a * histogram[a]"""
        return sum(accepted * steps for accepted, steps in enumerate(self.histogram))

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps: tokens a step gives, the recovered or bonus token included (vLLM's definition)."""
        return None if not self.num_steps else 1 + self.num_accepted / self.num_steps

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted"""
        return ratio(self.num_accepted, self.num_drafted)

    @property
    def acceptance_rate_per_position(self) -> tuple[float | None, ...]:
        """Place i: steps that accepted draft i / all steps, None where none verified it. Unconditional, so it never
        rises with i."""
        return tuple(
            ratio(accepted, self.num_steps if verified else 0)
            for accepted, verified in zip(self.accepted_per_position, self.verified, strict=True)
        )

    @property
    def conditional_rate_per_position(self) -> tuple[float | None, ...]:
        """Place i: steps that accepted draft i / those that verified it and accepted all before it."""
        return tuple(ratio(a, t) for a, t in zip(self.accepted_per_position, self.tried, strict=True))

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Place i: steps that accepted draft i."""
        return tuple(sum(self.histogram[i + 1 :]) for i in range(self.num_spec_tokens))


@dataclass(frozen=True)
class Result:
    """What became of one request. num_speculative_tokens 0: plain decoding."""

    request: Request
    num_speculative_tokens: int
    output_ids: tuple[int, ...]  # with the stop token, or the token that completed a stop string
    text: str | None  # without either; None where there is no tokenizer
    finish_reason: FinishReason | None  # None: it goes on, or was interrupted
    started_s: float
    first_s: float | None  # time of the first token
    last_s: float | None
    steps: tuple[StepRecord, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each output token, if the request asks for them
    times_s: tuple[float, ...] = ()  # at which tokens came, each once: those of a dispatch come together

    @property
    def counters(self) -> Counters:
        return Counters.of(self.steps, self.num_speculative_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps; None in plain decoding."""
        return self.counters.acceptance_length if self.num_speculative_tokens else None

    @property
    def num_truncated(self) -> int:
        """Tokens decided and not emitted, behind a stop token, a stop string or the budget:
        emitted = 1 + sum(num_accepted + 1) - truncated, the 1 being the token prefill gives."""
        decided = sum(step.num_accepted + 1 for step in self.steps)
        return 1 + decided - len(self.output_ids) if self.output_ids else 0

    @property
    def ttft_s(self) -> float | None:
        """Time from the request's start to its first token."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def decode_s(self) -> float | None:
        """Time from the first token to the last."""
        return None if self.first_s is None or self.last_s is None else self.last_s - self.first_s

    @property
    def tok_per_s(self) -> float | None:
        """(emitted - 1) / (time of the last token - time of the first)"""
        return ratio(max(len(self.output_ids) - 1, 0), self.decode_s or 0.0) if len(self.output_ids) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """(time of the last token - time of the first) / (emitted - 1): seconds per token behind the first."""
        return None if not (rate := self.tok_per_s) else 1 / rate

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Seconds between one arrival of tokens and the next, however many come together: what a reader waits."""
        return tuple(after - before for before, after in itertools.pairwise(self.times_s))

    @property
    def loop_share(self) -> float | None:
        """1 - distinct / total of the output's 4-grams of token ids; None below 4 tokens."""
        distinct, total = loop_grams(self.output_ids)
        return None if not total else 1 - distinct / total

    @property
    def loops(self) -> bool:
        """Loop share above 0.3."""
        return (self.loop_share or 0.0) > LOOPING_ABOVE


@dataclass(frozen=True)
class Piece:
    """What a chunk adds to an answer: its tokens, and the text that is certain with them."""

    token_ids: tuple[int, ...]
    text: str


class Assembler:
    """Makes one request's answer from its chunks, and ends it before the first stop string. `add` gives what to show;
    `result` what became of it so far.

    Each token is looked at by itself, so the answer does not depend on how tokens were cut into chunks: it ends with
    the token that completes a stop string, its text before the string that begins first. Text that may be the beginning
    of a stop string is held back until that is decided, or until the request ends otherwise. Bytes at the end that are
    no character, and the stop token, complete nothing.
    """

    def __init__(
        self, request: Request, num_speculative_tokens: int, tokenizer: Tokenizer | None, started_s: float
    ) -> None:
        """Raises InputError for stop strings without a tokenizer."""
        refuse_stop_strings_without(tokenizer, request.stop)
        self.request = request
        self.finish_reason: FinishReason | None = None
        self._num_speculative_tokens = num_speculative_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stop = StopStrings(request.stop) if request.stop else None
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._steps: list[StepRecord] = []
        self._times: list[float] = []

    def add(self, chunk: TokenChunk) -> Piece:
        """Take a chunk; with the last one, what was held back comes, too. Chunks after the end are dropped."""
        if self.finish_reason is not None:
            return Piece((), "")
        at_stop_token = chunk.finish_reason == "stop"
        token_ids, text = self._read(chunk.token_ids[:-1] if at_stop_token else chunk.token_ids)
        if self._stop is not None and self._stop.complete:
            self.finish_reason = "stop"
        else:
            self.finish_reason = chunk.finish_reason
            token_ids += chunk.token_ids[-1:] if at_stop_token else ()
            text += "" if chunk.finish_reason is None else self._flush()
        self._ids += token_ids
        self._logprobs += chunk.logprobs[: len(token_ids)]
        self._steps += [step for step in chunk.steps if self._began(step)]
        if token_ids:
            self._first_s = chunk.time_s if self._first_s is None else self._first_s
            self._last_s = chunk.time_s
            self._times.append(chunk.time_s)
        self._pieces.append(text)
        return Piece(token_ids, text)

    def close(self) -> str:
        """The text that was held back, for a request that ends here although it has not finished."""
        text = self._flush() if self.finish_reason is None else ""
        self._pieces.append(text)
        return text

    def result(self) -> Result:
        return Result(
            request=self.request,
            num_speculative_tokens=self._num_speculative_tokens,
            output_ids=tuple(self._ids),
            text=None if self._detokenizer is None else "".join(self._pieces),
            finish_reason=self.finish_reason,
            started_s=self._started_s,
            first_s=self._first_s,
            last_s=self._last_s,
            steps=tuple(self._steps),
            logprobs=tuple(self._logprobs),
            times_s=tuple(self._times),
        )

    def _read(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """(the tokens up to the one that completes a stop string, the text that is certain with them)."""
        if self._detokenizer is None:
            return token_ids, ""
        if self._stop is None:
            return token_ids, self._detokenizer.add(token_ids)
        text = ""
        for place, token_id in enumerate(token_ids):
            text += self._stop.add(self._detokenizer.add((token_id,)))
            if self._stop.complete:
                return token_ids[: place + 1], text
        return token_ids, text

    def _began(self, step: StepRecord) -> bool:
        """Whether a step began before the token that completed a stop string; later ones are dropped with theirs."""
        cut = self._stop is not None and self._stop.complete
        return not cut or step.length < len(self.request.prompt_ids) + len(self._ids) - 1

    def _flush(self) -> str:
        """What was held back."""
        if self._detokenizer is None:
            return ""
        held = "" if self._stop is None else self._stop.flush()
        return held + self._detokenizer.flush()


def refuse_stop_strings_without(tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
    """Raise InputError for stop strings where there is no text to look for them in."""
    if stop and tokenizer is None:
        raise InputError(
            "stop strings are text, but the target's directory has no tokenizer.json; leave them out, or add the file"
        )


def loop_grams(token_ids: Sequence[int]) -> tuple[int, int]:
    """(distinct, all) 4-grams of the ids."""
    grams = [tuple(token_ids[i : i + LOOP_GRAM]) for i in range(len(token_ids) - LOOP_GRAM + 1)]
    return len(set(grams)), len(grams)


def ask(engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer | None) -> dict[Handle, Assembler]:
    """Put the requests in the engine's queue, each with what makes its answer; if one cannot be run, none."""
    now, k = time.perf_counter(), engine.config.num_speculative_tokens
    assemblers = [Assembler(request, k, tokenizer, now) for request in requests]
    return dict(zip(engine.add_all(requests), assemblers, strict=True))


def follow(engine: Engine, asked: Mapping[Handle, Assembler]) -> Generator[tuple[Assembler, Piece]]:
    """Yield what each chunk adds to which answer, as it comes, until all have ended.

    A request whose stop string is complete ends in the engine, too. The reader may put further requests into `asked` on
    the way. One that stops early aborts what is left.
    Raises InputError as `Engine.follow` does.
    """
    with contextlib.closing(engine.run(asked)) as chunks:
        for handle, chunk in chunks:
            assembler = asked[handle]
            if assembler.finish_reason is not None:  # came after its end
                continue
            piece = assembler.add(chunk)
            if assembler.finish_reason != chunk.finish_reason:
                engine.abort(handle)
            yield assembler, piece


def decode(engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer | None) -> list[Result]:
    """What becomes of the requests, decoded from start to end."""
    asked = ask(engine, requests, tokenizer)
    try:
        collections.deque(follow(engine, asked), maxlen=0)
    finally:
        engine.settle()
    return [assembler.result() for assembler in asked.values()]


def ratio(numerator: int | float, denominator: int | float) -> float | None:
    return numerator / denominator if denominator else None
