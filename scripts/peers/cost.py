"""Bytes of weights a pass of T rows reads: what bounds small passes on any machine.

Counted: every matrix and bias once, but for the embedding, of which a pass reads T rows (not counted), and the experts,
of which it reads those that any row selects. With uniform, independent routing that is E (1 - (1 - k/E)^T) of E.
"""

from dataclasses import dataclass

import numpy as np

from target.config import TargetConfig
from target.load import tensor_shapes

MXFP4_BYTES = 17 / 32  # a weight: 4 bits, and its share of its block's scale


@dataclass(frozen=True)
class Storage:
    """Bytes of a weight, in an engine's memory."""

    dense: float
    experts: float


def experts_touched(config: TargetConfig, rows: int) -> float:
    """Expected number of experts that a layer computes for so many rows."""
    return config.num_experts * (1 - (1 - config.top_k / config.num_experts) ** rows)


def pass_bytes(config: TargetConfig, storage: Storage, rows: int) -> float:
    """Expected bytes of weights read by a pass."""
    dense = expert = 0.0
    for name, shape in tensor_shapes(config, mxfp4=False).items():
        size = float(np.prod(shape))
        if "embed_tokens" in name:
            continue
        if ".experts." not in name:
            dense += size * storage.dense
        else:
            expert += size / config.num_experts * (storage.experts if len(shape) == 3 else storage.dense)
    return dense + experts_touched(config, rows) * expert


def floor(config: TargetConfig, storage: Storage, rows: int) -> float:
    """v(T) where time is bytes."""
    return pass_bytes(config, storage, rows) / pass_bytes(config, storage, 1)
