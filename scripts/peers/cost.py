"""The bytes of weights that an engine reads, which bound small passes (peagle.measure.bench.WeightBytes)."""

from dataclasses import dataclass

import numpy as np

from peagle.measure.bench import WeightBytes
from target.config import TargetConfig
from target.dialects import tensor_shapes

MXFP4_BYTES = 17 / 32  # a weight: 4 bits, and its share of its block's scale


@dataclass(frozen=True)
class Storage:
    """Bytes of a weight, in an engine's memory."""

    dense: float
    experts: float


def stored_weights(config: TargetConfig, storage: Storage) -> WeightBytes:
    """Add up every matrix and bias except the embedding, as an engine stores them."""
    dense = experts = 0.0
    for name, shape in tensor_shapes(config, mxfp4=False).items():
        size = float(np.prod(shape))
        if "embed_tokens" in name:
            continue
        if ".experts." not in name:
            dense += size * storage.dense
        else:
            experts += size * (storage.experts if len(shape) == 3 else storage.dense)
    return WeightBytes(round(dense), round(experts), config.num_experts, config.top_k)
