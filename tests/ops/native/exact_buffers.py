"""A pytest plugin that allocates weights without slack, so that a sanitizer finds reads past their end.

Without it they lie within a slightly longer array."""

import ctypes
import importlib

import numpy as np
from jax.typing import DTypeLike

from peagle.base.memory import ALIGNMENT

PACKED = importlib.import_module("peagle.ops.linear.packed")
LIBC = ctypes.CDLL(None)


def exact(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Allocate as peagle.base.memory.aligned does, without slack; never freed."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    address = ctypes.c_void_p()
    assert LIBC.posix_memalign(ctypes.byref(address), ctypes.c_size_t(ALIGNMENT), ctypes.c_size_t(size)) == 0
    assert address.value is not None
    array = np.frombuffer((ctypes.c_char * size).from_address(address.value), np.uint8).view(kind).reshape(shape)
    array[...] = 0
    return array


PACKED.aligned = exact  # type: ignore[attr-defined]
