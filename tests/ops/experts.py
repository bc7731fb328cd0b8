"""The definition of a mixture of experts, in float64: one token and one selected expert at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np

Expert = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def mixture(
    x: np.ndarray,
    logits: np.ndarray,
    top_k: int,
    limit: float,
    expert: Callable[[int], Expert],
    dtype: Any = np.float64,
) -> np.ndarray:
    """Sum the selected experts of rows [T, D], weighted by the softmax of their router logits [T, E].

    Of equal logits the lower expert wins. expert: gate and up [2F, D], whose rows are interleaved, their bias, down
    [D, F] and its bias, of an expert. dtype: of hidden values between the matrices.
    """
    out = np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        selected = np.argsort(-logits[t], kind="stable")[:top_k]
        weights = np.exp(logits[t, selected].astype(np.float64) - logits[t, selected].max())
        for weight, number in zip(weights / weights.sum(), selected.tolist(), strict=True):
            gate_up, gate_up_bias, down, down_bias = expert(number)
            hidden = gate_up @ row + gate_up_bias
            gate, up = np.minimum(hidden[0::2], limit), np.clip(hidden[1::2], -limit, limit)
            active = (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)).astype(dtype).astype(np.float64)
            out[t] += weight * (down @ active + down_bias)
    return out
