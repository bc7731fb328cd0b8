"""Compile the programs under test quickly, and keep them for later runs.

Half of the suite's time is compiling, most of it optimising. Tests assert what programs compute, not how fast. That a
row's bits are its own is asserted of whole models as they are compiled for users.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

COMPILED = Path(__file__).parents[2] / ".pytest_cache" / "jax"
MOST_BYTES = 1 << 30

# LLVM gets a program in up to 32 parts, each of which costs as much as a small program
QUICKLY: dict[str, int | bool] = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
AS_FOR_USERS: dict[str, int | bool] = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}

if importlib.metadata.version("jaxlib").startswith("0.10."):  # newer ones have but one way to compile fusions
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
    AS_FOR_USERS["xla_cpu_use_fusion_emitters"] = True


def set_environment() -> None:
    """Set what this process and its children read when they start; call it before JAX is imported."""
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICKLY.items())
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()  # the last of a name counts
    os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # children keep no programs
    # the suite starts some 60 processes, and each would compile the package's source again
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def keep_programs() -> None:
    """Let this process read the programs that an earlier run, or the worker beside it, compiled."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def trim_programs() -> None:
    """Drop the oldest programs beyond MOST_BYTES. JAX's own limit reads thousands of files at every write."""
    from peagle.base.files import trim_folder

    COMPILED.mkdir(parents=True, exist_ok=True)
    trim_folder(COMPILED, MOST_BYTES)
