"""The page pool: any interleaving of requests, rollbacks, preemptions, hits and evictions.

`Device` is a model of the device: it writes what each row would write, in the order of dispatches, and every row checks
what it sees.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from peagle.engine.memory.pages import UNMAPPED, PageGroup, PagePool, PageTable

SIZE = 4  # positions a page
FULL, SLIDING, DRAFTER = 0, 1, 2
WINDOW = 6
GROUPS = (PageGroup(9), PageGroup(8, WINDOW), PageGroup(8, None, 1))


@dataclass(eq=False)
class Request:
    """As an engine would keep it: what the host knows is one dispatch behind."""

    tokens: list[int]  # the prompt, then the answer as it will be
    table: PageTable
    drafts: bool
    length: int  # of the target's cache, as the device has it
    drafted: int  # positions that the drafter has read: after a hit it lacks the last, whose row needs the next token
    read: int  # the same, as the host has read it
    known: int  # the same, when it was opened
    received: bool = False  # its first pages may lack rows that its windows have left behind: never published
    dispatched: list[int] = field(default_factory=list)  # lengths after dispatches that are not read


class Device:
    """Pages whose slots hold what was written last."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int, int], Any] = {}

    def write(self, request: Request, group: int, index: int, content: Any) -> None:
        page = request.table.pages[group][index // SIZE]
        assert page != UNMAPPED
        self.slots[group, page, index % SIZE] = content

    def see(self, request: Request, group: int, index: int) -> Any:
        page = request.table.pages[group][index // SIZE]
        assert page != UNMAPPED, f"group {group} sees index {index} of no page"
        return self.slots.get((group, page, index % SIZE))


def content(request: Request, group: int, position: int) -> Any:
    """What the row at a position holds: it depends on its own tokens and those before, the drafter's on one more."""
    return (group, tuple(request.tokens[: position + (2 if group == DRAFTER else 1)]))


class Machine(RuleBasedStateMachine):
    new_pool: Callable[[], PagePool] = functools.partial(PagePool, GROUPS, SIZE)

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.device = self.new_pool(), Device()
        self.requests: list[Request] = []
        self.events: set[str] = set()

    def groups_of(self, drafts: bool) -> tuple[int, ...]:
        return (FULL, SLIDING, DRAFTER) if drafts else (FULL, SLIDING)

    @rule(
        begin=st.integers(0, 3),  # of the shared beginning, pages
        own=st.integers(1, 7),
        drafts=st.booleans(),
    )
    def arrive(self, begin: int, own: int, drafts: bool) -> None:
        shared = [position % 3 for position in range(begin * SIZE)]
        number = len(self.requests) + 10
        tokens = [*shared, *(number + position for position in range(own))]
        answer = [100 * number + position for position in range(40)] if own % 2 else [9] * 40
        table = self.pool.open(tokens, self.groups_of(drafts))
        known = table.num_cached_tokens
        assert known <= len(tokens)
        request = Request([*tokens, *answer], table, drafts, known, max(known - 1, 0), known, known)
        self.requests.append(request)
        if known:
            self.events.add("hit")
        for group in table.groups:
            self.check_row(request, group, request.drafted if group == DRAFTER else known)

    @precondition(lambda self: not any(request.received for request in self.requests))
    @rule(length=st.integers(2, 20), drafts=st.booleans())
    def receive(self, length: int, drafts: bool) -> None:
        """Take a request whose first tokens were computed elsewhere: only rows that are still seen come with it."""
        tokens = [position % 3 for position in range(length + 40)]
        table = self.pool.open([], self.groups_of(drafts))
        self.pool.skip(table, length)
        if not self.pool.reserve(table, length):
            self.pool.free(table)
            return
        request = Request(tokens, table, drafts, length, length - 1, length, length, received=True)
        for group in table.groups:
            window, offset = GROUPS[group].window, GROUPS[group].offset
            for index in range(offset if window is None else max(offset, length - window), length):
                self.device.write(request, group, index, content(request, group, index - offset))
        self.requests.append(request)
        self.events.add("received")

    def check_row(self, request: Request, group: int, position: int) -> None:
        """Check what the row at a position sees before its own index."""
        window, offset = GROUPS[group].window, GROUPS[group].offset
        first = offset if window is None else max(offset, position + offset - window + 1)
        for index in range(first, position + offset):
            assert self.device.see(request, group, index) == content(request, group, index - offset), (group, index)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99), rows=st.integers(1, 9), rejected=st.integers(0, 3))
    def dispatch(self, which: int, rows: int, rejected: int) -> None:
        """Run some rows, of which the last are rejected: written, then dead."""
        request = self.requests[which % len(self.requests)]
        rows = min(rows, len(request.tokens) - 2 - request.length)
        if rows < 1 or len(request.dispatched) == 2:
            return
        if not self.pool.reserve(request.table, request.length + rows + rejected):
            self.events.add("full")
            self.leave(which + 1 if len(self.requests) > 1 else which)
            return
        end = request.length + rows
        for group in request.table.groups:
            begin = request.drafted if group == DRAFTER else request.length
            for position in range(begin, end + rejected):
                value = ("dead", position) if position >= end else content(request, group, position)
                self.device.write(request, group, position + GROUPS[group].offset, value)
                if position < end:
                    self.check_row(request, group, position)
        request.drafted = end
        request.length += rows
        request.dispatched.append(request.length)

    @precondition(lambda self: any(request.dispatched for request in self.requests))
    @rule(which=st.integers(0, 99), keep=st.booleans())
    def read(self, which: int, keep: bool) -> None:
        waiting = [request for request in self.requests if request.dispatched]
        request = waiting[which % len(waiting)]
        request.read = request.dispatched.pop(0)
        self.publish(request, keep)
        self.pool.trim(request.table, self.num_final(request))

    def num_final(self, request: Request) -> list[int]:
        """Count final indices: the drafter's begin at 1, and it may still lack the row of the last known position."""
        drafted = request.read + 1 if request.read > request.known else request.read
        return [request.read, request.read, drafted]

    def publish(self, request: Request, keep: bool) -> None:
        if not request.received:
            self.pool.publish(request.table, request.tokens, self.num_final(request), keep)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        """End or preempt a request: what was not read is lost."""
        request = self.requests.pop(which % len(self.requests))
        self.publish(request, True)
        self.pool.free(request.table)

    @invariant()
    def holds_together(self) -> None:
        self.pool.check_integrity()
        if self.pool.counts.num_evicted:
            self.events.add("evicted")

    def teardown(self) -> None:
        happened.update(self.events)


happened: set[str] = set()
# derandomised, so that what must happen happens; no shrinking, since planted faults are many
THOROUGH = settings(max_examples=100, stateful_step_count=50, deadline=None, phases=[Phase.generate], derandomize=True)


def test_any_interleaving_sees_its_own_tokens_alone() -> None:
    happened.clear()
    run_state_machine_as_test(Machine, settings=THOROUGH)  # type: ignore[no-untyped-call]
    assert happened == {"hit", "full", "evicted", "received"}


class FreedTooEarly(PagePool):
    """A window that is one page too short."""

    def trim(self, table: PageTable, num_final: Any) -> None:
        super().trim(table, [count + SIZE for count in num_final])


class SkippedTooFar(PagePool):
    """What was computed elsewhere begins a page too late."""

    def skip(self, table: PageTable, num_tokens: int) -> None:
        super().skip(table, num_tokens + SIZE)


class SharedWhileWritable(PagePool):
    """A page is known before its last row is final."""

    def publish(self, table: PageTable, token_ids: Any, num_final: Any, keep_window: bool = False) -> None:
        super().publish(table, token_ids, [count + SIZE - 1 for count in num_final], keep_window)


class LostPages(PagePool):
    """Evicting a node forgets its other groups' pages."""

    def _remove(self, node: Any) -> None:
        del node.parent.children[node.tokens]


class DrafterIgnored(PagePool):
    """A hit as long as the target's, whatever the drafter has."""

    def _longest_hit(self, token_ids: Any, groups: Any) -> Any:
        return super()._longest_hit(token_ids, [group for group in groups if group != DRAFTER])


@pytest.mark.parametrize("fault", [FreedTooEarly, SkippedTooFar, SharedWhileWritable, LostPages, DrafterIgnored])
def test_a_planted_fault_is_found(fault: type[PagePool]) -> None:
    class Faulty(Machine):
        new_pool = functools.partial(fault, GROUPS, SIZE)

    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_state_machine_as_test(Faulty, settings=settings(THOROUGH, print_blob=False))  # type: ignore[no-untyped-call]


def opened(pool: PagePool, tokens: list[int], groups: tuple[int, ...] = (FULL, SLIDING, DRAFTER)) -> PageTable:
    """Run a request to the end of its tokens."""
    table = pool.open(tokens, groups)
    assert pool.reserve(table, len(tokens))
    pool.publish(table, tokens, [len(tokens)] * 3, keep_window=True)
    return table


def test_equal_prompts_side_by_side_end_in_the_same_pages() -> None:
    pool = PagePool(GROUPS, SIZE)
    tables = [pool.open(list(range(8)), (FULL, SLIDING)) for _ in range(3)]
    assert all(pool.reserve(table, 8) for table in tables)
    assert pool.num_available(FULL) == 9 - 6
    for table in tables:
        pool.publish(table, list(range(8)), [8, 8, 8], keep_window=True)
    assert pool.num_available(FULL) == 9 - 2
    assert tables[0].pages == tables[1].pages == tables[2].pages


def test_the_least_recently_used_goes_first_and_tails_before_their_beginnings() -> None:
    pool = PagePool((PageGroup(6),), SIZE)
    for tokens in ([1] * 12, [2] * 12):
        table = pool.open(tokens, (FULL,))
        assert pool.reserve(table, 12)
        pool.publish(table, tokens, [12])
        pool.free(table)
    third = pool.open([3] * 8, (FULL,))
    assert pool.reserve(third, 8)
    assert [pool.open([number] * 12, (FULL,)).num_cached_tokens for number in (1, 2)] == [4, 12]


def test_a_reservation_that_fails_changes_nothing() -> None:
    pool = PagePool((PageGroup(10), PageGroup(2, WINDOW)), SIZE)
    table = pool.open([1] * 12, (0, 1))
    assert not pool.reserve(table, 12)
    assert table.pages == [[], []]
    assert (pool.num_available(0), pool.num_available(1)) == (10, 2)
    assert pool.reserve(table, 8)
    pool.check_integrity()
