"""Read and write target checkpoints. The only file of the target with tensor names.

Reads two layouts, Hugging Face's and openai's `original/`, and writes Hugging Face's. Both interleave the experts' gate
and up rows and store matrices output dimension first, except for unquantised Hugging Face experts, which are input
dimension first.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from peagle.ops.checkpoint import CONFIG, Checkpoint, read_checkpoint, read_json, write_checkpoint
from peagle.ops.errors import InputError
from peagle.ops.expert_matmul import (
    ExpandedExperts,
    Experts,
    FusedExperts,
    NativeExperts,
    PackedExperts,
    TiledExperts,
    alternate,
    tile,
)
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix, arrange, arrange_embedding, as_matrix
from peagle.ops.linear.packed import BFLOAT16, pack_floats, pack_mxfp4
from peagle.ops.memory import aligned, available_memory_bytes, stack, to_device
from peagle.ops.mxfp4 import BLOCK, NAN_SCALE, dequantize, quantize
from peagle.ops.settings import brief, mapping
from target.config import TargetConfig, parse_config, render_config
from target.params import AttentionParams, LayerParams, MoeParams, TargetParams
from target.shard import LEAVES, Leaf, Part, Place

# Dense experts go side by side in two matrices (FusedExperts) up to this many experts per selected one. Computing the
# unselected ones costs that factor in multiplications and saves every gather: at 8 experts top-4 the plain matmuls win
# at any number of rows; at 32 top-4 a decoded token would read eight times the weights it needs.
FUSED_UP_TO = 4
# of the memory that is free when loading starts; the rest is for caches, activations and other processes
_MEMORY_SHARE = 0.8
WHOLE = Place()

ExpertsChoice = Literal["auto", "packed", "expanded"]
Layout = Literal["packed", "expanded", "fused"]


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A model in memory, and its directory's other settings."""

    params: TargetParams
    config: TargetConfig  # of a rank's part, its local geometry
    stop_token_ids: tuple[int, ...]  # may be empty
    experts: Layout  # their layout in memory
    mxfp4: bool  # whether the files hold quantised experts


@dataclasses.dataclass(frozen=True)
class TargetFiles:
    """A directory's content, by config.json and the headers of its tensors."""

    config: TargetConfig
    stop_token_ids: tuple[int, ...]
    stop_tokens_from: str | None  # the file that names them
    mxfp4: bool
    num_parameters: int
    num_expert_parameters: int  # of num_parameters, those in the experts' matrices
    tensor_bytes: int
    expert_tensor_bytes: int  # of tensor_bytes, those that experts "packed" leaves as they are


def inspect_target(directory: Path) -> TargetFiles:
    """Check a directory as load_target does, without reading weights. Raises the same InputErrors."""
    checkpoint, names, config, mxfp4 = _open(Path(directory))
    counts = {True: 0, False: 0}
    sizes = {True: 0, False: 0}
    for name, shape in _shapes(names, config, mxfp4).items():
        matrix = name.removesuffix(names.blocks_suffix).removesuffix(names.scales_suffix)
        of_experts = matrix.endswith((names.gate_up, names.down))
        size = int(np.prod(shape))
        sizes[of_experts] += size * checkpoint.dtype(name).itemsize
        if not (mxfp4 and of_experts):
            counts[of_experts] += size
        elif name.endswith(names.blocks_suffix):
            counts[of_experts] += 2 * size
    stops, named_by = _stop_tokens(checkpoint, config.vocab_size)
    return TargetFiles(
        config, stops, named_by, mxfp4, sum(counts.values()), counts[True], sum(sizes.values()), sizes[True]
    )


def weight_bytes(
    directory: Path,
    *,
    dtype: Any = jnp.float32,
    experts: ExpertsChoice = "auto",
    implementation: Implementation | None = None,
    place: Place = WHOLE,
) -> int:
    """Compute the memory that load_target with these options will take, to a percent.

    Reads no weights. Raises the same InputErrors.
    """
    checkpoint, names, config, mxfp4 = _open(Path(directory))
    native = implementation == "native"
    layout = _choose_layout(config, np.dtype(dtype), experts, mxfp4, native, Path(directory))
    wanted, part = np.dtype(dtype).itemsize, Part(config, place, mxfp4)
    total = 0
    for name, (leaf, shape) in _leaves(names, config, mxfp4).items():
        size, stored = int(np.prod(part.shape(leaf, shape))), checkpoint.dtype(name)
        quantised = mxfp4 and name.endswith((names.blocks_suffix, names.scales_suffix))
        if quantised and layout == "packed":
            total += size
        elif quantised:
            codes = 2 * size if name.endswith(names.blocks_suffix) else 0
            total += codes * (BFLOAT16.itemsize if native else wanted)
        else:
            total += size * (stored.itemsize if native and stored == BFLOAT16 else wanted)
    return total


def load_target(
    directory: Path,
    *,
    dtype: Any = jnp.float32,
    experts: ExpertsChoice = "auto",
    implementation: Implementation | None = None,
    progress: Callable[[int, int], None] | None = None,
    place: Place = WHOLE,
) -> LoadedTarget:
    """Load the model in a directory: float parameters in `dtype`, on JAX's default device.

    place: load this rank's part only (target.shard), and read no other bytes than its own.

    experts "packed" keeps MXFP4 experts as they are, "expanded" dequantises them once, at load. "auto" expands on CPU
    if that fits in free memory (dequantising inside the graph is many times slower there), and packs on accelerators.
    Unquantised experts are always expanded. Calls progress(bytes read, bytes in all) while it reads.

    implementation "native" packs all matrices for the compiled CPU kernels, if they run (peagle.ops.native.available).
    bfloat16 matrices then stay bfloat16, for activations in `dtype`, and MXFP4 experts stay MXFP4 unless "expanded"
    makes them bfloat16.

    On CPU, memory peaks within 1.15 of the parameters (`weight_bytes`): files are mapped, not read in; at any time one
    expert, or one other matrix, is in memory twice, and the largest matrix comes first.

    Raises InputError naming a tensor that is missing, surplus, wrongly shaped or corrupt, a config that is not GPT-OSS,
    and "packed" for a checkpoint that is not MXFP4.
    """
    directory = Path(directory)
    checkpoint, names, config, mxfp4 = _open(directory)
    stop_token_ids, _ = _stop_tokens(checkpoint, config.vocab_size)
    layout = _choose_layout(config, np.dtype(dtype), experts, mxfp4, implementation == "native", directory)
    part = Part(config, place, mxfp4)
    if progress is not None:
        leaves = _leaves(names, config, mxfp4).items()
        sizes = (part.read_size(*each) * checkpoint.dtype(name).itemsize for name, each in leaves)
        checkpoint.watch(progress, sum(sizes))
    params = _Reader(checkpoint, names, part, np.dtype(dtype), mxfp4, implementation).params(layout)
    checkpoint.finish()
    return LoadedTarget(params, part.config, stop_token_ids, layout, mxfp4)


def chosen_experts(
    directory: Path, dtype: Any, experts: ExpertsChoice, implementation: Implementation | None
) -> Literal["packed", "expanded"]:
    """Decide what "auto" is for load_target with these options. Raises InputError as it does."""
    _, _, config, mxfp4 = _open(Path(directory))
    layout = _choose_layout(config, np.dtype(dtype), experts, mxfp4, implementation == "native", Path(directory))
    return "packed" if layout == "packed" else "expanded"


def load_ends(
    directory: Path, dtype: Any = jnp.float32, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array | PackedMatrix]:
    """Read a target's embedding [V, D] and head [D, V] alone. Raises InputError as load_target does."""
    checkpoint, names, config, mxfp4 = _open(Path(directory))
    part = Part(config, WHOLE, mxfp4)
    return _Reader(checkpoint, names, part, np.dtype(dtype), mxfp4, implementation).ends()


def save_target(
    directory: Path,
    params: TargetParams,
    config: TargetConfig,
    *,
    dtype: Any = ml_dtypes.bfloat16,
    mxfp4: bool = True,
    stop_token_ids: Sequence[int] = (),
    pad_token_id: int | None = None,
    tokenizer_files: Mapping[str, bytes] | None = None,
    shard_bytes: int | None = None,
) -> None:
    """Write parameters to a directory as a Hugging Face checkpoint, from any expert layout but NativeExperts.

    Experts are rounded to MXFP4, or without `mxfp4` stored in `dtype` like everything else. With dtype float32 and
    mxfp4 False, load_target returns equal parameters; so it does for experts that were MXFP4 before.

    Raises InputError if MXFP4 is wanted for widths that are not multiples of 32, or if a value is not finite.
    """
    tensor_shapes(config, mxfp4)  # raises for widths that do not fit, before anything is written
    write_target(
        directory,
        config,
        _tensors(params, config, np.dtype(dtype), mxfp4),
        mxfp4=mxfp4,
        stop_token_ids=stop_token_ids,
        pad_token_id=pad_token_id,
        extra_files=tokenizer_files,
        shard_bytes=shard_bytes,
    )


def write_target(
    directory: Path,
    config: TargetConfig,
    tensors: Iterator[tuple[str, np.ndarray]],
    *,
    mxfp4: bool,
    stop_token_ids: Sequence[int] = (),
    pad_token_id: int | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    shard_bytes: int | None = None,
) -> None:
    """Write a checkpoint of tensors with their final names and shapes (`tensor_shapes`), made one by one."""
    rendered = render_config(config)
    if stop_token_ids:
        rendered["eos_token_id"] = stop_token_ids[0]
    if pad_token_id is not None:
        rendered["pad_token_id"] = pad_token_id
    if mxfp4:
        rendered["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": list(_NOT_CONVERTED)}
    generation: dict[str, Any] = {"eos_token_id": list(stop_token_ids)} if stop_token_ids else {}
    if pad_token_id is not None:
        generation["pad_token_id"] = pad_token_id
    extra: dict[str, bytes | Mapping[str, Any]] = {**(extra_files or {})}
    if generation:
        extra["generation_config.json"] = generation
    write_checkpoint(directory, rendered, tensors, shard_bytes, extra)


def tensor_shapes(config: TargetConfig, mxfp4: bool) -> dict[str, tuple[int, ...]]:
    """List every tensor of a Hugging Face checkpoint of this geometry with its shape, by layer."""
    return _shapes(_HUGGING_FACE, config, mxfp4)


def tensor_leaves(config: TargetConfig, mxfp4: bool) -> dict[str, tuple[Leaf, tuple[int, ...]]]:
    """List the same tensors with their kind, which says how they are cut over ranks, and their shape."""
    return _leaves(_HUGGING_FACE, config, mxfp4)


@dataclasses.dataclass(frozen=True)
class _Names:
    embedding: str
    lm_head: str
    norm: str
    layer: str  # prefix of the names below; {} is the layer's number
    attention_norm: str
    qkv: tuple[str, ...]  # modules with .weight and .bias: three, or one that has them side by side
    out: str
    sinks: str
    moe_norm: str
    router: str
    gate_up: str
    gate_up_bias: str
    down: str
    down_bias: str
    blocks_suffix: str
    scales_suffix: str


_HUGGING_FACE = _Names(
    embedding="model.embed_tokens.weight",
    lm_head="lm_head.weight",
    norm="model.norm.weight",
    layer="model.layers.{}.",
    attention_norm="input_layernorm.weight",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    sinks="self_attn.sinks",
    moe_norm="post_attention_layernorm.weight",
    router="mlp.router",
    gate_up="mlp.experts.gate_up_proj",
    gate_up_bias="mlp.experts.gate_up_proj_bias",
    down="mlp.experts.down_proj",
    down_bias="mlp.experts.down_proj_bias",
    blocks_suffix="_blocks",
    scales_suffix="_scales",
)
# openai/gpt-oss, gpt_oss/torch/model.py and weights.py
_ORIGINAL = _Names(
    embedding="embedding.weight",
    lm_head="unembedding.weight",
    norm="norm.scale",
    layer="block.{}.",
    attention_norm="attn.norm.scale",
    qkv=("attn.qkv",),
    out="attn.out",
    sinks="attn.sinks",
    moe_norm="mlp.norm.scale",
    router="mlp.gate",
    gate_up="mlp.mlp1_weight",
    gate_up_bias="mlp.mlp1_bias",
    down="mlp.mlp2_weight",
    down_bias="mlp.mlp2_bias",
    blocks_suffix=".blocks",
    scales_suffix=".scales",
)
_NOT_CONVERTED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


def _open(directory: Path) -> tuple[Checkpoint, _Names, TargetConfig, bool]:
    """Open a checkpoint and check its tensors; return (checkpoint, names, config, whether it is MXFP4)."""
    checkpoint = read_checkpoint(directory)
    names = _ORIGINAL if _is_original(checkpoint) else _HUGGING_FACE
    try:
        config = parse_config(_from_original(checkpoint.config) if names is _ORIGINAL else checkpoint.config)
        _refuse_other_quantization(checkpoint.config)
    except InputError as error:
        raise InputError(f"{checkpoint.directory / CONFIG}: {error}") from None
    _refuse_split_experts(checkpoint)
    mxfp4 = any(name.endswith(names.scales_suffix) for name in checkpoint.names)
    checkpoint.expect(_shapes(names, config, mxfp4))
    return checkpoint, names, config, mxfp4


def _is_original(checkpoint: Checkpoint) -> bool:
    return "model_type" not in checkpoint.config and checkpoint.has(_ORIGINAL.embedding)


def _from_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate openai's config.json for parse_config: other names, RoPE that is always YaRN, alternating layers."""
    factor = config.get("rope_scaling_factor", 1.0)
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_slow": config.get("rope_ntk_alpha", 1.0),
        "beta_fast": config.get("rope_ntk_beta", 32.0),
        "truncate": False,
        "original_max_position_embeddings": config.get("initial_context_length", 4096),
    }
    theta = {"rope_theta": config.get("rope_theta", 150000.0)}
    rope = {**theta, **(yarn if factor > 1 else {"rope_type": "default"})}
    others = {key: value for key, value in config.items() if not key.startswith("rope_")}
    return {**others, "model_type": "gpt_oss", "rope_parameters": rope, "layer_types": None}


def _refuse_other_quantization(config: Mapping[str, Any]) -> None:
    method = mapping(config, "quantization_config").get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise InputError(
            f"quantization_config names {brief(method)}; expected mxfp4 or no quantisation: use the original checkpoint"
        )


_SPLIT_EXPERT = re.compile(r"\.(gate_up_projs|down_projs|experts)\.\d+\.")


def _refuse_split_experts(checkpoint: Checkpoint) -> None:
    """Raise InputError for experts that are stored one by one, as fine-tuners write them for bitsandbytes and LoRA."""
    split = sorted(name for name in checkpoint.names if _SPLIT_EXPERT.search(name))
    if split:
        raise InputError(
            f"{checkpoint.directory} stores each expert by itself ({split[0]}, ...), as fine-tuning tools do; expected "
            "all experts of a layer in one tensor (mlp.experts.gate_up_proj): save the merged model in the layout of "
            "openai/gpt-oss, such as with the tool's own export to Hugging Face"
        )


def _shapes(names: _Names, config: TargetConfig, mxfp4: bool) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in _leaves(names, config, mxfp4).items()}


def _leaves(names: _Names, config: TargetConfig, mxfp4: bool) -> dict[str, tuple[Leaf, tuple[int, ...]]]:
    """List every tensor with its kind and its shape."""
    c = config
    width, experts, hidden = c.num_heads * c.head_dim, c.num_experts, c.hidden_size
    kv_width = c.num_kv_heads * c.head_dim
    qkv = [("queries", width), ("keys and values", kv_width), ("keys and values", kv_width)]
    if len(names.qkv) == 1:
        qkv = [("qkv", width + 2 * kv_width)]
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {names.embedding: ("embedding", (c.vocab_size, hidden))}

    def expert_matrix(leaf: str, name: str, outputs: int, inputs: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        if not mxfp4:
            return {name: (leaf, (experts, inputs, outputs))}
        if inputs % BLOCK:
            raise InputError(f"MXFP4 needs widths that are multiples of {BLOCK}, got {inputs} inputs of {name}")
        leaf, scales = f"{leaf}, MXFP4", (experts, outputs, inputs // BLOCK)
        return {name + names.blocks_suffix: (leaf, (*scales, BLOCK // 2)), name + names.scales_suffix: (leaf, scales)}

    for layer in range(c.num_layers):
        own: dict[str, tuple[str, tuple[int, ...]]] = {names.attention_norm: ("norms", (hidden,))}
        for module, (leaf, outputs) in zip(names.qkv, qkv, strict=True):
            own |= {f"{module}.weight": (leaf, (outputs, hidden)), f"{module}.bias": (leaf, (outputs,))}
        own |= {f"{names.out}.weight": ("output projection", (hidden, width))}
        own |= {f"{names.out}.bias": ("output bias", (hidden,)), names.sinks: ("sinks", (c.num_heads,))}
        own |= {names.moe_norm: ("norms", (hidden,))}
        own |= {f"{names.router}.weight": ("router", (experts, hidden)), f"{names.router}.bias": ("router", (experts,))}
        own |= expert_matrix("gate and up", names.gate_up, 2 * c.expert_width, hidden)
        own |= {names.gate_up_bias: ("gate and up bias", (experts, 2 * c.expert_width))}
        own |= expert_matrix("down", names.down, hidden, c.expert_width)
        own |= {names.down_bias: ("down bias", (experts, hidden))}
        shapes |= {names.layer.format(layer) + name: each for name, each in own.items()}
    shapes |= {names.norm: ("norms", (hidden,)), names.lm_head: ("head", (c.vocab_size, hidden))}
    return {name: (LEAVES[leaf], shape) for name, (leaf, shape) in shapes.items()}


def _stop_tokens(checkpoint: Checkpoint, vocab_size: int) -> tuple[tuple[int, ...], str | None]:
    """Find (the stop tokens, the file that names them); ((), None) if no file does.

    The first of these that names any counts: generation_config.json, config.json, the tokenizer's files.
    """
    directory, generation = checkpoint.directory, "generation_config.json"
    configs = {"config.json": checkpoint.config}
    if (directory / generation).exists():
        configs = {generation: read_json(directory, generation), **configs}
    for name, config in configs.items():
        ids = config.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
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
            if token and (found := _token_id(directory, token)) is not None:
                return (found,), name
    return (), None


def _token_id(directory: Path, token: str) -> int | None:
    """Look up a special token's id by its spelling; None if tokenizer.json does not list it."""
    if not (directory / "tokenizer.json").exists():
        return None
    tokenizer = read_json(directory, "tokenizer.json")
    try:
        ids = {each["content"]: each["id"] for each in tokenizer.get("added_tokens") or ()}
        found = ids.get(token, ((tokenizer.get("model") or {}).get("vocab") or {}).get(token))
    except (TypeError, KeyError, AttributeError):
        found = None
    return found if isinstance(found, int) else None


def _choose_layout(
    config: TargetConfig, dtype: np.dtype, experts: ExpertsChoice, mxfp4: bool, native: bool, directory: Path
) -> Layout:
    if experts not in ("auto", "packed", "expanded"):
        raise InputError(f"experts {experts!r}: expected auto, packed or expanded")
    if experts == "packed" and not mxfp4:
        raise InputError(
            f"{directory}: experts packed needs an MXFP4 checkpoint, but this one's experts are not quantised"
        )
    if experts == "packed" or (experts == "auto" and mxfp4 and (native or not _expanding_pays(config, dtype))):
        return "packed"
    if native:
        return "expanded"
    return "fused" if config.num_experts <= FUSED_UP_TO * config.top_k else "expanded"


def _expanding_pays(config: TargetConfig, dtype: np.dtype) -> bool:
    if jax.default_backend() != "cpu":
        return False
    weights = sum(int(np.prod(shape)) for shape in _shapes(_HUGGING_FACE, config, mxfp4=False).values())
    return weights * dtype.itemsize <= _MEMORY_SHARE * available_memory_bytes()


class _Reader:
    """Reads a checkpoint's tensors one by one as parameters."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: _Names,
        part: Part,
        dtype: np.dtype,
        mxfp4: bool,
        implementation: Implementation | None,
    ) -> None:
        self._checkpoint, self._names, self._dtype = checkpoint, names, dtype
        self._part, self._config = part, part.config
        self._leaves = _leaves(names, part.whole, mxfp4)
        self._mxfp4, self._implementation = mxfp4, implementation

    def ends(self) -> tuple[jax.Array, jax.Array | PackedMatrix]:
        """Read the embedding and the head."""
        # the head first: the largest matrix is in memory twice for a moment, before anything else is
        lm_head = self._matrix(self._names.lm_head)
        return arrange_embedding(self._floats(self._names.embedding), self._dtype, self._implementation), lm_head

    def params(self, layout: Layout) -> TargetParams:
        embedding, lm_head = self.ends()
        return TargetParams(
            embedding=embedding,
            layers=tuple(self._layer(index, layout) for index in range(self._config.num_layers)),
            norm=self._vector(self._names.norm),
            lm_head=lm_head,
            implementation=self._implementation,
        )

    def _layer(self, index: int, layout: Layout) -> LayerParams:
        names, prefix = self._names, self._names.layer.format(index)
        readers: dict[str, Callable[[str], Experts]] = {
            "packed": self._packed,
            "expanded": self._expanded,
            "fused": self._fused,
        }
        native = self._implementation == "native"
        experts = self._packed_for_native(prefix, layout) if native else readers[layout](prefix)
        return LayerParams(
            attention=AttentionParams(
                norm=self._vector(prefix + names.attention_norm),
                qkv=self._matrix(*(f"{prefix}{module}.weight" for module in names.qkv)),
                qkv_bias=self._vector(*(f"{prefix}{module}.bias" for module in names.qkv)),
                out=self._matrix(f"{prefix}{names.out}.weight"),
                out_bias=self._vector(f"{prefix}{names.out}.bias"),
                sinks=self._vector(prefix + names.sinks),
            ),
            moe=MoeParams(
                norm=self._vector(prefix + names.moe_norm),
                router=self._matrix(f"{prefix}{names.router}.weight"),
                router_bias=self._vector(f"{prefix}{names.router}.bias"),
                experts=experts,
            ),
        )

    def _floats(self, name: str) -> np.ndarray:
        self._expect_floats(name)
        leaf, shape = self._leaves[name]
        if not self._part.has(leaf):
            self._checkpoint.ignore(name)
            return np.zeros(self._part.shape(leaf, shape), self._checkpoint.dtype(name))
        return self._checkpoint.take(name, shape, self._part.cuts(leaf))

    def _each(self, name: str) -> Iterator[np.ndarray]:
        """Read a tensor of one held expert after the other."""
        leaf, shape = self._leaves[name]
        return self._checkpoint.parts(name, shape, self._part.cuts(leaf))

    def _expect_floats(self, name: str) -> None:
        dtype = self._checkpoint.dtype(name)
        if dtype.kind not in "fV":  # V: bfloat16
            raise InputError(f"{self._checkpoint.directory}: tensor {name} has dtype {dtype}; expected floats")

    def _vector(self, *names: str) -> jax.Array:
        """Read vectors and concatenate them."""
        return to_device(np.concatenate([self._floats(name).astype(self._dtype) for name in names]))

    def _matrix(self, *names: str) -> jax.Array | PackedMatrix:
        """Read matrices [outputs, inputs] and stack their outputs into one."""
        stacked = self._floats(names[0]) if len(names) == 1 else np.concatenate([self._floats(name) for name in names])
        return arrange(stacked, self._dtype, self._implementation)

    def _packed_experts(self, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Read (blocks, scales) of one expert after the other."""
        names = [name + suffix for suffix in (self._names.blocks_suffix, self._names.scales_suffix)]
        for each in names:
            if (dtype := self._checkpoint.dtype(each)) != np.uint8:
                raise InputError(f"{self._checkpoint.directory}: tensor {each} has dtype {dtype}; expected uint8")
        for blocks, scales in zip(*map(self._each, names), strict=True):
            if np.any(scales == NAN_SCALE):
                raise InputError(
                    f"{self._checkpoint.directory}: tensor {names[1]} has a scale of 255 (NaN): the file is corrupt"
                )
            yield blocks, scales

    def _expert_matrices(self, name: str) -> Iterator[np.ndarray]:
        """Read [inputs, outputs] of one expert after the other, not yet in the wanted dtype."""
        if self._mxfp4:
            for blocks, scales in self._packed_experts(name):
                yield dequantize(blocks, scales).T
        else:
            self._expect_floats(name)
            yield from self._each(name)

    def _packed(self, prefix: str) -> PackedExperts | TiledExperts:
        """Read a layer's experts as stored; on a Hopper GPU lay them out for its kernels, a layer at a time."""
        names = self._names
        gate_up_blocks, gate_up_scales = self._packed_pair(prefix + names.gate_up)
        down_blocks, down_scales = self._packed_pair(prefix + names.down)
        packed = PackedExperts(
            gate_up_blocks=gate_up_blocks,
            gate_up_scales=gate_up_scales,
            gate_up_bias=self._vector(prefix + names.gate_up_bias),
            down_blocks=down_blocks,
            down_scales=down_scales,
            down_bias=self._vector(prefix + names.down_bias),
        )
        if self._implementation == "xla" or self._part.place.ranks > 1:
            return packed
        return tile(packed, self._config.top_k)

    def _packed_pair(self, name: str) -> tuple[jax.Array, jax.Array]:
        """Read (blocks, scales) of all experts, as stored."""
        blocks, scales = self._on_device(self._packed_experts(name))
        return blocks, scales

    def _expanded(self, prefix: str) -> ExpandedExperts:
        c, names, count = self._config, self._names, self._part.num_experts
        gate_up = aligned((count, c.hidden_size, 2 * c.expert_width), self._dtype)
        for expert, matrix in enumerate(self._expert_matrices(prefix + names.gate_up)):
            gate_up[expert, :, : c.expert_width] = matrix[:, 0::2]
            gate_up[expert, :, c.expert_width :] = matrix[:, 1::2]
        down = aligned((count, c.expert_width, c.hidden_size), self._dtype)
        for expert, matrix in enumerate(self._expert_matrices(prefix + names.down)):
            down[expert] = matrix
        gate, up = self._gate_and_up_bias(prefix)
        return ExpandedExperts(
            gate_up=to_device(gate_up),
            gate_up_bias=to_device(np.concatenate([gate, up], axis=-1)),
            down=to_device(down),
            down_bias=self._vector(prefix + names.down_bias),
        )

    def _fused(self, prefix: str) -> FusedExperts:
        c, names, count = self._config, self._names, self._part.num_experts
        gate_up = aligned((c.hidden_size, 2, count, c.expert_width), self._dtype)
        for expert, matrix in enumerate(self._expert_matrices(prefix + names.gate_up)):
            gate_up[:, 0, expert] = matrix[:, 0::2]
            gate_up[:, 1, expert] = matrix[:, 1::2]
        down = aligned((count, c.expert_width, c.hidden_size), self._dtype)
        for expert, matrix in enumerate(self._expert_matrices(prefix + names.down)):
            down[expert] = matrix
        gate, up = self._gate_and_up_bias(prefix)
        return FusedExperts(
            gate_up=to_device(gate_up.reshape(c.hidden_size, -1)),
            gate_up_bias=to_device(np.concatenate([gate.ravel(), up.ravel()])),
            down=to_device(down.reshape(-1, c.hidden_size)),
            down_bias=self._vector(prefix + names.down_bias),
        )

    def _packed_for_native(self, prefix: str, layout: Layout) -> NativeExperts:
        c, names = self._config, self._names
        gate_up_bias = alternate(self._floats(prefix + names.gate_up_bias).astype(np.float32))
        data, scales = self._pack_experts(prefix + names.gate_up, layout, alternate)
        gate_up = PackedMatrix(data, scales, c.hidden_size, gate_up_bias.shape[1])
        data, scales = self._pack_experts(prefix + names.down, layout, lambda rows: rows)
        return NativeExperts(
            gate_up=gate_up,
            gate_up_bias=to_device(gate_up_bias),
            down=PackedMatrix(data, scales, c.expert_width, c.hidden_size),
            down_bias=to_device(self._floats(prefix + names.down_bias).astype(np.float32)),
            hidden=c.expert_width,
        )

    def _pack_experts(
        self, name: str, layout: Layout, order: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Pack all experts' matrices; return (data, scales). `order` reorders the outputs of [1, outputs, *rest]."""
        if layout == "packed":
            data, scales = self._on_device(
                pack_mxfp4(order(blocks[None])[0], order(scales[None])[0])
                for blocks, scales in self._packed_experts(name)
            )
            return data, scales
        # MXFP4 values are exact in bfloat16
        dtype = BFLOAT16 if self._mxfp4 else self._dtype
        rows = (order(matrix.T[None])[0] for matrix in self._expert_matrices(name))
        (data,) = self._on_device(
            (pack_floats(each if each.dtype == BFLOAT16 else each.astype(dtype)),) for each in rows
        )
        return data, None

    def _on_device(self, experts: Iterable[tuple[np.ndarray, ...]]) -> tuple[jax.Array, ...]:
        """Stack the experts' arrays on the device; at most one expert is in memory twice."""
        return tuple(map(to_device, stack(experts, self._part.num_experts)))

    def _gate_and_up_bias(self, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        bias = self._floats(prefix + self._names.gate_up_bias).astype(self._dtype)
        return bias[:, 0::2], bias[:, 1::2]


def _tensors(
    params: TargetParams, config: TargetConfig, dtype: np.dtype, mxfp4: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of the Hugging Face layout with its name."""
    names = _HUGGING_FACE
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    splits = (queries, queries + keys)

    def vector(name: str, value: Any) -> tuple[str, np.ndarray]:
        return name, _finite(name, np.asarray(value)).astype(dtype)

    yield vector(names.embedding, params.embedding)
    for index, layer in enumerate(params.layers):
        prefix, attention, moe = names.layer.format(index), layer.attention, layer.moe
        yield vector(prefix + names.attention_norm, attention.norm)
        weights = np.split(as_matrix(attention.qkv).T, splits)
        biases = np.split(np.asarray(attention.qkv_bias), splits)
        for module, weight, bias in zip(names.qkv, weights, biases, strict=True):
            yield vector(f"{prefix}{module}.weight", weight)
            yield vector(f"{prefix}{module}.bias", bias)
        yield vector(f"{prefix}{names.out}.weight", as_matrix(attention.out).T)
        yield vector(f"{prefix}{names.out}.bias", attention.out_bias)
        yield vector(prefix + names.sinks, attention.sinks)
        yield vector(prefix + names.moe_norm, moe.norm)
        yield vector(f"{prefix}{names.router}.weight", as_matrix(moe.router).T)
        yield vector(f"{prefix}{names.router}.bias", moe.router_bias)
        for name, value in _expert_tensors(moe.experts, config, mxfp4).items():
            yield (prefix + name, value) if value.dtype == np.uint8 else vector(prefix + name, value)
    yield vector(names.norm, params.norm)
    yield vector(names.lm_head, as_matrix(params.lm_head).T)


def _expert_tensors(experts: Experts, config: TargetConfig, mxfp4: bool) -> dict[str, np.ndarray]:
    names = _HUGGING_FACE
    pairs: dict[str, tuple[Any, Any]]
    biases: dict[str, Any]
    if isinstance(experts, PackedExperts) and mxfp4:
        pairs = {
            names.gate_up: (experts.gate_up_blocks, experts.gate_up_scales),
            names.down: (experts.down_blocks, experts.down_scales),
        }
        biases = {names.gate_up_bias: experts.gate_up_bias, names.down_bias: experts.down_bias}
    else:
        gate_up, gate_up_bias, down, down_bias = _dense_experts(experts, config)
        biases = {names.gate_up_bias: gate_up_bias, names.down_bias: down_bias}
        if not mxfp4:
            return {names.gate_up: gate_up, names.down: down, **biases}
        pairs = {
            name: quantize(_finite(name, matrix).swapaxes(-1, -2).astype(np.float32))
            for name, matrix in ((names.gate_up, gate_up), (names.down, down))
        }
    packed = {name + names.blocks_suffix: np.asarray(blocks) for name, (blocks, _) in pairs.items()}
    packed |= {name + names.scales_suffix: np.asarray(scales) for name, (_, scales) in pairs.items()}
    return packed | {name: np.asarray(bias) for name, bias in biases.items()}


def _dense_experts(experts: Experts, config: TargetConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (gate_up [E, D, 2F] interleaved, its bias [E, 2F] interleaved, down [E, F, D], its bias [E, D])."""
    count, width, hidden = config.num_experts, config.expert_width, config.hidden_size
    if isinstance(experts, NativeExperts | TiledExperts):
        raise TypeError("a model packed for the kernels cannot be saved; load it for 'xla'")
    if isinstance(experts, PackedExperts):
        gate_up = dequantize(np.asarray(experts.gate_up_blocks), np.asarray(experts.gate_up_scales)).swapaxes(-1, -2)
        down = dequantize(np.asarray(experts.down_blocks), np.asarray(experts.down_scales)).swapaxes(-1, -2)
        return gate_up, np.asarray(experts.gate_up_bias), down, np.asarray(experts.down_bias)
    if isinstance(experts, FusedExperts):
        gate_up = np.asarray(experts.gate_up).reshape(hidden, 2, count, width).transpose(2, 0, 3, 1)
        bias = np.asarray(experts.gate_up_bias).reshape(2, count, width).transpose(1, 2, 0)
    else:
        gate_up = np.asarray(experts.gate_up).reshape(count, hidden, 2, width).swapaxes(-1, -2)
        bias = np.asarray(experts.gate_up_bias).reshape(count, 2, width).swapaxes(-1, -2)
    return (
        gate_up.reshape(count, hidden, 2 * width),
        bias.reshape(count, 2 * width),
        np.asarray(experts.down).reshape(count, width, hidden),
        np.asarray(experts.down_bias),
    )


def _finite(name: str, value: np.ndarray) -> np.ndarray:
    if not np.all(np.isfinite(value)):
        raise InputError(f"tensor {name} has values that are not finite: the model diverged, nothing was written")
    return value
