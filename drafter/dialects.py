"""Read and write how public drafters spell their config.json. Reads no weights. Their tensors' names: tensors.py.

This project writes two layouts. Public files mix their parts, so each part is recognised by itself:

    part               vllm                            speculators
    geometry           at the top of config.json       under `transformer_layer_config`
    layer 0            `midlayer.*`                    `layers.0.*`
    mask token         `ptd_token_id`, `pard_token`    `mask_token_id`
    tensors' prefix    none; NeMo writes `model.`      none
    model_type         of Llama; SpecForge writes the target's

An EAGLE-3 drafter has neither a mask token nor `mask_hidden`; only it has `norm_output`. SGLang, SpecForge and ModelOpt
name aux layers in `eagle_config` (aux_layers.py). Windows are `sliding_window` beside `layer_types` in the geometry;
without layer_types a sliding_window is ignored, as in vLLM. `d2t` maps draft ids to the target's by offsets; `t2d`
marks the same tokens. A `mask_hidden` of more than one vector is this project's own extension (`refused_by`).

A DFlash drafter has a layout of its own (`_parse_dflash`): `layers.*` from 0 on, `hidden_norm` after fc, neither
embedding nor head, and `dflash_config` with the mask token and `target_layer_ids`, the aux layers by output.

SpecForge writes a P-EAGLE's mask token and norm_before_residual to `peagle_config.json` beside it (`open_drafter`).

Sources: vllm llama_eagle3.py, qwen3_dflash.py; speculators models/peagle, models/eagle3; z-lab/dflash;
SpecForge scripts/train_peagle.py.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from drafter.aux_layers import (
    AUX_LAYER_IDS,
    DFLASH_CONFIG,
    EAGLE_CONFIG,
    NESTED,
    TARGET_LAYER_IDS,
    TOP_AUX_LAYERS,
    NamedAuxLayers,
    check_aux_layer_ids,
    named_aux_layers,
)
from drafter.config import DrafterConfig
from drafter.tensors import FC, LM_HEAD, MASK_HIDDEN
from peagle.base.checkpoint import CONFIG, Checkpoint, read_checkpoint, read_json
from peagle.base.errors import InputError
from peagle.base.settings import Key, brief, flag, mapping, naming, number, read_keys, refuse_others, render_keys, whole
from peagle.ops.rope import parse_rope, render_rope

Dialect = Literal["vllm", "speculators"]
FIRST_LAYERS: dict[Dialect, str] = {"vllm": "midlayer", "speculators": "layers.0"}
MASK_TOKENS: dict[Dialect, str] = {"vllm": "ptd_token_id", "speculators": "mask_token_id"}
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
PREFIX = "model."
PEAGLE_CONFIG = "peagle_config.json"
# by key of peagle_config.json, the keys of config.json that say the same; its other keys are of the training
OF_PEAGLE_CONFIG = {"mask_token_id": MASK_TOKEN_KEYS, "norm_before_residual": ("norm_before_residual",)}
FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types
ARCHITECTURE = "LlamaForCausalLMEagle3"  # vLLM's name of P-EAGLE and EAGLE-3
DFLASH_ARCHITECTURE = "DFlashDraftModel"
SPECULATORS = {"peagle": "PEagleSpeculator", "eagle3": "Eagle3Speculator"}  # speculators_model_type: architecture
DEFAULT_DRAFTS = {"peagle": 7, "eagle3": 3}  # K in a speculators config, for other servers
VLLM, PACKAGE = "vLLM", "the speculators package"  # other loaders of drafters

_GEOMETRY = (
    Key("hidden_size", "hidden_size", whole),
    Key("num_layers", "num_hidden_layers", whole),
    Key("num_heads", "num_attention_heads", whole),
    Key("mlp_width", "intermediate_size", whole),
    Key("vocab_size", "vocab_size", whole),
    Key("rms_norm_eps", "rms_norm_eps", number, 1e-6),  # transformers' LlamaConfig
    Key("attention_bias", "attention_bias", flag, False),
    Key("mlp_bias", "mlp_bias", flag, False),
)
# in the geometry or at the top of config.json
_SETTINGS = (
    Key("draft_vocab_size", "draft_vocab_size", whole),
    Key("norm_before_residual", "norm_before_residual", flag, False),
)
# settings that change the result and have one supported value: (key, supported, its meaning)
_FIXED_OF_ALL = (
    ("hidden_act", "silu", "a SiLU MLP"),
    ("logit_scale", 1.0, "unscaled logits"),
    ("partial_rotary_factor", 1.0, "heads rotated as a whole"),
    ("quantization_config", None, "plain weights"),
)
_AUX = ("use_aux_hidden_state", True, "aux hidden states")
_FIXED = (*_FIXED_OF_ALL, ("is_causal", True, "causal attention"), _AUX)
_FIXED_OF_DFLASH = (
    *_FIXED_OF_ALL,
    ("mlp_bias", False, "an MLP without biases"),
    ("use_sliding_window", False, "full attention"),
    ("use_swa", False, "full attention"),
    ("final_logit_softcapping", None, "unscaled logits"),
    ("draft_vocab_size", None, "the target's vocabulary, by its head"),
)
_FIXED_IN_DFLASH = (  # in dflash_config
    ("causal", False, "a block whose rows see each other"),
    ("use_swa", False, "full attention"),
    _AUX,
)
_DFLASH_NUMBERS = {"mask_token_id": True, "block_size": True, "num_target_layers": False}  # whether they are required
_SWA_WINDOW = "swa_window_size"  # in dflash_config; of no effect without use_swa


def is_drafter_config(config: Mapping[str, Any]) -> bool:
    """Recognise a drafter's config.json by its architecture, a mask token or nested geometry.

    Every project names the architecture after EAGLE: LlamaForCausalLMEagle3 (SGLang, SpecForge), Eagle3LlamaForCausalLM
    and PEagleDraftModel (vLLM), PEagleSpeculator, LlamaEagle3DraftModel (NeMo). DFlash's is DFlashDraftModel.
    """
    named = "eagle" in str(config.get("architectures")).lower() or is_dflash_config(config)
    return named or NESTED in config or any(key in config for key in MASK_TOKEN_KEYS)


def open_drafter(directory: Path) -> Checkpoint:
    """Open a drafter's checkpoint, with the names of its tensors and its settings as `parse_config` reads them.

    Raises InputError as `read_checkpoint` does, and for a setting that differs in peagle_config.json.
    """
    checkpoint = read_checkpoint(directory).without_prefix(PREFIX)
    if (directory / PEAGLE_CONFIG).is_file():
        _add_peagle_config(checkpoint, read_json(directory, PEAGLE_CONFIG))
    return checkpoint


def _add_peagle_config(checkpoint: Checkpoint, beside: Mapping[str, Any]) -> None:
    """Add the settings of peagle_config.json to those of config.json, which may say the same under other keys."""
    parts = [checkpoint.config, *(checkpoint.config.get(part) for part in (EAGLE_CONFIG, NESTED))]
    for key, names in OF_PEAGLE_CONFIG.items():
        if (value := beside.get(key)) is None:
            continue
        for part, name in itertools.product((part for part in parts if isinstance(part, dict)), names):
            if (other := part.get(name)) not in (None, value):
                raise InputError(
                    f"{checkpoint.directory}: {name} is {brief(other)} in {CONFIG} and {key} is {brief(value)} in "
                    f"{PEAGLE_CONFIG}; expected them equal: take out the one that the drafter was not trained with"
                )
        checkpoint.config[key] = value


def is_dflash_config(config: Mapping[str, Any]) -> bool:
    """Recognise a DFlash drafter's config.json. Its model_type says only qwen3 or gpt_oss."""
    named = f"{config.get('architectures')} {config.get('speculators_model_type')}"
    return "dflash" in named.lower() or DFLASH_CONFIG in config


def first_layer_of(checkpoint: Checkpoint) -> str:
    """Return the prefix of layer 0. Raises InputError for a file with no such prefix, or several."""
    prefixes = [p for p in FIRST_LAYERS.values() if any(name.startswith(f"{p}.") for name in checkpoint.names)]
    if len(prefixes) != 1:
        names = [f"{prefix}.*" for prefix in FIRST_LAYERS.values()]
        which = f"both {' and '.join(names)}" if prefixes else f"neither {' nor '.join(names)}"
        raise InputError(
            f"{checkpoint.directory} has {which} tensors; expected the first layer under one of these names"
        )
    return prefixes[0]


def parse_config(checkpoint: Checkpoint, aux_layer_ids: Sequence[int] | None = None) -> DrafterConfig:
    """Read the DrafterConfig from config.json and tensor shapes (head geometry, width of aux_hidden).

    checkpoint: from `open_drafter`. aux_layer_ids: instead of those in config.json. Raises InputError for a setting
    that is missing, contradictory or not supported.
    """
    path = checkpoint.directory / CONFIG
    if is_dflash_config(checkpoint.config):
        return _parse_dflash(checkpoint, aux_layer_ids)
    config, first_layer = checkpoint.config, first_layer_of(checkpoint)
    with naming(path):
        geometry = mapping(config, NESTED) if NESTED in config else config
        settings = {**mapping(config, EAGLE_CONFIG), **geometry, **config}
        mask_token_id = _mask_token_id(config, checkpoint.has(MASK_HIDDEN))
        parallel, qk_norm = mask_token_id is not None, checkpoint.has(f"{first_layer}.self_attn.q_norm.weight")
        _refuse_variants(config, geometry, settings, parallel, qk_norm)
        if settings.get("tie_word_embeddings") and not checkpoint.has(LM_HEAD):
            raise InputError(f"tie_word_embeddings is true, which is not supported; store {LM_HEAD}")
        fields = read_keys(_GEOMETRY, geometry)
        named, outputs = _aux_layers(config, aux_layer_ids)
        num_aux_layers = whole(settings, "num_aux_hidden_states", len(outputs) if outputs else 3)
        if aux_layer_ids is None and named and len(named.ids) != num_aux_layers:
            raise InputError(
                f"{named.key} is {list(named.ids)}, and num_aux_hidden_states {num_aux_layers}; expected one "
                "id for each"
            )
        named_size = whole(settings, "target_hidden_size", 0, least=0)
    if aux_layer_ids is not None:
        check_aux_layer_ids(aux_layer_ids, num_aux_layers, "--aux-layer-ids", "aux_layer_ids")
    aux_width = checkpoint.shape(FC)[-1]
    mask_shape = checkpoint.shape(MASK_HIDDEN) if parallel else ()
    if aux_width != num_aux_layers * (named_size or aux_width // num_aux_layers):
        size = f"target_hidden_size {named_size}" if named_size else "a target"
        raise InputError(
            f"{checkpoint.directory}: tensor {FC} reads {aux_width} values; expected {num_aux_layers} hidden states of "
            f"{size}: check {AUX_LAYER_IDS} and target_hidden_size"
        )
    with naming(path):
        attention = _attention(checkpoint, geometry, _with_outer_rope(geometry, config), first_layer)
        fields |= read_keys(_SETTINGS, settings, draft_vocab_size=fields["vocab_size"])
        joint, per_layer = flag(settings, "norm_before_fc"), flag(settings, "fc_norm")
        if joint and per_layer:
            raise InputError("both norm_before_fc and fc_norm are true; expected one of them at most")
        return DrafterConfig(
            **fields,
            **attention,
            target_hidden_size=aux_width // num_aux_layers,
            mask_token_id=mask_token_id,
            num_aux_layers=num_aux_layers,
            aux_layer_ids=outputs,
            qk_norm=qk_norm,
            aux_norm="joint" if joint else "per_layer" if per_layer else None,
            norm_output=flag(settings, "norm_output") and not parallel,
            # M of [1, M, A]; any other shape holds one vector
            num_mask_hiddens=mask_shape[1] if len(mask_shape) == 3 and mask_shape[0] == 1 else 1,
            windows=_windows(geometry, fields["num_layers"]),
        )


def _aux_layers(
    config: Mapping[str, Any], typed: Sequence[int] | None
) -> tuple[NamedAuxLayers | None, tuple[int, ...] | None]:
    """Return (the aux layers as config.json names them, the outputs to read: the typed ones, if any)."""
    named = next(iter(named_aux_layers(config)), None)
    return named, tuple(typed) if typed is not None else None if named is None else named.outputs


def _attention(
    checkpoint: Checkpoint, geometry: Mapping[str, Any], rope: Mapping[str, Any], first_layer: str
) -> dict[str, Any]:
    """Read the geometry of attention; without a setting its tensors' shapes tell."""
    query_width, key_width = (checkpoint.shape(f"{first_layer}.self_attn.{x}_proj.weight")[0] for x in "qk")
    head_dim = whole(geometry, "head_dim", query_width // whole(geometry, "num_attention_heads"))
    positions = geometry.get("max_position_embeddings")
    return {
        "head_dim": head_dim,
        "num_kv_heads": whole(geometry, "num_key_value_heads", key_width // head_dim),
        "rope": parse_rope(head_dim, rope, default_theta=10000.0),
        "max_positions": None if positions is None else whole(geometry, "max_position_embeddings"),
    }


def render_config(config: DrafterConfig, dialect: Dialect, dtype: str, verifier: str | None = None) -> dict[str, Any]:
    """Render a drafter's config.json in a dialect.

    In the speculators dialect vLLM reads fc_norm and num_aux_hidden_states only from the nested geometry. Raises
    InputError for a config that the dialect cannot hold.
    """
    if config.kind == "DFlash":
        return _render_dflash(config, dialect, dtype)
    geometry = _render_geometry(config, _GEOMETRY) | {"num_aux_hidden_states": config.num_aux_layers}
    if config.narrowest_window is not None:
        geometry |= _render_windows(config)
    common: dict[str, Any] = {
        **render_keys(_SETTINGS, config),
        "target_hidden_size": config.target_hidden_size,
        "norm_before_fc": config.aux_norm == "joint",
        "fc_norm": config.aux_norm == "per_layer",
    }
    if config.aux_layer_ids is not None:
        common[AUX_LAYER_IDS] = TOP_AUX_LAYERS.written(config.aux_layer_ids)
    if config.parallel:
        common[MASK_TOKENS[dialect]] = config.mask_token_id
    else:
        common["norm_output"] = config.norm_output
    if dialect == "vllm":
        return {"architectures": [ARCHITECTURE], "dtype": dtype, **geometry, **common}
    kind = "peagle" if config.parallel else "eagle3"
    proposal = {
        "algorithm": kind,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DEFAULT_DRAFTS[kind]}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": verifier, "architectures": ["GptOssForCausalLM"]},
    }
    return {
        "architectures": [SPECULATORS[kind]],
        "speculators_model_type": kind,
        "dtype": dtype,
        "speculators_config": proposal,
        NESTED: {**geometry, "fc_norm": common["fc_norm"]},
        **common,
    }


def refused_by(config: DrafterConfig, dialect: Dialect) -> dict[str, str]:
    """List the other loaders that refuse a drafter in a dialect: {VLLM or PACKAGE: the reason}.

    Tested with vLLM 0.32, speculators 0.9 and transformers 5.19, whose LlamaConfig checks the width against the heads.
    vLLM builds a LlamaConfig only in its own dialect. DFlash has Qwen3's config, which checks no width.
    """
    if config.kind == "DFlash":
        return {}
    if config.num_mask_hiddens > 1:
        why = f"it has {config.num_mask_hiddens} mask hiddens, expected one"
        return dict.fromkeys((VLLM,) if dialect == "vllm" else (VLLM, PACKAGE), why)
    if config.hidden_size % config.num_heads:
        why = f"its width is {config.hidden_size}, expected a multiple of its {config.num_heads} heads"
        return {VLLM if dialect == "vllm" else PACKAGE: why}
    if dialect == "speculators" and config.hidden_size != config.target_hidden_size:
        return {PACKAGE: f"its width is {config.hidden_size}, expected the target's {config.target_hidden_size}"}
    return {}


def _parse_dflash(checkpoint: Checkpoint, aux_layer_ids: Sequence[int] | None) -> DrafterConfig:
    """Read the DrafterConfig of a DFlash drafter; see `parse_config`.

    `eagle_aux_hidden_state_layer_ids` at the top takes precedence over target_layer_ids, as in vLLM.
    """
    config, path = checkpoint.config, checkpoint.directory / CONFIG
    with naming(path):
        if NESTED in config:
            raise InputError(f"DFlash in the layout with {NESTED} is not supported; expected z-lab's, without that key")
        if "dflash2" in str(config.get("architectures")).lower():
            raise InputError(f"architectures is {brief(config['architectures'])}; expected {DFLASH_ARCHITECTURE}")
        own = {key: value for key, value in mapping(config, DFLASH_CONFIG).items() if value is not None}
        refuse_others(own, _FIXED_IN_DFLASH)
        known = {TARGET_LAYER_IDS, _SWA_WINDOW, *_DFLASH_NUMBERS, *(key for key, *_ in _FIXED_IN_DFLASH)}
        if unknown := sorted(own.keys() - known):
            raise InputError(f"{DFLASH_CONFIG} has {unknown[0]}, which is not supported; expected no such key")
        refuse_others({key: value for key, value in config.items() if value is not None}, _FIXED_OF_DFLASH)
        fields = read_keys(_GEOMETRY, config)
        kinds = config.get("layer_types")
        if kinds is not None and kinds != [FULL] * fields["num_layers"]:
            raise InputError(
                f"layer_types is {brief(kinds)}; expected {fields['num_layers']} of {FULL}: a DFlash drafter with "
                "sliding attention is not supported, since other servers make it causal"
            )
        numbers = {key: _agreed(config, own, key, needed) for key, needed in _DFLASH_NUMBERS.items()}
        named, outputs = _aux_layers(config, aux_layer_ids)
        size, aux_width = fields["hidden_size"], checkpoint.shape(FC)[-1]
        num_aux_layers = len(named.ids) if named else max(1, aux_width // size)
        attention = _attention(checkpoint, config, config, "layers.0")
    if aux_layer_ids is not None:
        check_aux_layer_ids(aux_layer_ids, num_aux_layers, "--aux-layer-ids", "aux_layer_ids")
    if aux_width != num_aux_layers * size:
        raise InputError(
            f"{checkpoint.directory}: tensor {FC} reads {aux_width} values; expected {num_aux_layers} hidden states of "
            f"{size}, the drafter's and its target's hidden_size: check {TARGET_LAYER_IDS}"
        )
    with naming(path):
        return DrafterConfig(
            **fields,
            **numbers,
            **attention,
            target_hidden_size=size,
            draft_vocab_size=fields["vocab_size"],
            num_aux_layers=num_aux_layers,
            aux_layer_ids=outputs,
            qk_norm=True,
        )


def _agreed(config: Mapping[str, Any], own: Mapping[str, Any], key: str, needed: bool) -> Any:
    """Read a number of a DFlash drafter from config.json itself or from dflash_config, which must agree.

    None if neither has it and it is not needed.
    """
    named = {
        place: whole(values, key, least=0)
        for place, values in (("config.json", config), (DFLASH_CONFIG, own))
        if values.get(key) is not None
    }
    if len(set(named.values())) > 1 or (needed and not named):
        texts = " and ".join(f"{value} in {place}" for place, value in named.items()) or "missing"
        raise InputError(f"{key} is {texts}; expected one number, in config.json or in its {DFLASH_CONFIG}")
    return next(iter(named.values()), None)


def _render_dflash(config: DrafterConfig, dialect: Dialect, dtype: str) -> dict[str, Any]:
    if dialect != "vllm":
        raise InputError(
            f"a DFlash drafter is written in its own layout, not in that of {dialect}; take --dialect vllm"
        )
    if config.draft_vocab_size < config.vocab_size:
        raise InputError(
            f"this DFlash drafter proposes {config.draft_vocab_size} of {config.vocab_size} tokens; expected all, as "
            "it has no head of its own: narrow it when it is loaded, with --draft-vocab"
        )
    if config.narrowest_window is not None:
        raise InputError(
            f"this DFlash drafter has a window of {config.narrowest_window} positions, which its config.json cannot "
            'hold; write {"drafter_window": N} into speculation.json beside it instead'
        )
    own: dict[str, Any] = {"mask_token_id": config.mask_token_id}
    if config.aux_layer_ids is not None:
        own[TARGET_LAYER_IDS] = list(config.aux_layer_ids)
    number = {} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}
    return {
        "architectures": [DFLASH_ARCHITECTURE],
        "dtype": dtype,
        **_render_geometry(config, [key for key in _GEOMETRY if key.field != "mlp_bias"]),
        "layer_types": [FULL] * config.num_layers,
        "block_size": config.block_size,
        DFLASH_CONFIG: own,
        **number,
    }


def _render_geometry(config: DrafterConfig, keys: Sequence[Key]) -> dict[str, Any]:
    positions = {} if config.max_positions is None else {"max_position_embeddings": config.max_positions}
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",  # whose layers these are
        **render_keys(keys, config),
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **render_rope(config.rope),
        **positions,
    }


def _mask_token_id(config: Mapping[str, Any], parallel: bool) -> int | None:
    named = {key: whole(config, key, least=0) for key in MASK_TOKEN_KEYS if config.get(key) is not None}
    if bool(named) != parallel:
        lone = f"tensor {MASK_HIDDEN} is missing, and {next(iter(named), '')}"
        if not named:
            lone = f"it names no mask token, in one of {', '.join(MASK_TOKEN_KEYS)}, but has {MASK_HIDDEN}"
        raise InputError(f"{lone}; expected both (P-EAGLE) or neither (EAGLE-3)")
    if len(set(named.values())) > 1:
        raise InputError(f"it names different mask tokens: {named}; expected one")
    return next(iter(named.values()), None)


def _refuse_variants(
    config: Mapping[str, Any], geometry: Mapping[str, Any], settings: Mapping[str, Any], parallel: bool, qk_norm: bool
) -> None:
    """Raise InputError for a setting of another model."""
    expected = "peagle" if parallel else "eagle3"
    if NESTED in config and (kind := config.get("speculators_model_type")) != expected:
        raise InputError(
            f"speculators_model_type is {kind!r}; expected {expected!r}, since there is "
            f"{'a' if parallel else 'no'} tensor {MASK_HIDDEN}"
        )
    expected = "qwen3" if qk_norm else "llama"  # with and without norms of each head's query and key
    kind = geometry.get("model_type", expected)
    # SpecForge writes the target's model_type for Llama layers and reads the file as a LlamaConfig. So missing
    # settings, such as theta, have Llama's defaults here, too
    of_target = kind == "gpt_oss" and "llama" in str(config.get("architectures")).lower()
    if kind != expected and not (of_target and not qk_norm):
        raise InputError(
            f"the drafter's layers are model_type {kind!r}; expected {expected!r}, since it has "
            f"{'' if qk_norm else 'no '}tensors q_norm and k_norm"
        )
    refuse_others({key: value for key, value in settings.items() if value is not None}, _FIXED)
    attention_bias = geometry.get("attention_bias", False)
    for key in ("qkv_bias", "bias"):
        if (value := geometry.get(key)) is not None and bool(value) != bool(attention_bias):
            raise InputError(f"{key} is {value}, attention_bias {attention_bias}; expected them equal")


def _with_outer_rope(geometry: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Add the top's RoPE settings to the nested geometry. Raises InputError if the two disagree."""
    keys = ("rope_theta", "rope_parameters", "rope_scaling", "original_max_position_embeddings")
    merged = dict(geometry)
    for key in keys:
        inner, outer = geometry.get(key), config.get(key)
        if inner is not None and outer is not None and inner != outer:
            raise InputError(
                f"{key} is {brief(inner)} in {NESTED} and {brief(outer)} outside; expected them equal: take out the "
                "one that the drafter was not trained with"
            )
        if inner is None:
            merged[key] = outer
    return merged


def _windows(geometry: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...] | None:
    """Read the window of each layer; None if all layers see everything."""
    kinds, window, used = (geometry.get(key) for key in ("layer_types", "sliding_window", "use_sliding_window"))
    kinds_by_layer = f"one of {FULL} and {SLIDING} for each layer"
    if kinds is None:
        if used:
            raise InputError(f"use_sliding_window is {brief(used)} without layer_types; expected {kinds_by_layer}")
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {FULL, SLIDING}:
        raise InputError(f"layer_types is {brief(kinds)}; expected a list of {num_layers}, {kinds_by_layer}")
    if SLIDING not in kinds:
        return None
    if used is False:
        raise InputError(
            f"use_sliding_window is false, but layer_types is {brief(kinds)}; expected them to agree: take out the one "
            "that the drafter was not trained with"
        )
    if type(window) is not int or window < 1:
        raise InputError(
            f"sliding_window is {brief(window)}, with layers of {SLIDING}; expected the positions that such a layer "
            "sees, 1 or more"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _render_windows(config: DrafterConfig) -> dict[str, Any]:
    """Render what `_windows` reads. Raises InputError for different windows, which config.json cannot hold."""
    windows = {window for window in config.windows or () if window is not None}
    if len(windows) > 1:
        raise InputError(
            f"the drafter's layers have windows of {sorted(windows)} positions; expected one, since config.json holds "
            "one sliding_window"
        )
    kinds = [FULL if config.window(layer) is None else SLIDING for layer in range(config.num_layers)]
    return {"sliding_window": windows.pop(), "layer_types": kinds}
