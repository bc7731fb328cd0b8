"""Every layout, at any number of rows, computes one function: the float64 loop below."""

import dataclasses
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops.collectives import Held
from peagle.ops.expert_matmul import ExpandedExperts, Experts, FusedExperts, PackedExperts, expert_mlp, reference
from peagle.ops.expert_matmul.routing import route_dense, route_top_k
from peagle.ops.mxfp4 import dequantize, quantize
from tests.support.compiling import AS_FOR_USERS

D, F, E, K = 64, 96, 7, 2
LIMIT = 0.9  # low enough that gates and ups are really clamped, on both sides


@dataclasses.dataclass(frozen=True)
class Weights:
    """One layer's experts in a checkpoint's layout: [E, outputs, inputs], gate and up rows interleaved."""

    gate_up: np.ndarray  # [E, 2F, D]
    gate_up_bias: np.ndarray  # [E, 2F]
    down: np.ndarray  # [E, D, F]
    down_bias: np.ndarray  # [E, D]


def random_weights(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)

    def representable(*shape: int) -> np.ndarray:
        return dequantize(*quantize(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5))

    return Weights(
        representable(E, 2 * F, D),
        rng.standard_normal((E, 2 * F), np.float32),
        representable(E, D, F),
        rng.standard_normal((E, D), np.float32),
    )


def packed(w: Weights) -> PackedExperts:
    gate_up_blocks, gate_up_scales = quantize(w.gate_up)
    down_blocks, down_scales = quantize(w.down)
    arrays = (gate_up_blocks, gate_up_scales, w.gate_up_bias, down_blocks, down_scales, w.down_bias)
    return PackedExperts(*map(jnp.asarray, arrays))


def apart(rows: np.ndarray) -> np.ndarray:
    """Reorder to all gates, then all ups, along axis 1."""
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)


def expanded(w: Weights) -> ExpandedExperts:
    arrays = (apart(w.gate_up).swapaxes(1, 2), apart(w.gate_up_bias), w.down.swapaxes(1, 2), w.down_bias)
    return ExpandedExperts(*map(jnp.asarray, arrays))


def fused(w: Weights) -> FusedExperts:
    gate_up = np.concatenate([w.gate_up[:, 0::2].reshape(-1, D), w.gate_up[:, 1::2].reshape(-1, D)]).T
    bias = np.concatenate([w.gate_up_bias[:, 0::2].ravel(), w.gate_up_bias[:, 1::2].ravel()])
    down = np.concatenate([expert.T for expert in w.down])
    return FusedExperts(*map(jnp.asarray, (gate_up, bias, down, w.down_bias)))


LAYOUTS: dict[str, Callable[[Weights], Experts]] = {"packed": packed, "expanded": expanded, "fused": fused}


def by_definition(w: Weights, x: np.ndarray, router_logits: np.ndarray, limit: float = LIMIT) -> np.ndarray:
    """Compute transformers' GPT-OSS, one token and one selected expert at a time; of equal logits the lower expert
    wins."""
    x, logits = x.astype(np.float64), router_logits.astype(np.float64)
    out = np.zeros_like(x)
    for t in range(len(x)):
        selected = sorted(range(E), key=lambda e: (-logits[t, e], e))[:K]
        router = np.exp(logits[t, selected] - logits[t, selected].max())
        router /= router.sum()
        for weight, e in zip(router, selected, strict=True):
            h = w.gate_up[e].astype(np.float64) @ x[t] + w.gate_up_bias[e]
            gate, up = np.minimum(h[0::2], limit), np.clip(h[1::2], -limit, limit)
            hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[t] += weight * (w.down[e].astype(np.float64) @ hidden + w.down_bias[e])
    return out


def rows_and_logits(rows: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, D), np.float32), rng.standard_normal((rows, E), np.float32)


jitted = jax.jit(expert_mlp, static_argnums=(3, 4))
as_for_users = jax.jit(expert_mlp, static_argnums=(3, 4), compiler_options=AS_FOR_USERS)


def run(experts: Experts, x: jax.Array | np.ndarray, logits: np.ndarray) -> np.ndarray:
    return np.asarray(jitted(x, logits, experts, K, LIMIT))


@pytest.mark.parametrize("rows", [1, 4, 150])  # 2 to 300 choices of 7 experts: none, one, or several blocks each
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_are_the_definition(layout: str, rows: int) -> None:
    weights = random_weights()
    x, logits = rows_and_logits(rows)
    np.testing.assert_allclose(run(LAYOUTS[layout](weights), x, logits), by_definition(weights, x, logits), atol=2e-5)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    "form", [reference.all_pairs, reference.each_expert_once, reference.grouped, reference.in_blocks]
)
def test_forms_are_the_definition(form: Callable[..., jax.Array], rows: int) -> None:
    """Called by name here; `expert_mlp` picks all but `grouped` on a GPU."""
    weights = random_weights()
    x, logits = rows_and_logits(rows)
    out = jax.jit(form, static_argnums=(3, 4))(x, logits, packed(weights), K, LIMIT)
    np.testing.assert_allclose(out, by_definition(weights, x, logits), atol=2e-5)


@pytest.mark.parametrize("first", [0.0, 30.0])  # spread, or one expert has all rows and three have none
@pytest.mark.parametrize("layout", ["packed", "expanded"])
def test_blocks_hold_every_choice(layout: str, first: float) -> None:
    """As many rows as fill several blocks of an expert, and leave others without one."""
    weights = random_weights(6)
    x, logits = rows_and_logits(150, 7)
    logits[:, 2] += first
    logits[:, [0, 3, 6]] -= first
    out = jax.jit(reference.in_blocks, static_argnums=(3, 4))(x, logits, LAYOUTS[layout](weights), K, LIMIT)
    np.testing.assert_allclose(out, by_definition(weights, x, logits), atol=2e-5)


FORMS: dict[str, Callable[..., jax.Array]] = {
    "api": expert_mlp,
    "all pairs": reference.all_pairs,
    "each expert once": reference.each_expert_once,
    "grouped": reference.grouped,
    "in blocks": reference.in_blocks,
}


@pytest.mark.parametrize(("layout", "form"), [*((each, "api") for each in LAYOUTS), *(("packed", f) for f in FORMS)])
def test_parts_of_the_experts_sum_to_the_whole(layout: str, form: str) -> None:
    weights = random_weights(5)
    x, logits = rows_and_logits(5)
    total = np.zeros_like(x)

    @jax.jit
    def part(x: jax.Array, logits: jax.Array, experts: Experts, first: jax.Array) -> jax.Array:
        held = Held(first, experts.num_experts)
        return FORMS[form](x, logits, experts, K, LIMIT, held=held, dtype=jnp.float32)

    for first, end in ((0, 1), (1, 4), (4, E)):
        some = Weights(*(each[first:end] for each in dataclasses.astuple(weights)))
        total += np.asarray(part(x, logits, LAYOUTS[layout](some), jnp.int32(first)))
    np.testing.assert_allclose(total, by_definition(weights, x, logits), atol=4e-5)


def test_the_clamp_changes_results() -> None:
    """The test above would pass without clamps if nothing were clamped."""
    weights = random_weights()
    x, logits = rows_and_logits(4)
    unclamped = by_definition(weights, x, logits, limit=1e9)
    assert np.abs(unclamped - by_definition(weights, x, logits)).max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ties_go_to_the_lower_expert(layout: str) -> None:
    weights = random_weights(3)
    x, logits = rows_and_logits(4, 4)
    logits[0] = 0.5  # all tie
    logits[1] = [0.0, 1.0, 2.0, 1.0, 1.0, 0.0, 1.0]  # four tie for the second place
    np.testing.assert_allclose(run(LAYOUTS[layout](weights), x, logits), by_definition(weights, x, logits), atol=2e-5)


@pytest.mark.parametrize("first", [30.0, 300.0])  # the second one's weight all but underflows, or does
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_with_all_rows_and_experts_with_none(layout: str, first: float) -> None:
    weights = random_weights(5)
    x, logits = rows_and_logits(2 * reference.BLOCK_ROWS + 3, 6)
    logits[:, 4] = first
    logits[:, 5] = 1 - first
    np.testing.assert_allclose(run(LAYOUTS[layout](weights), x, logits), by_definition(weights, x, logits), atol=2e-5)


# Rows grouped by expert

GROUPED = {"packed": packed, "expanded": expanded}
# a GPU waits for the host at each turn of a loop of dynamic length, so XLA's form is another there
on_cpus = pytest.mark.skipif(jax.default_backend() != "cpu", reason="on CPUs alone XLA computes rows so")
ROWS = 5 * reference.BLOCK_ROWS + 3


def half(experts: Experts) -> Experts:
    """Convert what is not MXFP4 to bfloat16."""
    leaves = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.uint8 else leaf.astype(jnp.bfloat16), experts)
    return cast(Experts, leaves)


def run_at(experts: Experts, x: jax.Array, logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.asarray(jitted(x, logits, experts, K, LIMIT, positions), np.float32)


@on_cpus
@pytest.mark.parametrize("layout", GROUPED)
def test_an_expert_without_rows_is_not_computed(layout: str) -> None:
    weights = random_weights(8)
    x, logits = rows_and_logits(ROWS, 9)
    logits[:, [0, 3, 6]] = -50.0
    expected = by_definition(weights, x, logits)
    weights.gate_up_bias[[0, 3, 6]] = np.nan
    np.testing.assert_allclose(run(GROUPED[layout](weights), x, logits), expected, atol=2e-5)


@on_cpus
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layout", GROUPED)
def test_inactive_rows_are_zero_and_change_no_others_bits(layout: str, dtype: type) -> None:
    experts = GROUPED[layout](random_weights(10))
    experts = half(experts) if dtype == jnp.bfloat16 else experts
    x, logits = rows_and_logits(ROWS, 11)
    whole = run_at(experts, jnp.asarray(x, dtype), logits, np.arange(ROWS, dtype=np.int32))
    rng = np.random.default_rng(12)
    for low, high in ((-1, 1), (-9, 2), (-3, 0)):  # some, most, all inactive
        at = rng.integers(low, high, ROWS, np.int32)
        nan = jnp.asarray(np.where(at[:, None] < 0, np.float32(np.nan), x), dtype)
        out = run_at(experts, nan, np.where(at[:, None] < 0, np.float32(np.nan), logits), at)
        np.testing.assert_array_equal(out[at >= 0], whole[at >= 0])
        assert not out[at < 0].any()


@on_cpus
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param("packed", jnp.float32, marks=pytest.mark.slow),
        ("packed", jnp.bfloat16),
        ("expanded", jnp.float32),
        pytest.param("expanded", jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_others(layout: str, dtype: type) -> None:
    """Neither on their number nor on their order, nor on the row's place in a block."""
    experts = GROUPED[layout](random_weights(13))
    experts = half(experts) if dtype == jnp.bfloat16 else experts
    x, logits = rows_and_logits(ROWS, 14)
    logits[:, 2] += 2.0  # several blocks
    rows: np.ndarray = x.astype(dtype)
    whole = np.asarray(as_for_users(rows, logits, experts, K, LIMIT))
    rng = np.random.default_rng(15)
    for count in (4, 16, 17, ROWS):
        some = rng.permutation(ROWS)[:count]
        found = as_for_users(rows[some], logits[some], experts, K, LIMIT)
        np.testing.assert_array_equal(np.asarray(found), whole[some])


def test_both_routings_select_the_same() -> None:
    logits = np.random.default_rng(7).integers(0, 4, (50, E)).astype(np.float32)  # full of ties
    both = jax.jit(lambda x: (route_dense(x, K), route_top_k(x, K)))(logits)
    dense, (ids, weights) = jax.tree.map(np.asarray, both)
    scattered = np.zeros_like(dense)
    np.put_along_axis(scattered, ids, weights, axis=1)
    np.testing.assert_allclose(dense, scattered, rtol=1e-6)
    assert ((dense > 0).sum(axis=1) == K).all()


@pytest.mark.parametrize("rows", [1, 150])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_stays_bfloat16_and_close(layout: str, rows: int) -> None:
    weights = random_weights()
    x, logits = rows_and_logits(rows)
    experts = half(LAYOUTS[layout](weights))
    out = jitted(jnp.asarray(x, jnp.bfloat16), jnp.asarray(logits, jnp.bfloat16), experts, K, LIMIT)
    assert out.dtype == jnp.bfloat16
    rounded = np.asarray(jnp.asarray(logits, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), by_definition(weights, x, rounded), atol=0.06)
