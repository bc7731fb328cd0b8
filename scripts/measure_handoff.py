"""Measure packing and loading the hand-off of a prompt: GB/s each way, and the peak memory beside the caches.

    python -m scripts.measure_handoff [--tokens 4096] [--rounds 9]

Caches have the geometry of gpt-oss-20b and of a P-EAGLE drafter of four layers, in bfloat16; no weights are needed.
Prints JSON: medians with the extremes. Linux only.
"""

import dataclasses
import statistics
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
from peagle.ops.kv_cache import cache_bytes, init_kv_cache
from peagle.ops.messages import VerifyOutput
from peagle.ops.strict_json import dumps
from peagle.workflows.random_checkpoint import SIZES
from scripts.measure_memory import Peak, anonymous_bytes
from scripts.runs import in_one_line, new_parser, origin
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


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def main() -> int:
    """Run the command."""
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()

    def run() -> int:
        found = measure(given.tokens, given.rounds)
        print(dumps({**found, "provenance": origin("scripts.measure_handoff")}, indent=1))
        return 0

    return in_one_line("measure_handoff", run)


if __name__ == "__main__":
    sys.exit(main())
