"""Measure a published shape on a GPU: passes of its target, steps with every kind of drafter, parts of a step."""

import dataclasses
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from drafter.params import init_params as init_drafter
from drafter.propose import drafter_of
from peagle.base.errors import InputError
from peagle.base.memory import tree_bytes
from peagle.config import AUTO, NumDrafts, SamplingParams
from peagle.loading.defaults import default_chunk
from peagle.measure.bench import BenchOptions, bench
from peagle.ops import cuda
from peagle.ops.cuda import calls
from peagle.ops.expert_matmul import TiledExperts
from peagle.pair import Pair
from peagle.workflows.random_checkpoint import DFLASH, EAGLE_3, P_EAGLE, SIZES, DrafterGeometry
from scripts.gpu.parts import bytes_of_parts, parts
from scripts.gpu.serving import over_engine
from scripts.runs import Json
from scripts.steps import NEW_TOKENS, PROMPT_TOKENS, PUBLISHED_RATE, random_request, synthetic_engine, time_steps
from target.model import GptOss
from target.random import random_bytes, random_params

NARROW_VOCAB = 32768  # a reduced draft vocabulary, as drafters of large vocabularies have
REPEATS = 3
PROFILED_TOKENS = 48
DRAFTERS = (P_EAGLE, EAGLE_3, DFLASH)
Batches: TypeAlias = dict[int, tuple[NumDrafts, ...]]  # K by the number of requests
FIXED: Batches = {1: (0, 5, 7), 8: (0, 3)}
ADAPTIVE: Batches = dict.fromkeys((1, 8, 32), (0, AUTO))
SAMPLED: Batches = {1: (0, 5, AUTO), 32: (0,)}  # at temperature 1
MEMORY = "memory"  # ends the name of the section that frees a shape's weights, which always runs
ROOM = 1.15  # of the weights: caches, and the temporary memory of a pass


class TooLarge(Exception):
    """A shape does not fit into the device."""


@dataclasses.dataclass(frozen=True)
class Section:
    """Measurements that are left out, or fail, together."""

    name: str
    run: Callable[[], Iterator[Json]]
    seconds: float  # its limit; 0: none


@dataclasses.dataclass(frozen=True)
class Passes:
    """Passes of a target alone: prefill, and decoding and verify passes of `batch` sequences after `context` tokens."""

    batch: int
    context: int
    widths: tuple[int, ...] = ()  # of verify passes
    prompts: tuple[int, ...] = ()
    xla: bool = False  # by XLA's own code

    def __str__(self) -> str:
        return f"{self.batch} after {self.context}{' by XLA' if self.xla else ''}"

    def measure(self, name: str, pair: Pair, kernels: Callable[[int], str], new_tokens: int) -> Iterator[Json]:
        """Measure a pair's target. kernels: names those that run a pass over so many rows."""
        options = BenchOptions(
            self.prompts, (new_tokens,), self.widths, self.context, slots=(self.batch,), repeats=REPEATS
        )
        try:
            options.check(pair.max_positions, pair.steps_per_dispatch)
        except InputError:  # a tiny target, with too few positions
            return
        timings = bench(pair, options)
        for measurement in timings.measurements:
            case = measurement.case
            yield {
                "shape": name,
                "kernels": kernels(self.batch if case.kind == "tg" else self.batch * case.size),
                "kind": case.kind,
                "size": case.size,
                "batch": self.batch,
                "context": self.context,
                "ms_per_pass": dataclasses.asdict(measurement.ms_per_pass),
                "tok_per_s": dataclasses.asdict(measurement.tok_per_s),
                "v": timings.v(measurement),
                "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            }


OVER_DEVICES = Passes(1, 128, (1, 4, 8), (512,))
ALONE = (Passes(1, 512, (1, 2, 4, 8), (512, 2048, 8192)), Passes(8, 512, (1, 4)), Passes(32, 512))
FURTHER = (Passes(64, 512), Passes(256, 512), Passes(1, 8192, (1, 4, 8)), Passes(1, 512, xla=True))
PROFILED = (1, 8, 32)  # requests


class Shape:
    """A published shape with random weights, which are made when a section first needs them."""

    def __init__(self, name: str) -> None:
        self.name, self.config = name, SIZES[name]
        self._weights: Any = None

    def sections(self, seconds: float, further: bool) -> Iterator[Section]:
        """Yield the first, or the further sections, of so many seconds; the last one frees the weights."""

        def speculation(name: str, factor: int, *arguments: Any) -> Section:
            return Section(f"{self.name}: {name}", functools.partial(self.speculation, *arguments), factor * seconds)

        def alone(passes: Passes) -> Section:
            return Section(f"{self.name}: {passes}", functools.partial(self.target_alone, passes), seconds)

        first, *others = DRAFTERS
        if further:
            yield from (speculation(kind.name, 1, kind, None, FIXED) for kind in others)
            yield from map(alone, FURTHER)
            for kind in DRAFTERS if self.config.vocab_size > NARROW_VOCAB else ():
                yield speculation(f"{kind.name}, head of {NARROW_VOCAB}", 1, kind, NARROW_VOCAB, {1: (0, 7)})
        else:
            yield Section(f"{self.name}: sizes", self.sizes, 1)
            yield from map(alone, ALONE)
            yield speculation(first.name, 1, first, None, FIXED)
            yield speculation("auto", 2, first, None, ADAPTIVE)
            yield speculation("sampled", 1, first, None, SAMPLED, SamplingParams(1.0))
            yield Section(f"{self.name}: server", self.server, seconds)
            yield Section(f"{self.name}: parts", self.by_part, seconds)
        yield Section(f"{self.name}: {MEMORY}", self.free, 0)

    @property
    def weights(self) -> Any:
        """Make the weights once. Raises TooLarge."""
        if self._weights is None:
            needed, stats = ROOM * random_bytes(self.config), jax.devices()[0].memory_stats() or {}
            free = stats.get("bytes_limit", float("inf")) - stats.get("bytes_in_use", 0)
            if needed > free:
                raise TooLarge(f"{self.name} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
            self._weights = self.random_weights()
        return self._weights

    def random_weights(self) -> Any:
        return random_params(self.config, 0)

    def free(self) -> Iterator[Json]:
        """Free the weights."""
        self._weights = None
        gc.collect()
        yield from ()

    def pair(self, drafter: Any = None, weights: Any = None) -> Pair:
        """Make a pair of the target, or of these weights of it, and a drafter."""
        layers = () if drafter is None else drafter.aux_layer_ids
        params = self.weights if weights is None else weights
        targets = GptOss(params, self.config, aux_layer_ids=layers), GptOss(params, self.config)
        return Pair(*targets, drafter, None, prefill_chunk=default_chunk())

    def sizes(self) -> Iterator[Json]:
        """Compute the bytes of weights and caches."""
        model = GptOss(jax.eval_shape(lambda: random_params(self.config, 0, as_stored=True)), self.config)
        pages = jax.eval_shape(lambda: model.init_cache(1, 1024, 16).pages)
        sizes = {"weight_bytes": random_bytes(self.config), "cache_bytes_for_1024": tree_bytes(pages)}
        yield {"shape": self.name, **sizes}

    def target_alone(self, passes: Passes) -> Iterator[Json]:
        """Measure passes of the target; by XLA only if CUDA ran before, and XLA takes the layout."""
        weights, most_rows = self.weights, calls.MAX_ROWS if cuda.available() else 0
        if passes.xla:
            if not cuda.available() or isinstance(weights.layers[0].moe.experts, TiledExperts):
                return
            weights, most_rows = dataclasses.replace(weights, implementation="xla"), 0
        pair = self.pair(weights=weights)
        yield from passes.measure(self.name, pair, lambda rows: "CUDA" if rows <= most_rows else "XLA", NEW_TOKENS)

    def by_part(self) -> Iterator[Json]:
        """Measure the parts of a plain step, by the number of requests."""
        for batch in PROFILED:
            engine = synthetic_engine(self.pair(), 0, batch, PUBLISHED_RATE)
            engine.warm_up()
            requests = [random_request(self.config.vocab_size, number, PROFILED_TOKENS) for number in range(batch)]
            with tempfile.TemporaryDirectory() as directory:
                spent = parts(engine, requests, Path(directory))
            read = bytes_of_parts(self.weights, self.config, batch, PROMPT_TOKENS + PROFILED_TOKENS // 2)
            for part, us in spent.items():
                row = {"shape": self.name, "part": part, "batch": batch, "us": us, "mb": read.get(part, 0.0) / 1e6}
                yield {**row, "gb_per_s": 1e3 * row["mb"] / us} if row["mb"] and us else row

    def server(self) -> Iterator[Json]:
        """Compare the server with its engine alone."""
        yield from ({"shape": self.name, **row} for row in over_engine(self.pair()))

    def speculation(
        self,
        kind: DrafterGeometry,
        vocab: int | None,
        batches: Batches,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  # frozen
    ) -> Iterator[Json]:
        """Time steps with a drafter of a public geometry, in turns with plain decoding.

        Acceptance is drawn at PUBLISHED_RATE^i. The head is over the whole vocabulary or over a part of it; one
        sequence, and with the whole head several together. The programs of fixed K are compiled first, those of several
        engines at once; auto also measures what its passes cost, so each batch's begins before its lines.
        """
        vocab_size = self.config.vocab_size
        pair = self.pair(self.random_drafter(kind, vocab))
        line = {
            "shape": self.name,
            "synthetic_acceptance": PUBLISHED_RATE,
            "drafter": kind.name,
            "vocab_size": vocab_size,
            "draft_vocab": vocab or vocab_size,
            "temperature": sampling.temperature,
        }
        engines = {
            batch: {k: synthetic_engine(pair, k, batch, PUBLISHED_RATE) for k in ks} for batch, ks in batches.items()
        }
        started = time.perf_counter()
        with ThreadPoolExecutor() as pool:
            fixed = [engine for by_k in engines.values() for k, engine in by_k.items() if k != AUTO]
            list(pool.map(lambda engine: engine.warm_up(sampled=sampling.temperature > 0), fixed))
        yield {"shape": self.name, "batches": list(engines), "compiling_s": time.perf_counter() - started}
        for batch, by_k in engines.items():
            if AUTO in by_k:
                by_k[AUTO].warm_up(sampled=sampling.temperature > 0)
            requests = [random_request(vocab_size, number, sampling=sampling) for number in range(batch)]
            for row in time_steps(by_k, requests, REPEATS):
                yield line | row

    def random_drafter(self, kind: DrafterGeometry, draft_vocab: int | None) -> Any:
        """Make a drafter that shares its target's embedding: 80 GB have little room besides the 120b."""
        shape = kind.config(self.config, draft_vocab)
        make = jax.jit(lambda key: init_drafter(shape, key, jnp.bfloat16).replace(embedding=None))
        return drafter_of(self.on_device(make, jax.random.key(3)).replace(embedding=self.weights.embedding), shape)

    def on_device(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Make arrays on the device."""
        return make(*arguments)
