"""Paged attention in XLA, and in the kernels for CPUs, GPUs and TPUs, against the definition in float64.

One suite for all forms (`form`, tests/ops/conftest.py). Pools begin full of NaN, so that a read of what a row does not
see shows.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from peagle.base.errors import InputError
from peagle.ops import cuda, native
from peagle.ops.attention import PAGE_SIZE, CacheGroup, PagedRows, Pages, causal_rows, init_pages, paged_attention
from peagle.ops.attention.paged import MOST_PAGES
from peagle.ops.kernels import Implementation
from tests.ops.conftest import FORMS

pytestmark = pytest.mark.compile

ROUNDED = 2.0**-8  # error of a result rounded to bfloat16 once


def assert_close(form: str, ours: np.ndarray, theirs: np.ndarray, dtype: type) -> None:
    """Allow for rounding: queries, keys and results; where XLA rotates, products within the rotation, weights, too."""
    error = 1e-5 if dtype == np.float32 else (16 if form in ("xla", "tpu") else 5) * ROUNDED
    ours, theirs = (np.asarray(part, np.float64) for part in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, atol=error, rtol=error / 2)


@dataclasses.dataclass(frozen=True)
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


# XLA compiles each shape for long, and of those for GPUs a window of many pages alone is new to it
IN_XLA = (*SHAPES, "a window")
BLOCKS_IN_XLA = ("pages of 5, heads of 24, a window, an offset", "all, float32")  # rows say what they see by data alone


def forms_of(shapes: dict[str, Shape]) -> list[tuple[str, str]]:
    """List (form, name of a shape) of each shape that tells more of the form."""
    taken = {"xla": IN_XLA, "cuda": tuple(GPU_SHAPES), "tpu": tuple(GPU_SHAPES)}
    return [(form, name) for form in FORMS for name in shapes if name in taken.get(form, shapes)]


def marked(*pairs: tuple[str, str]) -> list[ParameterSet]:
    """Mark what interpretation takes long for."""
    slow = [("tpu", name) for name in GPU_SHAPES if name != "a window"]
    return [pytest.param(*pair, marks=[pytest.mark.slow] if pair in slow else []) for pair in pairs]


def as_bits(values: np.ndarray) -> np.ndarray:
    """View as integers, which tell 0 from -0."""
    return values.view(np.uint32 if values.dtype == np.float32 else np.uint16)


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

    def attend(self, qkv: np.ndarray, positions: np.ndarray, until: np.ndarray | None = None) -> np.ndarray:
        """Write all rows, then attend, up to a row's own position or `until`; return [B, T, N, H].

        Rows that see nothing have zeros.
        """
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
            newest = int(positions[b, t] if until is None else until[b, t])
            if newest < 0:
                continue
            oldest = 0 if shape.window is None else max(0, int(positions[b, t]) - shape.window + 1)
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
    until: jax.Array | None = None,
    *,
    shape: Shape,
    form: str,
) -> tuple[jax.Array, Pages]:
    rows = causal_rows(table, positions, shape.page_size, shape.window, shape.offset, until)
    out, pages = paged_attention(qkv, cos, sin, pages, rows, shape.heads, sinks, implementation=form)  # type: ignore[arg-type]
    return out.reshape(*positions.shape, shape.heads, shape.head_dim), pages


def run(
    form: str,
    sequences: Sequences,
    pages: Pages,
    table: np.ndarray,
    positions: np.ndarray,
    qkv: np.ndarray,
    until: np.ndarray | None = None,
) -> tuple[np.ndarray, Pages]:
    shape = sequences.shape
    arrays = (qkv, *angles(positions, shape), pages, table, positions, sequences.sinks, until)
    operands = jax.tree.map(jnp.asarray, arrays)
    out, pages = attend(*operands, shape=shape, form=form)
    return np.asarray(out), pages


# with rows that the tests place themselves
attend_rows = jax.jit(paged_attention, static_argnames=("num_heads", "implementation"))


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


@functools.cache
def defined(name: str) -> list[tuple[Sequences, np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]]:
    """Compute passes by definition: [(sequences, table, [(positions, operands, results)])]; all forms share them."""
    shape, rng = (SHAPES | GPU_SHAPES)[name], np.random.default_rng(0)
    runs = []
    for passes in (PASSES, many_passes()) if shape.page_size == PAGE_SIZE else (PASSES,):
        longest = max(int(positions.max()) for positions in passes) + 1 + shape.offset
        width = -(-longest // shape.page_size)
        table = shuffled_table(rng, 3, width, 3 * width + 2)
        sequences = Sequences(shape, rng)
        operands = [(positions, sequences.project(positions)) for positions in passes]
        runs.append((sequences, table, [(*both, sequences.attend(both[1], both[0])) for both in operands]))
    return runs


@pytest.mark.parametrize(("form", "name"), marked(*forms_of(SHAPES | GPU_SHAPES)), indirect=["form"])
def test_it_is_the_definition(form: str, name: str) -> None:
    """Pages in no order; what a row does not see is NaN; what is not written keeps its bits."""
    shape = (SHAPES | GPU_SHAPES)[name]
    for sequences, table, passes in defined(name):
        pages = empty(shape, table.size + 2)
        for positions, qkv, expected in passes:
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


def block_passes(length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (positions, until) of a prompt that only writes, then of rows that only write, each before a block."""
    prompt = steps(0, 0, -1, rows=length)
    prompt[1, length - 3 :] = -1  # a shorter one
    yield prompt, np.full_like(prompt, -1)
    begin, num, width = np.array([length, length - 3, -1]), np.array([1, 3, 1]), np.array([3, 1, 3])
    for _ in range(3):
        # up to four new rows of the context, then a block of up to four rows that all see its last one
        row = np.arange(8)[None, :]
        block, position = row >= 4, begin[:, None] + np.where(row < 4, row, num[:, None] + row - 4)
        active = (begin[:, None] >= 0) & np.where(block, row - 4 <= width[:, None], row < num[:, None])
        until = np.where(active & block, (begin + num + width)[:, None], -1)
        yield np.where(active, position, -1).astype(np.int32), until.astype(np.int32)
        begin, num, width = np.where(begin < 0, begin, begin + num), np.roll(num, 1), np.roll(width, 1)


@pytest.mark.parametrize(
    ("form", "name"),
    marked(*(pair for pair in forms_of(SHAPES | GPU_SHAPES) if pair[0] != "xla" or pair[1] in BLOCKS_IN_XLA)),
    indirect=["form"],
)
def test_rows_of_a_block_see_each_other(form: str, name: str) -> None:
    """Beside rows that write and see nothing; what a later pass does not see again may be overwritten.

    The first blocks end within a page, across pages, and in a GPU's second chunk.
    """
    shape, rng = (SHAPES | GPU_SHAPES)[name], np.random.default_rng(3)
    for length in (11, 254) if shape.page_size == PAGE_SIZE else (11,):
        width = -(-(length + 24 + shape.offset) // shape.page_size)
        table = shuffled_table(rng, 3, width, 3 * width + 2)
        sequences, pages = Sequences(shape, rng), empty(shape, 3 * width + 2)
        for positions, until in block_passes(length):
            qkv = sequences.project(positions)
            expected = sequences.attend(qkv, positions, until)
            out, pages = run(form, sequences, pages, table, positions, qkv, until)
            sees = until >= 0
            assert np.isfinite(out.astype(np.float32)).all()
            assert_close(form, out[sees], expected[sees], shape.dtype)


# 300 positions, so that threads share one sequence, and the GPU's kernels take two chunks
BITS = {
    "all": Shape(4, 1, 64, PAGE_SIZE, None, dtype=ml_dtypes.bfloat16),
    "a window": GPU_SHAPES["a window"],
    "a short window, an offset": GPU_SHAPES["a short window, an offset"],
    "all, float32": SHAPES["all, float32"],
    "heads of 90, pages of 16": Shape(3, 1, 90, 16, None),
    "heads of 10, pages of 8, a long window": Shape(5, 1, 10, 8, 280, dtype=ml_dtypes.bfloat16),
}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] if pair[0] == "tpu" or pair == ("cuda", "a window") else [])
        for pair in forms_of(BITS)
        if pair[0] != "xla"  # whose products of different sizes may round differently
    ],
    indirect=["form"],
)
def test_a_rows_bits_depend_on_its_tokens_alone(form: str, name: str) -> None:
    """Not on page numbers, other sequences, the width of the table, other rows of the pass, or what it does not see."""
    shape, rng, length, most = BITS[name], np.random.default_rng(1), 300, 16
    sequences, needed = Sequences(shape, rng), -(-(length + most + 1) // shape.page_size)
    before, after = steps(0, 0, rows=length), steps(length, length, rows=most)
    prompt, qkv = sequences.project(before), sequences.project(after)
    kept: dict[int, tuple[Pages, np.ndarray]] = {}
    for batch, cut, width in ((2, length, needed), (1, 100, needed + 3)):
        table = shuffled_table(rng, batch, width, 2 * width + 1)
        pages = empty(shape, 2 * width + 1)
        for begin in range(0, length, cut):
            rows = np.s_[:batch, begin : begin + cut]
            _, pages = run(form, sequences, pages, table, before[rows], prompt[rows])
        kept[batch] = pages, table
    pages, table = kept[2]
    whole = run(form, sequences, pages, table, after, qkv)[0][0]

    def check(out: np.ndarray, expected: np.ndarray = whole) -> None:
        np.testing.assert_array_equal(as_bits(out), as_bits(expected))

    check(run(form, sequences, *kept[1], after[:1], qkv[:1])[0][0])
    idle = steps(length, *[-1] * 7, rows=most)
    check(run(form, sequences, pages, np.repeat(table[:1], 8, axis=0), idle, np.repeat(qkv[:1], 8, axis=0))[0][0])
    alone = functools.partial(run, form, sequences, table=table[:1])
    for rows in (2, 3, 5):
        check(alone(pages, positions=after[:1, :rows], qkv=qkv[:1, :rows])[0][0], whole[:rows])
    one_by_one = pages
    for row in range(most if form == "native" else 3):
        out, one_by_one = alone(one_by_one, positions=after[:1, row : row + 1], qkv=qkv[:1, row : row + 1])
        check(out[0], whole[row : row + 1])
    padded, order = np.full((1, most), -1, np.int32), [1, 2, 4, 5, 6, 9, 15]
    padded[0, order], mixed = after[0, : len(order)], sequences.project(after[:1])
    mixed[0, order] = qkv[0, : len(order)]
    check(alone(pages, positions=padded, qkv=mixed)[0][0][order], whole[: len(order)])
    visible = np.zeros(pages.key.shape[:2], bool)
    first = shape.offset if shape.window is None else length - shape.window + 1 + shape.offset
    index = np.arange(first, length + shape.offset)
    visible[table[0, index // shape.page_size], index % shape.page_size] = True
    unseen = jax.tree.map(lambda pool: jnp.where(visible[:, :, None], pool, jnp.nan).astype(pool.dtype), pages)
    check(alone(unseen, positions=after[:1], qkv=qkv[:1])[0][0])


def test_a_table_that_is_shorter_than_the_sequence_repeats_its_pages(form: str) -> None:
    """A window of 128 passes through four pages, whatever the length: as with a page for every 64 positions."""
    shape, rng = GPU_SHAPES["a window"], np.random.default_rng(2)
    widths = [CacheGroup(window, 0, (0,)).num_pages(360, 60) for window in (128, None)]
    assert widths == [4, 6]
    sequences, tables = Sequences(shape, rng), [shuffled_table(rng, 1, width, 9) for width in widths]
    results: list[list[np.ndarray]] = [[], []]
    pools = [empty(shape, 9), empty(shape, 9)]
    for begin in range(0, 360, 60):
        positions = steps(begin, rows=60)
        qkv = sequences.project(positions)
        for number, table in enumerate(tables):
            out, pools[number] = run(form, sequences, pools[number], table, positions, qkv)
            results[number].append(out)
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(as_bits(ours), as_bits(theirs))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 128])
@pytest.mark.parametrize("widest", [1, 6, 64])
def test_the_pages_of_a_window_suffice_for_every_pass(window: int, widest: int) -> None:
    """A pass is written before its first row attends; after a rollback to that row the next pass does the same."""
    for offset in (0, 1):
        group = CacheGroup(window, offset, (0,))
        pages = group.num_pages(10_000, widest)
        assert pages <= CacheGroup(None, offset, (0,)).num_pages(10_000, widest)
        for begin in range(500, 500 + 2 * PAGE_SIZE):
            used = {index // PAGE_SIZE for index in range(begin - window + 1 + offset, begin + widest + offset)}
            assert len({page % pages for page in used}) == len(used)


def test_sinks_far_from_all_scores(form: str) -> None:
    """Far below them a sink has no weight; far above, it takes all the weight."""
    shape, rng = GPU_SHAPES["all"], np.random.default_rng(5)
    sequences, table, positions = Sequences(shape, rng), np.array([[1, 0]], np.int32), steps(0, rows=70)
    qkv = sequences.project(positions)
    outs = []
    for sink in (None, -1e4, 1e4):
        sequences.sinks = None if sink is None else np.full(shape.heads, sink, np.float32)
        outs.append(run(form, sequences, empty(shape, 3), table, positions, qkv)[0])
    without, below, above = outs
    assert_close(form, below, without, shape.dtype)
    assert not above.any()


HALVES = Shape(2, 1, 64, PAGE_SIZE, None, dtype=ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("form", "shape", "longest", "rows", "batch"),
    [
        # six query heads per kv head: a chunk of the native kernels has seven rows here, not sixteen
        *((form, Shape(6, 1, 4, PAGE_SIZE, None, with_sinks=False), 6000, 17, 1) for form in FORMS[:-2]),
        ("cuda", HALVES, 9009, 9, 1),  # more chunks than splits; more than one tile of queries
        ("cuda", dataclasses.replace(HALVES, window=300), 9002, 2, 1),  # the window is far behind the first chunk
        # so many sequences that a block goes through two splits
        pytest.param("cuda", HALVES, 300, 1, 528, marks=pytest.mark.slow),
    ],
    indirect=["form"],
)
def test_long_contexts_are_the_definition(form: str, shape: Shape, longest: int, rows: int, batch: int) -> None:
    """And on native kernels a row has the bits it has alone."""
    rng, width = np.random.default_rng(11), -(-longest // PAGE_SIZE)
    table = shuffled_table(rng, batch, width, batch * width)
    pools = rng.standard_normal((2, batch * width, PAGE_SIZE, shape.head_dim), np.float32).astype(shape.dtype)
    sequences, pages = Sequences(shape, rng), Pages(*map(jnp.asarray, pools))
    ends = np.array([longest, *rng.integers(rows, longest, batch - 1)])
    for held, pool in zip((sequences.keys, sequences.values), pools.astype(np.float64), strict=True):
        held |= {
            (b, p): pool[table[b, p // PAGE_SIZE], p % PAGE_SIZE, None] for b in range(batch) for p in range(ends[b])
        }
    positions = steps(*(ends - rows).tolist(), rows=rows)
    qkv = sequences.project(positions)
    out, after = run(form, sequences, pages, table, positions, qkv)
    assert_close(form, out, sequences.attend(qkv, positions), shape.dtype)
    for row in range(rows if form == "native" else 0):
        alone, _ = run(form, sequences, after, table, positions[:, row : row + 1], qkv[:, row : row + 1])
        np.testing.assert_array_equal(as_bits(alone[:, 0]), as_bits(out[:, row]))


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
    again, kept = attend_rows(*last, pages, rows, shape.heads, jnp.asarray(sequences.sinks), implementation=form)
    assert_close(form, np.asarray(again).ravel(), out[0, -1].ravel(), shape.dtype)
    for now, before in zip(jax.tree.leaves(kept), jax.tree.leaves(pages), strict=True):
        np.testing.assert_array_equal(as_bits(np.asarray(now)), as_bits(np.asarray(before)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", ["xla", "native"])
def test_a_step_in_a_loop_copies_no_pool(form: str, dtype: type) -> None:
    """What a program takes beside its donated pool does not grow with it."""
    if form == "native" and not native.available():
        pytest.skip("the native kernels do not run here")

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


@pytest.mark.parametrize(("width", "num_pages"), [(2048, 32), (128, 512)])
def test_scores_of_a_long_prompt_are_never_in_memory_at_once(width: int, num_pages: int) -> None:
    """Neither those of a long chunk, nor those of a chunk at far positions."""
    shape = Shape(6, 2, 4, PAGE_SIZE, None)
    pages = jax.eval_shape(lambda: init_pages(num_pages, PAGE_SIZE, 2, 4, jnp.float32))
    floats = (jax.ShapeDtypeStruct((1, width, part), jnp.float32) for part in (shape.width, 2, 2))
    table, positions = (jax.ShapeDtypeStruct((1, count), jnp.int32) for count in (num_pages, width))
    sinks = jax.ShapeDtypeStruct((6,), jnp.float32)
    compiled = attend.lower(*floats, pages, table, positions, sinks, shape=shape, form="xla").compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * width * num_pages * PAGE_SIZE * 4 / 4


def test_a_pool_is_of_two_buffers() -> None:
    """A donated buffer may appear only once."""
    pages = init_pages(2, PAGE_SIZE, 1, 4, jnp.bfloat16)
    assert pages.key.unsafe_buffer_pointer() != pages.value.unsafe_buffer_pointer()


@pytest.mark.parametrize("form", ["cuda"], indirect=True)
def test_the_cuda_kernels_refuse_shapes_that_do_not_fit(form: str) -> None:
    shape, rng = GPU_SHAPES["all"], np.random.default_rng(6)
    sequences = Sequences(shape, rng)
    sequences.sinks = np.zeros(3, np.float32)
    positions = steps(0, rows=2)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"sinks \[3\] is not BF16 \[N\]"):
        run(form, sequences, empty(shape, 1), np.zeros((1, 1), np.int32), positions, sequences.project(positions))


@pytest.mark.parametrize(
    ("dtype", "page_size", "implementation", "runs"),
    [
        (jnp.bfloat16, PAGE_SIZE, None, True),
        (jnp.bfloat16, PAGE_SIZE, "xla", False),
        (jnp.float32, PAGE_SIZE, None, False),
        (jnp.bfloat16, 32, None, False),
    ],
)
def test_implementation_chosen_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: type, page_size: int, implementation: Implementation | None, runs: bool
) -> None:
    """The kernels if they take the operands, XLA's code otherwise. By name they run, or it is an error."""
    monkeypatch.setattr(cuda, "status", lambda: (True, "CUDA"))
    pages = jax.eval_shape(lambda: init_pages(3, page_size, 2, 64, dtype))
    qkv, cos, sin = (jax.ShapeDtypeStruct((1, 17, width), dtype) for width in (512, 32, 32))
    table, positions = (jax.ShapeDtypeStruct((1, width), jnp.int32) for width in (2, 17))

    def lowered(implementation: Implementation | None, platform: str) -> str:
        def one(qkv: jax.Array, cos: jax.Array, sin: jax.Array, pages: Pages, *where: jax.Array) -> jax.Array:
            rows = causal_rows(*where, page_size)
            return paged_attention(qkv, cos, sin, pages, rows, 4, implementation=implementation)[0]

        traced = jax.jit(one).trace(qkv, cos, sin, pages, table, positions)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert ("peagle_cuda_paged_attention" in lowered(implementation, "cuda")) == runs
    assert "peagle_cuda_paged_attention" not in lowered(implementation, "cpu")
    if runs:
        assert "peagle_cuda_paged_attention" in lowered("cuda", "cuda")
    elif implementation is None:
        with pytest.raises(InputError, match="expected bfloat16, heads of 64 and pages of 64"):
            lowered("cuda", "cuda")
