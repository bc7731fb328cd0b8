"""How drafters' files name their tensors: tables of the parameters of a config."""

from typing import NamedTuple

from drafter.config import DrafterConfig

EMBEDDING, LM_HEAD, FC, MASK_HIDDEN = "embed_tokens.weight", "lm_head.weight", "fc.weight", "mask_hidden"
DRAFT_TO_TARGET, IN_DRAFT_VOCAB = "d2t", "t2d"


class Leaf(NamedTuple):
    """A parameter as files hold it: these tensors, with their outputs concatenated."""

    field: str
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int | None = None  # None: vectors


def own_leaves(config: DrafterConfig) -> list[Leaf]:
    """List the parameters outside the layers, except embedding, head, mask_hidden and d2t."""
    leaves = [
        Leaf("fc", (FC,), (config.hidden_size,), config.aux_width),
        Leaf("norm", ("norm.weight",), (config.hidden_size,)),
    ]
    if config.kind == "DFlash":
        leaves.append(Leaf("hidden_norm", ("hidden_norm.weight",), (config.hidden_size,)))
    elif config.aux_norm == "joint":
        leaves.append(Leaf("aux_norm", ("input_norm.weight",), (config.aux_width,)))
    elif config.aux_norm == "per_layer":
        names = tuple(f"fc_norm.{i}.weight" for i in range(config.num_aux_layers))
        leaves.append(Leaf("aux_norm", names, (config.target_hidden_size,) * len(names)))
    return leaves


def layer_leaves(config: DrafterConfig, layer: int, first_layer: str) -> list[Leaf]:
    """List the parameters of a layer. first_layer: the prefix of layer 0."""
    c, prefix = config, first_layer if layer == 0 else f"layers.{layer}"
    width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def norm(field: str, name: str, size: int = c.hidden_size) -> Leaf:
        return Leaf(field, (f"{prefix}.{name}.weight",), (size,))

    leaves = [norm("norm", "input_layernorm"), norm("mlp_norm", "post_attention_layernorm")]
    if layer == 0 and c.kind != "DFlash":
        leaves.append(norm("hidden_norm", "hidden_norm"))
    if c.qk_norm:
        leaves += [norm(f"{x}_norm", f"self_attn.{x[0]}_norm", c.head_dim) for x in ("query", "key")]
    for field, modules, outputs, inputs, biased in (
        ("qkv", ("q_proj", "k_proj", "v_proj"), (width, kv_width, kv_width), c.layer_input(layer), c.attention_bias),
        ("out", ("o_proj",), (c.hidden_size,), width, c.attention_bias),
        ("gate_up", ("gate_proj", "up_proj"), (c.mlp_width,) * 2, c.hidden_size, c.mlp_bias),
        ("down", ("down_proj",), (c.hidden_size,), c.mlp_width, c.mlp_bias),
    ):
        names = [f"{prefix}.{'self_attn' if field in ('qkv', 'out') else 'mlp'}.{module}" for module in modules]
        leaves.append(Leaf(field, tuple(f"{name}.weight" for name in names), outputs, inputs))
        if biased:
            leaves.append(Leaf(f"{field}_bias", tuple(f"{name}.bias" for name in names), outputs))
    return leaves
