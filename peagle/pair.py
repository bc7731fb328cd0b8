"""The Python interface: `peagle.load` returns a `Pair`, a target with its drafter.

    import peagle

    pair = peagle.load()  # the demo models; or peagle.load("DIR", "DIR"), peagle.load("DIR", "ngram")
    stream = pair.stream("def mean(values): ...", max_new_tokens=128)
    for text in stream:
        print(text, end="", flush=True)
    print(stream.result.acceptance_length, stream.result.tok_per_s)

A pair compiles its programs at first use and keeps them. Reported times exclude compilation.
"""

import bisect
import dataclasses
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from peagle.answers.grammar_compiler import Grammars
from peagle.answers.result import Result, refuse_stop_strings_without
from peagle.answers.stream import AsyncStream, Stream
from peagle.base.errors import InputError, InputWarning
from peagle.config import (
    DEFAULT_CHUNK,
    DEFAULT_DRAFTS,
    AnswerConfig,
    Drafts,
    EngineConfig,
    NumDrafts,
    SamplingParams,
    check_block,
    configs_of,
)
from peagle.drafters.ngram import NGram
from peagle.engine.devices.free_memory import (
    PAGES_FRAC,
    FreeMemory,
    most_prefix_bytes,
    page_bytes,
    refuse_beyond_free,
    refuse_too_large_engine,
)
from peagle.engine.devices.remote import Coordinator
from peagle.engine.devices.replicas import AnyEngine, Replicas
from peagle.engine.grammar import Grammar
from peagle.engine.host.engine import Engine
from peagle.engine.host.executor import Executor
from peagle.engine.host.handoff import Fingerprints
from peagle.engine.request import Request
from peagle.engine.resolved import MOST_RESERVED, ResolvedConfig
from peagle.protocols import Drafter, Target
from peagle.text.prompts import Conversation, Rendering, from_ids, from_text
from peagle.text.tokenizer import Tokenizer

DEFAULT_SAMPLING = SamplingParams()
CAPACITY_STEP = 128  # contexts are multiples of this, so that few shapes are compiled


@dataclass(frozen=True, kw_only=True)
class RequestOptions(AnswerConfig):
    """Options of one answer. logprobs: how many of the likeliest tokens `Result.logprobs` lists per token.

    grammar: of the whole answer, or of its final message in a template with channels.
    """

    grammar: Grammar | None = None


@dataclass(frozen=True)
class Loaded:
    """How the models of a pair were loaded, as texts for summaries and reports."""

    dtype: str = "float32"
    experts: str | None = None  # layout in memory
    kernels: str | None = None  # the compiled kernels, or XLA and the reason
    mesh: str | None = None  # number of devices and shape of the mesh
    aux_layers: str | None = None  # the aux layers and the source of their ids
    draft_vocab: str | None = None  # size and source of a narrowed draft vocabulary
    drafter_window: str | None = None  # the window of the drafter's attention and its source


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, ready to run: from `load`, or any objects that satisfy peagle.protocols."""

    target: Target  # with the aux_hidden that the drafter reads
    plain_target: Target  # the same without aux_hidden, for plain decoding
    drafter: Drafter | None  # None: plain decoding only
    tokenizer: Tokenizer | None  # None: token ids only
    stop_token_ids: tuple[int, ...] = ()
    loaded: Loaded = Loaded()
    retain_full_kv: bool = False  # windowed layers keep all positions
    auto_drafts: int = DEFAULT_DRAFTS  # of a step of "auto", at most
    trained_drafts: int | None = None  # of a position, in the drafter's training; None: unknown, or any number
    steps_per_dispatch: int = 1  # of plain decoding and of speculation, so that their ratio is fair
    prefill_chunk: int = DEFAULT_CHUNK  # prompt tokens per pass
    fingerprints: Fingerprints = Fingerprints()  # noqa: RUF009  # frozen; of the models, for hand-offs
    coordinator: Coordinator | None = None  # sends to the other processes of a target over several
    replicas: tuple["Pair", ...] = ()  # the same models on other devices, which share the slots of an engine
    # shared with the pairs that `with_drafter` makes of this one
    memory: FreeMemory = field(default_factory=FreeMemory, repr=False, compare=False)
    grammars: Grammars = field(default=None, repr=False, compare=False)  # type: ignore[assignment]  # made below
    engines: dict[ResolvedConfig, AnyEngine] = field(default_factory=dict, init=False, repr=False, compare=False)
    _making: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.grammars is None:
            object.__setattr__(self, "grammars", Grammars(self.tokenizer, self.target.vocab_size))

    def models(self, drafts: bool) -> tuple[Target, Drafter | None]:
        """Return the models of an engine. drafts: it speculates. Raises InputError if it would without a drafter."""
        if not drafts:
            return self.plain_target, None
        if self.drafter is None:
            raise InputError("this pair has no drafter to speculate with; load one, or decode with K = 0")
        return self.target, self.drafter

    @property
    def lookup(self) -> Drafter | None:
        """What adaptive steps use besides a neural drafter: n-grams of the text so far."""
        return NGram(longest=5) if self.drafter is not None and self.drafter.cache_groups else None

    @property
    def max_positions(self) -> int:
        """Most positions of prompt and output together."""
        return self.target.max_positions

    def stream(self, prompt: str | Sequence[int], **options: Any) -> "Stream":
        """Stream the answer to a prompt as pieces of text; `stream.result` has the figures.

        options: fields of SamplingParams, EngineConfig, Rendering and RequestOptions. Some of them:

            num_speculative_tokens   K; 0: plain decoding; "auto": verify only drafts that are likely to save time;
                                     "auto:N": at most N; None: `drafts`
            raw                      use a text as the prompt, without the chat template
            special_tokens           with raw: encode special tokens in a text as tokens, not as plain characters
            stop                     the answer ends before the first of these strings
            context                  positions; default: as many as prompt and max_new_tokens need

        Token ids are used unchanged. Streams with equal engine configs share an engine, which decodes `slots` requests
        at once; the others wait for a slot. Iterate over each stream in its own thread, or over `astream`. Raises
        InputError before any work for a request that cannot be run, and at the end if its grammar failed.
        """
        if options.get("logit_bias", ()) is None:
            del options["logit_bias"]
        elif isinstance(options.get("logit_bias"), Mapping):
            options["logit_bias"] = tuple(options["logit_bias"].items())
        if "stop" in options:
            options["stop"] = (options["stop"],) if isinstance(options["stop"], str) else tuple(options["stop"])
        sampling, engine, rendering, about = configs_of(
            options, SamplingParams, EngineConfig, Rendering, RequestOptions
        )
        conversation = from_text(prompt) if isinstance(prompt, str) else from_ids(prompt)
        request = self.request(conversation, (), rendering, **vars(about), sampling=sampling, context=engine.context)
        context = self.capacity([request]) if engine.context is None else engine.context
        prefix_cache = "on" if engine.prefix_cache is None else engine.prefix_cache
        config = self.resolve(engine, context=context, prefix_cache=prefix_cache)
        return Stream(self.tokenizer, self.engine(config), request)

    def astream(self, prompt: str | Sequence[int], **options: Any) -> "AsyncStream":
        """Stream for `async for`, without blocking the event loop; options are those of `stream`."""
        return AsyncStream(self.stream(prompt, **options))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Result:
        """Return the whole answer; options are those of `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def drafts(self, k: NumDrafts) -> Drafts:
        """Resolve K. None: auto with a drafter, plain decoding without one."""
        if k is None and self.drafter is None:
            return Drafts(0)
        return Drafts.parse(k, default=self.auto_drafts)

    def engine_config(self, num_speculative_tokens: NumDrafts, **options: Any) -> ResolvedConfig:
        """Make the config of an engine. options: fields of ResolvedConfig (`resolve`)."""
        return self.resolve(EngineConfig(num_speculative_tokens), **options)

    def resolve(self, config: EngineConfig, **options: Any) -> ResolvedConfig:
        """Resolve every default of a config. options: fields of ResolvedConfig that replace the config's.

        K None, "auto" or "auto:N": `drafts`. context None: `default_context`. prefill_chunk None: the pair's;
        "all": the context.
        prefix_cache None: off; "on": up to a tenth of the free memory; with kv_memory no extra memory, and prefixes
        stay until requests need theirs. One rate of synthetic acceptance: its powers.
        """
        values = {**vars(config), **options}
        drafts = self.drafts(values["num_speculative_tokens"])
        k, adaptive = drafts.num_drafts, values.pop("adaptive", drafts.adaptive)
        context, chunk, prefix_cache = values["context"], values["prefill_chunk"], values["prefix_cache"]
        if context is None:
            context = self.default_context(k, values["slots"], values["kv_memory"])
        most = max(context, 1)
        rates = values["synthetic_acceptance"]
        if rates is not None and len(rates) == 1:
            rates = tuple(rates[0] ** (i + 1) for i in range(k))
        values |= {
            "num_speculative_tokens": k,
            "context": context,
            "prefill_chunk": most if chunk == "all" else min(self.prefill_chunk if chunk is None else chunk, most),
            "prefix_cache": prefix_cache if isinstance(prefix_cache, int) else 0,
            "synthetic_acceptance": rates,
            "steps_per_dispatch": self.steps_per_dispatch,
            "adaptive": adaptive,
        }
        resolved: ResolvedConfig
        (resolved,) = configs_of(values, ResolvedConfig)
        if prefix_cache != "on":
            return resolved
        if resolved.kv_memory is not None:  # no extra page: cached tokens lie in the pages that requests leave
            return dataclasses.replace(resolved, prefix_cache=1)
        most = most_prefix_bytes(self._page_bytes(resolved), self.memory.num_bytes())
        return dataclasses.replace(resolved, prefix_cache=most)

    def default_context(
        self, num_speculative_tokens: int, slots: int = 1, kv_memory_bytes: int | None = None, num_engines: int = 1
    ) -> int:
        """Return the target's positions, or as many of them as the memory holds for one request.

        kv_memory_bytes: of each engine; None: most of the free memory, which num_engines share. On a CPU this is at
        most MOST_RESERVED positions per slot, and one request may use those of all slots.
        """
        most = self.max_positions
        if kv_memory_bytes is None and jax.default_backend() == "cpu":
            most = min(most, slots * MOST_RESERVED)

        def fits(context: int) -> bool:
            config = self.engine_config(num_speculative_tokens, slots=slots, context=context, kv_memory=kv_memory_bytes)
            refuse_beyond_free(config, self.target, 1 + len(self.replicas))
            try:
                size = self._page_bytes(config)
            except InputError:  # it does not hold one request
                return False
            return kv_memory_bytes is not None or num_engines * size <= PAGES_FRAC * self.memory.num_bytes()

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
        """Make the request for the turn after these answers; limit its tokens to the positions left.

        Raises InputError for a prompt that is empty, holds ids outside the vocabulary, or leaves no position, for stop
        strings or a grammar without a tokenizer, and for an invalid grammar.
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
            compiled = self.grammars.begin(self.grammars.compile(grammar, channels=not rendering.raw), prompt_ids)
        request = Request(
            tuple(prompt_ids), budget, sampling, stops, index, conversation.name, logprobs, stop, grammar=compiled
        )
        request.check_vocabulary(self.target.vocab_size)
        return request

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
        """Return the context of the longest request, rounded up to a multiple of CAPACITY_STEP, within the target's."""
        longest = max((len(request.prompt_ids) + request.max_new_tokens for request in requests), default=2)
        rounded = -(-max(longest, at_least) // CAPACITY_STEP) * CAPACITY_STEP
        return min(rounded, self.max_positions)

    def engine(self, config: EngineConfig) -> AnyEngine:
        """Return the engine of a config; equal configs share one. Any thread may call it.

        Replicas have an engine each. Raises InputError for a K that exceeds the positions or the drafter's window, for
        K > 0 without a drafter, for caches that exceed the memory, for slots that replicas cannot share, and for
        hand-offs over several processes.
        """
        config = config if isinstance(config, ResolvedConfig) else self.resolve(config)
        self._check(config)
        with self._making:
            if config not in self.engines:
                self._warn_beyond_training(config)
                refuse_beyond_free(config, self.target, 1 + len(self.replicas))
                engine = self._make(config)
                refuse_too_large_engine(engine)
                self.engines[config] = engine
            return self.engines[config]

    def _make(self, config: ResolvedConfig) -> AnyEngine:
        pairs = (self, *self.replicas)
        share = config.share(len(pairs))
        make = Executor if self.coordinator is None else self.coordinator.executor
        # synthetic acceptance imitates one drafter
        lookup = self.lookup if config.synthetic_acceptance is None else None
        stops, prints = self.stop_token_ids, self.fingerprints
        engines = [Engine(*pair.models(config.num_drafts > 0), share, stops, prints, make, lookup) for pair in pairs]
        return Replicas(engines, config) if len(engines) > 1 else engines[0]

    def _page_bytes(self, config: ResolvedConfig) -> int:
        return page_bytes(*self.models(config.num_drafts > 0), config, 1 + len(self.replicas))

    def _check(self, config: ResolvedConfig) -> None:
        k, positions = config.num_drafts, self.target.max_positions
        if k > positions - 2:
            raise InputError(
                f"K is {k}; expected at most {max(positions - 2, 0)}, since a step takes K + 1 positions after the "
                f"prompt and the target has {positions}"
            )
        check_block(k, getattr(self.drafter, "block_drafts", None))
        window = getattr(self.drafter, "window", None) if k else None
        if window is not None and window < k + 1:
            raise InputError(
                f"the drafter's window is {window} positions; expected {k + 1} or more at K = {k}, since a step's rows "
                f"must see the token they follow: raise --drafter-window, or drafter_window in speculation.json, or "
                f"lower -k to {max(window - 1, 0)}"
            )
        if self.coordinator is not None and config.prefill_only:
            raise InputError("a target over several processes cannot hand requests over; leave prefill_only out")

    def _warn_beyond_training(self, config: ResolvedConfig) -> None:
        """Warn of more drafts than the drafter was trained for; once, of more positions if it has no window."""
        depth = self.trained_drafts
        if depth is not None and config.num_drafts > depth:
            warnings.warn(
                f"K is {config.num_drafts}, but the drafter was trained for {depth} drafts: later ones are rarely "
                f"accepted; lower -k to {depth}",
                InputWarning,
                stacklevel=3,
            )
        trained = getattr(self.drafter, "trained_positions", None)

        def beyond(config: ResolvedConfig) -> bool:
            return trained is not None and config.num_drafts > 0 and config.context > trained

        if beyond(config) and not any(map(beyond, self.engines)):
            warnings.warn(
                f"the context has {config.context} positions, but the drafter's config.json says {trained}: after "
                "these its drafts may be accepted less; --drafter-window N, or drafter_window in speculation.json, "
                "limits how far its attention reaches",
                InputWarning,
                stacklevel=3,
            )
