"""Products of few rows (linear.cu): their source on a CPU through the tests' driver; when they run; their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops import cuda as kernels
from peagle.ops.cuda import calls
from peagle.ops.linear import cuda, linear


def halves(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.bfloat16)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "more"),
    [
        (1, 64, 32, False),
        (8, 1040, 96, True),  # steps that do not fill the warps' turns
        (9, 48, 4224, True),  # twice the outputs a block; fewer steps than warps
        (16, 2080, 64, False),
    ],
)
def test_the_definition(rows: int, inputs: int, outputs: int, more: bool) -> None:
    x, weights = halves(rows, inputs), halves(inputs, outputs, seed=1)
    bias, residual = (halves(outputs, seed=2), halves(rows, outputs, seed=3)) if more else (None, None)
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    if bias is not None and residual is not None:
        expected += np.asarray(bias, np.float64) + np.asarray(residual, np.float64)
    output = np.asarray(calls.linear(x, weights, bias, residual), np.float64)
    np.testing.assert_allclose(output, expected, rtol=2**-8, atol=2**-12 * np.abs(expected).max())
    alone = calls.linear(x[:1], weights, bias, None if residual is None else residual[:1])
    np.testing.assert_array_equal(np.asarray(alone)[0], np.asarray(calls.linear(x, weights, bias, residual))[0])


@pytest.mark.usefixtures("opened")
def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected up to 16 rows"):
        jax.block_until_ready(calls.linear(halves(17, 64), halves(64, 32), None, None))


@pytest.mark.parametrize(
    ("rows", "dtype", "inputs", "outputs", "supported"),
    [
        (16, "bfloat16", 64, 32, True),
        (17, "bfloat16", 64, 32, False),
        (1, "float32", 64, 32, False),
        (1, "bfloat16", 72, 32, False),
        (1, "bfloat16", 64, 40, False),
    ],
)
def test_implementation_chosen_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: str, inputs: int, outputs: int, supported: bool
) -> None:
    monkeypatch.setattr(kernels, "status", lambda: (True, "CUDA"))
    x, weights = halves(rows, inputs).astype(dtype), halves(inputs, outputs).astype(dtype)
    assert cuda.supports(x, weights, None, None) == supported
    assert ("peagle_cuda_linear" in str(jax.make_jaxpr(linear)(x, weights))) == supported
    by_xla = functools.partial(linear, implementation="xla")
    assert "peagle_cuda_linear" not in str(jax.make_jaxpr(by_xla)(x, weights))


def test_gradients_are_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter is trained in bfloat16 on GPUs, too, and projects its few masks by `linear`."""
    x, weights, residual = halves(2, 64), halves(64, 32, seed=1), halves(2, 32, seed=2)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(linear(x, weights, residual=residual).astype(jnp.float32) ** 2)

    expected = jax.grad(loss, argnums=(0, 1))(weights, x)
    monkeypatch.setattr(kernels, "status", lambda: (True, "CUDA"))
    output = jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, x)
    for mine, theirs in zip(output, expected, strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=2**-6, atol=0.1)
