"""A cache is a set of (position, key, value), in slots of its own choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops.kv_cache import KVCache, cache_bytes, init_kv_cache, ring_capacity, slot_positions, write_kv
from peagle.ops.mask import causal_mask

G, H = 2, 3


def entries(positions: np.ndarray, version: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Make keys that encode a token's row, position and version; values are their negatives."""
    batch = np.arange(len(positions))[:, None] * 1000
    stamp = np.broadcast_to((batch + positions + version / 4.0)[..., None, None], (*positions.shape, G, H))
    return stamp.astype(np.float32), -stamp.astype(np.float32)


def write(cache: KVCache, positions: list[list[int]], version: int = 0) -> KVCache:
    array = np.array(positions, np.int32)
    return jax.jit(write_kv)(cache, *entries(array, version), array)


def held(cache: KVCache, newest: list[int]) -> list[dict[int, float]]:
    """Return {position: stamp} for each row of the batch, by slot_positions."""
    assert np.array_equal(np.asarray(cache.key), -np.asarray(cache.value))
    positions = np.asarray(jax.jit(slot_positions)(cache, np.array(newest, np.int32)))
    stamps = np.asarray(cache.key)[:, :, 0, 0]
    return [
        {int(p): float(s) for p, s in zip(row, stamp, strict=True) if p >= 0}
        for row, stamp in zip(positions, stamps, strict=True)
    ]


def test_slot_positions_example() -> None:
    """The worked example of the docstring."""
    cache = init_kv_cache(1, 8, G, H, jnp.float32, ring=True)
    assert jax.jit(slot_positions)(cache, np.array([9], np.int32)).tolist() == [[8, 9, 2, 3, 4, 5, 6, 7]]


def test_slots_never_written_are_negative() -> None:
    cache = init_kv_cache(2, 5, G, H, jnp.float32, ring=True)
    assert jax.jit(slot_positions)(cache, np.array([1, -1], np.int32)).tolist() == [
        [0, 1, -3, -2, -1],
        [-5, -4, -3, -2, -1],
    ]


def test_a_full_cache_holds_a_position_in_its_own_slot() -> None:
    cache = write(init_kv_cache(2, 6, G, H, jnp.float32), [[0, 1, 2], [3, 4, 5]])
    assert np.asarray(cache.key)[0, :, 0, 0].tolist() == [0, 1, 2, 0, 0, 0]
    assert np.asarray(cache.key)[1, :, 0, 0].tolist() == [0, 0, 0, 1003, 1004, 1005]
    assert jax.jit(slot_positions)(cache, np.array([2, 5], np.int32)).tolist() == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("ring", [False, True])
def test_negative_positions_are_dropped(ring: bool) -> None:
    cache = write(init_kv_cache(2, 4, G, H, jnp.float32, ring), [[0, 1, -1, -1], [-1, -1, -1, -1]])
    assert np.asarray(cache.key)[0, :, 0, 0].tolist() == [0, 1, 0, 0]
    assert not np.asarray(cache.key)[1].any()


def test_a_full_cache_drops_what_exceeds_it() -> None:
    """Nothing is clamped onto the last slot."""
    cache = write(init_kv_cache(1, 4, G, H, jnp.float32), [[1, 2, 3]])
    over = write(cache, [[3, 4, 5]], version=1)
    assert np.asarray(over.key)[0, :, 0, 0].tolist() == [0, 1, 2, 3.25]


@pytest.mark.parametrize("per_write", [1, 5])
def test_a_ring_holds_the_last_capacity_positions_across_the_wrap(per_write: int) -> None:
    capacity, starts = 7, np.array([0, 3])  # two rows, at different places in the ring
    cache = init_kv_cache(2, capacity, G, H, jnp.float32, ring=True)
    for step in range(30 // per_write):
        positions = starts[:, None] + np.arange(step * per_write, (step + 1) * per_write)
        cache = write(cache, positions.tolist())
        newest = positions[:, -1].tolist()
        for row, (holding, last) in enumerate(zip(held(cache, newest), newest, strict=True)):
            expected = {p: row * 1000.0 + p for p in range(max(starts[row], last - capacity + 1), last + 1)}
            assert {p: s for p, s in holding.items() if p >= starts[row]} == expected


@pytest.mark.parametrize("slack", [0, -1])
def test_ring_capacity_is_exactly_enough_for_a_rollback(slack: int) -> None:
    """After T rows are written and all but the first rejected, the next query still finds its whole window. With one
    slot less it does not, so the bound is tight."""
    window, width, length = 4, 3, 10
    cache = init_kv_cache(1, ring_capacity(window, width) + slack, G, H, jnp.float32, ring=True)
    for position in range(length):
        cache = write(cache, [[position]])
    cache = write(
        cache, [[length, length + 1, length + 2]], version=1
    )  # a pass of T rows; its first query is at `length`
    holding = held(cache, [length + 2])[0]
    needed = {p: float(p) for p in range(length - window + 1, length)} | {length: length + 0.25}
    assert ({p: holding.get(p) for p in needed} == needed) == (slack == 0)


def test_rolled_back_rows_are_overwritten_before_they_are_read() -> None:
    """Stale rows of a rejected draft are hidden by causality, then replaced."""
    window, width = 4, 3
    cache = init_kv_cache(1, ring_capacity(window, width), G, H, jnp.float32, ring=True)
    for start in range(0, 9, 3):
        cache = write(cache, [[start, start + 1, start + 2]])
    cache = write(cache, [[9, 10, 11]], version=1)  # 10 and 11 are rejected: length becomes 10
    cache = write(cache, [[10, 11, 12]], version=2)
    positions = jax.jit(slot_positions)(cache, np.array([12], np.int32))
    mask = jax.jit(causal_mask, static_argnums=2)(np.array([[10, 11, 12]], np.int32), positions, window)
    seen = np.asarray(mask)[0]
    stamps = np.asarray(cache.key)[0, :, 0, 0]
    for query, row in zip([10, 11, 12], seen, strict=True):
        fresh = {p: p + (0.5 if p >= 10 else 0.25 if p == 9 else 0.0) for p in range(query - window + 1, query + 1)}
        assert sorted(stamps[row].tolist()) == sorted(fresh.values())


def test_writing_casts_to_the_caches_dtype() -> None:
    cache = write(init_kv_cache(1, 4, G, H, jnp.bfloat16), [[1, 2]])
    assert cache.key.dtype == jnp.bfloat16
    assert np.asarray(cache.key, np.float32)[0, :, 0, 0].tolist() == [0, 1, 2, 0]


def test_two_buffers_and_their_bytes() -> None:
    """A donated buffer may appear only once."""
    cache = init_kv_cache(2, 4, G, H, jnp.bfloat16)
    assert cache.key.unsafe_buffer_pointer() != cache.value.unsafe_buffer_pointer()
    assert cache_bytes([cache, cache]) == 2 * 2 * (2 * 4 * G * H) * 2
    assert cache_bytes(jax.eval_shape(lambda: init_kv_cache(2, 4, G, H, jnp.bfloat16))) == 2 * (2 * 4 * G * H) * 2
