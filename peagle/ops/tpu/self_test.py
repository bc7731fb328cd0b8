"""Compare the TPU kernels with XLA's code before their first use: what interpretation on a CPU cannot tell.

Whether the matrix unit takes denormal codes for what they are, whether a row's bits depend on its place, and whether
pages are the right ones.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle.ops.attention.paged import Pages, causal_rows, paged_attention
from peagle.ops.expert_matmul import PackedExperts, expert_mlp
from peagle.ops.expert_matmul.tpu import FEW, lay_out
from peagle.ops.linear import linear
from peagle.ops.mxfp4 import BLOCK
from peagle.ops.self_tests import expect_near, random_halves

EXPERTS, TOP_K, WIDTH, EXPERT_WIDTH, LIMIT = 4, 2, 192, 96, 7.0
HALF = 0x11  # two codes of 0.5, which are denormal as e5m2
ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 4, 2, 64, 64
ATTENDED = ((None, 7, 400), (20, 3, 300))  # (window, pages of the table, tokens before)


class WrongKernel(Exception):
    """A kernel's result is far from XLA's."""


def check() -> None:
    """Raise WrongKernel if a result is far from XLA's, or has other bits elsewhere in a pass."""
    rng = np.random.default_rng(0)
    check_experts(rng, "codes of 0.5", ROWS, HALF)
    check_experts(rng, "experts of few rows", 3 * ROWS)
    check_experts(rng, "experts of many rows", FEW + ROWS)
    weight = jnp.asarray(random_halves(rng, WIDTH, 256))
    product = jax.jit(functools.partial(linear, weight=weight, implementation="tpu"))
    _expect_same_bits(product, random_halves(rng, ROWS, WIDTH), "products")
    for case in ATTENDED:
        check_attention(rng, *case)


def check_experts(rng: np.random.Generator, what: str, num_rows: int, codes: int | None = None) -> None:
    """Compare the experts of rows. codes: the byte of all weights, instead of random ones."""

    def matrix(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        blocks = rng.integers(0, 256, (EXPERTS, outputs, inputs // BLOCK, BLOCK // 2), np.uint8)
        blocks = blocks if codes is None else np.full_like(blocks, codes)
        return blocks, rng.integers(121, 125, blocks.shape[:-1], np.uint8), random_halves(rng, EXPERTS, outputs)

    packed = PackedExperts(*map(jnp.asarray, (*matrix(2 * EXPERT_WIDTH, WIDTH), *matrix(WIDTH, EXPERT_WIDTH))))
    x, logits = random_halves(rng, num_rows, WIDTH), rng.standard_normal((num_rows, EXPERTS), np.float32)
    run = jax.jit(functools.partial(expert_mlp, top_k=TOP_K, swiglu_limit=LIMIT))

    def of_rows(rows: np.ndarray) -> jax.Array:
        return run(x[rows], logits[rows], lay_out(packed))

    rows = np.arange(num_rows)
    _expect_near(of_rows(rows), run(x, logits, packed), what)
    if num_rows <= FEW:
        _expect_same_bits(of_rows, rows, what)


def check_attention(rng: np.random.Generator, window: int | None, num_pages: int, length: int) -> None:
    """Attend by the tokens after `length` others, in a table of shuffled pages that may repeat."""
    qkv, angles = random_halves(rng, 1, ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM), random_halves(rng, 2, 1, ROWS, 32)
    pages = Pages(*map(jnp.asarray, random_halves(rng, 2, num_pages, PAGE, KV_HEADS * HEAD_DIM)))
    table = jnp.asarray(rng.permutation(num_pages).astype(np.int32)[None])
    attend = functools.partial(paged_attention, num_heads=HEADS, sinks=jnp.asarray(random_halves(rng, HEADS)))

    def of_rows(rows: np.ndarray, implementation: Any = "tpu") -> jax.Array:
        where = causal_rows(table, jnp.asarray(length + rows)[None], PAGE, window)
        where = where.replace(write=jnp.full_like(where.write, -1))  # type: ignore[attr-defined]
        run = jax.jit(functools.partial(attend, implementation=implementation))
        return run(qkv[:, rows], *angles[:, :, rows], pages, where)[0][0]

    rows = np.arange(ROWS, dtype=np.int32)
    what = f"attention with a window of {window}" if window else "attention"
    _expect_near(of_rows(rows), of_rows(rows, "xla"), what)
    _expect_same_bits(of_rows, rows, what)


def _expect_near(output: jax.Array, expected: jax.Array, what: str) -> None:
    near, exact = (np.asarray(result, np.float64) for result in (output, expected))
    expect_near(near, exact, f"the TPU kernels fail their check: {what}", WrongKernel)


def _expect_same_bits(run: Callable[[np.ndarray], jax.Array], rows: np.ndarray, what: str) -> None:
    """Compare rows of a pass with the same alone, and at another place."""
    whole = np.asarray(run(rows))
    for some in ([0], [5], [11, 2, 9]):
        if not np.array_equal(np.asarray(run(rows[some])), whole[some]):
            raise WrongKernel(f"the TPU kernels fail their check: {what}: a row has other bits elsewhere in a pass")
