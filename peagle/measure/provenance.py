"""Record where figures come from: versions, device, git state, command line.

Names neither the host nor paths, except those on the command line.
"""

import datetime
import importlib.metadata
import itertools
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.base import jax_workaround

PACKAGES = ("peagle", "jax", "jaxlib", "flax", "numpy", "safetensors", "tokenizers", "transformers")
NAMED = ("peagle", "jax", "jaxlib")  # packages whose versions a page shows
CPUINFO = Path("/proc/cpuinfo")
# environment variables that change the kernels or threads of peagle, or of a peer in the same benchmark
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
    """Collect the provenance of a run. Starts JAX's backend if it was not started.

    command: the arguments as typed, by default those of sys.argv. The variables of `tuning` come before them.
    """
    import jax

    devices, processor = jax.devices(), first_processor()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [*tuning(), "peagle", *(sys.argv[1:] if command is None else command)],
        "git": git_state(),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "platform": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "cpu": (platform.processor() or None) if processor is None else processor.get("model name"),
        "num_threads": num_threads(),
        "device": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
    }


def origin_text(origin: Mapping[str, Any]) -> str:
    """Describe the machine, versions and commit of a provenance.

    A sweep adds to it what its models `ran` by: dtype, experts, kernels.
    """
    git = origin["git"] or {}
    commit = f", commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else ""
    ran = "".join(f", {name} {value}" for name, value in origin.get("ran", {}).items())
    versions = ", ".join(f"{name} {origin['packages'][name]}" for name in NAMED if name in origin["packages"])
    return f"{machine_text(origin)}{ran}; {versions}{commit}"


def machine_text(origin: Mapping[str, Any]) -> str:
    """Name the machine of a provenance by its CPU or device."""
    device = origin["device"]
    return f"{origin['cpu']}, {origin['num_threads']} threads" if device["platform"] == "cpu" else str(device["kind"])


def tuning() -> list[str]:
    """List the variables of TUNING that are set, as typed before a command: NAME=value.

    Leaves out the flag that peagle.base.jax_workaround sets in every process.
    """
    values = {name: os.environ.get(name, "").replace(jax_workaround.FLAG, "").strip() for name in TUNING}
    return [f"{name}={shlex.quote(value)}" for name, value in values.items() if value]


def git_state() -> dict[str, Any] | None:
    """Return the commit of this package's checkout and whether it is dirty.

    None without a checkout. A package that is installed inside another repository has none.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(here.parent, "status", "--porcelain", "--untracked-files=no"))}


def first_processor() -> dict[str, str] | None:
    """Read the first processor's entries in Linux's cpuinfo; None on other systems."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            entries = [line.partition(":") for line in itertools.takewhile(str.strip, lines)]
    except OSError:
        return None
    return {name.strip(): value.strip() for name, _, value in entries}


def num_threads() -> int | None:
    """Count the processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def peak_memory_bytes() -> int | None:
    """Return the peak memory so far: of the device if it counts that, else of the process.

    That of the process includes resident pages of mapped files, such as a checkpoint while it is loaded.
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


def version_of(name: str) -> str | None:
    """Return a distribution's version; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
