"""Read how public GPT-OSS checkpoints spell their config.json and name their tensors. Reads no weights.

    transformers    openai/gpt-oss-20b and 120b; the layout that this project writes
    original        openai's own `original/`: q, k, v in one tensor, other keys, no model_type

Both interleave the experts' gate and up rows. Matrices have the output dimension first, except the unquantised experts
of transformers, which have the input dimension first. Sources: transformers models/gpt_oss; openai/gpt-oss
gpt_oss/torch/model.py and weights.py.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peagle.base.checkpoint import CONFIG, Checkpoint, read_checkpoint, read_json
from peagle.base.errors import InputError
from peagle.base.settings import Key, brief, mapping, naming, number, read_keys, refuse_others, render_keys, whole
from peagle.ops.mxfp4 import BLOCK
from peagle.ops.rope import parse_rope, render_rope
from target.config import FULL, SLIDING, SWIGLU_ALPHA, TargetConfig
from target.shard import TENSOR_KINDS, TensorKind

ARCHITECTURE, MODEL_TYPE = "GptOssForCausalLM", "gpt_oss"
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
_KEYS = (
    Key("hidden_size", "hidden_size", whole),
    Key("expert_width", "intermediate_size", whole),
    Key("num_heads", "num_attention_heads", whole),
    Key("num_kv_heads", "num_key_value_heads", whole),
    Key("head_dim", "head_dim", whole, 64),
    Key("num_experts", "num_local_experts", whole, None, ("num_experts",)),
    Key("top_k", "num_experts_per_tok", whole, 4, ("experts_per_token",)),
    Key("swiglu_limit", "swiglu_limit", number, 7.0),
    Key("rms_norm_eps", "rms_norm_eps", number, 1e-5),
    Key("vocab_size", "vocab_size", whole),
    Key("max_positions", "max_position_embeddings", whole, 131072),
)
# settings that change the result and have one supported value: (key, supported, its meaning)
_FIXED = (
    ("hidden_act", "silu", "silu"),
    ("attention_bias", True, "true: GPT-OSS has attention biases"),
    ("tie_word_embeddings", False, "false: GPT-OSS has its own lm_head"),
    ("swiglu_alpha", SWIGLU_ALPHA, f"{SWIGLU_ALPHA}"),
)
_NOT_CONVERTED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
_SPLIT_EXPERT = re.compile(r"\.(gate_up_projs|down_projs|experts)\.\d+\.")


@dataclasses.dataclass(frozen=True)
class Dialect:
    """A checkpoint layout.

    names: from our names to the file's, with {} for the layer's number; `out` and `router` are modules with .weight and
    .bias. qkv: three such modules, or one with all three concatenated. blocks, scales: suffixes of quantised experts.
    translate: rewrites a config.json to transformers' keys.
    """

    names: Mapping[str, str]
    qkv: tuple[str, ...]
    blocks: str
    scales: str
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    def of_layer(self, layer: int) -> "Dialect":
        names = {ours: theirs.format(layer) for ours, theirs in self.names.items()}
        return dataclasses.replace(self, names=names, qkv=tuple(module.format(layer) for module in self.qkv))


def _from_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate openai's config.json. Its RoPE has other keys and is YaRN; its layer types alternate."""
    factor = config.get("rope_scaling_factor", 1.0)
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_slow": config.get("rope_ntk_alpha", 1.0),
        "beta_fast": config.get("rope_ntk_beta", 32.0),
        "truncate": False,
        "original_max_position_embeddings": config.get("initial_context_length", 4096),
    }
    rope = {"rope_theta": config.get("rope_theta", DEFAULT_THETA), **(yarn if factor > 1 else {"rope_type": "default"})}
    others = {key: value for key, value in config.items() if not key.startswith("rope_")}
    return {**others, "model_type": MODEL_TYPE, "rope_parameters": rope, "layer_types": None}


TRANSFORMERS = Dialect(
    names={
        "embedding": "model.embed_tokens.weight",
        "lm_head": "lm_head.weight",
        "norm": "model.norm.weight",
        "attention_norm": "model.layers.{}.input_layernorm.weight",
        "out": "model.layers.{}.self_attn.o_proj",
        "sinks": "model.layers.{}.self_attn.sinks",
        "moe_norm": "model.layers.{}.post_attention_layernorm.weight",
        "router": "model.layers.{}.mlp.router",
        "gate_up": "model.layers.{}.mlp.experts.gate_up_proj",
        "gate_up_bias": "model.layers.{}.mlp.experts.gate_up_proj_bias",
        "down": "model.layers.{}.mlp.experts.down_proj",
        "down_bias": "model.layers.{}.mlp.experts.down_proj_bias",
    },
    qkv=("model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.k_proj", "model.layers.{}.self_attn.v_proj"),
    blocks="_blocks",
    scales="_scales",
)
ORIGINAL = Dialect(
    names={
        "embedding": "embedding.weight",
        "lm_head": "unembedding.weight",
        "norm": "norm.scale",
        "attention_norm": "block.{}.attn.norm.scale",
        "out": "block.{}.attn.out",
        "sinks": "block.{}.attn.sinks",
        "moe_norm": "block.{}.mlp.norm.scale",
        "router": "block.{}.mlp.gate",
        "gate_up": "block.{}.mlp.mlp1_weight",
        "gate_up_bias": "block.{}.mlp.mlp1_bias",
        "down": "block.{}.mlp.mlp2_weight",
        "down_bias": "block.{}.mlp.mlp2_bias",
    },
    qkv=("block.{}.attn.qkv",),
    blocks=".blocks",
    scales=".scales",
    translate=_from_original,
)


class TargetCheckpoint(NamedTuple):
    """An open checkpoint of a target. mxfp4: its experts are quantised."""

    checkpoint: Checkpoint
    dialect: Dialect
    config: TargetConfig
    mxfp4: bool

    @property
    def tensors(self) -> dict[str, tuple[TensorKind, tuple[int, ...]]]:
        return tensor_kinds(self.config, self.mxfp4, self.dialect)


def open_target(directory: Path) -> TargetCheckpoint:
    """Open a checkpoint, read its config.json and check its tensors' names, shapes and dtypes.

    Raises InputError for a config.json that is not GPT-OSS's, and for tensors that are missing, surplus or of another
    shape or dtype.
    """
    checkpoint = read_checkpoint(directory)
    original = "model_type" not in checkpoint.config and checkpoint.has(ORIGINAL.names["embedding"])
    dialect = ORIGINAL if original else TRANSFORMERS
    with naming(checkpoint.directory / CONFIG):
        config = parse_config(dialect.translate(checkpoint.config))
        method = mapping(checkpoint.config, "quantization_config").get("quant_method", "mxfp4")
        if method != "mxfp4":
            raise InputError(
                f"quantization_config names {brief(method)}; expected mxfp4 or no quantisation: use the original "
                "checkpoint"
            )
    if split := sorted(name for name in checkpoint.names if _SPLIT_EXPERT.search(name)):
        raise InputError(
            f"{checkpoint.directory} stores each expert by itself ({split[0]}, ...), as fine-tuning tools do; expected "
            "all experts of a layer in one tensor (mlp.experts.gate_up_proj): save the merged model in the layout of "
            "openai/gpt-oss, such as with the tool's own export to Hugging Face"
        )
    mxfp4 = any(name.endswith(dialect.scales) for name in checkpoint.names)
    files = TargetCheckpoint(checkpoint, dialect, config, mxfp4)
    checkpoint.expect({name: shape for name, (_, shape) in files.tensors.items()})
    for name, (kind, _) in files.tensors.items():
        dtype = checkpoint.dtype(name)
        right = dtype.name == "uint8" if kind.mxfp4 else dtype.kind in "fV"  # V: bfloat16
        if not right:
            expected = "uint8" if kind.mxfp4 else "floats"
            raise InputError(f"{checkpoint.directory}: tensor {name} has dtype {dtype}; expected {expected}")
    return files


def parse_config(config: Mapping[str, Any]) -> TargetConfig:
    """Read a config.json. Raises InputError for a setting that is missing or not GPT-OSS's."""
    expect_gpt_oss(config)
    refuse_others(config, _FIXED)
    num_layers = whole(config, "num_hidden_layers")
    layer_types = config.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise InputError(f"layer_types is {brief(layer_types)}; expected a list of {num_layers}, one for each layer")
    fields = read_keys(_KEYS, config)
    windowed = config.get("sliding_window") is not None or SLIDING in layer_types
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    rope = config if stated else {**config, "rope_scaling": _DEFAULT_ROPE}
    return TargetConfig(
        **fields,
        layer_types=tuple(map(str, layer_types)),
        sliding_window=whole(config, "sliding_window") if windowed else None,
        rope=parse_rope(fields["head_dim"], rope, default_theta=DEFAULT_THETA),
    )


def expect_gpt_oss(config: Mapping[str, Any]) -> None:
    """Raise InputError for the config.json of another architecture."""
    if (kind := config.get("model_type")) != MODEL_TYPE:
        raise InputError(f"model_type is {brief(kind)}; expected {MODEL_TYPE!r}, since a target is a GPT-OSS model")


def render_config(config: TargetConfig, mxfp4: bool = False) -> dict[str, Any]:
    """Render the config.json from which parse_config, and transformers, read this model."""
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": list(_NOT_CONVERTED)}
    plain_rope = {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta}}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        **render_keys(_KEYS, config),
        "num_hidden_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        # a rope_scaling of null would mean _DEFAULT_ROPE
        **(plain_rope if config.rope.scaling is None else render_rope(config.rope)),
        **({"quantization_config": quantisation} if mxfp4 else {}),
    }


def tensor_kinds(
    config: TargetConfig, mxfp4: bool, dialect: Dialect = TRANSFORMERS
) -> dict[str, tuple[TensorKind, tuple[int, ...]]]:
    """List a checkpoint's tensors, by layer, with the kind (how it is sharded) and the shape of each.

    Raises InputError for widths that MXFP4 cannot hold.
    """
    c, experts, hidden = config, config.num_experts, config.hidden_size
    width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = [("queries", width), ("keys and values", kv_width), ("keys and values", kv_width)]
    if len(dialect.qkv) == 1:
        qkv = [("qkv", width + 2 * kv_width)]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        dialect.names["embedding"]: ("embedding", (c.vocab_size, hidden))
    }

    def matrices(kind: str, name: str, outputs: int, inputs: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        if not mxfp4:
            return {name: (kind, (experts, inputs, outputs))}
        if inputs % BLOCK:
            raise InputError(f"MXFP4 needs widths that are multiples of {BLOCK}, got {inputs} inputs of {name}")
        kind, scales = f"{kind}, MXFP4", (experts, outputs, inputs // BLOCK)
        return {name + dialect.blocks: (kind, (*scales, BLOCK // 2)), name + dialect.scales: (kind, scales)}

    for layer in range(c.num_layers):
        own = dialect.of_layer(layer)
        names = own.names
        tensors[names["attention_norm"]] = ("norms", (hidden,))
        for module, (kind, outputs) in zip(own.qkv, qkv, strict=True):
            tensors |= {f"{module}.weight": (kind, (outputs, hidden)), f"{module}.bias": (kind, (outputs,))}
        tensors |= {
            f"{names['out']}.weight": ("output projection", (hidden, width)),
            f"{names['out']}.bias": ("output bias", (hidden,)),
            names["sinks"]: ("sinks", (c.num_heads,)),
            names["moe_norm"]: ("norms", (hidden,)),
            f"{names['router']}.weight": ("router", (experts, hidden)),
            f"{names['router']}.bias": ("router", (experts,)),
            **matrices("gate and up", names["gate_up"], 2 * c.expert_width, hidden),
            names["gate_up_bias"]: ("gate and up bias", (experts, 2 * c.expert_width)),
            **matrices("down", names["down"], hidden, c.expert_width),
            names["down_bias"]: ("down bias", (experts, hidden)),
        }
    tensors |= {dialect.names["norm"]: ("norms", (hidden,)), dialect.names["lm_head"]: ("head", (c.vocab_size, hidden))}
    return {name: (TENSOR_KINDS[kind], shape) for name, (kind, shape) in tensors.items()}


def tensor_shapes(config: TargetConfig, mxfp4: bool) -> dict[str, tuple[int, ...]]:
    """List the tensors of a transformers checkpoint with their shapes, by layer."""
    return {name: shape for name, (_, shape) in tensor_kinds(config, mxfp4).items()}


def stop_tokens(checkpoint: Checkpoint, vocab_size: int) -> tuple[tuple[int, ...], str | None]:
    """Return (the stop tokens, the file that names them); ((), None) if no file does.

    The first file that names any is read: generation_config.json, config.json, the tokenizer's files.
    """
    directory, generation = checkpoint.directory, "generation_config.json"
    configs = {CONFIG: checkpoint.config}
    if (directory / generation).exists():
        configs = {generation: read_json(directory, generation), **configs}
    for name, config in configs.items():
        ids = config.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise InputError(
                f"{directory / name}: eos_token_id is {brief(ids)}; expected token ids in 0..{vocab_size - 1}, the "
                "model's vocabulary"
            )
        if ids:
            return tuple(dict.fromkeys(ids)), name
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).exists():
            token = read_json(directory, name).get("eos_token")
            token = token.get("content") if isinstance(token, Mapping) else token
            if token and (token_id := _token_id(directory, token)) is not None:
                return (token_id,), name
    return (), None


def _token_id(directory: Path, token: str) -> int | None:
    """Return a special token's id by its spelling; None if tokenizer.json does not list it."""
    if not (directory / "tokenizer.json").exists():
        return None
    tokenizer = read_json(directory, "tokenizer.json")
    try:
        ids = {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or ()}
        token_id = ids.get(token, ((tokenizer.get("model") or {}).get("vocab") or {}).get(token))
    except (TypeError, KeyError, AttributeError):
        return None
    return token_id if isinstance(token_id, int) else None
