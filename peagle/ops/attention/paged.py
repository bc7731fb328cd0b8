"""Attend over keys and values in pages, in XLA or in the compiled kernels.

One layer's pool holds pages of S positions. A sequence's table says in which page an index of its keys lies:

    table[b]    7  2  9        pages of sequence b, S = 64
    index       0..63 in page 7, 64..127 in page 2, 128..191 in page 9

A row writes its own key and value at one index and sees a range of indices. Both are operands besides the RoPE tables,
because an index is not always a position: P-EAGLE stores the row at position p at index p + 1. If a table is shorter
than its sequence, its pages repeat (index modulo): a window needs only a few pages.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from peagle.ops import cuda, native
from peagle.ops.attention import tpu
from peagle.ops.attention.reference import online_attention, split_heads
from peagle.ops.cuda import calls
from peagle.ops.kernels import Implementation
from peagle.ops.row_blocks import in_row_blocks

PAGE_SIZE = 64  # positions
MOST_SCORES = 1 << 18  # attention scores of one head that XLA holds at once
MOST_PAGES = 4  # pages that XLA gathers at once
QUERY_ROWS = 128  # XLA attends in blocks of so many rows or more: each reads only the pages that it sees
T = TypeVar("T")


@flax.struct.dataclass
class Pages:
    """One layer's pool of pages: keys and values, [P, S, G H] each.

    The kv heads of an index are side by side: in [P, S, G, H] a TPU would lay the pages' numbers along its lanes, which
    are wider than a head, and copy the whole pool in every pass.
    """

    key: jax.Array
    value: jax.Array

    @property
    def page_size(self) -> int:
        return self.key.shape[1]


@dataclass(frozen=True)
class CacheGroup:
    """Layers of one model that keep the same indices, and so share page tables.

    window: how many of the latest indices rows see and the group keeps; None: all. offset: the index of position 0.
    layers: numbers in order; may be empty.
    """

    window: int | None
    offset: int
    layers: tuple[int, ...]

    def num_pages(self, capacity: int, widest_write: int, page_size: int = PAGE_SIZE) -> int:
        """Count the pages of one sequence of `capacity` positions whose table may repeat its pages.

        A windowed group needs the pages of the window and of a pass, whose rows are all written before any attends.
        """
        all_pages = -(-(capacity + self.offset) // page_size)
        if self.window is None:
            return all_pages
        return min(all_pages, -(-(self.window + widest_write - 1) // page_size) + 1)


@flax.struct.dataclass
class PagedCache:
    """The caches of a batch of sequences: a pool per layer, a table per group of layers.

    The caller keeps the length. Rows that were rolled back lie after every earlier query, and are overwritten before a
    later query reads them.
    """

    pages: tuple[Pages, ...]
    tables: tuple[jax.Array, ...]  # [B, M] int32 each


def group_layers(windows: Sequence[int | None], offset: int = 0) -> tuple[CacheGroup, ...]:
    """Group layers by window. The first group has no window, and is there even if it has no layers."""
    distinct = [None, *sorted({window for window in windows if window is not None})]
    return tuple(
        CacheGroup(window, offset, tuple(layer for layer, own in enumerate(windows) if own == window))
        for window in distinct
    )


def init_pools(
    groups: Sequence[CacheGroup],
    num_pages: Sequence[int],
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    page_size: int = PAGE_SIZE,
) -> tuple[Pages, ...]:
    """Make the empty pools of a model's layers. num_pages: of each group."""
    pools = {
        layer: init_pages(count, page_size, kv_heads, head_dim, dtype)
        for group, count in zip(groups, num_pages, strict=True)
        for layer in group.layers
    }
    return tuple(pools[layer] for layer in sorted(pools))


def own_tables(
    groups: Sequence[CacheGroup], batch: int, capacity: int, widest_write: int, page_size: int = PAGE_SIZE
) -> tuple[Int[Array, "B M"], ...]:
    """Make tables in which sequence b has the pages b M .. b M + M - 1."""
    counts = [group.num_pages(capacity, widest_write, page_size) for group in groups]
    return tuple(jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count) for count in counts)


def own_cache(
    groups: Sequence[CacheGroup],
    init_pages: Callable[[Sequence[int]], tuple[Pages, ...]],
    batch: int,
    capacity: int,
    widest_write: int,
) -> PagedCache:
    """Make empty caches with their own pages, for `capacity` positions and a pass of `widest_write` rows."""
    tables = own_tables(groups, batch, capacity + widest_write, widest_write)
    return PagedCache(init_pages([table.size for table in tables]), tables)


def rows_by_layer(
    groups: Sequence[CacheGroup],
    windows: Sequence[int | None],
    cache: PagedCache,
    positions: jax.Array,
    writes: jax.Array | None = None,
    until: jax.Array | None = None,
) -> dict[int, "PagedRows"]:
    """Compute the `causal_rows` of a pass for each layer.

    windows: by layer; its group may keep more than the window. writes: False in rows that only read.
    """
    placed: dict[int, PagedRows] = {}
    for group, table in zip(groups, cache.tables, strict=True):
        for window in dict.fromkeys(windows[layer] for layer in group.layers):
            page_size = cache.pages[group.layers[0]].page_size
            rows = causal_rows(table, positions, page_size, window, group.offset, until)
            if writes is not None:
                rows = rows.replace(write=jnp.where(writes, rows.write, -1))  # type: ignore[attr-defined]
            placed |= dict.fromkeys((layer for layer in group.layers if windows[layer] == window), rows)
    return placed


@flax.struct.dataclass
class PagedRows:
    """The indices that the rows of a pass write and see, the same for all layers of a group.

    Pages that a row writes or sees must be in the pool; other table entries are not read.
    """

    table: Int[Array, "B M"]
    write: Int[Array, "B T"]  # the row's own index; -1: it writes nothing
    first: Int[Array, "B T"]  # the first and the last index that the row sees; last < first: it sees nothing
    last: Int[Array, "B T"]
    # largest number of indices from the first to the last that the rows of one sequence see
    span: int = flax.struct.field(pytree_node=False)

    def of_block(self, write: jax.Array, first: jax.Array, last: jax.Array) -> "PagedRows":
        """Take rows of a block, whose padding is -1: it sees nothing."""
        return PagedRows(self.table, write, jnp.maximum(first, 0), last, self.span)


def init_pages(num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: DTypeLike) -> Pages:
    # two buffers, because a donated buffer may appear only once
    shape = (num_pages, page_size, kv_heads * head_dim)
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def causal_rows(
    table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    page_size: int,
    window: int | None = None,
    offset: int = 0,
    until: Int[Array, "B T"] | None = None,
) -> PagedRows:
    """Make rows that write index position + offset and see the indices from `offset` up to it.

    window: they see only that many of the latest. A row of negative position writes and sees nothing. The positions of
    one sequence are consecutive. until: the last position that each row sees, instead of its own, at most the last of
    the pass; negative: it sees nothing. So the rows of a block may see each other, because all rows are written before
    any attends.
    """
    index = jnp.where(positions < 0, -1, positions + offset)
    last = index if until is None else jnp.where((positions < 0) | (until < 0), -1, until + offset)
    if window is None:
        return PagedRows(table, index, jnp.full_like(index, offset), last, table.shape[1] * page_size)
    first = jnp.maximum(index - (window - 1), offset)
    return PagedRows(table, index, first, last, window + positions.shape[1] - 1)


def paged_attention(
    qkv: Float[Array, "B T all"],
    cos: Float[Array, "B T h"],
    sin: Float[Array, "B T h"],
    pages: Pages,
    rows: PagedRows,
    num_heads: int,
    sinks: Float[Array, " N"] | None = None,
    *,
    implementation: Implementation | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T out"], Pages]:
    """Apply RoPE, write the rows' keys and values to pages, then attend; return (output [B, T, N H], pages).

    Ignore the output of a row that sees nothing; it is finite. With the native kernels a row's bits depend only on its
    query and on the keys and values that it sees, not on page numbers, other rows or how a prompt is cut into chunks.

    mesh: all of its devices compute the same, outside of a `shard_map`.

    Raises InputError if the named implementation does not run here or does not take these operands.
    """
    operands = (qkv, cos, sin, pages, rows, sinks)
    if implementation == "native":
        return _on_native(*operands)
    on_xla = functools.partial(_on_xla, num_heads=num_heads)
    if implementation == "tpu" and tpu.supports(qkv, pages.key, 2 * cos.shape[2]):
        return on_xla(*operands, attend=functools.partial(_attend_on_tpu, mesh=mesh))
    if implementation in ("xla", "tpu"):
        return on_xla(*operands)
    if _cuda_supports(qkv, pages.key, 2 * cos.shape[2]):
        if implementation == "cuda":
            return _on_cuda(*operands)
        return jax.lax.platform_dependent(*operands, cuda=_on_cuda, default=on_xla)
    if implementation == "cuda":
        raise cuda.unsupported(f"bfloat16, heads of {calls.HEAD_DIM} and pages of {calls.PAGE}")
    return on_xla(*operands)


def _cuda_supports(qkv: jax.Array, key: jax.Array, head_dim: int) -> bool:
    """Check that the CUDA kernels run here and take such rows and pages."""
    if not cuda.available():
        return False
    return key.shape[1] == calls.PAGE and head_dim == calls.HEAD_DIM and qkv.dtype == key.dtype == jnp.bfloat16


def attend_paged(
    cache: PagedCache,
    groups: Sequence[CacheGroup],
    windows: Sequence[int | None],
    positions: Int[Array, "B T"],
    num_heads: int,
    *,
    sinks: Sequence[jax.Array] | None = None,
    writes: Bool[Array, "B T"] | None = None,
    until: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
    mesh: Mesh | None = None,
) -> "PagedAttention":
    """Make the attention of one pass over a cache.

    sinks: by layer. The other arguments are those of `rows_by_layer` and of `paged_attention`.
    """
    rows = rows_by_layer(groups, windows, cache, positions, writes, until)
    return PagedAttention(list(cache.pages), cache.tables, rows, num_heads, sinks, implementation, mesh)


@dataclass
class PagedAttention:
    """The attention of one pass over a cache. Call it once per layer: it writes the layer's rows, then attends."""

    pages: list[Pages]
    tables: tuple[jax.Array, ...]
    rows: dict[int, PagedRows]
    num_heads: int
    sinks: Sequence[jax.Array] | None
    implementation: Implementation | None
    mesh: Mesh | None = None

    def __call__(self, layer: int, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        pages, rows, sinks = self.pages[layer], self.rows[layer], None if self.sinks is None else self.sinks[layer]
        out, self.pages[layer] = paged_attention(
            qkv, cos, sin, pages, rows, self.num_heads, sinks, implementation=self.implementation, mesh=self.mesh
        )
        return out

    def in_blocks(self, layer: int, num_blocks: int, half: Callable[..., T], x: T, *operands: Any) -> T:
        """Compute half(x, *operands), which calls this attention for the layer, in blocks of rows (`in_row_blocks`).

        The first of the operands are the positions. A block's rows are written before it attends.
        """
        rows = self.rows[layer]

        def of_block(x: T, pages: Pages, *operands: Any) -> tuple[T, Pages]:
            *others, write, first, last = operands
            self.pages[layer] = pages
            self.rows[layer] = rows.of_block(write, first, last)
            return half(x, *others), self.pages[layer]

        operands = (*operands, rows.write, rows.first, rows.last)
        x, self.pages[layer] = in_row_blocks(of_block, num_blocks, x, self.pages[layer], *operands)
        return x

    @property
    def cache(self) -> PagedCache:
        """The cache with the rows that were written."""
        return PagedCache(tuple(self.pages), self.tables)


def write_pages(
    pages: Pages,
    key: Float[Array, "B T G H"],
    value: Float[Array, "B T G H"],
    table: Int[Array, "B M"],
    write: Int[Array, "B T"],
) -> Pages:
    """Write rows at their indices; rows of index -1 write nothing."""
    num_pages, size = pages.key.shape[:2]
    page = jnp.take_along_axis(table, jnp.maximum(write, 0) // size % table.shape[1], axis=1)
    page = jnp.where((write < 0) | (page < 0), num_pages, page)  # beyond the pool: dropped

    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        flat = rows.astype(pool.dtype).reshape(*write.shape, -1)
        bits = _as_bits(pool).at[page, write % size].set(_as_bits(flat), mode="drop")
        return _from_bits(bits, pool.dtype)

    return Pages(put(pages.key, key), put(pages.value, value))


def _as_bits(values: jax.Array) -> jax.Array:
    """View bfloat16 as integers, because XLA on CPU would convert a whole pool to float32 to access a few rows.

    On a TPU it is the view that would copy the pool.
    """
    as_it_is = values.dtype != jnp.bfloat16 or jax.default_backend() == "tpu"
    return values if as_it_is else jax.lax.bitcast_convert_type(values, jnp.uint16)


def _from_bits(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


# attends, by rows that are written, in these pages
Attend: TypeAlias = Callable[[jax.Array, Pages, PagedRows, jax.Array | None], jax.Array]


def _on_xla(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: Pages,
    rows: PagedRows,
    sinks: jax.Array | None,
    *,
    num_heads: int,
    attend: Attend | None = None,
) -> tuple[jax.Array, Pages]:
    """Rotate and write, then attend; by default in blocks of rows."""
    query, key, value = split_heads(qkv, num_heads, pages.key.shape[2] // (2 * cos.shape[2]), cos, sin)
    pages = write_pages(pages, key, value, rows.table, rows.write)
    out = (attend or _attend_in_blocks)(query, pages, rows, sinks)
    return out.reshape(*qkv.shape[:2], -1), pages


def _attend_in_blocks(query: jax.Array, pages: Pages, rows: PagedRows, sinks: jax.Array | None) -> jax.Array:
    def attend(query: jax.Array, _: None, last: jax.Array, first: jax.Array) -> tuple[jax.Array, None]:
        return _attend_in_pages(query, pages, rows.of_block(last, first, last), sinks), None

    return in_row_blocks(attend, query.shape[1] // QUERY_ROWS, query, None, rows.last, rows.first)[0]


def _attend_on_tpu(
    query: jax.Array, pages: Pages, rows: PagedRows, sinks: jax.Array | None, *, mesh: Mesh | None
) -> jax.Array:
    attend = tpu.attend
    if mesh is not None:  # XLA does not divide a Pallas kernel among devices, nor repeat it on each
        same = PartitionSpec()
        attend = jax.shard_map(attend, mesh=mesh, in_specs=same, out_specs=same, check_vma=False)
    return attend(query, pages.key, pages.value, rows.table, rows.first, rows.last, sinks)


def _attend_in_pages(
    query: Float[Array, "B T N H"], pages: Pages, rows: PagedRows, sinks: jax.Array | None
) -> Float[Array, "B T N H"]:
    size, width, groups = pages.page_size, rows.table.shape[1], pages.key.shape[2] // query.shape[3]
    count = max(1, min(MOST_PAGES, width, MOST_SCORES // (query.shape[1] * size)))

    def load(block: jax.Array) -> tuple[Float[Array, "B S G H"], Float[Array, "B S G H"], Bool[Array, "B T S"]]:
        places = block * count + jnp.arange(count, dtype=jnp.int32)
        numbers = jnp.maximum(rows.table[:, places % width], 0)
        index = (block * count * size + jnp.arange(count * size, dtype=jnp.int32))[None, None]
        mask = (index >= rows.first[:, :, None]) & (index <= rows.last[:, :, None])
        batch = numbers.shape[0]
        keys, values = (
            _from_bits(_as_bits(pool)[numbers], pool.dtype).reshape(batch, count * size, groups, -1)
            for pool in (pages.key, pages.value)
        )
        return keys, values, mask

    sees = rows.last >= rows.first
    begin = jnp.min(jnp.where(sees, rows.first, jnp.iinfo(jnp.int32).max)) // (count * size)
    end = jnp.max(jnp.where(sees, rows.last, -1)) // (count * size) + 1
    return online_attention(query, groups, load, begin, end, sinks)


def _on_native(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, pages: Pages, rows: PagedRows, sinks: jax.Array | None
) -> tuple[jax.Array, Pages]:
    stored = jax.ShapeDtypeStruct(pages.key.shape, pages.key.dtype)
    outputs = qkv.shape[2] - 2 * pages.key.shape[2]
    out, key, value = native.call(
        "paged_attention",
        (jax.ShapeDtypeStruct((*qkv.shape[:2], outputs), pages.key.dtype), stored, stored),
        qkv,
        cos,
        sin,
        pages.key,
        pages.value,
        rows.table,
        rows.write,
        rows.first,
        rows.last,
        native.optional(sinks),
        in_place={3: 1, 4: 2},
    )
    return out, Pages(key, value)


def _on_cuda(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, pages: Pages, rows: PagedRows, sinks: jax.Array | None
) -> tuple[jax.Array, Pages]:
    where = (rows.table, rows.write, rows.first, rows.last)
    out, key, value = calls.paged_attention(qkv, cos, sin, pages.key, pages.value, *where, sinks, span=rows.span)
    return out, Pages(key, value)
