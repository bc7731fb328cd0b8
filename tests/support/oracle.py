"""Tiny random GPT-OSS models made by transformers, to measure the target against. Needs torch."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()

YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}

# dimensions are pairwise distinct in each, so that none can be mistaken for another
CONFIGS: dict[str, dict[str, Any]] = {
    # few experts: the fused layout; contexts longer than YaRN's original length
    "fused": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 22,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "vocab_size": 89,
        "sliding_window": 11,
        "max_position_embeddings": 256,
        "rope_parameters": {**YARN, "rope_theta": 150000.0, "original_max_position_embeddings": 32},
    },
    # many experts per selected one: the expanded layout; another layer order, swiglu limit and RoPE
    "expanded": {
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 14,
        "intermediate_size": 26,
        "num_local_experts": 9,
        "num_experts_per_tok": 2,
        "vocab_size": 101,
        "sliding_window": 5,
        "swiglu_limit": 1.5,
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 128,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
BATCH, LENGTH = 3, 57


@dataclasses.dataclass(frozen=True)
class Expected:
    """A checkpoint on disk and transformers' results for it, float32, eager attention."""

    directory: Path
    token_ids: np.ndarray  # [BATCH, LENGTH]
    logits: np.ndarray  # [BATCH, LENGTH, V]
    hidden: np.ndarray  # [layers + 1, BATCH, LENGTH, D]: embedding, output of layer 0, ...; the last is after the norm

    def check(self, ours: np.ndarray, rows: Any) -> None:
        """Assert that logits equal those at (row, position), to 1e-4 of the logits' standard deviation."""
        assert np.abs(np.asarray(ours) - self.logits[rows]).max() <= 1e-4 * self.logits.std()


def random_model(name: str, seed: int = 0) -> GptOssForCausalLM:
    """Make a model of random parameters, biases and sinks included, norms around one."""
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(**CONFIGS[name], **EAGER, eos_token_id=[5, 3])).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in parameter_name:
                parameter.add_(1.0)
            if "embed" in parameter_name:
                parameter.normal_()
    return model


def expected(model: GptOssForCausalLM, directory: Path) -> Expected:
    """Save the model to the directory and compute its results for random tokens."""
    token_ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (BATCH, LENGTH))
    with torch.no_grad():
        out = model(torch.from_numpy(token_ids), output_hidden_states=True, use_cache=False)
    hidden = np.stack([state.numpy() for state in out.hidden_states])
    return Expected(directory, token_ids.astype(np.int32), out.logits.numpy(), hidden)


def quantized_model(directory: Path) -> GptOssForCausalLM:
    """Load an MXFP4 checkpoint with transformers, which dequantises its experts to float32."""
    return GptOssForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), **EAGER
    ).eval()


def bfloat16_logits(model: GptOssForCausalLM, token_ids: np.ndarray) -> np.ndarray:
    """Compute the model's logits in bfloat16; return them as float32. Changes the model."""
    with torch.no_grad():
        return model.to(torch.bfloat16)(torch.from_numpy(token_ids.astype(np.int64))).logits.float().numpy()
