"""Reserve, publish and free the pages of each request, from its first chunk to its end."""

from collections.abc import Sequence

from peagle.engine.host.handle import Handle
from peagle.engine.memory.kv_memory import KVMemory
from peagle.engine.request import Drafting
from peagle.ops.attention import PAGE_SIZE


class RequestPages(KVMemory):
    """The pages of an engine's requests, by their handles. Only the engine's loop changes them."""

    def begin(self, handle: Handle, prefilling: Sequence[Handle]) -> bool:
        """Give a request a table with the cached pages of its tokens; return whether there are enough pages.

        Enough for all its tokens and its first steps, besides those that the prompts of `prefilling` still need. A
        preempted request needs more, so that it is not preempted again at once. A hand-off has the pages for its rows.
        """
        token_ids, hand_off = handle.computed_ids, handle.hand_off
        if hand_off is not None:
            reads = hand_off.with_drafter
        else:
            reads = handle.drafting is Drafting.ALWAYS or self._prefills_for_later(token_ids)
        table = self.open(token_ids, self.has_drafter and reads)
        promised = sum(
            max(0, self.missing(other.table, len(other.computed_ids)))
            for other in prefilling
            if other.table is not None
        )
        ahead = self.sizing.rows_ahead * max(1, handle.num_preempted)
        needed = min(len(token_ids) + ahead, self._most_tokens(handle))
        enough = self.missing(table, needed) + promised <= self.available()
        if enough and hand_off is not None:
            self.pool.skip(table, len(token_ids))
            enough = self.pool.reserve(table, len(token_ids))
        if not enough:
            self.pool.free(table)
            return False
        handle.table, handle.drafter_rows = table, table.num_cached_tokens
        return True

    def _prefills_for_later(self, token_ids: Sequence[int]) -> bool:
        """Whether the drafter reads the tokens of a request that does not draft, for later ones with this prefix.

        Not if the target has cached more of them than the drafter: the target would compute these again.
        """
        if not self.keeps_prefixes:
            return False
        target, both = (self.num_known(token_ids, with_drafter) for with_drafter in (False, True))
        return both >= target

    def _most_tokens(self, handle: Handle) -> int:
        """Count the positions that a request can write at most."""
        request = handle.request
        return len(request.prompt_ids) + request.max_new_tokens + self.sizing.num_lookahead_tokens

    def reserve(self, handle: Handle, num_tokens: int) -> bool:
        """Reserve pages for a request's first tokens; return whether it has them."""
        return handle.table is not None and self.pool.reserve(handle.table, num_tokens)

    def reserve_steps(self, handles: Sequence[Handle], steps: int, num_drafts: int) -> bool:
        """Reserve the pages of these requests' next steps; return whether all have theirs."""
        lengths = [self.length_after(handle, steps, num_drafts) for handle in handles]
        return all(self.reserve(handle, most) for handle, most in zip(handles, lengths, strict=True))

    def length_after(self, handle: Handle, steps: int, num_drafts: int) -> int:
        """Count the positions that a request may have written after this many more steps."""
        more = handle.rows_in_flight + steps * (num_drafts + 1) + self.sizing.num_lookahead_tokens
        return min(handle.length + more, self._most_tokens(handle))

    def has_drafter_pages(self, handle: Handle) -> bool:
        assert handle.table is not None
        return len(handle.table.groups) > self.num_target_groups

    def publish_prompt(self, handle: Handle, end: int) -> None:
        """Publish the pages of a prompt up to `end`, computed or received before any later dispatch reads them."""
        if self.has_drafter_pages(handle):
            handle.drafter_rows = max(handle.drafter_rows, end)
        assert handle.table is not None
        self.publish(handle.table, handle.computed_ids[:end], end, handle.drafter_rows, ends=True)

    def publish_output(self, handle: Handle, ends: bool) -> None:
        """Publish a request's pages as far as the host has read. ends: it emits no more."""
        if handle.table is None:
            return
        whole = handle.length // PAGE_SIZE
        if ends or whole != handle.num_published:
            handle.num_published = whole
            self.publish(handle.table, handle.token_ids, handle.length, handle.drafter_rows, ends)

    def free(self, handle: Handle) -> None:
        """Free a request's pages; cached ones stay until others need them."""
        if handle.table is not None:
            self.pool.free(handle.table)
            handle.table = None
