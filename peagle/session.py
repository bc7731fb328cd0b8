"""A whole run: conversations in, results out, each beside plain decoding of the same prompt in the same process.

Conversations are taken `batch_size` at a time, and of each of them one turn after the other: such a set of independent
requests is a wave. Every wave is decoded with speculation and, if asked for, plainly; which of the two comes first
alternates, so that neither has the warmer machine.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from peagle import policy
from peagle.config import SamplingConfig, SpeculationConfig
from peagle.generate import Engine, Request
from peagle.metrics import Result, decode, first_difference, recorders
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.pair import DEFAULT_MAX_NEW_TOKENS, DEFAULT_NUM_SPECULATIVE_TOKENS, Pair
from peagle.profile import Breakdown, profile
from peagle.prompts import Conversation, Rendering
from peagle.score import TokenScore, score, top_2_margin


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How conversations are answered. num_speculative_tokens 0 is plain decoding, which is its own baseline; adaptive:
    it is the most a step drafts, and each step drafts and verifies what pays (peagle.policy)."""

    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    adaptive: bool = False
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    seed: int = 0
    batch_size: int = 1
    context: int | None = None
    ignore_eos: bool = False
    baseline: bool = True
    logprobs: int | None = None  # how many of the best tokens to score beside each emitted one
    profile: Path | None = None  # where to write a trace of some of the steps (peagle.profile)
    rendering: Rendering = dataclasses.field(default_factory=Rendering)

    def __post_init__(self) -> None:
        SpeculationConfig(self.num_speculative_tokens, self.batch_size, sampling=self.sampling, adaptive=self.adaptive)
        if self.max_new_tokens < 1:
            raise InputError(f"{self.max_new_tokens} new tokens are asked for; expected 1 or more")
        if self.logprobs is not None and self.logprobs < 0:
            raise InputError(f"logprobs is {self.logprobs}; expected 0 or more")

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
    logprobs: list[TokenScore] | None = None


@dataclasses.dataclass(frozen=True)
class CostsUsed:
    """What an adaptive run chose by: milliseconds of drafting and of verifying (with all the rest of a step), per
    number of drafts; where a dispatch holds many steps, whole steps are measured, and all of it is in verify_ms. 0
    drafts is a plain step; and what the first step after a rest takes more. `can_pay`: whether some number of drafts
    could, were all of them right; else every step was plain. `found`: measured when, or kept from where."""

    num_drafts: tuple[int, ...]
    draft_ms: tuple[float, ...]
    verify_ms: tuple[float, ...]
    resume_ms: float
    can_pay: bool
    found: str


@dataclasses.dataclass
class Run:
    """What became of the conversations: outcomes in the order of the input, of all requests that were begun.

    cut_short: a line for each conversation that its own answers made too long for a later turn; that turn and those
    behind it are missing.
    """

    outcomes: list[Outcome]
    capacity: int
    compile_s: float = 0.0
    costs: CostsUsed | None = None
    profile: Breakdown | None = None
    profile_failed: str | None = None  # why there is none, where one was wanted
    interrupted: bool = False
    cut_short: tuple[str, ...] = ()

    @property
    def drafting_cannot_pay(self) -> bool:
        """Whether every step was a plain one, by the program of plain decoding."""
        return self.costs is not None and not self.costs.can_pay


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
        self.batch_size = min(config.batch_size, len(conversations))
        counts = [conversation.num_requests for conversation in conversations]
        self.first_index = [sum(counts[:number]) for number in range(len(counts))]
        self.total = sum(counts)
        self.done = 0
        self.outcomes: dict[int, Outcome] = {}
        self.cut_short: dict[int, str] = {}  # by the conversation's number
        self.compile_s = 0.0
        needed = pair.capacity([self._widest(number) for number in range(len(conversations))])
        self.capacity = needed if config.context is None else config.context

    def run(self) -> Run:
        interrupted, found, failed = False, None, None
        try:
            for number, wave in enumerate(self._waves()):
                self._decode_wave(number, wave)
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
        engine = self._engine(self.config.num_speculative_tokens)
        if engine.costs is None:
            return None
        draft_ms, verify_ms = (
            tuple(round(float(ms), 4) for ms in part) for part in (engine.costs.draft_ms, engine.costs.verify_ms)
        )
        resume_ms = round(float(engine.costs.resume_ms), 4)
        ladder = engine.config.ladder
        can_pay = policy.can_pay(ladder, engine.costs)
        return CostsUsed(ladder, draft_ms, verify_ms, resume_ms, can_pay, engine.costs_found or "given")

    def _waves(self) -> Iterator[list[tuple[Request, int | None]]]:
        """Requests with their turn numbers. The next wave may be asked for when the outcomes of the last are there."""
        numbers = range(len(self.conversations))
        for start in range(0, len(numbers), self.batch_size):
            group = numbers[start : start + self.batch_size]
            for turn in range(max(self.conversations[number].num_requests for number in group)):
                wave = [found for number in group if (found := self._request(number, turn)) is not None]
                if wave:
                    yield wave

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
            seed=config.seed,
            index=index,
            context=config.context,
        )

    def _all_engines(self) -> list[Engine]:
        kinds = [self.config.num_speculative_tokens] + ([0] if self.config.compares else [])
        return [self._engine(kind) for kind in kinds]

    def _engine(self, num_speculative_tokens: int) -> Engine:
        config = self.config
        shape = SpeculationConfig(
            config.num_speculative_tokens, self.batch_size, self.capacity, config.sampling, config.adaptive
        )
        return self.pair.engine(shape if num_speculative_tokens else shape.plain, ignore_eos=config.ignore_eos)

    def _decode_wave(self, number: int, wave: list[tuple[Request, int | None]]) -> None:
        requests = [request for request, _ in wave]
        if self.config.context is None:
            # an answer may come back a little longer than it was, cut into other tokens: then the room grows
            self.capacity = max(self.capacity, self.pair.capacity(requests))
        for engine in self._all_engines():
            self.observer.compiling()
            before = engine.compile_s
            engine.warm_up(requests, self.observer.measuring)
            self.compile_s += engine.compile_s - before
        fast = self._engine(self.config.num_speculative_tokens)
        plain_results: list[Result] = []
        plain_first = self.config.compares and number % 2 == 1
        if plain_first:
            plain_results = self._decode_plainly(requests)
        self.observer.decoding(self.done, self.total, plainly=False)
        self._decode_shown(fast, wave)
        if self.config.compares and not plain_first:
            plain_results = self._decode_plainly(requests)
        for plain in plain_results:
            self._compare(self.outcomes[plain.request.index], plain)
        if self.config.logprobs is not None:
            for request in requests:
                interrupt.check()
                outcome = self.outcomes[request.index]
                outcome.logprobs = self._score(outcome.result, self.config.logprobs)
        self.done += len(requests)

    def _decode_shown(self, engine: Engine, wave: list[tuple[Request, int | None]]) -> None:
        """The wave's outcomes are there afterwards, also when it was interrupted."""
        requests = [request for request, _ in wave]
        recording = recorders(engine, requests, self.pair.tokenizer)
        for request, turn in wave:
            self.observer.started(request, turn)
        try:
            for emission in engine.generate(requests):
                recorder = recording[emission.request.index]
                piece = recorder.add(emission)
                self.observer.emitted(emission.request, emission.token_ids, piece)
                if recorder.finish_reason != "interrupted":
                    self.observer.finished(recorder.result())
        finally:
            for request, turn in wave:
                recorder = recording[request.index]
                if rest := recorder.close():
                    self.observer.emitted(request, (), rest)
                self.outcomes[request.index] = Outcome(recorder.result(), turn)

    def _decode_plainly(self, requests: Sequence[Request]) -> list[Result]:
        self.observer.decoding(self.done, self.total, plainly=True)
        return decode(self._engine(0), requests, self.pair.tokenizer)

    def _compare(self, outcome: Outcome, plain: Result) -> None:
        outcome.baseline = plain
        result = outcome.result
        index = first_difference(result.output_ids, plain.output_ids)
        if index is not None and self.config.sampling.synthetic_acceptance is None:
            longer = max(result.output_ids, plain.output_ids, key=len)
            margin = top_2_margin(self.pair.plain_target, result.request.prompt_ids, longer[: index + 1], self.capacity)
            outcome.first_divergence = Divergence(index, margin)

    def _score(self, result: Result, num_best: int) -> list[TokenScore]:
        vocab_size = self.pair.target.vocab_size
        return score(
            self.pair.plain_target,
            result.request.prompt_ids,
            result.output_ids,
            min(num_best, vocab_size),
            self.capacity,
        )
