"""Everything that is to be known of this project on a GPU, in one call: is it right there, and how fast is it?

    python -m scripts.gpu_check --out DIR                          # on a GPU: 20b and 120b shapes, about ten minutes
    python -m scripts.gpu_check --out DIR --shapes 20b --minutes 5
    python -m scripts.gpu_check --out DIR --shapes tiny --any-device    # the same on whatever there is, to try it out

Needs no network, no checkpoint and no installation (run it in the checkout): weights are random and made in the
device's memory. First what must be right: the conformance suite, logits against the CPU's, losslessness. Then what is
measured, for each shape: prefill, decoding, verify passes, steps of speculation whose acceptance is drawn at given
rates (marked synthetic: it says what a step costs, nothing of any drafter), and where a step's time goes.

`--out` (which must not exist yet) gets a line in raw.jsonl as soon as anything is known, so that a run that is cut off
has lost nothing, and at the end run.json and README.md. What does not fit into --minutes is named as left out.
Exit code 1: something is wrong, or could not be measured.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafter.params import init_params as init_drafter
from drafter.propose import drafter_of
from peagle.bench import BenchOptions, bench
from peagle.config import SamplingConfig, SpeculationConfig
from peagle.generate import Engine, Request
from peagle.metrics import Result, decode, pooled_counters, pooled_tok_per_s
from peagle.ngram import NGram
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.pair import Pair
from peagle.profile import profile
from scripts.crossover import IN_TURN, NARROW_VOCAB, Kind
from scripts.make_random_checkpoint import SIZES
from scripts.results import RawLines, in_one_line, origin, write_page
from target.config import TargetConfig
from target.model import GptOss
from target.random import random_bytes, random_params

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
PARALLEL = Kind("P-EAGLE, 4 layers", 4, True)  # the public 20b drafter's geometry
SYNTHETIC = 0.76  # unconditional rate .76^i at draft i: 3.70 tokens a step at K = 7, as published for MT-Bench
SUITE = ("tests/ops/test_expert_matmul.py", "tests/ops/test_mxfp4.py", "tests/ops/test_attention.py")
SUITE += ("tests/ops/test_kv_cache.py", "tests/drafter/test_model.py", "tests/peagle/test_accept.py")
NEW_TOKENS, REPEATS = 128, 3
ROOM = 1.15  # of the weights: caches, and what a pass needs on the way


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    run: Callable[[], Iterator[Json]]
    seconds: float  # it may take


def bandwidth() -> Iterator[Json]:
    """What the device's memory gives: a large array read and written."""
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


def conformance() -> Iterator[Json]:
    """The kernels' suite, which is the same on every device."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-x", *SUITE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=None,
    )
    yield {"ok": done.returncode == 0, "said": (done.stdout + done.stderr)[-2000:]}


def parity() -> Iterator[Json]:
    """Logits of a small model, dequantised and fused forms alike, against the CPU's in float32."""
    config = SIZES["tiny"]
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 48), np.int32)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        params = random_params(config, 0, jnp.float32)
        expected = np.asarray(verified(params, config, ids))
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(verified(jax.device_put(params, jax.devices()[0]), config, ids))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, params)
    rounded = np.asarray(verified(jax.device_put(half, jax.devices()[0]), config, ids))
    for name, found, allowed in (("float32", ours, 1e-3), ("bfloat16", rounded, 0.3)):
        far = float(np.abs(found - expected).max() / expected.std())
        yield {"dtype": name, "max_difference": far, "ok": far < allowed}


def verified(params: Any, config: TargetConfig, ids: np.ndarray) -> jax.Array:
    """Logits of all tokens behind the first four rows' worth, by verify passes of four rows."""
    target = GptOss(params, config)
    width = 4
    cache = target.init_cache(len(ids), ids.shape[1], width)
    step = jax.jit(lambda model, tokens, lengths, cache: model.verify(tokens, lengths, cache))
    found = []
    for start in range(0, ids.shape[1], width):
        lengths = jnp.full((len(ids),), start, jnp.int32)
        output, cache = step(target, jnp.asarray(ids[:, start : start + width]), lengths, cache)
        found.append(output.logits.astype(jnp.float32))
    return jnp.concatenate(found, axis=1)


def losslessness() -> Iterator[Json]:
    """Speculation says what plain decoding says, greedy and sampled, in float32."""
    config = SIZES["tiny"]
    with jax.default_matmul_precision("highest"):
        params = random_params(config, 1, jnp.float32)
        for name, drafting in (("ngram", NGram()), (PARALLEL.name, random_drafter(PARALLEL, config, jnp.float32))):
            pair = pair_of(params, config, drafting)
            for temperature in (0.0, 1.0):
                fast, plain = (
                    decode(engine(pair, k, 1, 192, SamplingConfig(temperature)), [request(config, 32, 96)], None)[0]
                    for k in (5, 0)
                )
                yield {
                    "drafter": name,
                    "temperature": temperature,
                    "ok": fast.output_ids == plain.output_ids,
                    "acceptance_length": fast.acceptance_length,
                }


def target_alone(name: str, params: Any, config: TargetConfig) -> Iterator[Json]:
    """Prefill, decoding and verify passes; by batch and by context."""
    pair = pair_of(params, config, None)
    for batch, context in ((1, 512), (4, 512), (8, 512), (32, 512), (1, 8192)):
        if context + NEW_TOKENS >= config.max_positions:
            continue
        first = batch == 1 and context == 512
        options = BenchOptions(
            prompt_lengths=(512, 2048) if first else (),
            new_tokens=(NEW_TOKENS,),
            widths=(1, 2, 4, 8, 16) if batch == 1 else (),
            context=context,
            batch=batch,
            repeats=REPEATS,
        )
        found = bench(pair, options)
        for each in found.measurements:
            yield {
                "shape": name,
                "kind": each.case.kind,
                "size": each.case.size,
                "batch": batch,
                "context": context,
                "ms_per_pass": dataclasses.asdict(each.ms_per_pass),
                "tok_per_s": dataclasses.asdict(each.tok_per_s),
                "v": found.v(each),
                "peak_bytes": peak_bytes(),
            }


def speculation(name: str, params: Any, config: TargetConfig) -> Iterator[Json]:
    """Steps with drafters of the public geometry and of EAGLE-3, acceptance drawn at SYNTHETIC^i; plain beside it in
    turns; the head over the whole vocabulary and over a part of it."""
    asked = request(config, 512, NEW_TOKENS)
    for kind in (PARALLEL, IN_TURN):
        for vocab in (None, NARROW_VOCAB):
            if vocab is not None and vocab >= config.vocab_size:
                continue
            pair = pair_of(params, config, random_drafter(kind, config, jnp.bfloat16, vocab))
            engines = {k: synthetic_engine(pair, k) for k in (0, 1, 2, 3, 5, 7)}
            for each in engines.values():
                each.warm_up([asked])
            runs: dict[int, list[Result]] = {k: [] for k in engines}
            for repeat in range(REPEATS):
                for k in sorted(engines, reverse=repeat % 2 == 1):
                    runs[k] += decode(engines[k], [asked], None)
            plain_s = statistics.median(step_seconds(result) for result in runs[0])
            for k, results in runs.items():
                step_s = statistics.median(step_seconds(result) for result in results)
                counters = pooled_counters(results)
                yield {
                    "shape": name,
                    "synthetic_acceptance": SYNTHETIC,
                    "drafter": kind.name,
                    "draft_vocab": vocab or config.vocab_size,
                    "k": k,
                    "tok_per_s": pooled_tok_per_s(results),
                    "step_ms": 1e3 * step_s,
                    "cycle_cost": step_s / plain_s,
                    "tokens_a_step": counters.acceptance_length if counters else 1.0,
                    **(shares(engines[k], asked) if vocab is None and k in (0, 7) else {}),
                }


def shares(engine: Engine, asked: Request) -> Json:
    """Where a step's time goes, or why that is not known."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = profile(engine, [asked], Path(directory))
        except (InputError, OSError, RuntimeError) as error:
            return {"profile": str(error)}
    return {"profile": dataclasses.asdict(found) | {"directory": None}}


def step_seconds(result: Result) -> float:
    return (result.decode_s or 0.0) / len(result.decisions)


def synthetic_engine(pair: Pair, k: int) -> Engine:
    rates = tuple(SYNTHETIC ** (i + 1) for i in range(k)) if k else None
    return engine(pair, k, 1, 1024, SamplingConfig(synthetic_acceptance=rates))


def engine(pair: Pair, k: int, batch: int, capacity: int, sampling: SamplingConfig) -> Engine:
    return pair.engine(SpeculationConfig(k, batch, min(capacity, pair.max_positions), sampling), ignore_eos=True)


def request(config: TargetConfig, prompt_tokens: int, new_tokens: int) -> Request:
    ids = np.random.default_rng(2).integers(0, config.vocab_size, prompt_tokens)
    return Request(0, tuple(map(int, ids)), new_tokens)


def random_drafter(kind: Kind, config: TargetConfig, dtype: Any, draft_vocab: int | None = None) -> Any:
    shape = kind.config(config, draft_vocab)
    return drafter_of(jax.jit(init_drafter, static_argnums=(0, 2))(shape, jax.random.key(3), dtype), shape)


def pair_of(params: Any, config: TargetConfig, drafter: Any) -> Pair:
    taps = () if drafter is None or isinstance(drafter, NGram) else drafter.aux_layer_ids
    return Pair(GptOss(params, config, aux_layer_ids=taps), GptOss(params, config), drafter, None)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def peak_bytes() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def shape_sections(name: str, seconds: float) -> Iterator[Section]:
    config = SIZES[name]
    held: list[Any] = []  # the weights, made when they are first needed and let go after the last

    def weights() -> Any:
        if not held:
            needed, stats = ROOM * random_bytes(config), jax.devices()[0].memory_stats() or {}
            if needed > stats.get("bytes_limit", float("inf")) - stats.get("bytes_in_use", 0):
                raise InputError(f"{name} needs {needed / 1e9:.1f} GB, more than the device has free")
            held.append(random_params(config, 0))
        return held[0]

    def alone() -> Iterator[Json]:
        yield {"shape": name, "weight_bytes": random_bytes(config)}
        yield from target_alone(name, weights(), config)

    def speculating() -> Iterator[Json]:
        yield from speculation(name, weights(), config)
        held.clear()
        gc.collect()

    yield Section(f"{name}: target", alone, seconds)
    yield Section(f"{name}: speculation", speculating, seconds)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--shapes", default="20b,120b", help=f"of {', '.join(SIZES)} (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=9.5, help="nothing is begun behind them (default %(default)s)")
    parser.add_argument("--any-device", action="store_true", help="go on without a GPU")
    arguments = parser.parse_args()
    return in_one_line("gpu_check", lambda: check(arguments))


def check(arguments: argparse.Namespace) -> int:
    """Everything is checked before anything runs."""
    shapes = arguments.shapes.split(",")
    if unknown := [name for name in shapes if name not in SIZES]:
        raise InputError(f"--shapes names {unknown[0]}; expected some of {', '.join(SIZES)}")
    if not on_gpu() and not arguments.any_device:
        raise InputError(
            f"JAX computes on {jax.default_backend()}, not on a GPU; give --any-device to go on all the same"
        )
    expect_new(arguments.out)
    raw = RawLines(arguments.out)

    def log(section: Section, line: Json) -> None:
        raw.add({"section": section.name, **line})
        print(f"{section.name}: {json.dumps(line)[:200]}", flush=True)

    sections = [Section("bandwidth", bandwidth, 10), Section("parity", parity, 30)]
    sections += [Section("losslessness", losslessness, 40), Section("conformance", conformance, 120)]
    sections += [section for name in shapes for section in shape_sections(name, 90)]
    started = time.monotonic()
    for section in sections:
        left = 60 * arguments.minutes - (time.monotonic() - started)
        if left < section.seconds / 2:
            log(section, {"left_out": f"{left:.0f} s are left of --minutes {arguments.minutes:g}"})
            continue
        try:
            for line in section.run():
                log(section, line)
        except Exception as error:  # one section's failure must not cost the others' figures
            log(section, {"ok": False, "error": repr(error)[:500], "at": traceback.format_exc()[-1500:]})
    record = {"schema": 1, "provenance": origin("scripts.gpu_check"), "config": {"shapes": shapes}, "rows": raw.lines}
    write_page(arguments.out, record, page(record))
    return 1 if any(line.get("ok") is False for line in raw.lines) else 0


def page(record: Json) -> str:
    """README.md of the run."""
    source, rows = record["provenance"], record["rows"]
    device = source["device"]
    lines = [
        "# On one GPU: right, and how fast",
        "",
        f"`{source['command']}`",
        "",
        f"{device['kind']} ({device['platform']}); jaxlib {source['packages']['jaxlib']}; {source['time']}. Random "
        f"weights; acceptance of speculation is synthetic, {SYNTHETIC}^i at draft i: it says what steps cost.",
        "",
        "| check | result |",
        "|---|---|",
    ]
    for row in rows:
        if "ok" in row or "copy_gb_per_s" in row or "left_out" in row:
            said = {key: value for key, value in row.items() if key not in ("section", "said", "at")}
            lines.append(f"| {row['section']} | {', '.join(f'{key} {_short(value)}' for key, value in said.items())} |")
    alone = [row for row in rows if "kind" in row]
    if alone:
        lines += ["", "| shape | test | batch | context | ms a pass | tok/s | v(T) |", "|---|---|---|---|---|---|---|"]
        for row in alone:
            v = "-" if row["v"] is None else f"{row['v']:.2f}"
            lines.append(
                f"| {row['shape']} | {row['kind']} {row['size']} | {row['batch']} | {row['context']} | "
                f"{_spread(row['ms_per_pass'])} | {_spread(row['tok_per_s'])} | {v} |"
            )
    steps = [row for row in rows if "cycle_cost" in row]
    if steps:
        lines += ["", "| shape | drafter | head | K | ms a step | c(K) | tokens a step (synthetic) | tok/s |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for row in steps:
            lines.append(
                f"| {row['shape']} | {row['drafter']} | {row['draft_vocab']} | {row['k']} | {row['step_ms']:.3f} | "
                f"{row['cycle_cost']:.2f} | {row['tokens_a_step']:.2f} | {_short(row['tok_per_s'])} |"
            )
    return "\n".join([*lines, ""])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")[:160]


def _spread(figure: Json) -> str:
    return f"{figure['median']:.4g} ({figure['lowest']:.4g}..{figure['highest']:.4g})"


if __name__ == "__main__":
    sys.exit(main())
