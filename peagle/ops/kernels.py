"""The implementations of an op, and the one that runs on this machine."""

from typing import Literal, TypeAlias

import jax

from peagle.ops import cuda, native, tpu
from peagle.ops.cuda import graphs

# An argument of every op with several implementations. A name means this implementation or an InputError. None means
# the CUDA kernels if they run here and take the operands, else XLA. The native CPU kernels run only by name or for
# weights that were packed for them, so that all sums of a model are computed in one way. "tpu" is for weights laid out
# for a TPU: its kernels where they take the operands, else XLA, always on whole tiles of rows.
Implementation: TypeAlias = Literal["native", "cuda", "tpu", "xla"]


def for_weights() -> Implementation | None:
    """Choose the implementation to load weights for: the kernels that need their own layout, if they run here."""
    return "native" if native.available() else "tpu" if tpu.available() else None


def describe_kernels() -> str:
    """Describe in one line the kernels that run here, or why none do.

    Raises InputError if PEAGLE_KERNELS names kernels that do not run here.
    """
    _, of_the_cpu = native.status()
    if jax.default_backend() == "tpu":
        return tpu.status()[1]
    if jax.default_backend() != "gpu":
        return of_the_cpu
    _, reason = graphs.status()
    return cuda.status()[1] + (f"; the host waits at branches: {reason}" if reason else "")
