"""Experts in XLA and in the kernels for GPUs and TPUs: every layout computes the float64 definition of experts.py.

The native kernels compute their own layout, with norm and router: tests/ops/native/test_experts.py."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops import cuda, tpu
from peagle.ops.collectives import LocalExperts
from peagle.ops.expert_matmul import (
    ExpandedExperts,
    Experts,
    FusedExperts,
    PackedExperts,
    expert_block,
    expert_mlp,
    reference,
    tpu_experts,
)
from peagle.ops.expert_matmul.routing import route_dense, route_top_k
from peagle.ops.expert_matmul.tpu import FEW, MOST
from peagle.ops.mxfp4 import dequantize
from peagle.ops.norm import Norm
from tests.ops.experts import mixture
from tests.support.compiling import AS_FOR_USERS

pytestmark = pytest.mark.compile

EPSILON = 1e-3  # large enough to change results
LIMIT = 0.9  # low enough that gates and ups are really clamped, on both sides


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a layer: E experts, k of them for each row, of widths D and F."""

    experts: int = 7
    top_k: int = 2
    width: int = 64
    hidden: int = 96


SIZES = Sizes()
ROWS = 5 * reference.BLOCK_ROWS + 3


@dataclasses.dataclass(frozen=True)
class Weights:
    """One layer's experts in a checkpoint's layout: gate and up rows interleaved. Biases are bfloat16's values."""

    gate_up: tuple[np.ndarray, np.ndarray]  # (blocks, scales) of MXFP4, [E, 2F, D]
    gate_up_bias: np.ndarray  # [E, 2F]
    down: tuple[np.ndarray, np.ndarray]  # [E, D, F]
    down_bias: np.ndarray  # [E, D]

    def of(self, experts: slice) -> "Weights":
        """Keep some of the experts."""
        return jax.tree.map(lambda leaf: leaf[experts], self)  # type: ignore[no-any-return]


jax.tree_util.register_dataclass(Weights)


def random_weights(sizes: Sizes = SIZES, scales: tuple[int, int] = (119, 124), seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = rng.integers(0, 256, (sizes.experts, outputs, inputs // 32, 16), np.uint8)
        return blocks, rng.integers(scales[0], scales[1] + 1, blocks.shape[:-1], np.uint8)

    def bias(outputs: int) -> np.ndarray:
        values = rng.standard_normal((sizes.experts, outputs), np.float32)
        return values.astype(jnp.bfloat16).astype(np.float32)

    gate_up, down = matrix(2 * sizes.hidden, sizes.width), matrix(sizes.width, sizes.hidden)
    return Weights(gate_up, bias(2 * sizes.hidden), down, bias(sizes.width))


def rows_and_logits(rows: int, sizes: Sizes = SIZES, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, sizes.width), np.float32).astype(jnp.bfloat16).astype(np.float32)
    return x, rng.standard_normal((rows, sizes.experts), np.float32)


def by_definition(
    w: Weights,
    x: np.ndarray,
    logits: np.ndarray,
    top_k: int = SIZES.top_k,
    limit: float = LIMIT,
    dtype: Any = np.float64,
) -> np.ndarray:
    gate_up, down = (dequantize(*matrix).astype(np.float64) for matrix in (w.gate_up, w.down))
    experts = list(zip(gate_up, w.gate_up_bias, down, w.down_bias, strict=True))
    return mixture(x, logits, top_k, limit, experts.__getitem__, dtype)


def packed(w: Weights) -> PackedExperts:
    return PackedExperts(*map(jnp.asarray, (*w.gate_up, w.gate_up_bias, *w.down, w.down_bias)))


def apart(rows: np.ndarray) -> np.ndarray:
    """Reorder to all gates, then all ups, along axis 1."""
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)


def expanded(w: Weights) -> ExpandedExperts:
    gate_up, down = apart(dequantize(*w.gate_up)).swapaxes(1, 2), dequantize(*w.down).swapaxes(1, 2)
    return ExpandedExperts(*map(jnp.asarray, (gate_up, apart(w.gate_up_bias), down, w.down_bias)))


def fused(w: Weights) -> FusedExperts:
    gate_up, bias = dequantize(*w.gate_up), w.gate_up_bias
    gates_and_ups = np.concatenate([gate_up[:, first::2].reshape(-1, gate_up.shape[2]) for first in (0, 1)]).T
    biases = np.concatenate([bias[:, first::2].ravel() for first in (0, 1)])
    down = np.concatenate([expert.T for expert in dequantize(*w.down)])
    return FusedExperts(*map(jnp.asarray, (gates_and_ups, biases, down, w.down_bias)))


@dataclasses.dataclass(frozen=True)
class Form:
    """A layout of experts, the dtype of all that is not MXFP4, and what computes it."""

    layout: Callable[[Weights], Experts]
    dtype: Any = np.float32
    in_cuda: bool = False
    on_tpu: bool = False

    def experts(self, w: Weights) -> Experts:
        def converted(leaf: jax.Array) -> jax.Array:
            return leaf if leaf.dtype == jnp.uint8 else leaf.astype(self.dtype)

        experts = jax.tree.map(converted, self.layout(w))
        return tpu_experts(experts) if self.on_tpu else experts  # type: ignore[no-any-return]

    def run(
        self, w: Weights, x: np.ndarray, logits: np.ndarray, positions: np.ndarray | None = None, **options: Any
    ) -> np.ndarray:
        """Compute the rows; the result has their dtype."""
        options = {"top_k": SIZES.top_k, "limit": LIMIT} | options
        implementation = "cuda" if self.in_cuda else None
        rows, at = jnp.asarray(x, self.dtype), None if positions is None else jnp.asarray(positions)
        out = run(rows, jnp.asarray(logits), self.experts(w), positions=at, implementation=implementation, **options)
        assert out.dtype == self.dtype
        return np.asarray(out, np.float32)

    def expect_definition(
        self, w: Weights, x: np.ndarray, logits: np.ndarray, top_k: int = SIZES.top_k, **options: Any
    ) -> None:
        """Allow for rounding: of a result in bfloat16, and a hidden value may round the other way."""
        expected = by_definition(w, x, logits, top_k, dtype=self.dtype, **options)
        output, largest = self.run(w, x, logits, top_k=top_k, **options), np.abs(expected).max()
        error = {"rtol": 2**-7, "atol": (1 if self.in_cuda or self.on_tpu else 4) * 2**-8 * largest}
        np.testing.assert_allclose(output, expected, **({"atol": 2e-5} if self.dtype == np.float32 else error))


@functools.partial(jax.jit, static_argnames=("top_k", "limit", "implementation"))
def run(x: jax.Array, logits: jax.Array, experts: Experts, *, top_k: int, limit: float, **options: Any) -> jax.Array:
    return expert_mlp(x, logits, experts, top_k, limit, **options)


IN_XLA = {"packed": Form(packed), "expanded": Form(expanded), "fused": Form(fused)}
IN_BFLOAT16 = {f"{name}, bfloat16": dataclasses.replace(form, dtype=jnp.bfloat16) for name, form in IN_XLA.items()}
IN_CUDA = {"CUDA": Form(packed, jnp.bfloat16, in_cuda=True)}
ON_TPUS = {"TPU": Form(packed, jnp.bfloat16, on_tpu=True)}
FORMS: Mapping[str, Form] = IN_XLA | IN_BFLOAT16 | IN_CUDA | ON_TPUS
# XLA skips rows and experts of these on CPUs; a GPU waits for the host at each turn of a loop of dynamic length
GROUPED = [name for name in FORMS if not name.startswith("fused")]
IN_KERNELS = [*IN_CUDA, *ON_TPUS]
on_cpus = pytest.mark.skipif(jax.default_backend() != "cpu", reason="on CPUs alone XLA computes rows so")


@pytest.fixture
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    """Compute experts in a form; the kernels run on a GPU or a TPU, or on the CPU."""
    monkeypatch.setattr(tpu, "interpreted", jax.default_backend() != "tpu")
    if request.param in IN_CUDA and jax.default_backend() != "gpu":
        request.getfixturevalue("opened")
        monkeypatch.setattr(cuda, "status", lambda: (True, "CUDA"))
    return FORMS[request.param]


# (rows, sizes)
ANY_ROWS = [(rows, SIZES) for rows in (1, 4, 150)]  # 2 to 300 choices of 7 experts: none, one, or several blocks each
OF_CUDA = [
    (1, Sizes(32, 4, 160, 96)),  # ragged: blocks that do not fill a chunk, chunks that do not fill all warps
    (2, Sizes(5, 2, 32, 32)),  # one block
    (7, Sizes(7, 2, 256, 32)),
    (8, Sizes(40, 3, 96, 160)),  # experts beyond the first word of bits
    (9, Sizes(3, 3, 64, 64)),  # all rows select all experts; two tiles of rows
    (16, Sizes(6, 1, 96, 32)),
    (17, Sizes(4, 2, 64, 32)),
    (64, Sizes(9, 4, 64, 32)),
    (3, Sizes(4, 2, 1632, 32)),  # several rounds of loads in flight
    (65, Sizes(9, 3, 96, 160)),  # many rows: the fewest; a panel of 64 outputs that is not filled
    (150, Sizes(2, 2, 64, 32)),  # several tiles an expert
    (40, Sizes(40, 1, 1632, 32)),  # a row an expert, or none
]
OF_TPUS = [
    (2, Sizes(5, 2, 1088, 32)),  # many parts of gate and up; outputs in several chunks; half a group of inputs
    (40, Sizes(7, 2, 64, 160)),  # experts of few rows and of more, which take several products
    (MOST + 8, Sizes(2, 2, 64, 32)),  # many rows: two blocks, several tiles of an expert
]


@pytest.mark.parametrize(
    ("form", "rows", "sizes"),
    [
        *((name, *case) for name in IN_XLA for case in ANY_ROWS),
        *((name, *ANY_ROWS[-1]) for name in IN_BFLOAT16),
        *((name, *case) for name in IN_CUDA for case in OF_CUDA),
        *((name, *case) for name in ON_TPUS for case in OF_TPUS),
    ],
    indirect=["form"],
)
def test_it_is_the_definition(form: Form, rows: int, sizes: Sizes) -> None:
    """With clamps that act."""
    weights, (x, logits) = random_weights(sizes), rows_and_logits(rows, sizes)
    form.expect_definition(weights, x, logits, top_k=sizes.top_k)
    clamped, free = (by_definition(weights, x, logits, sizes.top_k, limit) for limit in (LIMIT, 1e9))
    assert np.abs(clamped - free).max() > 0.05


def routed_to(form: reference.Form) -> Callable[..., jax.Array]:
    def compute(
        x: jax.Array, logits: jax.Array, experts: Experts, top_k: int, limit: float, local: LocalExperts | None = None
    ) -> jax.Array:
        return form(x, route_top_k(logits, top_k, local), experts, limit)

    return compute


OF_REFERENCE: dict[str, Callable[..., jax.Array]] = {
    "all pairs": routed_to(reference.all_pairs),
    "all experts in turn": routed_to(reference.all_experts_in_turn),
    "grouped": routed_to(reference.grouped),
    "in blocks": routed_to(reference.in_blocks),
}


@pytest.mark.parametrize(
    ("name", "layout", "rows", "skew"),
    [
        *((name, packed, rows, 0.0) for name in OF_REFERENCE for rows in (1, 16)),
        # several blocks of an expert, and experts without one; then one expert has all rows and three have none
        *(("in blocks", layout, 150, skew) for layout in (packed, expanded) for skew in (0.0, 30.0)),
    ],
)
def test_forms_are_the_definition(name: str, layout: Callable[[Weights], Experts], rows: int, skew: float) -> None:
    """By name; `expert_mlp` picks all but `grouped` on a GPU."""
    weights, (x, logits) = random_weights(), rows_and_logits(rows)
    logits[:, 2] += skew
    logits[:, [0, 3, 6]] -= skew
    out = jax.jit(OF_REFERENCE[name], static_argnums=(3, 4))(x, logits, layout(weights), SIZES.top_k, LIMIT)
    np.testing.assert_allclose(out, by_definition(weights, x, logits), atol=2e-5)


@pytest.mark.parametrize(
    ("layout", "compute"),
    [
        *((layout, expert_mlp) for layout in (packed, expanded, fused)),
        *((packed, one) for one in OF_REFERENCE.values()),
    ],
)
def test_parts_of_the_experts_sum_to_the_whole(
    layout: Callable[[Weights], Experts], compute: Callable[..., jax.Array]
) -> None:
    weights, (x, logits) = random_weights(), rows_and_logits(5)

    @jax.jit
    def part(x: jax.Array, logits: jax.Array, experts: Experts, first: jax.Array) -> jax.Array:
        return compute(x, logits, experts, SIZES.top_k, LIMIT, local=LocalExperts(first, experts.num_experts))

    cuts = itertools.pairwise((0, 1, 4, SIZES.experts))
    parts = [part(x, logits, layout(weights.of(slice(first, end))), jnp.int32(first)) for first, end in cuts]
    np.testing.assert_allclose(np.sum(parts, axis=0), by_definition(weights, x, logits), atol=4e-5)


ROUTINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    # expert 4 has all rows, and the weight of 5, their second, all but underflows, or does
    "all to one": lambda logits: np.add(logits, [0, 0, 0, 0, 30, -29, 0]),
    "all to one, underflowing": lambda logits: np.add(logits, [-300, -300, -300, -300, 300, 0, -300]),
    "all different": lambda logits: logits + 50 * np.eye(7)[np.arange(len(logits)) % 7],
    # all in the first row, in the second four for the second place
    "ties": lambda logits: np.concatenate([[[0.5] * 7, [0, 1, 2, 1, 1, 0, 1]], logits[2:]]),
}


@pytest.mark.parametrize("form", [*IN_XLA, *IN_KERNELS], indirect=True)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing_is_the_definition(form: Form, routing: str) -> None:
    x, logits = rows_and_logits(2 * reference.BLOCK_ROWS + 3, seed=6)
    form.expect_definition(random_weights(seed=5), x, ROUTINGS[routing](logits).astype(np.float32))


@pytest.mark.parametrize("form", IN_XLA, indirect=True)
def test_a_block_adds_its_experts_to_the_rows(form: Form) -> None:
    """By its norm and router."""
    weights, rng = random_weights(), np.random.default_rng(2)
    x, norm, router, bias = (
        rng.standard_normal(shape, np.float32)
        for shape in ((5, SIZES.width), SIZES.width, (SIZES.width, SIZES.experts), SIZES.experts)
    )
    normalised = x / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1, keepdims=True) + EPSILON) * norm

    @jax.jit
    def block(x: jax.Array, router: jax.Array, bias: jax.Array, experts: Experts) -> jax.Array:
        y, of_next_norm = expert_block(x, Norm(jnp.asarray(norm), EPSILON), router, bias, experts, SIZES.top_k, LIMIT)
        assert of_next_norm is None
        return y

    y = block(*map(jnp.asarray, (x, router, bias)), form.experts(weights))
    expected = x + by_definition(weights, normalised, normalised @ router + bias)
    np.testing.assert_allclose(y, expected, atol=5e-5)


@on_cpus
@pytest.mark.parametrize("form", ["packed", "expanded"], indirect=True)
def test_an_expert_without_rows_is_not_computed(form: Form) -> None:
    weights, (x, logits) = random_weights(seed=8), rows_and_logits(ROWS, seed=9)
    logits[:, [0, 3, 6]] = -50.0
    expected = by_definition(weights, x, logits)
    weights.gate_up_bias[[0, 3, 6]] = np.nan
    np.testing.assert_allclose(form.run(weights, x, logits), expected, atol=2e-5)


@on_cpus
@pytest.mark.parametrize("form", GROUPED, indirect=True)
def test_inactive_rows_are_zero_and_change_no_others_bits(form: Form) -> None:
    weights, (x, logits) = random_weights(seed=10), rows_and_logits(ROWS, seed=11)
    whole = form.run(weights, x, logits, np.arange(ROWS, dtype=np.int32))
    rng = np.random.default_rng(12)
    for low, high in ((-1, 1), (-9, 2), (-3, 0)):  # some, most, all inactive
        at = rng.integers(low, high, ROWS, np.int32)
        nan = (np.where(at[:, None] < 0, np.float32(np.nan), values) for values in (x, logits))
        out = form.run(weights, *nan, at)
        np.testing.assert_array_equal(out[at >= 0], whole[at >= 0])
        assert not out[at < 0].any()


@on_cpus
@pytest.mark.parametrize(
    "form",
    [
        pytest.param("packed", marks=pytest.mark.slow),
        "packed, bfloat16",
        "expanded",
        pytest.param("expanded, bfloat16", marks=pytest.mark.slow),
        *IN_KERNELS,
    ],
    indirect=True,
)
def test_a_rows_bits_do_not_depend_on_the_others(form: Form) -> None:
    """Neither on their number nor on their order, nor on the row's place in a block; so verifying computes decoding's
    bits. In XLA as it is compiled for users."""
    x, logits = rows_and_logits(170 if form.in_cuda else FEW if form.on_tpu else ROWS, seed=14)
    logits[:, 2] += 2.0  # several blocks
    experts, rows = form.experts(random_weights(seed=13)), x.astype(form.dtype)
    implementation = "cuda" if form.in_cuda else None
    compute = functools.partial(expert_mlp, top_k=SIZES.top_k, swiglu_limit=LIMIT, implementation=implementation)
    compiled = jax.jit(compute, compiler_options=None if form.on_tpu else AS_FOR_USERS)
    whole = np.asarray(compiled(rows, logits, experts))
    rng = np.random.default_rng(15)
    # in CUDA tiles of one product, two, four and eight; many rows
    for count in (1, 8, 9, 17, 33) if form.in_cuda else (1, 9, 33) if form.on_tpu else (4, 17, len(x)):
        some = rng.permutation(len(x))[:count]
        np.testing.assert_array_equal(np.asarray(compiled(rows[some], logits[some], experts)), whole[some])


def test_both_routings_select_the_same() -> None:
    logits = np.random.default_rng(7).integers(0, 4, (50, SIZES.experts)).astype(np.float32)  # full of ties
    both = jax.jit(lambda x: (route_dense(x, SIZES.top_k), route_top_k(x, SIZES.top_k)))(logits)
    dense, (ids, weights) = jax.tree.map(np.asarray, both)
    scattered = np.zeros_like(dense)
    np.put_along_axis(scattered, ids, weights, axis=1)
    np.testing.assert_allclose(dense, scattered, rtol=1e-6)
    assert ((dense > 0).sum(axis=1) == SIZES.top_k).all()


# MXFP4's scales


@pytest.mark.parametrize("form", IN_KERNELS, indirect=True)
@pytest.mark.parametrize("scale", [0, 1, 60, 127, 128, 129, 140, 200])
def test_extreme_scales(form: Form, scale: int) -> None:
    """Codes of every scale are exact: if biases alone make the hidden values, outputs are powers of two times sums."""
    sizes = Sizes(3, 1, 64, 32)
    weights, (x, logits) = random_weights(sizes, (scale, scale)), rows_and_logits(2, sizes)
    weights.gate_up[0][:], weights.down_bias[:] = 0, 0
    expected = by_definition(weights, x, logits, 1, dtype=jnp.bfloat16)
    # outside of the kernels XLA on CPU flushes denormal numbers to zero
    least = max(2.0**-125, 2**-8 * np.abs(expected).max())
    np.testing.assert_allclose(form.run(weights, x, logits, top_k=1), expected, rtol=2**-7, atol=least)
    assert np.abs(expected).max() > 0


@pytest.mark.parametrize("form", IN_KERNELS, indirect=True)
def test_large_and_small_scales_side_by_side(form: Form) -> None:
    sizes = Sizes(3, 2, 256, 64)
    x, logits = rows_and_logits(5, sizes)
    form.expect_definition(random_weights(sizes, (115, 131)), x / 128, logits, limit=7.0)
