"""What the commands compile is kept for the next run, by JAX's persistent compilation cache."""

import hashlib
import os
import warnings

from peagle.measure.provenance import first_processor, num_threads
from peagle.ops.files import cache_directory, trim

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",  # what is compiled sooner is not worth a file
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",  # XLA's own, for GPUs: of those a fault ends the run
}
MOST_BYTES = 1 << 30  # of one kind of machine

_THAT_TELL_CPUS_APART = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")


def keep_compiled() -> None:
    """This process, where JAX is not imported yet, and its children read what earlier ones compiled, and keep what they
    compile, in the user's cache directory; the oldest beyond MOST_BYTES are gone. Nothing changes where the environment
    says what JAX is to do (JAX_COMPILATION_CACHE_DIR, which may be empty), where nothing can be kept, or where what is
    kept could not be read back."""
    # a disk that is full, or what was killed while it wrote: costs the time to compile, in the latter case until that
    # file is among the oldest
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)
    if DIRECTORY in os.environ or (machine := _machine()) is None:
        return
    try:
        directory = cache_directory("compiled") / machine
        there = next(folder for folder in (directory, *directory.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.R_OK | os.W_OK | os.X_OK):
            return
        if there == directory:
            trim(directory, MOST_BYTES)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return
    os.environ[DIRECTORY] = str(directory)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def _machine() -> str | None:
    """A name of this kind of CPU and its number of threads: what is compiled for one may not run on another that has
    the same home directory, and is cut into as many parts as there are threads. None where the system does not tell,
    and on Intel's: JAX compiles for those with features that it then misses when it reads a program back, so that it
    refuses each with an error message (jax issue 38445)."""
    told = first_processor() or {}
    known = [told[name] for name in _THAT_TELL_CPUS_APART if name in told]
    if not known or told.get("vendor_id") == "GenuineIntel":
        return None
    return hashlib.sha256("\n".join([*known, str(num_threads())]).encode()).hexdigest()[:16]
