"""Move host arrays to the device without a copy, and measure the available memory."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np
from jax.typing import DTypeLike

from peagle.base.errors import InputError
from peagle.base.sizes import format_size

ALIGNMENT = 64  # bytes; XLA on CPU reads such arrays in place


def aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Allocate an array of zeros that `to_device` does not copy if the device is the CPU."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


def aligned_copy(values: np.ndarray, dtype: DTypeLike | None = None) -> np.ndarray:
    """Copy the values to an `aligned` array in C order, in that dtype or their own."""
    copy = aligned(values.shape, values.dtype if dtype is None else dtype)
    np.copyto(copy, values, casting="unsafe")
    return copy


def as_aligned(values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return the values, copied only if they are not aligned, not in C order or of another dtype."""
    fits = values.dtype == np.dtype(dtype) and values.flags.c_contiguous and not values.ctypes.data % ALIGNMENT
    return values if fits else aligned_copy(values, dtype)


def stack(items: Iterable[tuple[np.ndarray, ...]], count: int) -> tuple[np.ndarray, ...]:
    """Stack `count` items, 1 or more, of equal shapes and dtypes along a new leading axis.

    items may be a generator: only one item is in memory. Example: (a0, b0), (a1, b1) becomes ([a0, a1], [b0, b1]).
    """
    stacked: tuple[np.ndarray, ...] = ()
    for index, item in enumerate(items):
        stacked = stacked or tuple(aligned((count, *part.shape), part.dtype) for part in item)
        for all_parts, part in zip(stacked, item, strict=True):
            all_parts[index] = part
    return stacked


def to_device(values: np.ndarray) -> jax.Array:
    """Move the values to JAX's default device without compiling; `jnp.asarray` compiles a program per shape.

    On CPU the array may share their memory: do not write to `values` afterwards.
    """
    return jax.device_put(values, may_alias=True)


def tree_bytes(tree: object) -> int:
    """Count the bytes of a tree's arrays, or of arrays of a tree's shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def available_memory_bytes() -> int:
    """Measure the memory available on JAX's default device.

    On an accelerator the rest of its allocator's limit, if it has one; else the host's (`available_host_bytes`).
    """
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return max(0, int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)))
    return available_host_bytes()


def available_host_bytes() -> int:
    """Measure the host memory available without swapping.

    The smaller of the system's and the control group's figure, or half of the installed memory if neither has one.
    Pages of the file cache count as free.
    """
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = half
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used + cached))


def share_of_mappings() -> float:
    """Return the number of this process's memory mappings as a fraction of Linux's limit; 0 on other systems."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as mappings:
            return sum(1 for _ in mappings) / allowed
    except (OSError, ValueError):
        return 0.0


_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def refuse_too_large(needed: dict[str, int], hint: Callable[[], str]) -> None:
    """Raise InputError, whose message ends with the hint, if these bytes exceed the memory available now."""
    total, available = sum(needed.values()), available_memory_bytes()
    if total > available:
        *first, last = (f"{format_size(size)} for {name}" for name, size in needed.items())
        parts = f"{', '.join(first)} and {last}" if first else last
        whole = f", {format_size(total)} together," if len(needed) > 1 else ""
        todo = hint()
        if jax.default_backend() == "gpu":
            todo += f"; JAX takes three quarters of a GPU's memory, more with {_FRACTION}=.95"
        raise InputError(
            f"out of memory: {parts}{whole} do not fit into the {format_size(available)} that are available; {todo}"
        )
