"""Arrays that reach the device without a copy, and available memory."""

import mmap

import jax
import ml_dtypes
import numpy as np
import pytest

from peagle.base import memory
from peagle.base.memory import (
    ALIGNMENT,
    aligned,
    aligned_copy,
    as_aligned,
    available_memory_bytes,
    stack,
    to_device,
    tree_bytes,
)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.float32, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (5, 3, 11)])
def test_an_aligned_array_is_not_copied(shape: tuple[int, ...], dtype: type) -> None:
    values = aligned(shape, dtype)
    assert (values.shape, values.dtype) == (shape, np.dtype(dtype))
    assert values.flags.c_contiguous
    assert not values.any()
    if values.size:
        assert values.ctypes.data % ALIGNMENT == 0
        if jax.default_backend() == "cpu":
            assert to_device(values).unsafe_buffer_pointer() == values.ctypes.data


def test_an_unaligned_array_is_copied() -> None:
    values = aligned((9, 4), np.float32).reshape(-1)[1:]
    values[:] = np.arange(35)
    np.testing.assert_array_equal(to_device(values), np.arange(35))


def test_the_device_keeps_the_memory() -> None:
    kept = to_device(aligned_copy(np.arange(10_000, dtype=np.uint32)))
    for _ in range(5):
        aligned((10_000,), np.uint32)[:] = 1
    np.testing.assert_array_equal(kept, np.arange(10_000))


def test_donating_such_an_array_leaves_its_memory_alone() -> None:
    values = aligned_copy(np.arange(8, dtype=np.float32))
    out = jax.jit(lambda x: x + 1, donate_argnums=0)(to_device(values))
    np.testing.assert_array_equal(out, np.arange(8) + 1)
    np.testing.assert_array_equal(values, np.arange(8))


def test_an_aligned_copy_is_in_c_order_and_rounded() -> None:
    values = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    np.testing.assert_array_equal(aligned_copy(values.T), values.T)
    rounded = aligned_copy(values.T, ml_dtypes.bfloat16)
    assert rounded.flags.c_contiguous
    np.testing.assert_array_equal(rounded, values.T.astype(ml_dtypes.bfloat16))


def test_an_array_is_copied_only_if_it_does_not_fit_already() -> None:
    values = aligned((6, 5), np.float32)
    assert as_aligned(values, np.float32) is values
    shifted = aligned((31,), np.float32)[1:].reshape(6, 5)
    for source, dtype in ((values.T, np.float32), (values, ml_dtypes.bfloat16), (shifted, np.float32)):
        result = as_aligned(source, dtype)
        assert not np.shares_memory(result, source)
        assert result.dtype == dtype
        assert result.flags.c_contiguous
        assert result.ctypes.data % ALIGNMENT == 0


def test_items_are_stacked_one_after_the_other() -> None:
    result = []

    def items():
        for index in range(3):
            result.append(index)
            yield np.full((2,), index, np.uint8), np.full((1, 4), -index, np.float32)

    first, second = stack(items(), 3)
    assert result == [0, 1, 2]
    np.testing.assert_array_equal(first, [[0, 0], [1, 1], [2, 2]])
    assert (second.shape, second.dtype) == ((3, 1, 4), np.float32)
    np.testing.assert_array_equal(second[:, 0, 0], [0, -1, -2])


def test_bytes_of_a_tree() -> None:
    """Of arrays, or of their shapes."""
    tree = {"key": np.zeros((2, 3), ml_dtypes.bfloat16), "rest": (np.zeros(5, np.int32), None)}
    assert tree_bytes(tree) == 12 + 20
    assert tree_bytes(jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, tree))) == 32


def test_available_memory_is_the_devices_if_it_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, stats: dict[str, int] | None) -> None:
            self.memory_stats = lambda: stats

    assert 1 << 26 < available_memory_bytes() < 1 << 46
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 77)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for stats, expected in (({"bytes_limit": 100, "bytes_in_use": 30}, 70), ({"bytes_limit": 9}, 9), (None, 77)):
        monkeypatch.setattr(jax, "devices", lambda stats=stats: [Device(stats)])
        assert available_memory_bytes() == expected


def test_the_share_of_mappings_grows_with_them() -> None:
    before = memory.share_of_mappings()
    assert 0 < before < 1
    pieces = [mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ if i % 2 else mmap.PROT_WRITE) for i in range(200)]
    assert memory.share_of_mappings() > before
    for piece in pieces:
        piece.close()
