"""Products of few rows in the CUDA kernels."""

import math

import jax
import jax.numpy as jnp

from peagle.ops import cuda
from peagle.ops.cuda import calls


def supports(x: jax.Array, weight: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> bool:
    """Check that the kernels run here and take such operands."""
    rows, (inputs, outputs) = math.prod(x.shape[:-1]), weight.shape
    return (
        0 < rows <= calls.LINEAR_ROWS
        and inputs % 16 == 0
        and outputs % calls.LINEAR_OUTPUTS == 0
        and x.dtype == weight.dtype == jnp.bfloat16
        and all(addend is None or addend.dtype == jnp.bfloat16 for addend in (bias, residual))
        and cuda.available()
    )


def product(x: jax.Array, weight: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """Multiply x [..., K] by the weight [K, N]; add the bias and the residual."""
    rows = x.reshape(-1, x.shape[-1])
    addend = None if residual is None else residual.reshape(-1, weight.shape[1])
    return calls.linear(rows, weight, bias, addend).reshape(*x.shape[:-1], weight.shape[1])
