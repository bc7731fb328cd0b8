"""Choose the rows that a sequence is trained on: conditional-on-depth sampling, blocks, sequence partition.

Conditional-on-depth sampling (COD) and the partition are those of P-EAGLE (arXiv 2602.01469, section 4, Algorithm 1).

COD draws the (anchor, depth) rows that a sequence is trained on. Depth 0 keeps every anchor. Depth d keeps a random
part of the chains of depth d - 1 whose label is still a trained token: about ratio^d of all, never less than MIN_RATIO.
So the chain of a kept row is kept whole.

Chains are sorted longest first, so the chains that have depth d are a prefix of all chains, and depth d's rows attend
to their own chain by slicing (drafter/train/forward.py):

    chain    0   1   2   3   4   5      anchors[chain]: the anchor it grows from
    depth 1  x   x   x   x   x   x      counts[0] = 6
    depth 2  x   x   x   x              counts[1] = 4
    depth 3  x   x                      counts[2] = 2

A DFlash drafter is trained on whole blocks at random anchors (`_sample_blocks`): every chain has every depth.
"""

import dataclasses

import numpy as np

from drafter.train.recipe import Recipe
from peagle.base.errors import InputError

# A part's room for chains, relative to its share of them, because chains lie unevenly. What exceeds the room is cut,
# the deepest rows first.
ROOM = 1.25
MIN_RATIO = 0.2  # least share of anchors at any depth, as in public trainers


@dataclasses.dataclass(frozen=True)
class Partition:
    """A sequence cut into parts whose gradients are computed one after the other and add up to that of the whole.

    Part s holds the context rows (depth 0) of anchors starts[s] .. ends[s] - 1, and the chains of the anchors
    starts[s] - 1 .. ends[s] - 2, whose rows of depth 1 have the positions starts[s] .. ends[s] - 1. A part's context is
    everything before ends[s].
    """

    width: int
    starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.starts[0] != 0 or any(span < 1 for span in self.spans):
            raise InputError(
                f"parts that start at {list(self.starts)} of {self.width}; expected 0 first, and ascending"
            )

    @classmethod
    def of(cls, recipe: Recipe) -> "Partition":
        """Cut the rows of a training into its recipe's parts."""
        parts = recipe.parts or 1
        return cls(recipe.width, tuple(part * recipe.width // parts for part in range(parts)))

    @property
    def ends(self) -> tuple[int, ...]:
        return (*self.starts[1:], self.width)

    @property
    def spans(self) -> tuple[int, ...]:
        """Positions of each part."""
        return tuple(end - start for start, end in zip(self.starts, self.ends, strict=True))

    def parts_of(self, anchors: np.ndarray) -> np.ndarray:
        """Return the number of the part that each anchor's chain belongs to."""
        return np.searchsorted(np.asarray(self.starts), np.minimum(anchors + 1, self.width - 1), side="right") - 1

    def counts(self, recipe: Recipe, num_anchors: int, in_part: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Return a batch's room for the chains of num_anchors: per part, at depth 1, 2, ...

        in_part: most anchors of a part, if they lie unevenly, as after a long prompt; None: they lie evenly.
        """
        if in_part is not None and len(self.starts) > 1:
            return tuple(tuple(min(span, n) for n in counts(recipe, in_part)) for span in self.spans)
        rooms = [self._rooms(count) for count in counts(recipe, num_anchors)]
        return tuple(tuple(room[part] for room in rooms) for part in range(len(self.starts)))

    def block_counts(self, depth: int, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Return a batch's room for whole blocks, in the form of `counts`."""
        return tuple((room,) * (depth - 1) for room in self._rooms(num_blocks))

    def _rooms(self, count: int) -> list[int]:
        """Divide `count` chains among the parts, with extra room if there are several."""
        extra = 1.0 if len(self.starts) == 1 else ROOM
        return [min(span, int(np.ceil(extra * count * span / self.width))) for span in self.spans]


def counts(recipe: Recipe, num_anchors: int) -> tuple[int, ...]:
    """Count the chains that reach depth 1, 2, ..., depth - 1, of num_anchors at depth 0."""
    ratio, depths = recipe.ratio, range(1, recipe.depth)
    return tuple(max(0, int((num_anchors - d) * max(ratio**d, MIN_RATIO))) for d in depths)


def sample(
    recipe: Recipe, trained: np.ndarray, segment_ids: np.ndarray, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw one sequence's chains; return (anchors [n] int32, last_depth [n] int32) per part.

    n is the part's room at depth 1, recipe.room[part][0]. trained [T] bool: tokens whose prediction counts. Row (a, d)
    predicts token a + d + 2, so it is kept only if that token is trained and lies in the anchor's segment, and row (a,
    d - 1) is kept. last_depth is each chain's deepest kept depth, descending; surplus anchors are padding with 0.
    """
    draw = _sample_chains if recipe.blocks is None else _sample_blocks
    return draw(recipe, trained, segment_ids, Partition.of(recipe), rng)


def _sample_chains(
    recipe: Recipe, trained: np.ndarray, segment_ids: np.ndarray, partition: Partition, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    width, usable = trained.shape[0], _usable(recipe.depth, trained, segment_ids)
    last_depth = np.zeros((width,), np.int32)
    kept = np.flatnonzero(usable[:, 0])
    for depth, count in enumerate(counts(recipe, len(kept)), start=1):
        kept = rng.permutation(kept[usable[kept, depth]])[:count]
        last_depth[kept] = depth
    part_of = partition.parts_of(np.arange(width))
    drawn = rng.permutation(width)  # so that the chains beyond a part's room are cut at random
    return [
        _fit(drawn[part_of[drawn] == part], last_depth, room, padding=partition.ends[part] - 1)
        for part, room in enumerate(recipe.room)
    ]


def _sample_blocks(
    recipe: Recipe, trained: np.ndarray, segment_ids: np.ndarray, partition: Partition, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw the anchors of one sequence's blocks.

    A block may begin after any anchor whose first draft is a trained token. It is whole, as when decoding: last_depth
    is that of the last draft, and rows whose token is not trained do not count. Padding has last_depth -1.
    """
    anchors = rng.permutation(np.flatnonzero(_usable(1, trained, segment_ids)[:, 0]))
    part_of, drawn = partition.parts_of(anchors), []
    for part, room in enumerate(recipe.room):
        own = anchors[part_of == part][: room[0]]
        free = (0, room[0] - len(own))
        padded = np.pad(own, free, constant_values=partition.ends[part] - 1).astype(np.int32)
        drawn.append((padded, np.pad(np.full(len(own), recipe.depth - 1, np.int32), free, constant_values=-1)))
    return drawn


def _usable(depth: int, trained: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """Return per anchor and depth [T, D] whether the row predicts a trained token of the anchor's segment."""
    width = trained.shape[0]
    label = np.arange(width)[:, None] + np.arange(depth)[None, :] + 2
    inside = label < width
    label = np.minimum(label, width - 1)
    usable: np.ndarray = inside & trained[label] & (segment_ids[label] == segment_ids[:, None])
    return usable & (segment_ids[:, None] > 0)


def _fit(
    anchors: np.ndarray, last_depth: np.ndarray, room: tuple[int, ...], padding: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sort chains longest first and cut them to the room at each depth; fill up with the anchor `padding`."""
    most = room[0] if room else 0
    order = anchors[np.argsort(-last_depth[anchors], kind="stable")][:most]
    allowed = np.sum(np.arange(len(order))[:, None] < np.asarray(room, np.int64)[None, :], axis=1)
    free = (0, most - len(order))
    return (
        np.pad(order, free, constant_values=padding).astype(np.int32),
        np.pad(np.minimum(last_depth[order], allowed), free).astype(np.int32),
    )
