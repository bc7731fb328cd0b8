"""The masks against their definitions, row by row."""

import jax.numpy as jnp
import numpy as np

from peagle.ops.mask import group_causal_mask


def test_a_row_attends_to_the_rows_before_it_in_a_draft_from_its_anchor() -> None:
    """Drafting after position a runs the context 0..a, then mask slots in order: row (a, d) attends to exactly the rows
    of that pass up to itself, in any order; padding is masked."""
    rng = np.random.default_rng(0)
    rows = [(anchor, depth) for anchor in range(6) for depth in range(4)] + [(-1, 0), (-1, 2)]
    for kept in (rows, [row for row in rows if row[1] == 0 or rng.random() < 0.6]):
        order = [kept[number] for number in rng.permutation(len(kept))]
        anchor, depth = (jnp.asarray([values]) for values in zip(*order, strict=True))
        visible = np.asarray(group_causal_mask(anchor, depth))[0]
        for number, (own_anchor, own_depth) in enumerate(order):
            drafting = [(position, 0) for position in range(own_anchor + 1)]
            drafting += [(own_anchor, slot) for slot in range(1, own_depth + 1)]
            expected = [] if own_anchor < 0 else [row for row in order if row in drafting]
            assert [row for row, sees in zip(order, visible[number], strict=True) if sees] == expected
