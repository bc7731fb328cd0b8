"""Check on a GPU in one call that this project is right, and measure how fast it is.

    python -m scripts.gpu_check --out DIR                          # 20b and 120b shapes, eight minutes
    python -m scripts.gpu_check --out DIR --shapes 120b --minutes 5
    python -m scripts.gpu_check --out DIR --mesh tp=2 --mesh tp=4 --only mesh       # also over several GPUs
    python -m scripts.gpu_check --out DIR --shapes tiny --any-device    # a rehearsal on any device

Needs no network, no checkpoint and no installation; run it in the checkout. The server's section needs what the server
does. Weights are random and made in the device's memory.

First come the checks of `peagle check` (the kernels' launcher is compiled if it is missing). Then, for each shape:
prefill, decoding and verify passes; speculation with acceptance drawn at given rates (marked synthetic: it measures
what a step costs), by fixed K and auto, at temperature 1, too; the server and its engine alone; the parts of a step.
With --mesh also a small target over those devices against the whole one, and the passes of a larger one over them. Last
come other drafters, heads, batches and contexts, and XLA's own code.

`--out` (which must not exist yet) gets a line in raw.jsonl with every figure, so that a run that is cut off has lost
nothing, and run.json and README.md after each section. Sections that do not fit into --minutes are named as left out;
the section that runs when they end stops at its next line.
Exit code 1: something is wrong, or could not be measured.

The kernels' own tests need '.[test]':

    XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_DEFAULT_MATMUL_PRECISION=highest python -m pytest -n 12 -W default \\
        tests/ops/test_{expert_matmul,mxfp4,attention,paged_attention}.py tests/drafter/test_model.py \\
        tests/peagle/engine/test_accept.py
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp

from peagle.base.errors import InputError, InputWarning
from peagle.base.files import expect_new
from peagle.base.strict_json import dumps
from peagle.loading.load import load
from peagle.ops import cuda
from peagle.ops.kernels import describe_kernels, for_weights
from peagle.ops.native.build import LAUNCHER, BuildError, build_launcher
from peagle.parallel.mesh import MeshShape, make_meshes, parse_mesh, refuse_replicas
from peagle.workflows.check import CHECKED, MOST_OFF, Finding, check_kernels, check_logits, check_losslessness
from peagle.workflows.random_checkpoint import EAGLE_3, P_EAGLE, SIZES, write_random_checkpoint
from scripts.gpu.mesh import CONFIG, compare, loud_target
from scripts.gpu.page import page
from scripts.gpu.shape import DRAFTERS, MEMORY, OVER_DEVICES, Section, Shape, TooLarge
from scripts.runs import Json, Run, add_run_options, in_one_line, new_parser
from scripts.steps import PUBLISHED_RATE
from target.shard import check_ranks

OVER_A_MESH, TRIED_OUT = "L", "tiny"  # the checkpoint that is timed there: two layers as the 20b's
# acceptance lengths on MT-Bench: P-EAGLE (arXiv 2602.01469), tables 9 and 10, and for K = 7 vLLM's post on it
_PAPER, _POST = "arXiv 2602.01469", "vLLM's post"
PUBLISHED = tuple(
    dict(zip(("shape", "drafter", "k", "acceptance_length", "source"), row, strict=True))
    for row in (
        ("20b", EAGLE_3.name, 5, 3.4, _PAPER),
        ("20b", P_EAGLE.name, 5, 3.4, _PAPER),
        ("20b", P_EAGLE.name, 7, 3.70, _POST),
        ("120b", EAGLE_3.name, 5, 2.7, _PAPER),
        ("120b", P_EAGLE.name, 5, 2.9, _PAPER),
    )
)
PATIENCE = 1.25  # times its own limit after which a section stops at its next line


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


def findings(check: Callable[[], Iterable[Finding]]) -> Iterator[Json]:
    """Make lines of raw.jsonl from checks of `peagle check`."""
    for finding in check():
        yield {"check": finding.name, "ok": finding.ok, "found": finding.found}


def over_devices(shape: MeshShape) -> Iterator[Json]:
    """Compare a small target over a mesh with the whole one; then time a larger one."""
    name = OVER_A_MESH if on_gpu() else TRIED_OUT
    with tempfile.TemporaryDirectory() as scratch:
        small, large = loud_target(Path(scratch)), Path(scratch) / name
        with jax.default_matmul_precision("highest"):  # not TF32, whose ten bits are a GPU's default
            row = compare(small, for_weights(), shape)
        yield {"ok": row["error_in_spreads"] < MOST_OFF and row["same_tokens"] == row["answers"], **row}
        write_random_checkpoint(large, SIZES[name])
        for mesh in (str(shape), None):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", InputWarning)  # of the missing tokenizer and stop token
                pair = load(large, None, mesh=mesh)
            where = f"{name}, {mesh or 'one device'}"
            yield from OVER_DEVICES.measure(where, pair, lambda _: describe_kernels(), 64)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def checked_mesh(text: str) -> MeshShape:
    """Parse a mesh. Raises InputError for dp, too few devices, and targets it cannot divide."""
    refuse_replicas(text, "this measures the passes of one copy")
    shape = parse_mesh(text)
    for config in (CONFIG, SIZES[OVER_A_MESH if on_gpu() else TRIED_OUT]):
        check_ranks(config, shape.tp, shape.ep)
    make_meshes(shape)
    return shape


def sections_of(shapes: Sequence[str], meshes: Sequence[MeshShape], only: str | None) -> list[Section]:
    """List the sections; `only`: those whose names begin so. Raises InputError if none does."""
    all_shapes = [Shape(name) for name in shapes]
    sections = [
        Section("kernels", partial(findings, lambda: [check_kernels()]), 30),
        Section("bandwidth", bandwidth, 10),
        Section("parity", partial(findings, lambda: chain.from_iterable(map(check_logits, CHECKED))), 30),
        Section("losslessness", partial(findings, check_losslessness), 80),
        *(Section(f"mesh {shape}", partial(over_devices, shape), 90) for shape in meshes),
        *(section for further in (False, True) for shape in all_shapes for section in shape.sections(60, further)),
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
    config = {
        "shapes": shapes,
        "synthetic_acceptance": PUBLISHED_RATE,
        "published": PUBLISHED,
        "drafters": [kind.name for kind in DRAFTERS],
    }
    run = Run(options.out, typed, config, "scripts.gpu_check")
    deadline = time.monotonic() + 60 * options.minutes
    for section in sections:
        for line in lines_of(section, deadline, options.minutes):
            run.extend([{"section": section.name, **line}])
            print(f"{section.name}: {dumps(line)[:200]}", flush=True)
        run.write(page, show=section is sections[-1], rows=run.lines)
    return 1 if any(line.get("ok") is False for line in run.lines) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_run_options(parser)
    parser.add_argument("--shapes", default="20b,120b", help=f"of {', '.join(SIZES)} (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=8, help="nothing is begun after them (default %(default)s)")
    parser.add_argument("--only", metavar="SECTIONS", help="those whose names begin so, with commas between")
    parser.add_argument(
        "--mesh", metavar="tp=N,ep=N", action="append", default=[], help="several devices, too; may be repeated"
    )
    parser.add_argument("--any-device", action="store_true", help="go on without a GPU")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(typed)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")  # 120b and 80 GB; three quarters are the default
    return in_one_line("gpu_check", lambda: check(options, typed))


if __name__ == "__main__":
    sys.exit(main())
