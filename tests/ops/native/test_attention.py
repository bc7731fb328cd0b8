"""The native attention refuses operands that do not fit. Its results: tests/ops/test_paged_attention.py."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops import native
from tests.ops.native.cases import one_set

pytestmark = pytest.mark.usefixtures("kernels")
NO_MATRICES = True

B, T, N, G, H = 3, 2, 6, 2, 10
POOL = (4, 8, G, H)  # four pages of eight


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def operands() -> dict[str, np.ndarray]:
    """Make operands by name, in order: two rows each of three sequences, the last one idle."""
    rng = np.random.default_rng(12)
    write = np.array([[3, 4], [1, 2], [-1, -1]], np.int32)
    return {
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


def call(
    replaced: dict[str, np.ndarray],
    out: tuple[int, ...] = (B, T, N * H),
    dtype: type = np.float32,
    in_place: bool = True,
) -> list[jax.Array]:
    arrays = {name: jnp.asarray(values) for name, values in (operands() | replaced).items()}
    pages = [jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in ("key", "value")]
    results = native.call(
        "paged_attention",
        (jax.ShapeDtypeStruct(out, dtype), *pages),
        *arrays.values(),
        in_place={3: 1, 4: 2} if in_place else None,
    )
    return [result.block_until_ready() for result in results]


def test_operands_that_fit_are_taken() -> None:
    assert all(np.isfinite(part).all() for part in call({}))


@one_set
@pytest.mark.parametrize(
    "replaced",
    [
        {"key": zeros(4, 7, G, H)},
        {"key": zeros(*POOL, dtype=ml_dtypes.bfloat16)},
        {"value": zeros(4, 8, 1, H)},
        {"value": zeros(*POOL, dtype=np.float16)},
        {"value": zeros(4, 8, 20)},
        {name: zeros(4, 8, 0, H) for name in ("key", "value")},
        {name: zeros(4, 0, G, H) for name in ("key", "value")},
        {name: zeros(*POOL, dtype=np.int32) for name in ("key", "value")},
        {name: zeros(*POOL, dtype=ml_dtypes.bfloat16) for name in ("key", "value")},
        {"table": zeros(2, 1, dtype=np.int32)},
        {"table": zeros(B, 0, dtype=np.int32)},
        {"table": zeros(B, dtype=np.int32)},
        {"table": zeros(B, 1)},
        *(
            {name: rows}
            for name in ("write", "first", "last")
            for rows in (zeros(B, 3, dtype=np.int32), zeros(B * T, dtype=np.int32), zeros(B, T, dtype=np.int16))
        ),
        {"sinks": zeros(5)},
        {"sinks": zeros(N, dtype=ml_dtypes.bfloat16)},
        {"qkv": zeros(B, T, 99)},
        {"qkv": zeros(B, 1, 100)},
        {"qkv": zeros(2, T, 100)},
        {"qkv": zeros(B * T, 100)},
        {"qkv": zeros(B, T, 100, dtype=np.int32)},
        {"cos": zeros(B, T, 4)},
        {"sin": zeros(B, T, 10)},
        {"cos": zeros(B, T, 5, dtype=np.int32)},
    ],
    ids=lambda value: " ".join(f"{k}{v.dtype}{v.shape}" for k, v in value.items()),
)
def test_operands_that_do_not_fit_are_refused(replaced: dict[str, np.ndarray]) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="attention: "):
        call(replaced)


@one_set
def test_results_that_do_not_fit_are_refused() -> None:
    for out, dtype in (((B, T, N, H), np.float32), ((B, T, N * H), ml_dtypes.bfloat16), ((B, T, 50), np.float32)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"attention: (qkv|keys, values and results)"):
            call({}, out, dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not written in place"):
        call({}, in_place=False)


@one_set
@pytest.mark.parametrize(("dim", "qkv", "out"), [(9, 90, 54), (0, 60, 60), (10, 103, 63), (10, 90, 50)])
def test_widths_that_are_no_heads_are_refused(dim: int, qkv: int, out: int) -> None:
    """Odd heads, heads of no width, parts of heads, and queries that are no multiple of the keys."""
    replaced = {name: zeros(4, 8, G, dim) for name in ("key", "value")}
    replaced |= {name: zeros(B, T, dim // 2) for name in ("cos", "sin")}
    with pytest.raises(jax.errors.JaxRuntimeError, match="attention: "):
        call(replaced | {"qkv": zeros(B, T, qkv), "sinks": zeros(0)}, (B, T, out))


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
    replaced = {name: np.full((B, T), index, np.int32) for name, index in rows.items()}
    with pytest.raises(jax.errors.JaxRuntimeError, match="sees or writes a page that is not in the pool"):
        call(replaced | {"table": np.array([table] * B, np.int32)})
