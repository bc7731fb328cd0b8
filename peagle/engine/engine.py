"""Decode many requests at once: the double-buffered loop between the host and the device.

Schedule, dispatch, collect: the host sends dispatch n + 1 before it reads dispatch n. A dispatch is a chunk of prompts
or some steps. It returns a few integers per request, which are copied while the device works, and it carries the map
from its rows to requests as it was when sent. So tokens that were computed after a request ended are dropped.

    device | chunk, first tokens | steps 0            | steps 1             | steps 2 ...
    host   | dispatch ...        | read first, send 1 | read 0, dispatch 2  | read 1 ...

Every request has pages for its keys and values (peagle.engine.kv_memory). Before a dispatch it is given those that the
dispatch may fill. If there are too few, the request that came last is preempted: its pages go, and later it is computed
again from its tokens, which are those that were emitted.

If a request has a grammar, its steps are cut in two (`_cut_step`): the host computes the token masks from the drafts
while the target verifies them. Uncut steps of the other requests alternate with cut ones (peagle.engine.scheduler).

    device | propose | verify                              | accept | propose | verify
    host   | dispatch, read what was sent before, masks, dispatch | dispatch ...

`add`, `abort`, `run`, `follow` and `warm_up` are thread-safe: a thread that waits for tokens drives the loop for all
requests.
"""

import abc
import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from peagle.config import EngineConfig
from peagle.engine import handoff
from peagle.engine.collect import Collector
from peagle.engine.constrained import Constrained
from peagle.engine.executor import Executor, Shape, chunk_plan, step_plan
from peagle.engine.grammar import GrammarError, Matcher
from peagle.engine.handle import Chunks, EngineError, Handle, LoopTimes
from peagle.engine.handoff import Fingerprints, HandOff
from peagle.engine.kv_memory import KVMemory, PageUse, PrefixCacheUse
from peagle.engine.request import Request, TokenChunk
from peagle.engine.scheduler import Chunk, Costs, Scheduler, Steps
from peagle.engine.state import SlotParams
from peagle.engine.step import StepKind
from peagle.engine.warmup import Measuring, WarmUp
from peagle.engine.widths import WidthTable
from peagle.ops import interrupt, native
from peagle.ops.attention import PAGE_SIZE
from peagle.ops.errors import InputError
from peagle.ops.memory import tree_bytes
from peagle.protocols import Drafter, OverDevices, PrefillsAtOnce, Target


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


@dataclass(frozen=True)
class InFlight:
    """A dispatch that was sent and not yet read.

    held: the request of each row of its result. has_values: the result holds tokens. ahead: the most rows that it adds
    to each request. count: its steps.
    """

    action: Chunk[Handle] | Steps
    result: jax.Array
    held: tuple[Handle | None, ...]
    sent_s: float
    has_values: bool
    num_drafts: int = 0
    ahead: int = 0
    count: int = 1


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

    @property
    @abc.abstractmethod
    def page_use(self) -> PageUse:
        """The pages of keys and values, and how many of them requests hold."""

    @property
    @abc.abstractmethod
    def num_preemptions(self) -> int:
        """How many times a request lost its pages to an earlier one, and was computed again."""

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
        """Compute the bytes of (keys and values, the state of slots, logits of a step); allocate none.

        They are those of one device. Devices of a CPU share one memory, so theirs are counted together. A target over
        several devices cuts its pages; each of them has all else.
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
    num_preemptions: int = 0

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EngineConfig,
        stop_token_ids: Sequence[int] = (),
        fingerprints: Fingerprints = Fingerprints(),  # noqa: B008  # frozen
        make_executor: Callable[[Target, Drafter | None, Shape], Executor] = Executor,
    ) -> None:
        """stop_token_ids end requests that set none of their own. fingerprints: of the models, for hand-offs.

        make_executor: another one runs the same verbs on other processes, too (peagle.engine.remote).
        Raises InputError for K > 0 without a drafter, and for memory that holds no request.
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
        self.memory = KVMemory(target, self.drafter, config)
        shape = Shape(
            config.slots,
            config.capacity,
            config.num_speculative_tokens,
            config.steps_per_dispatch,
            self.memory.num_pages,
            self.memory.widths,
            None if config.blocked is None else config.blocked.rows(config.capacity),
        )
        self.executor = make_executor(target, self.drafter, shape)
        self._learns = self.drafter is not None and not self.drafter.cache_groups
        self._scheduler: Scheduler[Handle] = Scheduler(config.slots, config.pass_shapes, config.steps_per_dispatch)
        self.constrained = Constrained(target.vocab_size, config.mask_budget_s, config.most_slow_masks)
        self._collector = Collector(self)
        self._warm_up = WarmUp(self)
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._unread = 0  # dispatches that are left in flight by `receive`
        self._alive: set[Handle] = set()
        self._chunks: Chunks = []  # read while pages were made free, not delivered yet
        self.num_queued = 0  # requests that wait for this engine elsewhere (peagle.engine.replicas)
        self._costs = Costs()
        self._failure: BaseException | None = None
        self._last_read_s: float | None = None

    # --- the interface ----------------------------------------------------------------------------------------------

    def check(self, request: Request, hand_off: HandOff | None = None) -> None:
        """See `AnyEngine.check`."""
        if hand_off is not None:
            if self.config.role == "prefill":
                raise InputError("this engine only prefills; send the hand-off to one that decodes")
            handoff.check(self.executor, self.memory, hand_off, self.config.capacity, self.fingerprints)
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
            self._alive.add(handle)
            self._queue(handle)

    def _queue(self, handle: Handle, first: bool = False) -> None:
        """Put a request in the queue, to be computed up to its pending token, if it has one."""
        length = len(_computed(handle))
        self._scheduler.add(handle, length, constrained=handle.matcher is not None, first=first)

    def hand_over(self, handle: Handle) -> HandOff:
        """End a request that decodes; return what another engine goes on with. Its last chunks are in its inbox.

        Only the thread that drives the loop may call it. Raises InputError for a request that does not decode.
        """
        with self._lock:
            self.raise_failure()
            for other, chunk in self._read_all():
                other.inbox.append(chunk)
            slots = self._slots
            if handle not in self._alive or handle not in slots:
                raise InputError(f"{handle.request.name} is not being decoded; expected a request that has a slot")
            if self.drafter is not None and not handle.paused:
                self.executor.absorb(self._plan([(slots[handle], handle)], [0]))
            handle.hand_off = self.pack(handle)
            self.end(handle, "handed_off")
            return handle.hand_off

    def pack(self, handle: Handle) -> HandOff:
        """Make the message of a request, of which all dispatches have been read."""
        assert handle.table is not None
        drafts = self.drafter is not None and not handle.paused
        return handoff.pack(
            self.executor, self.memory, handle.table, tuple(handle.token_ids), self.fingerprints, drafts
        )

    @property
    def busy(self) -> bool:
        """See `AnyEngine.busy`."""
        return bool(self._alive)

    @property
    def decoding(self) -> list[tuple[int, Handle]]:
        """Slots whose requests take steps, with these."""
        return self._scheduler.decoding

    @property
    def _slots(self) -> dict[Handle, int]:
        """The slot of each request that takes steps."""
        return {handle: slot for slot, handle in self._scheduler.decoding}

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._alive)

    @property
    def num_free(self) -> int:
        """Slots that no request has or waits for."""
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
            if not self._alive:
                self._in_flight.clear()
                self._last_read_s = None  # until the next request, an idle device is no gap
                self.executor.settle()

    def warm_up(
        self,
        sampled: bool = False,
        measuring: Measuring = lambda *_: None,
        full: bool = False,
        constrained: bool = False,
        measure: bool = True,
    ) -> None:
        """See `AnyEngine.warm_up`. measure=False: another engine's costs of drafting will hold (`widths`)."""
        with self._entry, self._lock:
            self._end_aborted()
            if self._alive:
                return
            started = time.perf_counter()
            self.start()
            compiled = self._warm_up.compile(sampled, full, constrained)
            self.compile_s += time.perf_counter() - started if compiled else 0.0
            measures = measure and self.config.adaptive and self._table.costs is None
            if measures:
                self._table = self._table.paying(self._warm_up.measure_costs(measuring))
            if compiled or measures:
                self.times, self._last_read_s = LoopTimes(), None

    def start(self) -> None:
        """Make the state and the pages, if that has not happened."""
        if not self.executor.started:
            self.executor.start()

    @property
    def prefix_cache_use(self) -> PrefixCacheUse | None:
        """See `AnyEngine.prefix_cache_use`."""
        return self.memory.use

    @property
    def page_use(self) -> PageUse:
        """See `AnyEngine.page_use`."""
        return self.memory.page_use

    def num_known(self, token_ids: Sequence[int]) -> int:
        """Count the first tokens of a prompt that are in pages already."""
        return self.memory.num_known(token_ids, self.drafter is not None)

    @property
    def widths(self) -> WidthTable:
        """See `AnyEngine.widths`."""
        return self._table

    @widths.setter
    def widths(self, table: WidthTable) -> None:
        self._table = table

    @functools.cached_property
    def possible_drafts(self) -> tuple[int, ...]:
        """The numbers of drafts of the step programs that this engine may run, ascending."""
        k, table = self.config.num_speculative_tokens, self.config.table.drafts.values()
        drafts = {k}
        if k and (self.config.k_per_request or self.drafting_lapses):
            drafts.add(0)
        if self.config.programs_by_width:
            drafts |= {min(number, k) for number in table}
        return tuple(sorted(drafts))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of batches of steps, ascending; the last has a row for every slot.

        The native kernels skip rows of no slot, so that fewer sizes do, which take less time to compile.
        """
        factor = 8 if native.available() else 2
        sizes = [1]
        while sizes[-1] * factor < self.config.slots:
            sizes.append(sizes[-1] * factor)
        return tuple(sorted({*sizes, self.config.slots}))

    @property
    def drafting_lapses(self) -> bool:
        """Whether a row that may draft again takes plain steps, at some load."""
        table = self.config.table
        return self.config.adaptive or 0 in table.drafts.values() or not table.sampled

    def kind(self, num_drafts: int, sampled: bool, full: bool = False) -> StepKind:
        """Choose the kind of steps of this engine."""
        config, sampled = self.config, sampled or full
        if not num_drafts:
            return StepKind(0, sampled, full)
        draws, rate = config.draft_sampling and sampled, config.synthetic_acceptance
        return StepKind(num_drafts, sampled, full, draws, rate, goes_on=config.adaptive)

    def program_for(self, most: int) -> int:
        """Choose the smallest compiled number of drafts that is at least `most`."""
        return min((number for number in self.possible_drafts if number >= most), default=most) if most else 0

    @contextlib.contextmanager
    def launching_alone(self) -> Iterator[bool]:
        """Let a GPU launch each operation of a step by itself: of a CUDA graph a profiler does not see which is which.

        Yields whether steps compile anew, at their first dispatch. On a CPU this changes nothing.
        """
        self.executor.launches_alone = jax.default_backend() == "gpu"
        try:
            yield self.executor.launches_alone
        finally:
            self.executor.launches_alone = False

    def programs(self, sampled: bool = False) -> list[jax.stages.Compiled]:
        """Compile the step programs that requests may run once more, for inspection."""
        state, plan = self.executor.shapes, self.empty_plan(self.config.slots)
        prepared = [
            self.executor.prepared_steps(state, plan, 0.0, 1, self.kind(drafts, sampled))
            for drafts in self.possible_drafts
        ]
        return [program.lower(*operands).compile() for program, operands in prepared]

    def memory_bytes(self) -> tuple[int, int, int]:
        """See `AnyEngine.memory_bytes`."""
        config, together = self.config, 1
        if isinstance(self.target, OverDevices) and jax.default_backend() == "cpu":
            together = self.target.local_ranks
        state = tree_bytes(self.executor.shapes) - sum(self.memory.num_bytes)
        rows = config.slots * (config.num_speculative_tokens + 1)
        return self.memory.num_local_bytes, together * state, together * rows * self.target.vocab_size * 4

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
        self.start()
        self._end_aborted()
        now = time.perf_counter()
        for handle in [h for h in self._alive if h.deadline_s is not None and now >= h.deadline_s]:
            self.end(handle, "timeout")
        interrupt.check()
        action = self._scheduler.next(self._costs, self._begin)
        chunks: Chunks = []
        if isinstance(action, Chunk):
            self._prefill(action)
        elif isinstance(action, Steps) and action.cut:
            chunks = self._cut_step(action)
        elif isinstance(action, Steps):
            self._steps(action)
        elif not self._in_flight:
            self._last_read_s = None  # no request is left, so an idle device is no gap
        # read a first token at once if no other request can keep the device busy, or if it is handed over
        alone = self._scheduler.num_active == 1 or self.config.role == "prefill"
        alone = isinstance(action, Chunk) and action.pieces[0].last and alone
        self._unread = 0 if action is None or alone else 1
        chunks, self._chunks = self._chunks + chunks, []
        return chunks

    def _receive(self) -> Chunks:
        chunks: Chunks = []
        while len(self._in_flight) > self._unread:
            chunks += self._read(self._in_flight.popleft())
        if self.idle:
            self._last_read_s = None  # until the next request, an idle device is no gap
        return chunks

    def _read(self, sent: "InFlight") -> Chunks:
        """Wait for a dispatch and return its chunks."""
        values = np.asarray(sent.result) if sent.has_values else None
        if values is None:
            jax.block_until_ready(sent.result)
        now = time.perf_counter()
        self._update_costs(sent, now)
        for handle in sent.held:
            if handle is not None:
                handle.ahead -= sent.ahead
        return [] if values is None else self._collector.read(sent, values, now)

    def _read_all(self) -> Chunks:
        """Read all dispatches that are in flight."""
        chunks: Chunks = []
        while self._in_flight:
            chunks += self._read(self._in_flight.popleft())
        return chunks

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _begin(self, handle: Handle) -> int | None:
        """Give a request pages with what is known of its tokens; return how many of these it begins with.

        None: there are not enough pages yet for all its tokens and its first steps. A request does not draft if the
        table says so for its temperature, or for full slots while more requests wait than there are slots, or if its
        own K is 0.
        """
        token_ids = _computed(handle)
        if not handle.num_preempted:
            num_waiting = self._scheduler.num_waiting - 1 + self.num_queued
            crowded = num_waiting > self.config.slots and self._table.at(self.config.slots) == 0
            plain = handle.request.num_speculative_tokens == 0
            if self.config.role == "prefill":
                crowded = False  # its requests are decoded elsewhere
            handle.paused = plain or crowded or not (self._table.sampled or handle.request.sampling.greedy)
        if handle.hand_off is not None:
            handle.paused |= not handle.hand_off.drafts
        drafts = self.drafter is not None and (not handle.paused or self._prefills_for_all(token_ids))
        table = self.memory.open(token_ids if handle.hand_off is None else (), drafts)
        promised = sum(
            max(0, self.memory.missing(other.table, len(_computed(other))))
            for other in self._scheduler.prefilling
            if other.table is not None
        )
        wanted = min(len(token_ids) + self.memory.ahead * max(1, handle.num_preempted), self._most_tokens(handle))
        if self.memory.missing(table, wanted) + promised > self.memory.available():
            self.memory.pool.close(table)
            return None
        handle.table, handle.ahead, handle.input_rows = table, 0, 1
        handle.drafter_rows = known = table.num_cached_tokens
        if handle.hand_off is not None:
            reserved = self.memory.pool.reserve(table, len(token_ids))
            assert reserved, "pages that were counted"
            handoff.put(self.executor, self.memory, table, handle.hand_off)
            handle.hand_off, known = None, len(token_ids)
            handle.drafter_rows = known
        if not (handle.output_ids or handle.num_preempted):
            handle.num_cached_tokens = known
            self.memory.pool.count_lookup(table, len(token_ids))
        return known

    def _prefills_for_all(self, token_ids: Sequence[int]) -> bool:
        """Whether the drafter reads the tokens of a request that does not draft: others may begin with these.

        Not if the target knows more of them than the drafter.
        """
        if not self.config.prefix_cache_bytes:
            return False
        return self.memory.num_known(token_ids, drafts=True) >= self.memory.num_known(token_ids, drafts=False)

    def _most_tokens(self, handle: Handle) -> int:
        """Count the positions that a request ever writes."""
        request = handle.request
        return len(request.prompt_ids) + request.max_new_tokens + self.config.num_speculative_tokens

    def _prefill(self, action: Chunk[Handle]) -> None:
        """Compute pieces of prompts in one pass, and let those that are complete into their slots."""
        sent_s = time.perf_counter()
        self._see_gap(sent_s)
        pieces = [piece for piece in action.pieces if self._reserve(piece.key, piece.begin + piece.count)]
        pieces = [piece for piece in pieces if piece.key.table is not None]  # another may have taken its pages
        if not pieces:
            return
        size, length = action.shape
        tables = np.full((size, sum(self.memory.widths)), -1, np.int32)
        token_ids, begin = [], []
        for row, piece in enumerate(pieces):
            first = max(piece.begin - 1, 0)
            begin.append(first)
            token_ids.append(_computed(piece.key)[first : piece.begin + piece.count])
            assert piece.key.table is not None
            tables[row] = self.memory.row(piece.key.table)
        plan = chunk_plan(token_ids, begin, [int(piece.begin > 0) for piece in pieces], length, tables)
        drafts = self.drafter is not None and any(self._keeps_rows(piece.key) for piece in pieces)
        result = self.executor.prefill(plan, drafts)
        for piece in pieces:
            self._computed_to(piece.key, piece.begin + piece.count)
        ended = [(row, piece.key) for row, piece in enumerate(pieces) if piece.last]
        held: tuple[Handle | None, ...] = ()
        if ended:
            result, held = self._admit(ended, size), tuple(handle for _, handle in ended)
        self._in_flight.append(InFlight(action, result, held, sent_s, has_values=bool(ended)))

    def _keeps_rows(self, handle: Handle) -> bool:
        """Whether a request has pages of the drafter."""
        assert handle.table is not None
        return len(handle.table.groups) > self.memory.num_target

    def _computed_to(self, handle: Handle, end: int) -> None:
        """Publish the pages of a prompt that is computed so far. Later dispatches read them after they are written."""
        assert handle.table is not None
        if self._keeps_rows(handle):
            handle.drafter_rows = max(handle.drafter_rows, end)
        self._publish(handle, _computed(handle)[:end], end, ends=True)

    def _publish(self, handle: Handle, token_ids: Sequence[int], length: int, ends: bool) -> None:
        assert handle.table is not None
        known = not handle.num_received  # a hand-off has the rows that windows reach, whatever these layers keep
        self.memory.publish(handle.table, token_ids, length, handle.drafter_rows, ends, known)

    def _admit(self, ended: Sequence[tuple[int, Handle]], size: int) -> jax.Array:
        """Let requests whose prompts are complete into their slots; return their first tokens, packed."""
        slots = self._slots
        params, known, lengths = [], np.full((size,), -1, np.int32), np.ones((size,), np.int32)
        into = np.full((size,), self.config.slots, np.int32)
        for row, (_, handle) in enumerate(ended):
            handle.length, into[row] = len(_computed(handle)), slots[handle]
            lengths[row] = handle.length
            masks = None if handle.output_ids else self.constrained.first(handle)
            drafts = not handle.paused
            made = SlotParams.of(handle.request, handle.stop_token_ids, self.target.vocab_size, drafts, masks)
            if handle.output_ids:
                known[row] = handle.output_ids[-1]
                made = made.continued(handle.output_ids, None if handle.paused else handle.credit)
            params.append(made)
        first = self.executor.admit([row for row, _ in ended], into, lengths, known, params)
        if self._learns:
            for _, handle in ended:
                self.executor.learn(slots[handle], _computed(handle))
        return first

    # --- steps ------------------------------------------------------------------------------------------------------

    def _steps(self, action: Steps) -> None:
        """Send steps of all requests that decode, but those with a grammar."""
        sent_s = time.perf_counter()
        self._see_gap(sent_s)
        rows, widths, kind = self._next_widths(cut=False)
        count = self._reserve_steps(rows, action.count, kind.num_drafts)
        rows, widths, kind = self._next_widths(cut=False)  # without those that lost their pages
        if not rows:
            return
        plan = self._plan(rows, widths)
        self._catch_up(rows, widths, count, kind)
        cost = self._table.cost(len(self._scheduler.decoding)) or 0.0
        result = self.executor.steps(plan, cost, count, kind)
        ahead = count * (kind.num_drafts + 1)
        self._sent(action, result, rows, plan, sent_s, kind.num_drafts, ahead, count)

    def _sent(
        self,
        action: Steps,
        result: jax.Array,
        rows: Sequence[tuple[int, Handle]],
        plan: np.ndarray,
        sent_s: float,
        num_drafts: int,
        ahead: int,
        count: int,
    ) -> None:
        for _, handle in rows:
            handle.ahead += ahead
        held = self._held_by_row(rows, len(plan))
        self._in_flight.append(InFlight(action, result, held, sent_s, True, num_drafts, ahead, count))

    def _next_widths(self, cut: bool) -> tuple[list[tuple[int, Handle]], list[int], StepKind]:
        """Return (slots with the requests of a pass, the drafts of each, the kind of steps that run them).

        cut: of a cut step. In others, slots with a grammar stand still.
        """
        drafts = self._table.at(self._scheduler.num_active)
        rows = [(slot, handle) for slot, handle in self._scheduler.decoding if cut or handle.matcher is None]
        widths = [0 if handle.paused else handle.request.drafts(drafts) for _, handle in rows]
        number = self.program_for(max(widths, default=0))
        if cut:
            return rows, widths, self.kind(number, sampled=True, full=True)
        sampled = any(not handle.request.sampling.greedy for _, handle in rows)
        full = any(handle.request.full for _, handle in rows)
        kind = self.kind(number, sampled, full)
        lean = self.drafter is not None and not number and all(handle.paused for _, handle in rows)
        return rows, widths, dataclasses.replace(kind, lean=True) if lean else kind

    def _size_for(self, count: int) -> int:
        """Choose the smallest size of a batch for so many rows."""
        return next(size for size in self.sizes if size >= count)

    def _places(self, rows: Sequence[tuple[int, Handle]], size: int) -> list[int]:
        """Return the row of the batch of each request: its slot, if the batch has a row for every slot."""
        return [slot for slot, _ in rows] if size == self.config.slots else list(range(len(rows)))

    def _held_by_row(self, rows: Sequence[tuple[int, Handle]], size: int) -> tuple[Handle | None, ...]:
        """Return the request of each row of a batch."""
        held: list[Handle | None] = [None] * size
        for row, (_, handle) in zip(self._places(rows, size), rows, strict=True):
            held[row] = handle
        return tuple(held)

    def _plan(self, rows: Sequence[tuple[int, Handle]], widths: Sequence[int]) -> np.ndarray:
        """Write the plan of a pass over the slots of these requests."""
        size = self._size_for(len(rows))
        plan = self.empty_plan(size)
        for row, (slot, handle), width in zip(self._places(rows, size), rows, widths, strict=True):
            assert handle.table is not None
            plan[row, :2] = slot, width
            plan[row, 2:] = self.memory.row(handle.table)
        return plan

    def empty_plan(self, size: int) -> np.ndarray:
        """Write the plan of a pass over no slot."""
        return step_plan((), (), np.full((size, sum(self.memory.widths)), -1, np.int32), self.config.slots)

    def _catch_up(self, rows: Sequence[tuple[int, Handle]], widths: Sequence[int], count: int, kind: StepKind) -> None:
        """Let the drafter absorb its input before it drafts, if that exceeds one step's rows."""
        most = kind.num_drafts + 1
        if kind.num_drafts and any(handle.input_rows > most for _, handle in rows if not handle.paused):
            self.executor.absorb(self._plan(rows, widths))
        for _, handle in rows:
            if kind.num_drafts:
                handle.input_rows = most
            elif not kind.lean:  # which keep nothing for it
                handle.input_rows += count

    def _cut_step(self, action: Steps) -> Chunks:
        """Run a step of all requests, with masks for those that have a grammar; return the chunks read meanwhile."""
        sent_s = time.perf_counter()
        self._see_gap(sent_s)
        rows, widths, kind = self._next_widths(cut=True)
        self._reserve_steps(rows, 1, kind.num_drafts)
        rows, widths, kind = self._next_widths(cut=True)
        if not rows:
            return []
        plan = self._plan(rows, widths)
        self._catch_up(rows, widths, 1, kind)
        proposed = self.executor.propose(plan, kind)
        verified = self.executor.verify(plan)
        chunks = self._read_all()  # a mask follows all tokens before
        drafts, seen_s = np.asarray(proposed), time.perf_counter()
        masks, counts = self.constrained.masks(self._held_by_row(rows, len(plan)), drafts, plan[:, 1].tolist())
        chunks += self._stuck(rows)
        if verified.is_ready():  # type: ignore[attr-defined]
            self.times.gap_s += time.perf_counter() - seen_s
        cost = self._table.cost(self._scheduler.num_active) or 0.0
        result = self.executor.accept_and_commit(plan, cost, masks, counts, kind)
        self._sent(action, result, rows, plan, sent_s, kind.num_drafts, kind.num_drafts + 1, 1)
        return chunks

    def _stuck(self, rows: Sequence[tuple[int, Handle]]) -> Chunks:
        """End the requests whose grammar cannot be followed any further; return their last chunks."""
        chunks = []
        for _, handle in rows:
            matcher = handle.matcher
            if handle in self._alive and matcher is not None and (failure := matcher.failure):
                self.end(handle, "error", GrammarError(f"{handle.request.name}: {failure}"))
                chunks.append((handle, handle.inbox.pop()))
        return chunks

    # --- pages ------------------------------------------------------------------------------------------------------

    def _reserve_steps(self, rows: Sequence[tuple[int, Handle]], count: int, num_drafts: int) -> int:
        """Give requests the pages that a dispatch of steps may fill; return how many steps it may have.

        If there are too few, it has one step, and then requests are preempted, the latest first.
        """
        k = self.config.num_speculative_tokens

        def wanted(handle: Handle, steps: int) -> int:
            ahead = handle.ahead + steps * (num_drafts + 1) + k
            return min(handle.length + ahead, self._most_tokens(handle))

        for steps in (count, 1):
            if all(self._gets(handle, wanted(handle, steps)) for _, handle in rows):
                return steps
        for _, handle in sorted(rows, key=lambda row: row[1].number):
            if handle.table is not None:
                self._reserve(handle, wanted(handle, 1))
        return 1

    def _gets(self, handle: Handle, num_tokens: int) -> bool:
        return handle.table is not None and self.memory.pool.reserve(handle.table, num_tokens)

    def _reserve(self, handle: Handle, num_tokens: int) -> bool:
        """Give a request pages for its first tokens, those of later requests if need be; return whether it has them.

        If it is the latest itself, it is preempted.
        """
        while handle.table is not None and not self._gets(handle, num_tokens):
            self._chunks += self._read_all()  # what a dispatch in flight ended, or emitted, is known first
            if handle.table is None or self._gets(handle, num_tokens):
                break
            self._preempt(
                max((other for other in self._alive if other.table is not None), key=lambda other: other.number)
            )
        return handle.table is not None

    def _preempt(self, handle: Handle) -> None:
        """Take the pages of a request, of which all dispatches have been read, and queue it before all others."""
        slots = self._slots
        if handle in slots and self.drafter is not None:
            handle.credit = self.executor.credit(slots[handle])
        self._scheduler.remove(handle)
        self._close(handle)
        handle.num_preempted += 1
        self.num_preemptions += 1
        self._queue(handle, first=True)

    def _close(self, handle: Handle) -> None:
        """Give a request's pages back; those that are known stay until others need them."""
        if handle.table is not None:
            self.memory.pool.close(handle.table)
            handle.table = None

    def read_to(self, handle: Handle, ends: bool) -> None:
        """Publish a request's pages as far as the host has read. ends: it emits no more."""
        if handle.table is None:
            return
        whole = handle.length // PAGE_SIZE
        if ends or whole != handle.num_published:
            handle.num_published = whole
            self._publish(handle, handle.token_ids, handle.length, ends)

    def leave(self, handle: Handle) -> None:
        """Drop a request that has ended."""
        self._alive.discard(handle)
        self._scheduler.remove(handle)
        self._close(handle)

    def end(self, handle: Handle, reason: Any, error: InputError | None = None) -> None:
        """End a request before its last token."""
        self.leave(handle)
        handle.end(reason, error)

    def _end_aborted(self) -> None:
        """See `AnyEngine._end_aborted`."""
        while self._to_abort:
            handle = self._to_abort.popleft()
            if handle in self._alive:
                self.end(handle, "aborted")

    def is_alive(self, handle: Handle) -> bool:
        """Whether a request has not ended here."""
        return handle in self._alive

    # --- times ------------------------------------------------------------------------------------------------------

    def _update_costs(self, sent: "InFlight", now: float) -> None:
        """Record the time of a chunk or a step, since the end of the previous dispatch."""
        begun_s = max(sent.sent_s, self._last_read_s or 0.0)
        self._last_read_s = now
        self.times.busy_s += now - begun_s
        if isinstance(sent.action, Chunk):
            self._costs = dataclasses.replace(self._costs, chunk_s=now - begun_s)
        elif sent.action.cut:
            self._costs = dataclasses.replace(self._costs, cut_s=now - begun_s)
        else:
            self._costs = dataclasses.replace(self._costs, step_s=(now - begun_s) / sent.count)

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


def _computed(handle: Handle) -> Sequence[int]:
    """Return the tokens that are in pages before a request takes steps: all but the pending one."""
    if not handle.output_ids:
        return handle.request.prompt_ids
    return (*handle.request.prompt_ids, *handle.output_ids[:-1])
