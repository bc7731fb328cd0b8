"""Attention of few rows in the CUDA kernels: chunks dealt out to splits, and splits to blocks.

The suite of attention over pages (tests/ops/test_paged_attention.py) runs the kernels, too; its cases are shorter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops.attention import Pages, causal_rows, paged_attention
from peagle.ops.cuda import calls

PAGE, HEAD = calls.PAGE, calls.HEAD_DIM


def attend(
    monkeypatch: pytest.MonkeyPatch, batch: int, rows: int, lengths: np.ndarray, window: int | None, in_cuda: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Compute a pass after `lengths` tokens; return (output, keys of all pages)."""
    rng, kv_heads, heads = np.random.default_rng(0), 1, 2
    num_pages = -(-(int(lengths.max()) + rows) // PAGE)

    def halves(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    table = jnp.asarray(rng.permutation(batch * num_pages).reshape(batch, num_pages), jnp.int32)
    pages = Pages(*(halves(batch * num_pages, PAGE, kv_heads, HEAD) for _ in range(2)))
    positions = jnp.asarray(lengths[:, None] + np.arange(rows), jnp.int32)
    placed = causal_rows(table, positions, PAGE, window)
    angles = rng.standard_normal((batch, rows, HEAD // 2))
    cos_sin = (jnp.asarray(f(angles), jnp.bfloat16) for f in (np.cos, np.sin))
    qkv = halves(batch, rows, (heads + 2 * kv_heads) * HEAD)
    monkeypatch.setattr("peagle.ops.cuda.status", lambda: (True, "CUDA"))
    implementation = "cuda" if in_cuda else "xla"
    out, after = paged_attention(qkv, *cos_sin, pages, placed, heads, halves(heads), implementation=implementation)
    return np.asarray(out, np.float64), np.asarray(after.key, np.float64)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("batch", "rows", "longest", "window"),
    [
        (1, 9, 9000, None),  # more chunks than splits; more than one tile of queries
        (1, 2, 9000, 300),  # a window far behind the first chunk
        # so many sequences that a block goes through two splits
        pytest.param(528, 1, 300, None, marks=pytest.mark.slow),
    ],
)
def test_long_contexts_and_many_sequences(
    monkeypatch: pytest.MonkeyPatch, batch: int, rows: int, longest: int, window: int | None
) -> None:
    lengths = np.random.default_rng(1).integers(0, longest, batch)
    lengths[0] = longest
    output, keys = attend(monkeypatch, batch, rows, lengths, window, in_cuda=True)
    expected, expected_keys = attend(monkeypatch, batch, rows, lengths, window, in_cuda=False)
    np.testing.assert_allclose(output, expected, rtol=2**-6, atol=2**-7)
    # XLA rounds each product of a rotation
    np.testing.assert_allclose(keys, expected_keys, rtol=2**-6, atol=2**-5)
