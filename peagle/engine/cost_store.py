"""Keep measured step costs between runs: one file per machine, pair of models and shape of an engine."""

import hashlib
import json
import os
import platform
from pathlib import Path

import jax
import jaxlib

from peagle.engine.handoff import Fingerprints
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.widths import CostTable
from peagle.ops import native
from peagle.ops.files import cache_directory, write_cached
from peagle.ops.strict_json import dumps


def store_for(config: ResolvedConfig, fingerprints: Fingerprints) -> Path | None:
    """Return the file of an engine's costs; None for models that were not loaded from files."""
    if not fingerprints.target:
        return None
    device = jax.devices()[0]
    parts = {
        "models": [fingerprints.target, fingerprints.drafter],
        "engine": [config.slots, config.num_speculative_tokens, config.steps_per_dispatch],
        "machine": [platform.node(), device.device_kind, len(jax.devices()), os.cpu_count(), native.status()[0]],
        "versions": [jaxlib.__version__],
    }
    digest = hashlib.sha256(dumps(parts).encode()).hexdigest()[:24]
    return cache_directory("costs") / f"{digest}.json"


def read_costs(path: Path | None) -> CostTable | None:
    """Read costs; None if the file is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
        return None if value is None else CostTable.from_json(value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_costs(path: Path | None, costs: CostTable) -> None:
    """Write costs for `read_costs`, if the cache is writable."""
    if path is not None:
        write_cached(path, dumps(costs.to_json(), indent=1).encode())
