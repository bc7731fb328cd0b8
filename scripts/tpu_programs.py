"""Compile an engine's programs for TPUs, on a machine without one, and count what they move.

    pip install '.[tpu]'                              # libtpu, 684 MB unpacked
    python -m scripts.tpu_programs --chip v6e --programs chunk,steps_0

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
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from drafter.propose import DFlash, Eagle3
from peagle.base.errors import InputError
from peagle.base.memory import tree_bytes
from peagle.config import AUTO, NumDrafts
from peagle.engine.host.engine import Engine
from peagle.engine.step.dispatch import PLAIN_PART
from peagle.engine.step.drafter_input import ABSORB_PART
from peagle.engine.step.state import DecodeState
from peagle.measure import reports
from peagle.ops import tpu
from peagle.ops.collectives import Ranks
from peagle.ops.expert_matmul.tpu import lay_out
from peagle.ops.linear import SplitMatrix, embedding_width
from peagle.pair import Pair
from peagle.parallel.mesh import AXIS, OF_PAGES, OF_PARTS, SAME, Sharded
from scripts.described import Described, described_programs
from scripts.gpu.shape import DRAFTERS
from scripts.runs import Json, Run, header, in_one_line, new_parser, table, text_of, title
from scripts.tpu.traffic import traffic
from target.random import random_params
from target.shard import ModelShard, Rank, lane_copies

CHIPS = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "7x": "tpu7x:2x2x1"}  # libtpu's names of topologies, of eight devices
CONTEXT = 4096
MOST_COPIED = 4 << 20  # bytes: more is a pool or the embedding
NAMES = {kind.name.split(",")[0]: kind for kind in DRAFTERS}
MEASURED = (
    *("hbm_bytes", "limit_bytes", "times_the_limit", "at_bandwidth_ms", "temporary_bytes", "largest_copy_bytes"),
    *("host_transfers", "memory_frac"),
)
CASE = ("shape", "devices", "slots", "drafter", "k")
# values of CASE, and the programs that are compiled
CASES: tuple[tuple[tuple[str, int, int, str, NumDrafts], tuple[str, ...]], ...] = (
    (("20b", 1, 1, "", 0), ("chunk", "first_token", "steps_0")),
    (("20b", 1, 8, "", 0), ("steps_0",)),
    (("20b", 1, 8, "P-EAGLE", 3), ("steps_3",)),
    (("20b", 1, 1, "P-EAGLE", AUTO), ("steps_7",)),
    (("20b", 1, 1, "EAGLE-3", 3), ("steps_3_sampled",)),
    (("20b", 1, 1, "DFlash", 7), ("steps_7",)),
    (("120b", 4, 1, "P-EAGLE", 7), ("steps_7",)),
    (("120b", 8, 1, "P-EAGLE", 7), ("chunk", "steps_7")),
)
PROGRAMS = tuple(dict.fromkeys(name for _, names in CASES for name in names))
FIGURES = ("chip", *CASE, "program", *MEASURED)
OTHER_PATHS = (PLAIN_PART, ABSORB_PART)  # of an adaptive step: it drafts and verifies as much as it can


@dataclasses.dataclass(frozen=True)
class Chip:
    """Devices of a described chip. memory, bandwidth: bytes, and bytes per second, of one device."""

    mesh: Mesh
    memory: int
    bandwidth: int


class OnTpu(Described):
    """A shape in the layouts of a TPU."""

    def __init__(self, name: str, sharding: jax.sharding.Sharding) -> None:
        super().__init__(name, sharding, lay_out)

    def random_weights(self) -> Any:
        params = super().random_weights()
        shape = (params.embedding.shape[0], embedding_width(params.embedding.shape[1], "tpu"))
        embedding = self.placed(jax.ShapeDtypeStruct(shape, params.embedding.dtype))
        return params.replace(embedding=embedding, implementation="tpu")

    def random_drafter(self, kind: Any, draft_vocab: int | None) -> Any:
        drafter = super().random_drafter(kind, draft_vocab)
        return drafter.replace(params=drafter.params.replace(implementation="tpu"))


class OverTpus(OnTpu):
    """A shape whose target is cut over the devices of a mesh, as `load_over` does."""

    def __init__(self, name: str, mesh: Mesh) -> None:
        super().__init__(name, NamedSharding(mesh, SAME))
        self.mesh, self.first = mesh, Rank(0, mesh.size, 1, lane_copies(self.config, mesh.size, "tpu"))
        self.local = ModelShard(self.config, self.first, mxfp4=True).config

    def random_weights(self) -> Any:
        params = super().random_weights()
        return params.replace(lm_head=self._of_rank(params.lm_head))

    def random_drafter(self, kind: Any, draft_vocab: int | None) -> Any:
        drafter = super().random_drafter(kind, draft_vocab)
        head = drafter.params.lm_head
        split = SplitMatrix(self._side_by_side(self._of_rank(head)), head.shape[1], self.mesh)
        return drafter.replace(params=drafter.params.replace(lm_head=split))

    def pair(self, drafter: Any = None, weights: Any = None) -> Pair:
        pair = super().pair(drafter, weights)
        ranks = Ranks(AXIS, self.mesh.size)
        copies = self.first.copies_of_head(self.config.num_kv_heads), self.first.kv_copies

        def over(target: Any) -> Sharded:
            parts = target.replace(params=self._side_by_side(target.params), config=self.local, ranks=ranks)
            return Sharded(parts, self.mesh, *copies)

        return dataclasses.replace(pair, target=over(pair.target), plain_target=over(pair.plain_target))

    def placed_state(self, state: DecodeState) -> DecodeState:
        pages = self.placed(state.target_cache, NamedSharding(self.mesh, OF_PAGES))
        return dataclasses.replace(super().placed_state(state), target_cache=pages)

    def _of_rank(self, head: Any) -> Any:
        return jax.ShapeDtypeStruct((head.shape[0], -(-head.shape[1] // self.mesh.size)), head.dtype)

    def _side_by_side(self, tree: Any) -> Any:
        ranks = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self.mesh.size, *leaf.shape), leaf.dtype), tree)
        return self.placed(ranks, NamedSharding(self.mesh, OF_PARTS))


@contextlib.contextmanager
def described(name: str, count: int = 1) -> Iterator[Chip]:
    """Let the ops run on devices of a described chip, whose facts Pallas finds by the mesh."""
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}  # else it asks the network
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[name]).devices[:count]
    jax.default_backend = lambda: "tpu"
    tpu.status = lambda: (True, f"Pallas, {name}")
    mesh = Mesh(devices, (AXIS,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        facts = pltpu.get_tpu_info()
        yield Chip(mesh, facts.hbm_capacity_bytes, facts.mem_bw_bytes_per_second)


def rows(case: Json, names: Sequence[str]) -> Iterator[Json]:
    """Compile the programs of a case with these names, and yield a row for each."""
    with described(case["chip"], case["devices"]) as chip:
        mesh = chip.mesh
        alone = SingleDeviceSharding(mesh.devices.flat[0])
        shape = OnTpu(case["shape"], alone) if mesh.size == 1 else OverTpus(case["shape"], mesh)
        model = shape.random_drafter(NAMES[case["drafter"]], None) if case["drafter"] else None
        pair = shape.pair(model)
        engine = pair.engine(pair.engine_config(case["k"], slots=case["slots"], context=CONTEXT)).one
        limit_of = limits(shape, engine, model)
        for name, compiled in described_programs(shape, engine):
            if name in names:
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
    moved = traffic(text, OTHER_PATHS)
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
    config, memory = shape.config, engine.memory
    stored = jax.eval_shape(lambda: random_params(shape.local, 0, as_stored=True))
    experts = tree_bytes([layer.moe.experts for layer in stored.layers])
    dense = tree_bytes(stored) - tree_bytes([stored.embedding, stored.lm_head]) - experts
    dense += local_bytes(shape.weights.lm_head)
    of_group = [size * width for size, width in zip(memory.page_bytes, memory.table_widths, strict=True)]
    parts = shape.mesh.size * shape.first.kv_copies if isinstance(shape, OverTpus) else 1
    keys = sum(of_group[: memory.num_target_groups]) // parts + sum(of_group[memory.num_target_groups :])
    of_drafter = fc = absorbing = 0
    if drafter is not None:
        params = drafter.params
        of_drafter, fc = local_bytes(params) - local_bytes(params.embedding), local_bytes(params.fc)
        absorbing = fc + local_bytes([layer.qkv for layer in params.layers])
        if not isinstance(drafter, DFlash):  # whose context is the same in every layer
            absorbing += local_bytes([(layer.out, layer.gate_up, layer.down) for layer in params.layers[:-1]])

    def limit(name: str) -> int | None:
        if name.startswith("first"):
            return None
        drafts = int(name.split("_")[1]) if name.startswith("steps") else 0
        chunk, sequences = name.startswith("chunk"), engine.config.slots
        num_rows = engine.config.pass_shapes[0][1] if chunk else sequences * (drafts + 1)
        selected = min(1, num_rows * config.top_k / config.num_experts)
        proposing = of_drafter if drafts else absorbing if chunk else 0
        if isinstance(drafter, Eagle3):  # in its further passes it reads the hidden state of the pass before
            proposing += max(drafts - 1, 0) * (of_drafter - fc)
        return round(dense + selected * experts + proposing + (1 if chunk else sequences) * keys)

    return limit


def local_bytes(tree: Any) -> int:
    """Count the bytes of placed arrays on one device."""
    return sum(
        math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def page(record: Json) -> list[reports.Block]:
    """Lay out the results."""
    about = f"Random weights of the published sizes, {CONTEXT:,} positions in each slot. Nothing ran"
    lines = [
        *title("What the engine's programs move on TPUs", record, f"{about}: libtpu compiled for a described chip"),
        "HBM: counted in the compiled program, kernels as they declare it. Limit: each weight and key that it needs, "
        "once. With k auto: a step that drafts and verifies as much as it can. At bandwidth: "
        "an estimate, the bytes over the chip's bandwidth. All figures are of one device. A program without figures "
        "does not fit.",
    ]
    return [*lines, table(record["rows"], *FIGURES)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--chip", default=",".join(CHIPS), help="(default %(default)s)")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="of the cases (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder to write; must not exist")
    options = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else arguments
    return in_one_line("tpu_programs", lambda: run(options, typed))


def run(options: argparse.Namespace, typed: Sequence[str]) -> int:
    """Check the options, compile, and print a line for each program."""
    chips, programs = of_list("--chip", options.chip, CHIPS), of_list("--programs", options.programs, PROGRAMS)
    if importlib.util.find_spec("libtpu") is None:
        raise InputError("libtpu is not installed; expected it beside JAX: pip install '.[tpu]'")
    out = None if options.out is None else Run(options.out, typed, {}, "scripts.tpu_programs")
    lines: list[Json] = []
    for chip, (values, own) in itertools.product(chips, CASES):
        case = {"chip": chip, **dict(zip(CASE, values, strict=True))}
        if not (names := [name for name in own if name in programs]):
            continue
        for row in rows(case, names):
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
