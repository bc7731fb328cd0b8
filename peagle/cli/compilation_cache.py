"""JAX's persistent compilation cache: keep compiled programs for the next run."""

import hashlib
import os
import warnings

from peagle.base.files import cache_directory, trim_folder
from peagle.measure.provenance import first_processor, num_threads

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",  # a program that compiles faster is not worth a file
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",  # XLA's own caches for GPUs: an error in one ends the run
}
MOST_BYTES = 1 << 30  # per kind of machine

_CPU_FIELDS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")


def keep_compiled() -> None:
    """Keep compiled programs in the user's cache directory. Call it before JAX is imported.

    Deletes the oldest programs beyond MOST_BYTES. Does nothing if JAX_COMPILATION_CACHE_DIR is set, even to "", if the
    directory cannot be written, or if this machine could not read the programs back.
    """
    # a full disk, or a half-written file of a killed process, costs only the time to compile
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)
    if DIRECTORY in os.environ or (machine := _machine()) is None:
        return
    try:
        directory = cache_directory("compiled") / machine
        existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
            return
        if existing == directory:
            trim_folder(directory, MOST_BYTES)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return
    os.environ[DIRECTORY] = str(directory)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def kept_text() -> str:
    """Say how long compiling takes, and whether the next start reads the programs from a directory."""
    if directory := os.environ.get(DIRECTORY):
        return f"the first start takes minutes, later ones read the programs from {directory}"
    return "each start takes minutes, because compiled programs are not kept on this machine"


def _machine() -> str | None:
    """Hash the kind of CPU and the number of threads: a program for another kind may not run here.

    None if the system does not tell, and on Intel's CPUs. There JAX compiles for features that it does not find when it
    reads a program back, and prints an error for every program (jax issue 38445).
    """
    cpu = first_processor() or {}
    known = [cpu[name] for name in _CPU_FIELDS if name in cpu]
    if not known or cpu.get("vendor_id") == "GenuineIntel":
        return None
    return hashlib.sha256("\n".join([*known, str(num_threads())]).encode()).hexdigest()[:16]
