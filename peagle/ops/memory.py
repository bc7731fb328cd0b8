"""Memory: arrays on their way to the device that are there only once, and how much there is to take."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np
from jax.typing import DTypeLike

from peagle.ops.errors import InputError

ALIGNMENT = 64  # of what XLA on CPU reads in place


def aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array of zeros that `to_device` takes without a copy where the device is the CPU."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


def aligned_copy(values: np.ndarray, dtype: DTypeLike | None = None) -> np.ndarray:
    """The values in C order, in that dtype or their own."""
    copy = aligned(values.shape, values.dtype if dtype is None else dtype)
    np.copyto(copy, values, casting="unsafe")
    return copy


def stack(items: Iterable[tuple[np.ndarray, ...]], count: int) -> tuple[np.ndarray, ...]:
    """`count` items, 1 or more, of equal shapes and dtypes, as one item with a leading axis more. Each may be made when
    the one before it is gone.

    Example: (a0, b0), (a1, b1) becomes ([a0, a1], [b0, b1]).
    """
    stacked: tuple[np.ndarray, ...] = ()
    for index, item in enumerate(items):
        stacked = stacked or tuple(aligned((count, *part.shape), part.dtype) for part in item)
        for all_parts, part in zip(stacked, item, strict=True):
            all_parts[index] = part
    return stacked


def to_device(values: np.ndarray) -> jax.Array:
    """The values on JAX's default device. Nobody may write to `values` any more: on CPU they may be the array's own
    memory."""
    return jax.device_put(values, may_alias=True)


def available_memory_bytes() -> int:
    """Memory of JAX's default device that can be taken: on an accelerator what its allocator leaves, where it counts
    that; else the host's (`available_host_bytes`)."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return max(0, int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)))
    return available_host_bytes()


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping: what the system and its control group leave, or half of what is
    installed where neither says. Pages that only cache files count as free."""
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
        cached = _inactive_file_bytes(group)
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used + cached))


def share_of_mappings() -> float:
    """How many of the memory mappings that Linux allows a process this one has; 0 where the system does not say."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as mappings:
            return sum(1 for _ in mappings) / allowed
    except (OSError, ValueError):
        return 0.0


def _inactive_file_bytes(group: Path) -> int:
    """Of the memory a control group uses, the pages of files that it gives back when asked."""
    lines = (group / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def refuse_too_large(needed: dict[str, int], hint: Callable[[], str]) -> None:
    """Raise InputError, with what to do about it, if these bytes together exceed the memory that is available now."""
    total, available = sum(needed.values()), available_memory_bytes()
    if total > available:
        *first, last = (f"{size_in_words(size)} for {name}" for name, size in needed.items())
        parts = f"{', '.join(first)} and {last}" if first else last
        whole = f", {size_in_words(total)} together," if len(needed) > 1 else ""
        todo = hint()
        if jax.default_backend() == "gpu":
            todo += f"; JAX takes three quarters of a GPU's memory, more with {_FRACTION}=.95"
        raise InputError(
            f"out of memory: {parts}{whole} do not fit into the {size_in_words(available)} that are available; {todo}"
        )


def size_in_words(size: int) -> str:
    """Write bytes as MB or GB."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"
