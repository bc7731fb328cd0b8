"""The geometry of a GPT-OSS model, from config.json alone: 20b, 120b and the demo differ by values only."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from peagle.ops.errors import InputError
from peagle.ops.rope import Llama3, RopeConfig, Yarn, parse_rope
from peagle.ops.settings import brief, number, whole

SLIDING, FULL = "sliding_attention", "full_attention"
SWIGLU_ALPHA = 1.702
DEFAULT_THETA = 150000.0
# the default of a gpt_oss config.json without RoPE settings (transformers' GptOssConfig)
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Geometry and constants of one model. Hashable: it may be a static argument of a jitted function."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None  # None: no layer has a window
    num_experts: int
    top_k: int
    expert_width: int
    swiglu_limit: float
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} key/value heads")
        if not 1 <= self.top_k <= self.num_experts:
            raise InputError(f"{self.top_k} experts per token of {self.num_experts}: expected 1..{self.num_experts}")
        if unknown := set(self.layer_types) - {SLIDING, FULL}:
            raise InputError(f"unknown layer types {sorted(unknown)}; expected {SLIDING} or {FULL}")
        if self.sliding_window is None and SLIDING in self.layer_types:
            raise InputError(f"sliding_window is null beside layers of {SLIDING}; expected the positions they see")

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    def window(self, layer: int) -> int | None:
        """Return how many keys a layer's query attends to, its own included; None: all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return the default aux layers of P-EAGLE drafters, as OUTPUTS of 0-based layers: 1, n//2 - 1, n - 4.

    vLLM names layers by their INPUT: 2, n//2, n - 3. By output 20b has 1, 11, 20 and 120b has 1, 17, 32. Raises
    InputError below 7 layers, for which the rule is not defined.
    """
    if num_layers < 7:
        raise InputError(
            f"a target of {num_layers} layers has no default aux layers (defined from 7 layers on); name them in the "
            "drafter's config.json, under eagle_aux_hidden_state_layer_ids, or with --aux-layer-ids"
        )
    return (1, num_layers // 2 - 1, num_layers - 4)


# settings that change the result and have one supported value: (key, supported, its meaning)
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("hidden_act", "silu", "silu"),
    ("attention_bias", True, "true: GPT-OSS has attention biases"),
    ("tie_word_embeddings", False, "false: GPT-OSS has its own lm_head"),
    ("swiglu_alpha", SWIGLU_ALPHA, f"{SWIGLU_ALPHA}"),
)


def parse_config(config: Mapping[str, Any]) -> TargetConfig:
    """Read the TargetConfig of a config.json. Raises InputError naming a setting that is missing or not GPT-OSS's."""
    if (kind := config.get("model_type")) != "gpt_oss":
        raise InputError(f"model_type is {brief(kind)}; expected 'gpt_oss'")
    for key, supported, meaning in _FIXED:
        if config.get(key, supported) != supported:
            raise InputError(f"{key} is {brief(config[key])}, which is not supported; expected {meaning}")
    num_layers = whole(config, "num_hidden_layers")
    layer_types = config.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise InputError(f"layer_types is {brief(layer_types)}; expected a list of {num_layers}, one for each layer")
    head_dim = whole(config, "head_dim", 64)
    windowed = config.get("sliding_window") is not None or SLIDING in layer_types
    return TargetConfig(
        hidden_size=whole(config, "hidden_size"),
        num_heads=whole(config, "num_attention_heads"),
        num_kv_heads=whole(config, "num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=whole(config, "vocab_size"),
        layer_types=tuple(map(str, layer_types)),
        sliding_window=whole(config, "sliding_window") if windowed else None,
        num_experts=whole(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
        top_k=whole(config, "num_experts_per_tok" if "num_experts_per_tok" in config else "experts_per_token", 4),
        expert_width=whole(config, "intermediate_size"),
        swiglu_limit=number(config, "swiglu_limit", 7.0),
        rms_norm_eps=number(config, "rms_norm_eps", 1e-5),
        max_positions=whole(config, "max_position_embeddings", 131072),
        rope=parse_rope(head_dim, _with_rope(config), default_theta=DEFAULT_THETA),
    )


def render_config(config: TargetConfig) -> dict[str, Any]:
    """Render a model's config.json; parse_config reads the same TargetConfig, transformers the same model."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_width,
        "num_hidden_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "swiglu_limit": config.swiglu_limit,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        **_render_rope(config.rope),
    }


def _with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    named = config.get("rope_parameters") or config.get("rope_scaling")
    return config if named else {**config, "rope_scaling": _DEFAULT_ROPE}


def _render_rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.scaling is None:  # only the new spelling can express "no scaling" (_DEFAULT_ROPE)
        return {"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}}
    scaling: dict[str, Any] = {
        "factor": rope.scaling.factor,
        "original_max_position_embeddings": rope.scaling.original_length,
    }
    if isinstance(rope.scaling, Llama3):
        scaling |= {
            "rope_type": "llama3",
            "low_freq_factor": rope.scaling.low_freq_factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
        }
    if isinstance(rope.scaling, Yarn):
        scaling |= {
            "rope_type": "yarn",
            "beta_fast": rope.scaling.beta_fast,
            "beta_slow": rope.scaling.beta_slow,
            "truncate": rope.scaling.truncate,
        }
        if rope.scaling.concentration is not None:
            scaling["attention_factor"] = rope.scaling.concentration
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
