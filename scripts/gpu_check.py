"""Check on a GPU in one call that this project is right, and measure how fast it is.

    python -m scripts.gpu_check --out DIR                          # 20b and 120b shapes, about ten minutes
    python -m scripts.gpu_check --out DIR --shapes 20b --minutes 5
    python -m scripts.gpu_check --out DIR --only peers,120b             # these sections alone, for a second call
    python -m scripts.gpu_check --out DIR --mesh tp=2 --mesh tp=4 --only mesh       # also over several GPUs
    python -m scripts.gpu_check --out DIR --shapes tiny --any-device    # a rehearsal on any device

Needs no network, no checkpoint and no installation; run it in the checkout. Only the conformance suite needs what the
tests do. Weights are random and made in the device's memory. First come the checks of `peagle check` (the kernels'
launcher is compiled if it is missing) and the conformance suite. Then, for each shape: prefill, decoding and verify
passes, by XLA's own code, too; the parts of a step; speculation with acceptance drawn at given rates (marked synthetic:
it measures what a step costs), by drafter, head and batch; and this project beside transformers (scripts.bench peers).
With --mesh also a small target over those devices against the whole one, and the passes of a larger one over them.

`--out` (which must not exist yet) gets a line in raw.jsonl with every figure, so that a run that is cut off has lost
nothing, and run.json and README.md after each section. Sections that do not fit into --minutes are named as left out;
the section that runs when they end stops at its next line.
Exit code 1: something is wrong, or could not be measured.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from drafter.params import init_params as init_drafter
from drafter.propose import drafter_of
from peagle.config import AUTO, NumDrafts
from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request
from peagle.loading import default_chunk, load
from peagle.measure.bench import BenchOptions, bench
from peagle.measure.profile import profile
from peagle.ops import cuda
from peagle.ops.cuda import calls
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.expert_matmul import TiledExperts
from peagle.ops.files import expect_new
from peagle.ops.kernels import for_weights
from peagle.ops.kernels import in_words as kernels_in_words
from peagle.ops.memory import tree_bytes
from peagle.ops.native.build import LAUNCHER, BuildError, build_launcher
from peagle.ops.strict_json import dumps
from peagle.pair import Pair
from peagle.parallel import MeshShape, make_meshes, parse_mesh, refuse_replicas
from peagle.workflows.check import CHECKED, MOST_OFF, Finding, check_kernels, check_logits, check_losslessness
from peagle.workflows.random_checkpoint import (
    IN_BLOCKS,
    IN_TURN,
    PARALLEL,
    SIZES,
    DrafterShape,
    write_random_checkpoint,
)
from scripts.gpu.mesh import CONFIG, compare, loud_target
from scripts.gpu.page import page
from scripts.gpu.parts import bytes_of_parts, parts
from scripts.runs import ROOT, Json, Progress, RawLines, add_run_options, in_one_line, new_parser, origin, write_run
from scripts.steps import NEW_TOKENS, PROMPT_TOKENS, PUBLISHED_RATE, random_request, synthetic_engine, time_steps
from target.config import TargetConfig
from target.model import GptOss
from target.random import random_bytes, random_params
from target.shard import check_ranks

NARROW_VOCAB = 32768  # a reduced draft vocabulary, as drafters of large vocabularies have
SUITE = (
    *("tests/ops/test_expert_matmul.py", "tests/ops/test_mxfp4.py", "tests/ops/test_attention.py"),
    *("tests/ops/test_paged_attention.py", "tests/drafter/test_model.py", "tests/peagle/engine/test_accept.py"),
)
# warnings of newer versions on the machine, and plugins that conflict with xdist, must not stop the suite
SUITE_OPTIONS = ("--maxfail", "20", "--tb", "line", "-p", "no:benchmark", "-W", "default")
SUITE_NEEDS = ("pytest", "xdist", "hypothesis", "beartype")
REPEATS = 3
PROFILED_TOKENS = 48
MOST_WORKERS = 12  # of the suite: each takes a part of the device's memory
SUITE_S, PEERS_S = 180, 300  # time limits
PEERS, PEERS_TRIED_OUT = "L", "tiny"  # the checkpoint that engines are compared on: two layers as the 20b's
# acceptance lengths on MT-Bench: P-EAGLE (arXiv 2602.01469), tables 9 and 10, and for K = 7 vLLM's post on it
_PAPER, _POST = "arXiv 2602.01469", "vLLM's post"
PUBLISHED = tuple(
    {"shape": shape, "drafter": drafter, "k": k, "acceptance_length": length, "source": source}
    for shape, drafter, k, length, source in (
        ("20b", IN_TURN.name, 5, 3.4, _PAPER),
        ("20b", PARALLEL.name, 5, 3.4, _PAPER),
        ("20b", PARALLEL.name, 7, 3.70, _POST),
        ("120b", IN_TURN.name, 5, 2.7, _PAPER),
        ("120b", PARALLEL.name, 5, 2.9, _PAPER),
    )
)
DRAFTERS = (PARALLEL, IN_TURN, IN_BLOCKS)
Batches: TypeAlias = dict[int, tuple[NumDrafts, ...]]  # K by the number of requests
FIXED: Batches = {1: (0, 5, 7), 8: (0, 3)}
ADAPTIVE: Batches = dict.fromkeys((1, 8, 32), (0, AUTO))
MEMORY = "memory"  # ends the name of the section that frees a shape's weights, which always runs
PATIENCE = 1.25  # times its own limit after which a section stops at its next line
ROOM = 1.15  # of the weights: caches, and the temporary memory of a pass


class TooLarge(Exception):
    """A shape does not fit into the device."""


@dataclasses.dataclass(frozen=True)
class Section:
    """Measurements that are left out, or fail, together."""

    name: str
    run: Callable[[], Iterator[Json]]
    seconds: float  # its limit; 0: none


def bandwidth() -> Iterator[Json]:
    """Time a copy of a large array: the bandwidth of the device's memory."""
    size = 1 << (29 if on_gpu() else 24)
    source = jnp.zeros((size,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copy(source).block_until_ready()
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        copy(source).block_until_ready()
        seconds.append(time.perf_counter() - started)
    yield {"copy_gb_per_s": 8 * size / statistics.median(seconds) / 1e9}


def prepare_kernels() -> None:
    """Compile the GPU kernels' launcher if it is missing; then check the kernels."""
    if on_gpu() and not LAUNCHER.exists():
        try:
            build_launcher()
        except BuildError as error:
            print(error, file=sys.stderr)
    cuda.status()


def kernels() -> Iterator[Json]:
    """Say which kernels run here, or why none do."""
    yield line_of(check_kernels())


def parity() -> Iterator[Json]:
    """Compare logits of small models with the CPU's."""
    for size in CHECKED:
        yield from map(line_of, check_logits(size))


def losslessness() -> Iterator[Json]:
    """Compare speculation with plain decoding, greedy and sampled."""
    yield from map(line_of, check_losslessness())


def line_of(finding: Finding) -> Json:
    """Make a line of raw.jsonl from a check."""
    return {"check": finding.name, "ok": finding.ok, "found": finding.found}


def python(seconds: float, module: str, *options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m module` in the checkout. Raises TimeoutExpired after so many seconds."""
    command = [sys.executable, "-m", module, *options]
    process = {"cwd": ROOT, "env": {**os.environ, **environment}, "timeout": seconds}
    return subprocess.run(command, capture_output=True, text=True, check=False, **process)  # type: ignore[call-overload]


def conformance() -> Iterator[Json]:
    """Run the kernels' tests, the same on every device."""
    if missing := [name for name in SUITE_NEEDS if importlib.util.find_spec(name) is None]:
        yield {"ok": False, "error": f"not run: it needs {', '.join(missing)}; pip install '.[test]'"}
        return
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    precise = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # not TF32, whose ten bits are a GPU's default
    done = python(SUITE_S, "pytest", "-q", "-n", str(workers), *SUITE_OPTIONS, *SUITE, **precise)
    yield {"ok": done.returncode == 0, "said": (done.stdout + done.stderr)[-2000:]}


def peers() -> Iterator[Json]:
    """Compare this project, its XLA form and transformers, in interleaved processes."""
    with tempfile.TemporaryDirectory() as directory:
        size = PEERS if on_gpu() else PEERS_TRIED_OUT
        checkpoint, out = Path(directory) / size, Path(directory) / "out"
        write_random_checkpoint(checkpoint, SIZES[size])
        options = ["--out", str(out), "--engines", "peagle-xla,transformers-bf16", "--rounds", "3", "--seconds", "0.2"]
        done = python(PEERS_S, "scripts.bench", "peers", str(checkpoint), *options)
        if done.returncode:
            raise RuntimeError(" ".join(done.stderr.split())[-500:])
        run = json.loads((out / "run.json").read_text(encoding="utf-8"))
    for name, why in run["left_out"].items():
        yield {"engine": name, "left_out": why}
    for row in run["rows"]:
        yield {"peer": row["engine"], **row}


def over_devices(shape: MeshShape) -> Iterator[Json]:
    """Compare a small target over a mesh with the whole one; then time a larger one."""
    name = PEERS if on_gpu() else PEERS_TRIED_OUT
    with tempfile.TemporaryDirectory() as scratch:
        small, large = loud_target(Path(scratch)), Path(scratch) / name
        with jax.default_matmul_precision("highest"):  # not TF32, whose ten bits are a GPU's default
            (row,) = compare(small, for_weights(), (shape,), Progress())
        yield {"ok": row["error_in_spreads"] < MOST_OFF and row["same_tokens"] == row["answers"], **row}
        write_random_checkpoint(large, SIZES[name])
        for mesh in (str(shape), None):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", InputWarning)  # of the missing tokenizer and stop token
                pair = load(large, None, mesh=mesh)
            where = f"{name}, {mesh or 'one device'}"
            yield from OVER_DEVICES.measure(where, pair, lambda _: kernels_in_words(), 64)


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
ALONE = (
    Passes(1, 512, (1, 2, 4, 8), (512, 2048, 8192)),
    Passes(8, 512, (1, 4)),
    Passes(32, 512),
    Passes(64, 512),
)
FURTHER = (Passes(256, 512), Passes(1, 8192, (1, 4, 8)), Passes(1, 512, xla=True))
PROFILED = (1, 8, 32)  # requests


def target_alone(name: str, params: Any, config: TargetConfig, passes: Passes) -> Iterator[Json]:
    """Measure passes of a shape; by XLA only if CUDA ran before, and XLA takes the layout."""
    if passes.xla and (not cuda.available() or isinstance(params.layers[0].moe.experts, TiledExperts)):
        return
    weights = dataclasses.replace(params, implementation="xla") if passes.xla else params
    most_rows = calls.MAX_ROWS if cuda.available() and not passes.xla else 0
    pair = pair_of(weights, config, None)
    yield from passes.measure(name, pair, lambda rows: "CUDA" if rows <= most_rows else "XLA", NEW_TOKENS)


def speculation(
    name: str, params: Any, config: TargetConfig, kind: DrafterShape, vocab: int | None, batches: Batches
) -> Iterator[Json]:
    """Time steps with a drafter of a public geometry, and plain decoding beside them in turns.

    Acceptance is drawn at PUBLISHED_RATE^i. The head is over the whole vocabulary or over a part of it; one sequence,
    and with the whole head several together. All programs are compiled first, those of several engines at once; auto
    also measures what its passes cost, so one after the other.
    """
    pair = pair_of(params, config, random_drafter(kind, config, vocab, params.embedding))
    line = {
        "shape": name,
        "synthetic_acceptance": PUBLISHED_RATE,
        "drafter": kind.name,
        "vocab_size": config.vocab_size,
        "draft_vocab": vocab or config.vocab_size,
    }
    engines = {
        batch: {k: synthetic_engine(pair, k, batch, PUBLISHED_RATE) for k in ks} for batch, ks in batches.items()
    }
    started = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        fixed = [engine for of_batch in engines.values() for k, engine in of_batch.items() if k != AUTO]
        list(pool.map(lambda engine: engine.warm_up(), fixed))
    for of_batch in engines.values():
        if AUTO in of_batch:
            of_batch[AUTO].warm_up()
    yield {"shape": name, "batches": list(engines), "compiling_s": time.perf_counter() - started}
    for batch, of_batch in engines.items():
        requests = [random_request(config.vocab_size, number) for number in range(batch)]
        for measured in time_steps(of_batch, requests, REPEATS):
            yield line | measured
    if vocab is None and 7 in engines[1]:  # last, since its program compiles anew
        yield line | {"batch": 1, "k": 7} | shares(engines[1][7], random_request(config.vocab_size, 0))


def by_part(name: str, params: Any, config: TargetConfig) -> Iterator[Json]:
    """Measure the parts of a plain step, by the number of requests."""
    for batch in PROFILED:
        engine = synthetic_engine(pair_of(params, config, None), 0, batch, PUBLISHED_RATE)
        engine.warm_up()
        requests = [random_request(config.vocab_size, number, PROFILED_TOKENS) for number in range(batch)]
        with tempfile.TemporaryDirectory() as directory:
            spent = parts(engine, requests, Path(directory))
        read = bytes_of_parts(params, config, batch, PROMPT_TOKENS + PROFILED_TOKENS // 2)
        for part, us in spent.items():
            yield {"shape": name, "part": part, "batch": batch, "us": us, "mb": read.get(part, 0.0) / 1e6}


def shares(engine: AnyEngine, request: Request) -> Json:
    """Profile the parts of a step, or say why that failed."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            times = profile(engine, [request], Path(directory))
        except (InputError, OSError, RuntimeError) as error:
            return {"profile": str(error)}
    return {"profile": dataclasses.asdict(times) | {"directory": None}}


def random_drafter(kind: DrafterShape, config: TargetConfig, draft_vocab: int | None, embedding: jax.Array) -> Any:
    """Make a drafter that shares its target's embedding: 80 GB have little room beside the 120b."""
    shape = kind.config(config, draft_vocab)
    make = jax.jit(lambda key: init_drafter(shape, key, jnp.bfloat16).replace(embedding=None))
    return drafter_of(make(jax.random.key(3)).replace(embedding=embedding), shape)


def pair_of(params: Any, config: TargetConfig, drafter: Any) -> Pair:
    layers = () if drafter is None else drafter.aux_layer_ids
    targets = GptOss(params, config, aux_layer_ids=layers), GptOss(params, config)
    return Pair(*targets, drafter, None, prefill_chunk=default_chunk())


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def checked_mesh(text: str) -> MeshShape:
    """Parse a mesh. Raises InputError for dp, too few devices, and targets it cannot divide."""
    refuse_replicas(text, "this measures the passes of one copy")
    shape = parse_mesh(text)
    for config in (CONFIG, SIZES[PEERS if on_gpu() else PEERS_TRIED_OUT]):
        check_ranks(config, shape.tp, shape.ep)
    make_meshes(shape)
    return shape


def shape_sections(name: str, seconds: float) -> Iterator[Section]:
    config = SIZES[name]
    held: list[Any] = []  # the weights, made when a section first needs them

    def weights() -> Any:
        if not held:
            needed, stats = ROOM * random_bytes(config), jax.devices()[0].memory_stats() or {}
            free = stats.get("bytes_limit", float("inf")) - stats.get("bytes_in_use", 0)
            if needed > free:
                raise TooLarge(f"{name} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
            held.append(random_params(config, 0))
        return held[0]

    def sizes() -> Iterator[Json]:
        model = GptOss(jax.eval_shape(lambda: random_params(config, 0, as_stored=True)), config)
        pages = jax.eval_shape(lambda: model.init_cache(1, 1024, 16).pages)
        yield {"shape": name, "weight_bytes": random_bytes(config), "cache_bytes_for_1024": tree_bytes(pages)}

    def alone(passes: Passes) -> Iterator[Json]:
        yield from target_alone(name, weights(), config, passes)

    def speculating(kind: DrafterShape, vocab: int | None, batches: Batches) -> Iterator[Json]:
        yield from speculation(name, weights(), config, kind, vocab, batches)

    def free() -> Iterator[Json]:
        held.clear()
        gc.collect()
        yield from ()

    yield Section(f"{name}: sizes", sizes, 1)
    for passes in ALONE:
        yield Section(f"{name}: {passes}", functools.partial(alone, passes), seconds)
    yield Section(f"{name}: parts", lambda: by_part(name, weights(), config), seconds)
    for kind in DRAFTERS:
        yield Section(f"{name}: {kind.name}", functools.partial(speculating, kind, None, FIXED), seconds)
    yield Section(f"{name}: auto", functools.partial(speculating, PARALLEL, None, ADAPTIVE), 2 * seconds)
    if config.vocab_size > NARROW_VOCAB:
        for kind in DRAFTERS:
            run = functools.partial(speculating, kind, NARROW_VOCAB, {1: (0, 7)})
            yield Section(f"{name}: {kind.name}, head of {NARROW_VOCAB}", run, seconds)
    for passes in FURTHER:
        yield Section(f"{name}: {passes}", functools.partial(alone, passes), seconds)
    yield Section(f"{name}: {MEMORY}", free, 0)


def sections_of(shapes: Sequence[str], meshes: Sequence[MeshShape], only: str | None) -> list[Section]:
    """List the sections; `only`: those whose names begin so. Raises InputError if none does."""
    sections = [
        Section("kernels", kernels, 30),
        Section("bandwidth", bandwidth, 10),
        Section("parity", parity, 30),
        Section("losslessness", losslessness, 80),
        Section("conformance", conformance, 120),
        # before this process takes the memory
        Section("peers", peers, 150),
        *(Section(f"mesh {shape}", functools.partial(over_devices, shape), 90) for shape in meshes),
        *(section for name in shapes for section in shape_sections(name, 60)),
    ]
    if only is None:
        return sections
    beginnings = tuple(only.split(","))
    named = [section.name for section in sections if not section.name.endswith(MEMORY)]
    if not any(name.startswith(beginnings) for name in named):
        raise InputError(f"--only {only} names no section; they are {', '.join(named)}")
    return [section for section in sections if section.name.startswith(beginnings) or section.name.endswith(MEMORY)]


def lines_of(section: Section, deadline: float, minutes: float) -> Iterator[Json]:
    """Run a section; yield its lines, and why it was left out, stopped or failed."""
    begun = time.monotonic()
    if section.seconds and deadline - begun < section.seconds / 2:
        yield {"left_out": f"{max(deadline - begun, 0):.0f} s are left of --minutes {minutes:g}"}
        return
    try:
        for line in section.run():
            yield line
            now = time.monotonic()
            if now > deadline:
                yield {"left_out": f"the rest, at the end of --minutes {minutes:g}"}
                return
            if section.seconds and now > begun + PATIENCE * section.seconds:
                yield {"left_out": f"the rest, after {now - begun:.0f} s"}
                return
    except TooLarge as error:
        yield {"left_out": str(error)}
    except subprocess.TimeoutExpired as error:
        yield {"left_out": f"it was stopped after {error.timeout:g} s"}
    except Exception as error:  # one section's failure must not cost the others' figures
        yield {"ok": False, "error": repr(error)[:500], "at": traceback.format_exc()[-1500:]}


def check(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then run the sections."""
    shapes = options.shapes.split(",")
    if unknown := [name for name in shapes if name not in SIZES]:
        raise InputError(f"--shapes names {unknown[0]}; expected some of {', '.join(SIZES)}")
    if not on_gpu() and not options.any_device:
        raise InputError(
            f"JAX computes on {jax.default_backend()}, not on a GPU; give --any-device to go on all the same"
        )
    sections = sections_of(shapes, [checked_mesh(text) for text in options.mesh], options.only)
    expect_new(options.out)
    prepare_kernels()
    raw = RawLines(options.out)
    config = {
        "shapes": shapes,
        "synthetic_acceptance": PUBLISHED_RATE,
        "published": PUBLISHED,
        "drafters": [kind.name for kind in DRAFTERS],
    }
    record = {"schema": 1, "provenance": origin("scripts.gpu_check", typed), "config": config, "rows": raw.lines}
    deadline = time.monotonic() + 60 * options.minutes
    for section in sections:
        for line in lines_of(section, deadline, options.minutes):
            raw.extend([{"section": section.name, **line}])
            print(f"{section.name}: {dumps(line)[:200]}", flush=True)
        write_run(options.out, record, page(record), show=section is sections[-1])
    return 1 if any(line.get("ok") is False for line in raw.lines) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_run_options(parser)
    parser.add_argument("--shapes", default="20b,120b", help=f"of {', '.join(SIZES)} (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.5, help="nothing is begun after them (default %(default)s)")
    parser.add_argument("--only", metavar="SECTIONS", help="those whose names begin so, with commas between")
    parser.add_argument(
        "--mesh", metavar="tp=N,ep=N", action="append", default=[], help="several devices, too; may be repeated"
    )
    parser.add_argument("--any-device", action="store_true", help="go on without a GPU")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(typed)
    # the suite and the peers run in processes of their own
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")  # 120b and 80 GB; three quarters are the default
    return in_one_line("gpu_check", lambda: check(options, typed))


if __name__ == "__main__":
    sys.exit(main())
