"""Cut a model over ranks: which axis of which tensor is cut, and how. On tensors as checkpoints store them.

Ranks are numbered by expert group: rank = group * tp + place in the group.

    heads           over all ranks: queries and their sinks, the inputs of the output projection
    kv heads        over all ranks; if there are fewer of them, neighbouring ranks hold the same one
    expert width    over the tp ranks of a group, in whole MXFP4 blocks; the last ranks get less, and zeros
    experts         over the ep groups
    vocabulary      the head's, over all ranks; the last ranks get less, and zeros
    once            biases of sums over ranks: one rank has them, the others have zeros
    the rest        on every rank

Zeros are inert: zero gate and up give a zero hidden value, which multiplies zeros. Example: width 2880 is 90 blocks; at
tp = 8 ranks 0 to 6 hold 12 of them and rank 7 the last 6, each in 384 columns.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence

import numpy as np

from peagle.ops.checkpoint import Cut
from peagle.ops.errors import InputError
from peagle.ops.mxfp4 import BLOCK
from target.config import TargetConfig


class Hint(enum.Enum):
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
class Leaf:
    """A kind of tensor: how its first axes are cut; the others are whole. once: only one rank of a sum has it."""

    name: str
    axes: tuple[Hint, ...] = ()
    once: bool = False

    @property
    def mxfp4(self) -> bool:
        return self.name.endswith(", MXFP4")

    @property
    def of_experts(self) -> bool:
        """Whether it is a matrix of the experts, quantised or not."""
        return self.name.removesuffix(", MXFP4") in ("gate and up", "down")

    @property
    def replicated(self) -> bool:
        return not self.axes and not self.once


_E, _ALL = Hint.EXPERTS, Hint.WHOLE
LEAVES = {
    leaf.name: leaf
    for leaf in (
        Leaf("embedding"),
        Leaf("norms"),
        Leaf("router"),
        Leaf("queries", (Hint.HEADS,)),
        Leaf("keys and values", (Hint.KV_HEADS,)),
        Leaf("qkv", (Hint.QKV,)),
        Leaf("output projection", (_ALL, Hint.HEADS)),
        Leaf("output bias", once=True),
        Leaf("sinks", (Hint.HEAD,)),
        Leaf("gate and up", (_E, _ALL, Hint.GATE_UP)),
        Leaf("gate and up, MXFP4", (_E, Hint.GATE_UP)),
        Leaf("gate and up bias", (_E, Hint.GATE_UP)),
        Leaf("down", (_E, Hint.WIDTH)),
        Leaf("down, MXFP4", (_E, _ALL, Hint.BLOCKS)),
        Leaf("down bias", (_E,), once=True),
        Leaf("head", (Hint.VOCABULARY,)),
    )
}


@dataclasses.dataclass(frozen=True)
class Place:
    """A rank among tp x ep."""

    rank: int = 0
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.ep


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


class Part:
    """One rank's part of a model. Raises InputError as `check_ranks` does."""

    def __init__(self, config: TargetConfig, place: Place, mxfp4: bool) -> None:
        """mxfp4: cut the expert width in whole blocks."""
        check_ranks(config, place.tp, place.ep)
        self.whole, self.place = config, place
        self.num_experts = config.num_experts // place.ep
        self._unit = BLOCK if mxfp4 else 1
        units = config.expert_width // self._unit
        # its local geometry; the router's experts and the vocabulary stay the whole model's
        self.config = dataclasses.replace(
            config,
            num_heads=config.num_heads // place.ranks,
            num_kv_heads=max(config.num_kv_heads // place.ranks, 1),
            expert_width=-(-units // place.tp) * self._unit,
        )

    def cuts(self, leaf: Leaf) -> tuple[Cut, ...]:
        return tuple(self._cut(hint) for hint in leaf.axes)

    def has(self, leaf: Leaf) -> bool:
        """Whether the rank has the leaf's values, not zeros instead."""
        place = self.place
        return not leaf.once or (place.rank % place.tp if leaf.axes else place.rank) == 0

    def shape(self, leaf: Leaf, whole: tuple[int, ...]) -> tuple[int, ...]:
        cut = tuple(cut.width or size for cut, size in zip(self.cuts(leaf), whole, strict=False))
        return cut + whole[len(cut) :]

    def read_size(self, leaf: Leaf, whole: tuple[int, ...]) -> int:
        """Count the elements of a tensor that it holds, without zeros."""
        held = [len(cut.indices(size)) for cut, size in zip(self.cuts(leaf), whole, strict=False)]
        return math.prod(held) * math.prod(whole[len(held) :]) if self.has(leaf) else 0

    def _cut(self, hint: Hint) -> Cut:
        whole, mine, place = self.whole, self.config, self.place
        head_dim, group, within = whole.head_dim, place.rank // place.tp, place.rank % place.tp
        kv_head = place.rank * whole.num_kv_heads // place.ranks
        match hint:
            case Hint.WHOLE:
                return Cut()
            case Hint.HEAD:
                return _stretch(place.rank, mine.num_heads, whole.num_heads)
            case Hint.HEADS:
                return _stretch(place.rank, mine.num_heads, whole.num_heads, head_dim)
            case Hint.KV_HEADS:
                return _run(kv_head, mine.num_kv_heads, head_dim)
            case Hint.QKV:
                queries, keys = (self._cut(hint).stretches[0] for hint in (Hint.HEADS, Hint.KV_HEADS))
                after = whole.num_heads * head_dim
                behind = after + whole.num_kv_heads * head_dim
                shifted = [slice(keys.start + start, keys.stop + start) for start in (after, behind)]
                return Cut((queries, *shifted), (mine.num_heads + 2 * mine.num_kv_heads) * head_dim)
            case Hint.WIDTH:
                return _stretch(within, mine.expert_width, whole.expert_width)
            case Hint.GATE_UP:
                return _stretch(within, mine.expert_width, whole.expert_width, 2)
            case Hint.BLOCKS:
                return _stretch(within, mine.expert_width // BLOCK, whole.expert_width // BLOCK)
            case Hint.EXPERTS:
                return _run(group * self.num_experts, self.num_experts)
            case Hint.VOCABULARY:
                return _stretch(place.rank, -(-whole.vocab_size // place.ranks), whole.vocab_size)


def _stretch(place: int, share: int, whole: int, size: int = 1) -> Cut:
    """Cut `share` units of `size` elements from the place on; fewer at the end of the `whole` units."""
    start, end = (min(at * share, whole) * size for at in (place, place + 1))
    return Cut((slice(start, end),), share * size)


def _run(first: int, count: int, size: int = 1) -> Cut:
    return Cut((slice(first * size, (first + count) * size),), count * size)


def split(leaf: Leaf, tensor: np.ndarray, part: Part) -> np.ndarray:
    if not part.has(leaf):
        return np.zeros(part.shape(leaf, tensor.shape), tensor.dtype)
    for axis, cut in enumerate(part.cuts(leaf)):
        tensor = cut.take(tensor, axis)
    return tensor


def unsplit(leaf: Leaf, tensors: Sequence[np.ndarray], parts: Sequence[Part], shape: tuple[int, ...]) -> np.ndarray:
    whole = np.zeros(shape, tensors[0].dtype)
    for tensor, part in zip(tensors, parts, strict=True):
        if not part.has(leaf):
            continue
        cuts = [*part.cuts(leaf), *[Cut()] * (len(shape) - len(leaf.axes))]
        places = [cut.indices(size) for cut, size in zip(cuts, shape, strict=True)]
        whole[np.ix_(*places)] = tensor[tuple(slice(0, len(index)) for index in places)]
    return whole
