"""Compare a target over meshes of devices with the whole one, and plan the 20b and the 120b on paper.

    JAX_NUM_CPU_DEVICES=8 python -m scripts.check_mesh --out RUN

A random target whose widths no mesh shares evenly, with sinks that differ by head and large biases, is decoded whole
and over each mesh: logits of one pass, tokens and acceptance of several requests with n-gram drafts, collectives of the
compiled pass. With dp, engines over copies of it share the requests. On fake devices of one CPU this shows that the
results are right, and nothing about speed.

RUN, which must not exist yet, then holds run.json and README.md.
"""

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from peagle.drafters.ngram import NGram
from peagle.engine.engine import Engine
from peagle.engine.replicas import Replicas
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.loading import load_over
from peagle.measure.pages import Block, Table, heading
from peagle.ops import native
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.parallel import MeshShape, make_meshes
from peagle.protocols import Target
from peagle.workflows.plan import device_named, pass_s, rank_bytes, rank_cache_bytes
from peagle.workflows.random_checkpoint import SIZES, geometry, random_tensors
from scripts.runs import Json, Progress, in_one_line, new_parser, origin, where, write_run
from target.load import load_target, write_target
from target.model import GptOss

CONFIG = geometry(
    hidden=96, layers=4, heads=(8, 2), head_dim=12, vocab=101, experts=(8, 2), expert_width=160, window=11
)
SHAPES = (*map(MeshShape, (2, 4, 8)), MeshShape(1, 2), MeshShape(1, 4), MeshShape(2, 2), MeshShape(2, 4))
SHAPES += (MeshShape(dp=2), MeshShape(2, dp=4))
PLANNED = (*map(MeshShape, (1, 2, 4, 8)), MeshShape(1, 8), MeshShape(2, 4))
K, TOKENS, CHUNK, SEVERAL = 3, 48, 40, 4
DEVICE, SLOTS, CONTEXT, ROWS = "B200", 8, 8192, (1, 4, 8)
PUBLISHED = "412 to 452 tok/s, a factor of 1.10, or 400 to 371, a factor of .93, by version and settings"


def loud(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Make sinks large and different by head, and biases large: what is cut wrongly then shows."""
    for name, tensor in tensors:
        if name.endswith("sinks"):
            yield name, np.linspace(-3, 6, tensor.size).astype(tensor.dtype)
        elif name.endswith("bias"):
            yield name, (10 * tensor.astype(np.float32)).astype(tensor.dtype)
        else:
            yield name, tensor


def loud_target(into: Path) -> Path:
    """Write the target that meshes are compared by."""
    directory = into / "loud"
    write_target(directory, CONFIG, loud(random_tensors(CONFIG, True, 1)), mxfp4=True)
    return directory


def facts(target: Target, *copies: Target) -> Json:
    """Compute logits [1, CHUNK, V] and count collectives of a target; decode requests by it and its copies."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (1, CHUNK)).astype(np.int32)
    positions = np.arange(CHUNK, dtype=np.int32)[None]
    cache = jax.jit(lambda: target.init_cache(1, CHUNK, CHUNK))()
    program = jax.jit(type(target).extend).lower(target, tokens, positions, cache).compile()
    logits = np.asarray(program(target, tokens, positions, cache)[0].logits)
    config = ResolvedConfig(K, slots=SEVERAL, context=128, prefill_chunk=16)
    engines = [Engine(each, NGram(), config.share(1 + len(copies))) for each in (target, *copies)]
    engine = Replicas(engines, config) if copies else engines[0]
    prompts = [tuple(rng.integers(0, CONFIG.vocab_size, size).tolist()) for size in (7, 30, 19, 4, 12, 9)]
    found: list[list[Any]] = [[[], 0] for _ in prompts]
    for place, chunk in engine.generate([Request(prompt, TOKENS) for prompt in prompts]):
        found[place][0] += chunk.token_ids
        found[place][1] += sum(step.num_accepted for step in chunk.steps)
    text = program.as_text() or ""
    kinds = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)[-a-z]*\(", text)
    return {"logits": logits, "answers": found, "collectives": len(kinds)}


def compare(directory: Path, kernels: Any, shapes: Sequence[MeshShape], progress: Progress) -> list[Json]:
    """Compare the target over each mesh with the whole one."""
    loaded = load_target(directory, experts="packed", implementation=kernels)
    alone = facts(GptOss(loaded.params, loaded.config))
    whole_bytes = _bytes_of(loaded.params)
    rows = []
    for shape in shapes:
        progress.part(f"{kernels}, {shape}")
        target, over = load_over(directory, shape, experts="packed", implementation=kernels)
        given = facts(target, *(target.on(mesh) for mesh in make_meshes(shape)[1:]))
        error = float(np.abs(given["logits"] - alone["logits"]).max() / alone["logits"].std())
        answers = zip(given["answers"], alone["answers"], strict=True)
        same = [(mine[0] == theirs[0], mine[1] == theirs[1]) for mine, theirs in answers]
        rows.append(
            {
                "kernels": kernels,
                "mesh": str(shape),
                "error_in_spreads": error,
                "answers": len(same),
                "same_tokens": sum(tokens for tokens, _ in same),
                "same_accepted": sum(accepted for _, accepted in same),
                "accepted": sum(each[1] for each in alone["answers"]),
                "collectives": given["collectives"],
                "bytes_over_whole": _bytes_of(over.params) / shape.ranks / whole_bytes,
            }
        )
    return rows


def _bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def plan() -> list[Json]:
    """Plan the published sizes on a named device, on paper."""
    device, rows = device_named(DEVICE), []
    for size in ("20b", "120b"):
        for shape in PLANNED:
            first = rank_bytes(SIZES[size], True, shape)[0]
            caches = rank_cache_bytes(SIZES[size], shape, SLOTS, CONTEXT, max(ROWS) - 1)
            times = {str(n): sum(pass_s(SIZES[size], True, shape, device, n)) for n in ROWS}
            rows.append(
                {
                    "model": size,
                    "mesh": str(shape),
                    "weights_bytes": first.total,
                    "everywhere_bytes": first.replicated,
                    "caches_bytes": caches,
                    "fits": first.total + caches <= device.memory_bytes,
                    "pass_s": times,
                }
            )
    return rows


def page(record: Json) -> list[Block]:
    """Make the page of a run."""
    parity = [
        (
            row["kernels"],
            row["mesh"],
            f"{row['error_in_spreads']:.1e}",
            f"{row['same_tokens']} of {row['answers']}",
            f"{row['same_accepted']} of {row['answers']}",
            str(row["collectives"]),
            f"{row['bytes_over_whole']:.2f}",
        )
        for row in record["parity"]
    ]
    one = {row["model"]: row["pass_s"] for row in record["plan"] if row["mesh"] == "tp=1,ep=1"}
    planned = [
        (
            row["model"],
            row["mesh"],
            f"{row['weights_bytes'] / 1e9:.2f}",
            f"{row['everywhere_bytes'] / 1e9:.2f}",
            f"{row['caches_bytes'] / 1e9:.2f}",
            "yes" if row["fits"] else "no",
            *(_time(row["pass_s"][str(n)], one[row["model"]][str(n)]) for n in ROWS),
        )
        for row in record["plan"]
    ]
    two = next(row["pass_s"] for row in record["plan"] if (row["model"], row["mesh"]) == ("120b", "tp=2,ep=1"))
    gains = [f"{one['120b'][str(n)] / two[str(n)]:.2f}" for n in ROWS]
    count = 2 * CONFIG.num_layers + 1
    return [
        heading("A target over several devices", 1),
        f"`{record['provenance']['command']}`",
        where(record["provenance"]),
        "**Fake devices of one CPU show that the results are right. They show nothing about speed: no time is measured "
        "here, and no machine with several GPUs has run this.**",
        heading("The same as the whole target"),
        f"A random target of {CONFIG.num_layers} layers, {CONFIG.num_heads} heads, {CONFIG.num_kv_heads} kv heads, "
        f"{CONFIG.num_experts} experts of {CONFIG.expert_width} and {CONFIG.vocab_size} tokens, in MXFP4 and float32: "
        "five blocks of expert width, and a vocabulary, which no mesh shares evenly; from four ranks on, several of "
        "them hold the same kv head. Sinks differ by head, and biases are large. Error: the greatest of the logits of "
        f"{CHUNK} rows, in spreads of the whole target's. Tokens and accepted drafts: answers of {TOKENS} tokens with "
        f"n-gram drafts, K = {K}, {record['parity'][0]['accepted']} accepted in all, {SEVERAL} at once; with dp so "
        "many copies share them. Collectives: of a compiled pass of one copy; "
        f"two a layer and one at the head are {count}. Bytes: of a rank's weights, by those of the whole target.",
        Table(("kernels", "mesh", "error", "same tokens", "same accepted", "collectives", "bytes"), parity),
        heading(f"The 20b and the 120b on {DEVICE}, on paper"),
        f"GB a device: weights as published (MXFP4, bfloat16), of it on every device, caches of {SLOTS} slots of "
        f"{CONTEXT:,} positions. Time of a pass: reading the weights once, and collectives of "
        f"{device_named(DEVICE).latency_s * 1e6:.0f} us each, assumed; in brackets how many times as fast as one "
        "device. Not a forecast: it leaves out attention, the drafter and the host.",
        Table(
            (
                *("model", "mesh", "weights", "everywhere", "caches", "fits"),
                *(f"{n} row{'s' * (n > 1)} ms" for n in ROWS),
            ),
            planned,
        ),
        f"Published for the 120b at tp = 2 over one B200: {PUBLISHED}. This plan says {gains[0]} for one row, less "
        "than either: collectives there must take less than is assumed here, so single rows may gain more than "
        f"planned. A pass that verifies {ROWS[1]} rows gains {gains[1]}, one of {ROWS[2]} rows {gains[2]}: more rows "
        "read more experts, and wait as often.",
    ]


def _time(seconds: float, alone: float) -> str:
    return f"{1e3 * seconds:.2f} ({alone / seconds:.2f})"


def main() -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the run")
    arguments = parser.parse_args()

    def run() -> int:
        expect_new(arguments.out)
        needed = max(shape.devices for shape in SHAPES)
        if jax.device_count() < needed:
            raise InputError(f"there are {jax.device_count()} devices; expected {needed}: JAX_NUM_CPU_DEVICES={needed}")
        progress, kernels = Progress(), ("xla", "native") if native.available() else ("xla",)
        progress.begin(len(SHAPES) * len(kernels))
        with tempfile.TemporaryDirectory() as made:
            directory = loud_target(Path(made))
            parity = [row for each in kernels for row in compare(directory, each, SHAPES, progress)]
        progress.end()
        record = {"provenance": origin("scripts.check_mesh"), "parity": parity, "plan": plan()}
        write_run(arguments.out, record, page(record))
        return 0

    return in_one_line("check_mesh", run)


if __name__ == "__main__":
    sys.exit(main())
