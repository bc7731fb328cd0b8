"""The exact law of a step's output, by integrating the shipped `accept` over its uniform numbers.

Rows of one batch differ in sampling parameters and widths.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.config import SamplingParams
from peagle.engine.accept import Acceptance, accept, accept_by_rate
from peagle.engine.resolved import ResolvedConfig
from peagle.engine.sampling import ACCEPT, TARGET, RowSampling, choose
from peagle.ops.errors import InputError
from peagle.ops.likeliest import NO_TOKEN
from tests.peagle.engine.rows import defined, rows_of

V, K = 3, 2
Law = dict[tuple[int, ...], float]  # of the emitted run
jitted_accept = jax.jit(accept)
by_rate = jax.jit(accept_by_rate, static_argnums=(0, 6))
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


def processed(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Compute the distributions from which such rows are drawn."""
    rows = [defined(row, sampling) for row in logits.reshape(-1, V)]
    return np.stack(rows).reshape(logits.shape)


@dataclasses.dataclass(frozen=True)
class Target:
    """A target's logits: for the first token, after each first token, and after each first two."""

    first: np.ndarray  # [V]
    second: np.ndarray  # [V, V]
    third: np.ndarray  # [V, V, V]

    @classmethod
    def random(cls, rng: np.random.Generator) -> "Target":
        return cls(log(table(rng)), log(table(rng, V)), log(table(rng, V, V)))

    def processed(self, sampling: SamplingParams) -> "Target":
        return Target(*(processed(logits, sampling) for logits in (self.first, self.second, self.third)))

    def behind(self, drafts: tuple[int, int]) -> np.ndarray:
        """[K + 1, V]: the values after 0, 1, .. K of the drafts."""
        return np.stack([self.first, self.second[drafts[0]], self.third[drafts]])

    def law(self) -> np.ndarray:
        """[V, V, V], of three tokens that plain decoding emits, if these are its distributions."""
        return self.first[:, None, None] * self.second[:, :, None] * self.third


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: target, drafts, their distributions [K, V] (None: one-hot), sampling, width."""

    target: Target
    drafts: tuple[int, int]
    q: np.ndarray | None
    sampling: SamplingParams
    width: int


def cells(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(midpoint, width) of every interval that the points cut [0, 1) into."""
    edges = np.unique(np.concatenate([[0.0, 1.0], points[(points > 0) & (points < 1)]]))
    return (edges[1:] + edges[:-1]) / 2, np.diff(edges)


def grid(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Cut the uniform numbers into cells of equal decision: (numbers [cells, K + 1, 3], probabilities)."""
    p = processed(case.target.behind(case.drafts), case.sampling)
    axes = []  # one per uniform number the decision may depend on: (position, purpose, midpoints, widths)
    for i in range(case.width + 1):
        cuts = [np.cumsum(p[i])]
        if case.q is not None and i < case.width:
            residual = np.maximum(p[i] - case.q[i], 0)
            cuts.append(np.cumsum(residual) / max(residual.sum(), 1e-30))
            drafted = case.drafts[i]
            axes.append((i, ACCEPT, *cells(np.array([p[i][drafted] / case.q[i][drafted]]))))
        axes.append((i, TARGET, *cells(np.concatenate(cuts))))
    picks = np.array(list(itertools.product(*[range(len(mid)) for _, _, mid, _ in axes])))
    uniforms, weight = np.full((len(picks), K + 1, 3), 0.5, np.float32), np.ones(len(picks))
    for axis, (position, purpose, mid, width) in enumerate(axes):
        uniforms[:, position, purpose] = mid[picks[:, axis]]
        weight *= width[picks[:, axis]]
    return uniforms, weight


def emitted_laws(cases: Sequence[Case]) -> list[Law]:
    """Compute the law of the emitted run for each case's drafts; all cells are rows of one batch."""
    grids = [grid(case) for case in cases]
    counts = [len(weight) for _, weight in grids]
    total = sum(counts)
    padded = -(-total // 4096) * 4096  # few shapes to compile; rows without a cell weigh nothing
    case_of = np.pad(np.repeat(np.arange(len(cases)), counts), (0, padded - total))

    def rows(values: Sequence[np.ndarray], dtype: type = np.float32) -> jax.Array:
        return jnp.asarray(np.stack(values).astype(dtype)[case_of])

    qs = [case.q for case in cases if case.q is not None]
    assert len(qs) in (0, len(cases))
    uniforms = np.pad(np.concatenate([numbers for numbers, _ in grids]), ((0, padded - total), (0, 0), (0, 0)))
    asked = rows_of([case.sampling for case in cases])
    result = jitted_accept(
        rows([np.array(case.drafts) for case in cases], np.int32),
        rows(qs) if qs else None,
        rows([case.target.behind(case.drafts) for case in cases]),
        rows([np.array(case.width) for case in cases], np.int32),
        jax.tree.map(lambda leaf: leaf[case_of], asked),
        jnp.asarray(uniforms),
    )
    accepted, tokens = np.asarray(result.num_accepted), np.asarray(result.next_token)
    laws: list[Law] = [{} for _ in cases]
    masses = np.concatenate([weight for _, weight in grids])
    for place, mass in enumerate(masses):
        case, law = cases[case_of[place]], laws[case_of[place]]
        assert 0 <= accepted[place] <= case.width
        run = (*case.drafts[: accepted[place]], int(tokens[place]))
        law[run] = law.get(run, 0.0) + mass
    for law in laws:
        assert abs(sum(law.values()) - 1) < 1e-9
    return laws


def continued(law: Law, p: Target) -> np.ndarray:
    """Compute the law of the first K + 1 tokens if plain decoding continues after the run."""
    joint = np.zeros((V, V, V))
    for run, mass in law.items():
        if len(run) == 3:
            joint[run] += mass
        elif len(run) == 2:
            joint[run] += mass * p.third[run]
        else:
            joint[run[0]] += mass * p.second[run[0]][:, None] * p.third[run[0]]
    return joint


@pytest.mark.parametrize("seed", range(4))
def test_sampled_drafts_emit_exactly_the_targets_law(seed: int) -> None:
    """For all sampling parameters and widths in one batch, with drafts of the drafter's law (greedy: a point mass)."""
    rng = np.random.default_rng(seed)
    target, drafter = Target.random(rng), log(table(rng, K))
    if seed == 0:
        drafter[0] = target.first  # equal distributions: if nothing is cut off, nothing is ever rejected
    cases, masses = [], []
    for sampling, width in itertools.product(ASKED, range(K + 1)):
        q = processed(drafter, dataclasses.replace(sampling, top_k=0, top_p=1.0, min_p=0.0))
        for drafts in itertools.product(range(V), repeat=K):
            if mass := q[0][drafts[0]] * q[1][drafts[1]]:
                cases.append(Case(target, drafts, q, sampling, width))
                masses.append(mass)
    joints: dict[tuple[SamplingParams, int], np.ndarray] = {}
    for case, mass, law in zip(cases, masses, emitted_laws(cases), strict=True):
        part = mass * continued(law, target.processed(case.sampling))
        at = (case.sampling, case.width)
        joints[at] = joints.get(at, 0.0) + part
    assert len(joints) == len(ASKED) * (K + 1)
    for (sampling, width), joint in joints.items():
        expected = target.processed(sampling).law()
        np.testing.assert_allclose(joint, expected, atol=1e-6, err_msg=f"{sampling}, width {width}")


@pytest.mark.parametrize("seed", range(3))
def test_one_hot_drafts_emit_exactly_the_targets_law_whatever_they_are(seed: int) -> None:
    """For all drafts, sampling parameters and widths in one batch."""
    target = Target.random(np.random.default_rng(seed + 10))
    every = itertools.product(itertools.product(range(V), repeat=K), ASKED, range(K + 1))
    cases = [Case(target, drafts, None, sampling, width) for drafts, sampling, width in every]
    for case, law in zip(cases, emitted_laws(cases), strict=True):
        p = target.processed(case.sampling)
        np.testing.assert_allclose(continued(law, p), p.law(), atol=1e-6, err_msg=str(case))


def random_step(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(drafts [B, K], their distributions, logits, uniform numbers)."""
    rng = np.random.default_rng(seed)
    q = table(rng, rows, K)
    drafts = np.array([[rng.choice(V, p=one) for one in row] for row in q], np.int32)
    return drafts, q.astype(np.float32), log(table(rng, rows, K + 1)), rng.random((rows, K + 1, 3), np.float32)


def many_rows() -> tuple[np.ndarray, RowSampling]:
    """Make (widths, sampling parameters) of a few hundred rows."""
    pairs = list(itertools.product(range(K + 1), ASKED)) * 20
    return np.array([width for width, _ in pairs], np.int32), rows_of([sampling for _, sampling in pairs])


@pytest.mark.parametrize("one_hot", [False, True])
def test_what_lies_behind_the_width_decides_nothing(one_hot: bool) -> None:
    """Drafts from the width on, their distributions, and logits and numbers of later rows."""
    widths, asked = many_rows()
    rows, place = len(widths), np.arange(K + 1)
    (drafts, q, logits, numbers), others = random_step(0, rows), random_step(1, rows)

    def run(drafts: np.ndarray, q: np.ndarray, logits: np.ndarray, numbers: np.ndarray) -> Acceptance:
        found: Acceptance = jitted_accept(drafts, None if one_hot else q, logits, widths, asked, numbers)
        return found

    beyond = place[None, :] > widths[:, None]  # of rows; draft i is judged by row i
    found = run(drafts, q, logits, numbers)
    changed = run(
        np.where(place[None, :K] >= widths[:, None], others[0], drafts),
        np.where((place[None, :K] >= widths[:, None])[..., None], others[1], q),
        np.where(beyond[..., None], others[2], logits),
        np.where(beyond[..., None], others[3], numbers),
    )
    np.testing.assert_array_equal(changed.num_accepted, found.num_accepted)
    np.testing.assert_array_equal(changed.next_token, found.next_token)
    for width in range(K + 1):
        assert set(np.asarray(found.num_accepted)[widths == width]) == set(range(width + 1))


@pytest.mark.parametrize("one_hot", [False, True])
def test_logits_that_are_not_finite_accept_nothing_and_hurt_no_other_row(one_hot: bool) -> None:
    widths, asked = many_rows()
    drafts, q, logits, numbers = random_step(2, len(widths))
    given = None if one_hot else q
    found = jitted_accept(drafts, given, logits, widths, asked, numbers)
    broken = logits.copy()
    broken[::3, 0, 1] = np.nan  # the row that judges the first draft
    broken[1::3, :, 2] = np.inf
    after = jitted_accept(drafts, given, broken, widths, asked, numbers)
    for kind in (0, 1):
        np.testing.assert_array_equal(after.num_accepted[kind::3], 0)
        np.testing.assert_array_equal(after.next_token[kind::3], NO_TOKEN)
    np.testing.assert_array_equal(after.num_accepted[2::3], found.num_accepted[2::3])
    np.testing.assert_array_equal(after.next_token[2::3], found.next_token[2::3])
    assert (np.asarray(found.next_token) >= 0).all()


def test_a_draft_of_zero_probability_is_rejected_even_at_uniform_zero() -> None:
    p = np.array([[[0.0, 0.5, 0.5], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]])
    q = np.array([[[1.0, 0.0, 0.0], [0.4, 0.3, 0.3]]])
    result = jitted_accept(
        jnp.asarray([[0, 0]], jnp.int32),
        jnp.asarray(q, jnp.float32),
        jnp.asarray(log(p)),
        jnp.asarray([K], jnp.int32),
        rows_of([PLAIN]),
        jnp.zeros((1, K + 1, 3), jnp.float32),
    )
    assert int(result.num_accepted[0]) == 0
    assert int(result.next_token[0]) == 1


def test_greedy_accepts_the_longest_agreeing_prefix() -> None:
    """As far as its drafts are verified, and no further."""
    logits = jnp.asarray([[[0, 5, 0], [5, 0, 0], [0, 0, 5]]] * 5, jnp.float32)
    drafts = jnp.asarray([[1, 0], [1, 2], [0, 0], [1, 0], [1, 0]], jnp.int32)
    widths = jnp.asarray([2, 2, 2, 1, 0], jnp.int32)
    result = jitted_accept(drafts, None, logits, widths, rows_of([GREEDY] * 5), None)
    assert result.num_accepted.tolist() == [2, 1, 0, 1, 0]
    assert result.next_token.tolist() == [2, 0, 1, 0, 1]


def test_synthetic_acceptance_has_the_rates_asked_for_whatever_the_drafts_are() -> None:
    """Unconditional rates, over many draws; the token after the kept drafts is the target's own."""
    rates, rows = (0.8, 0.5, 0.5, 0.0), 20_000
    logits = jax.random.normal(jax.random.key(0), (rows, 5, 7))
    drafts = jnp.full((rows, 4), 6, jnp.int32)
    numbers = jax.random.uniform(jax.random.key(1), (rows, 5, 3))
    widths = jnp.arange(rows, dtype=jnp.int32) % 2 + 3  # 3 or 4
    asked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows,)), rows_of([GREEDY]))
    found = by_rate(rates, drafts, logits, widths, asked, numbers, False)
    kept = np.asarray(found.num_accepted)
    np.testing.assert_allclose([(kept > i).mean() for i in range(4)], rates, atol=0.02)
    best = np.asarray(logits.argmax(-1))
    np.testing.assert_array_equal(found.next_token, best[np.arange(rows), kept])
    narrow = by_rate(rates, drafts, logits, widths - 3, asked, numbers, False)  # 0 or 1
    np.testing.assert_array_equal(narrow.num_accepted, np.minimum(kept, np.arange(rows) % 2))


def test_behind_synthetic_acceptance_stands_a_draw_of_the_row_that_asks_for_one() -> None:
    """Greedy rows beside it choose their argmax."""
    widths, asked = many_rows()
    drafts, _, logits, numbers = random_step(4, len(widths))
    found = by_rate((0.7, 0.4), drafts, logits, widths, asked, numbers, True)
    kept = np.asarray(found.num_accepted)
    chosen = np.asarray(jax.jit(choose)(logits, asked, numbers[..., TARGET]))
    np.testing.assert_array_equal(found.next_token, chosen[np.arange(len(widths)), kept])
    for width in range(K + 1):
        assert set(kept[widths == width]) == set(range(width + 1))


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.2,), (-0.1,)])
def test_synthetic_rates_never_rise(rates: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="never rise"):
        ResolvedConfig(synthetic_acceptance=rates)
    with pytest.raises(InputError, match="one for each draft"):
        ResolvedConfig(3, synthetic_acceptance=(0.5, 0.4))
