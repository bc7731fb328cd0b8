"""What the GPU kernels compute before they are trusted: a small case of everything that they distinguish."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle.ops.cuda.nvrtc import CudaError
from peagle.ops.mxfp4 import BLOCK, dequantize

EXPERTS, TOP_K, EXPERT_WIDTH, LIMIT = 6, 3, 96, 7.0
SMALL, LARGE = 121, 128  # scales are from here on, four of them; those above 128 go another way
# (rows, width, scales): one product's rows and a full one's, those of two, four, eight; inputs for several rounds
CASES = ((1, 1632, SMALL), (8, 160, LARGE), (13, 160, SMALL), (30, 160, SMALL), (64, 160, SMALL))
FAR = 0.02  # of the largest output: what a wrong kernel is beyond, and roundings to bfloat16 are not


def check(call: Callable[..., Any]) -> None:
    """The kernels, called by `call`, say what the definition says. Raises CudaError where they do not."""
    rng = np.random.default_rng(0)

    def codes(outputs: int, inputs: int, scales: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = rng.integers(0, 256, (EXPERTS, outputs, inputs // BLOCK, BLOCK // 2), np.uint8)
        return blocks, rng.integers(scales, scales + 4, blocks.shape[:-1], np.uint8)

    def halves(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    for rows, width, scales in CASES:
        gate_up, gate_up_bias = codes(2 * EXPERT_WIDTH, width, scales), halves(EXPERTS, 2 * EXPERT_WIDTH)
        down, down_bias = codes(width, EXPERT_WIDTH, scales), halves(EXPERTS, width)
        x = (halves(rows, width) * 2.0 ** (SMALL - scales)).astype(jnp.bfloat16)
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
        shapes = (
            jax.ShapeDtypeStruct((rows, TOP_K, width), jnp.float32),
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
