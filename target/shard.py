"""Shard a model over ranks: which axis of which tensor is cut, and how. Tensors are as checkpoints store them.

Ranks are numbered by expert group: index = group * tp + number within the group.

    heads           over all ranks: queries and their sinks, the inputs of the output projection
    kv heads        over all ranks; with more ranks than kv heads, neighbouring ranks hold the same one. On a TPU a rank
                    holds one that is narrower than the lanes as often as fills them (`lane_copies`)
    expert width    over the tp ranks of a group, in whole MXFP4 blocks; the last ranks are padded with zeros
    experts         over the ep groups
    vocabulary      the head's, over all ranks; the last ranks are padded with zeros
    once            biases that are added to a sum over ranks: one rank has them, the others have zeros
    the rest        on every rank

Padding adds nothing: a zero gate and up give a zero hidden value, which multiplies zeros. Example: width 2880 is 90
blocks; at tp = 8 ranks 0 to 6 hold 12 of them and rank 7 the last 6, each in 384 columns.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence

from peagle.base.checkpoint import Cut
from peagle.base.errors import InputError
from peagle.ops.kernels import Implementation
from peagle.ops.mxfp4 import BLOCK
from peagle.ops.tpu import LANES
from target.config import TargetConfig


class CutBy(enum.Enum):
    """How an axis is cut."""

    WHOLE = "not at all"
    HEAD = "by head"
    HEADS = "by head, head_dim elements each"
    KV_HEADS = "by kv head, head_dim elements each"
    QKV = "queries, keys and values side by side, each by its heads"
    WIDTH = "by expert width"
    GATE_UP = "by expert width, two interleaved rows each"
    BLOCKS = "by expert width, one element for a block"
    EXPERTS = "by expert"
    VOCABULARY = "by token"


@dataclasses.dataclass(frozen=True)
class TensorKind:
    """A kind of tensor. axes: how its first axes are cut; the others are whole. once: one rank of a sum has it."""

    name: str
    axes: tuple[CutBy, ...] = ()
    once: bool = False

    @property
    def mxfp4(self) -> bool:
        return self.name.endswith(", MXFP4")

    @property
    def of_experts(self) -> bool:
        """Whether it is an expert matrix, quantised or not."""
        return self.name.removesuffix(", MXFP4") in ("gate and up", "down")

    @property
    def replicated(self) -> bool:
        return not self.axes and not self.once


_E, _ALL = CutBy.EXPERTS, CutBy.WHOLE
TENSOR_KINDS = {
    kind.name: kind
    for kind in (
        TensorKind("embedding"),
        TensorKind("norms"),
        TensorKind("router"),
        TensorKind("queries", (CutBy.HEADS,)),
        TensorKind("keys and values", (CutBy.KV_HEADS,)),
        TensorKind("qkv", (CutBy.QKV,)),
        TensorKind("output projection", (_ALL, CutBy.HEADS)),
        TensorKind("output bias", once=True),
        TensorKind("sinks", (CutBy.HEAD,)),
        TensorKind("gate and up", (_E, _ALL, CutBy.GATE_UP)),
        TensorKind("gate and up, MXFP4", (_E, CutBy.GATE_UP)),
        TensorKind("gate and up bias", (_E, CutBy.GATE_UP)),
        TensorKind("down", (_E, CutBy.WIDTH)),
        TensorKind("down, MXFP4", (_E, _ALL, CutBy.BLOCKS)),
        TensorKind("down bias", (_E,), once=True),
        TensorKind("head", (CutBy.VOCABULARY,)),
    )
}


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank of tp x ep. kv_copies: how often it holds its kv head, if it has only one."""

    index: int = 0
    tp: int = 1
    ep: int = 1
    kv_copies: int = 1

    @property
    def count(self) -> int:
        return self.tp * self.ep

    def copies_of_head(self, num_kv_heads: int) -> int:
        """Count the copies of a kv head in the caches of all ranks."""
        return max(self.count // num_kv_heads, 1) * self.kv_copies


def lane_copies(config: TargetConfig, ranks: int, implementation: Implementation | None) -> int:
    """Return Rank.kv_copies: on a TPU as many as make pools whole lanes wide, else 1.

    A narrower pool would take as much memory, or XLA would lay the pages' numbers along the lanes, and copy the whole
    pool in every pass.
    """
    copies = LANES // config.head_dim
    fits = config.num_kv_heads <= ranks and config.num_heads // ranks % max(copies, 1) == 0
    return copies if implementation == "tpu" and fits and copies * config.head_dim == LANES else 1


def check_ranks(config: TargetConfig, tp: int, ep: int) -> None:
    """Raise InputError, with the possible values, if a model cannot be cut over tp x ep ranks."""
    heads, kv_heads, ranks = config.num_heads, config.num_kv_heads, tp * ep
    if config.num_experts % ep:
        good = [n for n in range(1, config.num_experts + 1) if config.num_experts % n == 0]
        raise InputError(
            f"--mesh asks for ep={ep}, but the target has {config.num_experts} experts; expected ep={_one_of(good)}",
            "mesh",
        )

    def divides(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not divides(ranks):
        good = [n for n in range(1, heads + 1) if divides(n)]
        of = "tp" if ep == 1 else "tp x ep"
        raise InputError(
            f"--mesh asks for {of}={ranks}, but the target has {heads} heads and {kv_heads} kv heads; expected "
            f"{of}={_one_of(good)}",
            "mesh",
        )


def _one_of(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


class ModelShard:
    """One rank's part of a model: `config` is its local geometry, `whole` the model's.

    mxfp4: cut the expert width in whole blocks. Raises InputError as `check_ranks` does.
    """

    def __init__(self, config: TargetConfig, rank: Rank, mxfp4: bool) -> None:
        check_ranks(config, rank.tp, rank.ep)
        self.whole, self.rank = config, rank
        self.num_experts = config.num_experts // rank.ep
        unit = BLOCK if mxfp4 else 1
        # the router's experts and the vocabulary stay the whole model's
        self.config = dataclasses.replace(
            config,
            num_heads=config.num_heads // rank.count,
            num_kv_heads=max(config.num_kv_heads // rank.count, 1) * rank.kv_copies,
            expert_width=-(-(config.expert_width // unit) // rank.tp) * unit,
        )

    def cuts(self, kind: TensorKind) -> tuple[Cut, ...]:
        return tuple(self._cut(by) for by in kind.axes)

    def has(self, kind: TensorKind) -> bool:
        """Whether the rank holds the tensor's values, rather than zeros."""
        return not kind.once or (self.rank.index % self.rank.tp if kind.axes else self.rank.index) == 0

    def shape(self, kind: TensorKind, whole: tuple[int, ...]) -> tuple[int, ...]:
        cut = tuple(cut.width or size for cut, size in zip(self.cuts(kind), whole, strict=False))
        return cut + whole[len(cut) :]

    def read_size(self, kind: TensorKind, whole: tuple[int, ...]) -> int:
        """Count the elements of a tensor that the rank reads: those it holds, without padding."""
        sizes = [len(cut.indices(size)) for cut, size in zip(self.cuts(kind), whole, strict=False)]
        return math.prod(sizes) * math.prod(whole[len(sizes) :]) if self.has(kind) else 0

    def _cut(self, by: CutBy) -> Cut:
        whole, local, rank = self.whole, self.config, self.rank
        head_dim, group, within = whole.head_dim, rank.index // rank.tp, rank.index % rank.tp
        kv_head = rank.index * whole.num_kv_heads // rank.count
        match by:
            case CutBy.WHOLE:
                return Cut()
            case CutBy.HEAD:
                return _share(rank.index, local.num_heads, whole.num_heads)
            case CutBy.HEADS:
                return _share(rank.index, local.num_heads, whole.num_heads, head_dim)
            case CutBy.KV_HEADS:
                own = _range(kv_head, local.num_kv_heads // rank.kv_copies, head_dim)
                return Cut(own.slices * rank.kv_copies, local.num_kv_heads * head_dim)
            case CutBy.QKV:
                queries, keys = (self._cut(by).slices for by in (CutBy.HEADS, CutBy.KV_HEADS))
                first_key = whole.num_heads * head_dim
                first_value = first_key + whole.num_kv_heads * head_dim
                starts = (first_key, first_value)
                shifted = [slice(key.start + start, key.stop + start) for start in starts for key in keys]
                return Cut((*queries, *shifted), (local.num_heads + 2 * local.num_kv_heads) * head_dim)
            case CutBy.WIDTH:
                return _share(within, local.expert_width, whole.expert_width)
            case CutBy.GATE_UP:
                return _share(within, local.expert_width, whole.expert_width, 2)
            case CutBy.BLOCKS:
                return _share(within, local.expert_width // BLOCK, whole.expert_width // BLOCK)
            case CutBy.EXPERTS:
                return _range(group * self.num_experts, self.num_experts)
            case CutBy.VOCABULARY:
                return _share(rank.index, -(-whole.vocab_size // rank.count), whole.vocab_size)


def _share(index: int, share: int, whole: int, size: int = 1) -> Cut:
    """Cut the index-th share of `whole` units of `size` elements; the last shares may have fewer than `share` units."""
    start, end = (min(number * share, whole) * size for number in (index, index + 1))
    return Cut((slice(start, end),), share * size)


def _range(first: int, count: int, size: int = 1) -> Cut:
    return Cut((slice(first * size, (first + count) * size),), count * size)
