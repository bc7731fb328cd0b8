"""Masks of grammars for a masked step. The host fills them in while the target verifies the drafts."""

import itertools
from collections.abc import Sequence

import numpy as np

from peagle.engine.host.handle import Handle
from peagle.engine.request import Drafting
from peagle.engine.step.masks import all_allowed, fill, next_mask


def first_mask(handle: Handle) -> np.ndarray | None:
    """Make the mask of a request's first token; None without a grammar."""
    if handle.matcher is None:
        return None
    mask = next_mask(handle.matcher)
    if handle.matcher.limited:
        renew(handle, handle.output_ids)
        mask = next_mask(handle.matcher)
    return mask


def step_masks(
    handles: Sequence[Handle | None], drafts: np.ndarray, widths: Sequence[int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (the masks of a step's rows, how many drafts of each row may count). handles, widths: by row."""
    masks = all_allowed(len(drafts), drafts.shape[1] + 1, vocab_size)
    counts = np.full((len(drafts),), drafts.shape[1], np.int32)
    constrained, matchers = dict[int, Handle](), {}
    for row, handle in enumerate(handles):
        if handle is not None and handle.matcher is not None and handle.finished is None:
            verified = itertools.takewhile(range(vocab_size).__contains__, drafts[row, : widths[row]].tolist())
            constrained[row], matchers[row] = handle, (handle.matcher, tuple(verified))
    for row, count in fill(masks, matchers).items():
        counts[row] = count
    for row, (matcher, _) in matchers.items():
        if matcher.limited:
            renew(constrained[row], constrained[row].output_ids)
            fill(masks, {row: (matcher, ())})
            counts[row] = 0
    return masks, counts


def renew(handle: Handle, token_ids: Sequence[int]) -> None:
    """Give a request's grammar its own automaton. The request drafts no more: drafts would fill that one, too."""
    assert handle.matcher is not None
    handle.matcher.renew(token_ids)
    handle.drafting = Drafting.NEVER
