"""The exact law of what a step emits, by integrating the shipped `accept` over its uniform numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.accept import accept
from peagle.config import SamplingConfig, SpeculationConfig
from peagle.ops.errors import InputError
from peagle.sampling import ACCEPT, TARGET, probabilities

V, K = 3, 2
jitted_accept = jax.jit(accept, static_argnums=3)
PLAIN = SamplingConfig(temperature=1.0)


def table(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random distributions over the last axis, some with zeros."""
    weights = rng.gamma(0.7, size=(*shape, V)) + 1e-3
    weights[rng.random(weights.shape) < 0.15] = 0.0
    weights[..., 0] += 1e-2
    return weights / weights.sum(-1, keepdims=True)


def log(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(p).astype(np.float32)


def cells(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(midpoint, width) of every interval that the points cut [0, 1) into."""
    edges = np.unique(np.concatenate([[0.0, 1.0], points[(points > 0) & (points < 1)]]))
    return (edges[1:] + edges[:-1]) / 2, np.diff(edges)


def emitted_law(p: list[np.ndarray], drafts: tuple[int, int], q: np.ndarray | None) -> dict:
    """Law of the emitted run for given drafts: p[i] is the target's (processed) distribution behind i accepted
    drafts."""
    axes = []  # one per uniform number the decision may depend on: (position, purpose, midpoints, widths)
    for i in range(K + 1):
        cuts = [np.cumsum(p[i])]
        if q is not None and i < K:
            residual = np.maximum(p[i] - q[i], 0)
            cuts.append(np.cumsum(residual) / max(residual.sum(), 1e-30))
            axes.append((i, ACCEPT, *cells(np.array([p[i][drafts[i]] / q[i][drafts[i]]]))))
        axes.append((i, TARGET, *cells(np.concatenate(cuts))))
    grid = list(itertools.product(*[range(len(mid)) for _, _, mid, _ in axes]))
    rows = -(-len(grid) // 1024) * 1024  # few shapes to compile; rows without a cell weigh nothing
    uniforms = np.full((rows, K + 1, 3), 0.5, np.float32)
    weight = (np.arange(rows) < len(grid)).astype(np.float64)
    for axis, (position, purpose, mid, width) in enumerate(axes):
        pick = np.array([cell[axis] for cell in grid])
        uniforms[: len(grid), position, purpose] = mid[pick]
        weight[: len(grid)] *= width[pick]
    logits = jnp.broadcast_to(jnp.asarray(log(np.stack(p)))[None], (rows, K + 1, V))
    result = jitted_accept(
        jnp.broadcast_to(jnp.asarray(drafts, jnp.int32)[None], (rows, K)),
        None if q is None else jnp.broadcast_to(jnp.asarray(q, jnp.float32)[None], (rows, K, V)),
        logits,
        PLAIN,
        jnp.asarray(uniforms),
    )
    law: dict[tuple[int, ...], float] = {}
    for accepted, token, mass in zip(
        np.asarray(result.num_accepted), np.asarray(result.next_token), weight, strict=True
    ):
        run = (*drafts[:accepted], int(token))
        law[run] = law.get(run, 0.0) + mass
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


def continued(law: dict, second: np.ndarray, third: np.ndarray) -> np.ndarray:
    """Law of the first K + 1 tokens when plain decoding goes on behind the run."""
    joint = np.zeros((V, V, V))
    for run, mass in law.items():
        if len(run) == 3:
            joint[run] += mass
        elif len(run) == 2:
            joint[run] += mass * third[run]
        else:
            joint[run[0]] += mass * second[run[0]][:, None] * third[run[0]]
    return joint


@pytest.mark.parametrize("seed", range(4))
def test_sampled_drafts_emit_exactly_the_targets_law(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second, third = table(rng), table(rng, V), table(rng, V, V)
    q = table(rng, K)
    if seed == 0:
        q[0] = first  # equal distributions: nothing is ever rejected
    joint = np.zeros((V, V, V))
    for drafts in itertools.product(range(V), repeat=K):
        mass = q[0][drafts[0]] * q[1][drafts[1]]
        if mass > 0:
            law = emitted_law([first, second[drafts[0]], third[drafts]], drafts, q)
            joint += mass * continued(law, second, third)
    expected = first[:, None, None] * second[:, :, None] * third
    np.testing.assert_allclose(joint, expected, atol=1e-6)


@pytest.mark.parametrize("drafts", list(itertools.product(range(V), repeat=K)))
def test_one_hot_drafts_emit_exactly_the_targets_law_whatever_they_are(drafts: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(drafts) + 10)
    first, second, third = table(rng), table(rng, V), table(rng, V, V)
    law = emitted_law([first, second[drafts[0]], third[drafts]], drafts, None)
    expected = first[:, None, None] * second[:, :, None] * third
    np.testing.assert_allclose(continued(law, second, third), expected, atol=1e-6)


@pytest.mark.parametrize("sampling", [SamplingConfig(0.6, top_k=2), SamplingConfig(1.3, top_p=0.8)])
def test_the_law_holds_for_truncated_distributions(sampling: SamplingConfig) -> None:
    rng = np.random.default_rng(5)
    raw = [table(rng) + 0.05, table(rng, V) + 0.05, table(rng, V, V) + 0.05]
    first, second, third = (np.asarray(probabilities(jnp.asarray(log(p)), sampling), np.float64) for p in raw)
    drafts = (1, 2)
    logits = [raw[0], raw[1][1], raw[2][1, 2]]
    processed = [first, second[1], third[1, 2]]
    # the law is integrated over the cells of the processed distributions, through the raw logits
    rows = emitted_law_of_logits(logits, processed, drafts, sampling)
    expected = first[:, None, None] * second[:, :, None] * third
    np.testing.assert_allclose(continued(rows, second, third), expected, atol=1e-6)


def emitted_law_of_logits(
    raw: list[np.ndarray], processed: list[np.ndarray], drafts: tuple[int, int], sampling: SamplingConfig
) -> dict:
    law: dict[tuple[int, ...], float] = {}
    axes = [cells(np.cumsum(p)) for p in processed]
    for combo in itertools.product(*[range(len(mid)) for mid, _ in axes]):
        uniforms = np.full((1, K + 1, 3), 0.5, np.float32)
        mass = 1.0
        for i, cell in enumerate(combo):
            uniforms[0, i, TARGET] = axes[i][0][cell]
            mass *= axes[i][1][cell]
        result = jitted_accept(
            jnp.asarray([drafts], jnp.int32),
            None,
            jnp.asarray(log(np.stack(raw)))[None],
            sampling,
            jnp.asarray(uniforms),
        )
        run = (*drafts[: int(result.num_accepted[0])], int(result.next_token[0]))
        law[run] = law.get(run, 0.0) + mass
    return law


def test_a_draft_of_zero_probability_is_rejected_even_at_uniform_zero() -> None:
    p = np.array([[[0.0, 0.5, 0.5], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]])
    q = np.array([[[1.0, 0.0, 0.0], [0.4, 0.3, 0.3]]])
    result = jitted_accept(
        jnp.asarray([[0, 0]], jnp.int32),
        jnp.asarray(q, jnp.float32),
        jnp.asarray(log(p)),
        PLAIN,
        jnp.zeros((1, K + 1, 3), jnp.float32),
    )
    assert int(result.num_accepted[0]) == 0
    assert int(result.next_token[0]) == 1


def test_greedy_accepts_the_longest_agreeing_prefix() -> None:
    logits = jnp.asarray([[[0, 5, 0], [5, 0, 0], [0, 0, 5]]] * 3, jnp.float32)
    drafts = jnp.asarray([[1, 0], [1, 2], [0, 0]], jnp.int32)
    result = jitted_accept(drafts, None, logits, SamplingConfig(), None)
    assert result.num_accepted.tolist() == [2, 1, 0]
    assert result.next_token.tolist() == [2, 0, 1]


def test_synthetic_acceptance_has_the_rates_asked_for_whatever_the_drafts_are() -> None:
    """Unconditional rates, over many draws; the token behind what is kept is still the target's own."""
    rates, rows = (0.8, 0.5, 0.5, 0.0), 20_000
    sampling = SamplingConfig(synthetic_acceptance=rates)
    logits = jax.random.normal(jax.random.key(0), (rows, 5, 7))
    drafts = jnp.full((rows, 4), 6, jnp.int32)
    numbers = jax.random.uniform(jax.random.key(1), (rows, 5, 3))
    found = jitted_accept(drafts, None, logits, sampling, numbers)
    kept = np.asarray(found.num_accepted)
    np.testing.assert_allclose([(kept > i).mean() for i in range(4)], rates, atol=0.02)
    best = np.asarray(logits.argmax(-1))
    np.testing.assert_array_equal(found.next_token, best[np.arange(rows), kept])


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.2,), (-0.1,)])
def test_synthetic_rates_never_rise(rates: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="never rise"):
        SamplingConfig(synthetic_acceptance=rates)
    with pytest.raises(InputError, match="one for each draft"):
        SpeculationConfig(3, sampling=SamplingConfig(synthetic_acceptance=(0.5, 0.4)))
