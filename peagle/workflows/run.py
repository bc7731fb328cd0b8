"""Answer conversations, and compare with plain decoding of the same prompts.

With one slot, requests are decoded one by one, with speculation and (for a baseline) plainly, in alternating order, so
that neither has the warmer machine. With several slots, all conversations are in the engine's queue, and a conversation
continues with its next turn after its answer; plain decoding of the same requests follows.
"""

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from peagle.config import EngineConfig, SamplingParams
from peagle.engine.handle import Handle
from peagle.engine.kv_memory import PrefixCacheUse
from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.widths import CostTable
from peagle.measure.logprobs import top_2_margin
from peagle.measure.metrics import first_difference
from peagle.measure.profile import Breakdown, profile
from peagle.ops.errors import InputError
from peagle.ops.sizes import PrefixCacheSize
from peagle.pair import DEFAULT_SAMPLING, Pair, RequestOptions
from peagle.result import Assembler, Piece, Result, decode, follow, submit
from peagle.text.prompts import Conversation, Rendering


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(RequestOptions):
    """How to answer conversations. K = 0: plain decoding, without a baseline.

    engine: context None fits prompts and budgets; prefix_cache None is on for several requests.
    """

    sampling: SamplingParams = DEFAULT_SAMPLING
    engine: EngineConfig = EngineConfig()  # noqa: RUF009  # frozen
    baseline: bool = True
    show_drafts: bool = False  # tell the observer which tokens were accepted drafts
    profile: Path | None = None  # the directory for a trace of some of the steps (peagle.measure.profile)
    rendering: Rendering = Rendering()  # noqa: RUF009  # frozen


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first output token that differs between speculation and plain decoding.

    A margin near zero comes from the arithmetic of passes of different width; a large one is an error.
    """

    index: int
    margin: float  # of the target's two highest logits there


@dataclasses.dataclass
class Outcome:
    """The result of one request, and of its baseline."""

    result: Result
    turn: int | None  # from 0; None if the request is no turn of a conversation
    baseline: Result | None = None
    first_divergence: Divergence | None = None


@dataclasses.dataclass
class Run:
    """Outcomes of all requests that have a token, in the order of the input.

    cut_short: a line for every conversation whose answers left no room for a later turn; outcomes from that turn on are
    missing. failed: a line for every conversation that ended because no token satisfied its grammar.
    """

    outcomes: list[Outcome]
    capacity: int
    compile_s: float = 0.0
    host_gap_frac: float | None = None  # share of the time in which the device was idle (LoopTimes of the engine)
    costs: CostTable | None = None  # of an adaptive run: its times of steps
    engine: ResolvedConfig = ResolvedConfig()  # noqa: RUF009  # of the engine that speculates
    compares: bool = False  # with plain decoding
    prefix_cache: PrefixCacheUse | None = None  # of the engine that speculates, since it was made
    profile: Breakdown | None = None
    profile_failed: str | None = None  # the reason
    interrupted: bool = False
    cut_short: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def drafting_cannot_pay(self) -> bool:
        """Test whether no draft of one request could pay, even if all are accepted."""
        return self.costs is not None and not self.costs.pays(1, self.engine.num_speculative_tokens)


class Observer:
    """Callbacks of a run, which do nothing: override those you need."""

    def compiling(self) -> None:
        """Called before programs may be compiled."""

    def measuring(self, done: int, total: int) -> None:
        """Called before each run that measures the cost of drafting; `done` of `total` are over."""

    def decoding(self, done: int, total: int, plainly: bool) -> None:
        """Called before requests are decoded; `done` of `total` are finished."""

    def compared(self, done: int, total: int) -> None:
        """Called while requests are decoded plainly; `done` tokens of at most `total` are there."""

    def profiling(self) -> None:
        """Called after all decoding, before some steps run once more under the profiler."""

    def started(self, request: Request, turn: int | None) -> None:
        """Called before a request is decoded for display; not for baselines."""

    def emitted(
        self, request: Request, token_ids: Sequence[int], text: str, parts: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Called with new tokens of such a request, and the text that is certain with them."""

    def finished(self, result: Result) -> None:
        """Called after the last token of such a request."""


def run(pair: Pair, conversations: Sequence[Conversation], config: RunConfig, observer: Observer | None = None) -> Run:
    """Answer the conversations.

    Ctrl-C ends the run early: it returns the outcomes so far, `interrupted`.

    Raises InputError, before anything is decoded, for a conversation that cannot be run.
    """
    return _Session(pair, conversations, config, observer or Observer()).run()


class _Session:
    def __init__(
        self, pair: Pair, conversations: Sequence[Conversation], config: RunConfig, observer: Observer
    ) -> None:
        self.pair, self.conversations, self.config, self.observer = pair, conversations, config, observer
        self.num_speculative_tokens, self.adaptive = pair.num_drafts(config.engine.num_speculative_tokens)
        self.compares = config.baseline and self.num_speculative_tokens > 0
        replicas = 1 + len(pair.replicas)
        self.slots = min(config.engine.slots, -(-len(conversations) // replicas) * replicas)
        counts = [conversation.num_requests for conversation in conversations]
        self.first_index = [sum(counts[:number]) for number in range(len(counts))]
        self.total = sum(counts)
        self.done = 0
        default: PrefixCacheSize = "on" if self.total > 1 else "off"
        self.prefix_cache = default if config.engine.prefix_cache is None else config.engine.prefix_cache
        self.outcomes: dict[int, Outcome] = {}
        self.waiting: list[tuple[Request, int | None]] = []
        self.cut_short: dict[int, str] = {}  # by the conversation's number
        self.failed: dict[int, str] = {}  # likewise
        self.compile_s = 0.0
        needed = pair.capacity([self._widest(number) for number in range(len(conversations))])
        self.capacity = needed if config.engine.context is None else config.engine.context

    def run(self) -> Run:
        interrupted, profiled, failed, used = False, None, None, None
        try:
            for number, together in enumerate(self._rounds()):
                self._decode_round(number, together)
            used = self._engine(self.num_speculative_tokens).prefix_cache_use
            if self.config.profile is not None:
                try:
                    profiled = self._profile(self.config.profile)
                except (InputError, OSError, RuntimeError) as error:  # keep the answers
                    failed = str(error).partition("\n")[0]
        except KeyboardInterrupt:
            interrupted = True
        return Run(
            outcomes=[self.outcomes[index] for index in sorted(self.outcomes)],
            capacity=self.capacity,
            compile_s=self.compile_s,
            host_gap_frac=self._engine(self.num_speculative_tokens).times.gap_frac,
            costs=self._engine(self.num_speculative_tokens).costs,
            engine=self._engine(self.num_speculative_tokens).config,
            compares=self.compares,
            prefix_cache=used,
            profile=profiled,
            profile_failed=failed,
            interrupted=interrupted,
            cut_short=tuple(self.cut_short.values()),
            failed=tuple(self.failed.values()),
        )

    def _profile(self, directory: Path) -> Breakdown:
        self.observer.profiling()
        requests = [self.outcomes[index].result.request for index in sorted(self.outcomes)]
        return profile(self._engine(self.num_speculative_tokens), requests, directory)

    def _rounds(self) -> Iterator[list[tuple[Request, int | None]]]:
        """Yield the requests that are decoded together, with their turn numbers.

        Requests that need more room than the engine has are put into `waiting` and begin the next round.
        """
        numbers = range(len(self.conversations))
        if self.slots == 1:
            for number in numbers:
                for turn in range(self.conversations[number].num_requests):
                    if (turned := self._request(number, turn)) is not None:
                        yield [turned]
            return
        self.waiting = [first for number in numbers if (first := self._request(number, 0)) is not None]
        while self.waiting:
            together, self.waiting = self.waiting, []
            yield together

    def _next(self, index: int) -> tuple[Request, int | None] | None:
        """Make the request of the next turn; None with one slot, since the baseline comes first."""
        if self.slots == 1:
            return None
        number = self._number(index)
        following = self._request(number, index - self.first_index[number] + 1)
        if following is not None and len(following[0].prompt_ids) + following[0].max_new_tokens > self.capacity:
            self.waiting.append(following)
            return None
        return following

    def _number(self, index: int) -> int:
        """Return the number of the conversation that a request belongs to."""
        return bisect.bisect_right(self.first_index, index) - 1

    def _request(self, number: int, turn: int) -> tuple[Request, int | None] | None:
        """Make the request of a turn; None if the conversation has no such turn, or was cut short."""
        conversation, first = self.conversations[number], self.first_index[number]
        if turn >= conversation.num_requests or number in self.cut_short or number in self.failed:
            return None
        answers = [self.outcomes[first + earlier].result.text or "" for earlier in range(turn)]
        try:
            request = self._make(conversation, answers, first + turn)
        except InputError as error:
            if turn == 0:
                raise
            self.cut_short[number] = f"turn {turn + 1} of {conversation.num_requests} was not run: {error}"
            return None
        return request, turn if conversation.numbered else None

    def _widest(self, number: int) -> Request:
        """Make a request of the conversation's greatest length. Raises InputError as `Pair.request`."""
        conversation, budget = self.conversations[number], self.config.max_new_tokens
        first = self._make(conversation, [], self.first_index[number])
        turns = conversation.num_requests
        if turns == 1:
            return first
        # unknown answers take their budget and a few tokens more: their text may be tokenised differently
        last = self._make(conversation, [" "] * (turns - 1), 0)
        width = min(len(last.prompt_ids) + turns * budget, self.pair.room(self.config.engine.context))
        return dataclasses.replace(last, max_new_tokens=max(width - len(last.prompt_ids), 1))

    def _make(self, conversation: Conversation, answers: Sequence[str], index: int) -> Request:
        config = self.config
        return self.pair.request(
            conversation,
            answers,
            config.rendering,
            max_new_tokens=config.max_new_tokens,
            sampling=config.sampling,
            ignore_eos=config.ignore_eos,
            stop=config.stop,
            logprobs=config.logprobs,
            index=index,
            context=config.engine.context,
            grammar=config.grammar,
        )

    def _all_engines(self) -> list[AnyEngine]:
        kinds = [self.num_speculative_tokens] + ([0] if self.compares else [])
        return [self._engine(kind) for kind in kinds]

    def _engine(self, num_speculative_tokens: int) -> AnyEngine:
        config = self.config.engine
        if not num_speculative_tokens:  # the baseline
            config = dataclasses.replace(config, synthetic_acceptance=None)
        resolved = self.pair.resolve(
            config,
            num_speculative_tokens=num_speculative_tokens,
            adaptive=self.adaptive and num_speculative_tokens > 0,
            slots=self.slots,
            context=self.capacity,
            prefix_cache=self.prefix_cache,
        )
        return self.pair.engine(resolved)

    def _decode_round(self, number: int, together: list[tuple[Request, int | None]]) -> None:
        requests = [request for request, _ in together]
        if self.config.engine.context is None:
            # in the next prompt an answer's text may be tokenised into more tokens than were emitted
            needed, step = (
                self.pair.capacity(requests),
                1 if self.config.engine.blocked is None else self.config.engine.blocked.step,
            )
            if needed > self.capacity:
                self.capacity = -(-needed // step) * step
        for engine in self._all_engines():
            self.observer.compiling()
            before = engine.compile_s
            engine.warm_up(
                not self.config.sampling.greedy,
                self.observer.measuring,
                full_logits=requests[0].full_logits,
                constrained=self.config.grammar is not None,
            )
            self.compile_s += engine.compile_s - before
        fast = self._engine(self.num_speculative_tokens)
        plain_results: list[Result] = []
        plain_first = self.compares and self.slots == 1 and number % 2 == 1
        if plain_first:
            plain_results = self._decode_plainly(requests)
        self.observer.decoding(self.done, self.total, plainly=False)
        decoded = self._decode_shown(fast, together)
        if self.compares and not plain_first:
            plain_results = self._decode_plainly(decoded)
        for plain in plain_results:
            if plain.request.index in self.outcomes:
                self._compare(self.outcomes[plain.request.index], plain)
        self.done += len(decoded)

    def _decode_shown(self, engine: AnyEngine, together: list[tuple[Request, int | None]]) -> list[Request]:
        """Decode requests and the turns that follow them; return all decoded requests.

        Stores their outcomes; after an interruption, those of requests that have a token.
        """
        turns: dict[int, int | None] = {}
        assemblers: dict[Handle, Assembler] = {}

        def start(starting: list[tuple[Request, int | None]]) -> None:
            for request, turn in starting:
                self.observer.started(request, turn)
                turns[request.index] = turn
            requests = [request for request, _ in starting]
            assemblers.update(submit(engine, requests, self.pair.tokenizer, self.config.show_drafts))

        def end(assembler: Assembler) -> None:
            result = assembler.result()
            if result.error is not None:
                self.failed[self._number(result.request.index)] = result.error
            if result.output_ids:
                self.outcomes[result.request.index] = Outcome(result, turns[result.request.index])

        start(together)
        try:
            with contextlib.closing(follow(engine, assemblers)) as pieces:
                for assembler, piece in pieces:
                    self.observer.emitted(assembler.request, piece.token_ids, piece.text, piece.parts)
                    if assembler.finish_reason is not None:
                        end(assembler)
                        if (following := self._next(assembler.request.index)) is not None:
                            start([following])
                        # after `start`, so that a display in order has the next turn
                        self.observer.finished(assembler.result())
        finally:
            engine.settle()
            for assembler in assemblers.values():
                if rest := assembler.close():
                    self.observer.emitted(assembler.request, (), rest)
                end(assembler)
        return [assembler.request for assembler in assemblers.values()]

    def _decode_plainly(self, requests: Sequence[Request]) -> list[Result]:
        self.observer.decoding(self.done, self.total, plainly=True)
        engine, done = self._engine(0), 0
        known = [self.outcomes.get(request.index) for request in requests]
        # after speculation, as many tokens as it gave
        total = sum(
            request.max_new_tokens if outcome is None else len(outcome.result.output_ids)
            for request, outcome in zip(requests, known, strict=True)
        )

        def decoded(piece: Piece) -> None:
            nonlocal done
            done += len(piece.token_ids)
            self.observer.compared(done, total)

        return decode(engine, requests, self.pair.tokenizer, decoded)

    def _compare(self, outcome: Outcome, plain: Result) -> None:
        outcome.baseline = plain
        result = outcome.result
        index = first_difference(result.output_ids, plain.output_ids)
        if index is not None and self.config.engine.synthetic_acceptance is None:
            longer = max(result.output_ids, plain.output_ids, key=len)
            arguments = (result.request.prompt_ids, longer[: index + 1], self.capacity)
            lead, compute = self.pair.lead, functools.partial(top_2_margin, self.pair.plain_target, *arguments)
            margin = compute() if lead is None else lead.together({"margin": arguments}, compute)
            outcome.first_divergence = Divergence(index, margin)
