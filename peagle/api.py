"""The Python interface: `peagle.load` returns a `Pair`, a target with its drafter.

    import peagle

    pair = peagle.load()  # the demo models; or peagle.load("DIR", "DIR"), peagle.load("DIR", "ngram")
    stream = pair.stream("def mean(values): ...", max_new_tokens=128)
    for text in stream:
        print(text, end="", flush=True)
    print(stream.result.acceptance_length, stream.result.tok_per_s)

A pair compiles its programs at first use and keeps them. Reported times exclude compilation.
"""

import asyncio
import bisect
import contextlib
import dataclasses
import threading
import time
import warnings
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from peagle.config import AUTO, DEFAULT_CHUNK, EngineConfig, NumDrafts, SamplingParams, configs_of
from peagle.engine.engine import Engine
from peagle.engine.executor import Executor
from peagle.engine.grammar import CompiledGrammar, Grammar, GrammarError, Vocabulary, inlined
from peagle.engine.handle import Handle
from peagle.engine.handoff import Fingerprints
from peagle.engine.kv_memory import KVMemory
from peagle.engine.loop import AnyEngine
from peagle.engine.remote import Lead
from peagle.engine.replicas import Replicas
from peagle.engine.request import Request, check_logprobs, check_stop_strings
from peagle.engine.resolved import MOST_RESERVED, ResolvedConfig
from peagle.engine.widths import WidthTable
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.memory import available_memory_bytes, refuse_too_large, size_in_words
from peagle.protocols import Drafter, OverDevices, Target
from peagle.result import Assembler, Result, follow, refuse_stop_strings_without, submit
from peagle.text.channels import answer_begun, answer_rules, has_channels
from peagle.text.prompts import Conversation, Rendering, from_ids, from_text
from peagle.text.tokenizer import Tokenizer

DEFAULT_NUM_SPECULATIVE_TOKENS = 7
DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_SAMPLING = SamplingParams()
DEFAULT_WIDTHS = WidthTable({1: 3, 2: 2, 4: 1})  # of a drafter without a table
FORMER_NAMES = {"kv_memory_bytes": "kv_memory", "prefix_cache_bytes": "prefix_cache"}  # of options of `stream`
DRAFT_SAMPLING = "draft sampling has no effect: requests with a temperature always draw their drafts"
CAPACITY_STEP = 128  # contexts are multiples of this, so that few shapes are compiled
KEPT_FRAC = 0.1  # of the free memory that the prefix cache takes, at most
KEPT_TIMES = 4  # the memory of the requests themselves that it takes, at most
LEAST_KEPT_BYTES = 1 << 26  # that it takes for the smallest models, if there is as much
PAGES_FRAC = 0.8  # of the free memory that one request takes by the default context; programs and prefixes take some


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What one answer may be.

    grammar: what the answer must be, or its final message in a template with channels. stop: the answer ends before the
    first of these strings. logprobs: how many of the likeliest tokens `Result.logprobs` names with each emitted one.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; expected 1 or more", "max_new_tokens")
        check_stop_strings(self.stop)
        check_logprobs(self.logprobs)


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, ready to run.

    Made by `load`, or from any objects that follow peagle.protocols.
    """

    target: Target  # with the aux_hidden that the drafter reads
    plain_target: Target  # the same without aux_hidden, for plain decoding
    drafter: Drafter | None  # None: plain decoding only
    tokenizer: Tokenizer | None  # None: token ids only
    stop_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    experts: str | None = None  # the layout of the target's experts
    kernels: str | None = None  # compiled CPU kernels, or XLA and the reason
    mesh: str | None = None  # of a target that is cut over several devices: how many of them, and how
    aux_layers: str | None = None  # which hidden states the drafter reads, and the source of their numbers
    draft_vocab: str | None = None  # of a narrowed draft vocabulary, its size and source
    drafter_window: str | None = None  # positions that the drafter's attention sees, and the source of that number
    retain_full_kv: bool = False  # layers with a window keep all positions
    widths: WidthTable = DEFAULT_WIDTHS  # drafts of "auto", by active rows
    steps_per_dispatch: int = 1  # of both engines, so that their ratio is fair
    prefill_chunk: int = DEFAULT_CHUNK  # prompt tokens of one pass
    fingerprints: Fingerprints = Fingerprints()  # noqa: RUF009  # frozen; of the models, for hand-offs
    programs_by_width: bool = False  # peagle.engine.engine.ResolvedConfig; default: passes skip inactive rows
    lead: Lead | None = None  # of a target over several processes: what it sends to the others
    replicas: tuple["Pair", ...] = ()  # the same models on other devices, with which an engine's slots are shared
    _engines: dict[ResolvedConfig, AnyEngine] = field(default_factory=dict, repr=False, compare=False)
    _making: Any = field(default_factory=threading.Lock, repr=False, compare=False)  # held while an engine is made
    _vocabulary: list[Vocabulary] = field(default_factory=list, repr=False, compare=False)  # one, once it is needed
    _free: list[int] = field(default_factory=list, repr=False, compare=False)  # memory, before the first engine

    @property
    def max_positions(self) -> int:
        """Positions of prompt and output together, at most."""
        return self.target.max_positions

    def stream(self, prompt: str | Sequence[int], **options: Any) -> "Stream":
        """Stream the answer to a prompt piece by piece; `stream.result` has the figures.

        options: fields of SamplingParams, EngineConfig, Rendering and RequestOptions. A text is put into the chat
        template, unless `raw`. Special tokens spelled in a text are characters, unless `raw` and `special_tokens`.
        Token ids are used unchanged. num_speculative_tokens is K, 0 for plain decoding, or "auto": by the pair's table,
        with pauses if drafting does not pay. None is the pair's default (`num_drafts`). The answer ends before the
        first of the strings in `stop`. Raises InputError, before any work, for a request that cannot be run, and at the
        end for a grammar that cannot be followed any further.

        Streams whose engines have equal configs share an engine, which decodes `slots` requests at once; the others
        wait for a slot. context: by default as many positions as prompt and max_new_tokens need, which may differ
        between streams. Iterate over each stream in its own thread, or over `astream`. draft_sampling, an option of
        earlier versions, has no effect.
        """
        said = {FORMER_NAMES.get(name, name): value for name, value in options.items()}
        if said.pop("draft_sampling", False):
            warnings.warn(DRAFT_SAMPLING, InputWarning, stacklevel=2)
        if isinstance(said.get("logit_bias"), Mapping):
            said["logit_bias"] = tuple(said["logit_bias"].items())
        if "stop" in said:
            said["stop"] = (said["stop"],) if isinstance(said["stop"], str) else tuple(said["stop"])
        sampling, engine, rendering, about = configs_of(
            {name: value for name, value in said.items() if name != "logit_bias" or value is not None},
            SamplingParams,
            EngineConfig,
            Rendering,
            RequestOptions,
        )
        conversation = from_text(prompt) if isinstance(prompt, str) else from_ids(prompt)
        request = self.request(conversation, (), rendering, **vars(about), sampling=sampling, context=engine.context)
        context = self.capacity([request]) if engine.context is None else engine.context
        kept = "on" if engine.prefix_cache is None else engine.prefix_cache
        config = self.resolve(engine, context=context, prefix_cache=kept)
        return Stream(self, self.engine(config), request)

    def astream(self, prompt: str | Sequence[int], **options: Any) -> "AsyncStream":
        """Stream for `async for`, without blocking the event loop; options are those of `stream`."""
        return AsyncStream(self.stream(prompt, **options))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Result:
        """Return the whole answer; options are those of `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def num_drafts(self, k: NumDrafts) -> tuple[int, bool]:
        """Resolve K to (the most drafts of a step, whether rows pause if drafting does not pay).

        "auto" drafts by the pair's table of widths and pauses. None is the default: plain decoding without a drafter,
        auto on CPU, elsewhere the table's largest K without pauses.
        """
        if k is None and self.drafter is None:
            return 0, False
        if k is None or k == AUTO:
            return self.widths.most, k == AUTO or jax.default_backend() == "cpu"
        return k, False

    def engine_config(self, num_speculative_tokens: NumDrafts, **options: Any) -> ResolvedConfig:
        """Make the config of an engine. options: fields of ResolvedConfig (`resolve`)."""
        return self.resolve(EngineConfig(num_speculative_tokens), **options)

    def resolve(self, said: EngineConfig, **options: Any) -> ResolvedConfig:
        """Decide what a config leaves open. options: fields of ResolvedConfig, instead of those said.

        K None or "auto": `num_drafts`. context None: `default_context`. prefill_chunk None: the pair's. prefix_cache
        "on": up to a tenth of the free memory; with kv_memory none beside it, so that prefixes stay until requests need
        it; None: off. One rate of synthetic acceptance: its powers.
        """
        values = {**vars(said), **options}
        k, adaptive = self.num_drafts(values["num_speculative_tokens"])
        adaptive = values.pop("adaptive", adaptive)
        context, chunk, kept = values["context"], values["prefill_chunk"], values["prefix_cache"]
        if context is None:
            context = self.default_context(k, values["slots"], values["kv_memory"])
        rates = values["synthetic_acceptance"]
        if rates is not None and len(rates) == 1:
            rates = tuple(rates[0] ** (i + 1) for i in range(k))
        values |= {
            "num_speculative_tokens": k,
            "context": context,
            "prefill_chunk": min(self.prefill_chunk if chunk is None else chunk, max(context, 1)),
            "prefix_cache": kept if isinstance(kept, int) else 0,
            "synthetic_acceptance": rates,
            "steps_per_dispatch": self.steps_per_dispatch,
            "widths": self.widths if adaptive else None,
            "adaptive": adaptive,
            "programs_by_width": self.programs_by_width,
        }
        (config,) = configs_of(values, ResolvedConfig)
        resolved: ResolvedConfig = config
        return dataclasses.replace(resolved, prefix_cache=self._kept_bytes(resolved)) if kept == "on" else resolved

    def _kept_bytes(self, config: ResolvedConfig) -> int:
        """Return the bytes of the prefix cache that is on, of an engine that is of this config otherwise."""
        if config.kv_memory is not None:
            return 1  # no page more: known tokens lie in what requests leave
        own = self._page_bytes(config)
        if not own:  # a target that keeps nothing
            return 1
        return max(1, min(int(KEPT_FRAC * self._free_bytes()), max(KEPT_TIMES * own, LEAST_KEPT_BYTES)))

    def _page_bytes(self, config: ResolvedConfig) -> int:
        """Compute the bytes of pages that engines of this config take. Raises InputError as `KVMemory` does."""
        count, models = 1 + len(self.replicas), self.models(config.num_speculative_tokens > 0)
        together = count if jax.default_backend() == "cpu" else 1
        return together * KVMemory(*models, config.share(count)).num_local_bytes

    def _free_bytes(self) -> int:
        """Measure the free memory once, so that equal arguments make equal engines."""
        with self._making:
            if not self._free:
                self._free.append(available_memory_bytes())
        return self._free[0]

    def default_context(
        self, num_speculative_tokens: int, slots: int = 1, kv_memory_bytes: int | None = None, num_engines: int = 1
    ) -> int:
        """Return the positions of the target, or as many of them as the memory holds for one request.

        kv_memory_bytes: of each engine; None: most of the free memory, which num_engines share; on a CPU, memory of
        MOST_RESERVED positions for each slot, which one request may have alone.
        """
        most = self.max_positions
        if kv_memory_bytes is None and jax.default_backend() == "cpu":
            most = min(most, slots * MOST_RESERVED)

        def fits(context: int) -> bool:
            config = self.engine_config(num_speculative_tokens, slots=slots, context=context, kv_memory=kv_memory_bytes)
            self._refuse_beyond_free(config)
            try:
                size = self._page_bytes(config)
            except InputError:  # it does not hold one request
                return False
            return kv_memory_bytes is not None or num_engines * size <= PAGES_FRAC * self._free_bytes()

        steps = range(1, max(1, most // CAPACITY_STEP) + 1)
        if fits(most):
            return most
        num_fit = bisect.bisect_left(steps, True, key=lambda step: not fits(step * CAPACITY_STEP))
        return min(most, max(1, num_fit) * CAPACITY_STEP)

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
        grammar: Grammar | None = None,
    ) -> Request:
        """Make the request for the turn after these answers; cut its budget to the positions left.

        Raises InputError for a prompt that is empty, holds ids outside the vocabulary, or fills the positions, for
        stop strings or a grammar without a tokenizer, and for a grammar that cannot be used.
        """
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}; expected 1 or more")
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
        compiled = None
        if grammar is not None:
            compiled = self.begin_grammar(self.compile_grammar(grammar, channels=not rendering.raw), prompt_ids)
        request = Request(
            tuple(prompt_ids), budget, sampling, stops, index, conversation.name, logprobs, stop, grammar=compiled
        )
        request.check_vocabulary(self.target.vocab_size)
        return request

    def compile_grammar(
        self,
        grammar: Grammar | None,
        *,
        channels: bool,
        calls: Mapping[str, Grammar | None] | None = None,
        must_call: bool = False,
    ) -> CompiledGrammar:
        """Compile a grammar for the target's vocabulary. Any thread may; equal grammars are compiled once.

        channels: the grammar is that of the final message, in a vocabulary that has channels (peagle.text.channels);
        None: any text, with preambles. calls: functions that the answer may call instead, by name, with the JSON
        schemas of their arguments; None: any text. must_call: it must call one. Raises GrammarError for such schemas
        in a vocabulary without channels.
        """
        vocabulary, tokenizer = self.vocabulary(), self.tokenizer
        assert tokenizer is not None
        final = Grammar.any_text() if grammar is None else grammar
        if channels and has_channels(tokenizer):
            written = {name: None if schema is None else inlined(schema) for name, schema in (calls or {}).items()}
            rules = answer_rules(tokenizer, written, final=not must_call, preambles=grammar is None)
            return vocabulary.compile(final, rules)
        if any((calls or {}).values()):
            raise GrammarError("the model's vocabulary has no channels, so no call can be told from an answer")
        return vocabulary.compile(final)

    def vocabulary(self) -> Vocabulary:
        """Return the target's tokens as grammars need them. Any thread may; they are read once, which takes a while.

        Raises InputError without a tokenizer.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InputError(
                "a grammar is about text, but the target's directory has no tokenizer.json; leave it out, or add the "
                "file"
            )
        with self._making:
            if not self._vocabulary:
                special = tokenizer.special_tokens
                tokens = [tokenizer.token_bytes(token) for token in range(self.target.vocab_size)]
                control = [token for token in special if token < len(tokens)]
                self._vocabulary.append(Vocabulary(tokens, control))
        return self._vocabulary[0]

    def begin_grammar(self, compiled: CompiledGrammar, prompt_ids: Sequence[int]) -> CompiledGrammar:
        """Begin a grammar that was compiled with channels at the end of a prompt.

        A prompt without a message has no channels: all of its answer is the grammar's.
        """
        if not compiled.around:
            return compiled
        assert self.tokenizer is not None
        begun = answer_begun(self.tokenizer, prompt_ids)
        return compiled.after(begun) if begun else self._vocabulary[0].compile(compiled.grammar)

    def room(self, context: int | None) -> int:
        """Return the most positions of a prompt with its output: `context`, or all of the target's."""
        if context is None:
            return self.max_positions
        if not 2 <= context <= self.max_positions:
            raise InputError(
                f"context is {context}; expected 2..{self.max_positions}, the positions of the target", "context"
            )
        return context

    def capacity(self, requests: Sequence[Request], at_least: int = 0) -> int:
        """Round the longest prompt with its budget up to a multiple of 128, at most all positions."""
        longest = max((len(request.prompt_ids) + request.max_new_tokens for request in requests), default=2)
        rounded = -(-max(longest, at_least) // CAPACITY_STEP) * CAPACITY_STEP
        return min(rounded, self.max_positions)

    def engine(self, config: ResolvedConfig) -> AnyEngine:
        """Return the engine of this shape; equal configs share one. K = 0 decodes plainly.

        A pair with replicas has an engine on the devices of each, which share the slots (peagle.engine.replicas).

        Raises InputError for a K that exceeds the positions or the drafter's window, for K > 0 without a drafter, for
        draft sampling from a drafter without probabilities, for caches that take more memory than there is, for slots
        that replicas cannot share, and for a role over several processes.
        """
        k = config.num_speculative_tokens
        if k > self.max_positions - 2:
            raise InputError(
                f"K is {k}; expected at most {max(self.max_positions - 2, 0)}, since a step takes K + 1 positions "
                f"after the prompt and the target has {self.max_positions}"
            )
        window = getattr(self.drafter, "window", None) if k else None
        if window is not None and window < k + 1:
            raise InputError(
                f"the drafter's window is {window} positions; expected {k + 1} or more at K = {k}, since a step's rows "
                f"must see the token they follow: raise --drafter-window, or lower -k to {max(window - 1, 0)}"
            )
        if self.lead is not None and config.role != "both":
            raise InputError(f"a target over several processes cannot only {config.role}; leave the role out")
        with self._making:
            if config not in self._engines:
                self._warn_beyond_training(config)
                self._refuse_beyond_free(config)
                pairs = (self, *self.replicas)
                shape = config.share(len(pairs))
                models = [pair.models(k > 0) for pair in pairs]
                make = Executor if self.lead is None else self.lead.executor
                engines = [Engine(*each, shape, self.stop_token_ids, self.fingerprints, make) for each in models]
                engine = Replicas(engines, config) if self.replicas else engines[0]
                _refuse_too_large(engine)
                self._engines[config] = engine
            return self._engines[config]

    def _refuse_beyond_free(self, config: ResolvedConfig) -> None:
        """Raise InputError, before pages are counted, for sizes of memory that exceed what is free."""
        ranks = self.target.ranks if isinstance(self.target, OverDevices) else 1
        devices = 1 if jax.default_backend() == "cpu" else ranks * (1 + len(self.replicas))
        available = devices * available_memory_bytes()
        for name, size, option, instead in (
            ("keys and values", config.kv_memory or 0, "--kv-memory", "auto"),
            ("the prefix cache", config.prefix_cache, "--prefix-cache", "off"),
        ):
            if size > available:
                raise InputError(
                    f"{name} may take {size_in_words(size)}, but {size_in_words(available)} are available; give a "
                    f"smaller {option}, or {instead}"
                )

    def models(self, drafts: bool) -> tuple[Target, Drafter | None]:
        """Return the models of an engine. drafts: it speculates."""
        if not drafts:
            return self.plain_target, None
        if self.drafter is None:
            raise InputError("this pair has no drafter to speculate with; load one, or decode with K = 0")
        return self.target, self.drafter

    def _warn_beyond_training(self, config: ResolvedConfig) -> None:
        """Warn, once, if a drafter that sees all positions may see more than it was trained on."""
        trained = getattr(self.drafter, "trained_positions", None)

        def beyond(each: ResolvedConfig) -> bool:
            return trained is not None and each.num_speculative_tokens > 0 and each.context > trained

        if beyond(config) and not any(map(beyond, self._engines)):
            warnings.warn(
                f"the context has {config.context} positions, but the drafter's config.json says {trained}: after "
                "these its drafts may be accepted less; --drafter-window N limits how far its attention reaches",
                InputWarning,
                stacklevel=3,
            )


def _refuse_too_large(engine: AnyEngine) -> None:
    """Raise InputError, before allocation, for an engine that takes more memory than there is.

    Replicas on devices of their own each have a part of the slots.
    """
    shape = engine.config if jax.default_backend() == "cpu" else engine.one.config
    slots, kept, limit = shape.slots, shape.prefix_cache, shape.kv_memory
    tokens = (engine if jax.default_backend() == "cpu" else engine.one).page_use.num_tokens
    pages, state, logits = engine.memory_bytes()
    available = available_memory_bytes()

    def hint() -> str:
        if limit is not None:
            return "lower --kv-memory, --prefix-cache or --slots"
        if slots == 1:
            return "lower --context or -n"
        each = (pages - kept + state + logits) // slots
        fit = max(0, available - kept) // max(each, 1)
        found = f"{fit} slots fit" if fit > 1 else "1 slot fits" if fit else "not even one fits"
        return f"each slot takes {size_in_words(each)}, and {found}: lower --context, -n or --slots"

    caches = f"the keys and values of {tokens:,} positions" + (f" for {slots} slots" if slots > 1 else "")
    refuse_too_large({caches: pages, "the state of the slots": state, "a step's logits": logits}, hint)


class Stream(Iterator[str]):
    """Pieces of text; none ends inside a character.

    Without a tokenizer, token ids separated by spaces.

    `result` holds the tokens and figures so far. Closing the stream, or dropping the last reference to it, ends its
    request and frees the slot.
    """

    def __init__(self, pair: Pair, engine: AnyEngine, request: Request) -> None:
        self._pair, self._engine = pair, engine
        self._assembler = Assembler(request, engine.config.num_speculative_tokens, pair.tokenizer, time.perf_counter())
        self._handle: Handle | None = None
        self._closed = False
        self._pieces = self._run(request)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the request.

        Never waits; any thread may call it, even while another waits for a piece.
        """
        self._closed = True  # before the handle is read: `_run` does the two in the other order
        if self._handle is not None:
            self._engine.abort(self._handle)
        with contextlib.suppress(ValueError):  # another thread is running the generator and will end it
            self._pieces.close()

    @property
    def result(self) -> Result:
        return self._assembler.result()

    def _run(self, request: Request) -> Generator[str]:
        self._engine.warm_up(
            sampled=not request.sampling.greedy, full=request.full, constrained=request.grammar is not None
        )
        assemblers = submit(self._engine, [request], self._pair.tokenizer)
        ((self._handle, self._assembler),) = assemblers.items()
        if self._closed:
            self._engine.abort(self._handle)
        try:
            with contextlib.closing(follow(self._engine, assemblers)) as pieces:
                for _, piece in pieces:
                    shown = show_ids(piece.token_ids) if self._pair.tokenizer is None else piece.text
                    if shown:
                        yield shown
        finally:
            self._assembler.close()
        if (error := self.result.error) is not None:
            raise GrammarError(error)


class AsyncStream(AsyncIterator[str]):
    """The pieces of a stream for `async for`.

    A thread waits for the next one, so the event loop runs on.

    Cancelling the iteration, or leaving `async with`, ends the request and frees its slot.
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
        """See `Stream.result`."""
        return self._stream.result


def show_ids(token_ids: Sequence[int]) -> str:
    """Format token ids for display without a tokenizer."""
    return "".join(f"{token} " for token in token_ids)
