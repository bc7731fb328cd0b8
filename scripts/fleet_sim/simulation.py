"""Simulate a fleet at measured costs: replicas that prefill and replicas that decode, or replicas that do both.

    arrivals ──► prefill replica ──► hand-off, over the network ──► decode replica ──► tokens

A replica here is the engine's own scheduler in the engine's own loop, double-buffered; a clock and measured costs stand
in the place of the device. A request goes to the replica with the fewest open ones. Left out: the network's contention,
prefix caches, rows that pause, and replicas that are lost.
"""

import collections
import dataclasses
import heapq
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peagle.config import check_rates
from peagle.engine import scheduler
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.scheduler import Chunk, Scheduler, Steps
from peagle.ops.errors import InputError

QUANTILES = (0.5, 0.9, 0.99)
HOPS = 2  # of a hand-off: to the router, and on to the decode replica
ATTAINED = 0.9  # share of the requests that must meet a target at the highest rate
LOWEST_RATE, HIGHEST_RATE = 1e-6, 1e6  # requests a second
HALVINGS = 6  # of the octave in which the highest rate lies
ANY_CONTEXT = 1 << 30  # positions of a request: the simulation does not limit them


@dataclass(frozen=True)
class Curve:
    """A measured cost by size, linear between the points and beyond them."""

    points: tuple[tuple[float, float], ...]  # (size, cost)

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] <= 0:
            raise InputError(f"a cost is measured at sizes {sizes}; expected one or more above 0, ascending")
        if any(not 0 <= cost < math.inf for _, cost in self.points):
            raise InputError(f"a cost is {[cost for _, cost in self.points]}; expected finite numbers of 0 or more")

    def at(self, size: int | float) -> float:
        """Interpolate; below the first point in proportion to it, if it is the only one everywhere."""
        if len(self.points) == 1:
            return self.points[0][1] * size / self.points[0][0]
        sizes, costs = zip(*self.points, strict=True)
        if sizes[0] <= size <= sizes[-1]:
            return float(np.interp(size, sizes, costs))
        (x0, y0), (x1, y1) = self.points[:2] if size < sizes[0] else self.points[-2:]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


CURVES = ("prompt_s", "message_bytes", "pack_s", "load_s")  # of Costs, by tokens of a prompt


@dataclass(frozen=True)
class Costs:
    """What a replica's work takes, measured on its machine.

    prompt_s: seconds by tokens of a prompt that is prefilled alone, its first token included. step_s: of each K,
    seconds of a step by active rows. position_s: more of a step for each position in its rows' caches. acceptance: of
    each K, the share of steps that accept 1, 2, ... drafts or more. message_bytes, pack_s, load_s: of a hand-off, by
    tokens of its prompt: its size, and the seconds of packing it and of loading it.
    """

    prompt_s: Curve
    step_s: Mapping[int, Curve]
    message_bytes: Curve
    pack_s: Curve
    load_s: Curve
    network_bytes_per_s: float
    network_s: float = 0.0  # of one way, beside the bytes
    position_s: float = 0.0
    acceptance: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    chunk: int = 128
    steps_per_dispatch: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.network_bytes_per_s <= math.inf:
            raise InputError(f"network_bytes_per_s is {self.network_bytes_per_s}; expected a number above 0")
        for name in ("network_s", "position_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; expected 0 or more")
        for name in ("chunk", "steps_per_dispatch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected 1 or more")
        for k in self.step_s:
            if k:
                check_rates(self.acceptance.get(k, ()), k)

    def check_k(self, k: int) -> None:
        """Raise InputError for a K whose steps were not measured."""
        if k not in self.step_s:
            raise InputError(f"steps of K = {k} were not measured; expected K of {sorted(self.step_s)}")

    def to_json(self) -> dict[str, Any]:
        """Return what `read_costs` reads."""
        value = dataclasses.asdict(self)
        value |= {name: getattr(self, name).points for name in CURVES}
        value["step_s"] = {str(k): curve.points for k, curve in self.step_s.items()}
        value["acceptance"] = {str(k): rates for k, rates in self.acceptance.items()}
        return value


def read_costs(path: Path) -> Costs:
    """Read a file of costs. Raises InputError for one that is none, naming what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}; expected a file of costs") from None
    return costs_of(value, str(path))


def costs_of(costs: Any, where: str) -> Costs:
    """Make costs of a JSON value; the message of an error begins with `where`."""
    fields = {spec.name: spec for spec in dataclasses.fields(Costs)}
    if not isinstance(costs, dict):
        raise InputError(f"{where} holds no JSON object; expected {', '.join(fields)}")
    costs = {name: value for name, value in costs.items() if name != "provenance"}
    required = [name for name, spec in fields.items() if not _optional(spec)]
    missing = [name for name in required if name not in costs]
    unknown = [name for name in costs if name not in fields]
    if missing or unknown:
        why = f"lacks {missing[0]}" if missing else f"has {unknown[0]!r}"
        raise InputError(f"{where} {why}; expected {', '.join(fields)}")
    try:
        values: dict[str, Any] = {
            name: float(value) if fields[name].type is float else value for name, value in costs.items()
        }
        values |= {name: _curve(costs[name]) for name in CURVES}
        values["step_s"] = {int(k): _curve(points) for k, points in costs["step_s"].items()}
        accepted = costs.get("acceptance", {})
        values["acceptance"] = {int(k): tuple(map(float, rates)) for k, rates in accepted.items()}
        return Costs(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where} holds a value of another form ({error}); expected what --measure writes") from None


def _optional(spec: "dataclasses.Field[Any]") -> bool:
    return spec.default is not dataclasses.MISSING or spec.default_factory is not dataclasses.MISSING


def _curve(points: Any) -> Curve:
    return Curve(tuple((float(size), float(cost)) for size, cost in points))


# --- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    time_s: float
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.time_s < math.inf or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise InputError(
                f"a request arrives at {self.time_s} s with {self.prompt_tokens} tokens and gets {self.output_tokens}; "
                "expected a time of 0 or more, and a token or more of both"
            )


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts and answers, evenly between the least and the most."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise InputError(f"tokens of the {name} are {least}-{most}; expected 1 or more, ascending")


def poisson(rate: float, count: int, lengths: Lengths, seed: int = 0) -> list[Arrival]:
    """Draw a trace of `count` requests at `rate` a second. Traces of one seed differ by their rate alone."""
    if not 0 < rate < math.inf or count < 1:
        raise InputError(f"{count} requests arrive at {rate} a second; expected a request or more, at a rate above 0")
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0, count)) / rate
    prompts, outputs = (rng.integers(least, most + 1, count) for least, most in (lengths.prompt, lengths.output))
    return [Arrival(float(time), int(a), int(b)) for time, a, b in zip(times, prompts, outputs, strict=True)]


def read_trace(path: Path) -> list[Arrival]:
    """Read JSON lines of time_s, prompt_tokens and output_tokens. Raises InputError, naming the line."""
    arrivals = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    names = [spec.name for spec in dataclasses.fields(Arrival)]
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            arrivals.append(Arrival(*(float(values[names[0]]), int(values[names[1]]), int(values[names[2]]))))
        except InputError as error:
            raise InputError(f"line {number} of {path}: {error}") from None
        except (ValueError, TypeError, KeyError):
            raise InputError(f"line {number} of {path} is no request; expected {', '.join(names)}") from None
    if not arrivals:
        raise InputError(f"{path} is empty; expected a request a line")
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


@dataclass(frozen=True)
class Arrangement:
    """Replicas of a fleet. prefill: those that only prefill; 0: each does both. decode: the others."""

    prefill: int
    decode: int
    slots: int = 4
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 1 or self.slots < 1 or self.num_speculative_tokens < 0:
            raise InputError(
                f"{self.prefill} replicas prefill and {self.decode} decode, with {self.slots} slots and K = "
                f"{self.num_speculative_tokens}; expected a decode replica and a slot or more, and K of 0 or more"
            )

    def __str__(self) -> str:
        return f"{self.prefill} prefill + {self.decode} decode" if self.prefill else f"{self.decode} of both"


# --- what happens -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Served:
    """A request and when its tokens arrived."""

    arrival: Arrival
    times: list[tuple[float, int]] = field(default_factory=list)  # (second, tokens that arrived together)
    left: int = 0  # tokens that its device has not computed yet
    num_read: int = 0  # tokens that its replica has read from the device
    prefilled: bool = False  # elsewhere

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.times)

    @property
    def ttft_s(self) -> float:
        return self.times[0][0] - self.arrival.time_s

    @property
    def itl_s(self) -> list[float]:
        """Seconds between arrivals, however many tokens arrive together."""
        return [after - before for (before, _), (after, _) in itertools.pairwise(self.times)]

    @property
    def tpot_s(self) -> float:
        """Seconds of each token after the first."""
        return (self.times[-1][0] - self.times[0][0]) / max(1, self.num_tokens - 1)


@dataclass(frozen=True)
class _Sent:
    """A dispatch: when the device ends it, and the tokens of each request."""

    action: Chunk[Served] | Steps
    sent_s: float
    end_s: float
    tokens: tuple[tuple[Served, int], ...]


@dataclass(eq=False)
class _Replica:
    """The loop of one engine, as peagle.engine.engine.Engine._step has it."""

    costs: Costs
    slots: int
    k: int
    hands_over: bool
    rng: np.random.Generator
    num_open: int = 0  # as the router counts them
    busy_s: float = 0.0
    awake: bool = False  # an iteration of its loop is due
    _device_s: float = 0.0  # when the device will have done what was sent
    _last_read_s: float = 0.0

    def __post_init__(self) -> None:
        costs = self.costs
        shapes = ResolvedConfig(slots=self.slots, context=ANY_CONTEXT, prefill_chunk=costs.chunk).pass_shapes
        self._scheduler: Scheduler[Served] = Scheduler(self.slots, shapes, costs.steps_per_dispatch)
        self._in_flight: collections.deque[_Sent] = collections.deque()
        self._seen = scheduler.Costs()
        self._left = 0  # requests that the loop has not ended

    def add(self, served: Served) -> None:
        self.num_open += 1
        self._left += 1
        served.left = served.arrival.output_tokens - served.num_read
        self._scheduler.add(served, served.arrival.prompt_tokens)

    def close(self) -> None:
        """Count a request whose end the router has read."""
        self.num_open -= 1

    def step(self, now: float) -> tuple[float, list[tuple[float, Served, int, bool]], bool]:
        """Run an iteration of the loop; return (its end, what it read, is there more to do).

        Read are (time, request, tokens, whether the request has ended here).
        """
        read: list[tuple[float, Served, int, bool]] = []
        action = self._scheduler.next(self._seen, lambda served: self._begin(served, now))
        if action is not None:
            self._in_flight.append(self._send(action, now))
        alone = self.hands_over or self._scheduler.num_active == 1
        alone = isinstance(action, Chunk) and action.pieces[0].last and alone
        while len(self._in_flight) > (0 if action is None or alone else 1):
            sent = self._in_flight.popleft()
            now = max(now, sent.end_s)
            self._see(sent, now)
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
        """Load a hand-off; return the tokens of the prompt that need no prefill."""
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
        """Compute pieces of prompts; the first token of a prompt comes with its last piece.

        Prompts that share a pass take as long as one prompt of all their rows.
        """
        costs, begin = self.costs, max(piece.begin for piece in action.pieces)
        done = begin + sum(piece.count for piece in action.pieces)
        seconds = costs.prompt_s.at(done) - (costs.prompt_s.at(begin) if begin else 0.0)
        first = [piece.key for piece in action.pieces if piece.last and not piece.key.prefilled]
        for served in first:
            served.left -= 1
        return _Sent(action, now, self._occupy(now, max(0.0, seconds)), tuple((served, 1) for served in first))

    def _accepted(self) -> int:
        """Draw how many drafts a step accepts."""
        if not self.k:
            return 0
        drawn = self.rng.random()
        return sum(drawn < rate for rate in self.costs.acceptance[self.k][: self.k])

    def _see(self, sent: _Sent, now: float) -> None:
        """Learn what actions cost, as the engine does: that decides how many steps come between two chunks."""
        seconds = now - max(sent.sent_s, self._last_read_s)
        self._last_read_s = now
        if isinstance(sent.action, Chunk):
            self._seen = dataclasses.replace(self._seen, chunk_s=seconds)
        elif isinstance(sent.action, Steps):
            self._seen = dataclasses.replace(self._seen, step_s=seconds / sent.action.count)


class _Events:
    """Things that happen, in the order of their times."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._numbers), happen))

    def run(self) -> None:
        while self._heap:
            time_s, _, happen = heapq.heappop(self._heap)
            happen(time_s)


def simulate(costs: Costs, trace: Sequence[Arrival], fleet: Arrangement, seed: int = 0) -> list[Served]:
    """Play a trace; return its requests with the times of their tokens, in the trace's order."""
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


# --- what it says -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What a request shall be given: at most so many seconds to its first token, and for each later one."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (0 < self.ttft_s < math.inf and 0 < self.tpot_s < math.inf):
            raise InputError(f"the targets are {self.ttft_s} s and {self.tpot_s} s; expected numbers above 0")

    def met_by(self, served: Served) -> bool:
        return served.ttft_s <= self.ttft_s and served.tpot_s <= self.tpot_s


def summary(played: Sequence[Served], target: Target) -> dict[str, float]:
    """Return quantiles of ttft and itl, tokens a second, the share that met the target, and those requests a second."""
    gaps = np.asarray([gap for served in played for gap in served.itl_s] or [0.0])
    firsts = np.asarray([served.ttft_s for served in played])
    last = max(served.times[-1][0] for served in played) - min(served.arrival.time_s for served in played)
    met = sum(map(target.met_by, played))
    quantiles = {f"ttft_p{100 * q:.0f}_s": float(np.quantile(firsts, q)) for q in QUANTILES}
    quantiles |= {f"itl_p{100 * q:.0f}_s": float(np.quantile(gaps, q)) for q in QUANTILES}
    tokens = sum(served.num_tokens for served in played)
    return quantiles | {"tok_per_s": tokens / last, "met_frac": met / len(played), "goodput_per_s": met / last}


def highest_rate(
    costs: Costs, fleet: Arrangement, lengths: Lengths, target: Target, count: int = 300, seed: int = 0
) -> float:
    """Find the most requests a second of which ATTAINED meet a target; 0: not even a request alone does."""

    def attained(rate: float) -> bool:
        played = simulate(costs, poisson(rate, count, lengths, seed), fleet, seed)
        return sum(map(target.met_by, played)) >= ATTAINED * count

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
