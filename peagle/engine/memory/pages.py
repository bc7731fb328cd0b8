"""Allocate pages of cache memory to requests, share them by prefix, evict and free them. Host code without JAX.

Layers that keep the same indices form a group with its own pool of pages: the target's full layers, its sliding layers,
the drafter's layers. Index i of a request lies in page table[i // page_size] of the group's pool. A page is

    free      no request reads it
    held      one or more requests have it in their tables
    cached    no request holds it, but its tokens are known: a later request with the same tokens takes it

Pages of known tokens form a tree. The node at depth n stands for tokens n * page_size .. (n + 1) * page_size - 1 after
those of its parents, and names one page in each group that has it. The first group has a page in every node. A windowed
group has pages only at the ends of prompts and answers, where a later request may continue. The drafter's group has
none of requests that did not draft. A page becomes known after the host has read that all its rows are final. Its
content depends on its own tokens and on those before it, so equal paths mean equal content.

A hit is the longest path that every group can continue from. Pages are evicted least recently used first, children
before parents. The device runs one ordered stream of dispatches, each with its own tables, so a page may go to another
request while earlier dispatches still read it.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field

UNMAPPED = -1


@dataclass(frozen=True)
class PageGroup:
    """The layers that keep the same indices."""

    num_pages: int
    window: int | None = None  # how many of the latest indices a row sees, its own included; None: all
    offset: int = 0  # the index of position 0


@dataclass(eq=False)
class Node:
    """The tokens of one page, after its parents' tokens."""

    tokens: tuple[int, ...]
    parent: "Node | None"
    pages: list[int]  # by group; UNMAPPED: none
    children: "dict[tuple[int, ...], Node]" = field(default_factory=dict, repr=False)


@dataclass(eq=False)
class PageTable:
    """The pages of one request, by group and by index // page_size; UNMAPPED where it has none."""

    groups: tuple[int, ...]  # those that the request uses
    pages: list[list[int]]
    path: list[Node]  # the root, then the nodes of its first pages
    num_cached_tokens: int  # of its prompt
    num_offered: list[int]  # leading pages that are known, of each group without a window


@dataclass
class PageCounts:
    """Requests and tokens that were looked up and found so far, and pages evicted."""

    num_requests: int = 0
    num_hits: int = 0
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted: int = 0


class PagePool:
    """The pages of all groups. Takes no lock: only the engine's loop calls it.

    Every request uses group 0, which has no window.
    """

    def __init__(self, groups: Sequence[PageGroup], page_size: int) -> None:
        if groups[0].window is not None:
            raise ValueError("group 0 has a window; expected a group that keeps every index")
        self.groups, self.page_size = tuple(groups), page_size
        self.counts = PageCounts()
        # pages that were given back, and how many were ever allocated: in ascending order, so that a prompt lies in
        # neighbouring pages, which are read faster
        self._returned: list[list[int]] = [[] for _ in self.groups]
        self._num_allocated = [0] * len(self.groups)
        self._num_holders: list[collections.Counter[int]] = [collections.Counter() for _ in self.groups]
        # by group, nodes whose page no request holds, in order of eviction: children before their parents
        self._cached: list[collections.OrderedDict[Node, None]] = [collections.OrderedDict() for _ in self.groups]
        self._root = Node((), None, [UNMAPPED] * len(self.groups))
        self._tables: set[PageTable] = set()

    def num_available(self, group: int) -> int:
        """Count the pages that requests can still get: free ones, and cached ones, which are then evicted."""
        never_allocated = self.groups[group].num_pages - self._num_allocated[group]
        return len(self._returned[group]) + never_allocated + len(self._cached[group])

    def num_cached(self, group: int) -> int:
        return len(self._cached[group])

    def num_known(self, token_ids: Sequence[int], groups: Sequence[int]) -> int:
        """Count the leading tokens that `open` would find."""
        return len(self._longest_hit(token_ids, groups)) * self.page_size

    def first_needed(self, group: int, num_pages: int) -> int:
        """Return the first page that a request sees if it continues after num_pages whole pages.

        Its first row is the last known token, which runs again (peagle.engine.step.prefill).
        """
        window = self.groups[group].window
        if window is None:
            return 0
        return min(num_pages, max(0, num_pages * self.page_size - window) // self.page_size)

    def open(self, token_ids: Sequence[int], groups: Sequence[int]) -> PageTable:
        """Begin a request with the longest known prefix of its tokens. It reads known pages and never writes them.

        groups: those that the request uses.
        """
        path = self._longest_hit(token_ids, groups)
        num_tokens = len(path) * self.page_size
        table = PageTable(
            tuple(groups), [[] for _ in self.groups], [self._root, *path], num_tokens, [len(path)] * len(self.groups)
        )
        for group in groups:
            first = self.first_needed(group, len(path))
            table.pages[group] = [node.pages[group] if n >= first else UNMAPPED for n, node in enumerate(path)]
            for node in path[first:]:
                self._hold(group, node.pages[group], node)
        self._tables.add(table)
        return table

    def count_lookup(self, table: PageTable, num_tokens: int) -> None:
        """Count the lookup of a request, once it has its pages."""
        self.counts.num_requests += 1
        self.counts.num_hits += table.num_cached_tokens > 0
        self.counts.num_tokens += num_tokens
        self.counts.num_hit_tokens += table.num_cached_tokens

    def skip(self, table: PageTable, num_tokens: int) -> None:
        """Begin the tables of windowed groups at the first page that a row after num_tokens tokens sees.

        For a request whose tokens were computed elsewhere, so that it needs no page for what its windows left behind.
        """
        for group in table.groups:
            if self.groups[group].window is not None:
                first = self.first_needed(group, num_tokens // self.page_size)
                table.pages[group] += [UNMAPPED] * (first - len(table.pages[group]))

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Extend the tables to positions 0 .. num_tokens - 1. If pages are short, return False and change nothing."""
        missing = {
            group: -(-(num_tokens + self.groups[group].offset) // self.page_size) - len(table.pages[group])
            for group in table.groups
        }
        if any(count > self.num_available(group) for group, count in missing.items()):
            return False
        for group, count in missing.items():
            for _ in range(count):
                page = self._take(group)
                self._num_holders[group][page] = 1
                table.pages[group].append(page)
        return True

    def publish(
        self, table: PageTable, token_ids: Sequence[int], num_final: Sequence[int], keep_window: bool = False
    ) -> None:
        """Make pages known whose rows are all final. If an equal page is known already, free this one and take that.

        num_final: by group, how many leading indices are final, as the host has read. keep_window: a later request may
        continue at the last whole page (the end of a prompt, chunk or answer), so windowed groups keep the pages that
        it would see.
        """
        size = self.page_size
        for number in range(len(table.path) - 1, num_final[0] // size):
            tokens = tuple(token_ids[number * size : (number + 1) * size])
            parent = table.path[-1]
            node = parent.children.setdefault(tokens, Node(tokens, parent, [UNMAPPED] * len(self.groups)))
            table.path.append(node)
            self._offer(table, 0, number)
        num_known = len(table.path) - 1
        for group in table.groups[1:]:
            final = min(num_known, num_final[group] // size)
            if self.groups[group].window is None:
                for number in range(table.num_offered[group], final):
                    self._offer(table, group, number)
                table.num_offered[group] = max(table.num_offered[group], final)
            elif keep_window and final == num_known:
                for number in range(self.first_needed(group, final), final):
                    self._offer(table, group, number)

    def trim(self, table: PageTable, num_final: Sequence[int]) -> None:
        """Free windowed pages that no later row sees, nor a request that continues at the last whole page.

        num_final: as of `publish`. No rollback goes below it.
        """
        for group in table.groups:
            if self.groups[group].window is not None:
                first = self.first_needed(group, num_final[group] // self.page_size)
                for number in range(min(first, len(table.pages[group]))):
                    self._release(table, group, number)

    def free(self, table: PageTable) -> None:
        """Give back a request's pages: known ones become cached, the others free."""
        self._tables.remove(table)
        for group in table.groups:
            for number in reversed(range(len(table.pages[group]))):  # children before parents
                self._release(table, group, number)

    def free_cached(self) -> None:
        """Free all cached pages."""
        for group in reversed(range(len(self.groups))):
            for _ in range(len(self._cached[group])):
                self._returned[group].append(self._take_cached(group))

    def check_integrity(self) -> None:
        """Raise AssertionError unless each page is exactly one of free, held and cached, and all counts are right."""
        nodes = _descendants(self._root)
        for group in range(len(self.groups)):
            holders = collections.Counter(
                page for table in self._tables for page in table.pages[group] if page != UNMAPPED
            )
            assert +self._num_holders[group] == holders, f"group {group}: counts of holders differ from the tables"
            known = [node.pages[group] for node in nodes if node.pages[group] != UNMAPPED]
            assert len(set(known)) == len(known), f"group {group}: two nodes name one page"
            cached = [node.pages[group] for node in self._cached[group]]
            assert set(cached) == set(known) - set(holders), (
                f"group {group}: cached are the known pages that none holds"
            )
            never_allocated = range(self._num_allocated[group], self.groups[group].num_pages)
            everything = sorted([*self._returned[group], *never_allocated, *cached, *holders])
            assert everything == list(range(self.groups[group].num_pages)), f"group {group}: pages are lost or doubled"
            for table in self._tables:
                for number, page in enumerate(table.pages[group]):
                    if page != UNMAPPED and not self._is_known(table, group, number):
                        assert holders[page] == 1, f"group {group}: page {page} is writable and shared"
        assert all(node.pages[0] != UNMAPPED for node in nodes), "a node without a page of group 0"
        order = {node: place for place, node in enumerate(self._cached[0])}
        for node, place in order.items():
            assert all(order.get(child, place + 1) < place for child in node.children.values()), "a parent goes first"

    def _longest_hit(self, token_ids: Sequence[int], groups: Sequence[int]) -> list[Node]:
        path: list[Node] = []
        node, size = self._root, self.page_size
        for begin in range(0, len(token_ids) - size + 1, size):
            child = node.children.get(tuple(token_ids[begin : begin + size]))
            if child is None:
                break
            path.append(child)
            node = child

        def continues(count: int) -> bool:
            return all(
                node.pages[group] != UNMAPPED
                for group in groups
                for node in path[self.first_needed(group, count) : count]
            )

        return path[: next(count for count in range(len(path), -1, -1) if continues(count))]

    def _offer(self, table: PageTable, group: int, number: int) -> None:
        """Make a page known or, if an equal page is known, take that one in its place."""
        node, page = table.path[number + 1], table.pages[group][number]
        if page == UNMAPPED or node.pages[group] == page:
            return
        if node.pages[group] == UNMAPPED:
            node.pages[group] = page
            return
        self._release(table, group, number)
        table.pages[group][number] = node.pages[group]
        self._hold(group, node.pages[group], node)

    def _is_known(self, table: PageTable, group: int, number: int) -> bool:
        return number + 1 < len(table.path) and table.path[number + 1].pages[group] == table.pages[group][number]

    def _hold(self, group: int, page: int, node: Node) -> None:
        self._cached[group].pop(node, None)
        self._num_holders[group][page] += 1

    def _release(self, table: PageTable, group: int, number: int) -> None:
        page = table.pages[group][number]
        if page == UNMAPPED:
            return
        self._num_holders[group][page] -= 1
        if not self._num_holders[group][page]:
            if self._is_known(table, group, number):
                self._cached[group][table.path[number + 1]] = None
            else:
                self._returned[group].append(page)
        table.pages[group][number] = UNMAPPED

    def _take(self, group: int) -> int:
        """Return a free page or, if there is none, evict the least recently used one."""
        if self._returned[group]:
            return self._returned[group].pop()
        if self._num_allocated[group] < self.groups[group].num_pages:
            self._num_allocated[group] += 1
            return self._num_allocated[group] - 1
        return self._take_cached(group)

    def _take_cached(self, group: int) -> int:
        node, _ = self._cached[group].popitem(last=False)
        page = node.pages[group]
        node.pages[group] = UNMAPPED
        self.counts.num_evicted += 1
        if group == 0:
            self._remove(node)
        return page

    def _remove(self, node: Node) -> None:
        """Remove a node without a page of group 0. Its other pages are cached: a holder would also hold that one."""
        assert node.parent is not None
        del node.parent.children[node.tokens]
        for group, page in enumerate(node.pages):
            if page != UNMAPPED:
                del self._cached[group][node]
                self._returned[group].append(page)
                self.counts.num_evicted += 1


def _descendants(root: Node) -> list[Node]:
    nodes = list(root.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes
