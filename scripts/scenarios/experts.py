"""Compare the ways to compute a layer's experts, over the rows of a pass.

    python -m scripts.bench experts --out RUN M L

A layer of random weights in MXFP4, with norm and router, once by each form that the project has: those of XLA
(peagle.ops.expert_matmul.reference), and the compiled kernels of this machine. Forms take turns. A form is left out
where it took longer than --most-ms with fewer rows, or would take more than half of the free memory.
"""

import argparse
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle.base.errors import InputError
from peagle.base.files import expect_new
from peagle.base.memory import available_memory_bytes
from peagle.loading.defaults import chosen_implementation
from peagle.measure.reports import Block
from peagle.ops import cuda
from peagle.ops.expert_matmul import expert_block, reference
from peagle.ops.expert_matmul.routing import route_top_k
from peagle.ops.kernels import Implementation
from peagle.ops.linear import linear
from peagle.ops.norm import Norm, rms_norm
from peagle.workflows.random_checkpoint import SIZES, write_random_checkpoint
from scripts import runs
from scripts.runs import Json, Run, spread, turns
from target.config import TargetConfig
from target.load import load_target
from target.params import MoeParams

FORMS: Mapping[str, tuple[reference.Form, str]] = {
    "all_in_turn": (reference.all_experts_in_turn, "all rows through every expert, one expert after the other"),
    "gathered": (reference.selected, "each row's experts, one pair of row and expert after the other"),
    "gathered_at_once": (reference.all_pairs, "the same pairs, all at once"),
    "packed": (reference.grouped, "rows sorted by expert, in blocks of 16; experts without rows are skipped"),
    "packed_blocks": (reference.in_blocks, "the same in a fixed number of larger blocks, as accelerators need"),
}
KERNEL = "kernel"
Half = Callable[[MoeParams, jax.Array], jax.Array]  # the second half of a target's layer
VOCABULARY = 512  # of the layer's checkpoint, which has no use for one
TIMED_S = 0.02  # calls of one measurement take at least this long


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sizes", nargs="+", metavar="SIZE", help=f"of {', '.join(SIZES)}")
    runs.add_run_options(parser, 3)
    rows = ",".join(str(2**n) for n in range(12))
    parser.add_argument("--rows", default=rows, help="of a pass (default %(default)s)")
    parser.add_argument("--most-ms", type=int, default=1000, help="of a pass (default %(default)s)")


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check everything before anything runs, then measure."""
    expect_new(options.out)
    runs.expect_least(1, options, "rounds", "most_ms")
    if unknown := [size for size in options.sizes if size not in SIZES]:
        raise InputError(f"{unknown[0]} is no size; expected some of {', '.join(SIZES)}")
    counts = runs.numbers("--rows", options.rows)
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    run = Run(options.out, typed, {"rounds": options.rounds, "most_ms": options.most_ms, "dtype": str(dtype)})
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            blocks = blocks_of(Path(scratch), SIZES[size], dtype)
        last = dict.fromkeys(blocks, 0.0)  # seconds at the last number of rows, of forms that were timed
        for count in counts:
            runs.say(f"{size}, {count} rows")
            x = jnp.asarray(np.random.default_rng(count).standard_normal((count, SIZES[size].hidden_size)), dtype)
            passes = {name: compiled(*blocks[name], x) for name in last if 1e3 * last[name] <= options.most_ms}
            times = time_passes({name: call for name, call in passes.items() if call is not None}, options.rounds)
            last = {name: statistics.median(values) for name, values in times.items()}
            figures = {f"{name}_ms": spread([1e3 * value for value in values]) for name, values in times.items()}
            best = min(last.keys() & FORMS.keys(), key=lambda name: last[name], default=None)
            run.extend([{"size": size, "rows": count, **figures, "best_of_xla": best and runs.header(best)}])
    runs.say("")
    run.write(page, rows=run.lines)
    return 0


def blocks_of(scratch: Path, config: TargetConfig, dtype: np.dtype) -> dict[str, tuple[Half, MoeParams]]:
    """Write and load a layer; return each form as a function of the layer and rows [T, D], with its layer."""
    config = dataclasses.replace(config, layer_types=config.layer_types[:1], vocab_size=VOCABULARY)
    write_random_checkpoint(scratch / "layer", config)

    def layer(implementation: Implementation | None) -> MoeParams:
        loaded = load_target(scratch / "layer", dtype=dtype, experts="packed", implementation=implementation)
        return loaded.params.layers[0].moe

    packed, implementation = layer("xla"), chosen_implementation("auto")
    blocks = {name: (functools.partial(by_form, form, config), packed) for name, (form, _) in FORMS.items()}
    if implementation == "native" or cuda.available():
        blocks[KERNEL] = functools.partial(by_kernel, config), layer(implementation)
    return blocks


def by_form(form: reference.Form, config: TargetConfig, moe: MoeParams, x: jax.Array) -> jax.Array:
    rows = rms_norm(x, moe.norm, config.rms_norm_eps)
    choices = route_top_k(linear(rows, moe.router, moe.router_bias, implementation="xla"), config.top_k)
    return x + form(rows, choices, moe.experts, config.swiglu_limit).astype(x.dtype)


def by_kernel(config: TargetConfig, moe: MoeParams, x: jax.Array) -> jax.Array:
    norm = Norm(moe.norm, config.rms_norm_eps)
    y, _ = expert_block(x, norm, moe.router, moe.router_bias, moe.experts, config.top_k, config.swiglu_limit)
    return y


def compiled(block: Half, moe: MoeParams, x: jax.Array) -> Callable[[], object] | None:
    """Compile a form for these rows; None if it takes too much memory."""
    program = jax.jit(block).lower(moe, x).compile()
    if program.memory_analysis().temp_size_in_bytes > available_memory_bytes() / 2:
        return None
    return lambda: jax.block_until_ready(program(moe, x))


def time_passes(passes: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time passes in turns; return the seconds of each, by round. Round 0 warms up."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    calls = dict.fromkeys(passes, 1)
    for number, name in turns([*passes], rounds):
        began = time.perf_counter()
        for _ in range(calls[name]):
            passes[name]()
        seconds = (time.perf_counter() - began) / calls[name]
        if number:
            times[name].append(seconds)
        else:
            calls[name] = max(1, round(TIMED_S / seconds))
    return times


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, rows = record["config"], record["rows"]
    meanings = {f"{name}_ms": meaning for name, (_, meaning) in FORMS.items()}
    meanings[f"{KERNEL}_ms"] = "the compiled kernel of this machine (native, or CUDA)"
    columns = [name for name in meanings if any(name in row for row in rows)]
    return [
        *runs.title("Ways to compute the experts of a layer", record),
        f"One layer of random weights in MXFP4, with norm, router and residual; {config['dtype']} activations; random "
        f"rows, which choose experts nearly evenly. {config['rounds']} rounds in turns: medians, with the least and "
        f"the greatest. Empty: the form took more than {config['most_ms']:,} ms with fewer rows, or would take "
        "more than half of the free memory.",
        runs.table(rows, "size", "rows", *columns, "best_of_xla"),
        "\n".join(f"- **{runs.header(name)}:** {meanings[name]}." for name in columns),
    ]
