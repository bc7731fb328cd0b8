"""Where the time of a step goes on a GPU: its kernels, by part of a layer."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from peagle.engine.engine import AnyEngine
from peagle.engine.request import Request
from peagle.measure.profile import STEPS
from peagle.ops.memory import tree_bytes
from target.config import TargetConfig
from target.params import TargetParams

EXPERTS, ATTENTION, PRODUCTS, REST = PARTS = ("experts, with router", "attention", "qkv, output and head", "rest")
# what kernels' names begin with; of cuBLAS and XLA, too
NAMES = {
    EXPERTS: ("peagle_tiles", "peagle_gate_up", "peagle_down", "peagle_sort", "peagle_route", "peagle_choose"),
    ATTENTION: ("peagle_attend", "peagle_rotate", "peagle_prompt"),
    PRODUCTS: ("peagle_linear", "nvjet", "gemm", "cutlass", "sm90", "sm80"),
}
NAMES[EXPERTS] += ("peagle_gather", "peagle_combine_experts")


def parts(engine: AnyEngine, requests: Sequence[Request], directory: Path) -> dict[str, float]:
    """Decode the requests under the profiler, all at once; return microseconds of a step by part.

    A kernel may begin while the one before still runs, to wait for it: it counts from that one's end.
    """
    engine = engine.one
    with engine.launching_alone():
        list(engine.generate(requests))  # compiles
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(str(directory), profiler_options=options):
            num_steps = sum(len(chunk.steps) for place, chunk in engine.generate(requests) if place == 0)
    (trace,) = directory.glob("**/*.xplane.pb")
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    before = 0.0
    for start, end, name in sorted(_kernels(trace)):
        spent[part_of(name)] += max(0.0, end - max(start, before))
        before = max(before, end)
    return {part: nanoseconds / 1e3 / num_steps for part, nanoseconds in spent.items()}


def part_of(kernel: str) -> str:
    """Find the part that a kernel belongs to, by its name."""
    return next((part for part, names in NAMES.items() if kernel.startswith(names)), REST)


def bytes_of_parts(params: TargetParams, config: TargetConfig, rows: int, context: int) -> dict[str, float]:
    """Compute the bytes that each part reads in a plain step of `rows` sequences after `context` tokens.

    Experts: as many of them as independent choices touch.
    """
    touched = 1 - (1 - config.top_k / config.num_experts) ** rows
    experts = tree_bytes([layer.moe.experts for layer in params.layers])
    dense = tree_bytes([(layer.attention.qkv, layer.attention.out) for layer in params.layers])
    a_row = 2 * config.num_kv_heads * config.head_dim * params.dtype.itemsize
    seen = (min(context, config.window(layer) or context) for layer in range(config.num_layers))
    return {
        EXPERTS: touched * experts,
        ATTENTION: rows * a_row * sum(seen),
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
