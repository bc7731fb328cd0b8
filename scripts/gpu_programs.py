"""Compile an engine's programs for an H100, on a machine without one.

    version=$(python -c 'import jax; print(jax.__version__)')
    pip install --no-deps --target gpu_compiler \
        jax-cuda12-plugin==$version jax-cuda12-pjrt==$version nvidia-cuda-nvcc-cu12
    python -m scripts.gpu_programs --compiler gpu_compiler --shape 20b --drafter P-EAGLE -k auto --slots 8

XLA compiles for a description of the GPU; nothing runs, and weights are shapes without values. These packages have a
folder of their own, because JAX would look for a GPU at every start of an environment that has them.

A program should be one CUDA graph. Outside of graphs the host launches each operation, and waits for the GPU at each
loop and branch. Exit code 1: some program is not one graph.
"""

import argparse
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from peagle.base.errors import InputError
from peagle.config import AUTO
from peagle.measure.sweep.plan import parse_ks
from peagle.ops import cuda
from peagle.ops.cuda import graphs
from peagle.ops.expert_matmul.cuda import tile
from peagle.ops.native.build import LAUNCHER
from scripts.described import Described, described_programs
from scripts.gpu.shape import DRAFTERS
from scripts.runs import expect_least, in_one_line, new_parser

GRAPH, WAITS = "kCommandBuffer", ("kWhile", "kConditional")  # XLA's names of a graph, a loop and a branch
SHAPES, CONTEXT = ("20b", "120b"), 1024
# what CUDA says of an H100; the driver is of 2024, so that programs need no newer one for their graphs
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048  core_count: 132
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535  fpus_per_core: 128
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: 84929347584
  registers_per_core_limit: 65536  registers_per_block_limit: 65536  cuda_compute_capability { major: 9 }
  driver_version: "12.4.0"
}
platform_name: "CUDA"  runtime_version { major: 12 minor: 9 }  dnn_version_info { major: 9 minor: 7 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class Program:
    """What XLA makes of a program. waits: loops and branches that the host decides."""

    name: str
    graphs: int
    operations: int
    waits: int
    one_graph: bool

    def __str__(self) -> str:
        whole = "one graph" if self.one_graph else f"{self.graphs} graphs, the host waits at {self.waits} places"
        return f"{self.name}: {whole}; {self.operations} operations"


def described_gpu(compiler: Path) -> Any:
    """Make the described GPU, and let the ops run on it. compiler: the folder of JAX's packages for CUDA."""
    if not (compiler / "jax_plugins").is_dir():
        raise InputError(f"--compiler {compiler} has no jax_plugins; install the packages there as --help says")
    sys.path.insert(0, str(compiler))
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # it looks for a GPU
    try:
        device = topologies.get_topology_desc("one", "cuda", target_config=H100, topology="1x1x1").devices[0]
    except NotImplementedError:
        raise InputError(
            f"the packages in --compiler {compiler} do not load; expected those of JAX {jax.__version__}: see --help"
        ) from None
    jax.default_backend = lambda: "gpu"
    cuda.status = lambda: (True, "CUDA, compute capability 9.0")
    cuda._capability = lambda: "9.0"
    graphs.trial = lambda: (True, "")
    cuda.register_kernels(ctypes.CDLL(str(LAUNCHER)), "CUDA")
    return device


def read_programs(dump: Path) -> Iterator[Program]:
    """Read what XLA wrote of the programs that it compiled."""
    for path in sorted(dump.glob("*.thunk_sequence.txt")):
        after = path.with_name(path.name.replace(".thunk_sequence.", ".thunk_sequence_after_thunk_passes."))
        name = path.name.split(".")[1].removeprefix("jit_").strip("_")
        yield program_of(name, (after if after.exists() else path).read_text(encoding="utf-8"))


def program_of(name: str, listing: str) -> Program:
    """Count what a listing of operations has; an operation within another is indented further."""
    parents: list[tuple[int, str]] = []
    kinds: list[str] = []
    top: list[str] = []
    waits = 0
    for line in listing.splitlines():
        if not (match := re.match(r"( *)\d+: (k\w+)", line)):
            continue
        indent, kind = len(match[1]), match[2]
        while parents and parents[-1][0] >= indent:
            parents.pop()
        waits += kind in WAITS and all(parent != GRAPH for _, parent in parents)
        top += [] if parents else [kind]
        parents.append((indent, kind))
        kinds.append(kind)
    operations = sum(kind not in (GRAPH, *WAITS) for kind in kinds)
    return Program(name, kinds.count(GRAPH), operations, waits, top == [GRAPH])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--compiler", type=Path, required=True, help="the folder with JAX's packages for CUDA")
    parser.add_argument("--shape", default="20b", help=f"{' or '.join(SHAPES)} (default %(default)s)")
    names = [kind.name.split(",")[0] for kind in DRAFTERS]
    parser.add_argument("--drafter", default=names[0], help=f"of {', '.join(names)} (default %(default)s)")
    parser.add_argument("-k", default=AUTO, help="drafts of a step, or auto (default %(default)s)")
    parser.add_argument("--slots", type=int, default=8, help="requests at once (default %(default)s)")
    options = parser.parse_args(arguments)
    return in_one_line("gpu_programs", lambda: run(options, names))


def run(options: argparse.Namespace, names: Sequence[str]) -> int:
    """Check the options, compile, and print a line for each program."""
    if options.shape not in SHAPES:
        raise InputError(f"--shape is {options.shape!r}; expected {' or '.join(SHAPES)}")
    if options.drafter not in names:
        raise InputError(f"--drafter is {options.drafter!r}; expected one of {', '.join(names)}")
    expect_least(1, options, "slots")
    k, *others = parse_ks(options.k)
    if others:
        raise InputError(f"-k is {options.k!r}; expected one K, or auto")
    with tempfile.TemporaryDirectory() as dump:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
        shape = Described(options.shape, SingleDeviceSharding(described_gpu(options.compiler)), tile)
        pair = shape.pair(shape.random_drafter(DRAFTERS[names.index(options.drafter)], None))
        engine = pair.engine(pair.engine_config(k, slots=options.slots, context=CONTEXT)).one
        for _, compiled_program in described_programs(shape, engine):
            compiled_program()
        compiled = list(read_programs(Path(dump)))
    if not compiled:
        raise InputError(f"XLA of JAX {jax.__version__} wrote no list of its operations, which this script reads")
    print("\n".join(map(str, compiled)))
    return 0 if all(program.one_graph for program in compiled) else 1


if __name__ == "__main__":
    sys.exit(main())
