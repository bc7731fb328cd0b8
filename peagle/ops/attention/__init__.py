"""Grouped-query attention with optional sinks."""

from peagle.ops.attention.cached import decode_attention, split_heads
from peagle.ops.attention.reference import MASKED, attention

__all__ = ["MASKED", "attention", "decode_attention", "split_heads"]
