"""Several engines behind one queue: the same models on other devices, each with its share of the slots.

    requests -> | queue | -> engine 0, its slots and pages     devices 0 ..
                          -> engine 1, its slots and pages     the next ones

One program over all devices would compute each prompt on every device, and the steps of all slots would wait for each
chunk. Separate engines prefill different prompts at once, and none waits for another.

One thread drives them all. It sends each engine its next dispatch before it reads any, and reads ready results first.
So all devices work, however long a dispatch takes. Only a masked step makes the host wait for an engine's drafts.
Answers are those of one engine: no row depends on its slot or its neighbours.
"""

import collections
import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import TypeAlias

import jax

from peagle.base import interrupt
from peagle.engine.auto.costs import CostTable
from peagle.engine.auto.measure import Measuring
from peagle.engine.host.engine import Engine
from peagle.engine.host.handle import Handle
from peagle.engine.host.handoff import HandOff
from peagle.engine.host.in_flight import LoopTimes
from peagle.engine.host.loop import EngineBase
from peagle.engine.host.warmup import Needs
from peagle.engine.memory.kv_memory import PageUse, PrefixCacheUse
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig

POLL_S = 1e-4  # between two looks for ready results; short compared with a step
MOST_POLLING_S = 5e-3  # in one step, so that the driver can add requests for idle engines
STALLED_S = 60.0  # block on an engine after this long, so that the loop's watcher sees the stall


class Replicas(EngineBase):
    """Decode requests with several engines of equal models. They share the slots and bytes of `config`."""

    def __init__(self, engines: Sequence[Engine], config: ResolvedConfig) -> None:
        super().__init__(config, engines[0].stop_token_ids)
        self.engines = tuple(engines)
        self._waiting: collections.deque[Handle] = collections.deque()  # requests without an engine
        self._sent: dict[Engine, float] = {}  # engines whose dispatch is not read yet, and when it was sent

    @property
    def one(self) -> Engine:
        return self.engines[0]

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(engine.busy for engine in self.engines)

    def check(self, request: Request, hand_off: HandOff | None = None) -> None:
        self.one.check(request, hand_off)

    def add(self, request: Request, hand_off: HandOff | None = None) -> Handle:
        handle = self.one.admission.handle(request, hand_off)
        with self._entry, self._lock:
            for engine in self.engines:
                engine.raise_failure()
            self._waiting.append(handle)
        return handle

    def settle(self) -> None:
        with self._lock:
            self._finish_aborted()
            if not self.busy:
                self._sent.clear()
        for engine in self.engines:
            engine.settle()

    def prepare(self, needs: Needs, measuring: Measuring | None) -> None:
        """Let the engines compile at once, in as many threads as there are processors.

        Then one engine measures costs for all, while none compiles. Raises the first failure as soon as the running
        compilations have ended.
        """
        with concurrent.futures.ThreadPoolExecutor(min(len(self.engines), os.cpu_count() or 1)) as threads:
            begun = [threads.submit(engine.prepare, needs, None) for engine in self.engines]
            try:
                for future in concurrent.futures.as_completed(begun):
                    future.result()
            finally:
                threads.shutdown(cancel_futures=True)
        self.one.prepare(needs, measuring)
        for engine in self.engines:
            engine.costs = self.one.costs

    @property
    def compile_s(self) -> float:
        """Seconds of compilation, of the slowest engine: they compile at once."""
        return max(engine.compile_s for engine in self.engines)

    @property
    def times(self) -> LoopTimes:
        times = [engine.times for engine in self.engines]
        return LoopTimes(sum(time.gap_s for time in times), sum(time.busy_s for time in times))

    @property
    def costs(self) -> CostTable | None:
        """The costs by the active slots of one engine."""
        return self.one.costs

    @property
    def prefix_cache_use(self) -> PrefixCacheUse | None:
        uses = [use for engine in self.engines if (use := engine.prefix_cache_use) is not None]
        return PrefixCacheUse(*map(sum, zip(*map(dataclasses.astuple, uses), strict=True))) if uses else None

    @property
    def page_use(self) -> PageUse:
        uses = [engine.page_use for engine in self.engines]
        return PageUse(sum(use.num_pages for use in uses), sum(use.num_held for use in uses))

    @property
    def num_preemptions(self) -> int:
        return sum(engine.num_preemptions for engine in self.engines)

    def memory_bytes(self) -> tuple[int, int, int]:
        copies = len(self.engines) if jax.default_backend() == "cpu" else 1
        pages, state, logits = self.one.memory_bytes()
        return copies * pages, copies * state, copies * logits

    # --- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Send the engines their next dispatches; wait briefly until one is ready, and read all ready ones."""
        with self._lock:
            interrupt.check()
            for engine in self.engines:
                engine.raise_failure()
            self._finish_aborted()
            self._hand_out()
            for engine in self.engines:
                if not engine.idle and engine not in self._sent:
                    self._sent[engine] = time.perf_counter()
                    engine.send()
            until = time.perf_counter() + MOST_POLLING_S
            while not (ready := self._ready) and self._sent and time.perf_counter() < until:
                time.sleep(POLL_S)
            for engine in ready:
                del self._sent[engine]
                engine.receive()

    @property
    def _ready(self) -> list[Engine]:
        """The engines to read next: those that are ready, or stalled."""
        stalled = time.perf_counter() - STALLED_S
        sent = [engine for engine in self.engines if engine in self._sent]
        return [engine for engine in sent if engine.ready or self._sent[engine] < stalled]

    def _hand_out(self) -> None:
        while self._waiting and (roomy := [engine for engine in self.engines if engine.num_open < engine.config.slots]):
            handle = self._waiting.popleft()
            self._best(roomy, handle.request.prompt_ids).enter(handle)
        for engine in self.engines:
            engine.num_queued = len(self._waiting) // len(self.engines)

    @staticmethod
    def _best(engines: Sequence[Engine], prompt_ids: Sequence[int]) -> Engine:
        """Choose an engine for a prompt: one that has cached more than half of it, then the emptiest.

        Ignores the cache of an engine with over twice the shortest queue. Otherwise a shared system prompt would send
        everyone there.
        """
        most = 2 * min(engine.num_open for engine in engines) + 1

        def merit(engine: Engine) -> tuple[bool, int]:
            known = engine.num_open <= most and 2 * engine.num_known(prompt_ids) > len(prompt_ids)
            return known, -engine.num_open

        return max(engines, key=merit)

    def _finish_aborted(self) -> None:
        while self._to_abort:
            handle = self._to_abort.popleft()
            if handle in self._waiting:
                self._waiting.remove(handle)
                handle.finish("aborted")
            for engine in self.engines:  # does nothing in an engine without the request
                engine.abort(handle)


AnyEngine: TypeAlias = Engine | Replicas  # for callers of any thread
