"""The mixture-of-experts feed-forward of GPT-OSS: one op, three layouts of its weights."""

from peagle.ops.expert_matmul.api import expert_mlp
from peagle.ops.expert_matmul.weights import ExpandedExperts, Experts, FusedExperts, PackedExperts

__all__ = ["ExpandedExperts", "Experts", "FusedExperts", "PackedExperts", "expert_mlp"]
