"""Truncation and draws, row by row, against definitions that sort in float64."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from peagle.base.errors import InputError
from peagle.config import GREEDY_BELOW, HOTTEST, LARGEST_SEED, SMALLEST_SEED, SamplingParams
from peagle.engine.request import fold_seed
from peagle.engine.step import sampling as functions
from peagle.ops import draw as race
from peagle.ops.likeliest import NO_TOKEN
from tests.support.rows import defined, rows_of

draw = jax.jit(race.draw)
probabilities = jax.jit(functions.probabilities)
choose = jax.jit(functions.choose)
draw_keys, uniform = jax.jit(functions.draw_keys), jax.jit(race.uniform)

SIDE_BY_SIDE = [
    SamplingParams(1.3),
    *(SamplingParams(0.7, top_k, top_p) for top_k, top_p in ((0, 0.9), (1, 1.0), (5, 1.0), (40, 0.5), (0, 0.1))),
    *(SamplingParams(0.7, top_k, top_p) for top_k, top_p in ((0, 0.999), (3, 0.01), (2, 5e-324), (10**9, 1.0))),
    SamplingParams(0.0, top_k=4, top_p=0.9, min_p=0.1),
    *(SamplingParams(2.0, min_p=min_p) for min_p in (1e-3, 0.4, 1.0)),
    SamplingParams(2.0, 9, 0.8, 0.05),
]


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 5000])
def test_each_row_has_the_distribution_its_own_request_defines(vocab_size: int) -> None:
    shape = (len(SIDE_BY_SIDE), 3, vocab_size)
    logits = np.random.default_rng(vocab_size).normal(0, 3, shape).astype(np.float32)
    laws = np.asarray(probabilities(logits, rows_of(SIDE_BY_SIDE)))
    for row, t in np.ndindex(*shape[:2]):
        expected = defined(logits[row, t], SIDE_BY_SIDE[row])
        np.testing.assert_allclose(laws[row, t], expected, rtol=2e-5, atol=1e-9, err_msg=str(SIDE_BY_SIDE[row]))


def test_a_rows_distribution_is_the_one_it_has_alone() -> None:
    """Bit for bit, whatever the sampling of other rows."""
    logits = np.random.default_rng(3).normal(0, 3, (len(SIDE_BY_SIDE), 2, 300)).astype(np.float32)
    together = np.asarray(probabilities(logits, rows_of(SIDE_BY_SIDE)))
    for row, sampling in enumerate(SIDE_BY_SIDE):
        alone = probabilities(logits[row : row + 1], rows_of([sampling]))
        np.testing.assert_array_equal(alone[0], together[row], str(sampling))


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = np.array([3.0, -0.0, 0.0, 0.0, -1.0, -np.inf], np.float32)
    cases = [
        *(SamplingParams(1.0, top_k=2), SamplingParams(1.0, top_p=0.9), SamplingParams(1.0, top_p=0.5)),
        *(SamplingParams(0.5, top_p=5e-324), SamplingParams(1.0, min_p=float(np.exp(-3.001)))),
    ]
    rows = np.asarray(probabilities(np.tile(logits, (len(cases), 1, 1)), rows_of(cases)))[:, 0]
    np.testing.assert_array_equal(rows[[0, 1, 4]] > 0, [[True, True, True, True, False, False]] * 3)
    np.testing.assert_array_equal(rows[[2, 3]], [[1, 0, 0, 0, 0, 0]] * 2)


LARGEST, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny
EXTREMES = [
    [LARGEST, -LARGEST, 0.0, 1.0],
    [-LARGEST, -LARGEST, -LARGEST, np.nextafter(-LARGEST, np.float32(0))],
    [LARGEST, LARGEST, np.nextafter(LARGEST, np.float32(0)), -np.inf],
    [20.0, np.nextafter(np.float32(20), np.float32(0)), 19.5, -1e30],  # as a drafter masks tokens
    [-np.inf, -np.inf, -3e38, -np.inf],
    [TINY, -TINY, 0.0, -0.0],
]
CORNERS = [
    SamplingParams(*values)
    for values in itertools.product(
        (0.0, GREEDY_BELOW, 0.7, HOTTEST), (0, 3), (5e-324, 0.4, 1 - 2**-53, 1.0), (0.0, 5e-324, 0.3, 1.0)
    )
]


@settings(max_examples=30)
@given(
    hnp.arrays(
        np.float32,
        (6, 4),
        # no subnormals, which XLA's threads take for zero
        elements=st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), st.just(-np.inf)
        ),
    )
)
@example(np.array(EXTREMES, np.float32))
def test_every_sampling_option_yields_a_distribution(logits: np.ndarray) -> None:
    """They are finite, sum to 1, and the largest logit has the largest.

    For any finite logits, or -inf beside a finite one, and for all allowed temperature, top-k, top-p and min-p.
    """
    logits[:, 1] = np.where(np.isinf(logits).all(axis=1), 0, logits[:, 1])
    rows = np.asarray(probabilities(np.tile(logits, (len(CORNERS), 1, 1)), rows_of(CORNERS)))
    for sampling, row in zip(CORNERS, rows, strict=True):
        assert np.isfinite(row).all(), sampling
        assert (row >= 0).all(), sampling
        np.testing.assert_allclose(row.sum(-1), 1, rtol=1e-5, err_msg=str(sampling))
        best = np.take_along_axis(row, logits.argmax(-1)[:, None], axis=-1)[:, 0]
        np.testing.assert_array_equal(best, row.max(-1), str(sampling))


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-12, 1e-9, float(np.nextafter(GREEDY_BELOW, 0))])
def test_below_a_threshold_it_is_greedy(temperature: float) -> None:
    """Beside sampled rows, too, although its key would draw another token."""
    sampling = SamplingParams(temperature, top_k=3, top_p=0.9)
    assert sampling.greedy
    rows = rows_of([sampling, SamplingParams(1.0)])
    assert rows.greedy.tolist() == [True, False]
    logits = np.tile(np.array([1.0, 20.0, 20.0, 19.0], np.float32), (2, 1, 1))
    assert choose(logits, rows, None)[:, 0].tolist() == [1, 1]
    keys = draw_keys(rows_of([SamplingParams(1.0)]), np.arange(64, dtype=np.int32)[None])[0, :, None]
    tokens = [choose(logits, rows, np.broadcast_to(key, (2, 1, 2)))[:, 0].tolist() for key in np.asarray(keys)]
    assert {token for token, _ in tokens} == {1}
    assert {token for _, token in tokens} >= {1, 2}


def test_at_the_threshold_only_what_float32_tells_apart_matters() -> None:
    """At 10 its last place is 1e-6, a tenth of the temperature."""
    logits = np.array([10.0, np.nextafter(np.float32(10), np.float32(0)), 9.99], np.float32)
    sampling = SamplingParams(GREEDY_BELOW)
    row = np.asarray(probabilities(logits[None, None], rows_of([sampling])))[0, 0]
    np.testing.assert_allclose(row, defined(logits, sampling), rtol=1e-4)
    assert 0.45 < row[1] < row[0]


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("temperature", [float("nan"), float("inf"), -0.5, -1e-300, 2 * HOTTEST, 1e39], "a number between 0"),
        ("top_p", [float("nan"), float("inf"), -0.1, 0.0, 1.0001], "a number above 0 and at most 1"),
        ("min_p", [float("nan"), float("inf"), -0.1, 1.0001], "a number from 0"),
        ("top_k", [-1, 2**31], "0 .off. or more"),
        ("min_tokens", [-1, 2**31], "0 .off. or more"),
        ("seed", [SMALLEST_SEED - 1, LARGEST_SEED + 1], "an integer of 64 bits"),
        ("presence_penalty", [2.1, float("nan")], "a number from -2 to 2"),
        ("frequency_penalty", [-2.1, float("nan")], "a number from -2 to 2"),
        ("repetition_penalty", [0.0, 1e-38, float("nan")], "a number from 1e-30 to"),
        ("logit_bias", [((1, 2.0), (1, 3.0)), ((-1, 2.0),), ((0, float("nan")),)], ""),
        ("logit_bias", [tuple((token, 1.0) for token in range(301))], "at most 300"),
    ],
)
def test_values_that_mean_nothing_are_refused(field: str, values: list[Any], expected: str) -> None:
    for value in values:
        with pytest.raises(InputError, match=f"expected .*{expected}") as refused:
            SamplingParams(**{"temperature": 0.7, field: value})
        assert refused.value.field == field


def test_a_seed_of_31_bits_is_itself_on_the_device_and_a_larger_one_is_folded_for_good() -> None:
    for seed in (0, 7, 2**31 - 1):
        assert fold_seed(seed) == seed
    folded = {
        2**31: 142642693,
        2**32 - 1: 450614939,
        2**40: 1628671565,
        2**63: 295773774,
        -1: 2099174690,
    }
    assert {seed: fold_seed(seed) for seed in folded} == folded  # of any version: answers are to be had again
    assert fold_seed(-1) == fold_seed(2**64 - 1)  # the same 64 bits
    rows = rows_of([SamplingParams(1.0, seed=seed) for seed in folded])
    assert np.asarray(rows.seed).tolist() == [*folded.values()]


@pytest.mark.parametrize("drawn", [False, True])
def test_no_token_is_chosen_where_logits_are_not_finite(drawn: bool) -> None:
    """In whatever row; the other positions of the row and the other rows choose theirs."""
    nan, infinite = float("nan"), float("inf")
    logits = [[0, 1, 2, 3], [0, nan, 2, 3], [-nan, 1, 2, 3], [0, 1, infinite, 3], [-infinite] * 4, [nan] * 4]
    cases = [SamplingParams(), SamplingParams(0.7), SamplingParams(0.7, top_k=2), SamplingParams(0.7, top_p=0.5)]
    cases += [SamplingParams(0.7, min_p=0.5), SamplingParams(0.7, 3, 0.9, 0.1)]
    keys = np.random.default_rng(0).integers(0, 2**32, (len(cases), len(logits), 2), np.uint32) if drawn else None
    chosen = np.asarray(choose(np.tile(np.array(logits, np.float32), (len(cases), 1, 1)), rows_of(cases), keys))
    assert (chosen[:, 0] >= 0).all()
    np.testing.assert_array_equal(chosen[:, 1:], NO_TOKEN)


NUMBER = 60_000  # draws


def keys_of(number: int, seed: int = 0) -> jax.Array:
    """[1, number, 2]: the keys of neighbouring tokens of a request."""
    return draw_keys(rows_of([SamplingParams(1.0, seed=seed)]), np.arange(number, dtype=np.int32)[None])


def drawn_from(weights: np.ndarray, keys: jax.Array, token_ids: np.ndarray | None = None) -> np.ndarray:
    whole = np.broadcast_to(weights.astype(np.float32), (1, keys.shape[1], len(weights)))
    return np.asarray(draw(whole, keys, token_ids))[0]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 0].sum())


@pytest.mark.parametrize("seed", range(3))
def test_draws_have_the_law_of_their_weights_and_neighbours_are_independent(seed: int) -> None:
    """Weights from 1 down to 1e-4, some of them 0; they need not be normalised."""
    weights = np.random.default_rng(seed).permutation([1.0, 0.5, 0.3, 0.1, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 0, 0, 0]) * 7
    p, drawn = weights / weights.sum(), drawn_from(weights, keys_of(NUMBER, seed))
    assert chi_square(np.bincount(drawn, minlength=12), NUMBER * p) < 27.9  # 8 degrees of freedom: P < 5e-4
    pairs = np.bincount(drawn[:-1] * 12 + drawn[1:], minlength=144)
    some = np.outer(p, p).ravel() * NUMBER > 5
    assert chi_square(pairs[some], np.outer(p, p).ravel()[some] * NUMBER) < some.sum() + 4 * np.sqrt(2 * some.sum())


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_weigh() -> None:
    """Half of the mass lies on 100,000 tokens of 5e-6 each: the draws of 400 keys are half of these, all different."""
    weights = np.full((100_001,), 5e-6)
    weights[0] = 0.5
    drawn = np.concatenate([drawn_from(weights, keys_of(400)[:, begin : begin + 40]) for begin in range(0, 400, 40)])
    rare = drawn[drawn > 0]
    assert 160 < len(rare) < 240  # 4 standard deviations
    assert len(np.unique(rare)) >= len(rare) - 3
    assert 30 < (rare < 50_000).sum() / len(rare) * 100 < 70


@pytest.mark.parametrize("seed", range(4))
def test_two_laws_agree_on_one_key_as_often_as_the_race_says(seed: int) -> None:
    """With chance sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i), between (1 - d) / (1 + d) and 1 - d."""
    rng, keys = np.random.default_rng(seed), keys_of(NUMBER, seed)
    p, q = rng.dirichlet(np.full(6, 0.7), 2)
    agree = (drawn_from(p, keys) == drawn_from(q, keys)).mean()
    expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(6))
    assert abs(agree - expected) < 4.5 * np.sqrt(expected * (1 - expected) / NUMBER)
    distance = np.abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    assert (drawn_from(p, keys) == drawn_from(p * 3, keys)).mean() > 0.9999  # but for ties


def test_a_part_of_the_vocabulary_draws_by_the_ids_of_its_tokens() -> None:
    """So a drafter of fewer tokens agrees with the target where it has the token."""
    p, ids = np.array([0.1, 0.4, 0.2, 0.3]), np.array([1, 3], np.int32)
    keys = keys_of(2000)
    whole, part = drawn_from(p, keys), ids[drawn_from(p[ids], keys, ids)]
    shared = np.isin(whole, ids)
    np.testing.assert_array_equal(part[shared], whole[shared])
    assert {0, 2} <= set(whole[~shared])


def test_no_key_draws_what_weighs_nothing() -> None:
    weights = np.zeros((5,))
    assert set(drawn_from(weights, keys_of(100))) == {NO_TOKEN}
    weights[3] = 1e-30
    assert set(drawn_from(weights, keys_of(100))) == {3}
    weights[2] = np.nan
    assert set(drawn_from(weights, keys_of(100))) == {NO_TOKEN}


def test_keys_are_those_of_seed_request_and_token_alone() -> None:
    """They do not depend on slot, other rows or place in the pass, and no two are equal."""
    cases = [SamplingParams(0.5, seed=7), SamplingParams(0.0, seed=7), SamplingParams(1.0, 3, 0.5, seed=LARGEST_SEED)]
    rows = rows_of(cases)  # of requests 0, 1 and 2
    tokens = np.array([[5, 6, 7]] * 3, np.int32)
    keys = np.asarray(draw_keys(rows, tokens))
    assert len(np.unique(keys.reshape(-1, 2), axis=0)) == 9
    turned = jax.tree.map(lambda leaf: leaf[::-1], rows)
    np.testing.assert_array_equal(draw_keys(turned, tokens[:, ::-1].copy()), keys[::-1, ::-1])
    others = rows_of([SamplingParams(2.0, 1, 0.1, 0.9, seed=7)])
    np.testing.assert_array_equal(draw_keys(others, tokens[:1, 1:2])[0, 0], keys[0, 1])


def test_uniform_numbers_of_keys_fill_the_interval_whatever_is_drawn() -> None:
    keys = keys_of(NUMBER)
    numbers = np.asarray(uniform(keys))[0]
    assert ((numbers >= 0) & (numbers < 1)).all()
    drawn = drawn_from(np.array([0.5, 0.5]), keys)
    for part in (numbers, numbers[drawn == 0], numbers[1:][drawn[:-1] == 0]):
        assert chi_square(np.histogram(part, 10, (0, 1))[0], np.full(10, len(part) / 10)) < 29.7  # P < 5e-4
