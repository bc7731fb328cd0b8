"""Measure packing and loading the hand-off of a prompt: GB/s each way, and the peak memory beside the pages.

    python -m scripts.measure_handoff --out RUN [--tokens 4096]

Pages have the geometry of gpt-oss-20b and of a P-EAGLE drafter of four layers, in bfloat16; no weights are needed.
Afterwards `--out` (which must not exist yet) holds run.json and README.md. Linux only.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from peagle.engine import handoff
from peagle.engine.executor import Executor, Shape
from peagle.engine.handoff import Fingerprints
from peagle.engine.kv_memory import KVMemory
from peagle.engine.pages import PageTable
from peagle.engine.resolved import ResolvedConfig
from peagle.measure.pages import Block, Table, heading
from peagle.ops.attention import PAGE_SIZE, CacheGroup, PagedCache, Pages, group_layers, init_pool, own_tables
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.ops.messages import VerifyOutput
from peagle.workflows.random_checkpoint import SIZES
from scripts.measure_memory import Peak, anonymous_bytes
from scripts.runs import Json, add_run_options, in_one_line, new_parser, origin, spread, spread_text, where, write_run
from target.model import cache_groups

CONFIG = SIZES["20b"]
DRAFTER_LAYERS, NUM_DRAFTS = 4, 7
BFLOAT16 = jnp.dtype(jnp.bfloat16)


@flax.struct.dataclass
class PagesAlone:
    """The pages of a target or a drafter that computes nothing."""

    cache_groups: tuple[CacheGroup, ...] = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False, default=CONFIG.vocab_size)

    def init_pages(self, num_pages: Sequence[int]) -> tuple[Pages, ...]:
        return init_pool(self.cache_groups, num_pages, CONFIG.num_kv_heads, CONFIG.head_dim, jnp.bfloat16)

    def init_cache(self, batch: int, capacity: int, widest_write: int) -> PagedCache:
        tables = own_tables(self.cache_groups, batch, capacity + widest_write, widest_write)
        return PagedCache(self.init_pages([table.size for table in tables]), tables)

    def extend(self, token_ids: jax.Array, positions: jax.Array, cache: PagedCache) -> tuple[VerifyOutput, PagedCache]:
        del positions
        shape = (*token_ids.shape, 3 * CONFIG.hidden_size)
        return VerifyOutput(jnp.zeros((*token_ids.shape, 1)), jnp.zeros(shape, jnp.bfloat16)), cache


@dataclasses.dataclass(frozen=True)
class Side:
    """An engine's executor and pages, and the pages of one request of `tokens` tokens."""

    executor: Executor
    memory: KVMemory
    table: PageTable


def side(tokens: int) -> Side:
    target: Any = PagesAlone(cache_groups(CONFIG))
    drafter: Any = PagesAlone(group_layers([None] * DRAFTER_LAYERS, offset=1))
    memory = KVMemory(target, drafter, ResolvedConfig(NUM_DRAFTS, 1, tokens + 64))
    executor = Executor(target, drafter, Shape(1, tokens + 64, NUM_DRAFTS, 1, memory.num_pages, memory.widths))
    executor.start()
    executor.settle()
    table = memory.open((), drafts=True)
    reserved = memory.pool.reserve(table, tokens)
    assert reserved
    return Side(executor, memory, table)


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    sender, receiver, ids = side(tokens), side(tokens), (*range(tokens), 7)
    full = 0  # the group of the target's full layers
    numbers = sender.table.pages[full]
    shape = (len(numbers), PAGE_SIZE, CONFIG.num_kv_heads, CONFIG.head_dim)
    drawn = [np.random.default_rng(seed).standard_normal(shape).astype(BFLOAT16) for seed in range(2)]
    layer = sender.memory.groups[full].layers[0]
    sender.executor.write_pages(layer, numbers, *drawn)
    sender.executor.settle()
    packing, loading, peaks = [], [], []
    for _ in range(rounds + 1):  # the first one compiles
        before = anonymous_bytes()
        with Peak() as peak:
            started = time.perf_counter()
            message = handoff.pack(sender.executor, sender.memory, sender.table, ids, Fingerprints(), True)
            packed = time.perf_counter()
            handoff.put(receiver.executor, receiver.memory, receiver.table, handoff.parse(message.data))
            receiver.executor.settle()
            loaded = time.perf_counter()
        peaks.append((peak.bytes - before) / message.data.nbytes)
        packing.append(message.data.nbytes / (packed - started) / 1e9)
        loading.append(message.data.nbytes / (loaded - packed) / 1e9)
    for sent, pages in zip(drawn, receiver.executor.read_pages(layer, receiver.table.pages[full]), strict=True):
        flat = (-1, *shape[2:])
        assert (pages.reshape(flat)[:tokens] == sent.reshape(flat)[:tokens]).all()
    return {
        "tokens": tokens,
        "message_bytes": message.data.nbytes,
        "pages_bytes": sum(sender.memory.num_bytes),
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
        "peak_over_message": "memory beside the pages, over the message",
    }
    rows = [(name, spread_text(found[key], ".2f")) for key, name in named.items()]
    return [
        heading("Packing and loading a hand-off", 1),
        f"Pages of gpt-oss-20b and of a P-EAGLE drafter of {DRAFTER_LAYERS} layers, bfloat16, after a prompt of "
        f"{config['tokens']:,} tokens: a message of {found['message_bytes'] / 1e6:.0f} MB. Medians of "
        f"{config['rounds']} rounds with the extremes.",
        Table(("", "median (lowest..highest)"), rows),
        f"`{source['command']}`; {where(source)}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
