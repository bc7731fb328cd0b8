"""The native mixture-of-experts block against a float64 loop: any routing, every format, independent rows."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops.collectives import LocalExperts
from peagle.ops.expert_matmul import NativeExperts, expert_block, to_panels
from peagle.ops.expert_matmul.native import routed
from peagle.ops.linear import PackedMatrix
from peagle.ops.norm import Norm
from tests.ops.experts import mixture
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

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("kernels")]

EPSILON = 1e-3
LIMIT = 0.9  # low enough that gates and ups are really clamped, on both sides


@dataclasses.dataclass(frozen=True)
class Sizes:
    format: str
    width: int  # D
    hidden: int  # F
    experts: int  # E
    top_k: int


SIZES = {
    "float32": Sizes("float32", 37, 21, 7, 3),
    "bfloat16": Sizes("bfloat16", 39, 23, 5, 2),  # odd inputs to both matrices
    "mxfp4": Sizes("mxfp4", 64, 96, 7, 2),
    "one of one": Sizes("float32", 16, 5, 1, 1),
    "all": Sizes("float32", 18, 13, 6, 6),
    "two panels of router rows": Sizes("bfloat16", 34, 10, 19, 4),
    "several threads": Sizes("mxfp4", 96, 288, 9, 4),
}
OF_FORMATS = ("float32", "bfloat16", "mxfp4")


@dataclasses.dataclass(frozen=True)
class Block:
    """A layer's second half, packed for the kernel, and its values in float64."""

    sizes: Sizes
    norm: np.ndarray
    router: np.ndarray  # [E, D]
    router_bias: np.ndarray
    gate_up: np.ndarray  # [E, 2F, D], gate and up rows interleaved
    gate_up_bias: np.ndarray  # [E, 2F]
    down: np.ndarray  # [E, D, F]
    down_bias: np.ndarray  # [E, D]
    packed: NativeExperts

    def by_definition(self, x: np.ndarray, limit: float = LIMIT) -> np.ndarray:
        """Add the mixture of the normalised rows' experts to the rows. Normalised rows get x's dtype again."""
        dtype, x = x.dtype, x.astype(np.float64)
        y = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPSILON) * self.norm
        y = y if dtype == np.float32 else y.astype(np.float32).astype(dtype).astype(np.float64)
        # a plain sum, since BLAS may sum equal rows differently
        logits = (y[:, None] * self.router).sum(axis=2) + self.router_bias
        experts = list(zip(self.gate_up, self.gate_up_bias, self.down, self.down_bias, strict=True))
        return x + mixture(y, logits, self.sizes.top_k, limit, experts.__getitem__)

    @property
    def routing(self) -> tuple[Norm, PackedMatrix, jax.Array]:
        """Norm, router and its bias."""
        norm = Norm(jnp.asarray(self.norm, jnp.float32), EPSILON)
        return norm, pack(self.router.astype(np.float32)), jnp.asarray(self.router_bias, jnp.float32)

    def run(self, x: np.ndarray, limit: float = LIMIT, positions: jax.Array | None = None) -> jax.Array:
        y, of_next_norm = expert_block(jnp.asarray(x), *self.routing, self.packed, self.sizes.top_k, limit, positions)
        assert of_next_norm is None
        return y

    def expect_definition(self, x: np.ndarray, limit: float = LIMIT) -> None:
        np.testing.assert_allclose(self.run(x, limit), self.by_definition(x, limit), atol=2 * EXACT)


def random_block(
    sizes: Sizes, seed: int = 0, router: np.ndarray | None = None, bias: np.ndarray | None = None
) -> Block:
    """Draw a block. router, bias: instead of drawn ones."""
    rng = np.random.default_rng(seed)
    experts, width, hidden = sizes.experts, sizes.width, sizes.hidden
    gate_up, gate_up_values = MATRICES[sizes.format](rng, experts, 2 * hidden, width)
    down, down_values = MATRICES[sizes.format](rng, experts, width, hidden)
    gate_up_bias = rng.standard_normal((experts, 2 * hidden), np.float32)
    down_bias = rng.standard_normal((experts, width), np.float32)
    norm = rng.standard_normal(width, np.float32)
    own_router = 0.5 * rng.standard_normal((experts, width), np.float32)
    own_bias = rng.standard_normal(experts, np.float32)
    packed = NativeExperts(
        gate_up=pack(gate_up, to_panels),
        gate_up_bias=jnp.asarray(to_panels(gate_up_bias)),
        down=pack(down),
        down_bias=jnp.asarray(down_bias),
        hidden=hidden,
    )
    routing = (own_router if router is None else router, own_bias if bias is None else bias)
    router, bias = (part.astype(np.float64) for part in routing)
    return Block(sizes, norm, router, bias, gate_up_values, gate_up_bias, down_values, down_bias, packed)


def random_rows(sizes: Sizes, rows: int, seed: int = 1, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, sizes.width), np.float32).astype(dtype)


@pytest.mark.parametrize("name", SIZES)
def test_any_number_of_rows_is_the_definition(name: str) -> None:
    """With clamps that act."""
    block, x = random_block(SIZES[name]), random_rows(SIZES[name], 70)
    expected = block.by_definition(x)
    assert np.abs(expected - block.by_definition(x, limit=1e9)).max() > 0.05
    all_rows = (*range(1, 18), 70) if name in OF_FORMATS else (1, 5, 70)
    for rows, out in zip(all_rows, results_of(block.run, [(x[:rows],) for rows in all_rows]), strict=True):
        np.testing.assert_allclose(out, expected[:rows], atol=2 * EXACT, err_msg=f"{rows} rows")


@pytest.mark.parametrize("name", OF_FORMATS)
def test_bfloat16_rows_give_the_definition(name: str) -> None:
    """Hidden values are rounded, and the result."""
    block = random_block(SIZES[name])
    for rows in (1, 9):
        x = random_rows(SIZES[name], rows, dtype=ml_dtypes.bfloat16)
        out = block.run(x)
        assert out.dtype == jnp.bfloat16
        expected = block.by_definition(x)
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=ROUNDED, atol=ROUNDED)


# Routing


def test_ragged_routing() -> None:
    """Experts with 0, 1, 7, 8, 9 and 17 rows, shuffled; tiles have eight rows. Feature e of a row selects expert e."""
    sizes = dataclasses.replace(SIZES["float32"], top_k=1)
    router = 8.0 * np.eye(sizes.experts, sizes.width, dtype=np.float32)
    block = random_block(sizes, 6, router=router, bias=np.zeros(sizes.experts))
    block = dataclasses.replace(block, norm=np.ones_like(block.norm))
    chosen = np.random.default_rng(7).permutation(np.repeat([0, 2, 3, 5, 6], [8, 1, 17, 7, 9]))
    x = random_rows(sizes, len(chosen))
    x[range(len(chosen)), chosen] += 10.0
    block.expect_definition(x)


@pytest.mark.parametrize("equal", [(0, 1, 2, 3, 4, 5, 6), (2, 3, 5, 6), (0, 4, 6)])
def test_ties_go_to_the_lower_expert(equal: tuple[int, ...]) -> None:
    """Experts with equal router rows have equal logits, which are the largest."""
    sizes, rng = SIZES["float32"], np.random.default_rng(8)
    router, bias = 0.1 * rng.standard_normal((sizes.experts, sizes.width)).astype(np.float32), np.zeros(sizes.experts)
    router[list(equal)], bias[list(equal)] = router[equal[0]], 5.0
    random_block(sizes, 9, router=router, bias=bias).expect_definition(random_rows(sizes, 9))


def test_extreme_router_logits_stay_finite() -> None:
    bias = np.array([3e38, -3e38, 1e4, -1e4, 0.0, 3e38, 90.0])
    random_block(SIZES["float32"], 10, bias=bias).expect_definition(random_rows(SIZES["float32"], 3))


def test_extreme_scales_are_exact() -> None:
    """Scale byte 0 counts as zero; a gate of any size is clamped, or counts as zero."""
    sizes = SIZES["mxfp4"]
    rng = np.random.default_rng(11)
    (blocks, scales), _ = MATRICES["mxfp4"](rng, sizes.experts, 2 * sizes.hidden, sizes.width)
    scales[:, :, 1] = rng.choice([0, 1, 127, 240], scales[:, :, 1].shape)
    block = random_block(sizes)
    block = dataclasses.replace(
        block,
        gate_up=mxfp4_values(blocks, scales),
        packed=block.packed.replace(gate_up=pack((blocks, scales), to_panels)),
    )
    with np.errstate(over="ignore"):
        block.expect_definition(random_rows(sizes, 5))


# A row's bits are its own


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, np.float32) for name in (*OF_FORMATS, "several threads")),
        *((name, ml_dtypes.bfloat16) for name in OF_FORMATS),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_others(name: str, dtype: type) -> None:
    block, x = random_block(SIZES[name], 12), random_rows(SIZES[name], 70, dtype=dtype)
    alone = one_at_a_time(block.run, x)
    rng = np.random.default_rng(13)
    chosen = [rng.permutation(70)[:rows] for rows in (*range(1, 17), 70)]
    for some, out in zip(chosen, results_of(block.run, [(x[some],) for some in chosen]), strict=True):
        assert_same_bits(out, alone[some], f"{len(some)} rows")


@pytest.mark.parametrize("name", OF_FORMATS)
def test_inactive_rows_are_zero_and_change_no_others_bits(name: str) -> None:
    """With any content and in any number."""
    block, x, rng = random_block(SIZES[name], 14), random_rows(SIZES[name], 19), np.random.default_rng(15)
    positions = [rng.integers(low, high, 19, np.int32) for low, high in ((-1, 1), (-9, 3), (0, 1), (-2, 0))]
    calls = [(np.where(at[:, None] < 0, np.float32(np.nan), x), at) for at in positions]
    whole = np.asarray(block.run(x))
    for at, out in zip(positions, results_of(lambda x, at: block.run(x, positions=at), calls), strict=True):
        assert_same_bits(np.asarray(out)[at >= 0], whole[at >= 0])
        assert not np.any(np.asarray(out)[at < 0])


@pytest.mark.parametrize("name", OF_FORMATS)
@pytest.mark.parametrize("rows", [1, 19])
def test_parts_of_the_experts_sum_to_the_whole(name: str, rows: int) -> None:
    """Each part without the residual, and a part that no row selects is zero."""
    block, x = random_block(SIZES[name], 16), random_rows(SIZES[name], rows)
    cuts = (0, 1, 3, SIZES[name].experts)
    total = x.astype(np.float64)
    for first, end in itertools.pairwise(cuts):
        experts = jax.tree.map(lambda leaf, part=slice(first, end): leaf[part], block.packed)
        total += np.asarray(run_part(block, x, experts, LocalExperts(jnp.int32(first), end - first)))
    np.testing.assert_allclose(total, block.by_definition(x), atol=4 * EXACT)
    nobody = np.zeros(SIZES[name].experts)
    nobody[0] = -1e4
    avoided = random_block(SIZES[name], 16, bias=nobody)
    experts = jax.tree.map(lambda leaf: leaf[:1], avoided.packed)
    assert not np.any(run_part(avoided, x, experts, LocalExperts(jnp.int32(0), 1)))


def run_part(block: Block, x: np.ndarray, experts: NativeExperts, local: LocalExperts) -> jax.Array:
    operands = jnp.asarray(x), *block.routing, experts, block.sizes.top_k, LIMIT
    return routed(*operands, local=local, residual=False)
