"""The time of a step on a GPU, by part of a layer."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from peagle.base.memory import tree_bytes
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.host.engine import Engine
from peagle.engine.host.inspection import launching_alone
from peagle.engine.request import Request
from target.config import TargetConfig
from target.params import TargetParams

EXPERTS, ATTENTION, PRODUCTS, REST = PARTS = ("experts, with router", "attention", "qkv, output and head", "rest")
STEPS = "jit__steps"  # prefix of the module names of peagle.engine.host.programs.steps_program
# prefixes of the names of kernels, with cuBLAS' and XLA's
NAMES = {
    EXPERTS: (
        *("peagle_tiles", "peagle_router", "peagle_choose", "peagle_route", "peagle_gather", "peagle_combine_experts"),
        *("peagle_gate_up", "peagle_down", "peagle_sort"),
    ),
    ATTENTION: ("peagle_attend", "peagle_rotate", "peagle_prompt"),
    PRODUCTS: ("peagle_linear", "nvjet", "gemm", "cutlass", "sm90", "sm80"),
}


def parts(engine: AnyEngine, requests: Sequence[Request], directory: Path) -> dict[str, float]:
    """Decode the requests at once under the profiler; return microseconds of a step by part.

    A kernel may begin, to wait, while the one before still runs: it counts from the end of that one.
    """
    trace, num_steps = record(engine.one, requests, directory)
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    before = 0.0
    for start, end, name in sorted(_kernels(trace)):
        part = next((part for part, names in NAMES.items() if name.startswith(names)), REST)
        spent[part] += max(0.0, end - max(start, before))
        before = max(before, end)
    return {part: nanoseconds / 1e3 / num_steps for part, nanoseconds in spent.items()}


def record(engine: Engine, batch: Sequence[Request], directory: Path) -> tuple[Path, int]:
    """Decode a batch under JAX's profiler; return (the trace's file in an empty directory, the number of steps).

    On a GPU the programs launch every operation alone (`launching_alone`).
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python takes longer than the steps
    with launching_alone(engine.executor) as recompiles:
        if recompiles:  # before the trace
            list(engine.generate(batch))
        with jax.profiler.trace(str(directory), profiler_options=options):
            num_steps = sum(len(chunk.steps) for index, chunk in engine.generate(batch) if index == 0)
    (trace,) = directory.glob("**/*.xplane.pb")
    return trace, num_steps


def bytes_of_parts(params: TargetParams, config: TargetConfig, rows: int, context: int) -> dict[str, float]:
    """Estimate the bytes that parts of a plain step read, for `rows` sequences of `context`; experts at random."""
    dense = tree_bytes([(layer.attention.qkv, layer.attention.out) for layer in params.layers])
    selected = 1 - (1 - config.top_k / config.num_experts) ** rows
    a_row = 2 * config.num_kv_heads * config.head_dim * params.dtype.itemsize
    positions = (min(context, config.window(layer) or context) for layer in range(config.num_layers))
    return {
        EXPERTS: selected * tree_bytes([layer.moe.experts for layer in params.layers]),
        ATTENTION: rows * a_row * sum(positions),
        PRODUCTS: dense + tree_bytes(params.lm_head),
    }


def _kernels(trace: Path) -> Iterator[tuple[float, float, str]]:
    """Read (start, end, name) of the kernels of steps, in ns."""
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if str(dict(event.stats).get("hlo_module", "")).startswith(STEPS):
                    yield event.start_ns, event.start_ns + event.duration_ns, event.name
