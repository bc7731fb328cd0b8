"""The environment in which a small model trains fastest on a CPU.

Imports neither JAX nor this project's packages: it has to act before XLA reads its flags.
"""

from __future__ import annotations

import os
import sys

BATCH_ROWS = 8  # of a training step, in both trainings


def device_count(cores: int | None) -> int:
    """As many JAX devices as cores, as far as they divide the batch."""
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


def restart_tuned() -> None:
    """Returns in a process that was started with the environment TUNED, where the caller did not set its own."""
    missing = {name: value for name, value in TUNED.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **missing})
