"""The native attention against a float64 loop over every position: full caches, rings, windows.

And a query's bits are a function of its position and of the keys and values it attends to."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops import native
from peagle.ops.attention import decode_attention
from peagle.ops.kernels import Implementation
from peagle.ops.kv_cache import KVCache
from tests.ops.native.cases import EXACT, ROUNDED, assert_same_bits, each, one_set

pytestmark = pytest.mark.usefixtures("kernels")
NO_MATRICES = True

BATCH = 3
EXPECTED_ERROR = {np.float32: EXACT, ml_dtypes.bfloat16: 5 * ROUNDED}  # queries, keys and results are rounded


@dataclasses.dataclass(frozen=True)
class Heads:
    queries: int  # N
    kv: int  # G
    dim: int  # H

    @property
    def width(self) -> int:
        """The width of queries, keys and values side by side."""
        return (self.queries + 2 * self.kv) * self.dim


# 64 and more go by blocks of 64, whole sixteens, and the rest
HEADS = [Heads(6, 2, 64), Heads(5, 1, 10), Heads(4, 4, 24), Heads(2, 1, 90)]
# (capacity, ring, window): the widest pass through the ring is 9 rows
CACHES = {
    "full": (61, False, None),
    "full, window": (61, False, 11),
    "full, window of one": (61, False, 1),
    "ring": (19, True, 11),
    "ring of its window": (7, True, 7),
}
# (first position of each sequence, rows) pass by pass: what was not accepted is written over; -1: inactive
PASSES = {
    "full": [(0, 0, 0, 17), (3, 17, 11, 1), (4, 18, 12, 16), (20, 19, 13, 9), (29, -1, 22, 3), (30, 20, -1, 17)],
    "ring": [
        *((0, 0, 0, 9), (9, 5, 7, 4), (10, 9, -1, 9), (15, 18, 8, 9)),
        *((24, 24, 17, 1), (25, -1, 18, 8), (33, 25, 26, 9)),
    ],
    "ring of its window": [(0, 0, 0, 1), *((start, start - 1, max(start - 2, 0), 1) for start in range(1, 30))],
}


def random_projections(
    rng: np.random.Generator, heads: Heads, rows: int, dtype: type, batch: int = BATCH
) -> np.ndarray:
    return (1.5 * rng.standard_normal((batch, rows, heads.width))).astype(dtype)


def angles(positions: np.ndarray, heads: Heads, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Draw (cos, sin) [B, T, H/2], scaled so that they are no mere rotations."""
    turn = positions[:, :, None] * 10.0 ** -np.linspace(0, 2, heads.dim // 2)
    return (1.1 * np.cos(turn)).astype(dtype), (1.1 * np.sin(turn)).astype(dtype)


def steps(*firsts: int, rows: int) -> np.ndarray:
    """Return positions [B, T] from each sequence's first one on; all -1 if that is negative."""
    return np.array([[-1] * rows if first < 0 else range(first, first + rows) for first in firsts], np.int32)


class Memory:
    """All keys and values by (sequence, position), rotated in float64, rounded to the cache's dtype."""

    def __init__(self, heads: Heads, window: int | None, sinks: np.ndarray | None, dtype: type) -> None:
        self.heads, self.window, self.sinks, self.dtype = heads, window, sinks, dtype
        self.keys: dict[tuple[int, int], np.ndarray] = {}
        self.values: dict[tuple[int, int], np.ndarray] = {}

    def rounded(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self.dtype).astype(np.float64)

    def rotated(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, axis=-1)
        return self.rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))

    def attend(self, b: int, position: int, query: np.ndarray) -> np.ndarray:
        """Compute the output [N H] of one query [N, H] at a position, head by head."""
        oldest = 0 if self.window is None else max(0, position - self.window + 1)
        seen = [(b, p) for p in range(oldest, position + 1) if (b, p) in self.keys]
        out = np.zeros((self.heads.queries, self.heads.dim))
        for n in range(self.heads.queries):
            group = n // (self.heads.queries // self.heads.kv)
            scores = np.array([self.keys[at][group] @ query[n] for at in seen]) / np.sqrt(self.heads.dim)
            sink = [] if self.sinks is None else [np.float64(self.sinks[n])]
            peak = max([*scores, *sink])
            weights = np.exp(scores - peak)
            total = weights.sum() + sum(np.exp(one - peak) for one in sink)
            out[n] = sum(w * self.values[at][group] for w, at in zip(weights, seen, strict=True)) / total
        return out.ravel()

    def decode(self, qkv: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Write all rows, then attend; return [B, T, N H], zeros at negative positions."""
        h = self.heads
        rows = qkv.astype(np.float64).reshape(*positions.shape, -1, h.dim)
        turns = [part.astype(np.float64)[:, :, None] for part in (cos, sin)]
        query = self.rotated(rows[:, :, : h.queries], *turns)
        key = self.rotated(rows[:, :, h.queries : h.queries + h.kv], *turns)
        for b, t in np.argwhere(positions >= 0).tolist():
            self.keys[b, positions[b, t]], self.values[b, positions[b, t]] = key[b, t], rows[b, t, h.queries + h.kv :]
        out = np.zeros((*positions.shape, h.queries * h.dim))
        for b, t in np.argwhere(positions >= 0).tolist():
            out[b, t] = self.attend(b, positions[b, t], query[b, t])
        return out


def empty_cache(heads: Heads, capacity: int, ring: bool, dtype: type, fill: float = np.nan) -> KVCache:
    """Make a cache full of NaN, so that a read of an unwritten slot shows."""
    values = jnp.asarray(np.full((BATCH, capacity, heads.kv, heads.dim), fill, dtype))
    return KVCache(values, values, ring)


def decode(
    qkv: np.ndarray,
    cache: KVCache,
    positions: np.ndarray,
    heads: Heads,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    form: Implementation = "native",
) -> tuple[jax.Array, KVCache]:
    """Run one pass."""
    outs, cache = decode_all([(qkv, positions)], cache, heads, window, sinks, form)
    return outs[0], cache


def decode_all(
    passes: Sequence[tuple[np.ndarray, np.ndarray]],
    cache: KVCache,
    heads: Heads,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    form: Implementation = "native",
) -> tuple[list[jax.Array], KVCache]:
    """Run several passes (projections, positions) one after the other."""
    outs, caches = one_after_the_other(passes, cache, heads, window, sinks, form)
    return outs, caches[-1]


def one_after_the_other(
    passes: Sequence[tuple[np.ndarray, np.ndarray]],
    cache: KVCache,
    heads: Heads,
    window: int | None = None,
    sinks: np.ndarray | None = None,
    form: Implementation = "native",
    restart: bool = False,
) -> tuple[list[jax.Array], list[KVCache]]:
    """Run passes in one compiled program; return results and caches. restart: all begin with the given cache."""
    given = [(qkv, *angles(positions, heads, qkv.dtype.type), positions) for qkv, positions in passes]
    operands = jax.tree.map(jnp.asarray, (given, sinks))
    return _one_after_the_other(*operands, cache, heads.queries, window, form, restart)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))  # once for all instruction sets
def _one_after_the_other(
    given: list[tuple[jax.Array, ...]],
    sinks: jax.Array | None,
    cache: KVCache,
    queries: int,
    window: int | None,
    form: Implementation,
    restart: bool,
) -> tuple[list[jax.Array], list[KVCache]]:
    outs, caches = [], [cache]
    for qkv, cos, sin, at in given:
        before = caches[0 if restart else -1]
        out, after = decode_attention(qkv, cos, sin, before, at, queries, window, sinks, implementation=form)
        outs.append(out)
        caches.append(after)
    return outs, caches[1:]


def random_passes(
    rng: np.random.Generator, heads: Heads, kind: str, dtype: type
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw (projections, positions) of each pass."""
    passes = PASSES.get(kind, PASSES["full"])
    return [(random_projections(rng, heads, rows, dtype), steps(*firsts, rows=rows)) for *firsts, rows in passes]


def random_sinks(rng: np.random.Generator, heads: Heads) -> np.ndarray:
    return 2 * rng.standard_normal(heads.queries, np.float32)


VALUES = [(np.float32, False), (np.float32, True), (ml_dtypes.bfloat16, True)]  # dtype, with sinks


@functools.cache
def defined(
    heads: Heads, kind: str, dtype: type, with_sinks: bool
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray | None, list[np.ndarray], Memory]:
    """Make (passes, sinks, each one's result by definition, the positions held then), the same for all sets."""
    rng = np.random.default_rng(0)
    sinks = random_sinks(rng, heads) if with_sinks else None
    memory, passes = Memory(heads, CACHES[kind][2], sinks, dtype), random_passes(rng, heads, kind, dtype)
    outs = [memory.decode(qkv, *angles(positions, heads, dtype), positions) for qkv, positions in passes]
    return passes, sinks, outs, memory


@pytest.mark.parametrize(
    ("heads", "kind", "dtype", "with_sinks"),
    # every pair of values occurs
    [(heads, kind, *VALUES[(i + j) % len(VALUES)]) for i, heads in enumerate(HEADS) for j, kind in enumerate(CACHES)],
    ids=lambda part: f"{part.dim}" if isinstance(part, Heads) else None,
)
def test_decoding_is_the_definition(heads: Heads, kind: str, dtype: type, with_sinks: bool) -> None:
    """Sequences of different lengths, rolled back, some of them inactive; a ring that wraps several times."""
    capacity, ring, window = CACHES[kind]
    passes, sinks, expected, memory = defined(heads, kind, dtype, with_sinks)
    outs, cache = decode_all(passes, empty_cache(heads, capacity, ring, dtype), heads, window, sinks)
    for (_, positions), out, by_definition in zip(passes, outs, expected, strict=True):
        assert out.dtype == dtype
        values = np.asarray(out, np.float64)
        assert np.isfinite(values).all()
        what = f"from {positions[:, 0]}"
        np.testing.assert_allclose(values, by_definition, atol=EXPECTED_ERROR[dtype], err_msg=what)
    if ring:
        assert positions.max() >= 2 * capacity
    for ours, theirs in ((cache.key, memory.keys), (cache.value, memory.values)):
        held = np.asarray(ours, np.float64)
        for b, t in np.argwhere(positions >= 0).tolist():
            p = positions[b, t]
            np.testing.assert_allclose(held[b, p % capacity], theirs[b, p], atol=EXPECTED_ERROR[dtype])


@pytest.mark.parametrize("kind", ["full", "ring"])
def test_decoding_agrees_with_xla(kind: str) -> None:
    heads, (capacity, ring, window) = HEADS[0], CACHES[kind]
    sinks, passes = random_sinks(np.random.default_rng(1), heads), some_passes(kind)
    ours, cache = decode_all(passes, empty_cache(heads, capacity, ring, np.float32), heads, window, sinks)
    theirs, other = xla_decoding(kind)
    for (_, positions), out, expected in zip(passes, ours, theirs, strict=True):
        seen = positions >= 0
        np.testing.assert_allclose(np.asarray(out)[seen], np.asarray(expected)[seen], atol=EXACT)
    for held, expected in zip(parts(cache), parts(other), strict=True):
        written = ~np.isnan(held)
        assert (written | (expected == 0)).all()
        np.testing.assert_allclose(held[written], expected[written], atol=EXACT)


def some_passes(kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
    return random_passes(np.random.default_rng(1), HEADS[0], kind, np.float32)[:3]


@functools.cache
def xla_decoding(kind: str) -> tuple[list[jax.Array], KVCache]:
    """Compute the expected results once for all instruction sets."""
    heads, (capacity, ring, window) = HEADS[0], CACHES[kind]
    empty, sinks = (
        empty_cache(heads, capacity, ring, np.float32, fill=0.0),
        random_sinks(np.random.default_rng(1), heads),
    )
    return decode_all(some_passes(kind), empty, heads, window, sinks, form="xla")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["full", "ring"])
def test_rows_of_negative_position_write_nothing(kind: str, dtype: type) -> None:
    heads, rng = HEADS[1], np.random.default_rng(2)
    capacity, ring, window = CACHES[kind]
    shape = (BATCH, capacity, heads.kv, heads.dim)
    cache = KVCache(*(jnp.asarray(part.astype(dtype)) for part in rng.standard_normal((2, *shape))), ring)
    for positions in (steps(-1, -1, -1, rows=4), np.array([[-1, -1], [0, 1], [-1, 0]], np.int32)):
        out, after = decode(random_projections(rng, heads, positions.shape[1], dtype), cache, positions, heads, window)
        assert np.isfinite(np.asarray(out, np.float32)).all()
        touched = np.zeros((BATCH, capacity), bool)
        touched[np.argwhere(positions >= 0)[:, 0], positions[positions >= 0]] = True
        for now, before in ((after.key, cache.key), (after.value, cache.value)):
            assert_same_bits(np.asarray(now)[~touched], np.asarray(before)[~touched])
            assert (np.asarray(now)[touched] != np.asarray(before)[touched]).all()


# rows of negative position behind the others, as a drafter's padding stands, in their midst, before them, and alone
PADDED = (
    [[27, 28, 29, 30, -1, -1, -1], [24, -1, 25, -1, -1, 26, -1], [-1] * 7],
    [[-1, -1, 31, 32], [-1] * 4, [27, -1, -1, 28]],
)


def padded_passes(heads: Heads) -> list[tuple[np.ndarray, np.ndarray]]:
    """Run 27 positions of each sequence, more than a ring holds, then the passes with padding."""
    rng = np.random.default_rng(14)
    passes = [steps(first, first, first, rows=9) for first in (0, 9, 18)] + [np.array(at, np.int32) for at in PADDED]
    return [(random_projections(rng, heads, at.shape[1], np.float32), at) for at in passes]


def assert_padding_is_nothing(kind: str, form: Implementation) -> None:
    heads, (capacity, ring, window) = HEADS[0], CACHES[kind]
    sinks, passes = random_sinks(np.random.default_rng(15), heads), padded_passes(heads)
    empty = empty_cache(heads, capacity, ring, np.float32, fill=np.nan if form == "native" else 0.0)
    outs, caches = one_after_the_other(passes, empty, heads, window, sinks, form)
    memory = Memory(heads, window, sinks, np.float32)
    for (qkv, positions), out, before, after in zip(passes, outs, [empty, *caches], caches, strict=False):
        expected = memory.decode(qkv, *angles(positions, heads, np.float32), positions)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(np.asarray(out)[positions >= 0], expected[positions >= 0], atol=EXACT)
        touched = np.zeros((BATCH, capacity), bool)
        touched[np.nonzero(positions >= 0)[0], positions[positions >= 0] % capacity] = True
        for now, then in zip(parts(after), parts(before), strict=True):
            assert_same_bits(now[~touched], then[~touched])


@pytest.mark.parametrize("kind", ["full", "full, window", "ring"])
def test_the_newest_position_of_a_pass_is_the_largest(kind: str) -> None:
    assert_padding_is_nothing(kind, "native")


@one_set  # XLA does not depend on the set
@pytest.mark.parametrize("kind", ["full", "full, window", "ring"])
def test_the_newest_position_is_the_largest_on_xla_too(kind: str) -> None:
    assert_padding_is_nothing(kind, "xla")


@pytest.mark.parametrize("window", [None, 5, 2])
def test_positions_beyond_a_full_cache_are_dropped(window: int | None) -> None:
    """A query there attends to those of its positions that the cache holds; if there are none, its result is finite."""
    heads, rng = HEADS[1], np.random.default_rng(3)
    memory = Memory(heads, window, None, np.float32)
    cache = empty_cache(heads, 12, False, np.float32)
    for first, rows in ((0, 9), (9, 5)):
        positions = steps(first, first - first // 9, first, rows=rows)
        qkv = random_projections(rng, heads, rows, np.float32)
        out, cache = decode(qkv, cache, positions, heads, window)
        memory.decode(np.where(positions[:, :, None] < 12, qkv, 0), *angles(positions, heads, np.float32), positions)
        for at in [at for at in memory.keys if at[1] >= 12]:
            del memory.keys[at]
        query = qkv.astype(np.float64).reshape(*positions.shape, -1, heads.dim)[:, :, : heads.queries]
        turns = [part.astype(np.float64)[:, :, None] for part in angles(positions, heads, np.float32)]
        query = memory.rotated(query, *turns)
        for b, t in np.ndindex(*positions.shape):
            if window is None or positions[b, t] - window + 1 < 12:
                expected = memory.attend(b, positions[b, t], query[b, t])
                np.testing.assert_allclose(out[b, t], expected, atol=EXACT, err_msg=f"position {positions[b, t]}")
        assert np.isfinite(out).all()
    for ours, theirs in ((cache.key, memory.keys), (cache.value, memory.values)):
        np.testing.assert_allclose(ours, [[theirs[b, p] for p in range(12)] for b in range(BATCH)], atol=EXACT)


@pytest.mark.parametrize("sink", [-1e4, 80.0])
def test_extreme_sinks_stay_finite(sink: float) -> None:
    """Far below all scores a sink has no weight; far above, it takes all the weight."""
    heads, rng = HEADS[0], np.random.default_rng(4)
    qkv = random_projections(rng, heads, 5, np.float32)
    positions = steps(0, 0, 0, rows=5)
    sinks = np.full(heads.queries, sink, np.float32)
    cache = empty_cache(heads, 8, False, np.float32)
    out, _ = decode(qkv, cache, positions, heads, None, sinks)
    without, _ = decode(qkv, cache, positions, heads)
    np.testing.assert_allclose(out, np.asarray(without) if sink < 0 else np.zeros_like(out), atol=EXACT)


def test_large_scores_stay_finite() -> None:
    heads, rng = HEADS[1], np.random.default_rng(5)
    qkv = random_projections(rng, heads, 17, np.float32) * np.float32(1e3)
    positions = steps(0, 0, 0, rows=17)
    memory = Memory(heads, None, None, np.float32)
    out, _ = decode(qkv, empty_cache(heads, 17, False, np.float32), positions, heads)
    expected = memory.decode(qkv, *angles(positions, heads, np.float32), positions)
    np.testing.assert_allclose(out, expected, atol=1e4 * EXACT)


# a whole prompt in one pass


@functools.cache
def prompts(
    heads: Heads, window: int | None, dtype: type, with_sinks: bool
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray | None, list[np.ndarray]]:
    """Make ([(projections, positions)], sinks, each one's result by definition)."""
    rng = np.random.default_rng(6)
    sinks = random_sinks(rng, heads) if with_sinks else None
    given, outs = [], []
    for rows in (1, 2, 16, 17, 41):
        qkv, positions = random_projections(rng, heads, rows, dtype), steps(0, 0, 0, rows=rows)
        given.append((qkv, positions))
        outs.append(Memory(heads, window, sinks, dtype).decode(qkv, *angles(positions, heads, dtype), positions))
    return given, sinks, outs


@pytest.mark.parametrize(
    ("heads", "window", "dtype", "with_sinks"),
    # every pair of values occurs
    [(heads, (None, 11)[(i + j) % 2], *values) for i, heads in enumerate(HEADS) for j, values in enumerate(VALUES)],
    ids=lambda part: f"{part.dim}" if isinstance(part, Heads) else None,
)
def test_a_prompt_in_one_pass_is_the_definition(
    heads: Heads, window: int | None, dtype: type, with_sinks: bool
) -> None:
    """Into a cache that it fills, and one with room to spare."""
    given, sinks, expected = prompts(heads, window, dtype, with_sinks)
    for capacity in (41, 50):
        empty = empty_cache(heads, capacity, False, dtype)
        outs, _ = one_after_the_other(given, empty, heads, window, sinks, restart=True)
        for by_definition, out in zip(expected, outs, strict=True):
            assert out.dtype == dtype
            np.testing.assert_allclose(np.asarray(out, np.float64), by_definition, atol=EXPECTED_ERROR[dtype])


def test_rows_of_negative_position_among_them_change_no_bits() -> None:
    heads, rng = HEADS[1], np.random.default_rng(7)
    full, qkv = steps(0, 0, 0, rows=4), random_projections(rng, heads, 4, np.float32)
    positions = np.array([[0, 1, 2, 3], [0, 1, -1, -1], [-1, -1, -1, -1]], np.int32)
    empty = empty_cache(heads, 4, False, np.float32)
    (out, whole), (after, _) = one_after_the_other([(qkv, positions), (qkv, full)], empty, heads, restart=True)
    assert np.isfinite(out).all()
    assert_same_bits(np.asarray(out)[positions >= 0], np.asarray(whole)[positions >= 0])
    for part in parts(after):
        assert (np.isnan(part) == (positions < 0)[:, :, None, None]).all()


# a query's bits are a function of its position and of what it sees

WIDEST = 16
CONTEXTS = {"full": (61, False, None), "full, window": (61, False, 11), "ring": (11 + WIDEST - 1, True, 11)}
BIT_CASES = [(HEADS[0], np.float32), (HEADS[1], ml_dtypes.bfloat16), (HEADS[3], np.float32)]


def filled(heads: Heads, kind: str, length: int, dtype: type, rng: np.random.Generator) -> tuple[KVCache, np.ndarray]:
    """Make (a cache with `length` positions of each sequence, rows for the next ones)."""
    capacity, ring, window = CONTEXTS[kind]
    firsts = range(0, length, 6)
    passes = [(random_projections(rng, heads, 6, dtype), steps(first, first, first, rows=6)) for first in firsts]
    _, cache = decode_all(passes, empty_cache(heads, capacity, ring, dtype), heads, window)
    return cache, random_projections(rng, heads, WIDEST, dtype)


def parts(cache: KVCache) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(cache.key), np.asarray(cache.value)


@pytest.mark.parametrize(("kind", "length"), [("full", 18), ("full, window", 30), ("ring", 18), ("ring", 30)])
@pytest.mark.parametrize(("heads", "dtype"), BIT_CASES, ids=lambda case: getattr(case, "dim", ""))
def test_several_rows_are_the_same_rows_one_at_a_time(heads: Heads, dtype: type, kind: str, length: int) -> None:
    """Results and caches, bit for bit; the ring of 26 wraps meanwhile."""
    rng = np.random.default_rng(8)
    window, sinks = CONTEXTS[kind][2], random_sinks(rng, heads)
    before, qkv = filled(heads, kind, length, dtype, rng)
    positions = steps(length, length, length, rows=WIDEST)
    one_by_one = [(qkv[:, t : t + 1], positions[:, t : t + 1]) for t in range(WIDEST)]
    several = [(qkv[:, :rows], positions[:, :rows]) for rows in range(1, WIDEST + 1)]
    alone, caches = one_after_the_other(one_by_one, before, heads, window, sinks)
    outs, afters = one_after_the_other(several, before, heads, window, sinks, restart=True)
    for rows, (out, after, cache) in enumerate(zip(outs, afters, caches, strict=True), start=1):
        assert_same_bits(out, np.concatenate(alone[:rows], axis=1), f"{rows} rows")
        for ours, theirs in zip(parts(after), parts(cache), strict=True):
            assert_same_bits(ours, theirs, f"{rows} rows")


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize(("heads", "dtype"), BIT_CASES, ids=lambda case: getattr(case, "dim", ""))
def test_a_sequences_bits_do_not_depend_on_its_batch(heads: Heads, dtype: type, kind: str) -> None:
    rng = np.random.default_rng(9)
    window, sinks = CONTEXTS[kind][2], random_sinks(rng, heads)
    before, qkv = filled(heads, kind, 24, dtype, rng)
    key, value = parts(before)

    def run(key: jax.Array, value: jax.Array, *rest: jax.Array) -> tuple[jax.Array, KVCache]:
        *rows, at = rest
        cache, logits = KVCache(key, value, before.ring), jnp.asarray(sinks)
        return decode_attention(*rows, cache, at, heads.queries, window, logits, implementation="native")

    calls = []
    for rows in (1, 5, WIDEST):
        positions = steps(24, 9, 17, rows=rows)
        operands = (key, value, qkv[:, :rows], *angles(positions, heads, dtype), positions)
        calls += [operands, *(tuple(part[b : b + 1] for part in operands) for b in range(BATCH))]
    outs = jax.tree.map(np.asarray, each(run, calls))
    for first in range(0, len(outs), 1 + BATCH):
        (out, after), *single = outs[first : first + 1 + BATCH]
        for b, (own_out, own_after) in enumerate(single):
            assert_same_bits(own_out, out[b : b + 1])
            for ours, theirs in zip(parts(own_after), parts(after), strict=True):
                assert_same_bits(ours, theirs[b : b + 1])


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize(("heads", "dtype"), BIT_CASES, ids=lambda case: getattr(case, "dim", ""))
def test_other_slots_do_not_affect_a_query(heads: Heads, dtype: type, window: int | None) -> None:
    """Neither the number of rows, nor the capacity, nor NaN at later positions and before its window."""
    rng = np.random.default_rng(10)
    qkv, positions = random_projections(rng, heads, 41, dtype), steps(0, 0, 0, rows=41)
    whole, written = decode(qkv, empty_cache(heads, 41, False, dtype), positions, heads, window)
    whole, written = np.asarray(whole), np.stack(parts(written))
    counts = (41, 1, 2, 3, 15, 16, 17, 33)
    several = [(qkv[:, :rows], positions[:, :rows]) for rows in counts]
    outs, _ = one_after_the_other(several, empty_cache(heads, 50, False, dtype), heads, window, restart=True)
    for rows, out in zip(counts, outs, strict=True):
        assert_same_bits(out, whole[:, :rows], f"{rows} rows")

    def attend_one(qkv: jax.Array, cos: jax.Array, sin: jax.Array, at: jax.Array, *held: jax.Array) -> jax.Array:
        return decode_attention(qkv, cos, sin, KVCache(*held), at, heads.queries, window, implementation="native")[0]

    places, calls = (0, 7, 15, 16, 31, 40), []
    for row in places:
        oldest, alone = 0 if window is None else max(0, row - window + 1), slice(row, row + 1)
        held = np.full((2, BATCH, 50, heads.kv, heads.dim), np.nan, dtype)
        held[:, :, oldest:row] = written[:, :, oldest:row]  # it writes its own
        turns = angles(positions[:, alone], heads, dtype)
        calls.append((qkv[:, alone], *turns, positions[:, alone], *held))
    for row, out in zip(places, each(attend_one, calls), strict=True):
        assert_same_bits(out, whole[:, row : row + 1], f"row {row}")


def test_long_contexts_take_fewer_rows_together_and_give_the_same_bits() -> None:
    """At 6000 positions and six query heads per kv head, a chunk has seven rows, not sixteen."""
    heads, rng = Heads(6, 1, 4), np.random.default_rng(11)
    cache = KVCache(*(jnp.asarray(part, jnp.float32) for part in rng.standard_normal((2, 1, 6000, 1, 4))))
    qkv = random_projections(rng, heads, 17, np.float32, batch=1)
    positions = steps(5983, rows=17)
    out, after = decode(qkv, cache, positions, heads)
    one_by_one = [(qkv[:, t : t + 1], positions[:, t : t + 1]) for t in range(17)]
    alone, _ = decode_all(one_by_one, after, heads)
    assert_same_bits(out, np.concatenate(alone, axis=1))
    key, value = (part[0, :, 0].astype(np.float64) for part in parts(after))
    turns = [part[0, :, None].astype(np.float64) for part in angles(positions, heads, np.float32)]
    queries = qkv[0].reshape(17, -1, heads.dim)[:, : heads.queries].astype(np.float64)
    query = Memory(heads, None, None, np.float32).rotated(queries, *turns)
    for t, seen in enumerate(positions[0] + 1):
        weights = np.exp(query[t] @ key[:seen].T / 2)
        expected = weights @ value[:seen] / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(np.asarray(out)[0, t], expected.ravel(), atol=EXACT)


# What does not fit is refused

REFUSED = Heads(6, 2, 10)


def good_decode() -> dict[str, jax.Array]:
    """Make operands by name, in order: two rows at capacity 8."""
    rng = np.random.default_rng(12)
    qkv, positions = random_projections(rng, REFUSED, 2, np.float32), steps(3, 1, 0, rows=2)
    cos, sin = angles(positions, REFUSED, np.float32)
    cache = empty_cache(REFUSED, 8, False, np.float32, fill=0.5)
    return {
        "qkv": jnp.asarray(qkv),
        "cos": jnp.asarray(cos),
        "sin": jnp.asarray(sin),
        "key": cache.key,
        "value": cache.value,
        "positions": jnp.asarray(positions),
        "sinks": jnp.asarray(random_sinks(rng, REFUSED)),
    }


def call_decode(
    operands: dict[str, jax.Array],
    out: tuple[int, ...] = (BATCH, 2, 60),
    dtype: type = np.float32,
    window: int = 0,
    ring: bool = False,
    in_place: bool = True,
) -> list[jax.Array]:
    caches = [jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype) for name in ("key", "value")]
    results = native.call(
        "decode_attention",
        (jax.ShapeDtypeStruct(out, dtype), *caches),
        *operands.values(),
        in_place={3: 1, 4: 2} if in_place else None,
        window=np.int64(window),
        ring=np.bool_(ring),
    )
    return [result.block_until_ready() for result in results]


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@one_set
@pytest.mark.parametrize(
    "replaced",
    [
        {"key": zeros(BATCH, 7, 2, 10)},
        {"key": zeros(BATCH, 8, 2, 10, dtype=ml_dtypes.bfloat16)},
        {"value": zeros(BATCH, 8, 1, 10)},
        {"value": zeros(BATCH, 8, 2, 10, dtype=np.float16)},
        {"value": zeros(BATCH, 8, 20)},
        {name: zeros(BATCH, 8, 0, 10) for name in ("key", "value")},
        {name: zeros(2, 8, 2, 10) for name in ("key", "value")},
        {name: zeros(BATCH, 8, 2, 10, dtype=np.int32) for name in ("key", "value")},
        {"positions": zeros(BATCH, 3, dtype=np.int32)},
        {"positions": zeros(2, 2, dtype=np.int32)},
        {"positions": zeros(BATCH * 2, dtype=np.int32)},
        {"positions": zeros(BATCH, 2)},
        {"positions": zeros(BATCH, 2, dtype=np.int16)},
        {"sinks": zeros(5)},
        {"sinks": zeros(6, dtype=ml_dtypes.bfloat16)},
        {"qkv": zeros(BATCH, 2, 99)},
        {"qkv": zeros(BATCH, 1, 100)},
        {"qkv": zeros(2, 2, 100)},
        {"qkv": zeros(BATCH * 2, 100)},
        {"qkv": zeros(BATCH, 2, 100, dtype=np.int32)},
        {"cos": zeros(BATCH, 2, 4)},
        {"sin": zeros(BATCH, 2, 10)},
        {"cos": zeros(BATCH, 2, 5, dtype=np.int32)},
        {name: zeros(BATCH, 8, 2, 10, dtype=ml_dtypes.bfloat16) for name in ("key", "value")},
    ],
    ids=lambda value: " ".join(f"{k}{v.dtype}{v.shape}" for k, v in value.items()),
)
def test_operands_that_do_not_fit_are_refused(replaced: dict[str, np.ndarray]) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="attention: "):
        call_decode(good_decode() | {key: jnp.asarray(value) for key, value in replaced.items()})


def test_good_operands_are_not_refused() -> None:
    for window, ring in ((0, False), (8, True), (1, True)):
        assert all(np.isfinite(part).all() for part in call_decode(good_decode(), window=window, ring=ring))


@one_set
def test_results_rings_and_widths_that_do_not_fit_are_refused() -> None:
    for out, dtype in (
        ((BATCH, 2, 6, 10), np.float32),
        ((BATCH, 2, 60), ml_dtypes.bfloat16),
        ((BATCH, 2, 50), np.float32),
    ):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"attention: (qkv|keys, values and results are not of one type)"
        ):
            call_decode(good_decode(), out, dtype)
    for window in (0, 9):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a ring is smaller than its window"):
            call_decode(good_decode(), window=window, ring=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not written in place"):
        call_decode(good_decode(), in_place=False)


@one_set
@pytest.mark.parametrize(("dim", "qkv", "out"), [(9, 90, 54), (0, 60, 60), (10, 103, 63), (10, 90, 50)])
def test_widths_that_are_no_heads_are_refused(dim: int, qkv: int, out: int) -> None:
    """Odd heads, heads of no width, parts of heads, and queries that are no multiple of the keys."""
    operands = good_decode() | {name: jnp.zeros((BATCH, 8, 2, dim)) for name in ("key", "value")}
    operands |= {name: jnp.zeros((BATCH, 2, dim // 2)) for name in ("cos", "sin")}
    operands |= {"qkv": jnp.zeros((BATCH, 2, qkv)), "sinks": jnp.zeros(0)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="attention: "):
        call_decode(operands, (BATCH, 2, out))


# (heads, window): long enough for threads to share a sequence's positions if it is alone
LONG = [(Heads(3, 1, 64), None), (Heads(5, 1, 24), 280), (Heads(6, 2, 90), None), (Heads(4, 1, 10), 280)]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("heads", "window"), LONG, ids=lambda part: f"{part.dim}" if isinstance(part, Heads) else None)
def test_a_long_sequence_that_threads_share_has_the_bits_it_has_among_others(
    heads: Heads, window: int | None, dtype: type
) -> None:
    rng, capacity, batch = np.random.default_rng(16), 320 if window is None else 290, 8
    shape = (batch, capacity, heads.kv, heads.dim)
    held = [part.astype(dtype) for part in rng.standard_normal((2, *shape))]
    sinks = random_sinks(rng, heads)
    for rows in ([305], [300, 301, -1, 302, 303]):
        none, first = [-1] * len(rows), [40, *[-1] * (len(rows) - 1)]
        positions = np.array([rows, none, none, *[first] * 5], np.int32)
        qkv = random_projections(rng, heads, len(rows), dtype, batch)
        among, _ = decode(qkv, KVCache(*map(jnp.asarray, held), window is not None), positions, heads, window, sinks)
        own = KVCache(*(jnp.asarray(part[:1]) for part in held), window is not None)
        alone, _ = decode(qkv[:1], own, positions[:1], heads, window, sinks)
        assert_same_bits(np.asarray(among)[:1], np.asarray(alone))
        expected, _ = decode(qkv[:1], own, positions[:1], heads, window, sinks, form="xla")
        seen = positions[:1] >= 0
        values, by_xla = (np.asarray(each, np.float64)[seen] for each in (alone, expected))
        np.testing.assert_allclose(values, by_xla, rtol=EXPECTED_ERROR[dtype], atol=EXPECTED_ERROR[dtype])
