"""Decode many requests at once: schedule, execute, collect.

The host sends dispatch n + 1 before it reads dispatch n. A dispatch is a chunk of prompts or some steps. It returns a
few integers per request, copied while the device works. It carries its own map from rows to requests, so tokens that
were computed after a request ended are dropped.

    device | chunk, first tokens | steps 0            | steps 1             | steps 2 ...
    host   | dispatch ...        | read first, send 1 | read 0, dispatch 2  | read 1 ...

Before a dispatch, requests get the pages that it may fill (peagle.engine.host.request_pages). If there are too few, the
latest request is preempted: it loses its pages and is later recomputed from the tokens that it has emitted.

If a request has a grammar, its steps are split in two (`_split_step`): the host computes the token masks from the
drafts while the target verifies them. Whole steps of the other requests alternate with split ones
(peagle.engine.host.scheduler).

    device | propose | verify                              | accept | propose | verify
    host   | dispatch, read what was sent before, masks, dispatch | dispatch ...
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from peagle.engine.auto.widths import CostTable, Counts
from peagle.engine.grammar import GrammarError
from peagle.engine.host import handoff
from peagle.engine.host.admission import Admission
from peagle.engine.host.collect import Collector, InFlight
from peagle.engine.host.constrained import Constrained
from peagle.engine.host.executor import Executor
from peagle.engine.host.handle import Chunks, EngineError, Handle
from peagle.engine.host.handoff import Fingerprints, HandOff
from peagle.engine.host.loop import AnyEngine, Measuring
from peagle.engine.host.programs import ProgramShape
from peagle.engine.host.request_pages import RequestPages
from peagle.engine.host.scheduler import Chunk, Scheduler, Steps
from peagle.engine.host.step_batches import StepBatch, StepBatches
from peagle.engine.host.timing import LoopClock, LoopTimes
from peagle.engine.host.warmup import WarmUp
from peagle.engine.memory.kv_memory import KVMemory, PageUse, PrefixCacheUse
from peagle.engine.request import Drafting, FinishReason, Request
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.state import SlotParams
from peagle.ops import interrupt
from peagle.ops.errors import InputError
from peagle.ops.memory import tree_bytes
from peagle.protocols import Drafter, Target


class Engine(AnyEngine):
    """Decode requests with a target and a drafter; drafter None decodes plainly."""

    compile_s: float = 0.0
    costs: CostTable | None = None  # of adaptive steps, once measured
    num_preemptions: int = 0

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: ResolvedConfig,
        stop_token_ids: Sequence[int] = (),
        fingerprints: Fingerprints = Fingerprints(),  # noqa: B008  # frozen
        make_executor: Callable[[Target, Drafter | None, ProgramShape, Drafter | None], Executor] = Executor,
        lookup: Drafter | None = None,
    ) -> None:
        """Make an engine. `start` allocates its state and pages.

        stop_token_ids end requests that set none of their own. fingerprints: of the models, for hand-offs. lookup: a
        drafter without caches, which drafts in adaptive steps, too. make_executor: of a target over several processes
        (peagle.engine.devices.remote). Raises InputError for K > 0 without a drafter, and for memory that holds no
        request.
        """
        if config.num_drafts and drafter is None:
            raise InputError("there is no drafter to speculate with; load one, or decode with K = 0")
        super().__init__(config, stop_token_ids)
        self.target, self.drafter = target, drafter if config.num_drafts else None
        self.fingerprints = fingerprints
        self.memory = KVMemory(target, self.drafter, config)
        shape = ProgramShape(
            config.slots,
            config.context,
            num_drafts=config.num_drafts,
            most_steps=config.steps_per_dispatch,
            num_pages=self.memory.num_pages,
            table_widths=self.memory.table_widths,
            num_target_groups=self.memory.num_target_groups,
            adaptive=config.adaptive,
            counts=config.counts,
        )
        self.executor = make_executor(target, self.drafter, shape, lookup if config.adaptive else None)
        self.batches, self.pages = StepBatches(config, self.memory), RequestPages(self.memory)
        self.constrained = Constrained(target.vocab_size, config)
        self.num_queued = 0  # this engine's share of the requests that wait for any replica
        self._scheduler: Scheduler[Handle] = Scheduler(config.slots, config.pass_shapes, config.steps_per_dispatch)
        self._admission, self._collector, self._warm_up = Admission(self), Collector(self), WarmUp(self)
        self._clock = LoopClock()
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._unread = 0  # dispatches that `receive` leaves in flight
        self._alive: set[Handle] = set()
        self._chunks: Chunks = []  # read while pages were freed, not yet returned
        self._failure: BaseException | None = None

    # --- requests ---------------------------------------------------------------------------------------------------

    def check(self, request: Request, hand_off: HandOff | None = None) -> None:
        self._admission.check(request, hand_off)

    def add(self, request: Request, timeout_s: float | None = None, hand_off: HandOff | None = None) -> Handle:
        handle = self.prepare(request, timeout_s, hand_off)
        self.enter(handle)
        return handle

    def prepare(self, request: Request, timeout_s: float | None = None, hand_off: HandOff | None = None) -> Handle:
        """Make the handle of a request without queueing it. Raises InputError as `add` does."""
        return self._admission.handle(request, timeout_s, hand_off)

    def enter(self, handle: Handle) -> None:
        """Put a prepared request in the queue. Raises EngineError if the engine has failed."""
        with self._entry, self._lock:
            self.raise_failure()
            self._alive.add(handle)
            self._queue(handle)

    def _queue(self, handle: Handle, first: bool = False) -> None:
        constrained = handle.matcher is not None
        self._scheduler.add(handle, len(handle.computed_ids), constrained=constrained, first=first)

    def hand_over(self, handle: Handle) -> HandOff:
        """End a decoding request; return what another engine needs to continue it. Its last chunks go to its inbox.

        Only the thread that drives the loop may call it. Raises InputError for a request that does not decode.
        """
        with self._lock:
            self.raise_failure()
            for other, chunk in self._read_all():
                other.inbox.append(chunk)
            slots = self._slots
            if handle not in self._alive or handle not in slots:
                raise InputError(f"{handle.request.name} is not being decoded; expected a request that has a slot")
            if self._has_all_rows(handle):
                self.executor.absorb(self.batches.plan([(slots[handle], handle)], [0]))
            handle.hand_off = self.pack(handle)
            self.finish(handle, "handed_off")
            return handle.hand_off

    def pack(self, handle: Handle) -> HandOff:
        """Make the hand-off of a request after all its dispatches have been read."""
        assert handle.table is not None
        tokens, with_drafter = tuple(handle.token_ids), self._has_all_rows(handle)
        return handoff.pack(self.executor, self.memory, handle.table, tokens, self.fingerprints, with_drafter)

    def _has_all_rows(self, handle: Handle) -> bool:
        """Whether the drafter's pages and its input hold all rows of a request."""
        return self.drafter is not None and handle.drafting is Drafting.ALWAYS

    def finish(self, handle: Handle, reason: FinishReason, error: InputError | None = None) -> None:
        """Remove a request, and add its last chunk, without tokens, to its inbox."""
        self.remove(handle)
        handle.finish(reason, error)

    def remove(self, handle: Handle) -> None:
        """Remove a request from its slot, and free its pages."""
        self._alive.discard(handle)
        self._scheduler.remove(handle)
        self.pages.free(handle)

    def is_alive(self, handle: Handle) -> bool:
        return handle in self._alive

    def _finish_aborted(self) -> None:
        while self._to_abort:
            handle = self._to_abort.popleft()
            if handle in self._alive:
                self.finish(handle, "aborted")

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {' '.join(str(self._failure).split())}") from self._failure

    # --- programs and memory ------------------------------------------------------------------------------------------

    def warm_up(
        self,
        sampled: bool = False,
        measuring: Measuring = lambda *_: None,
        full_logits: bool = False,
        constrained: bool = False,
        alone: bool = False,
        measure: bool = True,
    ) -> None:
        """See `AnyEngine.warm_up`. measure=False: use another engine's `costs`."""
        needs = sampled, full_logits, constrained, alone
        with self._entry, self._lock:
            self._finish_aborted()
            if self._alive:
                return
            measures = measure and self.config.adaptive and self.costs is None
            if measures:
                self.costs = self._warm_up.stored_costs()
            compiled = self._compile(*needs)
            if measures and self.costs is None:
                self.costs = self._warm_up.costs(measuring)
                compiled |= self._compile(*needs)
            if compiled or measures:
                self._clock.reset()

    def _compile(self, *needs: bool) -> bool:
        """Compile the programs of a warm-up; return whether some were new."""
        started = time.perf_counter()
        self.start()
        compiled = self._warm_up.compile(*needs)
        self.compile_s += time.perf_counter() - started if compiled else 0.0
        return compiled

    def count_acceptance(self, requests: Sequence[Request]) -> Counts:
        """Decode requests, verify every draft, and count accepted ones by confidence (peagle.engine.auto.widths).

        For an adaptive engine without other requests. Afterwards its steps start from the recorded counts again.
        """
        costs, self.costs = self.costs, None
        try:
            self.start()
            self.executor.relearn(blank=True)
            for _ in self.generate(requests):
                pass
            self.settle()
            return self.executor.counts()
        finally:
            self.costs = costs
            self.executor.relearn()

    def start(self) -> None:
        """Allocate the state and the pages, once."""
        if not self.executor.started:
            self.executor.start()

    def settle(self) -> None:
        with self._lock:
            self._finish_aborted()
            if not self._alive:
                self._in_flight.clear()
                self._clock.stop()
                self.executor.settle()

    @contextlib.contextmanager
    def launching_alone(self) -> Iterator[bool]:
        """Launch a step's operations one by one: in a CUDA graph a profiler cannot tell them apart.

        Yields whether steps compile anew at their first dispatch: False on a CPU, where this changes nothing.
        """
        self.executor.launches_alone = jax.default_backend() == "gpu"
        try:
            yield self.executor.launches_alone
        finally:
            self.executor.launches_alone = False

    def programs(self, sampled: bool = False) -> list[jax.stages.Compiled]:
        """Compile the step programs once more, for inspection."""
        state, plan = self.executor.shapes, self.batches.empty_plan(self.config.slots)
        prepared = [
            self.executor.prepared_steps(state, plan, kind.no_costs(len(plan)), 1, kind)
            for kind in (self.batches.kind(drafts, sampled) for drafts in self.batches.program_drafts)
        ]
        return [program.lower(*operands).compile() for program, operands in prepared]

    def memory_bytes(self) -> tuple[int, int, int]:
        config, copies = self.config, self.memory.num_sharing
        state = tree_bytes(self.executor.shapes) - sum(self.memory.num_bytes)
        logits = config.slots * (config.num_drafts + 1) * self.target.vocab_size * 4
        return self.memory.num_local_bytes, copies * state, copies * logits

    @property
    def one(self) -> "Engine":
        return self

    @property
    def times(self) -> LoopTimes:
        return self._clock.times

    @property
    def prefix_cache_use(self) -> PrefixCacheUse | None:
        return self.memory.prefix_cache_use

    @property
    def page_use(self) -> PageUse:
        return self.memory.page_use

    def num_known(self, token_ids: Sequence[int]) -> int:
        """Count the leading tokens of a prompt that are in cached pages."""
        return self.memory.num_known(token_ids, self.drafter is not None)

    @property
    def busy(self) -> bool:
        return bool(self._alive)

    @property
    def idle(self) -> bool:
        return not (self._alive or self._in_flight)

    @property
    def decoding(self) -> list[tuple[int, Handle]]:
        """(slot, request) of the requests that take steps."""
        return self._scheduler.decoding

    @property
    def _slots(self) -> dict[Handle, int]:
        return {handle: slot for slot, handle in self._scheduler.decoding}

    @property
    def num_open(self) -> int:
        """Requests that have a slot or wait for one."""
        return len(self._alive)

    # --- the loop: schedule, execute, collect -----------------------------------------------------------------------

    def _step(self) -> Chunks:
        return self._guarded(self._send) + self._guarded(self._receive)

    def send(self) -> Chunks:
        """Run the first half of a step: send the next dispatch. Waits for the device only in a split step.

        For the driver of several engines, which alternates `send` and `receive`. Raises as `step` does.
        """
        with self._lock:
            return self._guarded(self._send)

    def receive(self) -> Chunks:
        """Run the second half of a step: wait for the dispatch before the last one, and read it."""
        with self._lock:
            return self._guarded(self._receive)

    @property
    def ready(self) -> bool:
        """Whether `receive` would return at once."""
        with self._lock:
            awaited = list(self._in_flight)[: max(len(self._in_flight) - self._unread, 0)]
        return all(sent.ready for sent in awaited)

    def _guarded(self, half: Callable[[], Chunks]) -> Chunks:
        self.raise_failure()
        try:
            return half()
        except Exception as error:
            self._failure = error
            raise EngineError(f"the engine failed: {' '.join(str(error).split())}") from error

    def _send(self) -> Chunks:
        self.start()
        self._finish_aborted()
        now = time.perf_counter()
        for handle in [h for h in self._alive if h.deadline_s is not None and now >= h.deadline_s]:
            self.finish(handle, "timeout")
        interrupt.check()
        action = self._scheduler.next(self._clock.latest, self._begin)
        chunks: Chunks = []
        if isinstance(action, Chunk):
            self._prefill(action)
        elif isinstance(action, Steps) and action.split:
            chunks = self._split_step(action)
        elif isinstance(action, Steps):
            self._whole_steps(action)
        elif not self._in_flight:
            self._clock.stop()
        # read a first token at once if no other request keeps the device busy, or if the request is handed over
        completes = isinstance(action, Chunk) and action.pieces[0].last
        at_once = completes and (self._scheduler.num_active == 1 or self.config.role == "prefill")
        self._unread = 0 if action is None or at_once else 1
        chunks, self._chunks = self._chunks + chunks, []
        return chunks

    def _receive(self) -> Chunks:
        chunks = self._read_all(but=self._unread)
        if self.idle:
            self._clock.stop()
        return chunks

    def _read_all(self, but: int = 0) -> Chunks:
        """Read the dispatches in flight, in order, except the last `but`; return their chunks."""
        chunks: Chunks = []
        while len(self._in_flight) > but:
            chunks += self._read(self._in_flight.popleft())
        return chunks

    def _read(self, sent: InFlight) -> Chunks:
        if not sent.requests:  # a chunk that completed no prompt
            jax.block_until_ready(sent.result)
            self._clock.read(sent, time.perf_counter())
            return []
        values, now = np.asarray(sent.result), time.perf_counter()
        self._clock.read(sent, now)
        for handle in sent.requests:
            if handle is not None:
                handle.rows_in_flight -= sent.most_tokens
        return self._collector.read(sent, values, now)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _begin(self, handle: Handle) -> int | None:
        """Give a request its pages; return how many of its tokens they hold, or None if pages are short."""
        if not handle.num_preempted:
            received = handle.hand_off is None or handle.hand_off.with_drafter
            handle.drafting = Drafting.ALWAYS if received and self._may_ever_draft(handle) else Drafting.NEVER
        elif handle.drafting is Drafting.LOOKUP_ONLY:
            handle.drafting = Drafting.ALWAYS  # the drafter reads all of its rows once more
        if not self.pages.open(handle, self._scheduler.prefilling):
            return None
        assert handle.table is not None
        token_ids, known = handle.computed_ids, handle.table.num_cached_tokens
        handle.rows_in_flight = 0
        if handle.hand_off is not None:
            handoff.put(self.executor, self.memory, handle.table, handle.hand_off)
            handle.hand_off, handle.drafter_rows, known = None, len(token_ids), len(token_ids)
        if not (handle.output_ids or handle.num_preempted):
            handle.queued_s = time.perf_counter() - handle.added_s
            handle.num_cached_tokens = known
            self.memory.pool.count_lookup(handle.table, len(token_ids))
        return known

    def _may_ever_draft(self, handle: Handle) -> bool:
        """Whether a request that begins now may draft at all.

        Not if its own K is 0, or if more requests wait than there are slots and drafting gains nothing with all slots
        active. A prefill engine does not know the load of the decode engine, so it leaves the choice to it.
        """
        num_waiting = self._scheduler.num_waiting - 1 + self.num_queued
        crowded = num_waiting > self.config.slots and not self._can_gain(self.config.slots)
        return handle.request.num_speculative_tokens != 0 and (not crowded or self.config.role == "prefill")

    def _prefill(self, action: Chunk[Handle]) -> None:
        """Compute pieces of prompts in one pass, and admit the completed ones to their slots."""
        sent_s = self._sending()
        pieces = [piece for piece in action.pieces if self._reserve(piece.key, piece.begin + piece.count)]
        pieces = [piece for piece in pieces if piece.key.table is not None]  # a preempted request has no table
        if not pieces:
            return
        with_drafter = any(self.pages.has_drafter_pages(piece.key) for piece in pieces)
        result = self.executor.prefill(self.batches.chunk_plan(pieces, action.shape), with_drafter)
        for piece in pieces:
            self.pages.publish_prompt(piece.key, piece.begin + piece.count)
        complete = [(row, piece.key) for row, piece in enumerate(pieces) if piece.last]
        if complete:
            result = self._admit(complete, action.shape[0])
        requests = tuple(handle for _, handle in complete)
        self._in_flight.append(InFlight(action, result, requests, sent_s))

    def _admit(self, complete: Sequence[tuple[int, Handle]], size: int) -> jax.Array:
        """Admit requests with complete prompts to their slots; return their first tokens, packed."""
        slots = self._slots
        params, known, lengths = [], np.full((size,), -1, np.int32), np.ones((size,), np.int32)
        into = np.full((size,), self.config.slots, np.int32)
        for row, (_, handle) in enumerate(complete):
            handle.length, into[row] = len(handle.computed_ids), slots[handle]
            lengths[row] = handle.length
            masks = None if handle.output_ids else self.constrained.first(handle)
            slot = SlotParams.of(handle.request, handle.stop_token_ids, self.target.vocab_size, handle.drafting, masks)
            if handle.output_ids:
                known[row] = handle.output_ids[-1]
                slot = slot.continued(handle.output_ids)
            params.append(slot)
        first = self.executor.admit([row for row, _ in complete], into, lengths, known, params)
        if self.executor.reads_tokens:
            for _, handle in complete:
                self.executor.read_tokens(slots[handle], handle.computed_ids)
        return first

    # --- steps ------------------------------------------------------------------------------------------------------

    def _whole_steps(self, action: Steps) -> None:
        """Send steps of all decoding requests without a grammar."""
        sent_s = self._sending()
        if (batch := self._next_batch(action)) is None:
            return
        plan = self.batches.plan(batch.rows, batch.widths)
        result = self.executor.steps(plan, self._step_costs(batch, len(plan)), batch.count, batch.kind)
        self._sent(action, result, batch, self.batches.by_row(batch.rows, len(plan)), sent_s)

    def _split_step(self, action: Steps) -> Chunks:
        """Run one step of all requests, with masks for those with a grammar; return the chunks read meanwhile."""
        sent_s = self._sending()
        if (batch := self._next_batch(action)) is None:
            return []
        plan = self.batches.plan(batch.rows, batch.widths)
        if batch.kind.adaptive:  # after whole steps the drafter may lag
            self.executor.absorb(plan)
        costs = self._step_costs(batch, len(plan))
        proposed = self.executor.propose(plan, costs, batch.kind)
        verified = self.executor.verify(plan)
        chunks = self._read_all()  # a mask depends on all tokens before it
        drafts, read_s = np.asarray(proposed), time.perf_counter()
        requests = self.batches.by_row(batch.rows, len(plan))
        masks, counts = self.constrained.masks(requests, drafts, plan[:, 1].tolist())
        chunks += self._finish_failed_grammars(batch)
        if verified.is_ready():  # type: ignore[attr-defined]
            self.times.gap_s += time.perf_counter() - read_s
        result = self.executor.accept_and_commit(plan, costs, masks, counts, batch.kind)
        self._sent(action, result, batch, requests, sent_s)
        return chunks

    def _sending(self) -> float:
        """Return the time of a dispatch, which ends the gap before it."""
        now = time.perf_counter()
        self._clock.sending(now, self._in_flight)
        return now

    def _next_batch(self, action: Steps) -> StepBatch | None:
        """Choose the next steps and reserve their pages; None if every request was preempted.

        If pages are short, the dispatch has one step. If they still are, the earliest requests get theirs, and the
        latest are preempted.
        """

        def choose(count: int) -> StepBatch:
            drafts = self.config.num_drafts if self._can_gain(self._scheduler.num_active) else 0
            return self.batches.choose(self._scheduler.decoding, drafts, action.split, count)

        batch = choose(action.count)
        for count in (action.count, 1):
            drafts = batch.kind.num_drafts
            lengths = [self.pages.length_after(handle, count, drafts) for _, handle in batch.rows]
            if all(self.pages.reserve(handle, most) for (_, handle), most in zip(batch.rows, lengths, strict=True)):
                return dataclasses.replace(batch, count=count) if batch.rows else None
        for _, handle in sorted(batch.rows, key=lambda row: row[1].number):
            if handle.table is not None:
                self._reserve(handle, self.pages.length_after(handle, 1, batch.kind.num_drafts))
        batch = choose(1)  # without the preempted requests
        return batch if batch.rows else None

    def _can_gain(self, num_active: int) -> bool:
        """Whether drafting can gain at this many active slots; True before costs are measured."""
        return self.costs is None or self.costs.can_gain(num_active, self.config.num_drafts)

    def _step_costs(self, batch: StepBatch, size: int) -> np.ndarray:
        """Return the packed costs of a batch's steps, empty unless they are adaptive."""
        if not batch.kind.adaptive or self.costs is None:
            return batch.kind.no_costs(size)
        return self.costs.packed(self._scheduler.num_active, size, batch.kind.num_drafts)

    def _sent(
        self,
        action: Steps,
        result: jax.Array,
        batch: StepBatch,
        requests: tuple[Handle | None, ...],
        sent_s: float,
    ) -> None:
        sent = InFlight(action, result, requests, sent_s, batch.kind.num_drafts, batch.count)
        for _, handle in batch.rows:
            handle.rows_in_flight += sent.most_tokens
        self._in_flight.append(sent)

    def _finish_failed_grammars(self, batch: StepBatch) -> Chunks:
        """End the requests whose grammar has failed; return their last chunks."""
        chunks = []
        for _, handle in batch.rows:
            matcher = handle.matcher
            if handle in self._alive and matcher is not None and (failure := matcher.failure):
                self.finish(handle, "error", GrammarError(f"{handle.request.name}: {failure}"))
                chunks.append((handle, handle.inbox.pop()))
        return chunks

    # --- pages ------------------------------------------------------------------------------------------------------

    def _reserve(self, handle: Handle, num_tokens: int) -> bool:
        """Reserve pages for a request's first tokens; return whether it has them.

        Preempts later requests if pages are short, and the request itself if it is the latest.
        """
        while handle.table is not None and not self.pages.reserve(handle, num_tokens):
            self._chunks += self._read_all()  # first read what dispatches in flight emitted or ended
            if handle.table is None or self.pages.reserve(handle, num_tokens):
                break
            holders = (other for other in self._alive if other.table is not None)
            self._preempt(max(holders, key=lambda other: other.number))
        return handle.table is not None

    def _preempt(self, handle: Handle) -> None:
        """Preempt a request after all its dispatches have been read: free its pages, queue it before all others."""
        self._scheduler.remove(handle)
        self.pages.free(handle)
        handle.num_preempted += 1
        self.num_preemptions += 1
        self._queue(handle, first=True)
