"""What became of one request, from the chunks that the engine emitted: text, counters, and the figures they give.

What cannot be said (a rate over no steps, a speed from one token) is None, never NaN and never zero.
Times are readings of time.perf_counter() in seconds; compilation is in none of them (the engine is warm before).
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peagle.engine.engine import Engine
from peagle.engine.request import FinishReason, Request, StepRecord, TokenChunk
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
    output_ids: tuple[int, ...]  # with the stop token
    text: str | None  # without it; None where there is no tokenizer
    finish_reason: FinishReason | None  # None: it goes on, or was interrupted
    started_s: float
    first_s: float | None  # time of the first token
    last_s: float | None
    steps: tuple[StepRecord, ...] = ()
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
        """Tokens decided and not emitted, behind a stop token or the budget:
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


class Recorder:
    """Collects one request's chunks. `add` gives the text to show; `result` what became of it so far."""

    def __init__(
        self, request: Request, num_speculative_tokens: int, tokenizer: Tokenizer | None, started_s: float
    ) -> None:
        self.request = request
        self.finish_reason: FinishReason | None = None
        self._num_speculative_tokens = num_speculative_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._steps: list[StepRecord] = []
        self._times: list[float] = []

    def add(self, chunk: TokenChunk) -> str:
        """The new text of these tokens, empty without a tokenizer; with the last ones, what was held back, too."""
        if chunk.token_ids:
            self._first_s = chunk.time_s if self._first_s is None else self._first_s
            self._last_s = chunk.time_s
            self._times.append(chunk.time_s)
        self._steps += chunk.steps
        self._ids += chunk.token_ids
        self.finish_reason = chunk.finish_reason
        shown = chunk.token_ids[:-1] if chunk.finish_reason == "stop" else chunk.token_ids
        return self._show(shown, chunk.finish_reason is not None)

    def close(self) -> str:
        """The text that was held back, for a request that ends here although it has not finished."""
        return self._show((), last=True)

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
            times_s=tuple(self._times),
        )

    def _show(self, token_ids: Sequence[int], last: bool) -> str:
        if self._detokenizer is None:
            return ""
        piece = self._detokenizer.add(token_ids) + (self._detokenizer.flush() if last else "")
        self._pieces.append(piece)
        return piece


def loop_grams(token_ids: Sequence[int]) -> tuple[int, int]:
    """(distinct, all) 4-grams of the ids."""
    grams = [tuple(token_ids[i : i + LOOP_GRAM]) for i in range(len(token_ids) - LOOP_GRAM + 1)]
    return len(set(grams)), len(grams)


def recorders(engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer | None) -> list[Recorder]:
    """One for each request; they are asked now."""
    now, k = time.perf_counter(), engine.config.num_speculative_tokens
    return [Recorder(request, k, tokenizer, now) for request in requests]


def decode(engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer | None) -> list[Result]:
    """What becomes of the requests, decoded from start to end."""
    recording = recorders(engine, requests, tokenizer)
    for place, chunk in engine.generate(requests):
        recording[place].add(chunk)
    return [recorder.result() for recorder in recording]


def ratio(numerator: int | float, denominator: int | float) -> float | None:
    return numerator / denominator if denominator else None
