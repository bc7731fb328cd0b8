"""Caches of models under test in small pages: a short sequence crosses many of them, and a window repeats its own."""

import jax
import numpy as np

from drafter.propose import AnyDrafter
from peagle.ops.attention import PagedCache, init_pools, own_tables
from target.model import GptOss

SMALL = 8  # indices of a page
Cached = GptOss | AnyDrafter


def small_pages(model: Cached, batch: int, capacity: int, widest_write: int) -> PagedCache:
    """Make what init_cache and init_state make, in small pages."""
    groups, config = model.cache_groups, model.config
    tables = own_tables(groups, batch, capacity + widest_write, widest_write, SMALL)
    counts = [table.size for table in tables]
    pages = init_pools(groups, counts, config.num_kv_heads, config.head_dim, model.params.dtype, SMALL)
    return PagedCache(pages, tables)


def of_sequences(cache: PagedCache, which: slice) -> PagedCache:
    """Keep the tables of some sequences; the pages stay."""
    return PagedCache(cache.pages, tuple(table[which] for table in cache.tables))


def entries(model: Cached, cache: PagedCache, first: int, last: int) -> list[np.ndarray]:
    """Return the keys and values [B, n, G, H] of each layer at positions first .. last - 1."""
    parts = []
    for group, table in zip(model.cache_groups, cache.tables, strict=True):
        index = np.arange(first, last) + group.offset
        for layer in group.layers:
            size = cache.pages[layer].page_size
            numbers = np.asarray(table)[:, index // size % table.shape[1]]
            parts += [np.asarray(pool)[numbers, index % size] for pool in jax.tree.leaves(cache.pages[layer])]
    return parts
