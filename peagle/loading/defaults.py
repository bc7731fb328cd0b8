"""What a pair runs with where no option says it: implementation, dtype, prompt tokens a pass, steps a dispatch."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from peagle.base.errors import InputError, cannot_start
from peagle.config import DEFAULT_CHUNK, GPU_CHUNK, DtypeName, KernelsChoice
from peagle.ops import cuda
from peagle.ops.kernels import Implementation, describe_kernels, for_weights

MOST_STEPS_PER_DISPATCH = 24


def default_chunk() -> int:
    """Return the prompt tokens per pass on JAX's default device."""
    return GPU_CHUNK if jax.default_backend() == "gpu" else DEFAULT_CHUNK


def steps_per_dispatch(num_bytes: int) -> int:
    """Choose the steps per dispatch for a target of num_bytes of weights.

    On CPU so many that they read about 640 MB, in 10 to 30 ms, because a dispatch costs the host about a millisecond
    (8 % of a step of 4 ms). On other devices 1: a loop over steps would synchronise with the host after each.
    """
    if jax.default_backend() != "cpu":
        return 1
    return int(np.clip(640_000_000 // num_bytes, 1, MOST_STEPS_PER_DISPATCH))


def chosen_implementation(kernels: KernelsChoice) -> Implementation | None:
    """Choose the implementation of a pair's ops. Raises InputError if "native" is named and no kernels run here."""
    if kernels == "native" and not (for_weights() or cuda.available()):
        raise InputError(f"the native kernels do not run here: {describe_kernels().removeprefix('XLA: ')}")
    return "xla" if kernels == "xla" else for_weights()


def default_dtype(target_directory: Path, implementation: Implementation | None) -> DtypeName:
    """Return bfloat16, as GPT-OSS is published; float32 on CPUs if the checkpoint is not stored so or XLA multiplies.

    XLA on CPU takes about three times as long for bfloat16. Raises InputError if JAX cannot start on its platform.
    """
    from target.load import stored_dtype

    try:
        on_cpu = jax.default_backend() == "cpu"
    except (RuntimeError, AssertionError) as error:
        raise InputError(cannot_start(error)) from None
    if on_cpu and (implementation != "native" or stored_dtype(target_directory) != jnp.bfloat16):
        return "float32"
    return "bfloat16"
