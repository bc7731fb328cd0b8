"""RoPE frequencies against transformers' own (in a file of its own, since it needs torch)."""

import numpy as np
import pytest

pytest.importorskip("torch")

from transformers import GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from peagle.ops.rope import parse_rope, rope_frequencies
from tests.ops.test_rope import LLAMA3, YARN

CASES = {
    "gpt-oss": (64, 150000.0, YARN),
    "truncated": (64, 150000.0, {**YARN, "truncate": True}),
    "small": (16, 10000.0, {**YARN, "factor": 4.0, "original_max_position_embeddings": 48}),
    "concentration": (32, 10000.0, {**YARN, "attention_factor": 1.25}),
    "factor 1": (32, 10000.0, {**YARN, "factor": 1.0}),
    "llama3": (64, 500000.0, LLAMA3),
    "llama3 small": (24, 10000.0, {**LLAMA3, "factor": 3.0, "original_max_position_embeddings": 96}),
}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_transformers(case: str, spelling: str) -> None:
    head_dim, theta, scaling = CASES[case]
    if spelling == "rope_parameters":
        config = {"rope_parameters": {**scaling, "rope_theta": theta}}
    else:
        config = {"rope_theta": theta, "rope_scaling": dict(scaling)}
    kind = GptOssConfig if scaling["rope_type"] == "yarn" else LlamaConfig
    theirs, their_concentration = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        kind(head_dim=head_dim, **{key: dict(v) if isinstance(v, dict) else v for key, v in config.items()}), "cpu"
    )
    ours, concentration = rope_frequencies(parse_rope(head_dim, config, 1.0))
    assert concentration == pytest.approx(their_concentration, rel=1e-7)
    assert ours.dtype == np.float32
    # ours are computed in float64 and rounded once; theirs in float32
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6)
