"""The most likely token and its probability, natively, against float64 and against XLA."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops import native
from peagle.ops.likeliest import NO_TOKEN, argmax, likeliest
from tests.ops.native.cases import assert_same_bits, one_at_a_time, results_of

pytestmark = pytest.mark.usefixtures("kernels")
NO_MATRICES = True

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
WIDTHS = (1, 15, 16, 17, 64, 100, 1043, 40_000)  # the last is cut into slices
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def logits(rows: int, width: int, dtype: type) -> np.ndarray:
    return np.random.default_rng(width).normal(0, 4, (rows, width)).astype(dtype)


@each_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_any_width_is_the_definition(width: int, dtype: type) -> None:
    x = logits(5, width, dtype)
    exact = x.astype(np.float64)
    expected = 1 / np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)
    index, probability = likeliest(jnp.asarray(x))
    np.testing.assert_array_equal(index, exact.argmax(-1))
    np.testing.assert_allclose(probability, expected, rtol=2e-5)
    np.testing.assert_array_equal(argmax(jnp.asarray(x)), index)
    assert_same_bits(one_at_a_time(lambda row: likeliest(row)[1], x), probability)


@each_dtype
def test_of_equal_logits_the_first(dtype: type) -> None:
    x = np.zeros((4, 40_000), dtype)
    for row, columns in enumerate(((0,), (21, 22), (16_383, 16_384), (39_999,))):
        x[row, list(columns)] = 1
    np.testing.assert_array_equal(argmax(jnp.asarray(x)), [0, 21, 16_383, 39_999])
    np.testing.assert_array_equal(argmax(jnp.zeros((2, 100), dtype)), 0)


@each_dtype
def test_rows_without_a_largest_logit(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minus infinity is a logit like others. A row with a NaN has no largest logit, nor has one whose largest is
    infinite; XLA agrees."""
    x = np.full((9, 40_000), -np.inf, dtype)
    x[0, 7] = -1e30
    x[1, :] = 1
    for row, column in enumerate((0, 18, 16_384, 39_999), start=2):
        x[row] = np.arange(40_000) % 7
        x[row, column] = np.nan
    x[6, 20_000] = np.inf
    x[7, :] = np.nan  # and 8 is all of minus infinity
    tokens, probabilities = [7, 0, *[NO_TOKEN] * 7], [1, 1 / 40_000, *[np.nan] * 7]
    for _ in ("compiled", "XLA"):
        ours, (index, probability) = results_of(lambda x: (argmax(x), likeliest(x)), [(x,)])[0]
        np.testing.assert_array_equal(ours, tokens)
        np.testing.assert_array_equal(index, np.maximum(tokens, 0))
        np.testing.assert_allclose(probability, probabilities, rtol=2e-5 if dtype is np.float32 else 2e-2)
        monkeypatch.setattr(native, "available", lambda: False)


def test_leading_axes_stay_and_xla_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.asarray(logits(6, 300, np.float32).reshape(2, 3, 300))
    ours = results_of(likeliest, [(x,)])[0]
    monkeypatch.setattr(native, "available", lambda: False)
    theirs = jax.jit(lambda x: likeliest(x))(x)
    assert ours[0].shape == ours[1].shape == (2, 3)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=2e-6)
    np.testing.assert_array_equal(argmax(x), ours[0])
