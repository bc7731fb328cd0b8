"""Whether engines fit into the free memory."""

import threading

import jax

from peagle.base.errors import InputError
from peagle.base.memory import available_memory_bytes, refuse_too_large
from peagle.base.sizes import format_size
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.memory.kv_memory import KVMemory
from peagle.engine.resolved import ResolvedConfig
from peagle.protocols import Drafter, OverDevices, Target

PREFIX_FRAC = 0.1  # the prefix cache takes at most this share of the free memory
PREFIX_TIMES = 4  # and at most this multiple of the memory of the requests' own pages
LEAST_PREFIX_BYTES = 1 << 26  # or this, for the smallest models
PAGES_FRAC = 0.8  # share of the free memory for one request of the default context; programs and prefixes need the rest


class FreeMemory:
    """Free memory as measured once, so that equal arguments make equal engines."""

    def __init__(self) -> None:
        self._num_bytes: int | None = None
        self._measuring = threading.Lock()

    def num_bytes(self) -> int:
        with self._measuring:
            if self._num_bytes is None:
                self._num_bytes = available_memory_bytes()
            return self._num_bytes


def page_bytes(target: Target, drafter: Drafter | None, config: ResolvedConfig, num_replicas: int) -> int:
    """Compute the bytes of pages that engines of a config take. Raises InputError as `KVMemory` does."""
    copies = num_replicas if jax.default_backend() == "cpu" else 1
    return copies * KVMemory(target, drafter, config.share(num_replicas)).num_local_bytes


def most_prefix_bytes(own: int, free: int) -> int:
    """Return the bytes that a prefix cache takes beside pages of `own` bytes."""
    if not own:  # a target without pages
        return 1
    return max(1, min(int(PREFIX_FRAC * free), max(PREFIX_TIMES * own, LEAST_PREFIX_BYTES)))


def refuse_beyond_free(config: ResolvedConfig, target: Target, num_replicas: int) -> None:
    """Raise InputError for memory sizes in the config that exceed the free memory, before pages are counted."""
    ranks = target.ranks if isinstance(target, OverDevices) else 1
    devices = 1 if jax.default_backend() == "cpu" else ranks * num_replicas
    available = devices * available_memory_bytes()
    for name, size, option, instead in (
        ("keys and values", config.kv_memory or 0, "--kv-memory", "auto"),
        ("the prefix cache", config.prefix_cache, "--prefix-cache", "off"),
    ):
        if size > available:
            raise InputError(
                f"{name} may take {format_size(size)}, but {format_size(available)} are available; give a "
                f"smaller {option}, or {instead}"
            )


def refuse_too_large_engine(engine: AnyEngine) -> None:
    """Raise InputError, before allocation, for an engine that exceeds the memory.

    CPU devices share one memory. Elsewhere a replica has devices, and a part of the slots, of its own.
    """
    whole = engine if jax.default_backend() == "cpu" else engine.one
    slots, kept, limit = whole.config.slots, whole.config.prefix_cache, whole.config.kv_memory
    tokens = whole.page_use.num_tokens
    pages, state, logits = engine.memory_bytes()
    available = available_memory_bytes()

    def hint() -> str:
        if limit is not None:
            return "lower --kv-memory, --prefix-cache or --slots"
        if slots == 1:
            return "lower --context or -n"
        slot_bytes = (pages - kept + state + logits) // slots
        fit = max(0, available - kept) // max(slot_bytes, 1)
        which = f"{fit} slots fit" if fit > 1 else "1 slot fits" if fit else "not even one fits"
        return f"each slot takes {format_size(slot_bytes)}, and {which}: lower --context, -n or --slots"

    caches = f"the keys and values of {tokens:,} positions" + (f" for {slots} slots" if slots > 1 else "")
    refuse_too_large({caches: pages, "the state of the slots": state, "a step's logits": logits}, hint)
