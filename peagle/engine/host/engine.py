"""Decode many requests at once: schedule, send, collect.

The host sends dispatch n + 1 before it reads dispatch n. A dispatch is a chunk of prompts or some steps. It returns a
few integers per request, copied while the device works. It carries its own map from rows to requests, so tokens that
were computed after a request ended are dropped.

    device | chunk, first tokens | steps 0            | steps 1             | steps 2 ...
    host   | dispatch ...        | read first, send 1 | read 0, dispatch 2  | read 1 ...

If a request has a grammar, its steps are masked (`_fill_masks`): the host computes the token masks from the drafts
while the target verifies them. Whole steps of the other requests alternate with masked ones
(peagle.engine.host.scheduler).

    device | propose | verify                              | accept | propose | verify
    host   | dispatch, read what was sent before, masks, dispatch | dispatch ...
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.memory import tree_bytes
from peagle.engine.auto.costs import CostTable
from peagle.engine.auto.measure import Measuring
from peagle.engine.grammar import GrammarError
from peagle.engine.host import collect, handoff
from peagle.engine.host.admission import Admission
from peagle.engine.host.constrained import first_mask, step_masks
from peagle.engine.host.executor import Executor, ModelName
from peagle.engine.host.handle import EngineError, Handle
from peagle.engine.host.handoff import Fingerprints, HandOff
from peagle.engine.host.in_flight import InFlight, LoopClock, LoopTimes
from peagle.engine.host.loop import EngineBase
from peagle.engine.host.request_pages import RequestPages
from peagle.engine.host.scheduler import Chunk, Scheduler, Steps
from peagle.engine.host.step_batches import StepBatch, StepBatches
from peagle.engine.host.warmup import Needs, WarmUp
from peagle.engine.memory.kv_memory import PageUse, PrefixCacheUse
from peagle.engine.request import Drafting, FinishReason, Request, TokenChunk
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.state import SlotParams
from peagle.protocols import Drafter, Target


class Engine(EngineBase):
    """Decode requests with a target and a drafter; drafter None decodes plainly."""

    compile_s: float = 0.0  # seconds of compilation
    costs: CostTable | None = None  # of adaptive steps, once measured
    num_preemptions: int = 0  # how often a request lost its pages to an earlier one, and was computed again

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: ResolvedConfig,
        stop_token_ids: Sequence[int] = (),
        fingerprints: Fingerprints = Fingerprints(),  # noqa: B008  # frozen
        make_executor: Callable[[Target, Drafter | None, ResolvedConfig, Drafter | None], Executor] = Executor,
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
        self.memory = RequestPages(target, self.drafter, config)
        lookup = lookup if config.adaptive else None
        self._looks_up = lookup is not None
        self.executor = make_executor(target, self.drafter, config, lookup)
        self.batches = StepBatches(config, self.memory)
        self.num_queued = 0  # this engine's share of the requests that wait for any replica
        self._scheduler: Scheduler[Handle] = Scheduler(config.slots, config.pass_shapes, config.steps_per_dispatch)
        check_hand_off = functools.partial(handoff.check, self.executor, self.memory, config.context, fingerprints)
        self.admission = Admission(config, target.vocab_size, self.stop_token_ids, check_hand_off)
        self._warm_up = WarmUp(self.executor, self.batches, fingerprints)
        self._clock = LoopClock()
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._unread = 0  # dispatches that stay in flight after a step
        self._alive: set[Handle] = set()
        self._failure: BaseException | None = None

    # --- the loop: schedule, send, collect --------------------------------------------------------------------------

    def step(self) -> None:
        with self._driving():
            action = self._schedule()
            self._send(action)
            self._collect(but=self._unread)  # the dispatch before: the device works while the host reads

    def step_in_turn(self) -> None:
        """Run a step without overlap: read each dispatch before the next one is scheduled. The tokens are the same."""
        with self._driving():
            self._send(self._schedule())
            self._collect()

    def send(self) -> None:
        """Run the first half of a step. Waits for the device only in a masked step.

        For the driver of several engines, which alternates `send` and `receive`. Raises as `step` does.
        """
        with self._driving():
            self._send(self._schedule())

    def receive(self) -> None:
        """Run the second half of a step: wait for the dispatch before the last one, and read it."""
        with self._driving():
            self._collect(but=self._unread)

    @property
    def ready(self) -> bool:
        """Whether `receive` would return at once."""
        with self._lock:
            awaited = list(self._in_flight)[: max(len(self._in_flight) - self._unread, 0)]
        return all(sent.ready for sent in awaited)

    @contextlib.contextmanager
    def _driving(self) -> Iterator[None]:
        """Hold the lock. After a failure the engine raises EngineError, now and at every later step."""
        with self._lock:
            self.raise_failure()
            try:
                yield
            except Exception as error:
                self._failure = error
                raise EngineError(f"the engine failed: {' '.join(str(error).split())}") from error

    def _schedule(self) -> Chunk[Handle] | Steps | None:
        """End requests that are aborted, then choose the next dispatch."""
        self.start()
        self._finish_aborted()
        interrupt.check()
        return self._scheduler.next(self._clock.latest, self._begin)

    def _send(self, action: Chunk[Handle] | Steps | None) -> None:
        if isinstance(action, Chunk):
            self._send_chunk(action)
        elif action is not None:
            self._send_steps(action)
        # read a first token at once if no other request keeps the device busy, or if the request is handed over
        completes = isinstance(action, Chunk) and action.pieces[0].last
        at_once = completes and (self._scheduler.num_active == 1 or self.config.prefill_only)
        self._unread = 0 if action is None or at_once else 1

    def _collect(self, but: int = 0) -> None:
        """Read the dispatches in flight, in order, except the last `but`; give the requests their chunks."""
        while len(self._in_flight) > but:
            sent = self._in_flight.popleft()
            values, now = sent.wait(), time.perf_counter()
            self._clock.read(sent, now)
            for handle in sent.requests:
                if handle is not None:
                    handle.rows_in_flight -= sent.most_tokens
            for emitted in collect.read(sent, values, now):
                self._emit(*emitted)
        if self.idle:
            self._clock.stop()

    def _emit(self, handle: Handle, chunk: TokenChunk, broken: ModelName | None) -> None:
        """Give a request its next chunk; after the last one, its slot and pages are free.

        broken: the model whose logits after the chunk are not finite.
        """
        if broken is not None:
            error = collect.not_finite(handle, chunk.token_ids, broken, self.executor)
            self._release(handle)
            self.memory.pool.free_cached()  # on XLA a row that is not finite spoils earlier rows of its pass
            handle.deliver(dataclasses.replace(chunk, finish_reason="error", logprobs=(), error=str(error)), error)
            return
        chunk, failed = collect.append(handle, chunk, self.config.prefill_only)
        if chunk.finish_reason == "handed_off":
            handle.hand_off = self._pack(handle)
        self.memory.publish_output(handle, ends=chunk.finish_reason is not None)
        if chunk.finish_reason is not None:
            self._release(handle)
        handle.deliver(chunk, failed)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _begin(self, handle: Handle) -> int | None:
        """Give a request its pages; return how many of its tokens they hold, or None if pages are short."""
        if not handle.num_preempted or handle.drafting is Drafting.LOOKUP_ONLY:  # its rows may be read again
            received = handle.hand_off is None or handle.hand_off.with_drafter
            handle.drafting = self._drafting_from_now(handle) if received else Drafting.NEVER
        if not self.memory.begin(handle, self._scheduler.prefilling):
            return None
        assert handle.table is not None
        num_tokens, known = len(handle.computed_ids), handle.table.num_cached_tokens
        handle.rows_in_flight = 0
        if handle.hand_off is not None:
            handoff.put(self.executor, self.memory, handle.table, handle.hand_off)
            handle.hand_off, handle.drafter_rows, known = None, num_tokens, num_tokens
        if not (handle.output_ids or handle.num_preempted):
            handle.queued_s = time.perf_counter() - handle.added_s
            handle.num_cached_tokens = known
            self.memory.pool.count_lookup(handle.table, num_tokens)
        return known

    def _drafting_from_now(self, handle: Handle) -> Drafting:
        """Choose how a request that begins now drafts.

        The drafter does not read its prompt if drafting by it gains nothing with as many slots active as requests now
        run and wait: after `INPUT_ROOM` tokens of plain steps it would never draft anyway. A prefill engine does not
        know the load of the decode engine, so it leaves the choice to it.
        """
        if handle.request.num_speculative_tokens == 0:
            return Drafting.NEVER
        load = self._scheduler.num_running + self._scheduler.num_waiting + self.num_queued
        num_active = min(load, self.config.slots)
        if self.config.prefill_only or self._can_gain(num_active, by_drafter=True):
            return Drafting.ALWAYS
        return Drafting.LOOKUP_ONLY if self._looks_up and self._can_gain(num_active) else Drafting.NEVER

    def _send_chunk(self, action: Chunk[Handle]) -> None:
        """Compute pieces of prompts in one pass, and admit the completed ones to their slots."""
        sent_s = self._sending()
        pieces = [piece for piece in action.pieces if self._reserve(piece.key, piece.begin + piece.count)]
        pieces = [piece for piece in pieces if piece.key.table is not None]  # a preempted request has no table
        if not pieces:
            return
        with_drafter = any(self.memory.has_drafter_pages(piece.key) for piece in pieces)
        result = self.executor.prefill(self.batches.chunk_plan(pieces, action.shape), with_drafter)
        for piece in pieces:
            self.memory.publish_prompt(piece.key, piece.begin + piece.count)
        complete = [(row, piece.key) for row, piece in enumerate(pieces) if piece.last]
        if complete:
            result = self._admit(complete, action.shape[0])
        requests = tuple(handle for _, handle in complete)
        self._in_flight.append(InFlight(None, result, requests, sent_s))

    def _admit(self, complete: Sequence[tuple[int, Handle]], size: int) -> jax.Array:
        """Admit the requests of a chunk's rows to their slots; return their first tokens, packed.

        size: most prompts of the chunk.
        """
        slots = {handle: slot for slot, handle in self.decoding}
        params, known, lengths = [], np.full((size,), -1, np.int32), np.ones((size,), np.int32)
        into = np.full((size,), self.config.slots, np.int32)
        for row, (_, handle) in enumerate(complete):
            handle.length, into[row] = len(handle.computed_ids), slots[handle]
            lengths[row] = handle.length
            masks = None if handle.output_ids else first_mask(handle)
            vocab_size = self.target.vocab_size
            slot = SlotParams.of(handle.request, handle.stop_token_ids, vocab_size, handle.drafting, masks)
            if handle.output_ids:
                known[row] = handle.output_ids[-1]
                slot = slot.continued(handle.output_ids)
            params.append(slot)
        first = self.executor.admit([row for row, _ in complete], into, lengths, known, params)
        if self.executor.reads_tokens:
            for _, handle in complete:
                if handle.drafting is not Drafting.NEVER:
                    self.executor.read_tokens(slots[handle], handle.computed_ids)
        return first

    # --- steps ------------------------------------------------------------------------------------------------------

    def _send_steps(self, action: Steps) -> None:
        """Send whole steps of all decoding requests without a grammar, or a masked step of all requests."""
        sent_s = self._sending()
        if (batch := self._next_batch(action)) is None:
            return
        plan = self.batches.plan(batch.rows, batch.widths)
        requests = self.batches.by_row(batch.rows, len(plan))
        if batch.kind.masked:
            fill = functools.partial(self._fill_masks, requests, plan[:, 1].tolist())
            result = self.executor.masked_step(plan, batch.kind, fill)
        else:
            costs = self.batches.costs(batch, len(plan), self.costs, self._scheduler.num_active)
            result = self.executor.steps(plan, costs, batch.count, batch.kind)
        sent = InFlight(batch, result, requests, sent_s)
        for _, handle in batch.rows:
            handle.rows_in_flight += sent.most_tokens
        self._in_flight.append(sent)

    def _fill_masks(
        self, requests: Sequence[Handle | None], widths: Sequence[int], proposed: jax.Array, verified: jax.Array
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill in the masks of a masked step while it verifies; read all dispatches before it meanwhile."""
        self._collect()  # a mask depends on all tokens before it
        drafts, read_s = np.asarray(proposed), time.perf_counter()
        masks, counts = step_masks(requests, drafts, widths, self.target.vocab_size)
        for handle in filter(None, requests):
            if handle.finished is None and handle.matcher is not None and (failure := handle.matcher.failure):
                self.finish(handle, "error", GrammarError(f"{handle.request.name}: {failure}"))
        if verified.is_ready():  # type: ignore[attr-defined]
            self.times.gap_s += time.perf_counter() - read_s
        return masks, counts

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
            return self.batches.choose(self._scheduler.decoding, drafts, action.masked, count)

        batch = choose(action.count)
        for count in (action.count, 1):
            if self.memory.reserve_steps([handle for _, handle in batch.rows], count, batch.kind.num_drafts):
                return dataclasses.replace(batch, count=count) if batch.rows else None
        for _, handle in sorted(batch.rows, key=lambda row: row[1].number):
            if handle.table is not None:
                self._reserve(handle, self.memory.length_after(handle, 1, batch.kind.num_drafts))
        batch = choose(1)  # without the preempted requests
        return batch if batch.rows else None

    def _can_gain(self, num_active: int, by_drafter: bool = False) -> bool:
        """Whether drafting can gain at this many active slots; True before costs are measured."""
        return self.costs is None or self.costs.can_gain(num_active, self.config.num_drafts, by_drafter)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _reserve(self, handle: Handle, num_tokens: int) -> bool:
        """Reserve pages for a request's first tokens; return whether it has them.

        Preempts later requests if pages are short, and the request itself if it is the latest.
        """
        while handle.table is not None and not self.memory.reserve(handle, num_tokens):
            self._collect()  # first read what dispatches in flight emitted or ended
            if handle.table is None or self.memory.reserve(handle, num_tokens):
                break
            holders = (other for other in self._alive if other.table is not None)
            self._preempt(max(holders, key=lambda other: other.number))
        return handle.table is not None

    def _preempt(self, handle: Handle) -> None:
        """Preempt a request after all its dispatches have been read: free its pages, queue it before all others."""
        self._scheduler.remove(handle)
        self.memory.free(handle)
        handle.num_preempted += 1
        self.num_preemptions += 1
        self._queue(handle, first=True)

    # --- requests ---------------------------------------------------------------------------------------------------

    def check(self, request: Request, hand_off: HandOff | None = None) -> None:
        self.admission.check(request, hand_off)

    def add(self, request: Request, hand_off: HandOff | None = None) -> Handle:
        handle = self.admission.handle(request, hand_off)
        self.enter(handle)
        return handle

    def enter(self, handle: Handle) -> None:
        """Put an admitted request in the queue. Raises EngineError if the engine has failed."""
        with self._entry, self._lock:
            self.raise_failure()
            self._alive.add(handle)
            self._queue(handle)

    def _queue(self, handle: Handle, first: bool = False) -> None:
        constrained = handle.matcher is not None
        self._scheduler.add(handle, len(handle.computed_ids), constrained=constrained, first=first)

    def _pack(self, handle: Handle) -> HandOff:
        """Make the hand-off of a request whose prompt has been computed."""
        assert handle.table is not None
        drafts = self.drafter is not None and handle.drafting is Drafting.ALWAYS
        with_drafter = drafts or self.memory.has_drafter_pages(handle)  # for later requests with these tokens
        table, tokens = handle.table, tuple(handle.token_ids)
        return handoff.pack(self.executor, self.memory, table, tokens, self.fingerprints, with_drafter)

    def finish(self, handle: Handle, reason: FinishReason, error: InputError | None = None) -> None:
        """End a request: its slot and pages are free, and its last chunk, without tokens, is in its inbox."""
        self._release(handle)
        handle.finish(reason, error)

    def _release(self, handle: Handle) -> None:
        self._alive.discard(handle)
        self._scheduler.remove(handle)
        self.memory.free(handle)

    def _finish_aborted(self) -> None:
        while self._to_abort:
            handle = self._to_abort.popleft()
            if handle in self._alive:
                self.finish(handle, "aborted")

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {' '.join(str(self._failure).split())}") from self._failure

    # --- programs and memory ------------------------------------------------------------------------------------------

    def prepare(self, needs: Needs, measuring: Measuring | None) -> None:
        with self._lock:
            if self.costs is not None or not self.config.adaptive:
                measuring = None
            if measuring is not None:
                self.costs = self._warm_up.stored_costs()
            compiled = self._compile(needs)
            if measuring is not None and self.costs is None:
                self.costs = self._warm_up.measured_costs(measuring)
                compiled |= self._compile(needs)
            if compiled or measuring is not None:
                self._clock.reset()

    def _compile(self, needs: Needs) -> bool:
        """Compile the programs of a warm-up; return whether some were new."""
        started = time.perf_counter()
        self.start()
        compiled = self._warm_up.compile(self.costs, needs)
        self.compile_s += time.perf_counter() - started if compiled else 0.0
        return compiled

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

    def memory_bytes(self) -> tuple[int, int, int]:
        """Compute the bytes of (keys and values, state of slots, logits of a step) on one device; allocate nothing.

        CPU devices share one memory, so theirs are added up. A target over several devices shards its pages; each
        device has a copy of the rest.
        """
        config, copies = self.config, self.memory.num_sharing
        state = tree_bytes(self.executor.shapes) - sum(self.memory.num_bytes)
        logits = config.slots * (config.num_drafts + 1) * self.target.vocab_size * 4
        return self.memory.num_local_bytes, copies * state, copies * logits

    @property
    def one(self) -> "Engine":
        """One engine on its own devices, to inspect and to measure: this one."""
        return self

    @property
    def times(self) -> LoopTimes:
        """Host overhead of the loop."""
        return self._clock.times

    @property
    def prefix_cache_use(self) -> PrefixCacheUse | None:
        """Hits and bytes of the prefix cache so far; None without one."""
        return self.memory.prefix_cache_use

    @property
    def page_use(self) -> PageUse:
        """The pages of keys and values, and how many of them requests hold."""
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
    def num_open(self) -> int:
        """Requests that have a slot or wait for one."""
        return len(self._alive)
