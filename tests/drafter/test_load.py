"""Checkpoints: what other projects write is the same drafter; a bad file is one line that names the fault.

Most tests are rows of a table: a file with these changes, and the config that is read or a part of the line."""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafter.aux_layers import named_aux_layers
from drafter.dialects import (
    Dialect,
    is_drafter_config,
    open_drafter,
    parse_config,
    refused_by,
    render_config,
)
from drafter.load import load_drafter, save_drafter, shared_tensors, sort_aux_layers, to_tensors
from drafter.params import DrafterParams, init_params
from drafter.reference import draft_logits
from peagle.base.checkpoint import write_checkpoint
from peagle.base.errors import InputError, InputWarning
from peagle.ops.rope import RopeConfig, Yarn
from tests.support import checkpoints
from tests.support.checkpoints import GONE, assert_same, changed
from tests.support.drafters import (
    CONFIGS,
    EAGLE,
    EAGLE_NORMED,
    FOUR,
    HEADS_NORMED,
    LLAMA3,
    MASKS,
    ONE,
    TWO,
    random_params,
    random_text,
)
from tests.support.pairs import edit_json

DIALECTS: tuple[Dialect, ...] = ("vllm", "speculators")
BOTH = pytest.mark.parametrize("dialect", DIALECTS)
IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "transformer_layer_config"


class File(NamedTuple):
    """A drafter's file with changes."""

    name: str = ONE
    dialect: Dialect = "vllm"
    config: Mapping[str, Any] = {}
    tensors: Mapping[str, Any] = {}
    rename: Callable[[str], str] = str

    def write(self, directory: Path) -> Path:
        config, params = CONFIGS[self.name], random_params(CONFIGS[self.name])
        tensors = changed(to_tensors(params, config, self.dialect), self.tensors)
        directory.mkdir(exist_ok=True)
        entries = changed(render_config(config, self.dialect, "float32"), self.config)
        (directory / "config.json").write_text(json.dumps(entries))
        renamed = {self.rename(name): np.ascontiguousarray(value) for name, value in tensors.items()}
        save_file(renamed, directory / "model.safetensors")
        return directory


def refusal(directory: Path, **options: Any) -> str:
    return checkpoints.refusal(functools.partial(load_drafter, **options), directory)


def cast(params: DrafterParams, dtype: Any) -> DrafterParams:
    narrowed = jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf).astype(dtype)), params.replace(draft_to_target=None)
    )
    return narrowed.replace(draft_to_target=params.draft_to_target)


# What we write


@BOTH
@pytest.mark.parametrize("name", CONFIGS)
def test_a_drafter_comes_back_bit_for_bit(tmp_path: Path, name: str, dialect: Dialect) -> None:
    config = CONFIGS[name]
    for dtype in (jnp.float32, jnp.bfloat16):
        params = cast(random_params(config), dtype)
        save_drafter(tmp_path, params, config, dialect)
        loaded, loaded_config = load_drafter(tmp_path)
        assert loaded_config == config
        assert_same(params, loaded)
    names = load_file(tmp_path / "model.safetensors").keys()
    first_layers = {"midlayer": "vllm", "layers.0": "speculators"}
    assert {first_layers[prefix] for prefix in first_layers if any(n.startswith(prefix) for n in names)} == {dialect}
    assert_same(cast(loaded, jnp.float32), load_drafter(tmp_path, jnp.float32)[0])


@BOTH
def test_other_rope_scalings_and_default_aux_layers_come_back(tmp_path: Path, dialect: Dialect) -> None:
    yarn = Yarn(factor=8.0, original_length=64, beta_fast=16.0, truncate=False, concentration=1.5)
    base = dataclasses.replace(CONFIGS[FOUR], aux_layer_ids=None, num_aux_layers=3)
    for scaling in (yarn, dataclasses.replace(yarn, concentration=None), None):
        config = dataclasses.replace(base, rope=RopeConfig(6, 1234.5, scaling))
        save_drafter(tmp_path, random_params(CONFIGS[FOUR]), config, dialect)
        assert parse_config(open_drafter(tmp_path)) == config


def test_the_random_start_has_every_shape_that_a_file_has(tmp_path: Path) -> None:
    """Norms are one, and the draft vocabulary is the lowest ids."""
    config = CONFIGS[ONE]
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    save_drafter(tmp_path, params, config)
    assert_same(load_drafter(tmp_path)[0], params)
    assert params.draft_to_target is not None
    assert params.draft_to_target.tolist() == list(range(config.draft_vocab_size))
    assert all((np.asarray(layer.norm) == 1).all() for layer in params.layers)


@BOTH
def test_a_written_config_is_a_llama_config(dialect: Dialect, recwarn: pytest.WarningsRecorder) -> None:
    """transformers builds a LlamaConfig from it, as vLLM and speculators do, and RoPE's length fits the positions."""
    from transformers import LlamaConfig

    config = dataclasses.replace(CONFIGS[ONE], num_heads=4, max_positions=131072)
    written = render_config(config, dialect, "float32", "some/target")
    read = LlamaConfig(**written.get(NESTED, written))
    assert read.max_position_embeddings == 131072
    assert read.rope_parameters is not None
    assert read.rope_parameters["rope_type"] == "llama3"
    assert read.rope_parameters["original_max_position_embeddings"] == LLAMA3.original_length < 131072
    assert not recwarn.list


def test_vllm_finds_what_it_reads() -> None:
    """Aux layers and their norms in the nested geometry alone, of P-EAGLE and EAGLE-3; a map only if the draft
    vocabulary is smaller; layers with norms of queries and keys as Qwen3's."""
    for name in (TWO, EAGLE_NORMED):
        geometry = render_config(CONFIGS[name], "speculators", "float32", "some/target")[NESTED]
        assert (geometry["num_aux_hidden_states"], geometry["fc_norm"]) == (CONFIGS[name].num_aux_layers, True)
    config = CONFIGS[TWO]
    whole = random_params(config).replace(draft_to_target=jnp.arange(config.vocab_size, dtype=jnp.int32))
    assert not {"d2t", "t2d"} & to_tensors(whole, config).keys()
    for dialect in DIALECTS:
        written = render_config(CONFIGS[HEADS_NORMED], dialect, "float32")
        assert written.get(NESTED, written)["model_type"] == "qwen3"


MULTIPLE, PACKAGE = "20, expected a multiple of its 3 heads", "the speculators package"


@pytest.mark.parametrize(
    ("changes", "vllm", "speculators"),
    [
        ({}, {}, {}),
        ({"num_mask_hiddens": 2}, {"vLLM": "2 mask hiddens"}, {"vLLM": "2 mask", PACKAGE: "2 mask"}),
        ({"num_heads": 3}, {"vLLM": MULTIPLE}, {PACKAGE: "3 heads"}),
        ({"target_hidden_size": 32}, {}, {PACKAGE: "width is 20, expected the target's 32"}),
    ],
)
def test_refusals_of_other_loaders(changes: dict[str, Any], vllm: dict[str, str], speculators: dict[str, str]) -> None:
    config = dataclasses.replace(
        CONFIGS[ONE], **{"num_heads": 4, "num_kv_heads": 1, "target_hidden_size": 20} | changes
    )
    for dialect, expected in zip(DIALECTS, (vllm, speculators), strict=True):
        reasons = refused_by(config, dialect)
        assert reasons.keys() == expected.keys()
        assert all(expected[loader] in reason for loader, reason in reasons.items())


# What others write


@pytest.mark.parametrize(
    ("is_drafter", "config"),
    [
        *((True, {"architectures": [name], "model_type": "llama"}) for name in (
            "LlamaForCausalLMEagle3",  # vLLM, SGLang, SpecForge
            "Eagle3LlamaForCausalLM",  # vLLM
            "PEagleDraftModel",  # vLLM, SpecForge
            "PeagleLlamaForCausalLM",  # vLLM
            "PEagleSpeculator",  # speculators
            "Eagle3DraftModel",  # speculators
            "LlamaEagle3DraftModel",  # NeMo
        )),
        *((True, {key: 3}) for key in ("mask_token_id", "pard_token", "ptd_token_id")),
        (False, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
        (False, {"model_type": "gpt_oss"}),
    ],
)  # fmt: skip
def test_a_drafter_is_recognised_by_its_architecture_or_mask_token(is_drafter: bool, config: dict[str, Any]) -> None:
    assert is_drafter_config(config) == is_drafter


def as_nemo(tensor: str) -> str:
    """NeMo has `model.` before the wrapped model's names, and layer 0 among the layers."""
    outside = ("lm_head.weight", "mask_hidden", "d2t", "t2d")
    return tensor if tensor in outside else f"model.{tensor.replace('midlayer', 'layers.0')}"


SPECFORGE = {  # the target's type above layers of Llama; without RoPE's keys transformers' defaults
    "model_type": "gpt_oss",
    "num_local_experts": 16,
    "experts_per_token": 4,
    "rope_theta": GONE,
    "rope_scaling": GONE,
}
SPARSE = {
    **dict.fromkeys(("head_dim", "num_key_value_heads", "target_hidden_size", IDS, "fc_norm"), GONE),
    "rope_theta": GONE,
    "rope_scaling": GONE,
    "rope_parameters": {"rope_theta": 10000.0} | render_config(CONFIGS[ONE], "vllm", "float32")["rope_scaling"],
}
FLAT = np.asarray(random_params(CONFIGS[ONE]).mask_hidden).reshape(-1)


@pytest.mark.parametrize(
    ("file", "config"),
    [
        (File(config={"ptd_token_id": GONE, "pard_token": 59}), {"mask_token_id": 59}),
        (File(config={"ptd_token_id": GONE, "mask_token_id": 59}), {"mask_token_id": 59}),
        (File(ONE, rename=as_nemo), {}),
        (File(EAGLE, config={"architectures": ["LlamaEagle3DraftModel"]}, rename=as_nemo), {}),
        (File(EAGLE, config=SPECFORGE), {"rope": RopeConfig(6, 10000.0)}),
        # shapes give head geometry and the width of aux_hidden
        (
            File(
                config=SPARSE,
                tensors={"mask_hidden": FLAT, "t2d": GONE},
                rename=lambda name: name.replace("midlayer", "layers.0"),
            ),
            {"aux_layer_ids": None},
        ),
        (File(dialect="speculators", config={NESTED: {"rope_theta": GONE}, "rope_theta": 10000.0}), {}),
        (File(TWO, tensors={"d2t": np.zeros(CONFIGS[TWO].vocab_size, np.int64)}), {}),  # an identity map is none
        (File(tensors={"midlayer.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}), {}),
        # without the layers' type, the tensors say that they have norms of queries and keys
        (File(HEADS_NORMED, config={"model_type": GONE}), {}),
        (File(HEADS_NORMED, "speculators", {NESTED: {"model_type": GONE}}), {}),
    ],
)  # fmt: skip
def test_layouts_of_other_projects_load_as_the_same_drafter(tmp_path: Path, file: File, config: dict[str, Any]) -> None:
    params, read = load_drafter(file.write(tmp_path))
    assert read == dataclasses.replace(CONFIGS[file.name], **config)
    assert_same(params, random_params(CONFIGS[file.name]))
    assert shared_tensors(open_drafter(tmp_path)) == []


def test_the_key_of_aux_layer_ids_decides_whether_they_are_inputs_or_outputs(tmp_path: Path) -> None:
    """At the top they are inputs, as vLLM reads them: [2, 12, 21] are outputs [1, 11, 20]; in eagle_config outputs, as
    SpecForge and SGLang read them. The caller's ids win over both, also if those of the file cannot be inputs."""
    inputs, outputs = {IDS: [2, 12, 21]}, {"eagle_config": {IDS: [3, 4, 9], "use_aux_hidden_state": True}}
    for config, expected in (
        (inputs, (1, 11, 20)),
        ({IDS: GONE, **outputs}, (3, 4, 9)),
        (inputs | outputs, (1, 11, 20)),
    ):
        assert load_drafter(File(config=config).write(tmp_path))[1].aux_layer_ids == expected
        assert load_drafter(tmp_path, aux_layer_ids=(2, 3, 8))[1].aux_layer_ids == (2, 3, 8)
    places = named_aux_layers(open_drafter(tmp_path).config)
    assert [(place.outputs, place.written((1, 4))) for place in places] == [((1, 11, 20), [2, 5]), ((3, 4, 9), [1, 4])]
    File(config={IDS: [0, 4, 6]}).write(tmp_path)
    assert "--aux-layer-ids" in refusal(tmp_path)
    assert load_drafter(tmp_path, aux_layer_ids=(0, 4, 6))[1].aux_layer_ids == (0, 4, 6)


@pytest.mark.parametrize("name", [MASKS, EAGLE_NORMED, FOUR])
def test_sorted_aux_layers_draft_the_same(name: str) -> None:
    """fc, the norms before it and mask_hidden are permuted to match; a second sorting changes nothing."""
    config = dataclasses.replace(CONFIGS[name], aux_layer_ids=(6, 1, 4))
    params = random_params(CONFIGS[name])
    moved, in_order = sort_aux_layers(params, config)
    assert in_order.aux_layer_ids == (1, 4, 6)
    text = random_text(config, 0, length=5)
    first, *others = np.split(text.aux_hidden[:-1], 3, axis=-1)  # in the order of the drafter's layers: 6, then 1 and 4
    token_ids = text.token_ids.tolist()
    expected = draft_logits(to_tensors(params, config), config, token_ids, text.aux_hidden[:-1], 4)
    aux = np.concatenate([*others, first], axis=-1)
    logits = draft_logits(to_tensors(moved, in_order), in_order, token_ids, aux, 4)
    np.testing.assert_allclose(logits, expected, atol=1e-9)
    assert sort_aux_layers(moved, in_order)[0] is moved


VOCAB, KEPT = 61, np.arange(1, 38)


@pytest.mark.parametrize(
    ("ids", "marked", "says"),
    [
        (KEPT, KEPT, None),
        (KEPT, None, None),
        (np.roll(KEPT, 1), KEPT, None),  # t2d holds no order
        (KEPT, np.arange(37), r"t2d marks other tokens \(36 of 37 are the same\); peagle parity finds"),
    ],
)
def test_a_map_is_compared_with_its_mask(
    tmp_path: Path, ids: np.ndarray, marked: np.ndarray | None, says: str | None
) -> None:
    mask = GONE if marked is None else np.isin(np.arange(VOCAB), marked)
    directory = File(tensors={"d2t": ids - np.arange(37), "t2d": mask}).write(tmp_path)
    with pytest.warns(InputWarning, match=says) if says else contextlib.nullcontext():
        params, _ = load_drafter(directory)
    assert np.asarray(params.draft_to_target).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("with_mask", "says"),
    [(True, "t2d marks other tokens .* read as absolute ids it agrees with t2d"), (False, "no two of its 61 tokens")],
)
def test_a_map_of_absolute_ids_is_named(tmp_path: Path, with_mask: bool, says: str) -> None:
    """If the ids are small enough to be read as offsets, t2d reveals it, or that no tokens are neighbours; else loading
    fails. The map is never reinterpreted."""
    config = dataclasses.replace(CONFIGS[ONE], vocab_size=2 * VOCAB, draft_vocab_size=VOCAB)

    def save(ids: np.ndarray) -> Path:
        params = dataclasses.replace(init_params(config, jax.random.key(0)), draft_to_target=jnp.asarray(ids))
        tensors = changed(to_tensors(params, config), {"d2t": ids} | ({} if with_mask else {"t2d": GONE}))
        write_checkpoint(tmp_path / "absolute", render_config(config, "vllm", "float32"), tensors)
        return tmp_path / "absolute"

    with pytest.warns(InputWarning, match=f"{says}.* store d2t - arange"):
        params, _ = load_drafter(save(np.arange(VOCAB)))
    assert np.asarray(params.draft_to_target).tolist() == (2 * np.arange(VOCAB)).tolist()
    assert "if these are absolute ids, store d2t - arange" in refusal(save(np.arange(VOCAB, 2 * VOCAB)))


def test_tensors_that_the_target_shares_may_be_missing(tmp_path: Path) -> None:
    """Only together with the target's own; a head is narrowed to the draft vocabulary; a stored tensor wins."""
    config, params = CONFIGS[ONE], random_params(CONFIGS[ONE])
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((config.vocab_size, config.hidden_size)).astype(np.float32)
    head = rng.standard_normal((config.hidden_size, config.vocab_size)).astype(np.float32)
    shared = ["embed_tokens.weight", "lm_head.weight"]
    directory = File(tensors=dict.fromkeys(shared, GONE)).write(tmp_path / "shared")
    assert shared_tensors(open_drafter(directory)) == shared
    loaded, _ = load_drafter(directory, target_embedding=embedding, target_lm_head=jnp.asarray(head))
    np.testing.assert_array_equal(loaded.embedding, embedding)
    np.testing.assert_array_equal(loaded.lm_head, head[:, np.asarray(params.draft_to_target)])
    assert "embed_tokens.weight is missing: this drafter shares" in refusal(directory)
    assert "lm_head.weight is missing: this drafter shares" in refusal(directory, target_embedding=embedding)
    line = refusal(directory, target_embedding=embedding[:, :-1])
    assert "embed_tokens.weight" in line
    assert "[61, 19]; expected [61, 20]" in line
    stored = File().write(tmp_path / "stored")
    assert_same(load_drafter(stored, target_embedding=embedding, target_lm_head=head)[0], params)


# What is refused


@BOTH
def test_every_tensor_is_needed_and_every_shape_checked(tmp_path: Path, dialect: Dialect) -> None:
    """A tensor that is missing, or has a row too many, is named; t2d is not needed."""
    tensors = to_tensors(random_params(CONFIGS[TWO]), CONFIGS[TWO], dialect)
    assert len(tensors) == 40
    for name, value in tensors.items():
        longer = np.concatenate([value, value[:1]])
        missing = refusal(File(TWO, dialect, tensors={name: GONE}).write(tmp_path))
        assert "missing" in missing
        assert name in missing
        assert name in refusal(File(TWO, dialect, tensors={name: longer}).write(tmp_path))


def specforge(directory: Path, **beside: Any) -> Path:
    """Write a P-EAGLE as SpecForge's trainer does: two of its settings are only in peagle_config.json."""
    gone = {"ptd_token_id": GONE, "norm_before_residual": GONE, "architectures": ["PEagleDraftModel"]}
    File(config=gone, rename=lambda name: name.replace("midlayer", "layers.0")).write(directory)
    others = {"num_depths": 8, "down_sample_ratio": 0.8, "down_sample_ratio_min": 0.2, "num_draft_layers": 1}
    (directory / "peagle_config.json").write_text(json.dumps({**others, **beside}))
    return directory


@pytest.mark.parametrize("before", [False, True])
def test_specforges_settings_beside_config_json_are_read(tmp_path: Path, before: bool) -> None:
    directory = specforge(tmp_path, mask_token_id=7, norm_before_residual=before)
    config = load_drafter(directory)[1]
    assert (config.kind, config.mask_token_id, config.norm_before_residual) == ("P-EAGLE", 7, before)
    assert is_drafter_config(json.loads((directory / "config.json").read_text()))
    edit_json(directory / "config.json", mask_token_id=9)
    assert (
        "mask_token_id is 9 in config.json and mask_token_id is 7 in peagle_config.json; expected them equal"
        in refusal(directory)
    )
    edit_json(
        directory / "config.json", mask_token_id=7, ptd_token_id=8, eagle_config={"norm_before_residual": not before}
    )
    assert "ptd_token_id is 8 in config.json and mask_token_id is 7 in peagle_config.json" in refusal(directory)
    edit_json(directory / "config.json", ptd_token_id=7)
    assert f"norm_before_residual is {not before} in config.json" in refusal(directory)
    assert "names no mask token" in refusal(specforge(tmp_path / "unnamed", mask_token_id=None))


def expect_refusal(file: File, directory: Path, says: str) -> None:
    assert re.search(says, refusal(file.write(directory)))


SLIDING = {"layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ptd_token_id": None}, r"no mask token, in one of mask_token_id, pard_token, ptd_token_id, but has mask_h"),
        ({"mask_token_id": 4}, r"different mask tokens.*'mask_token_id': 4.*'ptd_token_id': 60"),
        ({"ptd_token_id": 61}, r"mask token 61 lies outside 0\.\.60"),
        ({"ptd_token_id": "sixty"}, r"ptd_token_id is 'sixty'; expected a whole number of 0 or more"),
        ({"hidden_size": GONE}, r"hidden_size is missing"),
        ({"hidden_size": 21}, r"embed_tokens.weight has shape \[61, 20\].*\[61, 21\]"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0"),
        ({"num_attention_heads": 5}, r"5 query heads do not divide among 2"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0"),
        ({"head_dim": 7}, r"head_dim is 7"),
        ({"num_key_value_heads": 3}, r"k_proj.weight has shape \[16, 40\].*\[24, 40\]"),
        ({"intermediate_size": 27}, r"gate_proj.weight"),
        ({"draft_vocab_size": 62}, r"draft_vocab_size 62 exceeds its vocab_size 61"),
        ({"target_hidden_size": 13}, r"fc.weight reads 36 values; expected 3 hidden states of target_hidden_size 13"),
        ({"target_hidden_size": float("nan")}, r"config.json: target_hidden_size is nan; expected a whole number"),
        ({"target_hidden_size": "wide"}, r"config.json: target_hidden_size is 'wide'; expected a whole number"),
        ({IDS: [0, 4, 6]}, r"\[0, 4, 6\]; expected 1 or more"),
        ({IDS: [2, 5, 5]}, r"layers \[1, 4, 4\], one of them twice; expected each .* once"),
        ({IDS: [2, 4]}, r"is \[2, 4\], and num_aux_hidden_states 3"),
        ({IDS: [2, 4], "num_aux_hidden_states": GONE}, r"reads 36 values.*2 hidden states"),
        ({"norm_before_fc": True, "fc_norm": True}, r"both norm_before_fc and fc_norm"),
        ({"norm_before_fc": True}, r"missing: input_norm.weight;"),
        ({"fc_norm": True}, r"missing: fc_norm.0.weight, fc_norm.1"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', which is not supported"),
        ({"logit_scale": 0.5}, r"logit_scale is 0.5, which is not supported"),
        ({"is_causal": False}, r"is_causal is False"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, r"use_aux_hidden_state is False"),
        ({"eagle_config": 7}, r"eagle_config is 7; expected an object"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config"),
        ({"qkv_bias": True}, r"qkv_bias is True, attention_bias False"),
        ({"attention_bias": True}, r"missing: .*midlayer\.self_attn\.\w+\.bias"),
        ({"layer_types": ["chunked_attention"]}, r"layer_types is \['chunked_attention'\]; expected a list of 1"),
        ({"layer_types": ["full_attention"] * 2}, r"layer_types is .*; expected a list of 1, one of full"),
        ({"layer_types": "sliding_attention"}, r"layer_types is 'sliding_attention'; expected a list of 1"),
        (SLIDING, r"sliding_window is None, with layers of sliding_attention"),
        ({**SLIDING, "sliding_window": 0}, r"sliding_window is 0, with.*1 or more"),
        ({**SLIDING, "sliding_window": "8"}, r"sliding_window is '8', with"),
        (
            {**SLIDING, "sliding_window": 8, "use_sliding_window": False},
            r"use_sliding_window is false, but layer_types is \['sliding_attention'\]; expected them to agree",
        ),
        ({"use_sliding_window": True, "sliding_window": 8}, r"use_sliding_window is True without layer_types"),
        ({"model_type": "qwen3"}, r"'qwen3'; expected 'llama'"),
        ({NESTED: 3}, r"transformer_layer_config is 3; expected an object"),
        ({NESTED: {}}, r"speculators_model_type is None; expected 'peagle'"),
        ({"speculators_model_type": "eagle3", NESTED: {}}, r"'eagle3'; expected 'peagle', since"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"'dynamic' is not supported"),
    ],
)  # fmt: skip
def test_a_config_that_asks_for_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    expect_refusal(File(config=changes), tmp_path, says)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (File(EAGLE, config=SPECFORGE | {"architectures": ["GptOssForCausalLMEagle3"]}), "'gpt_oss'; expected 'llama'"),
        (File(HEADS_NORMED, config={"model_type": "llama"}), "model_type 'llama'; expected 'qwen3'"),
        (File(HEADS_NORMED, "speculators", {NESTED: {"model_type": "llama"}}), "model_type 'llama'; expected 'qwen3'"),
        (File(dialect="speculators", config={"rope_theta": 2e4}), "in transformer_layer_config and"),
        (
            File(config={"tie_word_embeddings": True}, tensors={"lm_head.weight": GONE}),
            "tie_word_embeddings is true, which is not supported",
        ),
        (
            File(rename=lambda name: name.replace("midlayer", "decoder.0")),
            r"has neither midlayer\.\* nor layers\.0\.\* tensors",
        ),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, file: File, says: str) -> None:
    expect_refusal(file, tmp_path, says)


@pytest.mark.parametrize(
    ("tensor", "value", "says"),
    [
        ("d2t", np.full(37, 30), r"ids 30\.\.66; expected 0\.\.60"),
        ("d2t", np.arange(37, 0, -1), r"37 draft ids to 1 target ids"),
        ("d2t", GONE, r"d2t is missing; a draft vocabulary of 37"),
        ("mask_hidden", np.zeros((1, 1, 20), np.float32), r"\[1, 1, 20\]; expected \[1, 1, 36\]"),
        ("mask_hidden", np.zeros((2, 36), np.float32), r"\[2, 36\]; expected \[1, 1, 36\]"),
        ("norm.weight", np.zeros(20, np.int32), r"norm.weight has dtype int32; expected floating-point"),
        ("layers.0.norm.weight", np.zeros(20, np.float32), r"both midlayer\.\* and layers\.0\.\*"),
        ("midlayer.self_attn.sinks", np.ones(12, np.float32), r"midlayer\.self_attn\.sinks"),  # no tensor is ignored
        ("midlayer.self_attn.o_proj.bias", np.ones(20, np.float32), r"midlayer\.self_attn\.o_proj\.bias"),
        ("input_norm.weight", np.ones(12, np.float32), r"input_norm\.weight"),
        ("fc.bias", np.ones(12, np.float32), r"fc\.bias"),
    ],
)
def test_a_tensor_that_makes_no_sense_is_refused(tmp_path: Path, tensor: str, value: Any, says: str) -> None:
    expect_refusal(File(tensors={tensor: value}), tmp_path, says)


@pytest.mark.parametrize(
    ("ids", "says"), [((1, 4), "names 2 aux layers"), ((1, 4, 4), "one of them twice"), ((-1, 4, 6), "0 or more")]
)
def test_ids_of_the_caller_that_cannot_be_name_their_option(tmp_path: Path, ids: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=f"^--aux-layer-ids .*{says}") as caught:
        load_drafter(File().write(tmp_path), aux_layer_ids=ids)
    assert caught.value.field == "aux_layer_ids"
