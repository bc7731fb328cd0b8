"""Measure this machine's costs for `scripts.fleet_sim.simulation`."""

import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.host.handoff import HandOff, parse
from peagle.engine.request import Request, StepRecord
from peagle.engine.resolved import Role
from peagle.ops.errors import InputError
from peagle.pair import Pair
from scripts.fleet_sim.costs import Costs, Curve
from scripts.steps import steady

ROUNDS = 5
LEAST_S = 1e-6  # of a cost that is a difference of two times
LOOPBACK_BYTES = 1 << 26


def measure_costs(
    pair: Pair, texts: Sequence[int], k: int, slots: int, context: int, progress: Callable[[str], object]
) -> Costs:
    """Measure a pair on prompts cut from the tokens `texts`. Raises InputError for too few.

    k, slots, context: of the engines to measure.
    """
    if len(texts) < 64 or context < 256:
        raise InputError(f"{len(texts)} tokens of text and {context} positions; expected 64 and 256 or more")
    measure = _Measure(pair, tuple(texts), k, slots, context)
    progress("prompts")
    prompt_s = measure.prompts()
    step_s: dict[int, Curve] = {}
    acceptance: dict[int, tuple[float, ...]] = {}
    for drafts in sorted({0, k}):
        progress(f"steps of K = {drafts}")
        step_s[drafts], rates = measure.steps(drafts)
        if drafts:
            acceptance[drafts] = rates
    progress("steps after long prompts")
    position_s = measure.position_s(step_s[0].at(1))
    progress("hand-offs")
    hand_offs = measure.hand_offs(step_s[k].at(1))
    progress("the network of this machine")
    bytes_per_s, network_s = loopback()
    config = pair.engine_config(0, context=context)
    return Costs(
        prompt_s=prompt_s,
        step_s=step_s,
        **hand_offs,
        network_bytes_per_s=bytes_per_s,
        network_s=network_s,
        position_s=position_s,
        acceptance=acceptance,
        chunk=config.prefill_chunk,
        steps_per_dispatch=config.steps_per_dispatch,
    )


@dataclass(frozen=True)
class _Measure:
    pair: Pair
    texts: tuple[int, ...]
    k: int
    slots: int
    context: int

    @property
    def lengths(self) -> list[int]:
        """Powers of two up to the slots' room: the lengths of prompts."""
        most = self.context - 16
        return sorted({most, *(length for length in (32, 128, 512, 2048, 8192, 32768) if length < most)})

    def engine(self, k: int, role: Role = "both") -> AnyEngine:
        engine = self.pair.engine(self.pair.engine_config(k, slots=self.slots, context=self.context, role=role))
        engine.warm_up()
        return engine

    def request(self, length: int, budget: int, number: int = 0) -> Request:
        """Cut a prompt from the texts, another one for each number."""
        begin = 97 * number % len(self.texts)
        return Request(tuple(np.resize(np.roll(self.texts, -begin), length).tolist()), budget, stop_token_ids=())

    def prompts(self) -> Curve:
        engine = self.engine(self.k)

        def once(length: int, number: int) -> float:
            return _seconds(lambda: list(engine.follow(engine.add(self.request(length, 1, number)))))

        return Curve(tuple((length, _median(once, length)) for length in self.lengths))

    def steps(self, k: int) -> tuple[Curve, tuple[float, ...]]:
        """Return (seconds of a step by active rows, shares of steps that accept 1, 2, .. or more)."""
        engine, points, records = self.engine(k), [], list[StepRecord]()
        budget = min(256, self.context - 64 - k)
        rows = sorted({1 << power for power in range(8) if 1 << power < self.slots} | {self.slots})
        for active in rows:
            runs = [
                steady(engine, [self.request(48, budget, number * active + row) for row in range(active)])
                for number in range(ROUNDS)
            ]
            records += [record for run in runs for record in run.records]
            points.append((active, statistics.median(run.step_s for run in runs)))
        accepted = np.asarray([record.num_accepted for record in records if len(record.draft_token_ids) == k])
        return Curve(tuple(points)), tuple(float(np.mean(accepted > place)) for place in range(k))

    def position_s(self, step_s: float) -> float:
        """Return the time that a position in a row's cache adds to a plain step of step_s."""
        engine, budget = self.engine(0), 96
        length = self.context - budget
        times = [steady(engine, [self.request(length, budget, number)]).step_s for number in range(3)]
        return max(0.0, statistics.median(times) - step_s) / length

    def hand_offs(self, step_s: float) -> dict[str, Curve]:
        """Measure bytes, seconds of packing and of loading, by tokens of the prompt."""
        sender, receiver = self.engine(self.k, "prefill"), self.engine(self.k, "decode")

        def sending(length: int, budget: int, number: int) -> float:
            return _seconds(lambda: list(sender.follow(sender.add(self.request(length, budget, number)))))

        def receiving(length: int, number: int) -> float:
            request = self.request(length, 2, number)
            message = _handed(sender, request)
            return _seconds(lambda: list(receiver.follow(receiver.add(request, hand_off=message))))

        sizes, packing, loading = [], [], []
        for length in (self.lengths[0], self.lengths[-1]):
            sizes.append((length, float(_handed(sender, self.request(length, 2)).data.nbytes)))
            more = [sending(length, 2, number) - sending(length, 1, number) for number in range(ROUNDS)]
            packing.append((length, max(LEAST_S, statistics.median(more))))
            loading.append((length, max(LEAST_S, _median(receiving, length) - step_s)))
        curves = {"message_bytes": sizes, "pack_s": packing, "load_s": loading}
        return {name: Curve(tuple(points)) for name, points in curves.items()}


def _handed(sender: AnyEngine, request: Request) -> HandOff:
    handle = sender.add(request)
    for _ in sender.follow(handle):
        pass
    assert handle.hand_off is not None
    return parse(handle.hand_off.data)


def loopback() -> tuple[float, float]:
    """Return (bytes a second, seconds of one way) between two sockets of this machine."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        thread = threading.Thread(target=_echo, args=(receiver,))
        thread.start()

        def once(size: int, _: int) -> float:
            message = size.to_bytes(8, "little") + bytes(size)
            return _seconds(lambda: (sender.sendall(message), sender.recv(1)))

        whole, small = _median(once, LOOPBACK_BYTES), _median(once, 100)
        sender.shutdown(socket.SHUT_WR)
        thread.join()
    return LOOPBACK_BYTES / max(LEAST_S, whole - small), small / 2


def _echo(connection: socket.socket) -> None:
    """Answer every message, which begins with its size, with a byte."""
    while header := connection.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(header, "little")
        while left:
            left -= len(connection.recv(min(left, 1 << 20)))
        connection.sendall(b"x")


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _median(once: Callable[[int, int], float], size: int) -> float:
    """Take the median of ROUNDS runs after a warm-up."""
    once(size, 0)
    return statistics.median(once(size, number) for number in range(1, ROUNDS + 1))
