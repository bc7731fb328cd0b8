"""What computes on this machine: the compiled kernels of its device, or XLA's own code."""

import jax

from peagle.ops import cuda, native


def in_words() -> str:
    """One line that names the kernels that run here, or says why there are none. Raises InputError where PEAGLE_KERNELS
    names what does not exist here."""
    _, of_the_cpu = native.status()
    return cuda.status()[1] if jax.default_backend() == "gpu" else of_the_cpu
