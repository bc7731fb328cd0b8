"""The mixture-of-experts feed-forward of GPT-OSS: one op, four layouts of its weights."""

from peagle.ops.expert_matmul.api import expert_block, expert_mlp
from peagle.ops.expert_matmul.native import alternate
from peagle.ops.expert_matmul.weights import ExpandedExperts, Experts, FusedExperts, NativeExperts, PackedExperts

__all__ = [
    "ExpandedExperts",
    "Experts",
    "FusedExperts",
    "NativeExperts",
    "PackedExperts",
    "alternate",
    "expert_block",
    "expert_mlp",
]
