"""Conditional-on-depth sampling (COD; arXiv 2602.01469, section 4): which (anchor, depth) rows a sequence is trained
on.

Depth 0 keeps every anchor. Depth d keeps a random part of the chains that depth d - 1 kept and whose label still lies
in the sequence's trained region: about ratio^d of them, never less than min_ratio. So a kept row has its whole chain
kept.

Chains are returned longest first, so the chains that reach depth d are a prefix of all chains, and depth d's rows
attend to their own chain by slicing (drafter/train/forward.py):

    chain    0   1   2   3   4   5      anchors[chain]: the anchor it grows from
    depth 1  x   x   x   x   x   x      counts[0] = 6
    depth 2  x   x   x   x              counts[1] = 4
    depth 3  x   x                      counts[2] = 2
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Cod:
    """depth: rows per full chain, K_train (depths 0..depth-1)."""

    depth: int = 8
    ratio: float = 0.8
    min_ratio: float = 0.2

    def counts(self, num_anchors: int) -> tuple[int, ...]:
        """How many chains reach depth 1, 2, ..., depth - 1, given anchors at depth 0 (FACTS 6)."""
        return tuple(max(0, int((num_anchors - d) * max(self.ratio**d, self.min_ratio))) for d in range(1, self.depth))


def sample_chains(
    cod: Cod, trained: np.ndarray, segment_ids: np.ndarray, counts: tuple[int, ...], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(anchors [counts[0]] int32, reach [counts[0]] int32) of one sequence; `counts` is what the program's shapes hold.

    trained [T] bool: tokens whose prediction counts. Row (a, d) predicts token a + d + 2, so it is kept only if that
    token is trained and lies in the anchor's segment, and row (a, d - 1) is kept. reach is the deepest depth kept of
    each chain, descending; anchors beyond the chains there are have reach 0: they are padding.
    """
    width = trained.shape[0]
    label = np.arange(width)[:, None] + np.arange(cod.depth)[None, :] + 2
    inside = label < width
    label = np.minimum(label, width - 1)
    usable = inside & trained[label] & (segment_ids[label] == segment_ids[:, None]) & (segment_ids[:, None] > 0)
    reach = np.zeros((width,), np.int32)
    kept = np.flatnonzero(usable[:, 0])
    for depth, room in enumerate(cod.counts(len(kept)), start=1):
        pool = kept[usable[kept, depth]]
        # never more than the program's shapes have room for at this depth
        kept = rng.permutation(pool)[: min(room, counts[depth - 1])]
        reach[kept] = depth
    order = np.argsort(-reach, kind="stable")[: counts[0]]
    return order.astype(np.int32), reach[order]
