"""Compare the TPU kernels with a float64 reference before their first use: what interpretation on a CPU cannot tell.

Whether the matrix unit takes denormal codes for what they are, whether a row's bits depend on its place, and whether
pages are the right ones.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from peagle.ops.attention import tpu as attention
from peagle.ops.expert_matmul import tpu as expert_matmul
from peagle.ops.expert_matmul.routing import Choices
from peagle.ops.expert_matmul.tpu import FEW
from peagle.ops.expert_matmul.weights import PackedExperts
from peagle.ops.linear import linear
from peagle.ops.mxfp4 import BLOCK, dequantize
from peagle.ops.self_tests import expect_near, random_halves

EXPERTS, TOP_K, WIDTH, EXPERT_WIDTH, LIMIT = 4, 2, 192, 96, 7.0
HALF = 0x11  # two codes of 0.5, which are denormal as e5m2
ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 4, 2, 64, 64
ATTENDED = ((0, 7, 400), (20, 3, 300))  # (window or 0, pages of the table, tokens before)


class WrongKernel(Exception):
    """A kernel's result is far from the reference."""


def check() -> None:
    """Raise WrongKernel if a result is far from the reference, or has other bits elsewhere in a pass."""
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

    def matrix(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = rng.integers(0, 256, (EXPERTS, outputs, inputs // BLOCK, BLOCK // 2), np.uint8)
        blocks = blocks if codes is None else np.full_like(blocks, codes)
        return blocks, rng.integers(121, 125, blocks.shape[:-1], np.uint8)

    gate_up, down = matrix(2 * EXPERT_WIDTH, WIDTH), matrix(WIDTH, EXPERT_WIDTH)
    biases = random_halves(rng, EXPERTS, 2 * EXPERT_WIDTH), random_halves(rng, EXPERTS, WIDTH)
    packed = PackedExperts(*map(jnp.asarray, (*gate_up, biases[0], *down, biases[1])))
    x, ids = random_halves(rng, num_rows, WIDTH), np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(num_rows)])
    ids, weights = ids.astype(np.int32), rng.random(ids.shape, np.float32)
    run = jax.jit(functools.partial(expert_matmul.routed, experts=expert_matmul.lay_out(packed), limit=LIMIT))

    def of_rows(rows: np.ndarray) -> jax.Array:
        return run(x[rows], Choices(ids[rows], weights[rows]))

    matrices = [dequantize(*codes).astype(np.float64) for codes in (gate_up, down)]
    expected = np.zeros((num_rows, WIDTH))
    for row, choice in np.ndindex(ids.shape):
        expert = ids[row, choice]
        hidden = matrices[0][expert] @ x[row].astype(np.float64) + biases[0][expert].astype(np.float64)
        gate, up = np.minimum(hidden[0::2], LIMIT), np.clip(hidden[1::2], -LIMIT, LIMIT)
        active = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        expected[row] += weights[row, choice] * (matrices[1][expert] @ active + biases[1][expert].astype(np.float64))
    _expect_near(np.asarray(of_rows(np.arange(num_rows))), expected, what)
    if num_rows <= FEW:
        _expect_same_bits(of_rows, np.arange(num_rows), what)


def check_attention(rng: np.random.Generator, window: int, num_pages: int, length: int) -> None:
    """Attend by the tokens after `length` others, in a table of shuffled pages that may repeat."""
    query = random_halves(rng, 1, ROWS, HEADS, HEAD_DIM)
    key, value = random_halves(rng, 2, num_pages, PAGE, KV_HEADS * HEAD_DIM)
    table, last = rng.permutation(num_pages).astype(np.int32)[None], length + np.arange(ROWS, dtype=np.int32)
    first = np.maximum(last - window + 1, 0) if window else np.zeros_like(last)
    sinks, run = random_halves(rng, HEADS), jax.jit(attention.attend)

    def of_rows(rows: np.ndarray) -> jax.Array:
        return run(query[:, rows], key, value, table, first[None, rows], last[None, rows], sinks)[0]

    expected = np.zeros((ROWS, HEADS, HEAD_DIM))
    for row, head in np.ndindex(ROWS, HEADS):
        at = np.arange(int(first[row]), int(last[row]) + 1)
        keys, values = (
            pool[table[0, at // PAGE % num_pages], at % PAGE].reshape(len(at), KV_HEADS, -1).astype(np.float64)
            for pool in (key, value)
        )
        kv_head = head * KV_HEADS // HEADS
        scores = np.exp(keys[:, kv_head] @ query[0, row, head].astype(np.float64) / HEAD_DIM**0.5)
        expected[row, head] = scores @ values[:, kv_head] / (scores.sum() + np.exp(np.float64(sinks[head])))
    what = f"attention with a window of {window}" if window else "attention"
    _expect_near(np.asarray(of_rows(np.arange(ROWS)), np.float64), expected, what)
    _expect_same_bits(of_rows, np.arange(ROWS), what)


def _expect_near(output: np.ndarray, expected: np.ndarray, what: str) -> None:
    expect_near(output, expected, f"the TPU kernels fail their check: {what}", WrongKernel)


def _expect_same_bits(run: Callable[[np.ndarray], jax.Array], rows: np.ndarray, what: str) -> None:
    """Compare rows of a pass with the same alone, and at another place."""
    whole = np.asarray(run(rows))
    for some in ([0], [5], [11, 2, 9]):
        if not np.array_equal(np.asarray(run(rows[some])), whole[some]):
            raise WrongKernel(f"the TPU kernels fail their check: {what}: a row has other bits elsewhere in a pass")
