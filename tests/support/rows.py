"""Rows of sampling parameters, and a reference of truncation that sorts in float64."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from peagle.config import SamplingParams
from peagle.engine.request import Request
from peagle.engine.step.sampling import RowSampling
from peagle.engine.step.state import SlotParams


def rows_of(params: Sequence[SamplingParams]) -> RowSampling:
    """Make a row for each, of requests 0, 1, 2, ..."""
    rows = [SlotParams.of(Request((0,), 1, one, index=number), (), 1).sampling for number, one in enumerate(params)]
    stacked: RowSampling = jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)), *rows)
    return stacked


def defined(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Compute one row: temperature, top-k and top-p with ties, min-p, softmax; greedy: the argmax."""
    if sampling.greedy:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scaled = logits.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        weights = np.exp(scaled - scaled.max())
        ordered = np.argsort(-scaled, kind="stable")
        mass = np.cumsum(weights[ordered]) / weights.sum()
        scaled[scaled < scaled[ordered[np.argmax(mass >= sampling.top_p)]]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    weights[weights < sampling.min_p] = 0
    return weights / weights.sum()
