"""Multiplication by a weight matrix: one op, two layouts of its weights."""

from peagle.ops.linear.api import embed, linear
from peagle.ops.linear.panels import Panels, arrange, arrange_embedding, as_matrix, take_outputs

__all__ = ["Panels", "arrange", "arrange_embedding", "as_matrix", "embed", "linear", "take_outputs"]
