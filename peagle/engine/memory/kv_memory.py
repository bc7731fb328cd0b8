"""Size the pool of pages over all cache groups of target and drafter, and write requests' tables for the device.

A full group's table lists all pages of a request. A windowed group's table is short: it holds the pages that the window
and the rows of a pass reach, page n at entry n modulo the table's width.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from peagle.base.errors import InputError
from peagle.base.memory import tree_bytes
from peagle.base.sizes import format_size
from peagle.engine.memory.pages import PageGroup, PagePool, PageTable
from peagle.engine.resolved import MOST_RESERVED, ResolvedConfig
from peagle.ops.attention import PAGE_SIZE, CacheGroup, Pages
from peagle.protocols import Drafter, OverDevices, Target

# pages that a windowed group keeps, at most, for later requests to continue from; as a share of a full group's pages
KEPT_WINDOW_FRAC = 0.25


@dataclass(frozen=True)
class PrefixCacheUse:
    """Counts since the engine was made, and the present size.

    num_hits: requests that began with cached tokens. num_tokens: of prompts; num_hit_tokens: the cached ones of these.
    num_entries: cached pages that no request holds, of num_bytes.
    """

    num_requests: int
    num_hits: int
    num_tokens: int
    num_hit_tokens: int
    num_entries: int
    num_bytes: int


@dataclass(frozen=True)
class PageUse:
    """Pages of the full group that has the fewest left: all, and those that requests hold.

    Cached pages that no request holds do not count as held: requests get them as soon as they need them.
    """

    num_pages: int
    num_held: int

    @property
    def held_frac(self) -> float:
        return self.num_held / self.num_pages

    @property
    def num_tokens(self) -> int:
        return self.num_pages * PAGE_SIZE


@dataclass(frozen=True)
class Sizing:
    """How many pages an engine needs, by its config and its models' cache groups.

    page_bytes: of a page of each group. block_drafts: drafts per block of a drafter, which writes the whole block;
    None: it drafts without blocks.
    """

    groups: tuple[CacheGroup, ...]
    page_bytes: tuple[int, ...]
    config: ResolvedConfig
    block_drafts: int | None = None
    num_target_groups: int = 1

    @classmethod
    def of(cls, target: Target, drafter: Drafter | None, config: ResolvedConfig) -> "Sizing":
        models: list[Target | Drafter] = [target] if drafter is None else [target, drafter]
        groups = tuple(group for model in models for group in model.cache_groups)
        sizes = tuple(size for model in models for size in page_bytes(model.cache_groups, model.init_pages))
        return cls(groups, sizes, config, getattr(drafter, "block_drafts", None), len(target.cache_groups))

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions after a request's last token that a step writes."""
        k = self.config.num_drafts
        return max(k, self.block_drafts or 0) if k else 0

    @property
    def rows_ahead(self) -> int:
        """Rows of a request after those that the host has read: two dispatches and one more step."""
        steps = 2 * self.config.steps_per_dispatch
        return steps * (self.config.num_drafts + 1) + self.num_lookahead_tokens + 1

    def pages_of(self, num_tokens: int) -> int:
        """Count the pages of this many tokens in a full group."""
        offset = max(group.offset for group in self.groups)
        return -(-(num_tokens + offset) // PAGE_SIZE)

    @property
    def request_pages(self) -> int:
        """Count the pages of one request of the whole context in a full group."""
        return self.pages_of(self.config.context + self.num_lookahead_tokens + 1)

    def _window_pages(self, window: int, num_rows: int) -> int:
        """Count the pages that a window and the rows of a pass touch."""
        return min(self.request_pages, -(-(window + num_rows) // PAGE_SIZE) + 2)

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Entries of a request's table in each group."""
        num_rows = max(self.config.pass_shapes[0][1], self.rows_ahead)
        return tuple(
            self.request_pages if group.window is None else self._window_pages(group.window, num_rows)
            for group in self.groups
        )

    @property
    def slot_pages(self) -> tuple[int, ...]:
        """Pages of each windowed group that a decoding slot holds; 0 for full groups."""
        return tuple(
            0 if group.window is None else self._window_pages(group.window, self.rows_ahead) for group in self.groups
        )

    @property
    def _windowed(self) -> list[int]:
        """Pages of each windowed group that all slots and one prompt hold; 0 for full groups."""
        slots = self.config.slots
        return [
            0 if group.window is None else slots * in_steps + width
            for group, in_steps, width in zip(self.groups, self.slot_pages, self.table_widths, strict=True)
        ]

    def counts(self, num_full: int) -> tuple[int, ...]:
        """Count each group's pages in a pool whose full groups have num_full."""
        kept = math.ceil(KEPT_WINDOW_FRAC * num_full) if self.config.prefix_cache else 0
        return tuple(
            num_full if group.window is None else min(num_full, count + kept)
            for count, group in zip(self._windowed, self.groups, strict=True)
        )

    def size(self, num_full: int) -> int:
        """Compute the bytes of such a pool."""
        return sum(count * size for count, size in zip(self.counts(num_full), self.page_bytes, strict=True))

    def full_pages_in(self, num_bytes: int) -> int:
        """Count the pages of each full group in the largest pool that fits into this much memory."""
        if not sum(self.page_bytes):
            return 0
        most = num_bytes // max(1, min(size for size in self.page_bytes if size)) + sum(self._windowed)
        return bisect.bisect_right(range(1, most + 1), num_bytes, key=self.size)

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages of each group. Raises InputError if the memory does not hold one request of the whole context."""
        config, full = self.config, self.request_pages
        if config.kv_memory is None or not sum(self.page_bytes):
            reserved = self.pages_of(min(config.context, MOST_RESERVED) + self.num_lookahead_tokens + 1)
            num_full = max(config.slots * reserved, full)
        elif self.size(full) > config.kv_memory:
            least = format_size(self.size(full), at_least=True)
            raise InputError(
                f"the memory for keys and values is {format_size(config.kv_memory)}; expected {least} or more, which "
                f"hold one request of {config.context} positions: raise --kv-memory or lower --context"
            )
        else:
            num_full = self.full_pages_in(config.kv_memory)
        return self.counts(max(num_full, self.full_pages_in(self.size(num_full) + config.prefix_cache)))


class KVMemory:
    """The pages of an engine's requests. Only the engine's loop changes it."""

    def __init__(self, target: Target, drafter: Drafter | None, config: ResolvedConfig) -> None:
        """Raises InputError if the memory does not hold one request of the whole context."""
        self.sizing = sizing = Sizing.of(target, drafter, config)
        self.groups, self.page_bytes = sizing.groups, sizing.page_bytes
        self.num_target_groups, self.has_drafter = sizing.num_target_groups, drafter is not None
        self._ranks, self._local_ranks = 1, 1
        if isinstance(target, OverDevices):
            self._ranks, self._local_ranks = target.ranks, target.local_ranks
        self.keeps_prefixes = config.prefix_cache > 0
        self.num_pages, self.table_widths = self.sizing.num_pages, self.sizing.table_widths
        pairs = zip(self.num_pages, self.groups, strict=True)
        self.pool = PagePool([PageGroup(count, group.window, group.offset) for count, group in pairs], PAGE_SIZE)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of the target's pages and of the drafter's."""
        sizes = [count * size for count, size in zip(self.num_pages, self.page_bytes, strict=True)]
        return sum(sizes[: self.num_target_groups]), sum(sizes[self.num_target_groups :])

    @property
    def num_sharing(self) -> int:
        """Ranks that share one memory: all of this process on a CPU."""
        return self._local_ranks if jax.default_backend() == "cpu" else 1

    @property
    def num_local_bytes(self) -> int:
        """Bytes of all pages on one device, or on all that share its memory."""
        of_target, of_drafter = self.num_bytes
        return self.num_sharing * (of_target // self._ranks + of_drafter)

    def open(self, token_ids: Sequence[int], with_drafter: bool) -> PageTable:
        """Begin a request with the cached pages of its tokens. with_drafter: in the drafter's groups, too."""
        return self.pool.open(token_ids if self.keeps_prefixes else (), self._group_numbers(with_drafter))

    def num_known(self, token_ids: Sequence[int], with_drafter: bool) -> int:
        """Count the leading tokens that are in cached pages."""
        return self.pool.num_known(token_ids, self._group_numbers(with_drafter))

    def _group_numbers(self, with_drafter: bool) -> Sequence[int]:
        return range(len(self.groups) if with_drafter else self.num_target_groups)

    def missing(self, table: PageTable, num_tokens: int) -> int:
        """Count the pages of each full group that a request of this many tokens still needs."""
        return self.sizing.pages_of(num_tokens) - len(table.pages[0])

    def available(self) -> int:
        """Count the pages that requests can still get from each full group."""
        full = [number for number, group in enumerate(self.groups) if group.window is None]
        return min(self.pool.num_available(number) for number in full)

    def publish(
        self,
        table: PageTable,
        token_ids: Sequence[int],
        target_rows: int,
        drafter_rows: int,
        ends: bool = False,
        known: bool = True,
    ) -> None:
        """Publish whole pages whose rows are final; free the pages that windows have left behind.

        target_rows, drafter_rows: leading indices that are final. ends: at the end of a chunk, prompt or answer, where
        a later request may continue. known: False keeps the pages to this request.
        """
        num_drafter_groups = len(self.groups) - self.num_target_groups
        final = [target_rows] * self.num_target_groups + [drafter_rows] * num_drafter_groups
        if self.keeps_prefixes and known:
            self.pool.publish(table, token_ids, final, ends)
        self.pool.trim(table, final)

    def row(self, table: PageTable) -> np.ndarray:
        """Write a request's tables side by side, as in its row of a plan."""
        row = np.full((sum(self.table_widths),), -1, np.int32)
        begin = 0
        for number, (group, width) in enumerate(zip(self.groups, self.table_widths, strict=True)):
            pages = table.pages[number]
            if group.window is None:
                row[begin : begin + len(pages)] = pages
            else:
                for place in range(max(0, len(pages) - width), len(pages)):
                    if pages[place] >= 0:
                        row[begin + place % width] = pages[place]
            begin += width
        return row

    @property
    def page_use(self) -> PageUse:
        return PageUse(self.num_pages[0], self.num_pages[0] - self.available())

    @property
    def prefix_cache_use(self) -> PrefixCacheUse | None:
        """Hits and bytes of the prefix cache so far; None without one."""
        if not self.keeps_prefixes:
            return None
        cached = [self.pool.num_cached(number) for number in range(len(self.groups))]
        num_bytes = sum(count * size for count, size in zip(cached, self.page_bytes, strict=True))
        c = self.pool.counts
        return PrefixCacheUse(c.num_requests, c.num_hits, c.num_tokens, c.num_hit_tokens, cached[0], num_bytes)


def page_bytes(
    groups: Sequence[CacheGroup], init_pages: Callable[[Sequence[int]], tuple[Pages, ...]]
) -> tuple[int, ...]:
    """Compute the bytes of one page of each cache group. init_pages: makes the pools of all layers."""
    pools = jax.eval_shape(lambda: init_pages([1] * len(groups)))
    by_layer = [tree_bytes(pool) for pool in pools]
    return tuple(sum(by_layer[layer] for layer in group.layers) for group in groups)
