"""Write a GPT-OSS checkpoint as a GGUF file for llama.cpp.

MXFP4 experts are kept bit for bit, other matrices are bfloat16, vectors and the router float32, as llama.cpp's own
converter has them. Without a vocabulary llama.cpp takes token ids as they are; its server needs one.

ggml keeps a block of 32 as 17 bytes: the scale, then bytes whose low nibbles are values 0..15 and whose high nibbles
are values 16..31. Checkpoints keep values 2i and 2i + 1 together in byte i.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from peagle.ops.checkpoint import Checkpoint, read_checkpoint
from peagle.ops.errors import InputError
from peagle.ops.mxfp4 import BLOCK
from peagle.ops.rope import Yarn
from target.config import SLIDING, TargetConfig
from target.load import inspect_target

ARCHITECTURE = "gpt-oss"
SWIGLU_LIMIT = 7.0  # a constant of llama.cpp
MATRIX, EXACT = "BF16", "F32"  # types of ggml

_WHOLE = {
    "token_embd.weight": ("model.embed_tokens.weight", MATRIX),
    "output_norm.weight": ("model.norm.weight", EXACT),
    "output.weight": ("lm_head.weight", MATRIX),
}
_PER_LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", EXACT),
    "post_attention_norm.weight": ("post_attention_layernorm.weight", EXACT),
    "attn_q.weight": ("self_attn.q_proj.weight", MATRIX),
    "attn_q.bias": ("self_attn.q_proj.bias", EXACT),
    "attn_k.weight": ("self_attn.k_proj.weight", MATRIX),
    "attn_k.bias": ("self_attn.k_proj.bias", EXACT),
    "attn_v.weight": ("self_attn.v_proj.weight", MATRIX),
    "attn_v.bias": ("self_attn.v_proj.bias", EXACT),
    "attn_output.weight": ("self_attn.o_proj.weight", MATRIX),
    "attn_output.bias": ("self_attn.o_proj.bias", EXACT),
    "attn_sinks.weight": ("self_attn.sinks", EXACT),
    "ffn_gate_inp.weight": ("mlp.router.weight", EXACT),
    "ffn_gate_inp.bias": ("mlp.router.bias", EXACT),
}
# name: the checkpoint's matrix, and which of its output rows, since gate and up alternate
_EXPERTS = {
    "ffn_gate_exps": ("gate_up_proj", slice(0, None, 2)),
    "ffn_up_exps": ("gate_up_proj", slice(1, None, 2)),
    "ffn_down_exps": ("down_proj", slice(None)),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file: its ggml type, its bytes' shape, and how to make them."""

    name: str
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]  # uint8


def write_gguf(directory: Path, path: Path, tokens: Sequence[str] | None = None) -> None:
    """Write the file, one tensor in memory at a time. tokens: a byte-level vocabulary.

    Raises InputError for a config that llama.cpp's GPT-OSS has no key for, ModuleNotFoundError without gguf.
    """
    import gguf

    config, mxfp4 = _check(directory)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _add_metadata(writer, config)
    _add_vocabulary(writer, tokens)
    tensors = list(_tensors(read_checkpoint(directory), config, mxfp4))
    for tensor in tensors:
        size = int(np.prod(tensor.shape))
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.uint8), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.make())
    writer.close()


def ggml_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Reorder a checkpoint's blocks [..., n, 16] and scales [..., n] to ggml's [..., 17 n]."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    half = BLOCK // 2
    packed = codes[..., :half] | (codes[..., half:] << 4)
    return np.concatenate([scales[..., None], packed], axis=-1).reshape(*scales.shape[:-1], -1)


def _check(directory: Path) -> tuple[TargetConfig, bool]:
    files = inspect_target(directory)
    config = files.config
    if not isinstance(config.rope.scaling, Yarn) or config.rope.scaling.concentration is not None:
        raise InputError(f"{directory}: llama.cpp's GPT-OSS rotates by YaRN without a factor of its own; not compared")
    if config.swiglu_limit != SWIGLU_LIMIT:
        raise InputError(f"{directory}: swiglu_limit is {config.swiglu_limit}; llama.cpp has {SWIGLU_LIMIT} built in")
    return config, files.mxfp4


def _add_metadata(writer: Any, config: TargetConfig) -> None:
    import gguf

    yarn = config.rope.scaling
    assert isinstance(yarn, Yarn)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.expert_width)
    writer.add_expert_feed_forward_length(config.expert_width)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.top_k)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(yarn.factor)
    writer.add_rope_scaling_orig_ctx_len(yarn.original_length)
    writer.add_rope_scaling_yarn_beta_fast(yarn.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(yarn.beta_slow)


def _add_vocabulary(writer: Any, tokens: Sequence[str] | None) -> None:
    if tokens is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens])
    writer.add_token_merges([" ".join(tokens[:2])])  # none may be missing


def _tensors(checkpoint: Checkpoint, config: TargetConfig, mxfp4: bool) -> Iterator[Tensor]:
    """Yield every tensor of the file, in its order."""
    for name, (source, kind) in _WHOLE.items():
        yield _plain(checkpoint, name, source, kind)
    for layer in range(config.num_layers):
        prefix, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for name, (source, kind) in _PER_LAYER.items():
            yield _plain(checkpoint, theirs + name, prefix + source, kind)
        for name, (matrix, rows) in _EXPERTS.items():
            source = f"{prefix}mlp.experts.{matrix}"
            expert = _mxfp4_experts if mxfp4 else _float_experts
            yield expert(checkpoint, f"{theirs}{name}.weight", source, rows)
            yield _plain(checkpoint, f"{theirs}{name}.bias", f"{source}_bias", EXACT, rows)


def _plain(checkpoint: Checkpoint, name: str, source: str, kind: str, rows: slice = slice(None)) -> Tensor:
    """Take a tensor as it lies, or some of its last axis."""

    def make() -> np.ndarray:
        return _to_bytes(checkpoint.take(source)[..., rows], kind)

    *outer, width = checkpoint.shape(source)
    return Tensor(name, kind, (*outer, len(range(width)[rows]) * _item_bytes(kind)), make)


def _mxfp4_experts(checkpoint: Checkpoint, name: str, source: str, rows: slice) -> Tensor:
    def make() -> np.ndarray:
        blocks, scales = checkpoint.take(f"{source}_blocks"), checkpoint.take(f"{source}_scales")
        return ggml_mxfp4(blocks[:, rows], scales[:, rows])

    experts, outputs, blocks = checkpoint.shape(f"{source}_scales")
    return Tensor(name, "MXFP4", (experts, len(range(outputs)[rows]), blocks * (1 + BLOCK // 2)), make)


def _float_experts(checkpoint: Checkpoint, name: str, source: str, rows: slice) -> Tensor:
    """Transpose unquantised matrices [experts, inputs, outputs]; ggml has outputs first."""

    def make() -> np.ndarray:
        return _to_bytes(checkpoint.take(source).swapaxes(-1, -2)[:, rows], MATRIX)

    experts, inputs, outputs = checkpoint.shape(source)
    return Tensor(name, MATRIX, (experts, len(range(outputs)[rows]), inputs * _item_bytes(MATRIX)), make)


def _to_bytes(values: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=bfloat16 if kind == MATRIX else np.float32).view(np.uint8)


def _item_bytes(kind: str) -> int:
    return 2 if kind == MATRIX else 4
