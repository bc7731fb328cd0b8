"""Multiplication by a weight matrix: one op, two layouts of its weights."""

from peagle.ops.linear.api import embed, linear
from peagle.ops.linear.packed import PackedMatrix, arrange, arrange_embedding, as_matrix, take_outputs

__all__ = ["PackedMatrix", "arrange", "arrange_embedding", "as_matrix", "embed", "linear", "take_outputs"]
