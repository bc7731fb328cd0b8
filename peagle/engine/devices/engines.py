"""The engines of a pair, one per config, within the free memory."""

import threading
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax

from peagle.config import check_block
from peagle.engine.devices.remote import Coordinator
from peagle.engine.devices.replicas import Replicas
from peagle.engine.host.engine import Engine
from peagle.engine.host.executor import Executor
from peagle.engine.host.handoff import Fingerprints
from peagle.engine.host.loop import AnyEngine
from peagle.engine.memory.kv_memory import KVMemory
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.memory import available_memory_bytes, format_size, refuse_too_large
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


class ReplicaModels(NamedTuple):
    """The models of one replica. target: with the aux_hidden that the drafter reads; plain_target: without."""

    target: Target
    plain_target: Target
    drafter: Drafter | None
    lookup: Drafter | None = None  # a drafter without caches, which drafts in adaptive steps, too

    def of(self, drafts: bool) -> tuple[Target, Drafter | None]:
        """Return the models of an engine. drafts: it speculates. Raises InputError if it would without a drafter."""
        if not drafts:
            return self.plain_target, None
        if self.drafter is None:
            raise InputError("this pair has no drafter to speculate with; load one, or decode with K = 0")
        return self.target, self.drafter


class Engines:
    """Engines by config; equal configs share one. replicas: the models on the devices of each replica."""

    def __init__(
        self,
        replicas: Sequence[ReplicaModels],
        stop_token_ids: tuple[int, ...],
        fingerprints: Fingerprints,
        coordinator: Coordinator | None,
        memory: FreeMemory,
    ) -> None:
        self.by_config: dict[ResolvedConfig, AnyEngine] = {}
        self.models = replicas[0]
        self._replicas, self._stop_token_ids = replicas, stop_token_ids
        self._fingerprints, self._coordinator, self._memory = fingerprints, coordinator, memory
        self._making = threading.Lock()

    def get(self, config: ResolvedConfig) -> AnyEngine:
        """Return the engine of a config. Any thread may call it.

        Replicas have an engine each. Raises InputError for a K that exceeds the positions or the drafter's window, for
        K > 0 without a drafter, for caches that exceed the memory, for slots that replicas cannot share, and for a role
        over several processes.
        """
        self._check(config)
        with self._making:
            if config not in self.by_config:
                self._warn_beyond_training(config)
                self._refuse_beyond_free(config)
                share = config.share(len(self._replicas))
                make = Executor if self._coordinator is None else self._coordinator.executor
                engines = []
                for models in self._replicas:
                    target, drafter = models.of(config.num_drafts > 0)
                    # synthetic acceptance imitates one drafter
                    lookup = models.lookup if config.synthetic_acceptance is None else None
                    stops, prints = self._stop_token_ids, self._fingerprints
                    engines.append(Engine(target, drafter, share, stops, prints, make, lookup))
                engine = Replicas(engines, config) if len(engines) > 1 else engines[0]
                _refuse_too_large(engine)
                self.by_config[config] = engine
            return self.by_config[config]

    def page_bytes(self, config: ResolvedConfig) -> int:
        """Compute the bytes of pages that engines of this config take. Raises InputError as `KVMemory` does."""
        count = len(self._replicas)
        copies = count if jax.default_backend() == "cpu" else 1
        target, drafter = self.models.of(config.num_drafts > 0)
        return copies * KVMemory(target, drafter, config.share(count)).num_local_bytes

    def prefix_cache_bytes(self, config: ResolvedConfig) -> int:
        """Return the bytes that a prefix cache takes in an engine of this config, if it is on."""
        if config.kv_memory is not None:
            return 1  # no extra page: cached tokens lie in the pages that requests leave
        own = self.page_bytes(config)
        if not own:  # a target without pages
            return 1
        return max(1, min(int(PREFIX_FRAC * self._memory.num_bytes()), max(PREFIX_TIMES * own, LEAST_PREFIX_BYTES)))

    def fits(self, config: ResolvedConfig, num_engines: int = 1) -> bool:
        """Whether memory holds the pages of a config. num_engines: how many share the free memory.

        Raises InputError for sizes that exceed all of it.
        """
        self._refuse_beyond_free(config)
        try:
            size = self.page_bytes(config)
        except InputError:  # it does not hold one request
            return False
        return config.kv_memory is not None or num_engines * size <= PAGES_FRAC * self._memory.num_bytes()

    def _refuse_beyond_free(self, config: ResolvedConfig) -> None:
        """Raise InputError for memory sizes in the config that exceed the free memory, before pages are counted."""
        target = self.models.target
        ranks = target.ranks if isinstance(target, OverDevices) else 1
        devices = 1 if jax.default_backend() == "cpu" else ranks * len(self._replicas)
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

    def _check(self, config: ResolvedConfig) -> None:
        k, target, drafter = config.num_drafts, self.models.target, self.models.drafter
        if k > target.max_positions - 2:
            raise InputError(
                f"K is {k}; expected at most {max(target.max_positions - 2, 0)}, since a step takes K + 1 positions "
                f"after the prompt and the target has {target.max_positions}"
            )
        check_block(k, getattr(drafter, "block_drafts", None))
        window = getattr(drafter, "window", None) if k else None
        if window is not None and window < k + 1:
            raise InputError(
                f"the drafter's window is {window} positions; expected {k + 1} or more at K = {k}, since a step's rows "
                f"must see the token they follow: raise --drafter-window, or lower -k to {max(window - 1, 0)}"
            )
        if self._coordinator is not None and config.role != "both":
            raise InputError(f"a target over several processes cannot take the role {config.role!r}; leave role out")

    def _warn_beyond_training(self, config: ResolvedConfig) -> None:
        """Warn, once, if a drafter without a window may see more positions than it was trained on."""
        trained = getattr(self.models.drafter, "trained_positions", None)

        def beyond(config: ResolvedConfig) -> bool:
            return trained is not None and config.num_drafts > 0 and config.context > trained

        if beyond(config) and not any(map(beyond, self.by_config)):
            warnings.warn(
                f"the context has {config.context} positions, but the drafter's config.json says {trained}: after "
                "these its drafts may be accepted less; --drafter-window N limits how far its attention reaches",
                InputWarning,
                stacklevel=4,
            )


def _refuse_too_large(engine: AnyEngine) -> None:
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
