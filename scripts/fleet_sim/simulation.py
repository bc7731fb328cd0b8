"""Simulate a fleet at measured costs: replicas that prefill and replicas that decode, or replicas that do both.

    arrivals ──► prefill replica ──► hand-off, over the network ──► decode replica ──► tokens

A replica is the engine's own scheduler in a double-buffered loop as the engine's; a clock and measured costs replace
the device. A request goes to the replica with the fewest open requests. Left out: contention on the network, prefix
caches, rows that pause, and replicas that are lost.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pydantic.dataclasses
from pydantic import NonNegativeInt, PositiveInt, TypeAdapter

from peagle.engine.host import scheduler
from peagle.engine.host.scheduler import Chunk, Scheduler, Steps
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.errors import InputError
from scripts.fleet_sim.costs import Cost, Costs, Size, refused_in_words

QUANTILES = (0.5, 0.9, 0.99)
HOPS = 2  # of a hand-off: to the router, and on to the decode replica
ATTAINED = 0.9  # share of the requests that must meet a target at the highest rate
LOWEST_RATE, HIGHEST_RATE = 1e-6, 1e6  # requests a second
HALVINGS = 6  # of the octave around the highest rate
ANY_CONTEXT = 1 << 30  # positions of a request: the simulation does not limit them


@pydantic.dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    time_s: Cost
    prompt_tokens: PositiveInt
    output_tokens: PositiveInt


@pydantic.dataclasses.dataclass(frozen=True)
class Lengths:
    """Ranges of the lengths of prompts and answers, drawn evenly."""

    prompt: tuple[PositiveInt, PositiveInt]
    output: tuple[PositiveInt, PositiveInt]

    @pydantic.field_validator("prompt", "output")
    @classmethod
    def _ascends(cls, lengths: tuple[int, int]) -> tuple[int, int]:
        if lengths[0] > lengths[1]:
            raise ValueError("the first is above the second")
        return lengths


def poisson(rate: float, count: int, lengths: Lengths, seed: int = 0) -> list[Arrival]:
    """Draw a Poisson trace. Traces of one seed differ only by their rate."""
    if not 0 < rate < math.inf or count < 1:
        raise InputError(f"{count} requests arrive at {rate} a second; expected a request or more, at a rate above 0")
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0, count)) / rate
    prompts, outputs = (rng.integers(least, most + 1, count) for least, most in (lengths.prompt, lengths.output))
    return [Arrival(float(time), int(a), int(b)) for time, a, b in zip(times, prompts, outputs, strict=True)]


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace of JSON lines. Raises InputError that names a bad line."""
    arrivals, reader = [], TypeAdapter(Arrival)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        with refused_in_words(f"line {number} of {path}", "time_s, prompt_tokens, output_tokens"):
            arrivals.append(reader.validate_json(line))
    if not arrivals:
        raise InputError(f"{path} is empty; expected a request a line")
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


@pydantic.dataclasses.dataclass(frozen=True)
class Arrangement:
    """A fleet: `prefill` replicas that only prefill (0: all do both) and `decode` others."""

    prefill: NonNegativeInt
    decode: PositiveInt
    slots: PositiveInt = 4
    num_speculative_tokens: NonNegativeInt = 0

    def __str__(self) -> str:
        return f"{self.prefill} prefill + {self.decode} decode" if self.prefill else f"{self.decode} of both"


@dataclass(eq=False)
class Served:
    """A request, and the arrivals of its tokens."""

    arrival: Arrival
    times: list[tuple[float, int]] = field(default_factory=list)  # (second, tokens that arrived together)
    left: int = 0  # tokens that the device has not computed yet
    num_read: int = 0  # tokens that the replica has read from the device
    prefilled: bool = False  # by another replica

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.times)

    @property
    def ttft_s(self) -> float:
        return self.times[0][0] - self.arrival.time_s

    @property
    def itl_s(self) -> list[float]:
        """Seconds between arrivals of tokens; several may arrive together."""
        return [after - before for (before, _), (after, _) in itertools.pairwise(self.times)]

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first."""
        return (self.times[-1][0] - self.times[0][0]) / max(1, self.num_tokens - 1)


@dataclass(frozen=True)
class _Sent:
    """A dispatch: its end on the device, and the tokens of its requests."""

    action: Chunk[Served] | Steps
    sent_s: float
    end_s: float
    tokens: tuple[tuple[Served, int], ...]


@dataclass(eq=False)
class _Replica:
    """The loop of one engine (peagle.engine.host.engine.Engine)."""

    costs: Costs
    slots: int
    k: int
    hands_over: bool
    rng: np.random.Generator
    num_open: int = 0  # by the router's count
    busy_s: float = 0.0
    awake: bool = False  # its loop has an iteration ahead
    _device_s: float = 0.0  # end of the last dispatch
    _last_read_s: float = 0.0

    def __post_init__(self) -> None:
        costs = self.costs
        shapes = ResolvedConfig(slots=self.slots, context=ANY_CONTEXT, prefill_chunk=costs.chunk).pass_shapes
        self._scheduler: Scheduler[Served] = Scheduler(self.slots, shapes, costs.steps_per_dispatch)
        self._in_flight: collections.deque[_Sent] = collections.deque()
        self._known = scheduler.DispatchTimes()
        self._left = 0  # unfinished requests

    def add(self, served: Served) -> None:
        self.num_open += 1
        self._left += 1
        served.left = served.arrival.output_tokens - served.num_read
        self._scheduler.add(served, served.arrival.prompt_tokens)

    def close(self) -> None:
        """Count a request as ended, when the router reads its end."""
        self.num_open -= 1

    def step(self, now: float) -> tuple[float, list[tuple[float, Served, int, bool]], bool]:
        """Run an iteration of the loop; return (its end, its reads, whether it has more to do).

        A read is (time, request, tokens, whether the request has ended here).
        """
        read: list[tuple[float, Served, int, bool]] = []
        action = self._scheduler.next(self._known, lambda served: self._begin(served, now))
        if action is not None:
            self._in_flight.append(self._send(action, now))
        alone = self.hands_over or self._scheduler.num_active == 1
        alone = isinstance(action, Chunk) and action.pieces[0].last and alone
        while len(self._in_flight) > (0 if action is None or alone else 1):
            sent = self._in_flight.popleft()
            now = max(now, sent.end_s)
            self._learn(sent, now)
            for served, count in sent.tokens:
                served.num_read += count
                last = served.num_read == served.arrival.output_tokens
                if self.hands_over and not last:
                    now += self.costs.pack_s.at(served.arrival.prompt_tokens)
                read.append((now, served, count, last or self.hands_over))
                if last or self.hands_over:
                    self._scheduler.remove(served)
                    self._left -= 1
        return now, read, self._left > 0

    def _begin(self, served: Served, now: float) -> int:
        """Load a hand-off; return the prompt's tokens that need no prefill."""
        if not served.prefilled:
            return 0
        tokens = served.arrival.prompt_tokens
        self._occupy(now, self.costs.load_s.at(tokens))
        return tokens

    def _occupy(self, now: float, seconds: float) -> float:
        self._device_s = max(now, self._device_s) + seconds
        self.busy_s += seconds
        return self._device_s

    def _send(self, action: Chunk[Served] | Steps, now: float) -> _Sent:
        if isinstance(action, Chunk):
            return self._send_chunk(action, now)
        costs = self.costs
        seconds, emitted = 0.0, collections.Counter[Served]()
        for _ in range(action.count):
            rows = [served for _, served in self._scheduler.decoding if served.left > 0]
            if not rows:
                break
            positions = sum(row.arrival.prompt_tokens + row.arrival.output_tokens - row.left for row in rows)
            seconds += costs.step_s[self.k].at(len(rows)) + costs.position_s * positions
            for served in rows:
                count = min(1 + self._accepted(), served.left)
                served.left -= count
                emitted[served] += count
        return _Sent(action, now, self._occupy(now, seconds), tuple(emitted.items()))

    def _send_chunk(self, action: Chunk[Served], now: float) -> _Sent:
        """Compute pieces of prompts; the last piece of a prompt gives its first token.

        Prompts that share a pass take the time of one prompt with all their rows.
        """
        costs, begin = self.costs, max(piece.begin for piece in action.pieces)
        done = begin + sum(piece.count for piece in action.pieces)
        seconds = costs.prompt_s.at(done) - (costs.prompt_s.at(begin) if begin else 0.0)
        first = [piece.key for piece in action.pieces if piece.last and not piece.key.prefilled]
        for served in first:
            served.left -= 1
        return _Sent(action, now, self._occupy(now, max(0.0, seconds)), tuple((served, 1) for served in first))

    def _accepted(self) -> int:
        """Draw the number of drafts that a step accepts."""
        if not self.k:
            return 0
        drawn = self.rng.random()
        return sum(drawn < rate for rate in self.costs.acceptance[self.k][: self.k])

    def _learn(self, sent: _Sent, now: float) -> None:
        """Learn the costs of actions, which decide the steps between two chunks."""
        seconds = now - max(sent.sent_s, self._last_read_s)
        self._last_read_s = now
        if isinstance(sent.action, Chunk):
            self._known = dataclasses.replace(self._known, chunk_s=seconds)
        elif isinstance(sent.action, Steps):
            self._known = dataclasses.replace(self._known, step_s=seconds / sent.action.count)


class _Events:
    """A queue of callbacks, by time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, callback: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._numbers), callback))

    def run(self) -> None:
        while self._heap:
            time_s, _, callback = heapq.heappop(self._heap)
            callback(time_s)


def simulate(costs: Costs, trace: Sequence[Arrival], fleet: Arrangement, seed: int = 0) -> list[Served]:
    """Serve a trace; return its requests with the times of their tokens, in order."""
    costs.check_k(fleet.num_speculative_tokens)
    events, rng = _Events(), np.random.default_rng(seed)

    def replicas(count: int, hands_over: bool) -> list[_Replica]:
        k = fleet.num_speculative_tokens
        return [_Replica(costs, fleet.slots, k, hands_over, rng) for _ in range(count)]

    prefills, decodes = replicas(fleet.prefill, True), replicas(fleet.decode, False)

    def send(pool: list[_Replica], served: Served, now: float) -> None:
        replica = min(pool, key=lambda replica: replica.num_open)
        replica.add(served)
        if not replica.awake:
            replica.awake = True
            events.at(now, lambda time_s: iterate(replica, time_s))

    def iterate(replica: _Replica, now: float) -> None:
        now, read, replica.awake = replica.step(now)
        for time_s, served, count, ended in read:
            arrive(replica, time_s + costs.network_s, served, count)
            if ended:
                events.at(time_s + costs.network_s, lambda _: replica.close())
        if replica.awake:
            events.at(now, lambda time_s: iterate(replica, time_s))

    def arrive(replica: _Replica, time_s: float, served: Served, count: int) -> None:
        if not replica.hands_over or served.arrival.output_tokens == 1:
            served.times.append((time_s, count))
            return
        hop_s = costs.message_bytes.at(served.arrival.prompt_tokens) / costs.network_bytes_per_s
        served.times.append((time_s + hop_s, count))
        served.prefilled = True
        arrives_s = time_s + HOPS * hop_s + costs.network_s
        events.at(arrives_s, lambda now: send(decodes, served, now))

    requests = [Served(arrival) for arrival in trace]
    for served in requests:
        pool = prefills or decodes
        events.at(served.arrival.time_s + costs.network_s, lambda now, one=served, to=pool: send(to, one, now))  # type: ignore[misc]
    events.run()
    return requests


@pydantic.dataclasses.dataclass(frozen=True)
class Target:
    """The most seconds to the first token, and of a later token on average."""

    ttft_s: Size
    tpot_s: Size

    def met_by(self, served: Served) -> bool:
        return served.ttft_s <= self.ttft_s and served.tpot_s <= self.tpot_s


def summary(requests: Sequence[Served], target: Target) -> dict[str, float]:
    """Compute quantiles of ttft and itl, tokens a second, the share that met the target."""
    gaps = np.asarray([gap for served in requests for gap in served.itl_s] or [0.0])
    firsts = np.asarray([served.ttft_s for served in requests])
    last = max(served.times[-1][0] for served in requests) - min(served.arrival.time_s for served in requests)
    met = sum(map(target.met_by, requests))
    quantiles = {f"ttft_p{100 * q:.0f}_s": float(np.quantile(firsts, q)) for q in QUANTILES}
    quantiles |= {f"itl_p{100 * q:.0f}_s": float(np.quantile(gaps, q)) for q in QUANTILES}
    tokens = sum(served.num_tokens for served in requests)
    return quantiles | {"tok_per_s": tokens / last, "met_frac": met / len(requests), "goodput_per_s": met / last}


def highest_rate(
    costs: Costs, fleet: Arrangement, lengths: Lengths, target: Target, count: int = 300, seed: int = 0
) -> float:
    """Find the most requests a second of which ATTAINED meet a target; 0: not even one alone."""

    def attained(rate: float) -> bool:
        requests = simulate(costs, poisson(rate, count, lengths, seed), fleet, seed)
        return sum(map(target.met_by, requests)) >= ATTAINED * count

    if not attained(LOWEST_RATE):
        return 0.0
    low, high = 0.0, 1.0
    while attained(high) and high < HIGHEST_RATE:
        low, high = high, 2 * high
    while not low:
        low, high = (high / 2, high) if attained(high / 2) else (0.0, high / 2)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if attained(middle) else (low, middle)
    return low
