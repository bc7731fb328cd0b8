"""Masks of grammars for a cut step: filled in on the host while the target verifies the drafts."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from peagle.engine.grammar import Matcher, Vocabulary
from peagle.engine.handle import Handle
from peagle.engine.masks import all_allowed, fill, next_mask


class Constrained:
    """Fills in the masks of an engine's requests, within a time budget per request.

    budget_s, most_slow: peagle.engine.resolved.ResolvedConfig.mask_budget_s, most_slow_masks.
    """

    def __init__(
        self,
        vocab_size: int,
        budget_s: float,
        most_slow: int,
        cpu_s: Callable[[], float] = time.thread_time,
        wall_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._vocab_size, self._budget_s, self._most_slow = vocab_size, budget_s, most_slow
        self._were_slow = False  # whether all masks together took too long in the last cut step
        self.cpu_s, self.wall_s = cpu_s, wall_s

    def first(self, handle: Handle) -> np.ndarray | None:
        """Make the mask of a request's first token; None without a grammar."""
        if handle.matcher is None:
            return None
        masks = next_mask(handle.matcher)
        if handle.matcher.limited:
            self.renew(handle, handle.output_ids)
            masks = next_mask(handle.matcher)
        return masks

    def masks(
        self, held: Sequence[Handle | None], drafts: np.ndarray, widths: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (the masks of a step's rows, how many drafts of each row may count)."""
        masks = all_allowed(len(drafts), drafts.shape[1] + 1, self._vocab_size)
        by_vocabulary: dict[Vocabulary, dict[int, tuple[Matcher, Sequence[int]]]] = {}
        for row, handle in enumerate(held):
            if handle is None or handle.matcher is None or handle.finished is not None:
                continue
            size = handle.matcher.compiled.vocabulary.size
            verified = itertools.takewhile(range(size).__contains__, drafts[row, : widths[row]].tolist())
            rows = by_vocabulary.setdefault(handle.matcher.compiled.vocabulary, {})
            rows[row] = handle.matcher, tuple(verified)
        counts = np.full((len(drafts),), drafts.shape[1], np.int32)
        for vocabulary, rows in by_vocabulary.items():
            for row, count in self._fill(masks, vocabulary, rows, held).items():
                if count < len(rows[row][1]):
                    counts[row] = count
        return masks, counts

    def _fill(
        self,
        masks: np.ndarray,
        vocabulary: Vocabulary,
        rows: Mapping[int, tuple[Matcher, Sequence[int]]],
        held: Sequence[Handle | None],
    ) -> dict[int, int]:
        """Fill in the masks of rows as peagle.engine.masks.fill does, within each request's budget.

        A single row is timed by itself. Several are filled in together, in threads. If that took too long, the next
        step fills them one by one, which shows the slow one.
        """
        counts = dict[int, int]()
        if len(rows) > 1 and not self._were_slow:
            began = self.wall_s()
            counts = fill(masks, vocabulary, rows)
            self._were_slow = self.wall_s() - began > self._budget_s
        else:
            self._were_slow = False
            for number, row in rows.items():
                began = self.cpu_s()
                counts |= fill(masks, vocabulary, {number: row})
                self._were_slow |= self._is_slow(held[number], row, self.cpu_s() - began)
        for number, (matcher, _) in rows.items():
            if matcher.limited and (handle := held[number]) is not None:
                self.renew(handle, handle.output_ids)
                counts |= fill(masks, vocabulary, {number: (matcher, ())})
        return counts

    def _is_slow(self, handle: Handle | None, row: tuple[Matcher, Sequence[int]], seconds: float) -> bool:
        """Stop drafting for a request whose masks took too long, and count that; return whether they did."""
        matcher, drafts = row
        assert handle is not None
        if seconds <= self._budget_s:
            matcher.num_slow = 0
            return False
        handle.can_draft = False
        matcher.num_slow += not drafts
        if matcher.num_slow >= self._most_slow:
            matcher.overdue = (
                f"the masks of its {matcher.compiled.grammar.name} took more than {self._budget_s * 1e3:g} ms in "
                f"{matcher.num_slow} steps in a row, the last time {seconds * 1e3:.0f} ms, and other requests wait for "
                "them; expected a simpler one: fewer repetitions, or less nesting"
            )
        return True

    def renew(self, handle: Handle, token_ids: Sequence[int]) -> None:
        """Give a request's grammar its own automaton. Its drafts end, because they would fill that one, too."""
        assert handle.matcher is not None
        handle.matcher.renew(token_ids)
        handle.can_draft = False
