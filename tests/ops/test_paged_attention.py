"""Paged attention in XLA, in the native kernels and in the CUDA kernels, against the definition in float64.

One suite for all forms (`form`, tests/ops/conftest.py). Pools begin full of NaN, so that a read of what a row does not
see shows.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops import native
from peagle.ops.attention import PAGE_SIZE, PagedRows, Pages, causal_rows, init_pages, paged_attention
from peagle.ops.attention.paged import MOST_PAGES

ROUNDED = 2.0**-8  # error of a result rounded to bfloat16 once


def assert_close(form: str, ours: np.ndarray, theirs: np.ndarray, dtype: type) -> None:
    """Allow for rounding: queries, keys and results; on XLA products within the rotation, and weights, too."""
    error = 1e-5 if dtype == np.float32 else (16 if form == "xla" else 5) * ROUNDED
    ours, theirs = (np.asarray(part, np.float64) for part in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, atol=error, rtol=error / 2)


@dataclass(frozen=True)
class Shape:
    heads: int  # N
    kv_heads: int  # G
    head_dim: int  # H
    page_size: int  # S
    window: int | None
    offset: int = 0
    with_sinks: bool = True
    dtype: type = np.float32

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


# what the kernels for GPUs take: heads and pages of 64, bfloat16
GPU_SHAPES = {
    "all": Shape(8, 2, 64, PAGE_SIZE, None, dtype=ml_dtypes.bfloat16),
    "all, without sinks, one query head per kv head": Shape(
        2, 2, 64, PAGE_SIZE, None, with_sinks=False, dtype=ml_dtypes.bfloat16
    ),
    "a window": Shape(6, 2, 64, PAGE_SIZE, 128, dtype=ml_dtypes.bfloat16),
    "a short window, an offset": Shape(4, 1, 64, PAGE_SIZE, 5, offset=1, dtype=ml_dtypes.bfloat16),
}
SHAPES = {
    "pages of 8, heads of 10": Shape(5, 1, 10, 8, None),
    "pages of 5, heads of 24, a window, an offset": Shape(4, 4, 24, 5, 11, offset=1),
    "heads of 64, pages of 16, no sinks": Shape(6, 2, 64, 16, None, with_sinks=False),
    "heads of 90, pages of 16, a window of one": Shape(2, 1, 90, 16, 1, dtype=ml_dtypes.bfloat16),
    "all, float32": Shape(8, 2, 64, PAGE_SIZE, None),
}


def fitting(form: str) -> dict[str, Shape]:
    return GPU_SHAPES if form == "cuda" else SHAPES | GPU_SHAPES


def angles(positions: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Draw (cos, sin) [B, T, H/2], scaled so that they are no mere rotations."""
    turn = positions[:, :, None] * 10.0 ** -np.linspace(0, 2, shape.head_dim // 2)
    return (1.1 * np.cos(turn)).astype(shape.dtype), (1.1 * np.sin(turn)).astype(shape.dtype)


class Sequences:
    """Some sequences by definition: keys and values by (sequence, position), in float64."""

    def __init__(self, shape: Shape, rng: np.random.Generator) -> None:
        self.shape, self.rng = shape, rng
        sinks = (2 * rng.standard_normal(shape.heads)).astype(np.float32)
        if shape.dtype == ml_dtypes.bfloat16:
            sinks = sinks.astype(shape.dtype).astype(np.float32)  # as checkpoints have them
        self.sinks = sinks if shape.with_sinks else None
        self.keys: dict[tuple[int, int], np.ndarray] = {}
        self.values: dict[tuple[int, int], np.ndarray] = {}

    def project(self, positions: np.ndarray) -> np.ndarray:
        return (1.5 * self.rng.standard_normal((*positions.shape, self.shape.width))).astype(self.shape.dtype)

    def attend(self, qkv: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Write all rows, then attend; return [B, T, N, H], zeros at negative positions."""
        shape = self.shape
        heads = qkv.astype(np.float64).reshape(*positions.shape, -1, shape.head_dim)
        cos, sin = (part.astype(np.float64)[:, :, None] for part in angles(positions, shape))

        def rotated(x: np.ndarray) -> np.ndarray:
            left, right = np.split(x, 2, axis=-1)
            turned = np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
            return turned.astype(shape.dtype).astype(np.float64)

        query, key = rotated(heads[:, :, : shape.heads]), rotated(heads[:, :, shape.heads : -shape.kv_heads])
        rows = np.argwhere(positions >= 0).tolist()
        for b, t in rows:
            at = (b, int(positions[b, t]))
            self.keys[at], self.values[at] = key[b, t], heads[b, t, -shape.kv_heads :]
        out = np.zeros(query.shape)
        for b, t in rows:
            newest = int(positions[b, t])
            oldest = 0 if shape.window is None else max(0, newest - shape.window + 1)
            keys, values = (
                np.stack([held[b, p] for p in range(oldest, newest + 1)]) for held in (self.keys, self.values)
            )
            for n in range(shape.heads):
                group = n // (shape.heads // shape.kv_heads)
                weights = np.exp(keys[:, group] @ query[b, t, n] / np.sqrt(shape.head_dim))
                total = weights.sum() + (0.0 if self.sinks is None else np.exp(np.float64(self.sinks[n])))
                out[b, t, n] = weights @ values[:, group] / total
        return out


def shuffled_table(rng: np.random.Generator, batch: int, width: int, num_pages: int) -> np.ndarray:
    """Give every sequence pages of its own, in no order."""
    return rng.permutation(num_pages)[: batch * width].reshape(batch, width).astype(np.int32)


def empty(shape: Shape, num_pages: int) -> Pages:
    pages = init_pages(num_pages, shape.page_size, shape.kv_heads, shape.head_dim, shape.dtype)
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pages)  # type: ignore[no-any-return]


@functools.partial(jax.jit, static_argnames=("shape", "form"))
def attend(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: Pages,
    table: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None,
    *,
    shape: Shape,
    form: str,
) -> tuple[jax.Array, Pages]:
    rows = causal_rows(table, positions, shape.page_size, shape.window, shape.offset)
    out, pages = paged_attention(qkv, cos, sin, pages, rows, shape.heads, sinks, implementation=form)  # type: ignore[arg-type]
    return out.reshape(*positions.shape, shape.heads, shape.head_dim), pages


def run(
    form: str, sequences: Sequences, pages: Pages, table: np.ndarray, positions: np.ndarray, qkv: np.ndarray
) -> tuple[np.ndarray, Pages]:
    shape = sequences.shape
    operands = jax.tree.map(jnp.asarray, (qkv, *angles(positions, shape), pages, table, positions, sequences.sinks))
    out, pages = attend(*operands, shape=shape, form=form)
    return np.asarray(out), pages


def steps(*firsts: int, rows: int) -> np.ndarray:
    """Return positions [B, T] from each sequence's first on; all -1 if that is negative."""
    return np.array([[-1] * rows if first < 0 else range(first, first + rows) for first in firsts], np.int32)


# passes over three sequences: a prompt, steps, a rollback, idle sequences, rows that write nothing anywhere in a pass
PASSES = (
    steps(0, 0, -1, rows=21),
    steps(21, 18, 0, rows=4),
    steps(22, -1, 4, rows=1),
    np.array([[23, -1, 24, 25], [-1, 22, -1, -1], [-1, -1, -1, -1]], np.int32),
    steps(26, 23, 3, rows=9),
)


def many_passes() -> tuple[np.ndarray, ...]:
    """The same after 300 positions: past a chunk of the GPU's kernels, and past the pages that XLA takes at once."""
    return steps(0, 0, -1, rows=300), steps(300, 297, 0, rows=4)


@pytest.mark.parametrize("name", SHAPES | GPU_SHAPES)
def test_it_is_the_definition(form: str, name: str) -> None:
    """Pages in no order; what a row does not see is NaN; what is not written keeps its bits."""
    if name not in fitting(form):
        pytest.skip("the CUDA kernels take heads and pages of 64 in bfloat16")
    shape, rng = fitting(form)[name], np.random.default_rng(0)
    for passes in (PASSES, many_passes()) if shape.page_size == PAGE_SIZE else (PASSES,):
        longest = max(int(positions.max()) for positions in passes) + 1 + shape.offset
        width = -(-longest // shape.page_size)
        table = shuffled_table(rng, 3, width, 3 * width + 2)
        sequences, pages = Sequences(shape, rng), empty(shape, 3 * width + 2)
        for positions in passes:
            qkv = sequences.project(positions)
            expected = sequences.attend(qkv, positions)
            before = np.asarray(pages.value, np.float32)
            out, pages = run(form, sequences, pages, table, positions, qkv)
            sees = positions >= 0
            assert np.isfinite(out.astype(np.float32)).all()
            assert_close(form, out[sees], expected[sees], shape.dtype)
            index = positions + shape.offset
            b, _ = np.nonzero(sees)
            written = np.zeros(before.shape[:2], bool)
            written[table[b, index[sees] // shape.page_size], index[sees] % shape.page_size] = True
            after = np.asarray(pages.value, np.float32)
            np.testing.assert_array_equal(after[~written], before[~written])
            assert np.isfinite(after[written]).all()


@pytest.mark.parametrize("name", ["all", "a window", "a short window, an offset"])
def test_a_rows_bits_depend_on_its_tokens_alone(form: str, name: str) -> None:
    """Not on page numbers, other sequences, the width of the table or the rows of the same pass (but on XLA, whose
    products of different sizes may round differently)."""
    shape, rng = GPU_SHAPES[name], np.random.default_rng(1)
    sequences, width = Sequences(shape, rng), 6
    whole = steps(0, 0, rows=300)
    qkv, more = sequences.project(whole), sequences.project(steps(300, 300, rows=5))
    results = []
    for table_width, cuts in ((width, (300,)), (width + 3, (300,)), (width, (64, 130, 300))):
        table = shuffled_table(rng, 2, table_width, 2 * table_width + 1)
        pages, begin = empty(shape, 2 * table_width + 1), 0
        for end in cuts:
            _, pages = run(form, sequences, pages, table, whole[:, begin:end], qkv[:, begin:end])
            begin = end
        together, _ = run(form, sequences, pages, table, steps(300, 300, rows=5), more)
        beside_an_idle_one, _ = run(form, sequences, pages, table, steps(300, -1, rows=5), more)
        alone, _ = run(form, sequences, pages, table[:1], steps(300, rows=1), more[:1, :1])
        results += [together[0], beside_an_idle_one[0], np.concatenate([alone[0], together[0, 1:]])]
    for other in results[1:]:
        if form == "xla":
            assert_close(form, other, results[0], shape.dtype)
        else:
            np.testing.assert_array_equal(other.view(np.uint16), results[0].view(np.uint16))


def test_a_table_that_is_shorter_than_the_sequence_repeats_its_pages(form: str) -> None:
    """A window of 128 passes through four pages, whatever the length: as with a page for every 64 positions."""
    shape, rng = GPU_SHAPES["a window"], np.random.default_rng(2)
    sequences, tables = Sequences(shape, rng), [shuffled_table(rng, 1, width, 9) for width in (4, 8)]
    results: list[list[np.ndarray]] = [[], []]
    pools = [empty(shape, 9), empty(shape, 9)]
    for begin in range(0, 480, 60):
        positions = steps(begin, rows=60)
        qkv = sequences.project(positions)
        for number, table in enumerate(tables):
            out, pools[number] = run(form, sequences, pools[number], table, positions, qkv)
            results[number].append(out)
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours.view(np.uint16), theirs.view(np.uint16))


def test_a_row_that_writes_nothing_may_see(form: str) -> None:
    """The last token of a prompt whose pages are all known: its key is there, only its output is missing."""
    shape, rng = GPU_SHAPES["all"], np.random.default_rng(3)
    sequences, table = Sequences(shape, rng), np.array([[1, 0]], np.int32)
    positions = steps(0, rows=70)
    qkv = sequences.project(positions)
    out, pages = run(form, sequences, empty(shape, 3), table, positions, qkv)
    last = jax.tree.map(jnp.asarray, (qkv[:, -1:], *angles(positions[:, -1:], shape)))
    rows = PagedRows(
        *(jnp.asarray(part, jnp.int32) for part in (table, [[-1]], [[0]], [[69]])), span=2 * shape.page_size
    )
    again, kept = paged_attention(*last, pages, rows, shape.heads, jnp.asarray(sequences.sinks), implementation=form)  # type: ignore[arg-type]
    assert_close(form, np.asarray(again).ravel(), out[0, -1].ravel(), shape.dtype)
    for now, before in zip(jax.tree.leaves(kept), jax.tree.leaves(pages), strict=True):
        np.testing.assert_array_equal(np.asarray(now).view(np.uint16), np.asarray(before).view(np.uint16))


def test_rows_may_see_ahead(form: str) -> None:
    """A block whose rows see each other: first and last are data, not the order of rows."""
    shape, rng = GPU_SHAPES["all"], np.random.default_rng(4)
    sequences, table = Sequences(shape, rng), np.array([[2]], np.int32)
    positions = steps(0, rows=6)
    operands = jax.tree.map(jnp.asarray, (sequences.project(positions), *angles(positions, shape)))
    rows = causal_rows(jnp.asarray(table), jnp.asarray(positions), shape.page_size)
    block = rows.replace(last=jnp.full((1, 6), 5, jnp.int32))  # type: ignore[attr-defined]
    out, _ = paged_attention(*operands, empty(shape, 3), block, shape.heads, implementation=form)  # type: ignore[arg-type]
    qkv, cos, sin = (part[:, ::-1] for part in operands)
    turned = block.replace(write=block.write[:, ::-1])
    reversed_out, _ = paged_attention(qkv, cos, sin, empty(shape, 3), turned, shape.heads, implementation=form)  # type: ignore[arg-type]
    causal, _ = paged_attention(*operands, empty(shape, 3), rows, shape.heads, implementation=form)  # type: ignore[arg-type]
    ours, theirs, alone = (np.asarray(part, np.float32) for part in (out, reversed_out[:, ::-1], causal))
    assert_close(form, ours, theirs, shape.dtype)
    assert_close(form, ours[:, -1], alone[:, -1], shape.dtype)
    assert np.abs(ours[:, 0] - alone[:, 0]).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", ["xla", "native"])
def test_a_step_in_a_loop_copies_no_pool(form: str, dtype: type) -> None:
    """What a program takes beside its donated pool does not grow with it."""

    def steps_of(pages: Pages, qkv: jax.Array, table: jax.Array) -> tuple[Pages, jax.Array]:
        def body(step: jax.Array, carry: tuple[Pages, jax.Array]) -> tuple[Pages, jax.Array]:
            pages, total = carry
            positions = jnp.broadcast_to(step, (2, 1))
            angle = jnp.ones((2, 1, 32), qkv.dtype)
            rows = causal_rows(table, positions, PAGE_SIZE)
            out, pages = paged_attention(qkv, angle, angle, pages, rows, 4, implementation=form)  # type: ignore[arg-type]
            return pages, total + out

        return jax.lax.fori_loop(0, 10, body, (pages, jnp.zeros((2, 1, 256), qkv.dtype)))  # type: ignore[no-any-return]

    sizes = []
    for num_pages in (16, 1024):
        pages = jax.eval_shape(lambda count=num_pages: init_pages(count, PAGE_SIZE, 1, 64, dtype))
        qkv, table = jax.ShapeDtypeStruct((2, 1, 384), dtype), jax.ShapeDtypeStruct((2, 8), jnp.int32)
        compiled = jax.jit(steps_of, donate_argnums=0).lower(pages, qkv, table).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] - sizes[0] < 1024, sizes
    assert sizes[1] < 4 * MOST_PAGES * PAGE_SIZE * 2 * 64 * 4 * 4


@pytest.mark.parametrize(
    ("table", "last", "write"),
    [([[0, 7]], 70, -1), ([[0, -1]], 64, -1), ([[-1, 0]], 70, -1), ([[0, 1]], 70, 130), ([[9, 1]], -1, 0)],
    ids=["beyond the pool", "no page", "no first page", "a write beyond the pool", "a write to no page"],
)
def test_the_native_kernels_refuse_pages_that_are_not_in_the_pool(
    table: Sequence[Sequence[int]], last: int, write: int
) -> None:
    if not native.available():
        pytest.skip("the native kernels do not run here")
    if write == 130:
        table = [[0, 1, 5]]
    pages = init_pages(3, PAGE_SIZE, 1, 64, jnp.float32)
    rows = PagedRows(
        *(jnp.asarray(part, jnp.int32) for part in (table, [[write]], [[0]], [[last]])), span=2 * PAGE_SIZE
    )
    ones = jnp.ones((1, 1, 32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="sees or writes a page that is not in the pool"):
        jax.block_until_ready(
            paged_attention(jnp.ones((1, 1, 384)), ones, ones, pages, rows, 4, implementation="native")
        )
