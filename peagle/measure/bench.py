"""Time a target: prefill, decoding, and verify passes, which bound the gain of speculation.

    pp N        prefill N tokens into empty caches, in the engine's chunks
    tg N        decode N steps after `context` tokens by the engine's own loop, with a request in every slot. With K > 0
                the steps draft K tokens and accept none
    verify T    one pass over T rows a sequence after `context` tokens: a step that verifies T - 1 drafts, without the
                drafting. v(T) = time(T) / time(1): speculation gains if a step gives more tokens than that

Token ids are random, so that routing is spread over the experts. Programs are compiled and run once before anything is
timed. Tests take turns, so that drift of the machine affects all of them equally.

Decoding is timed while all slots are active. They fill one after the other, so the first requests are a few tokens
longer by then.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.base.memory import refuse_too_large, tree_bytes
from peagle.config import DEFAULT_CHUNK, check_num_drafts
from peagle.engine.request import Request, TokenChunk
from peagle.measure.metrics import Spread
from peagle.measure.record import turns
from peagle.pair import Pair
from peagle.protocols import PyTree, Target

SHORTEST_S = 0.05  # a verify measurement repeats its pass for at least this long
NUM_TOKEN_SETS = 64  # verify passes cycle through so many sets of random tokens

Kind = Literal["pp", "tg", "verify"]
Stage = Literal["compiling", "measuring"]
Progress = Callable[[Stage, int, int, float | None], None]  # (stage, runs done, total runs, seconds left)


@dataclass(frozen=True)
class BenchOptions:
    """The tests to run. Raises InputError for impossible values; `check` compares them with a target's positions."""

    prompt_lengths: tuple[int, ...] = (128, 512)
    new_tokens: tuple[int, ...] = (64,)
    widths: tuple[int, ...] = (1, 2, 4, 8)  # 1 is always measured, for comparison
    context: int = 128
    slots: tuple[int, ...] = (1,)  # for decoding
    drafts: tuple[int, ...] = ()  # K of the drafted decoding tests; plain ones always run
    repeats: int = 5
    prefill_chunk: int | Literal["all"] | None = None  # tokens per pass of pp; None: the engine's

    def __post_init__(self) -> None:
        for name in ("prompt_lengths", "new_tokens", "widths", "context", "slots", "repeats"):
            values = getattr(self, name)
            if wrong := [value for value in ((values,) if isinstance(values, int) else values) if value < 1]:
                none = ", or 0 for no such test" if name in ("prompt_lengths", "new_tokens") else ""
                raise InputError(f"{name} is {wrong[0]}; expected 1 or more{none}", name)
        if not self.new_tokens and (self.drafts or len(set(self.slots)) > 1):
            option = "-k is" if self.drafts else "several --slots are"
            raise InputError(f"{option} given, but no decoding test; give -n 1 or more")
        for k in self.drafts:
            check_num_drafts(k, plain=False)

    @property
    def batch(self) -> int:
        """The number of sequences of pp and verify: that of the slots if there is only one, else 1."""
        return self.slots[0] if len(set(self.slots)) == 1 else 1

    @property
    def cases(self) -> tuple["Case", ...]:
        """Every test once, in the order of the report."""
        widths = sorted({1, *self.widths}) if self.widths else ()
        slots = sorted({1, *self.slots}) if len(set(self.slots)) > 1 else self.slots[:1]
        cases = [Case("pp", size, self.batch) for size in self.prompt_lengths]
        cases += [Case("tg", size, n, k) for size in self.new_tokens for n in slots for k in (0, *self.drafts)]
        cases += [Case("verify", size, self.batch) for size in widths]
        return tuple(dict.fromkeys(cases))

    def check(self, max_positions: int, steps_per_dispatch: int = 1) -> None:
        """Raise InputError if a test takes more positions than the target has."""
        for case in self.cases:
            needed = {
                "pp": case.size,
                "tg": self.context + self.budget(case, steps_per_dispatch),
                "verify": self.context + case.size,
            }[case.kind]
            if needed > max_positions:
                after = "" if case.kind == "pp" else f" after a context of {self.context}"
                options = {"pp": "-p", "tg": "-n or --context", "verify": "-t or --context"}[case.kind]
                raise InputError(
                    f"{case.kind} {case.size}{after} takes {needed} positions; expected at most {max_positions}, the "
                    f"target's: lower {options}"
                )

    def budget(self, case: "Case", steps_per_dispatch: int) -> int:
        """Compute max_new_tokens of a decoding test's requests, so that none ends before the test.

        It is the first token, from prefill; a dispatch per chunk of the other prompts; and the timed steps, in whole
        dispatches. Example: 3 tokens in 2 slots, prompts of one chunk, one step a dispatch: 1 + 1 + 3.
        """
        chunks = max(1, -(-(self.context - 1) // (DEFAULT_CHUNK - 1)))  # all but the first begin with a known token
        timed = -(-case.size // steps_per_dispatch) * steps_per_dispatch
        return 1 + (case.slots - 1) * chunks * steps_per_dispatch + timed


@dataclass(frozen=True)
class Case:
    """One test. num_drafts 0: plain decoding."""

    kind: Kind
    size: int  # tokens per sequence: of the prompt, new ones, or those of a pass
    slots: int = 1
    num_drafts: int = 0


@dataclass(frozen=True)
class Measurement:
    """The times of one test: the seconds of each repetition, which is `passes` passes through the target."""

    case: Case
    passes: int
    seconds: tuple[float, ...]  # at least one

    @property
    def num_tokens(self) -> int:
        """Tokens of one repetition, over all rows."""
        return self.case.slots * self.case.size * (self.passes if self.case.kind == "verify" else 1)

    @property
    def tok_per_s(self) -> Spread:
        return Spread.of([self.num_tokens / s for s in self.seconds])

    @property
    def ms_per_pass(self) -> Spread:
        return Spread.of([1000 * s / self.passes for s in self.seconds])


@dataclass(frozen=True)
class Bench:
    """The measurements; after an interruption, tests without a repetition are missing."""

    options: BenchOptions
    measurements: tuple[Measurement, ...]
    interrupted: bool = False

    def v(self, measurement: Measurement) -> float | None:
        """Return time(T) / time(1) of a verify test, by medians; None for other tests, or if T = 1 is missing."""
        if measurement.case.kind != "verify":
            return None
        return self._ratio(measurement, dataclasses.replace(measurement.case, size=1))

    def cost(self, measurement: Measurement) -> float | None:
        """Return c(K) = time of a drafted step / of a plain one, by medians; None for other tests."""
        if not measurement.case.num_drafts:
            return None
        return self._ratio(measurement, dataclasses.replace(measurement.case, num_drafts=0))

    def _ratio(self, measurement: Measurement, base: Case) -> float | None:
        """Divide the median time of a pass by that of another test; None if that was not measured."""
        medians = [other.ms_per_pass.median for other in self.measurements if other.case == base]
        return measurement.ms_per_pass.median / medians[0] if medians else None


def bench(pair: Pair, options: BenchOptions, progress: Progress | None = None) -> Bench:
    """Time the pair's target, and drafted steps.

    Ctrl-C ends it early, with the result so far. Calls `progress` before a test is compiled and before each run; the
    seconds left are known after every test's first run. Raises InputError, before anything is measured, if the target's
    positions or the memory do not suffice.
    """
    options.check(pair.max_positions, pair.steps_per_dispatch)
    rng = np.random.default_rng(0)
    cases = options.cases
    runs: dict[Case, _Run] = {}
    seconds: dict[Case, list[float]] = {case: [] for case in cases}

    def report(stage: Stage, done: int, total: int) -> None:
        if progress is not None:
            progress(stage, done, total, _left_s(seconds, options.repeats) if stage == "measuring" else None)
        interrupt.check()

    interrupted = False
    try:
        verify = _Verify(pair, options, rng)
        for case in cases:
            report("compiling", len(runs), len(cases))
            runs[case] = _prepare(case, pair, options, rng, verify)
        for done, (_, case) in enumerate(turns(cases, options.repeats, warm_up=False)):
            report("measuring", done, len(cases) * options.repeats)
            seconds[case].append(runs[case].time())
    except KeyboardInterrupt:
        interrupted = True
    measured = [Measurement(case, runs[case].passes, tuple(seconds[case])) for case in cases if seconds[case]]
    return Bench(options, tuple(measured), interrupted)


def _left_s(seconds: Mapping[Case, Sequence[float]], repeats: int) -> float | None:
    """Estimate the time of the remaining runs; None before every test has run once."""
    if not all(seconds.values()):
        return None
    return sum(statistics.mean(times) * (repeats - len(times)) for times in seconds.values())


@dataclass(frozen=True)
class _Run:
    """A compiled test; `time` runs it and returns its seconds."""

    passes: int
    time: Callable[[], float]


def _prepare(case: Case, pair: Pair, options: BenchOptions, rng: np.random.Generator, verify: "_Verify") -> _Run:
    if case.kind == "verify":
        return verify.prepare(case.size)
    prepare = _prepare_decoding if case.kind == "tg" else _prepare_prefill
    return prepare(case, pair, options, rng)


def _prepare_prefill(case: Case, pair: Pair, options: BenchOptions, rng: np.random.Generator) -> _Run:
    """Prepare prefill of one sequence after the other."""
    target, size, typed = pair.plain_target, case.size, options.prefill_chunk
    token_ids = _random_ids(rng, target, options.batch, size)
    chunk = size if typed == "all" else min(typed or pair.prefill_chunk, size)

    def time_once() -> float:
        started = time.perf_counter()
        for row in token_ids:
            jax.block_until_ready(prefill(target, row[None], size, chunk, 1))
        return time.perf_counter() - started

    _refuse_caches(target, 1, size, chunk)
    time_once()
    return _Run(1, time_once)


def _prepare_decoding(case: Case, pair: Pair, options: BenchOptions, rng: np.random.Generator) -> _Run:
    """Prepare `size` steps of the engine's own loop while all requests are active.

    Drafts are all rejected, so that drafted and plain steps are at the same positions.
    """
    budget = options.budget(case, pair.steps_per_dispatch)
    prompts = _random_ids(rng, pair.plain_target, case.slots, options.context)
    requests = [Request(tuple(map(int, prompt)), budget, stop_token_ids=()) for prompt in prompts]
    k = case.num_drafts
    config = pair.engine_config(
        k,
        slots=case.slots,
        context=pair.capacity(requests),
        synthetic_acceptance=(0.0,) * k if k else None,
    )
    engine = pair.engine(config)

    def time_once() -> float:
        chunks = engine.generate(requests)
        assert isinstance(chunks, Generator)
        return time_steps(chunks, len(requests), case.size)

    engine.warm_up()
    time_once()
    return _Run(case.size, time_once)


def time_steps(chunks: Generator[tuple[int, TokenChunk], None, None], num_requests: int, count: int) -> float:
    """Time `count` steps of `Engine.generate` while all requests are active; then close it.

    The time begins with the last request's first token. All requests share each step, so steps are counted in the first
    one. Raises RuntimeError if that ends before.
    """
    begun, waiting = 0.0, set(range(num_requests))  # requests without a token
    of_first: list[TokenChunk] = []  # chunks of the first request
    with contextlib.closing(chunks):
        for index, chunk in chunks:
            if index in waiting:
                waiting.remove(index)
                begun = max(begun, chunk.time_s)
            elif index == 0:
                of_first.append(chunk)
            if waiting:
                continue
            timed = [chunk for chunk in of_first if chunk.time_s > begun]
            if (steps := sum(len(chunk.steps) for chunk in timed)) >= count:
                return (timed[-1].time_s - begun) * count / steps
    raise RuntimeError(f"the first request ended before all {num_requests} had decoded {count} steps together")


class _Verify:
    """Verify passes after `context` tokens; all passes write to the same positions of the same caches.

    A measurement is one program that loops over passes, so that the host's dispatch does not count.
    """

    def __init__(self, pair: Pair, options: BenchOptions, rng: np.random.Generator) -> None:
        self._target, self._options, self._rng = pair.plain_target, options, rng
        self._chunk = min(pair.prefill_chunk, options.context)
        self._caches: PyTree = None
        self._next_set = 0  # of token ids

    def prepare(self, width: int) -> _Run:
        if self._caches is None:
            self._fill()
        token_ids = _random_ids(self._rng, self._target, NUM_TOKEN_SETS, self._options.batch, width)
        self._time(token_ids, 1)
        passes = 1
        while (taken := self._time(token_ids, passes)) < SHORTEST_S:
            passes = max(2 * passes, int(1.1 * passes * SHORTEST_S / taken))
        return _Run(passes, lambda: self._time(token_ids, passes))

    def _fill(self) -> None:
        context, batch = self._options.context, self._options.batch
        widest = max(case.size for case in self._options.cases if case.kind == "verify")
        _refuse_caches(self._target, batch, context + widest, widest)
        token_ids = _random_ids(self._rng, self._target, batch, context)
        self._caches = prefill(self._target, token_ids, context + widest, self._chunk, widest)

    def _time(self, token_ids: np.ndarray, passes: int) -> float:
        lengths = np.full((self._options.batch,), self._options.context, np.int32)
        first = np.int32(self._next_set % NUM_TOKEN_SETS)
        self._next_set += passes
        started = time.perf_counter()
        self._caches, digest = _verify_passes(self._target, self._caches, token_ids, lengths, first, np.int32(passes))
        jax.block_until_ready((self._caches, digest))
        return time.perf_counter() - started


def prefill(target: Target, token_ids: np.ndarray, capacity: int, chunk: int, widest_write: int) -> PyTree:
    """Prefill token_ids [B, T] in chunks, into caches for passes of widest_write rows."""
    caches = _empty(target, token_ids.shape[0], capacity, max(chunk, widest_write))
    for start in range(0, token_ids.shape[1], chunk):
        piece = token_ids[:, start : start + chunk]
        padded = np.pad(piece, ((0, 0), (0, chunk - piece.shape[1])))
        caches = _extend(target, padded, np.int32(start), np.int32(piece.shape[1]), caches)
    return caches


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _empty(target: Target, batch: int, capacity: int, widest_write: int) -> PyTree:
    return target.init_cache(batch, capacity, widest_write)


@functools.partial(jax.jit, donate_argnames="caches")
def _extend(target: Target, token_ids: jax.Array, begin: jax.Array, count: jax.Array, caches: PyTree) -> PyTree:
    """Run the first `count` tokens of each sequence at positions begin.., with logits of the last."""
    row = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.broadcast_to(jnp.where(row < count, begin + row, -1), token_ids.shape)
    last = jnp.broadcast_to(count - 1, (token_ids.shape[0], 1))
    output, caches = target.extend(token_ids, positions, caches, last)
    return jax.lax.optimization_barrier((output.logits, caches))[1]


@functools.partial(jax.jit, donate_argnames="caches")
def _verify_passes(
    target: Target, caches: PyTree, token_ids: jax.Array, lengths: jax.Array, first: jax.Array, passes: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Run passes over token_ids [sets, B, T], from set `first` on.

    Returns (caches, a digest that depends on all logits, so that XLA computes them).
    """
    positions = lengths[:, None] + jnp.arange(token_ids.shape[2], dtype=jnp.int32)[None, :]

    def one(index: jax.Array, carry: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
        caches, digest = carry
        output, caches = target.extend(token_ids[(first + index) % token_ids.shape[0]], positions, caches)
        return caches, digest + jnp.sum(jnp.max(output.logits.astype(jnp.float32), axis=-1))

    result: tuple[PyTree, jax.Array] = jax.lax.fori_loop(
        jnp.zeros((), jnp.int32), passes, one, (caches, jnp.zeros((), jnp.float32))
    )
    return result


def _random_ids(rng: np.random.Generator, target: Target, *shape: int) -> np.ndarray:
    return rng.integers(0, target.vocab_size, shape, np.int32)


def _refuse_caches(target: Target, batch: int, capacity: int, widest_write: int) -> None:
    caches: Any = jax.eval_shape(lambda: target.init_cache(batch, capacity, widest_write))
    refuse_too_large(
        {f"the caches of {capacity} positions": tree_bytes(caches)}, lambda: "lower -p, -t, --context or --slots"
    )
