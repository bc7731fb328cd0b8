"""Decode many requests at once: the double-buffered loop between the host and the device.

The host sends dispatch n + 1 before it reads dispatch n. A dispatch returns a few integers per slot, which are copied
while the device works. It carries the map from slots to requests as it was when sent, so tokens that were computed
after a request ended are dropped.

    device | chunk | insert | steps 0            | steps 1             | steps 2 ...
    host   | dispatch ...   | read first, send 1 | read 0, dispatch 2  | read 1 ...

If a request has a grammar, its steps are cut in two (`_cut_step`): the host computes the token masks from the drafts
while the target verifies them. Uncut steps of the other requests alternate with cut ones (peagle.engine.scheduler).

    device | propose | verify                              | accept | propose | verify
    host   | dispatch, read what was sent before, masks, dispatch | dispatch ...

Requests enter and leave slots only between dispatches. `add`, `abort`, `run`, `follow` and `warm_up` are thread-safe:
a thread that waits for tokens drives the loop for all requests.
"""

import abc
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from peagle.engine import handoff
from peagle.engine.grammar import GrammarError, Matcher, Vocabulary
from peagle.engine.handoff import Fingerprints, HandOff
from peagle.engine.lead import Lead
from peagle.engine.masks import all_allowed, fill, next_mask
from peagle.engine.prefill import learns_from_tokens
from peagle.engine.prefix_cache import BLOCK, PrefixCache, PrefixCacheUse, aligned_chunk
from peagle.engine.programs import Programs
from peagle.engine.request import (
    DEFAULT_CHUNK,
    DRAFTS_ARE_GREEDY,
    FinishReason,
    Request,
    SamplingParams,
    StepRecord,
    TokenChunk,
    TokenLogprobs,
    check_num_drafts,
    check_rates,
)
from peagle.engine.sampling import LogProbs
from peagle.engine.scheduler import Admit, Chunk, Costs, Scheduler, Steps
from peagle.engine.state import DecodeState, Prefix, SlotParams
from peagle.engine.step import StepKind, StepOutput
from peagle.engine.widths import WidthTable
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.ops.kv_cache import cache_bytes
from peagle.ops.likeliest import NO_TOKEN
from peagle.ops.row_blocks import BlockedPrefill, padded_length
from peagle.protocols import Drafter, Explains, OverDevices, PrefillsAtOnce, Target

MEASURED_ROUNDS = 5
Measuring = Callable[[int, int], object]  # (runs that are over, all runs)
MASK_BUDGET_S = 0.05
MOST_SLOW_MASKS = 8  # in a row
Role: TypeAlias = Literal["both", "prefill", "decode"]
Part: TypeAlias = Literal["target", "drafter"]


class EngineError(RuntimeError):
    """The engine failed and cannot finish its requests."""


@dataclass(frozen=True)
class EngineConfig:
    """The shape of an engine: slots, positions per slot, drafts of a step.

    widths: drafts by number of active rows, never more than num_speculative_tokens. chunk: prompt tokens of one prefill
    pass. steps_per_dispatch changes when tokens reach the host, never which tokens. adaptive: measure the cost of
    drafting at warm-up, and pause rows for which drafting does not pay (peagle.engine.widths). programs_by_width:
    compile a program for each number of drafts in the table, for models whose passes also compute inactive rows.
    prefix_cache_bytes: memory for prompts and answers that later requests may begin with (peagle.engine.prefix_cache);
    0: none are kept. k_per_request: requests may set num_speculative_tokens; plain steps are then compiled, too.
    mask_budget_s: processor time of a request's masks in a step. A request that exceeds it drafts no more; one whose
    single masks exceed it most_slow_masks times in a row ends with an error, since all others wait for them.
    blocked: prefill each prompt at once, not in chunks: nobody decodes meanwhile, and there is no prefix cache. role:
    "prefill" computes prompts and their first tokens, has no slots, and hands every request over that goes on; "decode"
    takes these, and computes no prompts (peagle.engine.handoff).
    """

    num_speculative_tokens: int = 0
    slots: int = 1
    capacity: int = 512
    chunk: int = DEFAULT_CHUNK
    steps_per_dispatch: int = 1
    widths: WidthTable | None = None  # None: num_speculative_tokens at any load
    adaptive: bool = False
    programs_by_width: bool = False
    prefix_cache_bytes: int = 0
    k_per_request: bool = False
    mask_budget_s: float = MASK_BUDGET_S
    most_slow_masks: int = MOST_SLOW_MASKS
    blocked: BlockedPrefill | None = None
    draft_sampling: bool = False
    synthetic_acceptance: tuple[float, ...] | None = None
    role: Role = "both"

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        check_num_drafts(k)
        if self.slots < 1:
            raise InputError(f"slots are {self.slots}; expected 1 or more")
        if self.capacity < 2:
            raise InputError(
                f"context is {self.capacity} positions; expected room for a prompt token and an output token"
            )
        if self.adaptive and k < 1:
            raise InputError("K is 0 in adaptive drafting; expected 1 or more, the most tokens to draft in a step")
        if self.prefix_cache_bytes < 0:
            raise InputError(f"the prefix cache is {self.prefix_cache_bytes} bytes; expected 0 or more")
        if self.chunk < 1:
            raise InputError(f"the prefill chunk is {self.chunk} tokens; expected 1 or more")
        if not 0 < self.mask_budget_s < math.inf or self.most_slow_masks < 1:
            raise InputError(
                f"the budget of masks is {self.mask_budget_s:g} s in {self.most_slow_masks} steps; expected more than "
                "0 s, and 1 step or more"
            )
        if self.blocked is not None:
            self.blocked.rows(self.capacity)  # check them
            if self.prefix_cache_bytes:
                raise InputError(
                    "blocked prefill takes a whole prompt at once, so it cannot begin with a known one; leave out "
                    "--prefill blocked or --prefix-cache"
                )
        check_rates(self.synthetic_acceptance, k, self.draft_sampling)
        if self.role == "decode" and self.prefix_cache_bytes:
            raise InputError("an engine that only decodes computes no prompts; leave its prefix cache out")

    @property
    def lane_chunk(self) -> int:
        """The tokens of the program that prefills."""
        if self.blocked is not None:
            return padded_length(self.capacity)
        return 1 if self.role == "decode" else self.chunk

    @property
    def lane_tokens(self) -> int:
        """The most prompt tokens of one prefill pass."""
        return aligned_chunk(self.chunk) if self.prefix_cache_bytes else self.lane_chunk

    @property
    def table(self) -> WidthTable:
        return self.widths or WidthTable.constant(self.num_speculative_tokens)

    def share(self, count: int) -> "EngineConfig":
        """Return the shape of each of `count` engines that share the slots. Raises InputError if they cannot."""
        slots = shared_slots(self.slots, count)
        return dataclasses.replace(self, slots=slots, prefix_cache_bytes=self.prefix_cache_bytes // count)

    def check(self, request: Request, vocab_size: int) -> None:
        """Raise InputError for a request that an engine of this shape cannot run."""
        request.check_vocabulary(vocab_size)
        if len(request.prompt_ids) + request.max_new_tokens > self.capacity:
            raise InputError(
                f"{request.name} has {len(request.prompt_ids)} tokens and at most {request.max_new_tokens} new ones; "
                f"expected a sum of at most {self.capacity}, the context: shorten one of them or raise the context"
            )
        asked, most = request.num_speculative_tokens, self.num_speculative_tokens
        if asked is not None and asked > most:
            raise InputError(f"K is {asked} for {request.name}; expected at most {most}, the engine's")
        if asked is not None and not self.k_per_request:
            raise InputError("K is set for one request; expected an engine with k_per_request")
        if self.draft_sampling and request.sampling.greedy:
            raise InputError(DRAFTS_ARE_GREEDY, "temperature")


def shared_slots(slots: int, count: int) -> int:
    """Return the slots of each of `count` engines. Raises InputError if they cannot share these."""
    if slots % count:
        raise InputError(f"slots are {slots}; expected a multiple of {count}, the replicas (dp) that share them")
    return slots // count


def check_grammar(request: Request, stop_token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InputError for a request whose grammar nothing can end, or is another vocabulary's."""
    if request.grammar is None:
        return
    if not any(0 <= token < vocab_size for token in stop_token_ids):
        raise InputError(
            f"{request.name} has a grammar, but no stop token, so nothing can end its answer; leave out ignore_eos, or "
            "name stop tokens",
            "ignore_eos",
        )
    size = request.grammar.vocabulary.size
    if size != vocab_size:
        raise InputError(f"the grammar is compiled for {size} tokens; expected {vocab_size}, the target's vocabulary")


@dataclass(eq=False)
class Handle:
    """A request in an engine. Made by `add`; only the engine changes it."""

    request: Request
    stop_token_ids: tuple[int, ...]
    deadline_s: float | None  # of time.perf_counter()
    finished: FinishReason | None = None
    length: int = 0  # prompt and output tokens that the host has read, the pending one excluded
    output_ids: list[int] = field(default_factory=list, repr=False)  # output tokens that the host has read
    num_cached_tokens: int = 0  # of its prompt, that the prefix cache held
    paused: bool = False  # it drafts no more, and is decoded plainly (peagle.engine.widths)
    error: InputError | None = None  # why it ended, if finished is "error"
    matcher: Matcher | None = None  # of its grammar; has read output_ids
    hand_off: HandOff | None = field(default=None, repr=False)  # to begin with, until then; or if it was handed over
    num_received: int = 0  # of output_ids, that came with a hand-off
    wanted: bool = True  # until its reader aborts it
    inbox: collections.deque[TokenChunk] = field(default_factory=collections.deque, repr=False)

    def end(self, reason: FinishReason, error: InputError | None = None) -> None:
        """Add a last chunk of no tokens. The engine that holds the request has dropped it."""
        self.error = error
        if reason != "handed_off":
            self.hand_off = None
        message = None if error is None else str(error)
        self.inbox.append(TokenChunk(self.request, (), time.perf_counter(), (), reason, error=message))
        self.finished = reason  # after the chunk: a reader that sees `finished` finds the chunk


Chunks: TypeAlias = list[tuple[Handle, TokenChunk]]


@dataclass
class LoopTimes:
    """Host overhead of the loop.

    A gap is a time in which the device was idle while requests ran.

    gap_s is an upper bound: gaps count from when the previous dispatch was last seen running.
    """

    gap_s: float = 0.0
    busy_s: float = 0.0  # from each dispatch until it was read; overlaps count once

    @property
    def gap_frac(self) -> float | None:
        """gap_s / (gap_s + busy_s)."""
        total = self.gap_s + self.busy_s
        return self.gap_s / total if total else None


@dataclass(frozen=True)
class _InFlight:
    """A dispatch that was sent and not yet read. `held`: the request in each slot at that time."""

    action: Chunk[Handle] | Admit[Handle] | Steps
    result: jax.Array
    held: tuple[Handle | None, ...]
    sent_s: float
    num_drafts: int = 0


TURN_S = 0.005  # that a reader waits for the turn before it looks for chunks that another thread has delivered


class AnyEngine(abc.ABC):
    """What decodes requests: an `Engine`, or several behind one queue (peagle.engine.replicas).

    _lock guards the bookkeeping. The thread that drives the loop holds _turn. _entry keeps requests out during a
    warm-up.
    """

    def __init__(self, config: EngineConfig, stop_token_ids: Sequence[int]) -> None:
        self.config, self.stop_token_ids = config, tuple(stop_token_ids)
        self._lock, self._turn, self._entry = threading.Lock(), threading.Lock(), threading.RLock()
        self._to_abort: collections.deque[Handle] = collections.deque()

    @property
    @abc.abstractmethod
    def one(self) -> "Engine":
        """An engine by itself, on its own devices, to look at and to measure."""

    @property
    @abc.abstractmethod
    def compile_s(self) -> float:
        """Seconds that compilation took."""

    @property
    @abc.abstractmethod
    def times(self) -> LoopTimes:
        """Host overhead of the loop."""

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Whether some request has not ended."""

    @property
    @abc.abstractmethod
    def widths(self) -> WidthTable:
        """Drafts by number of active rows; with costs, if they were measured."""

    @property
    @abc.abstractmethod
    def prefix_cache_use(self) -> PrefixCacheUse | None:
        """Hits and bytes of the prefix cache so far; None without one."""

    @abc.abstractmethod
    def check(self, request: Request, hand_off: HandOff | None = None) -> None:
        """Raise InputError, before any work, for a request that cannot be run, or not begin with this hand-off."""

    @abc.abstractmethod
    def add(self, request: Request, timeout_s: float | None = None, hand_off: HandOff | None = None) -> Handle:
        """Put a request in the queue. After timeout_s seconds it ends with the tokens it has.

        hand_off: where another engine left it; its chunks hold the tokens after those. A message is dropped as soon as
        the request has a slot, or ends. Raises InputError for a request that cannot be run, EngineError if the engine
        has failed.
        """

    @abc.abstractmethod
    def settle(self) -> None:
        """If no request is left, wait for the device: no work runs into the next measurement."""

    @abc.abstractmethod
    def warm_up(
        self,
        sampled: bool = False,
        measuring: Measuring = lambda *_: None,
        full: bool = False,
        constrained: bool = False,
    ) -> None:
        """Compile and run once every program that requests need.

        So later times include no compilation. sampled: some request is not greedy. full: some request is full
        (`Request.full`). constrained: some request has a grammar. An adaptive engine then measures the cost of
        drafting, once; it calls measuring(runs that are over, all runs) before each run. While a request is in the
        engine, this does nothing: programs then compile at their first dispatch.
        """

    @abc.abstractmethod
    def memory_bytes(self) -> tuple[int, int, int]:
        """Compute the bytes of (slots with caches, prefill lane, logits of a step); allocate none.

        They are those of one device. Devices of a CPU share one memory, so theirs are counted together. A target over
        several devices cuts its caches; each of them has all else.
        """

    @abc.abstractmethod
    def _step(self) -> Chunks:
        """Run an iteration of the loop; the caller holds _lock."""

    @abc.abstractmethod
    def _end_aborted(self) -> None:
        """End the requests that `abort` has queued; the caller holds _lock."""

    def add_all(self, requests: Sequence[Request]) -> list[Handle]:
        """Put all requests in the queue, or none if one of them cannot be run."""
        for request in requests:
            self.check(request)
        return [self.add(request) for request in requests]

    def abort(self, handle: Handle) -> None:
        """End a request and drop its tokens that were not read.

        Does nothing if the request has ended.

        Never waits, so an event loop or a finaliser may call it: if a step is under way, the request ends before the
        next one.
        """
        handle.wanted = False
        if handle.finished is not None:
            return
        self._to_abort.append(handle)
        if self._lock.acquire(blocking=False):
            try:
                self._end_aborted()
            finally:
                self._lock.release()

    def step(self) -> Chunks:
        """Send the next dispatch and read the previous one.

        For a single driver; `run`, `follow` and `generate` call it. Returns [] if no request is left, or nothing has
        arrived yet. Raises EngineError if the device failed, and KeyboardInterrupt, before it sends anything, if Ctrl-C
        was pressed (peagle.ops.interrupt).
        """
        with self._lock:
            return self._step()

    def follow(self, handle: Handle) -> Iterator[TokenChunk]:
        """Yield the chunks of a request until it ends. A reader that stops early aborts it.

        Raises InputError if a model's outputs are not finite, GrammarError if its grammar cannot be followed.
        """
        for _, chunk in self.run([handle]):
            yield chunk
        if handle.error is not None and handle.wanted:
            raise handle.error

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, TokenChunk]]:
        """Decode all of the requests; yield (index in the list, chunk) as chunks arrive.

        A reader that stops early aborts the rest. Raises InputError as `run` does.
        """
        handles = self.add_all(requests)
        places = {handle: place for place, handle in enumerate(handles)}
        try:
            with contextlib.closing(self.run(handles)) as chunks:
                for handle, chunk in chunks:
                    yield places[handle], chunk
        finally:
            self.settle()

    def run(self, handles: Collection[Handle]) -> Generator[tuple[Handle, TokenChunk]]:
        """Yield (handle, chunk) as chunks arrive, until all of the requests have ended.

        Meanwhile the reader may abort requests and add handles to `handles`. A reader that stops early aborts the rest.
        Raises InputError if a model's outputs are not finite, but not for a request that its reader has aborted. A
        grammar that cannot be followed ends its own request alone, with the error in its last chunk.
        """
        gone: set[Handle] = set()
        try:
            while left := [handle for handle in handles if handle not in gone]:
                ended = self._arrived(left)
                for handle in left:
                    while handle.inbox:
                        chunk = handle.inbox.popleft()
                        if chunk.finish_reason is not None:
                            ended.add(handle)
                        yield handle, chunk
                    error = handle.error if handle in ended and handle.wanted else None
                    if error is not None and not isinstance(error, GrammarError):
                        raise error
                gone |= ended
        finally:
            for handle in [handle for handle in handles if handle.finished is None]:
                self.abort(handle)

    def _arrived(self, handles: Sequence[Handle]) -> set[Handle]:
        """Return as soon as chunks of some of these have arrived: drive the loop, or let another thread do it.

        Returns those that have ended, whose last chunks have arrived, as far as this thread had the turn: a request
        that ends while another has it may still lack its last chunk.
        """
        while True:
            if self._turn.acquire(timeout=TURN_S):
                try:
                    if not any(handle.inbox or handle.finished for handle in handles):
                        self._advance()
                    if any(handle.inbox or handle.finished for handle in handles):
                        return {handle for handle in handles if handle.finished is not None}
                finally:
                    self._turn.release()
            elif any(handle.inbox for handle in handles):
                return set()

    def _advance(self) -> None:
        """Run one iteration of the loop; deliver its chunks before an abort can add its own."""
        with self._lock:
            for handle, chunk in self._step():
                handle.inbox.append(chunk)


class Engine(AnyEngine):
    """Decode requests with a target and a drafter; drafter None decodes plainly."""

    compile_s: float = 0.0
    times: LoopTimes = LoopTimes()

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EngineConfig,
        stop_token_ids: Sequence[int] = (),
        fingerprints: Fingerprints = Fingerprints(),  # noqa: B008  # frozen
        lead: Lead | None = None,
    ) -> None:
        """stop_token_ids end requests that set none of their own. fingerprints: of the models, for hand-offs.

        lead: other processes run the same programs (peagle.engine.lead).
        Raises InputError for K > 0 without a drafter.
        """
        if config.num_speculative_tokens and drafter is None:
            raise InputError("there is no drafter to speculate with; load one, or decode with K = 0")
        if config.blocked is not None and not isinstance(target, PrefillsAtOnce):
            raise InputError("this target does not prefill at once; leave out --prefill blocked")
        super().__init__(config, stop_token_ids)
        self.target, self.drafter = target, drafter if config.num_speculative_tokens else None
        self.fingerprints = fingerprints
        self.times = LoopTimes()
        self._table = config.table
        make = Programs if lead is None else lead.programs
        self._programs = make(
            target,
            self.drafter,
            config.slots,
            config.capacity,
            config.num_speculative_tokens,
            config.lane_chunk,
            config.steps_per_dispatch,
            None if config.blocked is None else config.blocked.rows(config.capacity),
        )
        self._prefix_cache: PrefixCache | None = None
        self._begins_anywhere = False  # requests in entries of the prefix cache, since there are no rings
        if config.prefix_cache_bytes:
            block, snapshot = self._programs.part_bytes()
            self._prefix_cache = PrefixCache(config.prefix_cache_bytes, block, snapshot)
            self._begins_anywhere = snapshot is None
        slots = 1 if config.role == "prefill" else config.slots  # a request leaves as soon as its first token is read
        self._scheduler: Scheduler[Handle] = Scheduler(slots, config.lane_tokens, config.steps_per_dispatch)
        self._state: DecodeState | None = None
        self._lane: Prefix | None = None
        self._lane_logits: jax.Array | None = None
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._unread = 0  # dispatches that are left in flight by `receive`
        self.num_queued = 0  # requests that wait for this engine elsewhere (peagle.engine.replicas)
        self._to_freeze: set[int] = set()  # slots whose requests the host ended
        self._alive: set[Handle] = set()
        self._costs = Costs()
        self._warm: set[StepKind] = set()
        self._warm_cut: set[StepKind] = set()
        self._input_rows = 1  # upper bound of drafter_input.num over all slots
        self._failure: BaseException | None = None
        self._last_read_s: float | None = None
        self._masks_were_slow = False  # those of all requests together, in the last cut step
        self._cpu_s: Callable[[], float] = time.thread_time
        self._wall_s: Callable[[], float] = time.perf_counter

    # --- the interface ----------------------------------------------------------------------------------------------

    def check(self, request: Request, hand_off: HandOff | None = None) -> None:
        """See `AnyEngine.check`."""
        if hand_off is not None:
            if self.config.role == "prefill":
                raise InputError("this engine only prefills; send the hand-off to one that decodes")
            handoff.check(self._programs, hand_off, self.config.capacity, self.fingerprints)
            handoff.check_request(hand_off, request, self._stops_of(request), self.target.vocab_size)
        elif self.config.role == "decode":
            raise InputError("this engine only decodes; expected the hand-off of one that prefills with the request")
        self.config.check(request, self.target.vocab_size)
        if request.grammar is not None:
            check_grammar(request, self._stops_of(request), self.target.vocab_size)
            if self.config.synthetic_acceptance is not None:
                raise InputError("synthetic acceptance ignores grammars; leave one of them out")
            if hand_off is not None:
                self._matcher(request, hand_off)

    def _matcher(self, request: Request, hand_off: HandOff | None) -> Matcher | None:
        """Make the matcher of a request's grammar, which has read what was emitted elsewhere.

        Raises GrammarError if the grammar does not allow that.
        """
        if request.grammar is None:
            return None
        matcher = request.grammar.begin(self._stops_of(request))
        if hand_off is not None:
            matcher.read(hand_off.token_ids[len(request.prompt_ids) :])
            if failure := matcher.failure:
                raise GrammarError(f"the hand-off of {request.name} does not follow its grammar: {failure}")
        return matcher

    def _stops_of(self, request: Request) -> tuple[int, ...]:
        return self.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids

    def add(self, request: Request, timeout_s: float | None = None, hand_off: HandOff | None = None) -> Handle:
        """See `AnyEngine.add`."""
        handle = self.prepare(request, timeout_s, hand_off)
        self.enter(handle)
        return handle

    def prepare(self, request: Request, timeout_s: float | None = None, hand_off: HandOff | None = None) -> Handle:
        """Make the handle of a request that is not in the queue yet. Raises InputError as `add` does."""
        self.check(request, hand_off)
        stops, matcher = self._stops_of(request), self._matcher(request, hand_off)
        deadline_s = None if timeout_s is None else time.perf_counter() + timeout_s
        handle = Handle(request, stops, deadline_s, length=len(request.prompt_ids), matcher=matcher)
        if hand_off is not None:
            handle.hand_off, handle.length = hand_off, hand_off.length
            handle.output_ids += hand_off.token_ids[len(request.prompt_ids) :]
            handle.num_received = len(handle.output_ids)
        return handle

    def enter(self, handle: Handle) -> None:
        """Put a prepared request in the queue. Raises EngineError if the engine has failed."""
        with self._entry, self._lock:
            self.raise_failure()
            self._scheduler.add(handle, len(handle.request.prompt_ids), constrained=handle.matcher is not None)
            self._alive.add(handle)

    def hand_over(self, handle: Handle) -> HandOff:
        """End a request that has a slot; return what another engine goes on with. Its last chunks are in its inbox.

        Only the thread that drives the loop may call it. Raises InputError for a request without a slot.
        """
        with self._lock:
            self.raise_failure()
            while self._in_flight:
                for other, chunk in self._read(self._in_flight.popleft()):
                    other.inbox.append(chunk)
            if handle not in self._alive or handle not in self._scheduler.held or self._state is None:
                raise InputError(f"{handle.request.name} is not being decoded; expected a request that has a slot")
            drafts = self.drafter is not None and not handle.paused
            if drafts:
                self._state, self._input_rows = self._programs.absorb(self._state), 1
            # a row that drafts no more has a drafter that lags behind for good
            state = self._state if drafts else dataclasses.replace(self._state, drafter_input=None)
            lane = self._programs.extract(state, self._programs.init_lane(), self._scheduler.held.index(handle))
            handle.hand_off = self._pack(handle, lane)
            self._end(handle, "handed_off")
            return handle.hand_off

    def _pack(self, handle: Handle, lane: Prefix) -> HandOff:
        token_ids = (*handle.request.prompt_ids, *handle.output_ids)
        drafts = self.drafter is not None and not handle.paused
        return handoff.pack(self._programs, lane, token_ids, self.fingerprints, drafts)

    @property
    def busy(self) -> bool:
        """See `AnyEngine.busy`."""
        return bool(self._alive)

    def take_back(self) -> Handle:
        """Drop the request that came last, which has no slot yet; another engine may begin it again.

        Nothing of it was emitted. There must be one (`num_free` below 0).
        """
        with self._lock:
            handle = self._scheduler.last_without_slot
            assert handle is not None
            self._scheduler.remove(handle)
            self._alive.discard(handle)
            handle.num_cached_tokens = 0
        return handle

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._alive)

    @property
    def num_free(self) -> int:
        """Slots that no request has or waits for; below 0: requests that wait for a slot. See `__init__` on slots."""
        return self._scheduler.slots - len(self._alive)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send or to read."""
        return not (self._alive or self._in_flight)

    @property
    def one(self) -> "Engine":
        """See `AnyEngine.one`."""
        return self

    def settle(self) -> None:
        """See `AnyEngine.settle`."""
        with self._lock:
            self._end_aborted()
            if not self._alive and self._lane is not None:
                self._in_flight.clear()
                self._last_read_s = None  # until the next request, an idle device is no gap
                jax.block_until_ready((None if self._state is None else self._state.done, self._lane))

    def warm_up(
        self,
        sampled: bool = False,
        measuring: Measuring = lambda *_: None,
        full: bool = False,
        constrained: bool = False,
        measure: bool = True,
    ) -> None:
        """See `AnyEngine.warm_up`. measure=False: another engine's costs of drafting will hold (`widths`)."""
        with self._entry:
            with self._lock:
                self._end_aborted()
                if self._alive:
                    return
            self._warm_up(sampled, full, measuring if measure else None)
            if constrained and self.config.role != "prefill":
                self._warm_up_cut_steps()

    def _warm_up_cut_steps(self) -> None:
        started = time.perf_counter()
        with self._lock:
            for kind in self._kinds_with_grammars - self._warm_cut:
                interrupt.check()
                assert self._state is not None
                widths = np.zeros((self.config.slots,), np.int32)
                self._state, proposed = self._programs.propose(self._state, widths, kind)
                self._state, verified = self._programs.verify(self._state, proposed)
                masks = all_allowed(self.config.slots, kind.num_drafts + 1, self.target.vocab_size)
                done = self._programs.accept_and_commit(self._state, proposed, verified, 0.0, masks, widths, kind)
                self._state = done[0]
                jax.block_until_ready(self._state)
                self._warm_cut.add(kind)
        self.compile_s += time.perf_counter() - started

    def _warm_up(self, sampled: bool, full: bool, measuring: Measuring | None) -> None:
        """measuring: None: measure nothing."""
        started = time.perf_counter()
        unknown = self.config.adaptive and self._table.costs is None and self.config.role != "prefill"
        measures = unknown and measuring is not None  # greedy steps
        variants = {(sampled, full), (False, False)} if measures else {(sampled, full)}
        kinds = [self._kind(drafts, *variant) for variant in variants for drafts in self._possible_drafts]
        if self.drafter is not None:
            kinds += [dataclasses.replace(kind, lean=True) for kind in kinds if not kind.num_drafts]
        if self.drafter is not None and not self._drafting_lapses:  # plain steps are those of rows that never draft
            kinds = [kind for kind in kinds if kind.num_drafts or kind.lean]
        missing = [kind for kind in kinds if kind not in self._warm]
        if missing:
            # after this arbitrary token the logits need not be finite
            with contextlib.suppress(InputError), self._without_prefix_cache():
                self._run_first_request()
            with self._lock:
                self._run_programs(missing)
            self._warm.update(missing)
            self.compile_s += time.perf_counter() - started
        if measures:
            assert measuring is not None
            with self._lock:
                self._table = self._table.paying(self._measure_costs(measuring))
        if missing or measures:
            self.times, self._last_read_s = LoopTimes(), None

    def _run_first_request(self) -> None:
        """Run a request through all programs that it needs but the steps."""
        sampling = SamplingParams(temperature=1.0 if self.config.draft_sampling else 0.0)  # as `check` requires
        # a prefill engine's shall go on, so that it is packed; a decode engine's begins with a hand-off
        request, hand_off = Request((0,), 1 if self.config.role == "both" else 2, sampling, ()), None
        if self.config.role == "decode":
            lane, drafts = self._programs.init_lane(), self.drafter is not None
            hand_off = handoff.pack(self._programs, lane, (0, 0), self.fingerprints, drafts)
        for _ in self.follow(self.add(request, hand_off=hand_off)):
            pass
        self.settle()

    def _run_programs(self, kinds: Sequence[StepKind]) -> None:
        """Run steps of these kinds, and what else the loop may need."""
        assert self._lane is not None
        lean = self.drafter is not None and 0 in self._possible_drafts and self._prefix_cache is None
        if lean and self.config.role != "decode":
            self._lane, _ = self._programs.extend(self._lane, 0, (0,), lean=True)
        if self._state is None:  # a prefill engine
            return
        widths = np.zeros((self.config.slots,), np.int32)
        for kind in kinds:
            interrupt.check()
            self._state, _ = self._programs.steps(self._state, widths, 0.0, 1, kind)
        if self._prefix_cache is not None:
            self._warm_up_prefix_cache()
        if len(self._possible_drafts) > 1:  # plain steps between drafted ones
            self._state = self._programs.absorb(self._state)
        jax.block_until_ready(self._state)

    @contextlib.contextmanager
    def _without_prefix_cache(self) -> Iterator[None]:
        cache, self._prefix_cache = self._prefix_cache, None
        try:
            yield
        finally:
            self._prefix_cache = cache

    def _warm_up_prefix_cache(self) -> None:
        assert self._state is not None
        assert self._lane is not None
        self._lane = self._programs.extract(self._state, self._lane, 0)
        block = self._programs.cut_block(self._lane, 0)
        snapshot = None if self._begins_anywhere else self._programs.cut_snapshot(self._lane, 1)
        self._load_lane([block], snapshot, (0,))

    @property
    def prefix_cache_use(self) -> PrefixCacheUse | None:
        """See `AnyEngine.prefix_cache_use`."""
        cache = self._prefix_cache
        return None if cache is None else cache.use

    def num_known(self, token_ids: Sequence[int]) -> int:
        """Count the first tokens of a prompt that the prefix cache holds for it."""
        return 0 if self._prefix_cache is None else self._prefix_cache.num_known(token_ids)

    @property
    def widths(self) -> WidthTable:
        """See `AnyEngine.widths`."""
        return self._table

    @widths.setter
    def widths(self, table: WidthTable) -> None:
        self._table = table

    @functools.cached_property
    def _possible_drafts(self) -> tuple[int, ...]:
        """The numbers of drafts of the step programs that this engine may run, ascending."""
        k, table = self.config.num_speculative_tokens, self.config.table.drafts.values()
        drafts = {k}
        if k and (self.config.k_per_request or self._drafting_lapses):
            drafts.add(0)
        if self.config.programs_by_width:
            drafts |= {min(each, k) for each in table}
        return tuple(sorted(drafts))

    @property
    def _drafting_lapses(self) -> bool:
        """Whether a row that may draft again takes plain steps, at some load."""
        table = self.config.table
        return self.config.adaptive or 0 in table.drafts.values() or not table.sampled

    @property
    def _kinds_with_grammars(self) -> set[StepKind]:
        """Kinds of cut steps."""
        return {self._kind(drafts, sampled=True, full=True) for drafts in self._possible_drafts}

    def _kind(self, num_drafts: int, sampled: bool, full: bool = False) -> StepKind:
        config, sampled = self.config, sampled or full
        if not num_drafts:
            return StepKind(0, sampled, full)
        draws, rate = config.draft_sampling and sampled, config.synthetic_acceptance
        return StepKind(num_drafts, sampled, full, draws, rate, goes_on=config.adaptive)

    def _measure_costs(self, measuring: Measuring) -> dict[int, float]:
        """Measure a drafted step in plain steps at 1, 2, 4, ... active rows.

        Medians over rounds; both programs run in each round, in alternating order.
        """
        rows = [1 << power for power in range(self.config.slots.bit_length()) if 1 << power <= self.config.slots]
        runs = list(itertools.product(rows, range(MEASURED_ROUNDS)))
        ratios: dict[int, list[float]] = {active: [] for active in rows}
        for done, (active, number) in enumerate(runs):
            measuring(done, len(runs))
            ratios[active].append(self._measure_once(active, number % 2 == 1))
        return {active: statistics.median(each) for active, each in ratios.items()}

    def _measure_once(self, active: int, plain_first: bool) -> float:
        """Measure the time of a drafted step over a plain one, with `active` rows of random tokens."""
        config, drafts = self.config, self._table.at(active)
        room = config.capacity - 2
        steps = max(1, min(config.steps_per_dispatch, room // (2 * (config.num_speculative_tokens + 2))))
        length = max(1, min(config.chunk, room - 2 * steps * (config.num_speculative_tokens + 1)))
        rng = np.random.default_rng(active)
        assert self._lane is not None
        for slot in range(active):
            tokens = rng.integers(0, self.target.vocab_size, length).tolist()
            params = SlotParams.of(Request(tuple(tokens), config.capacity), (), self.target.vocab_size)
            assert self._state is not None
            if config.role == "decode":  # after caches of zeros
                lane = dataclasses.replace(self._lane, length=np.asarray([length], np.int32))  # type: ignore[arg-type]
                self._state, _ = self._programs.resume(self._state, lane, tokens[-1], slot, params)
                continue
            self._lane, logits = self._programs.extend(self._lane, 0, tokens)
            self._state, _ = self._programs.admit(self._state, self._lane, logits, slot, params)
        widths = np.where(np.arange(config.slots) < active, drafts, 0).astype(np.int32)
        seconds, drafted = {}, self._program_for(drafts)
        for num_drafts in (0, drafted) if plain_first else (drafted, 0):
            jax.block_until_ready(self._state)
            started = time.perf_counter()
            given = widths if num_drafts else np.zeros_like(widths)
            assert self._state is not None
            kind = self._kind(num_drafts, sampled=False)
            kind = kind if num_drafts else dataclasses.replace(kind, lean=True)  # as rows that paused go on
            self._state, _ = self._programs.steps(self._state, given, 0.0, steps, kind)
            jax.block_until_ready(self._state)
            seconds[num_drafts] = time.perf_counter() - started
            self._state = self._programs.absorb(self._state)
        assert self._state is not None
        self._state = self._programs.evict(self._state, np.ones((config.slots,), bool))
        return seconds[drafted] / seconds[0]

    @contextlib.contextmanager
    def launching_alone(self) -> Iterator[bool]:
        """Let a GPU launch each operation of a step by itself: of a CUDA graph a profiler does not see which is which.

        Yields whether steps compile anew, at their first dispatch. On a CPU this changes nothing.
        """
        self._programs.launches_alone = jax.default_backend() == "gpu"
        try:
            yield self._programs.launches_alone
        finally:
            self._programs.launches_alone = False

    def programs(self, sampled: bool = False) -> list[jax.stages.Compiled]:
        """Compile the step programs that requests may run once more, for inspection."""
        state, _ = self._programs.shapes()
        widths = np.zeros((self.config.slots,), np.int32)
        prepared = [
            self._programs.prepared_steps(state, widths, 0.0, 1, self._kind(drafts, sampled))
            for drafts in self._possible_drafts
        ]
        return [program.lower(*operands).compile() for program, operands, _ in prepared]

    def memory_bytes(self) -> tuple[int, int, int]:
        """See `AnyEngine.memory_bytes`."""
        config, (state, lane) = self.config, self._programs.shapes()
        ranks, together = 1, 1
        if isinstance(self.target, OverDevices):
            ranks, together = self.target.ranks, self.target.local_ranks
        together = together if jax.default_backend() == "cpu" else 1

        def size(part: DecodeState | Prefix) -> int:
            everything, cut = cache_bytes(part), cache_bytes(part.target_cache)
            return together * (cut // ranks + everything - cut)

        rows = 1 if config.role == "prefill" else config.slots * (config.num_speculative_tokens + 1)
        held = 0 if config.role == "prefill" else size(state)
        return held, size(lane), together * rows * self.target.vocab_size * 4

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _step(self) -> Chunks:
        return self._guarded(self._send) + self._guarded(self._receive)

    def send(self) -> Chunks:
        """Run the first half of a step, which sends the next dispatch. It waits for nothing but a step that is cut.

        For the driver of several engines, which calls `send` and `receive` in turns. Raises as `step` does.
        """
        with self._lock:
            return self._guarded(self._send)

    def receive(self) -> Chunks:
        """Run the second half of a step: wait for the dispatch before the last one, and read it."""
        with self._lock:
            return self._guarded(self._receive)

    @property
    def ready(self) -> bool:
        """Whether `receive` would not wait."""
        with self._lock:
            waited_for = list(self._in_flight)[: max(len(self._in_flight) - self._unread, 0)]
        return all(sent.result.is_ready() for sent in waited_for)  # type: ignore[attr-defined]

    def _guarded(self, half: Callable[[], Chunks]) -> Chunks:
        self.raise_failure()
        try:
            return half()
        except Exception as error:
            self._failure = error
            raise EngineError(f"the engine failed: {' '.join(str(error).split())}") from error

    def _send(self) -> Chunks:
        self._allocate()
        self._end_aborted()
        now = time.perf_counter()
        for handle in [h for h in self._alive if h.deadline_s is not None and now >= h.deadline_s]:
            self._end(handle, "timeout")
        self._evict()
        interrupt.check()
        action = self._scheduler.next(self._costs, self._begin)
        chunks: Chunks = []
        if isinstance(action, Steps) and action.cut:
            chunks = self._cut_step(action)
        elif action is not None:
            self._dispatch(action)
        elif not self._in_flight:
            self._last_read_s = None  # no request is left, so an idle device is no gap
        # read a first token at once if no other request can keep the device busy
        alone = isinstance(action, Admit) and self._scheduler.num_active == 1
        self._unread = 0 if action is None or alone else 1
        return chunks

    def _receive(self) -> Chunks:
        chunks: Chunks = []
        while len(self._in_flight) > self._unread:
            chunks += self._read(self._in_flight.popleft())
        if self.idle:
            self._last_read_s = None  # until the next request, an idle device is no gap
        return chunks

    def _allocate(self) -> None:
        """Make the state and the lane at the first step; a prefill engine has no state."""
        if self._lane is not None:
            return
        if self.config.role == "prefill":
            self._lane = self._programs.init_lane()
        else:
            self._state, self._lane = self._programs.init()

    def _end_aborted(self) -> None:
        """See `AnyEngine._end_aborted`."""
        while self._to_abort:
            handle = self._to_abort.popleft()
            if handle in self._alive:
                self._end(handle, "aborted")

    def _evict(self) -> None:
        """Freeze the slots of requests that the host has ended."""
        if self._to_freeze and self._state is not None:
            slots = np.isin(np.arange(self.config.slots), list(self._to_freeze))
            self._state = self._programs.evict(self._state, slots)
        self._to_freeze.clear()

    def _dispatch(self, action: Chunk[Handle] | Admit[Handle] | Steps) -> None:
        assert self._lane is not None
        sent_s, num_drafts = time.perf_counter(), 0
        self._see_gap(sent_s)
        if isinstance(action, Chunk):
            token_ids = action.key.request.prompt_ids[action.begin : action.begin + action.count]
            # an entry of the prefix cache may be another request's beginning, so it has the drafter's rows
            lean = self.drafter is not None and action.key.paused and self._prefix_cache is None
            # a beginning without a snapshot has no aux_hidden, but the drafter's row that would need it; a drafter that
            # reads none has learnt the tokens before this one
            known = self._begins_anywhere and not learns_from_tokens(self._lane)
            again = known and 0 < action.begin == action.key.num_cached_tokens
            self._lane, result = self._programs.extend(self._lane, action.begin, token_ids, lean, int(again))
            self._lane_logits = result
            end = action.begin + action.count
            if action.last or end % BLOCK == 0:
                prompt_ids = action.key.request.prompt_ids
                self._remember(prompt_ids[:end], len(prompt_ids))
        elif isinstance(action, Admit):
            result = self._admit(action.key, action.slot)
        else:
            assert self._state is not None
            widths, kind = self._next_widths()
            num_drafts = kind.num_drafts
            self._catch_up(action.count, kind)
            cost = self._table.cost(self._scheduler.num_active) or 0.0
            self._state, result = self._programs.steps(self._state, widths, cost, action.count, kind)
        self._in_flight.append(_InFlight(action, result, self._scheduler.held, sent_s, num_drafts))

    def _cut_step(self, action: Steps) -> Chunks:
        """Run a step of all slots, with masks for those that have a grammar; return the chunks read meanwhile."""
        assert self._state is not None
        sent_s, held = time.perf_counter(), self._scheduler.held
        self._see_gap(sent_s)
        widths, kind = self._next_widths(cut=True)
        self._catch_up(1, kind)
        self._state, proposed = self._programs.propose(self._state, widths, kind)
        self._state, verified = self._programs.verify(self._state, proposed)
        chunks = []
        while self._in_flight:  # a mask follows all tokens before
            chunks += self._read(self._in_flight.popleft())
        drafts, seen_s = np.asarray(proposed.draft_token_ids), time.perf_counter()
        masks, counts = self._masks(held, drafts, widths)
        chunks += self._stuck(held)
        if verified.logits.is_ready():  # type: ignore[attr-defined]
            self.times.gap_s += time.perf_counter() - seen_s
        cost = self._table.cost(self._scheduler.num_active) or 0.0
        self._state, result = self._programs.accept_and_commit(
            self._state, proposed, verified, cost, masks, counts, kind
        )
        self._in_flight.append(_InFlight(action, result, held, sent_s, kind.num_drafts))
        return chunks

    def _masks(
        self, held: Sequence[Handle | None], drafts: np.ndarray, widths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Make the masks of a step's rows; return them, and how many drafts of each slot may count."""
        masks = all_allowed(len(held), drafts.shape[1] + 1, self.target.vocab_size)
        wanted: dict[Vocabulary, dict[int, tuple[Matcher, Sequence[int]]]] = {}
        for slot, handle in enumerate(held):
            if handle is None or handle.matcher is None or handle not in self._alive:
                continue
            size = handle.matcher.compiled.vocabulary.size
            verified = itertools.takewhile(range(size).__contains__, drafts[slot, : widths[slot]].tolist())
            rows = wanted.setdefault(handle.matcher.compiled.vocabulary, {})
            rows[slot] = handle.matcher, tuple(verified)
        counts = np.full((len(held),), drafts.shape[1], np.int32)
        for vocabulary, rows in wanted.items():
            for slot, count in self._fill(masks, vocabulary, rows, held).items():
                if count < len(rows[slot][1]):
                    counts[slot] = count
        return masks, counts

    def _fill(
        self,
        masks: np.ndarray,
        vocabulary: Vocabulary,
        rows: Mapping[int, tuple[Matcher, Sequence[int]]],
        held: Sequence[Handle | None],
    ) -> dict[int, int]:
        """Fill in the masks of rows as peagle.engine.masks.fill does, within the budget of each request.

        One row is measured by itself. Several are filled in together, in threads; after a step in which that took too
        long, one after the other, so that the one that is slow is known.
        """
        budget, counts = self.config.mask_budget_s, dict[int, int]()
        if len(rows) > 1 and not self._masks_were_slow:
            began = self._wall_s()
            counts = fill(masks, vocabulary, rows)
            self._masks_were_slow = self._wall_s() - began > budget
        else:
            self._masks_were_slow = False
            for slot, row in rows.items():
                began = self._cpu_s()
                counts |= fill(masks, vocabulary, {slot: row})
                self._masks_were_slow |= self._is_slow(held[slot], row, self._cpu_s() - began)
        for slot, (matcher, _) in rows.items():
            if matcher.limited and (handle := held[slot]) is not None:
                self._renew(handle, matcher, handle.output_ids)
                counts |= fill(masks, vocabulary, {slot: (matcher, ())})
        return counts

    def _is_slow(self, handle: Handle | None, row: tuple[Matcher, Sequence[int]], seconds: float) -> bool:
        """Count a request's masks if they took too long, and let it draft no more; return whether they did."""
        (matcher, drafts), budget = row, self.config.mask_budget_s
        assert handle is not None
        if seconds <= budget:
            matcher.num_slow = 0
            return False
        handle.paused = True
        matcher.num_slow += not drafts
        if matcher.num_slow >= self.config.most_slow_masks:
            matcher.overdue = (
                f"the masks of its {matcher.compiled.grammar.name} took more than {budget * 1e3:g} ms in "
                f"{matcher.num_slow} steps in a row, the last time {seconds * 1e3:.0f} ms, and other requests wait for "
                "them; expected a simpler one: count less, or nest less"
            )
        return True

    def _renew(self, handle: Handle, matcher: Matcher, token_ids: Sequence[int]) -> None:
        """Give a request's grammar an automaton of its own; drafts, which would fill that, too, end."""
        matcher.renew(token_ids)
        handle.paused = True

    def _stuck(self, held: Sequence[Handle | None]) -> Chunks:
        """End the requests whose grammar cannot be followed any further; return their last chunks."""
        chunks = []
        for handle in held:
            if (
                handle is not None
                and handle in self._alive
                and handle.matcher is not None
                and (failure := handle.matcher.failure)
            ):
                self._end(handle, "error", GrammarError(f"{handle.request.name}: {failure}"))
                chunks.append((handle, handle.inbox.pop()))
        return chunks

    def _admit(self, handle: Handle, slot: int) -> jax.Array:
        """Insert the lane's sequence into a slot; a prefill engine only chooses its first token."""
        assert self._lane is not None
        vocab_size, drafts = self.target.vocab_size, not handle.paused
        masks = None
        if handle.matcher is not None and handle.hand_off is None:
            masks = next_mask(handle.matcher)
            if handle.matcher.limited:
                self._renew(handle, handle.matcher, handle.output_ids)
                masks = next_mask(handle.matcher)
        params = SlotParams.of(handle.request, handle.stop_token_ids, vocab_size, drafts, masks)
        if handle.hand_off is not None:
            assert self._state is not None
            handle.hand_off, pending_token = None, handle.output_ids[-1]
            params = params.continued(handle.output_ids)
            self._state, result = self._programs.resume(self._state, self._lane, pending_token, slot, params)
            return result
        assert self._lane_logits is not None
        if self._state is None:
            return self._programs.first_token(self._lane, self._lane_logits, params)
        self._state, result = self._programs.admit(self._state, self._lane, self._lane_logits, slot, params)
        return result

    def _begin(self, handle: Handle) -> int:
        """Decide whether a request drafts at all, and load the lane with the longest known beginning of its prompt.

        Returns the length of that. A request does not draft if the table says so for its temperature, or for full slots
        while more requests wait than there are slots, or if its own K is 0.
        """
        num_waiting = self._scheduler.num_waiting + self.num_queued
        crowded = num_waiting > self.config.slots and self._table.at(self.config.slots) == 0
        plain = handle.request.num_speculative_tokens == 0
        if self.config.role == "prefill":
            crowded = False  # nobody waits for a slot here
        handle.paused = plain or crowded or not (self._table.sampled or handle.request.sampling.greedy)
        if handle.hand_off is not None:
            assert self._lane is not None
            handle.paused |= not handle.hand_off.drafts
            self._lane = handoff.put(self._programs, self._lane, handle.hand_off)
            return len(handle.request.prompt_ids)
        if self._prefix_cache is None:
            return 0
        found = self._prefix_cache.match(handle.request.prompt_ids)
        if found is None:
            return 0
        self._load_lane(found.blocks, found.snapshot, handle.request.prompt_ids[: found.length])
        handle.num_cached_tokens = found.length
        return found.length

    def _load_lane(self, blocks: Sequence[Any], snapshot: Any, token_ids: tuple[int, ...]) -> None:
        """Load the lane with these tokens, whose blocks, and snapshot, the prefix cache held."""
        assert self._lane is not None
        self._lane = self._programs.put_blocks(self._lane, blocks)
        if not self._begins_anywhere:
            self._lane = self._programs.put_snapshot(self._lane, snapshot, len(token_ids))
        elif learns_from_tokens(self._lane):
            self._lane = self._programs.relearn(self._lane, token_ids)

    def _remember(self, token_ids: tuple[int, ...], whole: int) -> None:
        """Keep the lane, which holds these tokens, unless the whole sequence will not fit."""
        if self._prefix_cache is None:
            return
        lane, programs = self._lane, self._programs
        assert lane is not None
        self._prefix_cache.insert(
            token_ids,
            lambda start: programs.cut_block(lane, start),
            lambda: programs.cut_snapshot(lane, len(token_ids)),
            whole,
        )

    def _remember_turn(self, handle: Handle, slot: int, last: StepRecord) -> None:
        """Keep a request that has ended, but for the tokens of its last step: a next turn may begin with it.

        The lane is used for this, so nothing is kept while it holds a prompt. A row that ended with plain steps has a
        drafter that lags behind, so it is not kept either.
        """
        if self._prefix_cache is None or not self._scheduler.lane_free:
            return
        if handle.paused or (self.drafter is not None and not last.draft_token_ids):
            return
        if handle.num_received:  # a layer that was a ring where it comes from may lack the rows of its first blocks
            return
        assert self._state is not None
        assert self._lane is not None
        self._lane = self._programs.extract(self._state, self._lane, slot)
        token_ids = (*handle.request.prompt_ids, *handle.output_ids)[: last.length + 1]
        self._remember(token_ids, len(token_ids))

    def _next_widths(self, cut: bool = False) -> tuple[np.ndarray, StepKind]:
        """Return (the drafts of each slot, the kind of step that runs them).

        cut: of a cut step. In others, slots with a grammar stand still.
        """
        held = self._scheduler.held
        drafts = self._table.at(self._scheduler.num_active)
        rows = [0 if handle is None or handle.paused else handle.request.drafts(drafts) for handle in held]
        if cut:
            return np.asarray(rows, np.int32), self._kind(self._program_for(max(rows)), sampled=True, full=True)
        still = [handle is not None and handle.matcher is not None for handle in held]
        rows = [-1 if stands else row for stands, row in zip(still, rows, strict=True)]
        going = [handle for handle, stands in zip(held, still, strict=True) if handle is not None and not stands]
        sampled = any(not handle.request.sampling.greedy for handle in going)
        full = any(handle.request.full for handle in going)
        kind = self._kind(self._program_for(max(0, *rows)), sampled, full)
        lean = self.drafter is not None and all(handle.paused for handle in going)
        return np.asarray(rows, np.int32), dataclasses.replace(kind, lean=True) if lean else kind

    def _program_for(self, most: int) -> int:
        """Choose the smallest compiled number of drafts that is at least `most`."""
        return min((each for each in self._possible_drafts if each >= most), default=most) if most else 0

    def _catch_up(self, count: int, kind: StepKind) -> None:
        """Let the drafter absorb its input before it drafts, if that exceeds one step's rows."""
        assert self._state is not None
        most = kind.num_drafts + 1
        if kind.num_drafts and self._input_rows > most:
            self._state = self._programs.absorb(self._state)
        if kind.num_drafts:
            self._input_rows = most
        elif not kind.lean:  # which keep nothing for it
            self._input_rows += count

    def _read(self, sent: _InFlight) -> Chunks:
        """Wait for a dispatch and return its chunks."""
        values = np.asarray(sent.result) if not isinstance(sent.action, Chunk) else None
        if values is None:
            jax.block_until_ready(sent.result)
        now = time.perf_counter()
        self._update_costs(sent, now)
        if isinstance(sent.action, Chunk):
            return []
        if isinstance(sent.action, Admit):
            assert values is not None
            handle = sent.action.key
            if handle not in self._alive or handle.num_received:
                return []
            if values[0] == NO_TOKEN:
                return [(handle, self._not_finite(handle, "target", self.target, (), ()))]
            tokens = (int(values[0]),)
            logprobs = _logprobs(LogProbs.unpack(values[None, 1:]), tokens, handle.request.logprobs)
            return [(handle, self._chunk(handle, tokens, now, (), logprobs))]
        assert values is not None
        return self._read_steps(StepOutput.unpack(values, sent.num_drafts), sent, now)

    def _read_steps(self, output: StepOutput, sent: _InFlight, now: float) -> Chunks:
        """Make a chunk of the steps of each slot."""
        found = []
        for slot, handle in enumerate(sent.held):
            if handle is None or handle not in self._alive:
                continue
            token_ids: list[int] = []
            logprobs: list[TokenLogprobs] = []
            records: list[StepRecord] = []
            not_finite: tuple[Part, object] | None = None  # which model
            for index in np.flatnonzero(output.num_accepted[:, slot] >= 0).tolist():
                accepted, verified = int(output.num_accepted[index, slot]), int(output.num_verified[index, slot])
                tokens = output.token_ids[index, slot].tolist()
                drafts = tuple(output.draft_token_ids[index, slot, :verified].tolist())
                emitted = tokens[: int(output.count[index, slot])]
                if NO_TOKEN in emitted or NO_TOKEN in drafts:
                    not_finite = ("target", self.target) if NO_TOKEN in emitted else ("drafter", self.drafter)
                    token_ids += tokens[:accepted]
                    break
                records.append(StepRecord(handle.length, drafts, accepted, tokens[accepted]))
                token_ids += emitted
                if output.log_probs is not None:
                    logprobs += _logprobs(output.log_probs.at(index, slot), emitted, handle.request.logprobs)
                handle.length += accepted + 1
                handle.paused |= bool(output.paused[index, slot])
            if not_finite is not None:
                found.append((handle, self._not_finite(handle, *not_finite, tuple(token_ids), tuple(records))))
            elif records:
                found.append((handle, self._chunk(handle, tuple(token_ids), now, tuple(records), logprobs)))
                if handle.finished is not None:
                    self._remember_turn(handle, slot, records[-1])
        return found

    def _not_finite(
        self,
        handle: Handle,
        part: Part,
        model: object,
        token_ids: tuple[int, ...],
        records: tuple[StepRecord, ...],
    ) -> TokenChunk:
        """End a request whose logits are not finite; return its last chunk, of these tokens.

        A diagnostic pass over the tokens names the first output of the model that is not finite.
        """
        tokens = [*handle.request.prompt_ids, *handle.output_ids, *token_ids]
        seen = (
            f"the {part}'s logits for token {len(tokens) - len(handle.request.prompt_ids)} of the answer to "
            f"{handle.request.name} are not finite"
        )
        if isinstance(model, Explains):
            where = self._programs.first_not_finite(part, tokens)
            seen += f"; the first output that is not is that of {where}" if where else ", but are in a second pass"
        todo = "expected finite ones: check the weights, or try --dtype float32 or --kernels xla"
        self._end(handle, "error", InputError(f"{seen}; {todo}"))
        return dataclasses.replace(handle.inbox.pop(), token_ids=token_ids, steps=records)

    def _chunk(
        self,
        handle: Handle,
        token_ids: tuple[int, ...],
        now: float,
        records: tuple[StepRecord, ...],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> TokenChunk:
        """Make the chunk of these tokens; end the request after a stop token or at its budget."""
        handle.output_ids += token_ids
        reason: FinishReason | None = None
        if token_ids and token_ids[-1] in handle.stop_token_ids:
            reason = "stop"
        elif len(handle.output_ids) >= handle.request.max_new_tokens:
            reason = "length"
        elif self.config.role == "prefill":
            assert self._lane is not None
            handle.hand_off, reason = self._pack(handle, self._lane), "handed_off"
        if reason is not None:
            handle.finished = reason
            self._alive.discard(handle)
            self._scheduler.remove(handle)
        if handle.matcher is not None and reason != "length":
            handle.matcher.read(token_ids if reason is None else token_ids[:-1])
            if reason == "stop" and handle.matcher.limited:
                self._renew(handle, handle.matcher, handle.output_ids[:-1])
            if reason == "stop" and (failure := handle.matcher.failure):
                handle.error, reason = GrammarError(f"{handle.request.name}: {failure}"), "error"
                handle.finished = reason
        cached, error = 0 if records else handle.num_cached_tokens, None if handle.error is None else str(handle.error)
        return TokenChunk(handle.request, token_ids, now, records, reason, tuple(logprobs), cached, error)

    def _end(self, handle: Handle, reason: FinishReason, error: InputError | None = None) -> None:
        """End a request before its last token; its slot is frozen before the next dispatch."""
        self._alive.discard(handle)
        slot = self._scheduler.remove(handle)
        if slot is not None:
            self._to_freeze.add(slot)
        handle.end(reason, error)

    def _update_costs(self, sent: _InFlight, now: float) -> None:
        """Record the time of a chunk or a step, since the end of the previous dispatch."""
        begun_s = max(sent.sent_s, self._last_read_s or 0.0)
        self._last_read_s = now
        self.times.busy_s += now - begun_s
        if isinstance(sent.action, Chunk):
            self._costs = dataclasses.replace(self._costs, chunk_s=now - begun_s)
        elif isinstance(sent.action, Steps) and sent.action.cut:
            self._costs = dataclasses.replace(self._costs, cut_s=now - begun_s)
        elif isinstance(sent.action, Steps):
            self._costs = dataclasses.replace(self._costs, step_s=(now - begun_s) / sent.action.count)

    def _see_gap(self, now: float) -> None:
        """Count the time in which the device may have waited for the dispatch sent now."""
        last = self._in_flight[-1] if self._in_flight else None
        if last is not None and not last.result.is_ready():  # type: ignore[attr-defined]
            return
        seen = [self._last_read_s] if self._last_read_s is not None else []
        seen += [last.sent_s] if last is not None else []
        if seen:
            self.times.gap_s += now - max(seen)

    def raise_failure(self) -> None:
        """Raise EngineError if the engine has failed."""
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {' '.join(str(self._failure).split())}") from self._failure


def _logprobs(found: LogProbs, token_ids: Sequence[int], num_best: int | None) -> list[TokenLogprobs]:
    """Convert log-probabilities of tokens with the num_best likeliest each; None: no entries."""
    if num_best is None:
        return []
    chosen, best, ids = (np.asarray(leaf).tolist() for leaf in (found.chosen, found.best, found.best_ids))
    return [
        TokenLogprobs(token, chosen[place], tuple(zip(ids[place], best[place], strict=True))[:num_best])
        for place, token in enumerate(token_ids)
    ]
