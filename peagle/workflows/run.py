"""A whole run: conversations in, results out, each beside plain decoding of the same prompt in the same process.

With one slot, requests are decoded one by one, each with speculation and, if asked for, plainly; which of the two comes
first alternates, so that neither has the warmer machine. With several, all conversations are in the engine's queue, and
each goes on with its next turn when its answer is there; plain decoding of the same requests follows.
"""

import bisect
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from peagle.api import DEFAULT_MAX_NEW_TOKENS, DEFAULT_NUM_SPECULATIVE_TOKENS, Pair
from peagle.engine.engine import DRAFTS_ARE_GREEDY, Engine, EngineConfig, Handle
from peagle.engine.request import DEFAULT_CHUNK, Request, SamplingParams, check_stop_strings
from peagle.measure.logprobs import top_2_margin
from peagle.measure.metrics import first_difference
from peagle.measure.profile import Breakdown, profile
from peagle.ops.errors import InputError
from peagle.result import Assembler, Result, ask, decode, follow
from peagle.text.prompts import Conversation, Rendering


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How conversations are answered. num_speculative_tokens 0 is plain decoding, which is its own baseline; adaptive:
    drafts by the pair's table of widths, and rows pause where drafting does not pay."""

    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    adaptive: bool = False
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    draft_sampling: bool = False
    synthetic_acceptance: tuple[float, ...] | None = None
    slots: int = 1
    context: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # strings before which an answer ends
    baseline: bool = True
    logprobs: int | None = None  # how many of the likeliest tokens to name beside each emitted one
    prefill_chunk: int = DEFAULT_CHUNK
    profile: Path | None = None  # where to write a trace of some of the steps (peagle.measure.profile)
    rendering: Rendering = dataclasses.field(default_factory=Rendering)

    def __post_init__(self) -> None:
        EngineConfig(  # refuses what no engine takes
            self.num_speculative_tokens,
            self.slots,
            chunk=self.prefill_chunk,
            draft_sampling=self.draft_sampling,
            synthetic_acceptance=self.synthetic_acceptance,
        )
        check_stop_strings(self.stop)
        if self.draft_sampling and self.sampling.greedy:
            raise InputError(DRAFTS_ARE_GREEDY)
        if self.max_new_tokens < 1:
            raise InputError(f"{self.max_new_tokens} new tokens are asked for; expected 1 or more")
        Request((0,), 1, logprobs=self.logprobs)  # refuses what no request asks for

    @property
    def compares(self) -> bool:
        return self.baseline and self.num_speculative_tokens > 0


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first place where speculation and plain decoding chose differently, and by how much the target's two best
    logits differ there. Far from zero it is an error; near zero the arithmetic of passes of different width."""

    index: int
    margin: float


@dataclasses.dataclass
class Outcome:
    """One request with what it was compared with."""

    result: Result
    turn: int | None  # from 0; None where the request is no turn of a conversation
    baseline: Result | None = None
    first_divergence: Divergence | None = None


@dataclasses.dataclass(frozen=True)
class CostsUsed:
    """What an adaptive run went by, by number of active rows: the drafts of a step (0: they could not pay), and what
    such a step takes, in plain steps."""

    drafts: dict[int, int]
    plain_steps: dict[int, float]


@dataclasses.dataclass
class Run:
    """What became of the conversations: outcomes in the order of the input, of all requests that have a token.

    cut_short: a line for each conversation that its own answers made too long for a later turn; that turn and those
    behind it are missing.
    """

    outcomes: list[Outcome]
    capacity: int
    compile_s: float = 0.0
    host_gap_frac: float | None = None  # of the time: the device had nothing to do (peagle.engine.engine.LoopTimes)
    costs: CostsUsed | None = None
    profile: Breakdown | None = None
    profile_failed: str | None = None  # why there is none, where one was wanted
    interrupted: bool = False
    cut_short: tuple[str, ...] = ()

    @property
    def drafting_cannot_pay(self) -> bool:
        """Whether every step was a plain one."""
        return self.costs is not None and not any(self.costs.drafts.values())


class Observer:
    """Is told what happens, as it happens. Does nothing; override what is wanted."""

    def compiling(self) -> None:
        """Programs may be compiled now."""

    def measuring(self) -> None:
        """What drafting costs on this machine is measured now."""

    def decoding(self, done: int, total: int, plainly: bool) -> None:
        """`done` of `total` requests are finished; the next ones are decoded now."""

    def profiling(self) -> None:
        """All is decoded; some steps are run once more to be looked at."""

    def started(self, request: Request, turn: int | None) -> None:
        """A request that will be shown is decoded from here on."""

    def emitted(self, request: Request, token_ids: Sequence[int], text: str) -> None:
        """Tokens of such a request, and the text that is certain with them."""

    def finished(self, result: Result) -> None:
        """That request has all its tokens."""


def run(pair: Pair, conversations: Sequence[Conversation], config: RunConfig, observer: Observer | None = None) -> Run:
    """Answers the conversations. Ctrl-C ends it early: what there is by then comes back, `interrupted`.

    Raises InputError, before anything is decoded, for a conversation that cannot be run.
    """
    return _Session(pair, conversations, config, observer or Observer()).run()


class _Session:
    def __init__(
        self, pair: Pair, conversations: Sequence[Conversation], config: RunConfig, observer: Observer
    ) -> None:
        self.pair, self.conversations, self.config, self.observer = pair, conversations, config, observer
        self.slots = min(config.slots, len(conversations))
        counts = [conversation.num_requests for conversation in conversations]
        self.first_index = [sum(counts[:number]) for number in range(len(counts))]
        self.total = sum(counts)
        self.done = 0
        self.outcomes: dict[int, Outcome] = {}
        self.waiting: list[tuple[Request, int | None]] = []
        self.cut_short: dict[int, str] = {}  # by the conversation's number
        self.compile_s = 0.0
        needed = pair.capacity([self._widest(number) for number in range(len(conversations))])
        self.capacity = needed if config.context is None else config.context

    def run(self) -> Run:
        interrupted, found, failed = False, None, None
        try:
            for number, together in enumerate(self._rounds()):
                self._decode_round(number, together)
            if self.config.profile is not None:
                try:
                    found = self._profile(self.config.profile)
                except (InputError, OSError, RuntimeError) as error:  # the answers are there, and stay
                    failed = str(error).partition("\n")[0]
        except KeyboardInterrupt:
            interrupted = True
        return Run(
            outcomes=[self.outcomes[index] for index in sorted(self.outcomes)],
            capacity=self.capacity,
            compile_s=self.compile_s,
            host_gap_frac=self._engine(self.config.num_speculative_tokens).times.gap_frac,
            costs=self._costs(),
            profile=found,
            profile_failed=failed,
            interrupted=interrupted,
            cut_short=tuple(self.cut_short.values()),
        )

    def _profile(self, directory: Path) -> Breakdown:
        self.observer.profiling()
        requests = [self.outcomes[index].result.request for index in sorted(self.outcomes)]
        return profile(self._engine(self.config.num_speculative_tokens), requests, directory)

    def _costs(self) -> CostsUsed | None:
        table = self._engine(self.config.num_speculative_tokens).widths
        return None if table.costs is None else CostsUsed(dict(table.drafts), dict(table.costs))

    def _rounds(self) -> Iterator[list[tuple[Request, int | None]]]:
        """Requests that are decoded together, with their turn numbers. What is given before a round's end, and needs
        more room than the engine has, begins the next."""
        numbers = range(len(self.conversations))
        if self.slots == 1:
            for number in numbers:
                for turn in range(self.conversations[number].num_requests):
                    if (found := self._request(number, turn)) is not None:
                        yield [found]
            return
        self.waiting = [found for number in numbers if (found := self._request(number, 0)) is not None]
        while self.waiting:
            together, self.waiting = self.waiting, []
            yield together

    def _next(self, index: int) -> tuple[Request, int | None] | None:
        """What follows the request of this index at once; with one slot, nothing: its baseline comes first."""
        if self.slots == 1:
            return None
        number = bisect.bisect_right(self.first_index, index) - 1
        found = self._request(number, index - self.first_index[number] + 1)
        if found is not None and len(found[0].prompt_ids) + found[0].max_new_tokens > self.capacity:
            self.waiting.append(found)
            return None
        return found

    def _request(self, number: int, turn: int) -> tuple[Request, int | None] | None:
        """None where the conversation has no such turn, or was cut short."""
        conversation, first = self.conversations[number], self.first_index[number]
        if turn >= conversation.num_requests or number in self.cut_short:
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
        """A request as long as the conversation may become; all that can be refused before a run is refused here."""
        conversation, budget = self.conversations[number], self.config.max_new_tokens
        first = self._make(conversation, [], self.first_index[number])
        turns = conversation.num_requests
        if turns == 1:
            return first
        # answers are not there yet: what they will take is their budget, and a few tokens that may be cut differently
        last = self._make(conversation, [" "] * (turns - 1), 0)
        width = min(len(last.prompt_ids) + turns * budget, self.pair.room(self.config.context))
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
            context=config.context,
        )

    def _all_engines(self) -> list[Engine]:
        kinds = [self.config.num_speculative_tokens] + ([0] if self.config.compares else [])
        return [self._engine(kind) for kind in kinds]

    def _engine(self, num_speculative_tokens: int) -> Engine:
        config, k = self.config, num_speculative_tokens
        shape = self.pair.engine_config(
            k,
            adaptive=config.adaptive and k > 0,
            slots=self.slots,
            capacity=self.capacity,
            draft_sampling=config.draft_sampling and k > 0,
            synthetic_acceptance=config.synthetic_acceptance if k else None,
            chunk=config.prefill_chunk,
        )
        return self.pair.engine(shape)

    def _decode_round(self, number: int, together: list[tuple[Request, int | None]]) -> None:
        requests = [request for request, _ in together]
        if self.config.context is None:
            # an answer may come back a little longer than it was, cut into other tokens: then the room grows
            self.capacity = max(self.capacity, self.pair.capacity(requests))
        for engine in self._all_engines():
            self.observer.compiling()
            before = engine.compile_s
            engine.warm_up(not self.config.sampling.greedy, self.observer.measuring, full=requests[0].full)
            self.compile_s += engine.compile_s - before
        fast = self._engine(self.config.num_speculative_tokens)
        plain_results: list[Result] = []
        plain_first = self.config.compares and self.slots == 1 and number % 2 == 1
        if plain_first:
            plain_results = self._decode_plainly(requests)
        self.observer.decoding(self.done, self.total, plainly=False)
        decoded = self._decode_shown(fast, together)
        if self.config.compares and not plain_first:
            plain_results = self._decode_plainly(decoded)
        for plain in plain_results:
            self._compare(self.outcomes[plain.request.index], plain)
        self.done += len(decoded)

    def _decode_shown(self, engine: Engine, together: list[tuple[Request, int | None]]) -> list[Request]:
        """The requests that were decoded: these, and those that follow them. Their outcomes are there afterwards; if it
        was interrupted, those of requests that have a token."""
        turns: dict[int, int | None] = {}
        asked: dict[Handle, Assembler] = {}

        def start(starting: list[tuple[Request, int | None]]) -> None:
            for request, turn in starting:
                self.observer.started(request, turn)
                turns[request.index] = turn
            asked.update(ask(engine, [request for request, _ in starting], self.pair.tokenizer))

        def end(assembler: Assembler) -> None:
            result = assembler.result()
            if result.output_ids:
                self.outcomes[result.request.index] = Outcome(result, turns[result.request.index])

        start(together)
        try:
            with contextlib.closing(follow(engine, asked)) as pieces:
                for assembler, piece in pieces:
                    self.observer.emitted(assembler.request, piece.token_ids, piece.text)
                    if assembler.finish_reason is not None:
                        end(assembler)
                        if (following := self._next(assembler.request.index)) is not None:
                            start([following])
                        self.observer.finished(assembler.result())  # who shows answers in order knows what comes next
        finally:
            engine.settle()
            for assembler in asked.values():
                if rest := assembler.close():
                    self.observer.emitted(assembler.request, (), rest)
                end(assembler)
        return [assembler.request for assembler in asked.values()]

    def _decode_plainly(self, requests: Sequence[Request]) -> list[Result]:
        self.observer.decoding(self.done, self.total, plainly=True)
        return decode(self._engine(0), requests, self.pair.tokenizer)

    def _compare(self, outcome: Outcome, plain: Result) -> None:
        outcome.baseline = plain
        result = outcome.result
        index = first_difference(result.output_ids, plain.output_ids)
        if index is not None and self.config.synthetic_acceptance is None:
            longer = max(result.output_ids, plain.output_ids, key=len)
            margin = top_2_margin(self.pair.plain_target, result.request.prompt_ids, longer[: index + 1], self.capacity)
            outcome.first_divergence = Divergence(index, margin)
