"""The Python interface: a target with its drafter, and what can be asked of them. `peagle.load` makes a pair.

    import peagle

    pair = peagle.load()  # the demo pair; or peagle.load("DIR", "DIR"), peagle.load("DIR", "ngram")
    stream = pair.stream("def mean(values): ...", max_new_tokens=128)
    for piece in stream:
        print(piece, end="", flush=True)
    print(stream.result.acceptance_length, stream.result.tok_per_s)

The first stream of a shape compiles; whatever is measured leaves that out.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from peagle.engine.engine import Engine, EngineConfig, Handle
from peagle.engine.request import DEFAULT_CHUNK, Request, SamplingParams
from peagle.engine.widths import WidthTable
from peagle.ops.errors import InputError
from peagle.ops.memory import available_memory_bytes, refuse_too_large, size_in_words
from peagle.protocols import Drafter, Target
from peagle.result import Assembler, Result, ask, follow, refuse_stop_strings_without
from peagle.text.prompts import Conversation, Rendering, from_ids, from_text
from peagle.text.tokenizer import DEFAULT_DATE, Tokenizer

AUTO: Literal["auto"] = "auto"  # as K: what pays
DEFAULT_NUM_SPECULATIVE_TOKENS = 7
DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_SAMPLING = SamplingParams()
DEFAULT_WIDTHS = WidthTable({1: 3, 2: 2, 4: 1})  # of a drafter that comes without a table
CAPACITY_STEP = 128  # caches come in multiples of this, so that few shapes are compiled


@dataclass(frozen=True)
class Pair:
    """A target, and the drafter that speeds it up, ready to run. Made by `load`, or from any objects that follow
    peagle.protocols."""

    target: Target  # gives the hidden states that the drafter reads
    plain_target: Target  # the same without them: what plain decoding runs
    drafter: Drafter | None  # None: plain decoding only
    tokenizer: Tokenizer | None  # None: token ids only
    stop_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    experts: str | None = None  # the layout the target's experts are in
    kernels: str | None = None  # what computes: the compiled CPU kernels, or XLA and why
    aux_layers: str | None = None  # which hidden states the drafter reads, and what said so
    draft_vocab: str | None = None  # what the drafter proposes of all it could: how many tokens, and who chose them
    drafter_window: str | None = None  # how many positions the drafter's attention sees, and what said so
    widths: WidthTable = DEFAULT_WIDTHS  # what auto drafts, by active rows
    steps_per_dispatch: int = 1  # of both engines, so that their ratio is fair
    programs_by_width: bool = False  # peagle.engine.engine.EngineConfig; default: passes skip rows not active
    _engines: dict[EngineConfig, Engine] = field(default_factory=dict, repr=False, compare=False)
    _making: Any = field(default_factory=threading.Lock, repr=False, compare=False)  # held while an engine is made

    @property
    def max_positions(self) -> int:
        """Prompt and output together."""
        return self.target.max_positions

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        num_speculative_tokens: int | Literal["auto"] | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        min_tokens: int = 0,
        logprobs: int | None = None,
        draft_sampling: bool = False,
        system: str | None = None,
        reasoning_effort: str | None = None,
        raw: bool = False,
        special_tokens: bool = False,
        date: str = DEFAULT_DATE,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
        slots: int = 1,
        context: int | None = None,
        prefill_chunk: int = DEFAULT_CHUNK,
    ) -> "Stream":
        """The answer to a prompt, piece by piece as it is accepted; `stream.result` tells the rest.

        A text is put into the chat template, unless `raw`; special tokens spelled in it are characters, unless it is
        raw and they are asked for by `special_tokens`. Token ids are taken as they are. num_speculative_tokens is
        K, 0 for plain decoding, or "auto": by the pair's table, and plainly where drafting does not pay. None
        is the pair's default (plain decoding where it has no drafter). Sampling, penalties, biases and min_tokens:
        peagle.SamplingParams. logprobs: how many of the likeliest tokens `result.logprobs` names beside each emitted
        one. The answer ends before the first of the strings in `stop`. Raises InputError at once for what cannot be
        run.

        Streams of one shape share an engine, which decodes `slots` requests at once; the others wait for a slot. The
        shape is K, `slots`, draft_sampling, prefill_chunk, and the positions: `context`, or as many as prompt and
        max_new_tokens need, which may differ from stream to stream. Iterate over each stream in a thread of its own, or
        over `astream`.
        """
        conversation = from_text(prompt) if isinstance(prompt, str) else from_ids(prompt)
        rendering = Rendering(raw, system, reasoning_effort, date, special_tokens)
        sampling = SamplingParams(
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            tuple((logit_bias or {}).items()),
            min_tokens,
        )
        request = self.request(
            conversation,
            (),
            rendering,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            ignore_eos=ignore_eos,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=logprobs,
            context=context,
        )
        k, adaptive = self.num_drafts(num_speculative_tokens)
        capacity = self.capacity([request]) if context is None else context
        config = self.engine_config(
            k,
            slots=slots,
            capacity=capacity,
            adaptive=adaptive,
            draft_sampling=draft_sampling,
            chunk=prefill_chunk,
        )
        return Stream(self, self.engine(config), request)

    def astream(self, prompt: str | Sequence[int], **options: Any) -> "AsyncStream":
        """The same for `async for`, which does not block the event loop; options are those of `stream`."""
        return AsyncStream(self.stream(prompt, **options))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Result:
        """The whole answer at once; options are those of `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def num_drafts(self, asked: int | Literal["auto"] | None) -> tuple[int, bool]:
        """(the most a step drafts, whether rows pause where it does not pay) for what was asked for.

        "auto" drafts by the pair's table of widths and pauses. None is the default: auto on CPU if there is a drafter,
        without pauses elsewhere."""
        if asked is None and self.drafter is None:
            return 0, False
        if asked is None or asked == AUTO:
            return self.widths.most, asked == AUTO or jax.default_backend() == "cpu"
        return asked, False

    def engine_config(
        self,
        num_speculative_tokens: int,
        *,
        capacity: int,
        adaptive: bool = False,
        slots: int = 1,
        draft_sampling: bool = False,
        synthetic_acceptance: tuple[float, ...] | None = None,
        chunk: int = DEFAULT_CHUNK,
    ) -> EngineConfig:
        """The shape of an engine. adaptive: drafts by the pair's table of widths, and pauses."""
        return EngineConfig(
            num_speculative_tokens=num_speculative_tokens,
            slots=slots,
            capacity=capacity,
            chunk=min(chunk, max(capacity, 1)),
            steps_per_dispatch=self.steps_per_dispatch,
            widths=self.widths if adaptive else None,
            adaptive=adaptive,
            programs_by_width=self.programs_by_width,
            draft_sampling=draft_sampling,
            synthetic_acceptance=synthetic_acceptance,
        )

    def request(
        self,
        conversation: Conversation,
        answers: Sequence[str],
        rendering: Rendering,
        *,
        max_new_tokens: int,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        ignore_eos: bool = False,
        stop: tuple[str, ...] = (),
        logprobs: int | None = None,
        index: int = 0,
        context: int | None = None,
    ) -> Request:
        """The request for the turn that follows these answers; its budget is cut to the positions left.

        Raises InputError for a prompt that is empty, holds ids outside the vocabulary, or fills the positions, and for
        stop strings without a tokenizer.
        """
        if max_new_tokens < 1:
            raise InputError(f"{max_new_tokens} new tokens are asked for; expected 1 or more")
        room = self.room(context)
        prompt_ids = conversation.encode(answers, self.tokenizer, rendering)
        if len(prompt_ids) >= room:
            whose = "the model has" if context is None else "the context holds"
            raise InputError(
                f"{conversation.name} has {len(prompt_ids)} tokens, but {whose} {room} positions; expected at most "
                f"{room - 1}, which leaves room for an answer: shorten it"
                + ("" if context is None or room == self.max_positions else " or raise --context")
            )
        refuse_stop_strings_without(self.tokenizer, stop)
        stops = () if ignore_eos else self.stop_token_ids
        budget = min(max_new_tokens, room - len(prompt_ids))
        request = Request(tuple(prompt_ids), budget, sampling, stops, index, conversation.name, logprobs, stop)
        request.check_vocabulary(self.target.vocab_size)
        return request

    def room(self, context: int | None) -> int:
        """Positions a prompt and its output may take: the context asked for, or all the model has."""
        if context is None:
            return self.max_positions
        if not 2 <= context <= self.max_positions:
            raise InputError(f"context is {context}; expected 2..{self.max_positions}, the positions of the target")
        return context

    def capacity(self, requests: Sequence[Request], at_least: int = 0) -> int:
        """The smallest multiple of 128 that holds each prompt with its budget, or all the model's positions."""
        longest = max((len(request.prompt_ids) + request.max_new_tokens for request in requests), default=2)
        rounded = -(-max(longest, at_least) // CAPACITY_STEP) * CAPACITY_STEP
        return min(rounded, self.max_positions)

    def engine(self, config: EngineConfig) -> Engine:
        """The engine of this shape, the same one for the same shape. K = 0 decodes plainly.

        Raises InputError for a K that the positions or the drafter's window do not allow, for K > 0 without a drafter,
        for drafts to be sampled from a drafter that has no probabilities, and for caches that take more memory than
        there is.
        """
        k = config.num_speculative_tokens
        if k > self.max_positions - 2:
            raise InputError(
                f"K is {k}; expected at most {max(self.max_positions - 2, 0)}, since a step reaches K + 1 positions "
                f"behind the prompt and the target has {self.max_positions}"
            )
        window = getattr(self.drafter, "window", None) if k else None
        if window is not None and window < k + 1:
            raise InputError(
                f"the drafter's window is {window} positions; expected {k + 1} or more at K = {k}, since a step's rows "
                f"must see the token they follow: raise --drafter-window, or lower -k to {max(window - 1, 0)}"
            )
        with self._making:
            if config not in self._engines:
                target = self.target if k else self.plain_target
                drafter = self._drafter(config.draft_sampling) if k else None
                engine = Engine(target, drafter, config, self.stop_token_ids)
                _refuse_too_large(engine)
                self._engines[config] = engine
            return self._engines[config]

    def _drafter(self, sampled: bool) -> Drafter:
        if self.drafter is None:
            raise InputError("this pair has no drafter to speculate with; load one, or decode with K = 0")
        if not sampled:
            return self.drafter
        if not hasattr(self.drafter, "deterministic"):
            raise InputError(
                "the drafts of this drafter have no probabilities to be sampled from; leave out --draft-sampling"
            )
        stochastic: Drafter = self.drafter.replace(deterministic=False)  # type: ignore[attr-defined]
        return stochastic


def _refuse_too_large(engine: Engine) -> None:
    """Raise InputError, before anything is allocated, for an engine that takes more memory than there is."""
    slots, capacity = engine.config.slots, engine.config.capacity
    state, lane, logits = engine.memory_bytes()

    def hint() -> str:
        each = (state + logits) // slots
        if slots == 1:
            return "lower --context or -n"
        fit = max(0, available_memory_bytes() - lane) // each
        found = f"{fit} slots fit" if fit > 1 else "1 slot fits" if fit else "not even one fits"
        return (
            f"each slot reserves its full context, {size_in_words(each)}, and {found}: lower --context, -n or --slots"
        )

    what = f"the caches of {capacity} positions" + (f" in {slots} slots" if slots > 1 else "")
    refuse_too_large({what: state, "the prefill lane": lane, "a step's logits": logits}, hint)


class Stream(Iterator[str]):
    """Pieces of text, none of which ends inside a character. Without a tokenizer, token ids with spaces between.

    `result` is what became of the request: whole when the stream has ended, what there is so far before. A stream that
    is closed, or that nobody refers to any more, ends its request and frees the slot.
    """

    def __init__(self, pair: Pair, engine: Engine, request: Request) -> None:
        self._pair, self._engine = pair, engine
        self._assembler = Assembler(request, engine.config.num_speculative_tokens, pair.tokenizer, time.perf_counter())
        self._handle: Handle | None = None
        self._closed = False
        self._pieces = self._run(request)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the request. Never waits; any thread may call it, also while another one waits for the next piece."""
        self._closed = True  # before the handle is looked at: `_run` does both the other way round
        if self._handle is not None:
            self._engine.abort(self._handle)
        with contextlib.suppress(ValueError):  # another thread is in it, and leaves by itself
            self._pieces.close()

    @property
    def result(self) -> Result:
        return self._assembler.result()

    def _run(self, request: Request) -> Generator[str]:
        self._engine.warm_up(sampled=not request.sampling.greedy, full=request.full)
        asked = ask(self._engine, [request], self._pair.tokenizer)
        ((self._handle, self._assembler),) = asked.items()
        if self._closed:
            self._engine.abort(self._handle)
        try:
            with contextlib.closing(follow(self._engine, asked)) as pieces:
                for _, piece in pieces:
                    shown = show_ids(piece.token_ids) if self._pair.tokenizer is None else piece.text
                    if shown:
                        yield shown
        finally:
            self._assembler.close()


class AsyncStream(AsyncIterator[str]):
    """The pieces of a stream for `async for`. A thread waits for the next one, so the event loop goes on.

    If the iteration is cancelled, or left by `async with`, the request ends and its slot is free.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def __anext__(self) -> str:
        try:
            piece = await asyncio.to_thread(next, self._stream, None)
        except asyncio.CancelledError:
            self._stream.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        self._stream.close()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def result(self) -> Result:
        """What became of the request, as `Stream.result`."""
        return self._stream.result


def show_ids(token_ids: Sequence[int]) -> str:
    """Ids as they are shown where there is no tokenizer."""
    return "".join(f"{token} " for token in token_ids)
