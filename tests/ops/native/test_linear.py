"""The native multiplication by a matrix against a float64 loop, in every format, with and without bias, norm and
residual; and rows are independent."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops.linear import PackedMatrix, linear
from peagle.ops.norm import Norm
from tests.ops.native.cases import (
    EXACT,
    MATRICES,
    ROUNDED,
    assert_same_bits,
    mxfp4_values,
    one_at_a_time,
    pack,
    results_of,
)

pytestmark = pytest.mark.usefixtures("kernels")

ONE_INPUT = 1e-3  # error if one normalised input near the middle of two bfloat16 numbers becomes the other one
EPSILON = 1e-3  # large enough to change results
ROWS = (*range(1, 18), 70)  # a block has 64 rows
FEW = (1, 2, 7, 16, 70)  # for all shapes but each format's first
# (inputs, outputs): multiples of 16 and not, odd and even; the last one is cut into chunks for several threads
SHAPES = {
    "float32": [(37, 21), (48, 32), (3, 1), (160, 531)],
    "bfloat16": [(37, 21), (38, 16), (1, 5), (161, 531)],
    "mxfp4": [(64, 21), (96, 48), (32, 1), (160, 1043)],
}
CASES = [(name, *shape, FEW if nth else ROWS) for name, shapes in SHAPES.items() for nth, shape in enumerate(shapes)]
each_case = pytest.mark.parametrize(("name", "inputs", "outputs", "all_rows"), CASES, ids=lambda part: f"{part}"[:9])


def by_definition(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    norm: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Multiply row by row in float64; weight is [outputs, inputs]. Normalised rows get x's dtype again."""
    out = np.zeros((len(x), len(weight)))
    for t, row in enumerate(x.astype(np.float64)):
        y = row if norm is None else row / np.sqrt(np.mean(row * row) + EPSILON) * norm.astype(np.float64)
        out[t] = weight @ (y if x.dtype == np.float32 else y.astype(np.float32).astype(x.dtype).astype(np.float64))
        out[t] += 0.0 if bias is None else bias
        out[t] += 0.0 if residual is None else residual[t].astype(np.float64)
    return out


def run(
    x: np.ndarray,
    weight: PackedMatrix | jax.Array,
    bias: np.ndarray | None = None,
    norm: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> jax.Array:
    vectors = [None if part is None else jnp.asarray(part) for part in (bias, norm, residual)]
    with_norm = None if vectors[1] is None else Norm(vectors[1], EPSILON)
    return linear(jnp.asarray(x), weight, vectors[0], norm=with_norm, residual=vectors[2])


def random_rows(rng: np.random.Generator, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(dtype)


@each_case
def test_any_number_of_rows_is_the_definition(name: str, inputs: int, outputs: int, all_rows: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    stored, weight = MATRICES[name](rng, outputs, inputs)
    packed, x = pack(stored), random_rows(rng, max(ROWS), inputs)
    expected = by_definition(x, weight)
    outs = results_of(lambda some: run(some, packed), [(x[:rows],) for rows in all_rows])
    for rows, out in zip(all_rows, outs, strict=True):
        np.testing.assert_allclose(out, expected[:rows], atol=EXACT, err_msg=f"{rows} rows")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", MATRICES)
def test_bias_norm_and_residual(name: str, dtype: type) -> None:
    """With and without each, in float32 and, rounded once at the end, in bfloat16."""
    rng = np.random.default_rng(1)
    inputs, outputs = SHAPES[name][0]
    stored, weight = MATRICES[name](rng, outputs, inputs)
    packed, calls = pack(stored), []
    for rows, has_bias, has_norm, has_residual in itertools.product((3, 70), *3 * [(False, True)]):
        x = 3 * random_rows(rng, rows, inputs, dtype=dtype)
        x[0] *= np.array(1e-3, dtype)  # a mean square of epsilon's order
        bias = random_rows(rng, outputs, dtype=dtype) if has_bias else None
        norm = random_rows(rng, inputs, dtype=dtype) if has_norm else None
        residual = random_rows(rng, rows, outputs, dtype=dtype) if has_residual else None
        calls.append((x, bias, norm, residual))
    outs = results_of(lambda x, *rest: run(x, packed, *rest), calls)
    for (x, *others), out in zip(calls, outs, strict=True):
        assert out.dtype == dtype
        expected = by_definition(x, weight, *others)
        what = f"{len(x)} rows; bias, norm, residual: {[part is not None for part in others]}"
        rtol, atol = (0.0, 3 * EXACT) if dtype == np.float32 else (ROUNDED, ONE_INPUT)
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=rtol, atol=atol, err_msg=what)


def test_leading_dimensions_are_rows() -> None:
    rng = np.random.default_rng(3)
    stored, _ = MATRICES["float32"](rng, 21, 37)
    x, residual = random_rows(rng, 2, 3, 37), random_rows(rng, 2, 3, 21)
    out, flat = (
        run(x.reshape(*lead, 37), pack(stored), residual=residual.reshape(*lead, 21)) for lead in ((2, 3), (6,))
    )
    assert out.shape == (2, 3, 21)
    assert_same_bits(out.reshape(6, 21), flat)


# MXFP4's scales


@pytest.mark.parametrize(("scale", "magnitude"), [(1, 2.0**120), (2, 2.0**110), (253, 2.0**-90), (254, 2.0**-100)])
def test_extreme_scales_are_exact(scale: int, magnitude: float) -> None:
    """If rows and results are normal numbers: no weight beyond float32's range is ever formed."""
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (21, 3, 16), np.uint8)
    scales = np.full((21, 3), scale, np.uint8)
    x = (magnitude * rng.standard_normal((5, 96))).astype(np.float32)
    expected = by_definition(x, mxfp4_values(blocks, scales))
    np.testing.assert_allclose(run(x, pack((blocks, scales))), expected, atol=EXACT * expected.std())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_scale_zero_counts_as_zero(dtype: type) -> None:
    """2^-127 is a denormal number, which XLA flushes; neighbouring blocks are unaffected."""
    rng = np.random.default_rng(5)
    (blocks, scales), _ = MATRICES["mxfp4"](rng, 21, 96)
    scales[:, 1] = 0
    x = random_rows(rng, 5, 96, dtype=dtype)
    x[:, 32:64] *= np.array(1e30, dtype)
    out, expected = run(x, pack((blocks, scales))), by_definition(x, mxfp4_values(blocks, scales))
    rtol, atol = (0.0, EXACT) if dtype == np.float32 else (ROUNDED, ONE_INPUT)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=rtol, atol=atol)
    assert not np.any(run(x, pack((blocks, np.zeros_like(scales)))))


@pytest.mark.parametrize("name", MATRICES)
def test_inputs_may_be_of_any_size(name: str) -> None:
    """Twelve powers of ten within one row: an input's error is at most a fraction of its block's largest. And a row of
    tiny numbers."""
    rng = np.random.default_rng(11)
    stored, weight = MATRICES[name](rng, 21, 96)
    x = random_rows(rng, 5, 96) * 10 ** rng.uniform(-6, 6, (5, 96)).astype(np.float32)
    x[3] *= 2.0**-120
    x[4] = 0
    out = np.asarray(run(x, pack(stored)), np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True)
    error = np.abs(out - by_definition(x, weight))
    assert (error <= EXACT * largest + 2.0**-120).all()
    assert not out[4].any()


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_row(name: str, value: float) -> None:
    rng = np.random.default_rng(12)
    stored, _ = MATRICES[name](rng, 21, 96)
    packed, x = pack(stored), random_rows(rng, 5, 96)
    without = run(x, packed)
    x[2, 40] = value
    out = np.asarray(run(x, packed))
    others = [0, 1, 3, 4]
    assert not np.isfinite(out[2]).any()
    assert_same_bits(out[others], np.asarray(without)[others])


# A row's bits are its own


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "all_rows", "dtype"),
    [
        (*case, dtype)
        # of a format the first shape, which has tails on both sides, and the last, which several threads share
        for dtype, shapes in ((np.float32, (0, -1)), (ml_dtypes.bfloat16, (0,)))
        for case in CASES
        if case[1:3] in [SHAPES[case[0]][nth] for nth in shapes]
    ],
    ids=lambda part: f"{part}"[:9] if not isinstance(part, type) else None,
)
def test_a_rows_bits_do_not_depend_on_the_others(
    name: str, inputs: int, outputs: int, all_rows: tuple[int, ...], dtype: type
) -> None:
    rng = np.random.default_rng(6)
    stored, _ = MATRICES[name](rng, outputs, inputs)
    packed = pack(stored)
    x, residual = random_rows(rng, 70, inputs, dtype=dtype), random_rows(rng, 70, outputs, dtype=dtype)
    bias, norm = random_rows(rng, outputs), random_rows(rng, inputs)

    def both(rows: jax.Array, beside: jax.Array) -> jax.Array:
        return run(rows, packed, bias, norm, beside)

    alone = one_at_a_time(both, x, residual)
    chosen = [rng.permutation(70)[:rows] for rows in all_rows]
    for some, out in zip(chosen, results_of(both, [(x[some], residual[some]) for some in chosen]), strict=True):
        assert_same_bits(out, alone[some], f"{len(some)} rows")


@pytest.mark.parametrize("name", MATRICES)
def test_inactive_rows_are_zero_and_change_no_others_bits(name: str) -> None:
    """With any content and in any number."""
    rng = np.random.default_rng(8)
    packed = pack(MATRICES[name](rng, 21, 64)[0])
    x, residual = random_rows(rng, 70, 64), random_rows(rng, 70, 21)
    norm = Norm(jnp.asarray(random_rows(rng, 64)), EPSILON)

    def some(x: jax.Array, residual: jax.Array, at: jax.Array | None = None) -> jax.Array:
        return linear(x, packed, norm=norm, residual=residual, positions=at)

    positions = [rng.integers(low, high, 70, np.int32) for low, high in ((-1, 1), (-9, 3), (0, 1), (-2, 0))]
    calls = [(np.where(at[:, None] < 0, np.float32(np.nan), x), residual, at) for at in positions]
    whole, *outs = map(np.asarray, results_of(some, [(x, residual), *calls]))
    for at, out in zip(positions, outs, strict=True):
        assert_same_bits(out[at >= 0], whole[at >= 0])
        assert not out[at < 0].any()


def test_concurrent_programs_are_independent() -> None:
    """Ops share the thread team: each is complete when it returns, whatever others run."""
    rng = np.random.default_rng(7)
    stored, weight = MATRICES["float32"](rng, 1043, 160)
    packed, xs = pack(stored), [random_rows(rng, 16, 160) for _ in range(4)]
    multiply = jax.jit(lambda x: linear(x, packed))
    expected = [np.asarray(multiply(x)) for x in xs]
    np.testing.assert_allclose(expected[0], by_definition(xs[0], weight), atol=EXACT)

    def often(x: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(multiply(x)) for _ in range(200)]

    with ThreadPoolExecutor(len(xs)) as pool:
        for outs, once in zip(pool.map(often, xs), expected, strict=True):
            assert all(np.array_equal(out, once) for out in outs)
