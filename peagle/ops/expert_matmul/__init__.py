"""The mixture-of-experts feed-forward of GPT-OSS: one op, six layouts of its weights."""

from peagle.ops.expert_matmul.api import expert_block, expert_mlp
from peagle.ops.expert_matmul.cuda import takes_tiled, tiled_experts
from peagle.ops.expert_matmul.native import to_panels
from peagle.ops.expert_matmul.tpu import tpu_experts
from peagle.ops.expert_matmul.weights import (
    ExpandedExperts,
    Experts,
    FusedExperts,
    NativeExperts,
    PackedExperts,
    TiledExperts,
    TpuExperts,
)

__all__ = [
    "ExpandedExperts",
    "Experts",
    "FusedExperts",
    "NativeExperts",
    "PackedExperts",
    "TiledExperts",
    "TpuExperts",
    "expert_block",
    "expert_mlp",
    "takes_tiled",
    "tiled_experts",
    "to_panels",
    "tpu_experts",
]
