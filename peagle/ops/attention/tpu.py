"""Attention over pages in a Pallas kernel for TPUs.

The grid is (sequence, tile of rows, step). A step takes four pages, which the kernel's pipeline finds by the table and
copies ahead. Rows mask what they do not see, so a row sums over the same blocks of indices, whatever the other rows.
Two kv heads of 64 share 128 lanes: a query has zeros in the other head's half.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Int

from peagle.ops import tpu
from peagle.ops.attention.reference import MASKED
from peagle.ops.tpu import LANES, ROWS

PAGES = 4  # of a step
FEW = 16  # rows that go in tiles of ROWS; more go in tiles of MANY
MANY = 32


def supports(qkv: jax.Array, key: jax.Array, head_dim: int) -> bool:
    """Check that the kernel takes such rows and pages."""
    whole = head_dim in (LANES // 2, LANES) and key.shape[1] % (2 * ROWS) == 0
    return whole and qkv.dtype == key.dtype == jnp.bfloat16


def attend(
    query: BFloat16[Array, "B T N H"],
    key: BFloat16[Array, "P S GH"],
    value: BFloat16[Array, "P S GH"],
    table: Int[Array, "B M"],
    first: Int[Array, "B T"],
    last: Int[Array, "B T"],
    sinks: Float[Array, " N"] | None,
) -> BFloat16[Array, "B T N H"]:
    """Let each row attend to the indices first .. last. A table may repeat its pages."""
    batch, width, heads, head_dim = query.shape
    size, groups, entries = key.shape[1], key.shape[2] // head_dim, table.shape[1]
    beside = LANES // head_dim if groups % (LANES // head_dim) == 0 else 1  # kv heads in the lanes of one product
    parts, repeat, lanes = groups // beside, heads // groups, beside * head_dim
    tokens = ROWS if width <= FEW else MANY
    tiles, rows, span = -(-width // tokens), beside * tokens * repeat, PAGES * size
    pad = ((0, 0), (0, -width % tokens))
    query = jnp.pad(query, (*pad, (0, 0), (0, 0)))
    first, last = jnp.pad(first, pad), jnp.pad(last, pad, constant_values=-1)
    own = jnp.eye(beside, dtype=query.dtype)

    by_head = query.reshape(batch, tiles, tokens, parts, beside, repeat, head_dim)
    apart = jnp.einsum("bxtpgrh,gj->bxpgtrjh", by_head, own).reshape(batch, tiles, parts, rows, lanes)
    sink = jnp.full((heads,), MASKED, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    sink = jnp.broadcast_to(sink.reshape(parts, beside, 1, repeat), (parts, beside, tokens, repeat))

    def by_row(index: jax.Array) -> jax.Array:
        shape = (batch, tiles, beside, tokens, repeat)
        return jnp.broadcast_to(index.reshape(batch, tiles, 1, tokens, 1), shape).reshape(batch, tiles, rows, 1)

    sees = (last >= first).reshape(batch, tiles, tokens)
    lowest = jnp.where(sees, first.reshape(sees.shape), jnp.iinfo(jnp.int32).max).min(axis=2)
    end = (jnp.where(sees, last.reshape(sees.shape), -1).max(axis=2) // span + 1).astype(jnp.int32)
    begin = jnp.minimum(lowest // span, jnp.maximum(end - 1, 0)).astype(jnp.int32)

    def page(number: int) -> pl.BlockSpec:
        def index(b: Any, tile: Any, step: Any, table: Any, begin: Any, end: Any) -> tuple[Any, ...]:
            at = b * tiles + tile
            block = jnp.minimum(begin[at] + step, jnp.maximum(end[at] - 1, 0))  # the last one again: it is not copied
            return jnp.maximum(table[b * entries + (block * PAGES + number) % entries], 0), 0, 0

        return pl.BlockSpec((1, size, key.shape[2]), index)

    def of_tile(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *block), lambda b, tile, *_: (b, tile, *(0 for _ in block)))

    pages = [page(number) for number in range(PAGES)]
    read = batch * tiles * entries * size  # of whole tables
    out = tpu.call(
        functools.partial(_kernel, tiles=tiles, scale=head_dim**-0.5),
        "paged_attention",
        (batch, tiles, jnp.maximum(jnp.max(end - begin), 1)),
        [table.reshape(-1), begin.reshape(-1), end.reshape(-1)],
        [
            (by_row(first), of_tile(rows, 1)),
            (by_row(last), of_tile(rows, 1)),
            (apart, of_tile(parts, rows, lanes)),
            (sink.reshape(parts, rows, 1), pl.BlockSpec((parts, rows, 1), lambda *_: (0, 0, 0))),
            *((tpu.in_hbm(pool), spec) for pool in (key, value) for spec in pages),
        ],
        (jax.ShapeDtypeStruct(apart.shape, query.dtype), of_tile(parts, rows, lanes)),
        [pltpu.VMEM((parts, rows, width), jnp.float32) for width in (1, 1, lanes)],
        pl.CostEstimate(
            flops=4 * read * parts * rows * lanes,
            bytes_accessed=2 * read * key.shape[2] * key.dtype.itemsize,
            transcendentals=read * parts * rows,
        ),
    )
    by_part = out.reshape(batch, tiles, parts, beside, tokens, repeat, beside, head_dim)
    joined = jnp.einsum("bxpgtrjh,gj->bxtpgrh", by_part, own)
    return joined.reshape(batch, tiles * tokens, heads, head_dim)[:, :width]


def _kernel(*refs: Any, tiles: int, scale: float) -> None:
    """Fold four pages into a tile's online softmax. A row of a tile is a query head of a token."""
    _, begin, end, first, last, query, sinks, *rest = refs
    keys, values, (out, peak, total, sums) = rest[:PAGES], rest[PAGES : 2 * PAGES], rest[2 * PAGES :]
    step, at = pl.program_id(2), pl.program_id(0) * tiles + pl.program_id(1)
    parts, rows, lanes = query.shape[2:]
    span = PAGES * keys[0].shape[1]

    @pl.when(step == 0)
    def _begin() -> None:
        peak[...] = sinks[...]
        total[...] = jnp.ones_like(total)  # exp(sink - sink)
        sums[...] = jnp.zeros_like(sums)

    @pl.when(begin[at] + step < end[at])
    def _fold() -> None:
        index = (begin[at] + step) * span + jax.lax.broadcasted_iota(jnp.int32, (rows, span), 1)
        visible = (index >= first[0, 0]) & (index <= last[0, 0])
        by_any = jnp.swapaxes(jnp.max(visible.astype(jnp.float32), axis=0, keepdims=True), 0, 1) > 0
        for part in range(parts):
            own = slice(part * lanes, (part + 1) * lanes)
            key, value = (jnp.concatenate([page[0, :, own] for page in pages], axis=0) for pages in (keys, values))
            over_lanes = (((1,), (1,)), ((), ()))
            products = jax.lax.dot_general(query[0, 0, part], key, over_lanes, preferred_element_type=jnp.float32)
            scores = jnp.where(visible, products * scale, MASKED)
            higher = jnp.maximum(peak[part], jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - higher), 0.0)
            shrink = jnp.exp(peak[part] - higher)
            value = jnp.where(by_any, value, jnp.zeros((), value.dtype))  # 0 * NaN is NaN
            added = jnp.dot(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
            total[part] = total[part] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            sums[part] = sums[part] * shrink + added
            peak[part] = higher

    @pl.when(step == pl.num_programs(2) - 1)
    def _end() -> None:
        out[0, 0] = (sums[...] / total[...]).astype(out.dtype)
