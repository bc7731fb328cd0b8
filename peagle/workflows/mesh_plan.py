"""Plan a target over a mesh of devices without loading it: bytes by kind, padding and pages.

Weights count as in the checkpoint: in bfloat16, and experts in MXFP4 if it stores them so.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from peagle.base.errors import InputError
from peagle.config import GPU_CHUNK
from peagle.engine.memory.kv_memory import Sizing, page_bytes
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.attention import CacheGroup, Pages, init_pools
from peagle.parallel.mesh import MeshShape
from target.config import TargetConfig
from target.dialects import tensor_kinds
from target.model import cache_groups
from target.shard import ModelShard, Rank, TensorKind

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = {  # the displayed kind of a leaf
    **dict.fromkeys(("gate and up", "gate and up, MXFP4", "gate and up bias"), "experts"),
    **dict.fromkeys(("down", "down, MXFP4", "down bias"), "experts"),
    **dict.fromkeys(("queries", "keys and values", "qkv", "output projection", "output bias", "sinks"), "attention"),
    "head": "head",
    "embedding": "embedding",
    "router": "routers and norms",
    "norms": "routers and norms",
}


DEVICES = {"H100": 80 * 10**9, "H200": 141 * 10**9, "B200": 180 * 10**9}  # bytes of memory
HOPPER = ("H100", "H200")


@dataclasses.dataclass(frozen=True)
class RankBytes:
    """The weights of a rank, in bytes."""

    kinds: dict[str, int]  # by kind, with padding
    padding: int  # zeros: in parts that do not divide evenly, and in place of biases that another rank adds
    replicated: int  # held by all ranks, or kv heads that several ranks hold

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def rank_bytes(config: TargetConfig, mxfp4: bool, shape: MeshShape) -> list[RankBytes]:
    """Count the weights of each rank. Raises InputError for a mesh that does not divide the model."""
    tensors = Counter(tensor_kinds(config, mxfp4).values())  # counted, since most layers have equal ones
    return [_of_rank(ModelShard(config, Rank(rank, shape.tp, shape.ep), mxfp4), tensors) for rank in range(shape.ranks)]


def _of_rank(part: ModelShard, tensors: Mapping[tuple[TensorKind, tuple[int, ...]], int]) -> RankBytes:
    kinds, padding, replicated = dict.fromkeys(KINDS.values(), 0), 0, 0
    shared_heads = part.rank.count > part.whole.num_kv_heads
    for (kind, shape), count in tensors.items():
        itemsize = 1 if kind.name.endswith("MXFP4") else BFLOAT16.itemsize
        size = int(np.prod(part.shape(kind, shape))) * itemsize * count
        kinds[KINDS[kind.name]] += size
        if kind.replicated or (shared_heads and kind.name == "keys and values"):
            replicated += size
        else:
            padding += size - part.read_size(kind, shape) * itemsize * count
    return RankBytes(kinds, padding, replicated)


def rank_cache_bytes(config: TargetConfig, shape: MeshShape, slots: int, positions: int, num_drafts: int) -> int:
    """Count the bytes of the bfloat16 pages that an engine reserves on a rank.

    It reserves up to MOST_RESERVED positions of each slot, and all positions for one request.
    """
    part = ModelShard(config, Rank(0, shape.tp, shape.ep), False)
    engine = ResolvedConfig(num_drafts, slots, positions, GPU_CHUNK)
    sizing = Sizing(*target_pages(part.config, BFLOAT16), engine)
    return sum(count * size for count, size in zip(sizing.num_pages, sizing.page_bytes, strict=True))


def target_pages(
    config: TargetConfig, dtype: DTypeLike, retain_full_kv: bool = False
) -> tuple[tuple[CacheGroup, ...], tuple[int, ...]]:
    """Return (a target's cache groups, the bytes of each group's page)."""
    groups = cache_groups(config, retain_full_kv)

    def init_pages(num_pages: Sequence[int]) -> tuple[Pages, ...]:
        return init_pools(groups, num_pages, config.num_kv_heads, config.head_dim, dtype)

    return groups, page_bytes(groups, init_pages)


def memory_of(device: str) -> int:
    """Return the bytes of a device's memory. Raises InputError for an unknown one."""
    if device.upper() not in DEVICES:
        raise InputError(f"the device is {device!r}; expected {', '.join(DEVICES)}", "device")
    return DEVICES[device.upper()]
