"""Multiply by a weight matrix: one op, two layouts of its weights, on one device or several."""

from peagle.ops.linear.api import embed, linear, logits_dtype
from peagle.ops.linear.packed import (
    PackedMatrix,
    arrange,
    arrange_embedding,
    as_matrix,
    embedding_width,
    take_outputs,
    to_mxfp4,
)
from peagle.ops.linear.split import SplitMatrix, split_outputs

__all__ = [
    "PackedMatrix",
    "SplitMatrix",
    "arrange",
    "arrange_embedding",
    "as_matrix",
    "embed",
    "embedding_width",
    "linear",
    "logits_dtype",
    "split_outputs",
    "take_outputs",
    "to_mxfp4",
]
