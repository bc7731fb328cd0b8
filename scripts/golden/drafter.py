"""Record what the public `speculators` package computes with its own models: tests/golden/drafter_speculators.

Run it in an environment of its own, since the package pins an older transformers:

    python3.11 -m venv recorder && recorder/bin/pip install speculators==0.9.0
    recorder/bin/python scripts/golden/drafter.py tests/golden/drafter_speculators

It writes the package's checkpoint of every tiny random model, and golden.npz. P-EAGLE (`plain`, `variant`): inputs, and
logits of every (anchor, depth) row of two passes: `train_*`, rows of the package's own COD sampling over two documents;
`step_*`, the rows of one inference step: a context and K-1 mask slots on its last row. EAGLE-3 (`eagle3`,
`eagle3_variant`): inputs, and logits [depth, row] of its training-time test over two documents.
"""

import argparse
import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from peagle.base.strict_json import dumps

NUM_ROWS, NUM_DEPTHS, CONTEXT, NUM_DRAFTS = 24, 4, 9, 5
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (
        {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
        | {"intermediate_size": 28, "vocab_size": 61, "rope_parameters": LLAMA3},
        {"draft_vocab_size": 37, "mask_token_id": 60, "eagle_aux_hidden_state_layer_ids": [2, 5, 7]},
    ),
    "variant": (
        {"hidden_size": 20, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6, "num_hidden_layers": 1}
        | {"intermediate_size": 26, "vocab_size": 53, "attention_bias": True, "mlp_bias": True},
        {"draft_vocab_size": 53, "mask_token_id": 3, "eagle_aux_hidden_state_layer_ids": [1, 4]}
        | {"norm_before_residual": True, "norm_before_fc": True},
    ),
}


EAGLE3_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": (
        {"hidden_size": 30, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "num_hidden_layers": 1}
        | {"intermediate_size": 34, "vocab_size": 59, "rope_parameters": LLAMA3},
        {"draft_vocab_size": 41, "eagle_aux_hidden_state_layer_ids": [2, 4, 7]},
    ),
    "eagle3_variant": (
        {"hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 6, "num_hidden_layers": 2}
        | {"intermediate_size": 26, "vocab_size": 47},
        {"draft_vocab_size": 47, "eagle_aux_hidden_state_layer_ids": [1, 3]}
        | {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    ),
}


def build(geometry: dict[str, Any], settings: dict[str, Any], algorithm: str) -> Any:
    """Make a random model. No parameter is near its neutral value, so that a missing one shows."""
    layer_config = LlamaConfig(max_position_embeddings=128, pad_token_id=None, **geometry)
    layer_config._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=NUM_DEPTHS)
    verifier = VerifierConfig(name_or_path=None, architectures=["GptOssForCausalLM"])
    kinds = {
        "peagle": (PEagleSpeculatorConfig, core.PEagleDraftModel),
        "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    }
    config_class, model_class = kinds[algorithm]
    config = config_class(
        transformer_layer_config=layer_config,
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm, proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
        **settings,
    )
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 and "embed" not in name else 1.0
            centre = 1.0 if "norm" in name else 0.0
            scale = 0.2 if "norm" in name or "bias" in name else scale
            parameter.copy_(centre + scale * torch.randn(parameter.shape))
    if model.d2t is not None:
        kept = torch.randperm(geometry["vocab_size"])[: settings["draft_vocab_size"]].sort()[0]
        chosen = torch.isin(torch.arange(geometry["vocab_size"]), kept)
        model.load_vocab_mappings(chosen, kept - torch.arange(len(kept)))
    return model


def record(model: core.PEagleDraftModel, rows: tuple[torch.Tensor, torch.Tensor] | None) -> dict[str, np.ndarray]:
    """Record inputs and logits of a pass over (anchor, depth) rows, or the package's samples."""
    geometry = model.config.transformer_layer_config
    num_layers = len(model.config.eagle_aux_hidden_state_layer_ids)
    token_ids = torch.randint(0, geometry.vocab_size, (1, NUM_ROWS))
    aux_hidden = 1.5 * torch.randn(1, NUM_ROWS, num_layers * geometry.hidden_size)
    documents = torch.tensor([[0] * 13 + [1] * (NUM_ROWS - 13)]) if rows is None else torch.zeros(1, NUM_ROWS).long()
    loss_mask = (torch.rand(1, NUM_ROWS) < 0.9).float()
    loss_mask[0, 0] = 0  # position 0 in the loss would give the package a row of anchor -1

    sample, loss, sampled, logits = core.generate_cod_sample_indices, core.compute_metrics, [], []

    def observed(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sampled.append(sample(**kwargs) if rows is None else rows)
        return sampled[-1]

    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output))
    core.generate_cod_sample_indices = observed
    core.compute_metrics = lambda **_kwargs: (None, {})  # the fused loss needs a GPU
    try:
        with torch.no_grad():
            model(
                hidden_states=aux_hidden,
                input_ids=token_ids,
                document_ids=documents,
                loss_mask=loss_mask,
                verifier_last_hidden_states=torch.randn(1, NUM_ROWS, geometry.hidden_size),
                num_depths=NUM_DEPTHS,
            )
    finally:
        core.generate_cod_sample_indices, core.compute_metrics = sample, loss
        hook.remove()
    (anchor, depth), (row_logits,) = sampled[0], logits
    arrays = {"token_ids": token_ids, "aux_hidden": aux_hidden, "documents": documents, "logits": row_logits}
    return {name: value[0].numpy() for name, value in arrays.items()} | {
        "anchor": anchor.numpy(),
        "depth": depth.numpy(),
    }


def record_in_turn(model: Eagle3DraftModel) -> dict[str, np.ndarray]:
    """Record inputs, and logits of NUM_DEPTHS passes over the true next tokens."""
    geometry = model.config.transformer_layer_config
    num_layers = len(model.config.eagle_aux_hidden_state_layer_ids)
    token_ids = torch.randint(0, geometry.vocab_size, (1, NUM_ROWS))
    aux_hidden = 1.5 * torch.randn(1, NUM_ROWS, num_layers * geometry.hidden_size)
    documents = torch.tensor([[0] * 13 + [1] * (NUM_ROWS - 13)])
    logits: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    with torch.no_grad():
        model(hidden_states=aux_hidden, input_ids=token_ids, document_ids=documents, ttt_steps=NUM_DEPTHS)
    hook.remove()
    arrays = {"token_ids": token_ids[0], "aux_hidden": aux_hidden[0], "documents": documents[0]}
    return {name: value.numpy() for name, value in (arrays | {"logits": torch.stack(logits)}).items()}


def _keep(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write golden.npz, and remove all files but it, weights and config."""
    arrays = {key: value.astype(np.float32 if value.dtype.kind == "f" else np.int32) for key, value in arrays.items()}
    np.savez_compressed(folder / "golden.npz", **arrays)
    for extra in folder.iterdir():
        if extra.name not in ("config.json", "model.safetensors", "golden.npz"):
            extra.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    versions = {name: importlib.metadata.version(name) for name in ("speculators", "transformers", "torch")}
    for seed, (name, (geometry, settings)) in enumerate((MODELS | EAGLE3_MODELS).items()):
        torch.manual_seed(seed)
        model = build(geometry, settings, "peagle" if name in MODELS else "eagle3")
        model.save_pretrained(directory / name)
        if name in EAGLE3_MODELS:
            _keep(directory / name, record_in_turn(model))
            continue
        anchor = torch.cat([torch.arange(CONTEXT), torch.full((NUM_DRAFTS - 1,), CONTEXT - 1)])
        depth = torch.cat([torch.zeros(CONTEXT).long(), torch.arange(1, NUM_DRAFTS)])
        passes = {"train": record(model, None), "step": record(model, (anchor, depth))}
        arrays = {f"{key}_{name}": value for key, arrays in passes.items() for name, value in arrays.items()}
        _keep(directory / name, arrays)
    (directory / "versions.json").write_text(dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
