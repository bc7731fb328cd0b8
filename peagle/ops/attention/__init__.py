"""Grouped-query attention with optional sinks."""

from peagle.ops.attention.cached import decode_attention, split_heads
from peagle.ops.attention.paged import PAGE_SIZE, PagedRows, Pages, causal_rows, init_pages, paged_attention
from peagle.ops.attention.reference import MASKED, attention

__all__ = [
    "MASKED",
    "PAGE_SIZE",
    "PagedRows",
    "Pages",
    "attention",
    "causal_rows",
    "decode_attention",
    "init_pages",
    "paged_attention",
    "split_heads",
]
