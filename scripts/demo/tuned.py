"""The environment in which a small model trains fastest on a CPU. It has to act before JAX starts."""

import os
import sys

from peagle.ops import jax_workaround

BATCH_ROWS = 8  # of a training step


def device_count(cores: int | None) -> int:
    """Count JAX devices: as many as cores, as far as they divide the batch."""
    return max(count for count in (1, 2, 4, 8) if count <= min(cores or 1, BATCH_ROWS))


# One JAX device per core, each on one thread with its own rows: cores meet once a step instead of once an operation.
# Large blocks of memory stay with the process, on huge pages.
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(device_count(os.cpu_count())),
    "XLA_FLAGS": (
        "--xla_cpu_multi_thread_eigen=false --xla_cpu_prefer_vector_width=512 --xla_cpu_enable_fast_min_max=true"
        " --xla_cpu_collective_call_terminate_timeout_seconds=3600"  # a busy machine may delay one core for long
    ),
}


def tuned_environment() -> dict[str, str]:
    """Make the environment of a training: this process' own, completed by TUNED."""
    own = {
        name: value for name, value in os.environ.items() if (name, value.strip()) != ("XLA_FLAGS", jax_workaround.FLAG)
    }
    return {**TUNED, **own}


def restart_tuned() -> None:
    """Restart the process in the tuned environment, unless it runs in it."""
    tuned = tuned_environment()
    if tuned != os.environ:
        os.execve(sys.executable, sys.orig_argv, tuned)
