"""Tables of cosines and sines, natively, against float64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops.rope import RopeConfig, Yarn, rope_frequencies, rope_tables
from tests.ops.native.cases import ROUNDED, assert_same_bits, bits, one_at_a_time

pytestmark = pytest.mark.usefixtures("kernels")
NO_MATRICES = True

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
WIDTHS = (2, 14, 32, 34, 64, 90)  # of heads; a table holds half of each
FAR = 131_072
LAST_PLACE = 2.0**-24  # unit in the last place of a number below one
POSITIONS = np.zeros((2, 3), np.int32)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def rope(width: int) -> RopeConfig:
    return RopeConfig(width, 150_000.0, Yarn(32.0, 4096))


def exact(config: RopeConfig, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute (cos, sin) in float64 of angles that are float32 products."""
    frequencies, concentration = rope_frequencies(config)
    angles = (positions.astype(np.float32)[..., None] * frequencies).astype(np.float64)
    return np.cos(angles) * concentration, np.sin(angles) * concentration


@each_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_any_width_is_the_definition(width: int, dtype: type) -> None:
    positions = np.random.default_rng(width).integers(0, FAR, (2, 5)).astype(np.int32)
    positions[0, :2] = 0, FAR - 1
    positions[1, :2] = -1, 1  # an inactive row's numbers are finite
    tables = rope_tables(rope(width), jnp.asarray(positions), dtype, implementation="native")
    for table, expected in zip(tables, exact(rope(width), positions), strict=True):
        assert table.shape == (2, 5, width // 2)
        assert table.dtype == dtype
        error = ROUNDED * np.abs(expected) if dtype == ml_dtypes.bfloat16 else np.zeros(())
        assert np.all(np.abs(np.asarray(table, np.float64) - expected) <= error + 3 * LAST_PLACE)


def test_every_quarter_of_a_turn_and_the_sums_of_squares() -> None:
    """At every position, up to the last place."""
    config, positions = RopeConfig(8, 3.0), np.arange(FAR, dtype=np.int32)[None]
    cos, sin = (
        np.asarray(table) for table in rope_tables(config, jnp.asarray(positions), np.float32, implementation="native")
    )
    for table, expected in zip((cos, sin), exact(config, positions), strict=True):
        np.testing.assert_allclose(table, expected, rtol=0, atol=LAST_PLACE)
    np.testing.assert_allclose(cos.astype(np.float64) ** 2 + sin.astype(np.float64) ** 2, 1.0, atol=3e-7)


@each_dtype
def test_a_rows_bits_do_not_depend_on_the_others(dtype: type) -> None:
    config, positions = rope(90), np.arange(0, FAR, 131, dtype=np.int32)[:, None]
    together = rope_tables(config, jnp.asarray(positions), dtype, implementation="native")
    for number in range(2):
        alone = one_at_a_time(
            lambda at, n=number: rope_tables(config, at, dtype, implementation="native")[n], positions[:40]
        )
        np.testing.assert_array_equal(bits(alone), bits(together[number][:40]))
    in_a_row = rope_tables(config, jnp.asarray(positions.T), dtype, implementation="native")
    for ours, theirs in zip(in_a_row, together, strict=True):
        assert_same_bits(ours[0], theirs[:, 0])
