"""Answer conversations, and compare with plain decoding of the same requests, the baseline.

With one slot, each request is decoded with speculation and plainly, in alternating order, so that neither has the
warmer machine. With several slots, all conversations are in the engine's queue, and each continues with its next turn
after an answer; then the same requests are decoded plainly.

One pair of times says little about a fast model. So a single request is decoded again in further rounds, while they fit
into `RunConfig.compare_s`: a round decodes it both ways, in alternating order. These rounds then replace the first one,
in which the answer was shown and both ways ran for the first time.
"""

import bisect
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from peagle.answers.result import Assembler, Piece, Result, decode, follow, submit
from peagle.base.errors import InputError
from peagle.config import EngineConfig, NumDrafts, PrefixCacheSize, SamplingParams
from peagle.engine.auto.costs import CostTable
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.host.handle import Handle
from peagle.engine.memory.kv_memory import PrefixCacheUse
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig, beyond_context
from peagle.measure.logprobs import top_2_margin
from peagle.measure.metrics import first_difference
from peagle.pair import DEFAULT_SAMPLING, Pair, RequestOptions
from peagle.text.prompts import Conversation, Rendering

PLAIN = 0  # K of the baseline
MOST_ROUNDS = 10  # even, so that each way comes first as often


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How to answer conversations. K = 0: plain decoding, without a baseline.

    engine: context None is as long as prompts and answers may become; prefix_cache None is on for several requests.
    """

    answer: RequestOptions = RequestOptions()  # noqa: RUF009  # frozen
    sampling: SamplingParams = DEFAULT_SAMPLING
    engine: EngineConfig = EngineConfig()  # noqa: RUF009  # frozen
    baseline: bool = True
    compare_s: float = 0.0  # how long a single request is compared; the first round may take longer
    rendering: Rendering = Rendering()  # noqa: RUF009  # frozen


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first output token that differs between speculation and plain decoding.

    A small margin is a tie that passes of other widths round the other way; a large one is an error.
    """

    index: int
    margin: float  # between the target's two highest logits there


@dataclasses.dataclass(frozen=True)
class Round:
    """A request decoded with speculation and plainly, one right after the other."""

    result: Result
    baseline: Result
    plain_first: bool

    @property
    def speedup(self) -> float | None:
        """Tokens per second, divided by plain decoding's; None if an answer has one token."""
        fast, plain = self.result.tok_per_s, self.baseline.tok_per_s
        return fast / plain if fast and plain else None


@dataclasses.dataclass
class Outcome:
    """The result of a request, and the rounds that compare it with plain decoding: its baseline."""

    result: Result
    turn: int | None  # from 0; None if the request is no turn of a chat
    rounds: tuple[Round, ...] = ()
    first_divergence: Divergence | None = None

    @property
    def baseline(self) -> Result | None:
        return self.rounds[0].baseline if self.rounds else None

    @property
    def median_round(self) -> Round:
        """The round of the median speed-up, the lower one of an even number."""
        return sorted(self.rounds, key=lambda one: one.speedup or 0.0)[(len(self.rounds) - 1) // 2]


@dataclasses.dataclass
class Run:
    """The outcomes of all requests that have a token, in the order of the input.

    cut_short: a line per answer that the context ended before its max_new_tokens, and per conversation whose answers
    left no room for a later turn, which has no outcome. failed: a line per conversation whose grammar failed
    (peagle.engine.grammar.Matcher.failure).
    """

    outcomes: list[Outcome]
    capacity: int
    compile_s: float = 0.0
    host_gap_frac: float | None = None  # share of the time in which the device was idle (LoopTimes of the engine)
    costs: CostTable | None = None  # an adaptive engine's times of steps
    engine: ResolvedConfig = ResolvedConfig()  # noqa: RUF009  # of the engine that speculates
    compares: bool = False  # with plain decoding
    prefix_cache: PrefixCacheUse | None = None  # of the engine that speculates, since it was made
    interrupted: bool = False
    cut_short: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def drafting_cannot_gain(self) -> bool:
        """Whether no draft of a single request saves time, even if all are accepted."""
        return self.costs is not None and not self.costs.can_gain(1, self.engine.num_drafts)


RunStage = Literal["compiling", "measuring", "decoding", "comparing"]


def _ignore(*_: object) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Observer:
    """Callbacks of a run; `started`, `emitted` and `finished` are not called for baselines.

    stage: with (stage, requests that are finished, all requests) when it begins; for "measuring" the counts are runs,
    each of which begins it again. compared: with (tokens decoded plainly, the most). started: before a request is
    decoded, with its turn. emitted: with (request, new tokens, the text that they complete, parts of it as in
    peagle.answers.result.Piece). shows_drafts: it needs the parts.
    """

    stage: Callable[[RunStage, int, int], object] = _ignore
    compared: Callable[[int, int], object] = _ignore
    started: Callable[[Request, int | None], object] = _ignore
    emitted: Callable[[Request, Sequence[int], str, Sequence[tuple[str, int]]], object] = _ignore
    finished: Callable[[Result], object] = _ignore
    shows_drafts: bool = False


def run(pair: Pair, conversations: Sequence[Conversation], config: RunConfig, observer: Observer = Observer()) -> Run:
    """Answer the conversations. Ctrl-C ends the run early, with the outcomes so far.

    Raises InputError, before anything is decoded, for a conversation that cannot be run.
    """
    return _Session(pair, conversations, config, observer).run()


class _Session:
    """A run in progress."""

    def __init__(
        self, pair: Pair, conversations: Sequence[Conversation], config: RunConfig, observer: Observer
    ) -> None:
        self.pair, self.conversations, self.config, self.observer = pair, conversations, config, observer
        self.k = config.engine.num_speculative_tokens
        self.compares = config.baseline and pair.drafts(self.k).num_drafts > 0
        replicas = 1 + len(pair.replicas)
        self.slots = min(config.engine.slots, -(-len(conversations) // replicas) * replicas)
        counts = [conversation.num_requests for conversation in conversations]
        self.first_index = [sum(counts[:number]) for number in range(len(counts))]
        self.total = sum(counts)
        self.done = 0
        default: PrefixCacheSize = "on" if self.total > 1 else "off"
        self.prefix_cache = default if config.engine.prefix_cache is None else config.engine.prefix_cache
        self.outcomes: dict[int, Outcome] = {}  # by the request's index
        self.waiting: list[Request] = []  # for the next group
        self.cut_short: dict[int, str] = {}  # by the conversation's number
        self.failed: dict[int, str] = {}  # likewise
        self.compile_s = 0.0
        needed = pair.capacity([self._longest(number) for number in range(len(conversations))])
        self.capacity = needed if config.engine.context is None else config.engine.context

    def run(self) -> Run:
        interrupted, used = False, None
        try:
            for number, requests in enumerate(self._groups()):
                self._decode_group(number, requests)
            used = self._engine(self.k).prefix_cache_use
            if self.total == 1:
                for outcome in self.outcomes.values():
                    self._compare_again(outcome)
        except KeyboardInterrupt:
            interrupted = True
        engine = self._engine(self.k)
        return Run(
            outcomes=[self.outcomes[index] for index in sorted(self.outcomes)],
            capacity=self.capacity,
            compile_s=self.compile_s,
            host_gap_frac=engine.times.gap_frac,
            costs=engine.costs,
            engine=engine.config,
            compares=self.compares,
            prefix_cache=used,
            interrupted=interrupted,
            cut_short=(*self._ended_by_context(), *self.cut_short.values()),
            failed=tuple(self.failed.values()),
        )

    def _ended_by_context(self) -> Iterator[str]:
        """Yield a line per answer that is shorter than it may be, because `Pair.request` limits it to the context."""
        most, context = self.config.answer.max_new_tokens, self.pair.room(self.config.engine.context)
        for _, outcome in sorted(self.outcomes.items()):
            request = outcome.result.request
            if outcome.result.finish_reason == "length" and request.max_new_tokens < most:
                yield beyond_context(request, most, context)

    def _groups(self) -> Iterator[list[Request]]:
        """Yield the requests with which a group begins: requests that are decoded, then compared.

        With one slot each request is a group. With several, all first turns are in the first group, and requests that
        need a longer context than it has wait for the next.
        """
        if self.slots == 1:
            for number, conversation in enumerate(self.conversations):
                for turn in range(conversation.num_requests):
                    if (request := self._request(number, turn)) is not None:
                        yield [request]
            return
        first_turns = (self._request(number, 0) for number in range(len(self.conversations)))
        self.waiting = [request for request in first_turns if request is not None]
        while self.waiting:
            requests, self.waiting = self.waiting, []
            yield requests

    def _following(self, request: Request) -> Request | None:
        """Make the request of the next turn, if it belongs to the same group."""
        if self.slots == 1:
            return None
        number, turn = self._turn_of(request)
        following = self._request(number, turn + 1)
        if following is not None and len(following.prompt_ids) + following.max_new_tokens > self.capacity:
            self.waiting.append(following)
            return None
        return following

    def _turn_of(self, request: Request) -> tuple[int, int]:
        """Return (the number of a request's conversation, its turn)."""
        number = bisect.bisect_right(self.first_index, request.index) - 1
        return number, request.index - self.first_index[number]

    def _shown_turn(self, request: Request) -> int | None:
        number, turn = self._turn_of(request)
        return turn if self.conversations[number].numbered else None

    def _request(self, number: int, turn: int) -> Request | None:
        """Make the request of a turn; None if the conversation has no such turn, or was cut short."""
        conversation, first = self.conversations[number], self.first_index[number]
        if turn >= conversation.num_requests or number in self.cut_short or number in self.failed:
            return None
        answers = [self.outcomes[first + earlier].result.text or "" for earlier in range(turn)]
        try:
            return self._make(conversation, answers, first + turn)
        except InputError as error:
            if turn == 0:
                raise
            self.cut_short[number] = f"turn {turn + 1} of {conversation.num_requests} was not run: {error}"
            return None

    def _longest(self, number: int) -> Request:
        """Make a request as long as the conversation may become. Raises InputError as `Pair.request`."""
        conversation, budget = self.conversations[number], self.config.answer.max_new_tokens
        first = self._make(conversation, [], self.first_index[number])
        turns = conversation.num_requests
        if turns == 1:
            return first
        # unknown answers take their budget and a few tokens more: their text may be tokenised differently
        last = self._make(conversation, [" "] * (turns - 1), 0)
        length = min(len(last.prompt_ids) + turns * budget, self.pair.room(self.config.engine.context))
        return dataclasses.replace(last, max_new_tokens=max(length - len(last.prompt_ids), 1))

    def _make(self, conversation: Conversation, answers: Sequence[str], index: int) -> Request:
        config = self.config
        return self.pair.request(
            conversation,
            answers,
            config.rendering,
            **vars(config.answer),
            sampling=config.sampling,
            index=index,
            context=config.engine.context,
        )

    def _engine(self, k: NumDrafts) -> AnyEngine:
        config = self.config.engine
        if not self.pair.drafts(k).num_drafts:  # the baseline
            config = dataclasses.replace(config, synthetic_acceptance=None)
        resolved = self.pair.resolve(
            config,
            num_speculative_tokens=k,
            slots=self.slots,
            context=self.capacity,
            prefix_cache=self.prefix_cache,
        )
        return self.pair.engine(resolved)

    def _decode_group(self, number: int, requests: list[Request]) -> None:
        """Decode requests and the turns that follow them, and plainly for comparison."""
        if self.config.engine.context is None and (needed := self.pair.capacity(requests)) > self.capacity:
            # an answer's text may take more tokens in the next prompt than were emitted
            self.capacity = needed
        plain_results: list[Result] = []
        plain_first = self.compares and self.slots == 1 and number % 2 == 1
        if plain_first:
            plain_results = self._decode_plainly(requests)
        self._warm_up(self.k, requests)
        if self.compares:
            self._engine(PLAIN)  # refused before an answer is shown, if memory lacks
        self.observer.stage("decoding", self.done, self.total)
        decoded = self._decode_shown(requests)
        if self.compares and not plain_first:
            plain_results = self._decode_plainly(decoded)
        for plain in plain_results:
            if (outcome := self.outcomes.get(plain.request.index)) is not None:
                outcome.rounds = (Round(outcome.result, plain, plain_first),)
                self._check_tokens(outcome, outcome.rounds[0])
        self.done += len(decoded)

    def _warm_up(self, k: NumDrafts, requests: Sequence[Request]) -> AnyEngine:
        """Compile what an engine needs for these requests, right before it decodes them."""
        engine = self._engine(k)
        self.observer.stage("compiling", 0, 0)
        before = engine.compile_s
        engine.warm_up(
            not self.config.sampling.greedy,
            functools.partial(self.observer.stage, "measuring"),
            full_logits=requests[0].full_logits,
            constrained=self.config.answer.grammar is not None,
            alone=self.slots == 1,
        )
        self.compile_s += engine.compile_s - before
        return engine

    def _decode_shown(self, requests: list[Request]) -> list[Request]:
        """Decode requests and the turns that follow them, and store their outcomes; return all decoded requests.

        After an interruption, requests without a token have no outcome.
        """
        engine = self._engine(self.k)
        assemblers: dict[Handle, Assembler] = {}

        def start(starting: list[Request]) -> None:
            for request in starting:
                self.observer.started(request, self._shown_turn(request))
            assemblers.update(submit(engine, starting, self.pair.tokenizer, self.observer.shows_drafts))

        def end(assembler: Assembler) -> None:
            result = assembler.result()
            if result.error is not None:
                self.failed[self._turn_of(result.request)[0]] = result.error
            if result.output_ids:
                self.outcomes[result.request.index] = Outcome(result, self._shown_turn(result.request))

        start(requests)
        try:
            with contextlib.closing(follow(engine, assemblers)) as pieces:
                for assembler, piece in pieces:
                    self.observer.emitted(assembler.request, piece.token_ids, piece.text, piece.parts)
                    if assembler.finish_reason is not None:
                        end(assembler)
                        if (following := self._following(assembler.request)) is not None:
                            start([following])
                        # after `start`, so that a display in order has the next turn
                        self.observer.finished(assembler.result())
        finally:
            engine.settle()
            for assembler in assemblers.values():
                if rest := assembler.close():
                    self.observer.emitted(assembler.request, (), rest, ())
                end(assembler)
        return [assembler.request for assembler in assemblers.values()]

    def _decode_plainly(self, requests: Sequence[Request]) -> list[Result]:
        if not requests:
            return []
        engine = self._warm_up(PLAIN, requests)
        self.observer.stage("comparing", self.done, self.total)
        outcomes = [self.outcomes.get(request.index) for request in requests]
        # after speculation, as many tokens as it gave
        total = sum(
            request.max_new_tokens if outcome is None else len(outcome.result.output_ids)
            for request, outcome in zip(requests, outcomes, strict=True)
        )
        done = 0

        def decoded(piece: Piece) -> None:
            nonlocal done
            done += len(piece.token_ids)
            self.observer.compared(done, total)

        return decode(engine, requests, self.pair.tokenizer, decoded)

    def _compare_again(self, outcome: Outcome) -> None:
        """Replace the first round of a request by further ones, as many as fit into the time."""
        if not outcome.rounds or not outcome.result.counters.num_steps:  # both ways were plain
            return
        (first,) = outcome.rounds
        # by the faster way, because a moment in which the machine was busy must not end the comparison
        needed_s = 2 * min(first.result.total_s, first.baseline.total_s)
        left_s, rounds = self.config.compare_s, list[Round]()
        while len(rounds) < MOST_ROUNDS and needed_s <= left_s:
            began = time.perf_counter()
            rounds.append(self._decode_both_ways(outcome.result.request, plain_first=len(rounds) % 2 == 0))
            needed_s = time.perf_counter() - began
            left_s -= needed_s
            outcome.rounds = tuple(rounds)
            self._check_tokens(outcome, rounds[-1])

    def _decode_both_ways(self, request: Request, plain_first: bool) -> Round:
        results = {}
        for k in (PLAIN, self.k) if plain_first else (self.k, PLAIN):
            (results[k],) = decode(self._engine(k), [request], self.pair.tokenizer)
        return Round(results[self.k], results[PLAIN], plain_first)

    def _check_tokens(self, outcome: Outcome, compared: Round) -> None:
        """Store the first difference between the tokens of a round, with its margin, unless a round before had one."""
        result, plain = compared.result, compared.baseline
        index = first_difference(result.output_ids, plain.output_ids)
        if index is None or outcome.first_divergence is not None or self.config.engine.synthetic_acceptance is not None:
            return
        longer = max(result.output_ids, plain.output_ids, key=len)
        arguments = (result.request.prompt_ids, longer[: index + 1], self.capacity)
        coordinator = self.pair.coordinator
        compute = functools.partial(top_2_margin, self.pair.plain_target, *arguments)
        margin = compute() if coordinator is None else coordinator.together({"margin": arguments}, compute)
        outcome.first_divergence = Divergence(index, margin)
