"""Operands of attention over pages that the CUDA kernels take."""

import jax
import jax.numpy as jnp

from peagle.ops import cuda
from peagle.ops.cuda.calls import HEAD_DIM, PAGE


def takes(qkv: jax.Array, key: jax.Array) -> bool:
    """Check that the kernels run here and take such rows and pages [P, S, G, H]."""
    if not cuda.available():
        return False
    return key.shape[1] == PAGE and key.shape[3] == HEAD_DIM and qkv.dtype == key.dtype == jnp.bfloat16
