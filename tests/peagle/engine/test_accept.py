"""A step emits plain decoding's own draws (their law: test_sampling.py).

Rows of one batch differ in sampling parameters and widths.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.base.errors import InputError
from peagle.config import EngineConfig, SamplingParams
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.step.accept import NOISE, Acceptance, accept, draw_synthetic
from peagle.engine.step.sampling import RowSampling, choose
from peagle.ops.likeliest import NO_TOKEN
from tests.support.rows import rows_of

V, K = 3, 2
jitted_accept, jitted_choose = jax.jit(accept), jax.jit(choose)
drawn = jax.jit(draw_synthetic, static_argnums=0)
by_draws = jax.jit(lambda drafts, *rest: accept(jnp.zeros(drafts.right.shape, jnp.int32), *rest, drafts))
GREEDY, PLAIN = SamplingParams(), SamplingParams(temperature=1.0)
ASKED = [
    PLAIN,
    GREEDY,
    SamplingParams(0.6, top_k=2),
    SamplingParams(1.3, top_p=0.8),
    SamplingParams(0.8, min_p=0.4),
    SamplingParams(2.0, top_k=2, top_p=0.7, min_p=0.1),
]


def table(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random distributions over the last axis, some with zeros."""
    weights = rng.gamma(0.7, size=(*shape, V)) + 1e-3
    weights[rng.random(weights.shape) < 0.15] = 0.0
    weights[..., 0] += 1e-2
    return weights / weights.sum(-1, keepdims=True)


def log(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(p).astype(np.float32)


def random_keys(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(0, 2**32, (rows, K + 1, 2), dtype=np.uint32)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_emits_what_plain_decoding_draws_whatever_the_drafts_and_the_width(seed: int) -> None:
    """For all drafts, sampling parameters and widths in one batch: the law of the output is plain decoding's.

    Plain decoding draws token i by key i from the target's logits after the tokens before; a step's run, and what
    plain decoding draws after it, are the same tokens. Every number of accepted drafts happens.
    """
    rng = np.random.default_rng(seed)
    logits = [log(table(rng, *[V] * i)) for i in range(K + 1)]  # after i tokens
    every = list(itertools.product(itertools.product(range(V), repeat=K), ASKED, range(K + 1))) * 8
    drafts = np.array([drafts for drafts, _, _ in every], np.int32)
    widths = np.array([width for _, _, width in every], np.int32)
    rows, keys = rows_of([sampling for _, sampling, _ in every]), random_keys(rng, len(every))

    def behind(tokens: np.ndarray) -> np.ndarray:
        """[B, K + 1, V]: the logits after 0, 1, .. K of each row's tokens."""
        return np.stack([[logits[i][tuple(row[:i])] for i in range(K + 1)] for row in tokens])

    plain = np.zeros((len(every), K + 1), np.int32)
    for i in range(K + 1):  # one token after another
        plain[:, i] = np.asarray(jitted_choose(behind(plain[:, :K]), rows, keys))[:, i]
    result = jitted_accept(drafts, behind(drafts), widths, rows, keys)
    accepted = np.asarray(result.num_accepted)
    agree = np.cumprod(drafts == plain[:, :K], axis=1).sum(axis=1)
    np.testing.assert_array_equal(accepted, np.minimum(agree, widths))
    np.testing.assert_array_equal(result.next_token, plain[np.arange(len(every)), accepted])
    for width in range(K + 1):
        assert set(accepted[widths == width]) == set(range(width + 1))


def random_step(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(drafts [B, K], logits, keys)."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, (rows, K), np.int32), log(table(rng, rows, K + 1)), random_keys(rng, rows)


def many_rows() -> tuple[np.ndarray, RowSampling]:
    """Make (widths, sampling parameters) of a few hundred rows."""
    pairs = list(itertools.product(range(K + 1), ASKED)) * 20
    return np.array([width for width, _ in pairs], np.int32), rows_of([sampling for _, sampling in pairs])


def test_drafts_past_the_width_decide_nothing() -> None:
    """Drafts from the width on, and logits and keys of later rows."""
    widths, sampling = many_rows()
    rows, index = len(widths), np.arange(K + 1)
    (drafts, logits, keys), others = random_step(0, rows), random_step(1, rows)
    beyond = index[None, :] > widths[:, None]  # of rows; draft i is judged by row i
    result: Acceptance = jitted_accept(drafts, logits, widths, sampling, keys)
    changed: Acceptance = jitted_accept(
        np.where(index[None, :K] >= widths[:, None], others[0], drafts),
        np.where(beyond[..., None], others[1], logits),
        widths,
        sampling,
        np.where(beyond[..., None], others[2], keys),
    )
    np.testing.assert_array_equal(changed.num_accepted, result.num_accepted)
    np.testing.assert_array_equal(changed.next_token, result.next_token)
    for width in range(K + 1):
        assert set(np.asarray(result.num_accepted)[widths == width]) == set(range(width + 1))


def test_logits_that_are_not_finite_accept_nothing_and_hurt_no_other_row() -> None:
    widths, sampling = many_rows()
    drafts, logits, keys = random_step(2, len(widths))
    result = jitted_accept(drafts, logits, widths, sampling, keys)
    broken = logits.copy()
    broken[::3, 0, 1] = np.nan  # the row that judges the first draft
    broken[1::3, :, 2] = np.inf
    after = jitted_accept(drafts, broken, widths, sampling, keys)
    for kind in (0, 1):
        np.testing.assert_array_equal(after.num_accepted[kind::3], 0)
        np.testing.assert_array_equal(after.next_token[kind::3], NO_TOKEN)
    np.testing.assert_array_equal(after.num_accepted[2::3], result.num_accepted[2::3])
    np.testing.assert_array_equal(after.next_token[2::3], result.next_token[2::3])
    assert (np.asarray(result.next_token) >= 0).all()


def test_greedy_accepts_the_longest_agreeing_prefix() -> None:
    """As far as its drafts are verified, and no further."""
    logits = jnp.asarray([[[0, 5, 0], [5, 0, 0], [0, 0, 5]]] * 5, jnp.float32)
    drafts = jnp.asarray([[1, 0], [1, 2], [0, 0], [1, 0], [1, 0]], jnp.int32)
    widths = jnp.asarray([2, 2, 2, 1, 0], jnp.int32)
    result = jitted_accept(drafts, logits, widths, rows_of([GREEDY] * 5), None)
    assert result.num_accepted.tolist() == [2, 1, 0, 1, 0]
    assert result.next_token.tolist() == [2, 0, 1, 0, 1]


def test_synthetic_acceptance_has_its_rates() -> None:
    """Unconditional rates, over many draws; the token after the kept drafts is the target's own."""
    rates, rows = (0.8, 0.5, 0.5, 0.0), 20_000
    logits = jax.random.normal(jax.random.key(0), (rows, 5, 7))
    drafts = drawn(rates, jax.random.bits(jax.random.key(1), (rows, 5, 2), jnp.uint32))
    widths = jnp.arange(rows, dtype=jnp.int32) % 2 + 3  # 3 or 4
    greedy = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows,)), rows_of([GREEDY]))
    accepted = by_draws(drafts, logits, widths, greedy, None)
    kept = np.asarray(accepted.num_accepted)
    np.testing.assert_allclose([(kept > i).mean() for i in range(4)], rates, atol=0.02)
    best = np.asarray(logits.argmax(-1))
    np.testing.assert_array_equal(accepted.next_token, best[np.arange(rows), kept])
    narrow = by_draws(drafts, logits, widths - 3, greedy, None)  # 0 or 1
    np.testing.assert_array_equal(narrow.num_accepted, np.minimum(kept, np.arange(rows) % 2))


def test_the_confidence_of_synthetic_drafts_is_their_chance() -> None:
    """Within its noise, where it is not cut off at 0 or 1; sure drafts and unsure ones occur."""
    drafts = drawn((0.7, 0.49), jax.random.bits(jax.random.key(1), (100_000, 3, 2), jnp.uint32))
    confidence, right = np.asarray(drafts.confidence), np.asarray(drafts.right)
    for low in np.arange(NOISE, 0.85, 0.1):
        within = (confidence >= low) & (confidence < low + 0.1)
        assert within.mean() > 0.01
        np.testing.assert_allclose(right[within].mean(), confidence[within].mean(), atol=0.05)
    assert (confidence > 0.95).mean() > 0.1


def test_behind_synthetic_acceptance_stands_a_draw_of_a_row_that_is_sampled() -> None:
    """Greedy rows beside it choose their argmax."""
    widths, sampling = many_rows()
    _, logits, keys = random_step(4, len(widths))
    accepted = by_draws(drawn((0.7, 0.4), keys), logits, widths, sampling, keys)
    kept = np.asarray(accepted.num_accepted)
    chosen = np.asarray(jitted_choose(logits, sampling, keys))
    np.testing.assert_array_equal(accepted.next_token, chosen[np.arange(len(widths)), kept])
    for width in range(K + 1):
        assert set(kept[widths == width]) == set(range(width + 1))


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.2,), (-0.1,)])
def test_synthetic_rates_never_rise(rates: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="none larger than the one before"):
        ResolvedConfig(synthetic_acceptance=rates)
    with pytest.raises(InputError, match="one for each draft"):
        ResolvedConfig(3, synthetic_acceptance=(0.5, 0.4))
    with pytest.raises(InputError, match="has 2 rates for K = 3"):  # before any model is loaded
        EngineConfig(3, synthetic_acceptance=(0.5, 0.4))
    assert EngineConfig(3, synthetic_acceptance=(0.5,)).synthetic_acceptance == (0.5,)
