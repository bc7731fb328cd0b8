"""What the commands compile is kept for the next run, by JAX's persistent compilation cache."""

import hashlib
import os
import warnings
from pathlib import Path

from peagle.ops.files import cache_directory, trim

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
ONLY_ABOVE_S = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
WORTH_A_FILE_S = "0.05"
MOST_BYTES = 1 << 30

CPUINFO = Path("/proc/cpuinfo")
_THAT_TELL_CPUS_APART = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")


def keep_compiled() -> None:
    """Where JAX is not imported yet, this process and its children read what earlier ones compiled, and keep what they
    compile, in the user's cache directory; the oldest beyond MOST_BYTES are gone. Nothing changes where the environment
    says what JAX is to do (JAX_COMPILATION_CACHE_DIR, which may be empty), where nothing can be kept, or where what is
    kept could not be read back."""
    if DIRECTORY in os.environ or (cpu := _cpu()) is None:
        return
    directory = cache_directory("compiled") / cpu
    try:
        directory.mkdir(parents=True, exist_ok=True)
        trim(directory, MOST_BYTES)
    except OSError:
        return
    if not os.access(directory, os.W_OK | os.X_OK):
        return
    os.environ[DIRECTORY] = str(directory)
    os.environ.setdefault(ONLY_ABOVE_S, WORTH_A_FILE_S)
    # a disk that is full, or a file that a killed process left behind: costs the time to compile, and only that
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)


def _cpu() -> str | None:
    """A name of this kind of CPU, as what is compiled for one may not run on another that has the same home directory.
    None where the system does not tell, and on Intel's: JAX compiles for those with features that it then misses when
    it reads a program back, so that it refuses each with an error message (jax issue 38445)."""
    try:
        first = CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return None
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    known = [told[name] for name in _THAT_TELL_CPUS_APART if name in told]
    if not known or told.get("vendor_id") == "GenuineIntel":
        return None
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
