"""Measure packing and loading the hand-off of a prompt: GB/s each way, and the peak memory beside the caches.

    python -m scripts.measure_handoff --out RUN [--tokens 4096]

Caches have the geometry of gpt-oss-20b and of a P-EAGLE drafter of four layers, in bfloat16; no weights are needed.
Afterwards `--out` (which must not exist yet) holds run.json and README.md. Linux only.
"""

import argparse
import dataclasses
import sys
import time
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from peagle.engine import handoff
from peagle.engine.handoff import Fingerprints
from peagle.engine.programs import Programs
from peagle.measure.pages import Block, Table, heading
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.ops.kv_cache import cache_bytes, init_kv_cache
from peagle.ops.messages import VerifyOutput
from peagle.workflows.random_checkpoint import SIZES
from scripts.measure_memory import Peak, anonymous_bytes
from scripts.runs import Json, add_run_options, in_one_line, new_parser, origin, spread, spread_text, where, write_run
from target.model import init_caches

CONFIG = SIZES["20b"]
DRAFTER_LAYERS, NUM_DRAFTS, CHUNK = 4, 7, 128


@flax.struct.dataclass
class CachesAlone:
    """Caches of a target and a drafter that compute nothing."""

    vocab_size: int = flax.struct.field(pytree_node=False, default=CONFIG.vocab_size)

    def init_cache(self, batch: int, capacity: int, widest_write: int) -> Any:
        return init_caches(CONFIG, batch, capacity + widest_write, widest_write, jnp.bfloat16)

    def extend(self, token_ids: jax.Array, positions: jax.Array, cache: Any) -> tuple[VerifyOutput, Any]:
        del positions
        shape = (*token_ids.shape, 3 * CONFIG.hidden_size)
        return VerifyOutput(jnp.zeros((*token_ids.shape, 1)), jnp.zeros(shape, jnp.bfloat16)), cache

    def init_state(self, batch: int, capacity: int, widest_write: int) -> Any:
        heads, width = CONFIG.num_kv_heads, CONFIG.head_dim
        full = [
            init_kv_cache(batch, capacity + widest_write, heads, width, jnp.bfloat16) for _ in range(DRAFTER_LAYERS)
        ]
        return tuple(full)


def programs_of(tokens: int, chunk: int) -> Programs:
    models: Any = CachesAlone()
    return Programs(models, models, 1, tokens + 64, NUM_DRAFTS, chunk, 1)


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    sender, receiver, ids = programs_of(tokens, CHUNK), programs_of(tokens, 1), (*range(tokens), 7)
    lane = jax.tree.map(lambda leaf: leaf + 1, dataclasses.replace(sender.init_lane()))
    into = jax.tree.map(lambda leaf: leaf + 1, receiver.init_lane())
    jax.block_until_ready((lane, into))
    packing, loading, peaks = [], [], []
    for _ in range(rounds + 1):  # the first one compiles
        before = anonymous_bytes()
        with Peak() as peak:
            started = time.perf_counter()
            message = handoff.pack(sender, lane, ids, Fingerprints(), True)
            packed = time.perf_counter()
            into = jax.block_until_ready(handoff.put(receiver, into, handoff.parse(message.data)))
            loaded = time.perf_counter()
        peaks.append((peak.bytes - before) / message.data.nbytes)
        packing.append(message.data.nbytes / (packed - started) / 1e9)
        loading.append(message.data.nbytes / (loaded - packed) / 1e9)
    row = np.asarray(into.target_cache[1].key)[0, :tokens]
    assert (row == np.asarray(lane.target_cache[1].key)[0, :tokens]).all()
    return {
        "tokens": tokens,
        "message_bytes": message.data.nbytes,
        "lane_bytes": cache_bytes(lane),
        "pack_gb_per_s": spread(packing[1:]),
        "load_gb_per_s": spread(loading[1:]),
        "peak_over_message": spread(peaks[1:]),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    add_run_options(parser, 9, "after one that compiles")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default %(default)s)")
    given = sys.argv[1:] if arguments is None else arguments
    return in_one_line("measure_handoff", lambda: run(parser.parse_args(given), given))


def run(asked: argparse.Namespace, given: list[str]) -> int:
    """Measure, and write the page."""
    expect_new(asked.out)
    if min(asked.tokens, asked.rounds) < 1:
        raise InputError("--tokens and --rounds must be 1 or more")
    record = {
        "schema": 1,
        "provenance": origin("scripts.measure_handoff", given),
        "config": {"tokens": asked.tokens, "rounds": asked.rounds},
        "figures": measure(asked.tokens, asked.rounds),
    }
    write_run(asked.out, record, page(record))
    return 0


def page(record: Json) -> list[Block]:
    """Lay out README.md of the run."""
    config, found, source = record["config"], record["figures"], record["provenance"]
    named = {
        "pack_gb_per_s": "packing, GB/s",
        "load_gb_per_s": "loading, GB/s",
        "peak_over_message": "memory beside the caches, over the message",
    }
    rows = [(name, spread_text(found[key], ".2f")) for key, name in named.items()]
    return [
        heading("Packing and loading a hand-off", 1),
        f"Caches of gpt-oss-20b and of a P-EAGLE drafter of {DRAFTER_LAYERS} layers, bfloat16, after a prompt of "
        f"{config['tokens']:,} tokens: a message of {found['message_bytes'] / 1e6:.0f} MB. Medians of "
        f"{config['rounds']} rounds with the extremes.",
        Table(("", "median (lowest..highest)"), rows),
        f"`{source['command']}`; {where(source)}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
