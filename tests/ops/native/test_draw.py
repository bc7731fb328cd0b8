"""Draws by keys, natively, against a race in float64 and against XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops import native
from peagle.ops.draw import draw
from peagle.ops.likeliest import NO_TOKEN
from tests.ops.native.cases import results_of

pytestmark = pytest.mark.usefixtures("kernels")
NO_MATRICES = True

WIDTHS = (1, 15, 16, 17, 64, 100, 1043, 40_000)  # the last is cut into slices
ROWS = 6


def case(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights, some of them 0, and keys [1, ROWS, ...]."""
    rng = np.random.default_rng(width)
    weights = np.exp(rng.normal(0, 4, (1, ROWS, width))) * (rng.random((1, ROWS, width)) < 0.7)
    weights[:, :, rng.integers(width)] = 1
    return weights.astype(np.float32), rng.integers(0, 2**32, (1, ROWS, 2), np.uint32)


def quotients(weights: np.ndarray, keys: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Compute weight over waiting time in float64."""

    def mixed(bits: np.ndarray) -> np.ndarray:
        bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
        bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
        return bits ^ (bits >> 16)

    counters = token_ids.astype(np.uint32) * np.uint32(0x9E3779B9)
    bits = mixed(mixed(counters + keys[..., :1]) ^ keys[..., 1:])
    past = (bits.astype(np.float64) + 0.5) / 2**32
    return weights.astype(np.float64) / -np.log1p(-past)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_winner_of_any_width_is_that_of_the_definition(width: int) -> None:
    weights, keys = case(width)
    exact = quotients(weights, keys, np.arange(width))
    drawn = np.asarray(draw(jnp.asarray(weights), jnp.asarray(keys)))
    # float32 may take the second where it is as fast but for rounding
    chosen = np.take_along_axis(exact, drawn[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(chosen, exact.max(-1), rtol=1e-5)
    alone = [draw(jnp.asarray(weights[:, row : row + 1]), jnp.asarray(keys[:, row : row + 1])) for row in range(ROWS)]
    np.testing.assert_array_equal(np.concatenate(alone, axis=1), drawn)


def test_tokens_draw_by_their_ids_and_xla_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, keys = case(1043)
    ids = np.random.default_rng(0).permutation(40_000)[:1043].astype(np.int32)
    operands = jnp.asarray(weights), jnp.asarray(keys), jnp.asarray(ids)
    drawn = results_of(draw, [operands])[0]
    np.testing.assert_array_equal(drawn, quotients(weights, keys, ids).argmax(-1))
    monkeypatch.setattr(native, "available", lambda: False)
    np.testing.assert_array_equal(jax.jit(lambda *of: draw(*of))(*operands), drawn)


def test_rows_without_a_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is above 0, or one is NaN, wherever it stands; XLA agrees."""
    weights = np.zeros((1, ROWS, 40_000), np.float32)
    weights[0, 1:, 39_999] = 1e-30
    for row, column in enumerate((0, 17, 16_384, 39_998), start=2):
        weights[0, row, column] = np.nan
    keys = np.random.default_rng(1).integers(0, 2**32, (1, ROWS, 2), np.uint32)
    for _ in ("compiled", "XLA"):
        drawn = results_of(draw, [(jnp.asarray(weights), jnp.asarray(keys))])[0]
        np.testing.assert_array_equal(drawn, [[NO_TOKEN, 39_999, *[NO_TOKEN] * 4]])
        monkeypatch.setattr(native, "available", lambda: False)
