"""Masks of grammars for a masked step. The host fills them in while the target verifies the drafts."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from peagle.engine.grammar import Matcher, Vocabulary
from peagle.engine.host.handle import Handle
from peagle.engine.request import Drafting
from peagle.engine.step.masks import all_allowed, fill, next_mask

# A request whose masks take longer in a step, in processor time, stops drafting. After so many such steps in a row it
# fails, because every other request waits for it
MASK_BUDGET_S, MOST_SLOW_MASKS = 0.05, 8


class Constrained:
    """Fills in the masks of an engine's requests, within a time budget per request."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._were_slow = False  # whether all masks together took too long in the last masked step
        self.cpu_s: Callable[[], float] = time.thread_time
        self.wall_s: Callable[[], float] = time.perf_counter

    def first(self, handle: Handle) -> np.ndarray | None:
        """Make the mask of a request's first token; None without a grammar."""
        if handle.matcher is None:
            return None
        masks = next_mask(handle.matcher)
        if handle.matcher.limited:
            renew(handle, handle.output_ids)
            masks = next_mask(handle.matcher)
        return masks

    def masks(
        self, handles: Sequence[Handle | None], drafts: np.ndarray, widths: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (the masks of a step's rows, how many drafts of each row may count). handles, widths: by row."""
        masks = all_allowed(len(drafts), drafts.shape[1] + 1, self._vocab_size)
        by_vocabulary: dict[Vocabulary, dict[int, tuple[Matcher, Sequence[int]]]] = {}
        for row, handle in enumerate(handles):
            if handle is None or handle.matcher is None or handle.finished is not None:
                continue
            vocabulary = handle.matcher.compiled.vocabulary
            verified = itertools.takewhile(range(vocabulary.size).__contains__, drafts[row, : widths[row]].tolist())
            by_vocabulary.setdefault(vocabulary, {})[row] = handle.matcher, tuple(verified)
        counts = np.full((len(drafts),), drafts.shape[1], np.int32)
        for vocabulary, matchers in by_vocabulary.items():
            for row, count in self._fill(masks, vocabulary, matchers, handles).items():
                if count < len(matchers[row][1]):
                    counts[row] = count
        return masks, counts

    def _fill(
        self,
        masks: np.ndarray,
        vocabulary: Vocabulary,
        matchers: Mapping[int, tuple[Matcher, Sequence[int]]],
        handles: Sequence[Handle | None],
    ) -> dict[int, int]:
        """Fill in masks as peagle.engine.step.masks.fill does, within each request's budget.

        A single row is timed by itself. Several are filled in together, in threads. If that takes too long, the next
        step fills them in one by one, to tell the slow one.
        """
        counts = dict[int, int]()
        if len(matchers) > 1 and not self._were_slow:
            began = self.wall_s()
            counts = fill(masks, vocabulary, matchers)
            self._were_slow = self.wall_s() - began > MASK_BUDGET_S
        else:
            self._were_slow = False
            for row, (matcher, drafts) in matchers.items():
                began = self.cpu_s()
                counts |= fill(masks, vocabulary, {row: (matcher, drafts)})
                self._were_slow |= self._is_slow(handles[row], matcher, len(drafts), self.cpu_s() - began)
        for row, (matcher, _) in matchers.items():
            if matcher.limited and (handle := handles[row]) is not None:
                renew(handle, handle.output_ids)
                counts |= fill(masks, vocabulary, {row: (matcher, ())})
        return counts

    def _is_slow(self, handle: Handle | None, matcher: Matcher, num_drafts: int, seconds: float) -> bool:
        """Stop drafting for a request whose masks took too long, and count that; return whether they did."""
        assert handle is not None
        if seconds <= MASK_BUDGET_S:
            matcher.num_slow = 0
            return False
        handle.drafting = Drafting.NEVER
        matcher.num_slow += not num_drafts
        if matcher.num_slow >= MOST_SLOW_MASKS:
            matcher.overdue = (
                f"the masks of its {matcher.compiled.grammar.name} took more than {MASK_BUDGET_S * 1e3:g} ms in "
                f"{matcher.num_slow} steps in a row, the last time {seconds * 1e3:.0f} ms, and other requests wait for "
                "them; expected a simpler one: fewer repetitions, or less nesting"
            )
        return True


def renew(handle: Handle, token_ids: Sequence[int]) -> None:
    """Give a request's grammar its own automaton. The request drafts no more: drafts would fill that one, too."""
    assert handle.matcher is not None
    handle.matcher.renew(token_ids)
    handle.drafting = Drafting.NEVER
