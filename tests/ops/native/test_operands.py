"""Native products, experts and attention refuse operands, results and attributes that do not fit.

Their results: test_linear.py, test_experts.py and tests/ops/test_paged_attention.py."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops import native
from peagle.ops.linear import PackedMatrix
from tests.ops.native.cases import MATRICES, one_set, pack
from tests.ops.native.test_experts import OF_FORMATS, SIZES, random_block

pytestmark = pytest.mark.usefixtures("kernels")

B, T, N, G, H = 3, 2, 6, 2, 10  # of attention
POOL = (4, 8, G * H)  # four pages of eight
Arrays = Mapping[str, np.ndarray]


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a kernel that fits, to be changed."""

    kernel: str
    operands: Mapping[str, Any]  # in order
    out: tuple[int, ...]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pools: tuple[str, ...] = ()  # operands that are written in place, and results after the first

    def run(
        self,
        replaced: Arrays | None = None,
        out: tuple[int, ...] | None = None,
        dtype: type = np.float32,
        in_place: bool = True,
        **attributes: Any,
    ) -> list[jax.Array]:
        arrays = {name: jnp.asarray(values) for name, values in {**self.operands, **(replaced or {})}.items()}
        pools = [jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in self.pools]
        first = jax.ShapeDtypeStruct(self.out if out is None else out, dtype)
        outputs = {list(self.operands).index(name): number + 1 for number, name in enumerate(self.pools)}
        options = {**self.attributes, **attributes} | ({"in_place": outputs} if self.pools and in_place else {})
        results = native.call(self.kernel, (first, *pools) if pools else first, *arrays.values(), **options)
        return [result.block_until_ready() for result in jax.tree.leaves(results)]


def product(name: str) -> Call:
    """3 rows, 64 inputs, 21 outputs."""
    rng = np.random.default_rng(7)
    packed = pack(MATRICES[name](rng, 21, 64)[0])
    operands = {
        "x": rng.standard_normal((3, 64), np.float32),
        "norm": rng.standard_normal(64, np.float32),
        "panels": packed.data,
        "scales": native.optional(packed.scales, jnp.uint8),
        "bias": rng.standard_normal(21, np.float32),
        "residual": rng.standard_normal((3, 21), np.float32),
        "positions": np.arange(3, dtype=np.int32),
    }
    return Call("linear", operands, (3, 21), {"epsilon": np.float32(1e-3)})


def experts(name: str) -> Call:
    sizes, block = SIZES[name], random_block(SIZES[name])
    gate_up, down, (norm, router, router_bias) = block.packed.gate_up, block.packed.down, block.routing
    assert isinstance(gate_up, PackedMatrix)
    operands = {
        "x": np.ones((3, sizes.width), np.float32),
        "norm": norm.weight,
        "router": router.data,
        "router_bias": router_bias,
        "gate_up": gate_up.data,
        "gate_up_scales": native.optional(gate_up.scales, jnp.uint8),
        "gate_up_bias": block.packed.gate_up_bias,
        "down": down.data,
        "down_scales": native.optional(down.scales, jnp.uint8),
        "down_bias": block.packed.down_bias,
        "positions": np.arange(3, dtype=np.int32),
        "first_local": np.zeros((1,), np.int32),
    }
    counts = {"num_experts": sizes.experts, "top_k": sizes.top_k, "hidden": sizes.hidden}
    attributes = {key: np.int64(value) for key, value in counts.items()}
    floats = {"limit": np.float32(0.9), "epsilon": np.float32(1e-3)}
    return Call("experts", operands, (3, sizes.width), {**attributes, "residual": np.bool_(True), **floats})


def attention(_: str = "") -> Call:
    """Two rows each of three sequences, the last one idle."""
    rng = np.random.default_rng(12)
    write = np.array([[3, 4], [1, 2], [-1, -1]], np.int32)
    operands = {
        "qkv": rng.standard_normal((B, T, (N + 2 * G) * H), np.float32),
        "cos": rng.standard_normal((B, T, H // 2), np.float32),
        "sin": rng.standard_normal((B, T, H // 2), np.float32),
        "key": rng.standard_normal(POOL, np.float32),
        "value": rng.standard_normal(POOL, np.float32),
        "table": np.array([[3], [0], [1]], np.int32),
        "write": write,
        "first": zeros(B, T, dtype=np.int32),
        "last": write,
        "sinks": rng.standard_normal(N, np.float32),
    }
    return Call("paged_attention", operands, (B, T, N * H), pools=("key", "value"))


CALLS: list[tuple[Callable[[str], Call], str]] = [
    *((product, name) for name in MATRICES),
    *((experts, name) for name in OF_FORMATS),
    (attention, ""),
]


@pytest.mark.parametrize(("make", "name"), CALLS)
def test_operands_that_fit_are_accepted(make: Callable[[str], Call], name: str) -> None:
    assert all(np.isfinite(part).all() for part in make(name).run())


def expect_refusal(says: str, call: Call, *changes: Any, **options: Any) -> None:
    # JAX raises some at a program's first run, others later
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=says):
        call.run(*changes, **options)


# A row: the operands that are replaced, what the error says, and arrays that do not fit
INT, HALF, BFLOAT16 = np.int32, np.float16, ml_dtypes.bfloat16
OF_PRODUCTS = [
    ("x", "are not", zeros(3, 2, 32), zeros(4, 64), zeros(3, 64, dtype=INT)),
    ("x", "do not hold", zeros(3, 96), zeros(3, 48)),
    ("norm", "linear: norm", zeros(63), zeros(64, dtype=BFLOAT16)),
    ("panels", "do not hold", zeros(1, 64, 16), zeros(1, 32, 16, 2, dtype=BFLOAT16), zeros(1, 8, 16, dtype=np.uint32)),
    ("panels", "float32, bfloat16, or uint32", zeros(2, 64, 16, dtype=INT), zeros(2, 64, 16, dtype=HALF)),
    ("scales", "do not hold", zeros(2, 1, 16, dtype=np.uint8)),
    ("bias", "linear: bias", zeros(20), zeros(32), zeros(21, dtype=INT)),
    ("residual", "linear: residual", zeros(3, 20), zeros(21, 3), zeros(3, 21, dtype=HALF)),
    ("positions", "linear: positions", zeros(2, dtype=INT), zeros(3)),
]
OF_ATTENTION = [
    ("key", "attention: ", zeros(4, 7, G * H), zeros(*POOL, dtype=BFLOAT16)),
    ("value", "attention: ", zeros(4, 8, H), zeros(*POOL, dtype=HALF), zeros(4, 8, G, H)),
    ("key value", "attention: ", zeros(4, 8, 0), zeros(4, 0, G * H)),
    ("key value", "attention: ", zeros(*POOL, dtype=INT), zeros(*POOL, dtype=BFLOAT16)),
    ("table", "attention: ", zeros(2, 1, dtype=INT), zeros(B, 0, dtype=INT), zeros(B, dtype=INT), zeros(B, 1)),
    *(
        (rows, "attention: ", zeros(B, 3, dtype=INT), zeros(B * T, dtype=INT), zeros(B, T, dtype=np.int16))
        for rows in ("write", "first", "last")
    ),
    ("sinks", "attention: ", zeros(5), zeros(N, dtype=BFLOAT16)),
    ("qkv", "attention: ", zeros(B, T, 99), zeros(B, 1, 100), zeros(2, T, 100), zeros(B * T, 100)),
    ("qkv", "attention: ", zeros(B, T, 100, dtype=INT)),
    ("cos", "attention: ", zeros(B, T, 4), zeros(B, T, 5, dtype=INT)),
    ("sin", "attention: ", zeros(B, T, 10)),
]


@one_set
@pytest.mark.parametrize(
    ("make", "name", "replaced", "says", "arrays"),
    [
        *((product, name, row, says, arrays) for name in MATRICES for row, says, *arrays in OF_PRODUCTS),
        *((attention, "", row, says, arrays) for row, says, *arrays in OF_ATTENTION),
    ],
    ids=lambda part: part if isinstance(part, str) else getattr(part, "__name__", ""),
)
def test_operands_that_do_not_fit_are_refused(
    make: Callable[[str], Call], name: str, replaced: str, says: str, arrays: list[np.ndarray]
) -> None:
    for array in arrays:
        expect_refusal(says, make(name), dict.fromkeys(replaced.split(), array))


@one_set
def test_formats_are_not_confused() -> None:
    packed = product("mxfp4")
    for scales in (zeros(0, dtype=np.uint8), zeros(2, 2, 16, dtype=np.int8), zeros(2, 2, 16)):
        expect_refusal("scales", packed, {"scales": scales})
    expect_refusal("scales", product("float32"), {"scales": packed.operands["scales"]})
    # 48 inputs are not whole blocks
    narrow = {"x": zeros(3, 48), "norm": zeros(48), "panels": zeros(2, 6, 16, dtype=np.uint32)}
    expect_refusal("do not hold", packed, narrow | {"scales": zeros(2, 1, 16, dtype=np.uint8)})


@one_set
@pytest.mark.parametrize("name", OF_FORMATS)
def test_every_operand_and_attribute_of_experts_is_checked(name: str) -> None:
    call = experts(name)
    for key, value in call.operands.items():
        longer = zeros(*value.shape[:-1], value.shape[-1] + 1, dtype=value.dtype)
        expect_refusal(f"experts.*{key.split('_')[0]}|experts: x|do not hold", call, {key: longer})
        if value.size:
            expect_refusal("experts", call, {key: zeros(*value.shape, dtype=np.int16)})
    for key in ("gate_up_bias", "down_bias"):
        expect_refusal(r"a bias is missing|0 of", call, {key: zeros(0)})
    for first in (-1, 1):
        expect_refusal("local ones do not lie", call, {"first_local": np.full((1,), first, INT)})
    attributes = {"num_experts": (0, 4, 6, 8), "top_k": (0, 9, -1), "hidden": (0, 20, 128, -16)}
    for key, values in attributes.items():
        for value in values:
            expect_refusal("experts", call, **{key: np.int64(value)})


@one_set
@pytest.mark.parametrize(("dim", "qkv", "out"), [(9, 90, 54), (0, 60, 60), (10, 103, 63), (10, 90, 50)])
def test_widths_that_are_no_heads_are_refused(dim: int, qkv: int, out: int) -> None:
    """Odd heads, heads of no width, parts of heads, and queries that are no multiple of the keys."""
    replaced = {name: zeros(4, 8, G * dim) for name in ("key", "value")}
    replaced |= {name: zeros(B, T, dim // 2) for name in ("cos", "sin")}
    expect_refusal("attention: ", attention(), replaced | {"qkv": zeros(B, T, qkv), "sinks": zeros(0)}, (B, T, out))


@one_set
@pytest.mark.parametrize(
    ("table", "write", "first", "last"),
    [
        ([0, 7], -1, 0, 10),
        ([0, -1], -1, 0, 8),
        ([-1, 0], -1, 0, 10),
        ([0, 1, 5], 16, 0, 10),
        ([9, 1], 0, 0, -1),
        ([0, 1], -1, -1, 3),
    ],
    ids=["beyond the pool", "none", "no first page", "a write beyond the pool", "a write to none", "a negative index"],
)
def test_pages_that_are_not_in_the_pool_are_refused(table: list[int], write: int, first: int, last: int) -> None:
    rows = {"write": write, "first": first, "last": last}
    replaced = {name: np.full((B, T), index, INT) for name, index in rows.items()}
    tables = {"table": np.array([table] * B, INT)}
    expect_refusal("sees or writes a page that is not in the pool", attention(), replaced | tables)


@one_set
def test_results_that_do_not_fit_are_refused() -> None:
    width, of_attention = SIZES["float32"].width, r"attention: (qkv|keys, values and results)"
    for call, results, says in (
        (product("float32"), (((3, 37), np.float32), ((63,), np.float32), ((3, 21), HALF)), "linear"),
        (experts("float32"), (((4, width), np.float32),), "experts: x"),
        (attention(), (((B, T, N, H), np.float32), ((B, T, 60), HALF), ((B, T, 50), np.float32)), of_attention),
    ):
        for out, dtype in results:
            expect_refusal(says, call, None, out, dtype)
    expect_refusal("not written in place", attention(), in_place=False)


# A row: results and operands that do not fit
INDEX, PAIR = ((3,), INT), (((3,), INT), ((3,), np.float32))
KEYS, IDS, POSITIONS = zeros(3, 2, dtype=np.uint32), zeros(0, dtype=INT), zeros(2, 3, dtype=INT)
OTHERS: dict[str, list[tuple[Any, Sequence[np.ndarray]]]] = {
    "draw": [
        (INDEX, (zeros(3, 4, 5), KEYS, IDS)),
        (INDEX, (zeros(3, 0), KEYS, IDS)),
        (INDEX, (zeros(3, 5), zeros(3, 3, dtype=np.uint32), IDS)),
        (INDEX, (zeros(3, 5), zeros(2, 2, dtype=np.uint32), IDS)),
        (INDEX, (zeros(3, 5), KEYS, zeros(4, dtype=INT))),
        (((2,), INT), (zeros(3, 5), KEYS, zeros(5, dtype=INT))),
    ],
    "likeliest": [
        *((PAIR, (logits,)) for logits in (zeros(3, 4, 5), zeros(3, 0), zeros(3, 5, dtype=INT))),
        (PAIR, (zeros(3, 5, dtype=HALF),)),
        ((((4,), INT), PAIR[1]), (zeros(3, 5),)),
        ((PAIR[0], ((2,), np.float32)), (zeros(3, 5),)),
    ],
    "rope_tables": [
        *(
            (((cos, dtype), (sin, dtype)), (positions, zeros(*frequencies)))
            for positions, frequencies, cos, sin, dtype in (
                (zeros(6, dtype=INT), (4,), (6, 4), (6, 4), np.float32),
                (POSITIONS, (4,), (2, 3, 5), (2, 3, 5), np.float32),
                (POSITIONS, (4,), (2, 4, 4), (2, 4, 4), np.float32),
                (POSITIONS, (4,), (2, 3, 4), (2, 3, 3), np.float32),
                (POSITIONS, (4, 1), (2, 3, 4), (2, 3, 4), np.float32),
                (POSITIONS, (4,), (2, 3, 4), (2, 3, 4), HALF),
                (zeros(2, 3), (4,), (2, 3, 4), (2, 3, 4), np.float32),
            )
        ),
    ],
}


@one_set
@pytest.mark.parametrize("kernel", OTHERS)
def test_calls_of_other_kernels_that_do_not_fit_are_refused(kernel: str) -> None:
    attributes = {"concentration": np.float32(1)} if kernel == "rope_tables" else {}
    for results, operands in OTHERS[kernel]:
        several = isinstance(results[0][0], tuple)
        outputs = [jax.ShapeDtypeStruct(*one) for one in (results if several else [results])]
        with pytest.raises(jax.errors.JaxRuntimeError, match=kernel):
            native.call(kernel, tuple(outputs) if several else outputs[0], *map(jnp.asarray, operands), **attributes)
