"""Masks of the tokens that grammars allow, by row of a step.

    row          pending           d0                  d1
    its mask     after emitted     after emitted+d0    after emitted+d0+d1

A mask depends only on the tokens before it, so decoding with and without drafts has equal masks. A token is allowed if
it continues some text of the grammar, however a tokenizer would cut that text. Where the text may end, the request's
stop tokens are allowed, too; where it must end, only they are.

A mask has one bit per token, lowest first, 1 if it is allowed. One more bit follows: whether the text may end there.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from peagle.engine.grammar import Matcher

MASK_BITS = 32


def all_allowed(batch: int, width: int, vocab_size: int) -> UInt32[np.ndarray, "B T W"]:
    return np.full((batch, width, vocab_size // MASK_BITS + 1), 0xFFFFFFFF, np.uint32)


@functools.cache
def _threads() -> Any:
    """Return the threads of llguidance that fill in masks."""
    import llguidance  # an extra

    return llguidance.LLExecutor(min(8, max(1, (os.cpu_count() or 1) // 2)))


def fill(masks: UInt32[np.ndarray, "B T W"], matchers: Mapping[int, tuple[Matcher, Sequence[int]]]) -> dict[int, int]:
    """Fill in the masks of rows: {row: (its matcher, its drafts to verify)}.

    Return how many drafts count, of each row in which not all do: from the first one on that is not allowed, or that
    ends the text, none counts, and no mask after it is read. Drafts are tried on copies of the matchers, because the
    target may reject them: a dead end there must not end the request. Copies share one automaton. If drafts, or other
    requests, take it to its limits, the matcher is `limited` and must be renewed.
    """
    from llguidance import numpy

    batch, width, words = masks.shape
    flat = masks.view(np.int32).reshape(batch * width, words)
    drafted = {row: (matcher.state.deep_copy(), list(drafts)) for row, (matcher, drafts) in matchers.items() if drafts}
    plain = [(matcher.state, row * width) for row, (matcher, drafts) in matchers.items() if not drafts]
    if drafted:
        copies = [(copy, row * width, drafts) for row, (copy, drafts) in drafted.items()]
        numpy.fill_next_token_bitmask_par_with_draft_tokens(_threads(), copies, flat)
    if plain:
        numpy.fill_next_token_bitmask_par(_threads(), plain, flat)
    counts = {}
    for row, (copy, drafts) in drafted.items():
        if copy.is_error() or not masks[row, : len(drafts) + 1].any(axis=-1).all():
            counts[row] = _fill_one_by_one(masks[row], matchers[row][0].state, drafts)
    for row, (matcher, verified) in matchers.items():
        word, bit = divmod(matcher.compiled.vocabulary.size, MASK_BITS)
        own = masks[row, : len(verified) + 1]
        ends = (own[:, word] >> np.uint32(bit)) & np.uint32(1)
        for stop in matcher.stop_token_ids:
            if 0 <= stop < matcher.compiled.vocabulary.size:
                own[:, stop // MASK_BITS] |= ends << np.uint32(stop % MASK_BITS)
    return counts


def _fill_one_by_one(rows: UInt32[np.ndarray, "T W"], state: Any, drafts: Sequence[int]) -> int:
    """Fill in a row's masks until one fails; return the drafts before it. The first mask is the request's own."""
    from llguidance import numpy

    rows[:] = 0xFFFFFFFF
    matcher, bits = state, rows.view(np.int32)
    for place, draft in enumerate([*drafts, None]):
        numpy.fill_next_token_bitmask(matcher, bits, place)
        if place and (matcher.is_error() or not rows[place].any()):
            return place - 1
        if draft is None or not rows[place, draft // MASK_BITS] >> np.uint32(draft % MASK_BITS) & np.uint32(1):
            break
        matcher = state.deep_copy()
        if not matcher.consume_tokens(list(drafts[: place + 1])):
            return place
    return len(drafts)


def next_mask(matcher: Matcher) -> UInt32[np.ndarray, "one one W"]:
    masks = all_allowed(1, 1, matcher.compiled.vocabulary.size)
    fill(masks, {0: (matcher, ())})
    return masks
