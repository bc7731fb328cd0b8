"""The CUDA attention kernels, on a CPU, against XLA."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops import cuda
from peagle.ops.attention import cached, decode_attention
from peagle.ops.attention import cuda as op
from peagle.ops.cuda import calls
from peagle.ops.errors import InputError
from peagle.ops.kernels import Implementation
from peagle.ops.kv_cache import KVCache

H = calls.HEAD_DIM
Case = tuple[jax.Array, jax.Array, jax.Array, KVCache, jax.Array, jax.Array]


def random_case(
    width: int, capacity: int, heads: int, kv_heads: int, ring: bool, lengths: tuple[int, ...], seed: int = 0
) -> Case:
    """Draw operands of passes after so many tokens; a sequence of negative length is inactive."""
    rng, batch = np.random.default_rng(seed), len(lengths)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32).astype(jnp.bfloat16))

    positions = [[-1] * width if length < 0 else [length + t for t in range(width)] for length in lengths]
    return (
        drawn(batch, width, (heads + 2 * kv_heads) * H),
        drawn(batch, width, H // 2),
        drawn(batch, width, H // 2),
        KVCache(drawn(batch, capacity, kv_heads, H), drawn(batch, capacity, kv_heads, H), ring),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(rng.standard_normal(heads), jnp.float32),
    )


def in_float32(case: Case) -> Case:
    return jax.tree.map(
        lambda leaf: leaf if leaf.dtype == jnp.int32 else jnp.asarray(np.asarray(leaf, np.float32)), case
    )  # type: ignore[no-any-return]


kernels = jax.jit(op.decode_attention, static_argnames="window")
on_xla = jax.jit(cached._on_xla, static_argnames=("num_heads", "window"))


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("width", "capacity", "heads", "kv_heads", "window", "ring", "lengths"),
    [
        (1, 64, 8, 1, None, False, (10,)),
        (4, 300, 16, 2, None, False, (270, 3)),  # two chunks; one sequence has only one
        (1, 300, 4, 4, 20, False, (280,)),  # a window in a full cache: the first chunk is not read
        (5, 40, 8, 2, 24, True, (100,)),  # the ring wraps
        (3, 140, 16, 2, 128, True, (5, 1000)),
        (2, 129, 8, 8, 128, True, (127,)),  # one query head per kv head
        (16, 600, 8, 1, None, False, (500,)),  # eight tiles of queries
        (2, 64, 4, 2, 8, False, (30, -5)),
    ],
)
def test_it_agrees_with_xla(
    width: int, capacity: int, heads: int, kv_heads: int, window: int | None, ring: bool, lengths: tuple[int, ...]
) -> None:
    case = random_case(width, capacity, heads, kv_heads, ring, lengths)
    found, cache = kernels(*case, window=window)
    expected, kept = on_xla(*in_float32(case), num_heads=heads, window=window)
    active = np.asarray(case[4]) >= 0
    # keys, weights and results are rounded to bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32)[active], np.asarray(expected)[active], atol=0.02)
    assert np.isfinite(np.asarray(found, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(cache.value, np.float32), kept.value)
    np.testing.assert_allclose(np.asarray(cache.key, np.float32), kept.key, rtol=2**-8)
    assert np.abs(np.asarray(expected)[active]).max() > 0.3
    without, _ = kernels(*case[:5], None, window=window)
    expected, _ = on_xla(*in_float32(case)[:5], None, num_heads=heads, window=window)
    np.testing.assert_allclose(np.asarray(without, np.float32)[active], np.asarray(expected)[active], atol=0.02)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("rows", [range(9), (0, 1), (0, 2, 3, 7), (5, 8), ()], ids=str)
@pytest.mark.parametrize(("ring", "window"), [(False, None), (False, 24), (True, 24)])
def test_a_rows_bits_do_not_depend_on_the_others(ring: bool, window: int | None, rows: Sequence[int]) -> None:
    """Neither on later rows, nor on rows of negative position anywhere: the newest position of a pass is the largest,
    not the last row's."""
    qkv, cos, sin, cache, _, sinks = random_case(9, 40 if ring else 300, 8, 2, ring, (270,))
    positions = np.full((1, 9), -1, np.int32)
    positions[0, list(rows)] = 270 + np.arange(len(rows))
    together, kept = kernels(qkv, cos, sin, cache, jnp.asarray(positions), sinks, window=window)
    assert np.isfinite(np.asarray(together, np.float32)).all()
    for t in rows:
        row = (part[:, t : t + 1] for part in (qkv, cos, sin))
        out, cache = kernels(*row, cache, jnp.asarray(positions[:, t : t + 1]), sinks, window=window)
        np.testing.assert_array_equal(together[:, t : t + 1], out)
    np.testing.assert_array_equal(kept.key, cache.key)
    np.testing.assert_array_equal(kept.value, cache.value)


@pytest.mark.usefixtures("opened")
def test_shapes_that_do_not_fit_are_refused() -> None:
    qkv, cos, sin, cache, positions, sinks = random_case(2, 64, 4, 2, False, (3,))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"sinks \[3\] is not BF16 \[N\]"):
        jax.block_until_ready(kernels(qkv, cos, sin, cache, positions, sinks[:3], window=None))


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("dtype", "width", "implementation", "runs"),
    [
        ("bfloat16", 2, None, True),
        ("bfloat16", 2, "xla", False),
        ("float32", 2, None, False),
        ("bfloat16", 17, None, False),
    ],
)
def test_what_a_gpu_runs(
    monkeypatch: pytest.MonkeyPatch, dtype: str, width: int, implementation: Implementation | None, runs: bool
) -> None:
    monkeypatch.setattr(cuda, "status", lambda: (True, "CUDA"))
    case = jax.tree.map(
        lambda leaf: leaf if leaf.dtype == jnp.int32 else leaf.astype(dtype), random_case(width, 64, 4, 2, False, (3,))
    )
    qkv, cos, sin, cache, positions, sinks = case

    def attend(qkv: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        return decode_attention(qkv, cos, sin, cache, positions, 4, None, sinks, implementation=implementation)

    traced = jax.jit(attend).trace(qkv, cache)
    assert ("peagle_cuda_decode_attention" in traced.lower(lowering_platforms=("cuda",)).as_text()) == runs
    assert "peagle_cuda_decode_attention" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    if implementation is None:  # by name it runs, or it is an error
        by_name = functools.partial(decode_attention, num_heads=4, sinks=sinks, implementation="cuda")
        if not runs:
            with pytest.raises(InputError, match=r"do not take these operands; expected bfloat16, up to 16 rows"):
                by_name(qkv, cos, sin, cache, positions)
        else:
            text = jax.jit(by_name).lower(qkv, cos, sin, cache, positions).as_text()
            assert "peagle_cuda_decode_attention" in text
