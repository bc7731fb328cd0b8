"""Grouped-query attention with optional sinks, over rows of one pass or over keys and values in pages."""

from peagle.ops.attention.paged import (
    PAGE_SIZE,
    CacheGroup,
    PagedAttention,
    PagedCache,
    PagedRows,
    Pages,
    attend_paged,
    causal_rows,
    group_layers,
    init_pages,
    init_pools,
    own_cache,
    own_tables,
    paged_attention,
)
from peagle.ops.attention.reference import MASKED, Attend, AttendHeads, after_rope, attention, split_heads

__all__ = [
    "MASKED",
    "PAGE_SIZE",
    "Attend",
    "AttendHeads",
    "CacheGroup",
    "PagedAttention",
    "PagedCache",
    "PagedRows",
    "Pages",
    "after_rope",
    "attend_paged",
    "attention",
    "causal_rows",
    "group_layers",
    "init_pages",
    "init_pools",
    "own_cache",
    "own_tables",
    "paged_attention",
    "split_heads",
]
