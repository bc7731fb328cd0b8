"""Where a number comes from: versions, device, git state, command line. Nothing that names a machine or a place on it
beyond what was typed."""

import datetime
import importlib.metadata
import itertools
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle.ops import jax_cure

PACKAGES = ("peagle", "jax", "jaxlib", "flax", "numpy", "safetensors", "tokenizers", "transformers")
CPUINFO = Path("/proc/cpuinfo")
# variables of the environment that change what runs, here or in a peer that is measured beside
TUNING = (
    "PEAGLE_KERNELS",
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "OMP_NUM_THREADS",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
)


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """What goes with every number. `command` are the arguments as typed, sys.argv's by default; before them stands what
    the environment changes (`tuning`). JAX must be usable: its backend is started if it was not."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [*tuning(), "peagle", *(sys.argv[1:] if command is None else command)],
        "git": git_state(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "cpu": cpu_model(),
        "num_threads": num_threads(),
        "device": device(),
    }


def tuning() -> list[str]:
    """The variables of TUNING that are set, as they would be typed before a command: NAME=value. What is set in every
    process (peagle.ops.jax_cure) is not among them."""
    values = {name: os.environ.get(name, "").replace(jax_cure.FLAG, "").strip() for name in TUNING}
    return [f"{name}={shlex.quote(value)}" for name, value in values.items() if value]


def device() -> dict[str, Any]:
    """The devices JAX computes on."""
    import jax

    devices = jax.devices()
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout this package runs from, and whether files differ from it; None outside of a checkout (an
    installed package in somebody else's repository does not count)."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(here.parent, "status", "--porcelain", "--untracked-files=no"))}


def cpu_model() -> str | None:
    """The processor's name, where the system tells it."""
    told = first_processor()
    return (platform.processor() or None) if told is None else told.get("model name")


def first_processor() -> dict[str, str] | None:
    """What the system tells of the first processor, by Linux' names; None where it does not."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            told = [line.partition(":") for line in itertools.takewhile(str.strip, lines)]
    except OSError:
        return None
    return {name.strip(): value.strip() for name, _, value in told}


def num_threads() -> int | None:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def peak_memory_bytes() -> int | None:
    """The most memory held so far: the device's where it counts that, else the process's, with the pages of mapped
    files that were in memory then (a checkpoint's while it is loaded; the system takes them back when it needs them).
    """
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
