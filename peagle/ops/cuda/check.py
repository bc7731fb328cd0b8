"""What the GPU kernels compute before they are trusted: a small case of everything that they distinguish."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle.ops.cuda.nvrtc import CudaError
from peagle.ops.mxfp4 import BLOCK, dequantize

EXPERTS, TOP_K, WIDTH, EXPERT_WIDTH, LIMIT = 6, 3, 160, 96, 7.0
ROWS = (1, 8, 13, 30, 64)  # one product's, a full one's, those of two, four, eight
FAR = 0.02  # of the largest output: what a wrong kernel is beyond, and roundings to bfloat16 are not


def check(call: Callable[..., Any]) -> None:
    """The kernels, called by `call`, say what the definition says. Raises CudaError where they do not."""
    rng = np.random.default_rng(0)

    def codes(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = rng.integers(0, 256, (EXPERTS, outputs, inputs // BLOCK, BLOCK // 2), np.uint8)
        return blocks, rng.integers(121, 125, blocks.shape[:-1], np.uint8)

    def halves(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    gate_up, gate_up_bias = codes(2 * EXPERT_WIDTH, WIDTH), halves(EXPERTS, 2 * EXPERT_WIDTH)
    down, down_bias = codes(WIDTH, EXPERT_WIDTH), halves(EXPERTS, WIDTH)
    for rows in ROWS:
        x = halves(rows, WIDTH)
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
        shapes = (
            jax.ShapeDtypeStruct((rows, TOP_K, WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((rows * TOP_K, EXPERT_WIDTH), jnp.bfloat16),
        )
        operands = map(jnp.asarray, (x, ids, *gate_up, gate_up_bias, *down, down_bias))
        found = np.asarray(call("experts", shapes, *operands, limit=np.float32(LIMIT))[0])
        hidden = np.einsum("toi,ti->to", *_chosen(gate_up, ids, x)) + gate_up_bias[ids.ravel()].astype(np.float64)
        gate, up = np.minimum(hidden[:, 0::2], LIMIT), np.clip(hidden[:, 1::2], -LIMIT, LIMIT)
        active = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        weights = dequantize(*down)[ids.ravel()].astype(np.float64)
        expected = np.einsum("toi,ti->to", weights, active) + down_bias[ids.ravel()].astype(np.float64)
        far = np.abs(found.reshape(expected.shape) - expected).max() / np.abs(expected).max()
        if not far < FAR:
            raise CudaError(f"the GPU kernels fail their check: {far:.2g} off with {rows} rows, at most {FAR} is right")


def _chosen(codes: tuple[np.ndarray, np.ndarray], ids: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(matrices, vectors) of all pairs, in float64."""
    return dequantize(*codes)[ids.ravel()].astype(np.float64), np.repeat(x, ids.shape[1], axis=0).astype(np.float64)
