"""Compile an engine's programs for TPUs, on a machine without one, and count what they move.

    pip install '.[tpu]'                              # libtpu, 684 MB unpacked
    python -m scripts.tpu_programs --chip v5e,v6e,7x --drafter P-EAGLE,EAGLE-3,DFlash -k 0,3,7,auto --slots 1,8

libtpu compiles for a description of the chip; nothing runs, and weights are shapes without values. A row has the bytes
from HBM beside the limit by arithmetic: each weight and each key that the program needs, once. Rows of a batch are
counted as if they selected different experts, as many as there are, and every slot as if its context were full.
Exit code 1: some program exceeds the chip's memory, copies a pool or the embedding, or has the host take part.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from drafter.propose import Eagle3
from peagle.base.errors import InputError
from peagle.base.memory import tree_bytes
from peagle.config import AUTO
from peagle.engine.host.engine import Engine
from peagle.measure import reports
from peagle.ops import tpu
from peagle.ops.expert_matmul.tpu import lay_out
from peagle.ops.linear import embedding_width
from scripts.described import Described, described_programs
from scripts.gpu.shape import DRAFTERS
from scripts.runs import Json, Run, header, in_one_line, new_parser, numbers, table, text_of, title
from scripts.tpu.traffic import traffic
from target.random import random_params

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}  # libtpu's names of topologies
SHAPES, CONTEXT = ("20b", "120b"), 4096
MOST_COPIED = 4 << 20  # bytes: more is a pool or the embedding
NAMES = {kind.name.split(",")[0]: kind for kind in DRAFTERS}
MEASURED = (
    *("hbm_bytes", "limit_bytes", "times_the_limit", "at_bandwidth_ms", "temporary_bytes", "largest_copy_bytes"),
    *("host_transfers", "memory_frac"),
)
FIGURES = ("chip", "slots", "drafter", "k", "program", *MEASURED)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A described chip. memory, bandwidth: bytes, and bytes per second, of one of its devices."""

    device: Any
    memory: int
    bandwidth: int


class OnTpu(Described):
    """A shape in the layouts of a TPU."""

    def __init__(self, name: str, device: Any) -> None:
        super().__init__(name, device, lay_out)

    def random_weights(self) -> Any:
        params = super().random_weights()
        shape = (params.embedding.shape[0], embedding_width(params.embedding.shape[1], "tpu"))
        embedding = self.placed(jax.ShapeDtypeStruct(shape, params.embedding.dtype))
        return params.replace(embedding=embedding, implementation="tpu")

    def random_drafter(self, kind: Any, draft_vocab: int | None) -> Any:
        drafter = super().random_drafter(kind, draft_vocab)
        return drafter.replace(params=drafter.params.replace(implementation="tpu"))


@contextlib.contextmanager
def described(name: str) -> Iterator[Chip]:
    """Let the ops run on a described chip, whose facts Pallas finds by the mesh."""
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}  # else it asks the network
    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[name]).devices[0]
    jax.default_backend = lambda: "tpu"
    tpu.status = lambda: (True, f"Pallas, {name}")
    mesh = jax.sharding.Mesh([device], ("x",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        facts = pltpu.get_tpu_info()
        yield Chip(device, facts.hbm_capacity_bytes, facts.mem_bw_bytes_per_second)


def rows(case: Json, shape_name: str, names: Sequence[str]) -> Iterator[Json]:
    """Compile the programs of a case with these names, by default all, and yield a row for each."""
    with described(case["chip"]) as chip:
        shape = OnTpu(shape_name, chip.device)
        model = shape.random_drafter(NAMES[case["drafter"]], None) if case["drafter"] else None
        pair = shape.pair(model)
        engine = pair.engine(pair.engine_config(case["k"], slots=case["slots"], context=CONTEXT)).one
        limit_of = limits(shape, engine, model)
        for name, compiled in described_programs(shape, engine):
            if not names or name in names:
                yield case | {"program": name} | measured(compiled, chip, limit_of(name))


def measured(compiled: Callable[[], jax.stages.Compiled], chip: Chip, limit: int | None) -> Json:
    """Return the figures of a program; of one that does not fit the chip's memory, only its limit."""
    try:
        program = compiled()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory on HBM" not in str(error):
            raise
        return dict.fromkeys(MEASURED) | {"limit_bytes": limit}
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    moved = traffic(text)
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "hbm_bytes": moved.hbm_bytes,
        "limit_bytes": limit,
        "times_the_limit": None if limit is None else moved.hbm_bytes / limit,
        "at_bandwidth_ms": 1e3 * moved.hbm_bytes / chip.bandwidth,
        "temporary_bytes": memory.temp_size_in_bytes,
        "largest_copy_bytes": moved.copy_bytes,
        "host_transfers": moved.host_transfers,
        "memory_frac": (held + memory.temp_size_in_bytes) / chip.memory,
    }


def limits(shape: Described, engine: Engine, drafter: Any) -> Callable[[str], int | None]:
    """Make the function from a program's name to the least bytes that it reads; None if that is next to nothing."""
    config, sizing = shape.config, engine.memory.sizing
    stored = jax.eval_shape(lambda: random_params(config, 0, as_stored=True))
    experts = tree_bytes([layer.moe.experts for layer in stored.layers])
    dense = tree_bytes(stored) - tree_bytes(stored.embedding) - experts
    keys = sum(size * width for size, width in zip(sizing.page_bytes, sizing.table_widths, strict=True))
    of_drafter = 0 if drafter is None else tree_bytes(drafter.params) - tree_bytes(drafter.params.embedding)

    def limit(name: str) -> int | None:
        if name.startswith("first"):
            return None
        drafts = int(name.split("_")[1]) if name.startswith("steps") else 0
        chunk, sequences = name.startswith("chunk"), engine.config.slots
        num_rows = engine.config.pass_shapes[0][1] if chunk else sequences * (drafts + 1)
        selected = min(1, num_rows * config.top_k / config.num_experts)
        passes = (drafts if isinstance(drafter, Eagle3) else 1) if drafts else 0
        return round(dense + selected * experts + passes * of_drafter + (1 if chunk else sequences) * keys)

    return limit


def page(record: Json) -> list[reports.Block]:
    """Lay out the results."""
    config = record["config"]
    about = f"Random weights of the {config['shape']}'s sizes, {CONTEXT:,} positions in each slot. Nothing ran"
    lines = [
        *title("What the engine's programs move on TPUs", record, f"{about}: libtpu compiled for a described chip"),
        "HBM: counted in the compiled program, kernels as they declare it. Limit: each weight and key that it needs, "
        "once. At bandwidth: an estimate, the bytes over the chip's bandwidth. Memory: of one device's. A program "
        "without figures does not fit.",
    ]
    return [*lines, table(record["rows"], *FIGURES)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--chip", default="v6e", help=f"of {', '.join(CHIPS)} (default %(default)s)")
    parser.add_argument("--shape", default="20b", help=f"{' or '.join(SHAPES)} (default %(default)s)")
    parser.add_argument("--drafter", default=next(iter(NAMES)), help=f"of {', '.join(NAMES)} (default %(default)s)")
    parser.add_argument("-k", default=AUTO, help="drafts of a step, or auto; 0: plain (default %(default)s)")
    parser.add_argument("--slots", default="1", help="requests at once (default %(default)s)")
    parser.add_argument("--programs", help="such as chunk,first_token,steps_7,steps_7_sampled (default: all)")
    parser.add_argument("--out", type=Path, help="folder to write; must not exist")
    options = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else arguments
    return in_one_line("tpu_programs", lambda: run(options, typed))


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check the options, compile, and print a line for each program."""
    if options.shape not in SHAPES:
        raise InputError(f"--shape is {options.shape!r}; expected {' or '.join(SHAPES)}")
    chips, drafters = of_list("--chip", options.chip, CHIPS), of_list("--drafter", options.drafter, NAMES)
    ks = [k if k == AUTO else int(k) for k in of_list("-k", options.k, (*map(str, range(16)), AUTO))]
    slots = numbers("--slots", options.slots)
    if importlib.util.find_spec("libtpu") is None:
        raise InputError("libtpu is not installed; expected it beside JAX: pip install '.[tpu]'")
    out = None if options.out is None else Run(options.out, typed, {"shape": options.shape}, "scripts.tpu_programs")
    lines: list[Json] = []
    names = options.programs.split(",") if options.programs else ()
    cases: dict[tuple[Any, ...], None] = {}
    for chip, count, drafter, k in itertools.product(chips, slots, drafters, ks):
        cases[chip, count, drafter if k else "", k] = None
    for chip, count, drafter, k in cases:
        case = {"chip": chip, "slots": count, "drafter": drafter, "k": k}
        for row in rows(case, options.shape, names):
            lines.append(row)
            known = [name for name in FIGURES if row[name] not in ("", None)]
            print(", ".join(f"{header(name)} {text_of(row, name)}" for name in known), flush=True)
            if out is not None:
                out.extend([row])
    if out is not None:
        out.write(page, show=False, rows=lines)
    fits = all(0 < (row["memory_frac"] or 0) < 1 for row in lines)
    moves_little = all(not row["host_transfers"] and (row["largest_copy_bytes"] or 0) < MOST_COPIED for row in lines)
    return 0 if fits and moves_little else 1


def of_list(option: str, typed: str, names: Iterable[str]) -> list[str]:
    """Parse names with commas between."""
    known, parts = list(names), typed.split(",")
    if wrong := [name for name in parts if name not in known]:
        raise InputError(f"{option} is {typed!r}; {wrong[0]!r} is none of {', '.join(known)}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
