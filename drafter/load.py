"""Read and write drafter checkpoints. The only file here with their tensor and setting names.

Three dialects (vllm llama_eagle3.py; speculators models/peagle, models/eagle3):

    AWS, vLLM    geometry at the top of config.json; layer 0 is `midlayer.*`; mask id in `ptd_token_id`
    pard naming  the same with `pard_token` or `mask_token_id`
    speculators  geometry under `transformer_layer_config`; layer 0 is `layers.0.*`; mask id in `mask_token_id`

An EAGLE-3 drafter is the same with neither a mask id nor `mask_hidden`. Two variants load as well: NeMo's, with
`model.` before the inner tensors' names, and SpecForge's, with the target's model_type above Llama layers.

Windows are `sliding_window` beside `layer_types` in the geometry, where speculators and vLLM read them. Without
layer_types a sliding_window means nothing, here as there.

A file loads whole or not at all: every tensor is consumed or named in an error, every parameter is filled or named, and
a setting that would change the result is followed or named. `t2d` repeats what `d2t` states, so the two are compared.
`norm_output` concerns EAGLE-3 alone. A `mask_hidden` of more than one vector is this project's own extension;
`refused_by` lists the servers that cannot load a file.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from drafter.config import DrafterConfig, check_aux_layer_ids
from drafter.params import DrafterParams, LayerParams
from peagle.ops.checkpoint import CONFIG, Checkpoint, read_checkpoint, write_checkpoint
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.kernels import Implementation
from peagle.ops.linear import PackedMatrix, SplitMatrix, arrange, arrange_embedding, as_matrix, take_outputs
from peagle.ops.linear.packed import BFLOAT16
from peagle.ops.memory import to_device
from peagle.ops.rope import RopeConfig, Yarn, parse_rope
from peagle.ops.settings import brief, flag, mapping, number, whole

Dialect = Literal["vllm", "speculators"]
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
NESTED = "transformer_layer_config"
AUX_LAYER_IDS, EAGLE_CONFIG = "eagle_aux_hidden_state_layer_ids", "eagle_config"
ARCHITECTURE = "LlamaForCausalLMEagle3"  # vLLM's name of both kinds
FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types
_EMBEDDING, _LM_HEAD, _FC, _MASK_HIDDEN = "embed_tokens.weight", "lm_head.weight", "fc.weight", "mask_hidden"

_STRIPPED = "model."  # NeMo's prefix
VLLM, PACKAGE = "vLLM", "the speculators package"  # other loaders of drafters

SPECULATORS = {"peagle": "PEagleSpeculator", "eagle3": "Eagle3Speculator"}  # speculators_model_type: architecture
DRAFTS_ELSEWHERE = {"peagle": 7, "eagle3": 3}  # the default K that other servers read from a speculators config

# settings that change the result and have one supported value: (key, supported, its meaning)
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("hidden_act", "silu", "a SiLU MLP"),
    ("is_causal", True, "causal attention"),
    ("logit_scale", 1.0, "unscaled logits"),
    ("partial_rotary_factor", 1.0, "heads rotated as a whole"),
    ("use_aux_hidden_state", True, "aux hidden states"),
    ("quantization_config", None, "plain weights"),
)


def load_drafter(
    directory: Path,
    dtype: DTypeLike | None = None,
    *,
    implementation: Implementation | None = None,
    target_embedding: jax.Array | np.ndarray | None = None,
    target_lm_head: jax.Array | np.ndarray | PackedMatrix | None = None,
    aux_layer_ids: Sequence[int] | None = None,
) -> tuple[DrafterParams, DrafterConfig]:
    """Load the drafter in a directory, in the given dtype or that of its fc weight.

    implementation "native" packs the matrices for the compiled CPU kernels and keeps bfloat16 ones bfloat16.
    aux_layer_ids: the target's layers whose outputs it reads, in place of those in config.json.

    Some drafters share the target's embedding or head and do not store it. Such a file loads only together with the
    target's tensors, loaded with the same implementation: target_embedding [V, D], target_lm_head [D, V] (narrowed to
    the draft vocabulary here). A stored tensor wins over a given one.

    Raises InputError, in one line, for anything missing, surplus, wrongly shaped or not supported. Warns if the map
    from draft ids to the target's looks wrong.
    """
    checkpoint = read_checkpoint(directory).without_prefix(_STRIPPED)
    config = parse_config(checkpoint, aux_layer_ids)
    dtype = jnp.dtype(checkpoint.dtype(_FC) if dtype is None else dtype)
    dtype = jnp.dtype(jnp.float32) if dtype == np.float64 else dtype
    reader = _Reader(checkpoint, config, dtype, implementation)
    draft_to_target = _draft_to_target(checkpoint, config)
    if (doubt := doubtful_map(checkpoint, config)) is not None:
        warnings.warn(doubt, InputWarning, stacklevel=2)
    params = DrafterParams(
        embedding=reader.embedding(target_embedding),
        aux_norm=reader.aux_norm(),
        fc=reader.matrix("fc", config.aux_width, config.hidden_size),
        mask_hidden=reader.mask_hidden(),
        layers=tuple(reader.layer(index) for index in range(config.num_layers)),
        norm=reader.vector("norm.weight", config.hidden_size),
        lm_head=reader.lm_head(target_lm_head, draft_to_target),
        draft_to_target=None if draft_to_target is None else jnp.asarray(draft_to_target),
        implementation=implementation,
    )
    checkpoint.ignore("t2d")
    checkpoint.finish()
    return params, config


def weight_bytes(directory: Path, dtype: DTypeLike, *, implementation: Implementation | None = None) -> int:
    """Compute the memory that load_drafter with these options will take beside the target, to a percent.

    Reads no weights. Raises InputError if the files cannot be read.
    """
    checkpoint = read_checkpoint(directory)
    total = 0
    for name in checkpoint.names - {"d2t", "t2d"}:
        stored = checkpoint.dtype(name)
        stays = implementation == "native" and stored == BFLOAT16
        itemsize = stored.itemsize if stays else jnp.dtype(dtype).itemsize
        total += int(np.prod(checkpoint.shape(name))) * itemsize
    return total


def shared_tensors(directory: Path) -> list[str]:
    """List the tensors that a drafter takes from its target: its embedding, its head. Reads no weights."""
    names = read_checkpoint(directory).without_prefix(_STRIPPED).names
    return [name for name in (_EMBEDDING, _LM_HEAD) if name not in names]


def is_drafter_config(config: Mapping[str, Any]) -> bool:
    """Recognise a drafter's config.json by its architecture, a mask token or nested geometry.

    Every project names the architecture after EAGLE: LlamaForCausalLMEagle3 (SGLang, SpecForge), Eagle3LlamaForCausalLM
    and PEagleDraftModel (vLLM), PEagleSpeculator, LlamaEagle3DraftModel (NeMo).
    """
    named = "eagle" in str(config.get("architectures")).lower()
    return named or NESTED in config or any(key in config for key in MASK_TOKEN_KEYS)


def parse_config(checkpoint: Checkpoint, aux_layer_ids: Sequence[int] | None = None) -> DrafterConfig:
    """Read the DrafterConfig from config.json, completed by tensor shapes (head geometry, width of aux_hidden).

    aux_layer_ids win over those of config.json. Raises InputError naming the setting that is missing, contradictory or
    not supported.
    """
    try:
        return _parse_config(checkpoint.without_prefix(_STRIPPED), aux_layer_ids)
    except InputError as error:
        message, directory = str(error), checkpoint.directory
        if message.startswith((str(directory), "--")):
            raise
        where = f"{directory}/" if message.startswith(CONFIG) else f"{directory / CONFIG}: "
        raise InputError(f"{where}{message}") from None


@dataclasses.dataclass(frozen=True)
class NamedAuxLayers:
    """Aux layers as one key of a config.json names them.

    The key decides what an id means. In `eagle_config` id i is the OUTPUT of layer i: SpecForge and SGLang write and
    read it so, vLLM ignores that key. At the top, or in a speculators drafter's geometry, id i is the INPUT of layer i,
    which is the output of layer i - 1: so vLLM reads it. Example: inputs [2, 12, 21] are outputs (1, 11, 20).
    """

    key: str
    ids: tuple[int, ...]
    are_outputs: bool

    @property
    def outputs(self) -> tuple[int, ...]:
        """The target's 0-based layers, by output. Raises InputError if an id names no layer's output."""
        first = self.written((0,))[0]
        if any(each < first for each in self.ids):
            hint = (
                "" if self.are_outputs else " (id i is the input of layer i, and that of layer 0 is no layer's output)"
            )
            raise InputError(
                f"config.json's {self.key} is {list(self.ids)}; expected {first} or more each{hint}: write the ids it "
                "was trained with, or give its outputs with --aux-layer-ids"
            )
        return tuple(each - first for each in self.ids)

    def written(self, outputs: Sequence[int]) -> list[int]:
        """Return the ids that mean these outputs under this key."""
        return [layer if self.are_outputs else layer + 1 for layer in outputs]

    @property
    def meaning(self) -> str:
        """How the ids are read, and why, in words."""
        if self.are_outputs:
            return "outputs, as SpecForge and SGLang write them there"
        return "inputs, each the output of the layer before, as vLLM reads them there"


TOP_AUX_LAYERS = NamedAuxLayers(AUX_LAYER_IDS, (), are_outputs=False)  # the key to write if a config.json has none


def named_aux_layers(config: Mapping[str, Any]) -> list[NamedAuxLayers]:
    """List every key of a config.json that names aux layers; the first one counts.

    Raises InputError if the ids are not a list of numbers.
    """
    geometry = config.get(NESTED) or {}
    places = (
        (AUX_LAYER_IDS, config, False),
        (f"{NESTED}.{AUX_LAYER_IDS}", geometry, False),
        (f"{EAGLE_CONFIG}.{AUX_LAYER_IDS}", config.get(EAGLE_CONFIG) or {}, True),
    )
    found = []
    for key, place, are_outputs in places:
        ids = place.get(AUX_LAYER_IDS) or ()
        if not isinstance(ids, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise InputError(f"config.json's {key} is {brief(ids)}; expected a list of layers, as [2, 12, 21]")
        if ids:
            found.append(NamedAuxLayers(key, tuple(ids), are_outputs))
    return found


def save_drafter(
    directory: Path,
    params: DrafterParams,
    config: DrafterConfig,
    dialect: Dialect = "vllm",
    verifier: str | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the drafter to a directory in that dialect; load_drafter returns the same bits and the same config.

    verifier: the name or path by which the speculators package finds the target (it loads no drafter without one).
    """
    tensors = to_tensors(params, config, dialect)
    rendered = render_config(config, dialect, str(params.dtype), verifier)
    write_checkpoint(directory, rendered, tensors, extra_files=extra_files)


def refused_by(config: DrafterConfig, dialect: Dialect) -> dict[str, str]:
    """List the other loaders that refuse a drafter in that dialect: {VLLM or PACKAGE: the reason}.

    Found with vLLM 0.32, speculators 0.9 and transformers 5.19, whose LlamaConfig checks the width against the heads;
    vLLM builds a LlamaConfig in its own dialect alone.
    """
    if config.num_mask_hiddens > 1:
        why = f"it has {config.num_mask_hiddens} mask hiddens, expected one"
        return dict.fromkeys((VLLM,) if dialect == "vllm" else (VLLM, PACKAGE), why)
    if config.hidden_size % config.num_heads:
        why = f"its width is {config.hidden_size}, expected a multiple of its {config.num_heads} heads"
        return {VLLM if dialect == "vllm" else PACKAGE: why}
    if dialect == "speculators" and config.hidden_size != config.target_hidden_size:
        return {PACKAGE: f"its width is {config.hidden_size}, expected the target's {config.target_hidden_size}"}
    return {}


def sort_aux_layers(params: DrafterParams, config: DrafterConfig) -> tuple[DrafterParams, DrafterConfig]:
    """Sort the aux layers ascending, since vLLM reads them in that order whatever config.json says.

    Permutes fc, the norm before it and mask_hidden to match, so the drafter's outputs stay the same.
    """
    ids = config.aux_layer_ids
    if ids is None or list(ids) == sorted(ids):
        return params, config
    order = np.argsort(ids)

    def sort(values: np.ndarray) -> jax.Array:  # [..., A]
        parts = np.split(values, config.num_taps, axis=-1)
        return jnp.asarray(np.concatenate([parts[layer] for layer in order], axis=-1))

    moved = dataclasses.replace(
        params,
        fc=sort(as_matrix(params.fc).T).T,
        aux_norm=None if params.aux_norm is None else sort(np.asarray(params.aux_norm)),
        mask_hidden=None if params.mask_hidden is None else sort(np.asarray(params.mask_hidden)),
    )
    return moved, dataclasses.replace(config, aux_layer_ids=tuple(sorted(ids)))


def to_tensors(params: DrafterParams, config: DrafterConfig, dialect: Dialect = "vllm") -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors by name, output dimension first, as every dialect stores them."""
    tensors: dict[str, np.ndarray] = {}

    def put(name: str, value: jax.Array | PackedMatrix | None) -> None:
        if value is not None:
            tensors[name] = np.ascontiguousarray(as_matrix(value).T)

    def put_parts(
        names: list[str], widths: list[int], weight: jax.Array | PackedMatrix, bias: jax.Array | None
    ) -> None:
        cuts = np.cumsum(widths)[:-1].tolist()
        for name, part in zip(names, np.split(as_matrix(weight), cuts, axis=1), strict=True):
            tensors[f"{name}.weight"] = np.ascontiguousarray(part.T)
        if bias is not None:
            for name, part in zip(names, np.split(np.asarray(bias), cuts), strict=True):
                tensors[f"{name}.bias"] = part

    put(_EMBEDDING, params.embedding.T)
    put(_FC, params.fc)
    put("norm.weight", params.norm)
    assert not isinstance(params.lm_head, SplitMatrix)  # one that is read, or trained
    put(_LM_HEAD, params.lm_head)
    if params.mask_hidden is not None:
        tensors[_MASK_HIDDEN] = np.asarray(params.mask_hidden)[None]
    if params.aux_norm is not None and config.aux_norm == "joint":
        put("input_norm.weight", params.aux_norm)
    elif params.aux_norm is not None:
        for number, weight in enumerate(np.split(np.asarray(params.aux_norm), config.num_taps)):
            tensors[f"fc_norm.{number}.weight"] = weight
    for index, layer in enumerate(params.layers):
        prefix = "midlayer" if index == 0 and dialect == "vllm" else f"layers.{index}"
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        put(f"{prefix}.input_layernorm.weight", layer.norm)
        put(f"{prefix}.hidden_norm.weight", layer.hidden_norm)
        put(f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm)
        put_parts([f"{attn}.{x}_proj" for x in "qkv"], _qkv_widths(config), layer.qkv, layer.qkv_bias)
        put(f"{attn}.q_norm.weight", layer.query_norm)
        put(f"{attn}.k_norm.weight", layer.key_norm)
        put(f"{attn}.o_proj.weight", layer.out)
        put(f"{attn}.o_proj.bias", layer.out_bias)
        names = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        put_parts(names, [config.mlp_width] * 2, layer.gate_up, layer.gate_up_bias)
        put(f"{mlp}.down_proj.weight", layer.down)
        put(f"{mlp}.down_proj.bias", layer.down_bias)
    ids = params.draft_to_target
    if ids is not None and not np.array_equal(ids, np.arange(config.vocab_size)):  # vLLM refuses a map to all tokens
        target_ids = np.asarray(ids).astype(np.int64)
        tensors["d2t"] = target_ids - np.arange(config.draft_vocab_size)
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), target_ids)
    return tensors


def render_config(config: DrafterConfig, dialect: Dialect, dtype: str, verifier: str | None = None) -> dict[str, Any]:
    """Render a drafter's config.json in that dialect.

    In the speculators dialect vLLM reads fc_norm and num_aux_hidden_states from the nested geometry alone.
    """
    geometry: dict[str, Any] = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": config.num_taps,
        **_render_rope(config.rope),
    }
    if config.max_positions is not None:
        geometry["max_position_embeddings"] = config.max_positions
    if config.narrowest_window is not None:
        geometry |= _render_windows(config)
    common: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.aux_norm == "joint",
        "fc_norm": config.aux_norm == "per_tap",
    }
    if config.aux_layer_ids is not None:  # at the top an id names a layer's input
        common["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in config.aux_layer_ids]
    kind = "peagle" if config.parallel else "eagle3"
    if config.parallel:
        common["ptd_token_id" if dialect == "vllm" else "mask_token_id"] = config.mask_token_id
    else:
        common["norm_output"] = config.norm_output
    if dialect == "vllm":
        return {"architectures": [ARCHITECTURE], "dtype": dtype, **geometry, **common}
    named = {"architectures": [SPECULATORS[kind]], "speculators_model_type": kind, "dtype": dtype}
    used = {
        "algorithm": kind,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFTS_ELSEWHERE[kind]}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": verifier, "architectures": ["GptOssForCausalLM"]},
    }
    nested = {**geometry, "fc_norm": common["fc_norm"]}
    return {**named, "speculators_config": used, NESTED: nested, **common}


class _Reader:
    """Reads a checkpoint's tensors as parameters: vectors cast, matrices arranged for `linear`."""

    def __init__(
        self, checkpoint: Checkpoint, config: DrafterConfig, dtype: jnp.dtype, implementation: Implementation | None
    ) -> None:
        self.checkpoint, self.config, self.dtype, self.implementation = checkpoint, config, dtype, implementation
        self.first_layer = _first_layer_prefix(checkpoint)

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Return the tensor as stored. Raises InputError if it does not hold floating-point numbers."""
        stored = self.checkpoint.dtype(name)
        if not jnp.issubdtype(stored, jnp.floating):
            raise InputError(
                f"{self.checkpoint.directory}: tensor {name} has dtype {stored}; expected floating-point weights "
                "(quantised drafters are not supported)"
            )
        return self.checkpoint.take(name, shape)

    def vector(self, name: str, width: int) -> jax.Array:
        return to_device(self.take(name, (width,)).astype(self.dtype))

    def matrix(self, name: str, inputs: int, outputs: int) -> jax.Array | PackedMatrix:
        return self._fused([name], inputs, [outputs])

    def _fused(self, names: list[str], inputs: int, outputs: list[int]) -> jax.Array | PackedMatrix:
        parts = [self.take(f"{n}.weight", (o, inputs)) for n, o in zip(names, outputs, strict=True)]
        return arrange(np.concatenate(parts, axis=0), self.dtype, self.implementation)

    def _fused_bias(self, names: list[str], outputs: list[int], present: bool) -> jax.Array | None:
        if not present:
            return None
        return jnp.concatenate([self.vector(f"{name}.bias", width) for name, width in zip(names, outputs, strict=True)])

    def layer(self, index: int) -> LayerParams:
        c = self.config
        prefix = self.first_layer if index == 0 else f"layers.{index}"
        qkv = [f"{prefix}.self_attn.{x}_proj" for x in "qkv"]
        gate_up = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        out, down = f"{prefix}.self_attn.o_proj", f"{prefix}.mlp.down_proj"
        return LayerParams(
            norm=self.vector(f"{prefix}.input_layernorm.weight", c.hidden_size),
            hidden_norm=self.vector(f"{prefix}.hidden_norm.weight", c.hidden_size) if index == 0 else None,
            qkv=self._fused(qkv, c.layer_input(index), _qkv_widths(c)),
            qkv_bias=self._fused_bias(qkv, _qkv_widths(c), c.attention_bias),
            query_norm=self.vector(f"{prefix}.self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
            key_norm=self.vector(f"{prefix}.self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
            out=self.matrix(out, c.num_heads * c.head_dim, c.hidden_size),
            out_bias=self._fused_bias([out], [c.hidden_size], c.attention_bias),
            mlp_norm=self.vector(f"{prefix}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=self._fused(gate_up, c.hidden_size, [c.mlp_width] * 2),
            gate_up_bias=self._fused_bias(gate_up, [c.mlp_width] * 2, c.mlp_bias),
            down=self.matrix(down, c.mlp_width, c.hidden_size),
            down_bias=self._fused_bias([down], [c.hidden_size], c.mlp_bias),
        )

    def aux_norm(self) -> jax.Array | None:
        c = self.config
        if c.aux_norm is None:
            return None
        if c.aux_norm == "joint":
            return self.vector("input_norm.weight", c.aux_width)
        names = [f"fc_norm.{number}.weight" for number in range(c.num_taps)]
        return jnp.concatenate([self.vector(name, c.target_hidden_size) for name in names])

    def mask_hidden(self) -> jax.Array | None:
        if not self.config.parallel:
            return None
        name, width, count = _MASK_HIDDEN, self.config.aux_width, self.config.num_mask_hiddens
        shape = self.checkpoint.shape(name)
        if not shape or shape[-1] != width or np.prod(shape) != count * width:
            raise InputError(
                f"{self.checkpoint.directory}: tensor {name} has shape {list(shape)}; expected [1, {count}, {width}], "
                f"the width of {self.config.num_taps} hidden states of {self.config.target_hidden_size}"
            )
        return to_device(self.take(name).reshape(count, width).astype(self.dtype))

    def embedding(self, shared: jax.Array | np.ndarray | None) -> jax.Array:
        shape = (self.config.vocab_size, self.config.hidden_size)
        if self.checkpoint.has(_EMBEDDING):
            return arrange_embedding(self.take(_EMBEDDING, shape), self.dtype, self.implementation)
        if shared is None:
            raise self._not_shared(_EMBEDDING)
        self._check_shared(_EMBEDDING, shared.shape, shape)
        return jnp.asarray(shared) if self.implementation == "native" else jnp.asarray(shared).astype(self.dtype)

    def lm_head(
        self, shared: jax.Array | np.ndarray | PackedMatrix | None, draft_to_target: np.ndarray | None
    ) -> jax.Array | PackedMatrix:
        c = self.config
        if self.checkpoint.has(_LM_HEAD):
            return self.matrix("lm_head", c.hidden_size, c.draft_vocab_size)
        if shared is None:
            raise self._not_shared(_LM_HEAD)
        shape = (shared.inputs, shared.outputs) if isinstance(shared, PackedMatrix) else shared.shape
        self._check_shared(_LM_HEAD, shape, (c.hidden_size, c.vocab_size))
        head = shared if isinstance(shared, PackedMatrix) else jnp.asarray(shared).astype(self.dtype)
        return head if draft_to_target is None else take_outputs(head, draft_to_target)

    def _not_shared(self, name: str) -> InputError:
        return InputError(
            f"{self.checkpoint.directory}: tensor {name} is missing: this drafter shares its target's; load it "
            "together with that target, or store the tensor in it"
        )

    def _check_shared(self, name: str, seen: tuple[int, ...], expected: tuple[int, int]) -> None:
        """Raises InputError if the target's tensor cannot stand in for the missing one."""
        if tuple(seen) != expected:
            raise InputError(
                f"{self.checkpoint.directory}: tensor {name} is missing, and the target's has shape {list(seen)}; "
                f"expected {list(expected)} to share it: store the tensor in the drafter"
            )


def _parse_config(checkpoint: Checkpoint, given: Sequence[int] | None) -> DrafterConfig:
    config = checkpoint.config
    geometry = mapping(config, NESTED) if NESTED in config else config
    settings = {**mapping(config, EAGLE_CONFIG), **geometry, **config}
    mask_token_id = _mask_token_id(checkpoint)
    parallel = mask_token_id is not None
    has_qk_norm = checkpoint.has(f"{_first_layer_prefix(checkpoint)}.self_attn.q_norm.weight")
    _refuse_variants(settings, config, geometry, parallel, has_qk_norm)
    if settings.get("tie_word_embeddings") and not checkpoint.has(_LM_HEAD):
        raise InputError(f"config.json says tie_word_embeddings true, which is not supported; store {_LM_HEAD}")

    num_layers = whole(geometry, "num_hidden_layers")
    hidden_size = whole(geometry, "hidden_size")
    num_heads = whole(geometry, "num_attention_heads")
    vocab_size = whole(geometry, "vocab_size")
    named = named_aux_layers(config)[:1]
    aux_layer_ids = tuple(given) if given is not None else named[0].outputs if named else None
    num_taps = whole(settings, "num_aux_hidden_states", len(aux_layer_ids) if aux_layer_ids else 3)
    if given is None and named and len(named[0].ids) != num_taps:
        raise InputError(
            f"config.json's {named[0].key} is {list(named[0].ids)} beside num_aux_hidden_states {num_taps}; "
            "expected one id for each"
        )
    if given is not None:
        check_aux_layer_ids(given, num_taps, "--aux-layer-ids")
    head_dim, num_kv_heads = _head_geometry(checkpoint, geometry, num_heads)
    joint, per_tap = flag(settings, "norm_before_fc"), flag(settings, "fc_norm")
    if joint and per_tap:
        raise InputError("config.json sets both norm_before_fc and fc_norm; expected one of them at most")
    return DrafterConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=whole(geometry, "intermediate_size"),
        target_hidden_size=_target_hidden_size(checkpoint, settings.get("target_hidden_size"), num_taps),
        vocab_size=vocab_size,
        draft_vocab_size=whole(settings, "draft_vocab_size", vocab_size),
        mask_token_id=mask_token_id,
        rope=parse_rope(head_dim, _with_outer_rope(geometry, config), default_theta=10000.0),
        num_taps=num_taps,
        aux_layer_ids=aux_layer_ids,
        qk_norm=has_qk_norm,
        aux_norm="joint" if joint else "per_tap" if per_tap else None,
        norm_before_residual=flag(settings, "norm_before_residual"),
        norm_output=flag(settings, "norm_output") and not parallel,
        num_mask_hiddens=_num_mask_hiddens(checkpoint) if parallel else 1,
        rms_norm_eps=number(geometry, "rms_norm_eps", 1e-6),  # transformers' LlamaConfig
        attention_bias=flag(geometry, "attention_bias"),
        mlp_bias=flag(geometry, "mlp_bias"),
        max_positions=None
        if geometry.get("max_position_embeddings") is None
        else whole(geometry, "max_position_embeddings"),
        windows=_windows(geometry, num_layers),
    )


def _with_outer_rope(geometry: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Add RoPE settings outside the nested geometry to it. Raises InputError if the two places disagree."""
    keys = ("rope_theta", "rope_parameters", "rope_scaling", "original_max_position_embeddings")
    outer = {key: config[key] for key in keys if key in config}
    for key, value in outer.items():
        if geometry.get(key) is not None and value is not None and geometry[key] != value:
            raise InputError(
                f"config.json says {key} {brief(geometry[key])} in {NESTED} and {brief(value)} outside; expected "
                "them equal: take out the one that the drafter was not trained with"
            )
    return {**geometry, **{key: value for key, value in outer.items() if geometry.get(key) is None}}


_LLAMA, _QWEN3 = "llama", "qwen3"  # layers without and with norms of each head's query and key


def _refuse_variants(
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    geometry: Mapping[str, Any],
    parallel: bool,
    has_qk_norm: bool,
) -> None:
    """Raises InputError for a setting that means another model than this one."""
    expected = "peagle" if parallel else "eagle3"
    if NESTED in config and (kind := config.get("speculators_model_type")) != expected:
        raise InputError(
            f"config.json says speculators_model_type {kind!r}; expected {expected!r}, since there is "
            f"{'a' if parallel else 'no'} tensor {_MASK_HIDDEN}"
        )
    expected_kind = _QWEN3 if has_qk_norm else _LLAMA
    kind = geometry.get("model_type", expected_kind)
    # SpecForge writes the target's model_type above Llama layers and reads the file as a LlamaConfig, so a missing
    # setting (theta, say) has Llama's default here as well
    of_target = kind == "gpt_oss" and "llama" in str(config.get("architectures")).lower()
    if kind != expected_kind and not (of_target and not has_qk_norm):
        raise InputError(
            f"config.json says the drafter's layers are model_type {kind!r}; expected {expected_kind!r}, since it has "
            f"{'' if has_qk_norm else 'no '}tensors q_norm and k_norm"
        )
    for key, supported, meaning in _FIXED:
        value = settings.get(key, supported)
        if value is not None and value != supported:
            raise InputError(f"config.json says {key} {brief(value)}, which is not supported; expected {meaning}")
    attention_bias = geometry.get("attention_bias", False)
    for key in ("qkv_bias", "bias"):
        if (value := geometry.get(key)) is not None and bool(value) != bool(attention_bias):
            raise InputError(
                f"config.json says {key} {value} beside attention_bias {attention_bias}; expected them equal"
            )


def _windows(geometry: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...] | None:
    """The window of each layer; None where all layers see everything."""
    kinds, window, used = (geometry.get(key) for key in ("layer_types", "sliding_window", "use_sliding_window"))
    if kinds is None:
        if used:
            raise InputError(
                f"config.json says use_sliding_window {brief(used)} but names no layer_types; expected one of "
                f"{FULL} and {SLIDING} for each layer"
            )
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {FULL, SLIDING}:
        raise InputError(
            f"config.json's layer_types is {brief(kinds)}; expected a list of {num_layers}, one of {FULL} and "
            f"{SLIDING} for each layer"
        )
    if SLIDING not in kinds:
        return None
    if used is False:
        raise InputError(
            f"config.json says use_sliding_window false beside layer_types {brief(kinds)}; expected them to agree: "
            "take out the one that the drafter was not trained with"
        )
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise InputError(
            f"config.json's sliding_window is {brief(window)} beside layers of {SLIDING}; expected the positions that "
            "such a layer sees, 1 or more"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _render_windows(config: DrafterConfig) -> dict[str, Any]:
    """What `_windows` reads. Raises InputError for windows that differ, for which config.json has no place."""
    windows = {window for window in config.windows or () if window is not None}
    if len(windows) > 1:
        raise InputError(
            f"the drafter's layers have windows of {sorted(windows)} positions; expected one, since config.json holds "
            "one sliding_window"
        )
    kinds = [FULL if config.window(layer) is None else SLIDING for layer in range(config.num_layers)]
    return {"sliding_window": windows.pop(), "layer_types": kinds}


def _mask_token_id(checkpoint: Checkpoint) -> int | None:
    config, parallel = checkpoint.config, checkpoint.has(_MASK_HIDDEN)
    named = {key: whole(config, key, least=0) for key in MASK_TOKEN_KEYS if config.get(key) is not None}
    if bool(named) != parallel:
        seen = f"tensor {_MASK_HIDDEN} is missing beside {next(iter(named), '')}"
        if not named:
            seen = f"config.json names no mask token, in one of {', '.join(MASK_TOKEN_KEYS)}, beside {_MASK_HIDDEN}"
        raise InputError(f"{seen}; expected both (P-EAGLE) or neither (EAGLE-3)")
    if not named:
        return None
    if len(set(named.values())) > 1:
        raise InputError(f"config.json names different mask tokens: {named}; expected one")
    return next(iter(named.values()))


def _num_mask_hiddens(checkpoint: Checkpoint) -> int:
    """Return M of a mask_hidden [1, M, A]; any other shape holds one vector."""
    shape = checkpoint.shape(_MASK_HIDDEN)
    return shape[1] if len(shape) == 3 and shape[0] == 1 else 1


def _head_geometry(checkpoint: Checkpoint, geometry: Mapping[str, Any], num_heads: int) -> tuple[int, int]:
    """Return (head_dim, num_kv_heads) from config.json, else from the projections' shapes."""
    prefix = _first_layer_prefix(checkpoint)
    query_rows = checkpoint.shape(f"{prefix}.self_attn.q_proj.weight")[0]
    key_rows = checkpoint.shape(f"{prefix}.self_attn.k_proj.weight")[0]
    head_dim = whole(geometry, "head_dim", query_rows // num_heads)
    return head_dim, whole(geometry, "num_key_value_heads", key_rows // head_dim)


def _target_hidden_size(checkpoint: Checkpoint, named: int | None, num_taps: int) -> int:
    """Return the width of one of the target's hidden states, from fc's width; check config.json's, if any."""
    width = checkpoint.shape(_FC)[-1]
    if width % num_taps or (named is not None and int(named) * num_taps != width):
        size = "a target" if named is None else f"target_hidden_size {named}"
        raise InputError(
            f"tensor {_FC} reads {width} values; expected {num_taps} hidden states of {size}: check "
            "eagle_aux_hidden_state_layer_ids and target_hidden_size"
        )
    return width // num_taps


def _first_layer_prefix(checkpoint: Checkpoint) -> str:
    found = [p for p in ("midlayer", "layers.0") if any(name.startswith(f"{p}.") for name in checkpoint.names)]
    if len(found) != 1:
        raise InputError(
            f"{checkpoint.directory} has {'both midlayer.* and' if found else 'neither midlayer.* nor'} layers.0.* "
            "tensors; expected the first layer under one of these names"
        )
    return found[0]


def _draft_to_target(checkpoint: Checkpoint, config: DrafterConfig) -> np.ndarray | None:
    """Return the draft vocabulary's absolute target ids, int32; None if the vocabularies are the same.

    Example: d2t [0, 0, 3] -> ids [0, 1, 5].
    """
    if not checkpoint.has("d2t"):
        if config.draft_vocab_size != config.vocab_size:
            raise InputError(
                f"{checkpoint.directory}: tensor d2t is missing; a draft vocabulary of {config.draft_vocab_size} needs "
                f"its map into the target's of {config.vocab_size}"
            )
        return None
    stored, index = _stored_map(checkpoint, config), np.arange(config.draft_vocab_size)
    target_ids = stored + index
    if (fault := _map_fault(target_ids, config.vocab_size)) is not None:
        absolute = "" if _map_fault(stored, config.vocab_size) else f"; if these are absolute ids, {STORE_OFFSETS}"
        raise InputError(
            f"{checkpoint.directory}: d2t {fault} (d2t holds offsets: target id = draft id + d2t[draft id]){absolute}"
        )
    same = config.draft_vocab_size == config.vocab_size and bool((target_ids == index).all())
    return None if same else target_ids.astype(np.int32)


STORE_OFFSETS = "store d2t - arange(len(d2t)) as d2t"
_CHANCE = 20.0  # exp(-20): the chance below which a map without neighbouring ids is no accident


def doubtful_map(checkpoint: Checkpoint, config: DrafterConfig) -> str | None:
    """Describe in one line why d2t, read as offsets, looks wrong; None if it looks right.

    It looks wrong if t2d marks other tokens, or, without a t2d, if no two of its tokens are neighbours. Reads no other
    tensor.
    """
    if not checkpoint.has("d2t"):
        return None
    stored = _stored_map(checkpoint, config)
    read, taken = stored + np.arange(len(stored)), f"{checkpoint.directory}: d2t is read as offsets, but"
    if checkpoint.has("t2d"):
        if checkpoint.shape("t2d") != (config.vocab_size,):
            return (
                f"{checkpoint.directory}: t2d has shape {list(checkpoint.shape('t2d'))}, and is not compared with d2t; "
                f"expected [{config.vocab_size}], a mark for each of the target's tokens"
            )
        marked = np.flatnonzero(checkpoint.take("t2d"))
        if np.array_equal(np.sort(read), marked):
            return None
        said = f"{taken} t2d marks other tokens ({len(np.intersect1d(read, marked))} of {len(marked)} are the same)"
        if np.array_equal(np.sort(stored), marked):
            return f"{said}; read as absolute ids it agrees with t2d: {STORE_OFFSETS}"
        return f"{said}; peagle parity finds which of the two the drafter follows"
    if len(stored) ** 2 > _CHANCE * config.vocab_size and (np.diff(stored) > 0).all():
        return (
            f"{taken} then no two of its {len(stored)} tokens are neighbours; if it holds absolute ids, {STORE_OFFSETS}"
        )
    return None


def _stored_map(checkpoint: Checkpoint, config: DrafterConfig) -> np.ndarray:
    return checkpoint.take("d2t", (config.draft_vocab_size,)).astype(np.int64)


def _map_fault(target_ids: np.ndarray, vocab_size: int) -> str | None:
    """Describe why these are not valid target ids of a draft vocabulary; None if they are."""
    if target_ids.min() < 0 or target_ids.max() >= vocab_size:
        return f"maps to ids {target_ids.min()}..{target_ids.max()}; expected 0..{vocab_size - 1}"
    if (different := len(np.unique(target_ids))) < len(target_ids):
        return f"maps {len(target_ids)} draft ids to {different} target ids; expected one each"
    return None


def _qkv_widths(config: DrafterConfig) -> list[int]:
    return [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]


def _render_rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = dataclasses.asdict(rope.scaling)
    scaling["original_max_position_embeddings"] = scaling.pop("original_length")
    if isinstance(rope.scaling, Yarn):
        scaling["attention_factor"] = scaling.pop("concentration")
    kind = "yarn" if isinstance(rope.scaling, Yarn) else "llama3"
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": kind, **scaling}}
