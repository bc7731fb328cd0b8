"""Tiny random checkpoints in the layouts of the public drafters of GPT-OSS: the same keys, tensors and layer numbers.

Widths are tiny; what a file says about layers is as published, so the targets have 24 and 36 layers. The layouts are
spelled out here and share no code with the loader. Sources: the models' cards and exporters.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from peagle.ops.rope import RopeConfig, Yarn
from peagle.workflows.random_checkpoint import write_random_checkpoint
from target.config import FULL, SLIDING, TargetConfig

LAYERS = {"20b": 24, "120b": 36}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, DRAFT_VOCAB = 64, 6, 2, 10, 56, 101, 72
MASK = 98
STOP = 100  # the last token, of the target's files
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "rope_type": "yarn",
    "truncate": False,
}
IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class PublicDrafter:
    """One published layout.

    outputs: the target's layers whose outputs vLLM, or the named reader, feeds it. refused: what the line says that
    refuses it, instead.
    """

    name: str
    target: str  # of LAYERS
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]
    outputs: tuple[int, ...] = ()
    refused: str | None = None
    kind: str = "EAGLE-3"
    d2t: str = "offsets"  # "zeros": of the whole vocabulary; "int32": offsets of that dtype

    def write(self, directory: Path) -> Path:
        """Write the checkpoint."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        rng = np.random.default_rng(len(self.name))
        save_file(self._drawn(rng), directory / "model.safetensors")
        return directory

    def _drawn(self, rng: np.random.Generator) -> Tensors:
        kept = np.sort(rng.choice(VOCAB, DRAFT_VOCAB, replace=False))
        tensors: Tensors = {}
        for name, shape in self.tensors.items():
            if name == "d2t":
                offsets = np.zeros(shape, np.int64) if self.d2t == "zeros" else kept - np.arange(DRAFT_VOCAB)
                tensors[name] = offsets.astype(np.int32 if self.d2t == "int32" else np.int64)
            elif name == "t2d":
                tensors[name] = np.isin(np.arange(VOCAB), kept) | (self.d2t == "zeros")
            else:
                spread = shape[-1] ** -0.5 if len(shape) == 2 else 0.2
                values = (1.0 if "norm" in name else 0.0) + spread * rng.standard_normal(shape)
                tensors[name] = values.astype(ml_dtypes.bfloat16)
        return tensors


def target_config(size: str) -> TargetConfig:
    """Make a target of as many layers as the published one."""
    return TargetConfig(
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        vocab_size=VOCAB,
        layer_types=tuple(FULL if layer % 2 else SLIDING for layer in range(LAYERS[size])),
        sliding_window=16,
        num_experts=4,
        top_k=2,
        expert_width=32,
        swiglu_limit=7.0,
        rms_norm_eps=1e-5,
        max_positions=1024,
        rope=RopeConfig(12, 150000.0, Yarn(32.0, 64, truncate=False)),
    )


def write_target(directory: Path, size: str) -> Path:
    """Write a random target."""
    write_random_checkpoint(directory, target_config(size), seed=LAYERS[size])
    return directory


def _layer(prefix: str, inputs: int, *, hidden_norm: bool, qk_norm: bool = False, bias: bool = False) -> dict[str, Any]:
    """List a layer's tensors. inputs: of its q, k and v projections."""
    width, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    projections = {"q_proj": (width, inputs), "k_proj": (kv, inputs), "v_proj": (kv, inputs), "o_proj": (HIDDEN, width)}
    shapes: dict[str, Any] = {f"{prefix}.self_attn.{name}.weight": shape for name, shape in projections.items()}
    if bias:
        shapes |= {f"{prefix}.self_attn.{name}.bias": shape[:1] for name, shape in projections.items()}
    if qk_norm:
        shapes |= {f"{prefix}.self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
    shapes |= {f"{prefix}.mlp.{name}_proj.weight": (MLP, HIDDEN) for name in ("gate", "up")}
    shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, MLP)
    norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if hidden_norm else ()))
    return shapes | {f"{prefix}.{name}.weight": (HIDDEN,) for name in norms}


EMBEDDING, FC, NORM = (
    {"embed_tokens.weight": (VOCAB, HIDDEN)},
    {"fc.weight": (HIDDEN, 3 * HIDDEN)},
    {"norm.weight": (HIDDEN,)},
)
HEAD, WHOLE_HEAD = {"lm_head.weight": (DRAFT_VOCAB, HIDDEN)}, {"lm_head.weight": (VOCAB, HIDDEN)}
MAPS = {"d2t": (DRAFT_VOCAB,), "t2d": (VOCAB,)}
MIDLAYER = _layer("midlayer", 2 * HIDDEN, hidden_norm=True)
FOUR_LAYERS = dict(MIDLAYER)
for number in (1, 2, 3):
    FOUR_LAYERS |= _layer(f"layers.{number}", HIDDEN, hidden_norm=False)
GEOMETRY = {
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "use_cache": True,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "model_type": "llama",
}


def _amazon(size: str, outputs: tuple[int, ...]) -> PublicDrafter:
    return PublicDrafter(
        f"amazon/GPT-OSS-{size.upper()}-P-EAGLE",
        size,
        {
            **GEOMETRY,
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 4,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3,
            "draft_vocab_size": VOCAB,
            "ptd_token_id": MASK,
            "torch_dtype": "bfloat16",
            "eos_token_id": STOP,
        },
        {**EMBEDDING, **FC, **NORM, **WHOLE_HEAD, **FOUR_LAYERS}
        | {"mask_hidden": (1, 1, 3 * HIDDEN), "d2t": (VOCAB,), "t2d": (VOCAB,)},
        outputs,
        kind="P-EAGLE",
        d2t="zeros",
    )


def _nvidia(
    name: str,
    eagle_config: Mapping[str, Any] | None,
    tensors: Mapping[str, Any],
    top: Mapping[str, Any] | None = None,
    **about: Any,
) -> PublicDrafter:
    config = {
        **GEOMETRY,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": None,
        "rope_theta": 10000.0,
        "rope_scaling": LLAMA3,
        "torch_dtype": "bfloat16",
    }
    own = {} if eagle_config is None else {"eagle_config": eagle_config}
    return PublicDrafter(f"nvidia/gpt-oss-120b-Eagle3-{name}", "120b", config | own | (top or {}), tensors, **about)


def _redhat(
    version: str, size: str, extra: Mapping[str, Any], tensors: Mapping[str, Any], **about: Any
) -> PublicDrafter:
    qk_norm = about.pop("qk_norm", False)
    first = _layer("layers.0", 2 * HIDDEN, hidden_norm=True, qk_norm=qk_norm)
    return PublicDrafter(
        f"RedHatAI/gpt-oss-{size}-speculator.eagle3{version}",
        size,
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"architectures": ["GptOssForCausalLM"], "name_or_path": f"openai/gpt-oss-{size}"},
            },
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": True,
            "target_hidden_size": None,
            "transformer_layer_config": {
                **GEOMETRY,
                "model_type": "qwen3" if qk_norm else "llama",
                "rope_theta": 500000.0,
                "rope_scaling": None,
            },
            "torch_dtype": "bfloat16",
            **extra,
        },
        {**EMBEDDING, **FC, **NORM, **HEAD, **MAPS, **first, **tensors},
        **about,
    )


def _specforge(owner: str, size: str, ids: tuple[int, ...]) -> PublicDrafter:
    """SpecForge writes outputs under eagle_config, and the target's type above layers of Llama."""
    return PublicDrafter(
        f"{owner}-{size}-EAGLE3",
        size,
        {
            **GEOMETRY,
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {IDS: list(ids), "use_aux_hidden_state": True},
            "draft_vocab_size": DRAFT_VOCAB,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "torch_dtype": "bfloat16",
        },
        {**EMBEDDING, **FC, **NORM, **HEAD, **MAPS, **MIDLAYER},
        ids,
    )


def _specdrift(ids: tuple[int, ...]) -> PublicDrafter:
    num_aux_layers = len(ids)
    norms = {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(num_aux_layers)}
    return PublicDrafter(
        f"SpecDrift-{num_aux_layers}",
        "20b",
        {
            **GEOMETRY,
            "architectures": ["LlamaForCausalLMEagle3"],
            IDS: [layer + 1 for layer in ids],
            "num_aux_hidden_states": num_aux_layers,
            "fc_norm": True,
            "norm_output": True,
            "draft_vocab_size": DRAFT_VOCAB,
            "target_hidden_size": HIDDEN,
            "rope_theta": 150000.0,
            "rope_scaling": YARN,
        },
        {**EMBEDDING, **NORM, **HEAD, **MAPS, **MIDLAYER, **norms, "fc.weight": (HIDDEN, num_aux_layers * HIDDEN)},
        ids,
    )


def _dflash(size: str, block: int, ids: tuple[int, ...]) -> PublicDrafter:
    layers = 8
    config = {name: value for name, value in GEOMETRY.items() if name not in ("pretraining_tp", "mlp_bias")}
    tensors: dict[str, Any] = {"fc.weight": (HIDDEN, len(ids) * HIDDEN), "hidden_norm.weight": (HIDDEN,), **NORM}
    for layer in range(layers):
        tensors |= _layer(f"layers.{layer}", HIDDEN, hidden_norm=False, qk_norm=True, bias=True)
    return PublicDrafter(
        f"z-lab/gpt-oss-{size}-DFlash",
        size,
        config
        | {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "attention_bias": True,
            "attention_dropout": 0.0,
            "block_size": block,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(ids)},
            "dtype": "bfloat16",
            "layer_types": ["full_attention"] * layers,
            "model_type": "qwen3" if size == "20b" else "gpt_oss",
            "num_hidden_layers": layers,
            "num_target_layers": LAYERS[size],
            "rope_theta": 150000.0,
            "rope_scaling": YARN,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        tensors,
        ids,
        kind="DFlash",
    )


WITHOUT_AUX = "use_aux_hidden_state is False"
NESTED = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
NO_ENDS = {**FC, **NORM, **MIDLAYER}  # the target's embedding and head
V3_IDS = [24, 30, 36]
V3 = NESTED | {IDS: V3_IDS, "norm_before_fc": True}
INPUT_NORM = {"input_norm.weight": (3 * HIDDEN,)}
DRAFTERS = [
    _amazon("20b", (1, 11, 20)),
    _amazon("120b", (1, 17, 32)),
    _nvidia("v1", None, NO_ENDS, outputs=(1, 17, 32)),
    _nvidia("long-context", NESTED | {IDS: [1, 17, 32]}, NO_ENDS, outputs=(1, 17, 32)),
    _nvidia("v3", V3, {**NO_ENDS, **INPUT_NORM}, outputs=(23, 29, 35)),
    _nvidia("v3 (ids at the top, too)", V3, {**NO_ENDS, **INPUT_NORM}, {IDS: V3_IDS}, outputs=(23, 29, 35)),
    _nvidia("short-context", NESTED | {"use_aux_hidden_state": False}, NO_ENDS, refused=WITHOUT_AUX),
    _nvidia("throughput", NESTED | {"use_aux_hidden_state": False}, NO_ENDS, refused=WITHOUT_AUX),
    _redhat("", "20b", {}, {}, outputs=(1, 11, 20)),
    _redhat("-v2", "120b", {IDS: [2, 18, 33], "norm_before_fc": True}, INPUT_NORM, outputs=(1, 17, 32)),
    _redhat("-qwen3", "20b", {}, {}, outputs=(1, 11, 20), qk_norm=True),
    PublicDrafter(
        "nebius/EAGLE3-gpt-oss-120b",
        "120b",
        {
            **GEOMETRY,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": DRAFT_VOCAB,
            "rope_theta": 150000.0,
            "rope_scaling": YARN,
        },
        {**FC, **NORM, **HEAD, **MAPS, **MIDLAYER},
        (1, 17, 32),
        d2t="int32",
    ),
    _specdrift((1, 11, 20)),
    _specdrift((1, 6, 11, 16, 20)),
    _specforge("lmsys/EAGLE3-gpt-oss", "120b", (1, 17, 33)),
    _specforge("zhuyksir/EAGLE3-gpt-oss", "20b", (1, 11, 21)),
    _dflash("20b", 8, (1, 6, 11, 16, 21)),
    _dflash("120b", 10, (1, 9, 17, 25, 33)),
]
