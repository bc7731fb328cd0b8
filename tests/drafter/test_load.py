"""Checkpoints: three dialects saved and loaded; a bad file raises an error of one line that names the fault."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafter.config import DrafterConfig
from drafter.dialects import Dialect, is_drafter_config, named_aux_layers, parse_config, refused_by, render_config
from drafter.load import load_drafter, save_drafter, shared_tensors, sort_aux_layers, to_tensors
from drafter.params import DrafterParams, init_params
from drafter.reference import draft_logits
from peagle.ops.checkpoint import read_checkpoint, write_checkpoint
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.rope import RopeConfig, Yarn
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

Tensors = dict[str, np.ndarray]
Edit = Callable[[dict[str, Any], Tensors], None]


def write(
    directory: Path, name: str = ONE, dialect: Dialect = "vllm", edit: Edit = lambda _config, _tensors: None
) -> Path:
    """Write a drafter's directory, after editing its config and tensors in place."""
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    entries = render_config(config, dialect, "float32")
    tensors = {key: np.ascontiguousarray(value) for key, value in to_tensors(params, config, dialect).items()}
    edit(entries, tensors)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(entries))
    save_file(tensors, directory / "model.safetensors")
    return directory


def refusal(directory: Path, **given: Any) -> str:
    """Return the one-line error of loading a directory."""
    with pytest.raises(InputError) as caught:
        load_drafter(directory, **given)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(directory))
    return line


def assert_same(one: DrafterParams, other: DrafterParams) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def cast(params: DrafterParams, dtype: Any) -> DrafterParams:
    narrowed = jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf).astype(dtype)), params.replace(draft_to_target=None)
    )
    return narrowed.replace(draft_to_target=params.draft_to_target)


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_drafter_comes_back_bit_for_bit(tmp_path: Path, name: str, dialect: Dialect) -> None:
    config = CONFIGS[name]
    for dtype in (jnp.float32, jnp.bfloat16):
        params = cast(random_params(config), dtype)
        save_drafter(tmp_path / "saved", params, config, dialect)
        loaded, loaded_config = load_drafter(tmp_path / "saved")
        assert loaded_config == config
        assert_same(params, loaded)
    names = set(load_file(tmp_path / "saved" / "model.safetensors"))
    first = {"vllm": "midlayer.", "speculators": "layers.0."}
    assert {key for key, prefix in first.items() if any(n.startswith(prefix) for n in names)} == {dialect}
    wide, _ = load_drafter(tmp_path / "saved", jnp.float32)
    assert_same(cast(loaded, jnp.float32), wide)


def test_other_rope_scalings_and_default_aux_layers_come_back(tmp_path: Path) -> None:
    yarn = Yarn(factor=8.0, original_length=64, beta_fast=16.0, truncate=False, concentration=1.5)
    base = dataclasses.replace(CONFIGS[FOUR], aux_layer_ids=None, num_taps=3)
    for scaling in (yarn, dataclasses.replace(yarn, concentration=None), None):
        config = dataclasses.replace(base, rope=RopeConfig(6, 1234.5, scaling))
        for dialect in ("vllm", "speculators"):
            save_drafter(tmp_path / "saved", random_params(CONFIGS[FOUR]), config, dialect)
            assert parse_config(read_checkpoint(tmp_path / "saved")) == config


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_each_name_of_the_mask_token_is_read(tmp_path: Path, key: str) -> None:
    def rename(config: dict[str, Any], _tensors: Tensors) -> None:
        config[key] = config.pop("ptd_token_id") - 1

    directory = write(tmp_path, edit=rename)
    assert load_drafter(directory)[1].mask_token_id == CONFIGS[ONE].mask_token_id - 1
    assert is_drafter_config(json.loads((directory / "config.json").read_text()))
    assert not is_drafter_config({"model_type": "gpt_oss"})


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLMEagle3",  # vLLM, SGLang, SpecForge
        "Eagle3LlamaForCausalLM",  # vLLM
        "PEagleDraftModel",  # vLLM, SpecForge
        "PeagleLlamaForCausalLM",  # vLLM
        "PEagleSpeculator",  # speculators
        "Eagle3DraftModel",  # speculators
        "LlamaEagle3DraftModel",  # NeMo
    ],
)
def test_a_drafter_is_recognised_by_its_architecture(name: str) -> None:
    """Without a mask key, from any project."""
    assert is_drafter_config({"architectures": [name], "model_type": "llama"})
    assert not is_drafter_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})


@pytest.mark.parametrize("name", [ONE, EAGLE])
def test_nemos_names_are_read(tmp_path: Path, name: str) -> None:
    """`model.` before the wrapped model's names, layer 0 among the layers, an architecture of its own."""

    def wrap(config: dict[str, Any], tensors: Tensors) -> None:
        config["architectures"] = ["LlamaEagle3DraftModel"]
        for tensor in [each for each in tensors if each not in ("lm_head.weight", "mask_hidden", "d2t", "t2d")]:
            tensors[f"model.{tensor.replace('midlayer', 'layers.0')}"] = tensors.pop(tensor)

    loaded, config = load_drafter(write(tmp_path, name, edit=wrap))
    assert config == CONFIGS[name]
    assert_same(loaded, random_params(CONFIGS[name]))
    assert shared_tensors(tmp_path) == []


def test_layers_under_other_names_are_refused(tmp_path: Path) -> None:
    def rename(_config: dict[str, Any], tensors: Tensors) -> None:
        for tensor in [each for each in tensors if each.startswith("midlayer.")]:
            tensors[tensor.replace("midlayer", "decoder.0")] = tensors.pop(tensor)

    assert "has neither midlayer.* nor layers.0.* tensors" in refusal(write(tmp_path, edit=rename))


def test_specforge_keeps_the_targets_model_type_above_layers_of_llama(tmp_path: Path) -> None:
    """Without RoPE keys its LlamaConfig is plain, of base 10000. An architecture with experts is another model."""

    def retype(config: dict[str, Any], _tensors: Tensors) -> None:
        config |= {"model_type": "gpt_oss", "num_local_experts": 16, "experts_per_token": 4}
        del config["rope_theta"], config["rope_scaling"]

    loaded, config = load_drafter(write(tmp_path, EAGLE, edit=retype))
    assert config == dataclasses.replace(CONFIGS[EAGLE], rope=RopeConfig(6, 10000.0))
    assert_same(loaded, random_params(CONFIGS[EAGLE]))

    def experts(config: dict[str, Any], tensors: Tensors) -> None:
        retype(config, tensors)
        config["architectures"] = ["GptOssForCausalLMEagle3"]

    assert "model_type 'gpt_oss'; expected 'llama'" in refusal(write(tmp_path, EAGLE, edit=experts))


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
    found = draft_logits(to_tensors(moved, in_order), in_order, token_ids, aux, 4)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert sort_aux_layers(moved, in_order)[0] is moved


@pytest.mark.parametrize(
    ("changes", "vllm", "speculators"),
    [
        ({}, {}, {}),
        ({"num_mask_hiddens": 2}, {"vLLM": "2 mask hiddens"}, {"vLLM": "2 mask", "the speculators package": "2 mask"}),
        ({"num_heads": 3}, {"vLLM": "20, expected a multiple of its 3 heads"}, {"the speculators package": "3 heads"}),
        ({"target_hidden_size": 32}, {}, {"the speculators package": "width is 20, expected the target's 32"}),
    ],
)
def test_refusals_of_other_loaders(changes: dict[str, Any], vllm: dict[str, str], speculators: dict[str, str]) -> None:
    base = dataclasses.replace(CONFIGS[ONE], num_heads=4, num_kv_heads=1, target_hidden_size=20)
    for dialect, expected in (("vllm", vllm), ("speculators", speculators)):
        found = refused_by(dataclasses.replace(base, **changes), dialect)  # type: ignore[arg-type]
        assert found.keys() == expected.keys()
        assert all(expected[who] in why for who, why in found.items())


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
def test_a_written_config_is_a_llama_config(dialect: Dialect, recwarn: pytest.WarningsRecorder) -> None:
    """transformers builds a LlamaConfig from it, as vLLM and speculators do, and RoPE's length fits the positions."""
    from transformers import LlamaConfig

    config = dataclasses.replace(CONFIGS[ONE], num_heads=4, max_positions=131072)
    written = render_config(config, dialect, "float32", "some/target")
    if dialect == "speculators":
        written = written["transformer_layer_config"]
    read = LlamaConfig(**written)
    assert read.max_position_embeddings == 131072
    assert read.rope_parameters is not None
    assert read.rope_parameters["rope_type"] == "llama3"
    assert read.rope_parameters["original_max_position_embeddings"] == LLAMA3.original_length < 131072
    assert not recwarn.list


@pytest.mark.parametrize("name", [TWO, EAGLE_NORMED])
def test_vllm_finds_aux_layers_and_their_norms_in_the_nested_geometry(name: str) -> None:
    """From the top level it reads SpeculatorsConfig's settings only; for P-EAGLE these two are not among them."""
    nested = render_config(CONFIGS[name], "speculators", "float32", "some/target")["transformer_layer_config"]
    assert (nested["num_aux_hidden_states"], nested["fc_norm"]) == (CONFIGS[name].num_taps, True)


def test_a_map_to_the_whole_vocabulary_is_not_written() -> None:
    """vLLM accepts a map only if the draft vocabulary is smaller."""
    config = CONFIGS[TWO]
    whole = random_params(config).replace(draft_to_target=jnp.arange(config.vocab_size, dtype=jnp.int32))
    assert not {"d2t", "t2d"} & to_tensors(whole, config).keys()


def test_a_sparse_config_is_completed_by_the_tensors(tmp_path: Path) -> None:
    """Shapes give head geometry and the width of aux_hidden; either name of the first layer, mask_hidden flat, no
    t2d, a d2t of offsets."""

    def strip(config: dict[str, Any], tensors: Tensors) -> None:
        for key in (
            "head_dim",
            "num_key_value_heads",
            "target_hidden_size",
            "eagle_aux_hidden_state_layer_ids",
            "fc_norm",
        ):
            del config[key]
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling")}
        for tensor in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[tensor.replace("midlayer", "layers.0")] = tensors.pop(tensor)
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(-1)
        del tensors["t2d"]
        tensors["d2t"] = np.asarray([0, 0, 3] + [5] * 34)

    params, config = load_drafter(write(tmp_path, edit=strip))
    assert config == dataclasses.replace(CONFIGS[ONE], aux_layer_ids=None)
    assert params.draft_to_target is not None
    assert params.draft_to_target.tolist() == [0, 1, 5, *range(8, 42)]
    assert_same(params.replace(draft_to_target=None), random_params(CONFIGS[ONE]).replace(draft_to_target=None))


def test_the_key_of_aux_layer_ids_decides_whether_they_are_inputs_or_outputs(tmp_path: Path) -> None:
    """At the top they are inputs, as vLLM reads them: [2, 12, 21] are outputs [1, 11, 20]; in eagle_config outputs, as
    SpecForge and SGLang read them. Ids given by the caller win over both."""

    def edit(config: dict[str, Any], _tensors: Tensors) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = [2, 12, 21]

    assert load_drafter(write(tmp_path, edit=edit))[1].aux_layer_ids == (1, 11, 20)

    def nested(config: dict[str, Any], _tensors: Tensors) -> None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [3, 4, 9], "use_aux_hidden_state": True}
        del config["eagle_aux_hidden_state_layer_ids"]

    assert load_drafter(write(tmp_path, edit=nested))[1].aux_layer_ids == (3, 4, 9)
    assert load_drafter(tmp_path, aux_layer_ids=(2, 3, 8))[1].aux_layer_ids == (2, 3, 8)

    def both(config: dict[str, Any], tensors: Tensors) -> None:
        edit(config, tensors)
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [3, 4, 9]}

    assert load_drafter(write(tmp_path, edit=both))[1].aux_layer_ids == (1, 11, 20)
    places = named_aux_layers(read_checkpoint(tmp_path).config)
    assert [(each.outputs, each.written((1, 4))) for each in places] == [((1, 11, 20), [2, 5]), ((3, 4, 9), [1, 4])]


def from_zero(config: dict[str, Any], _tensors: Tensors) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [0, 4, 6]


def test_ids_that_cannot_be_inputs_can_be_given_as_outputs(tmp_path: Path) -> None:
    directory = write(tmp_path, edit=from_zero)
    assert "--aux-layer-ids" in refusal(directory)
    assert load_drafter(directory, aux_layer_ids=(0, 4, 6))[1].aux_layer_ids == (0, 4, 6)


@pytest.mark.parametrize(
    ("ids", "says"), [((1, 4), "names 2 aux layers"), ((1, 4, 4), "one of them twice"), ((-1, 4, 6), "0 or more")]
)
def test_given_ids_that_cannot_be_name_their_option(tmp_path: Path, ids: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        load_drafter(write(tmp_path), aux_layer_ids=ids)
    assert str(caught.value).startswith("--aux-layer-ids names ")
    assert caught.value.field == "aux_layer_ids"


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
    def edit(_config: dict[str, Any], tensors: Tensors) -> None:
        tensors["d2t"] = ids - np.arange(37)
        tensors["t2d"] = np.isin(np.arange(VOCAB), KEPT if marked is None else marked)
        if marked is None:
            del tensors["t2d"]

    directory = write(tmp_path, edit=edit)
    with pytest.warns(InputWarning, match=says) if says else contextlib.nullcontext():
        params, _ = load_drafter(directory)
    assert np.asarray(params.draft_to_target).tolist() == ids.tolist()


@pytest.mark.parametrize("with_mask", [True, False])
def test_a_map_of_absolute_ids_is_named(tmp_path: Path, with_mask: bool) -> None:
    """If the ids are small enough to be read as offsets, t2d reveals it, or that no tokens are neighbours; else loading
    fails. The map is never reinterpreted."""
    config = dataclasses.replace(CONFIGS[ONE], vocab_size=2 * VOCAB, draft_vocab_size=VOCAB)

    def save(ids: np.ndarray) -> Path:
        params = dataclasses.replace(init_params(config, jax.random.key(0)), draft_to_target=jnp.asarray(ids))
        tensors = {key: np.ascontiguousarray(value) for key, value in to_tensors(params, config).items()}
        tensors["d2t"] = ids
        if not with_mask:
            del tensors["t2d"]
        write_checkpoint(tmp_path / "absolute", render_config(config, "vllm", "float32"), tensors)
        return tmp_path / "absolute"

    said = (
        "t2d marks other tokens .* read as absolute ids it agrees with t2d" if with_mask else "no two of its 61 tokens"
    )
    with pytest.warns(InputWarning, match=f"{said}.* store d2t - arange"):
        params, _ = load_drafter(save(np.arange(VOCAB)))
    assert np.asarray(params.draft_to_target).tolist() == (2 * np.arange(VOCAB)).tolist()
    assert "if these are absolute ids, store d2t - arange" in refusal(save(np.arange(VOCAB, 2 * VOCAB)))


def test_rope_settings_outside_of_the_geometry_count(tmp_path: Path) -> None:
    def twice(config: dict[str, Any], _tensors: Tensors) -> None:
        config["rope_theta"] = config["transformer_layer_config"]["rope_theta"] * 2

    def outside(config: dict[str, Any], _tensors: Tensors) -> None:
        config["rope_theta"] = config["transformer_layer_config"].pop("rope_theta")

    assert "in transformer_layer_config and" in refusal(write(tmp_path / "twice", ONE, "speculators", twice))
    directory = write(tmp_path / "outside", ONE, "speculators", outside)
    assert parse_config(read_checkpoint(directory)).rope == CONFIGS[ONE].rope


def test_an_identity_map_is_no_map(tmp_path: Path) -> None:
    def edit(_config: dict[str, Any], tensors: Tensors) -> None:
        tensors["d2t"] = np.zeros(CONFIGS[TWO].vocab_size, np.int64)

    assert load_drafter(write(tmp_path, TWO, edit=edit))[0].draft_to_target is None


def test_tensors_that_the_target_shares_may_be_missing(tmp_path: Path) -> None:
    """Only together with the target's own; a head is narrowed to the draft vocabulary; a stored tensor wins."""
    config, params = CONFIGS[ONE], random_params(CONFIGS[ONE])
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((config.vocab_size, config.hidden_size)).astype(np.float32)
    head = rng.standard_normal((config.hidden_size, config.vocab_size)).astype(np.float32)

    def strip(_config: dict[str, Any], tensors: Tensors) -> None:
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    directory = write(tmp_path / "shared", edit=strip)
    assert shared_tensors(directory) == ["embed_tokens.weight", "lm_head.weight"]
    loaded, _ = load_drafter(directory, target_embedding=embedding, target_lm_head=jnp.asarray(head))
    np.testing.assert_array_equal(loaded.embedding, embedding)
    np.testing.assert_array_equal(loaded.lm_head, head[:, np.asarray(params.draft_to_target)])
    assert "embed_tokens.weight is missing: this drafter shares" in refusal(directory)
    assert "lm_head.weight is missing: this drafter shares" in refusal(directory, target_embedding=embedding)
    line = refusal(directory, target_embedding=embedding[:, :-1])
    assert "embed_tokens.weight" in line
    assert "[61, 19]; expected [61, 20]" in line
    stored = write(tmp_path / "stored")
    assert_same(load_drafter(stored, target_embedding=embedding, target_lm_head=head)[0], params)


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
def test_every_tensor_is_needed_and_every_shape_checked(tmp_path: Path, dialect: Dialect) -> None:
    """Each tensor in turn missing, or with a row too many, raises an error with its name, except t2d."""
    names = sorted(to_tensors(random_params(CONFIGS[TWO]), CONFIGS[TWO], dialect))
    assert len(names) == 40
    for name in names:

        def drop(_config: dict[str, Any], tensors: Tensors, name: str = name) -> None:
            del tensors[name]

        def widen(_config: dict[str, Any], tensors: Tensors, name: str = name) -> None:
            tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])

        assert f"tensor {name} is missing" in refusal(write(tmp_path, TWO, dialect, drop))
        assert name in refusal(write(tmp_path, TWO, dialect, widen))


def test_every_tensor_has_a_place(tmp_path: Path) -> None:
    for name in ("midlayer.self_attn.sinks", "input_norm.weight", "layers.0.norm.weight", "fc.bias"):

        def add(_config: dict[str, Any], tensors: Tensors, name: str = name) -> None:
            tensors[name] = np.ones(12, np.float32)

        line = refusal(write(tmp_path, edit=add))
        assert name.split(".")[0] in line
    for present in (True, False):

        def bias(config: dict[str, Any], tensors: Tensors, present: bool = present) -> None:
            if present:
                tensors["midlayer.self_attn.o_proj.bias"] = np.ones(20, np.float32)
            else:
                config["attention_bias"] = True

        assert "midlayer.self_attn" in refusal(write(tmp_path, edit=bias))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"ptd_token_id": None},
            r"no mask token, in one of mask_token_id, pard_token, ptd_token_id, beside mask_hidden",
        ),
        ({"mask_token_id": 4}, r"different mask tokens.*'mask_token_id': 4.*'ptd_token_id': 60"),
        ({"ptd_token_id": 61}, r"mask token 61 lies outside 0\.\.60"),
        ({"ptd_token_id": "sixty"}, r"ptd_token_id is 'sixty'; expected a whole number of 0 or more"),
        ({"hidden_size": ...}, r"hidden_size is missing"),
        ({"hidden_size": 21}, r"embed_tokens.weight has shape \[61, 20\].*\[61, 21\]"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0"),
        ({"num_attention_heads": 5}, r"5 query heads do not divide among 2"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0"),
        ({"head_dim": 7}, r"head_dim is 7"),
        ({"num_key_value_heads": 3}, r"k_proj.weight has shape \[16, 40\].*\[24, 40\]"),
        ({"intermediate_size": 27}, r"gate_proj.weight"),
        ({"draft_vocab_size": 62}, r"draft_vocab_size 62 exceeds its vocab_size 61"),
        ({"target_hidden_size": 13}, r"fc.weight reads 36 values; expected 3 hidden states of target_hidden_size 13"),
        ({"target_hidden_size": "wide"}, r"config.json: target_hidden_size is 'wide'; expected a whole number"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 6]}, r"\[0, 4, 6\]; expected 1 or more"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 5, 5]},
            r"layers \[1, 4, 4\], one of them twice; expected each .* once",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"is \[2, 4\] beside num_aux_hidden_states 3"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4], "num_aux_hidden_states": ...},
            r"reads 36 values.*2 hidden states",
        ),
        ({"norm_before_fc": True, "fc_norm": True}, r"both norm_before_fc and fc_norm"),
        ({"norm_before_fc": True}, r"input_norm.weight is missing"),
        ({"fc_norm": True}, r"fc_norm.0.weight is missing"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', which is not supported"),
        ({"logit_scale": 0.5}, r"logit_scale is 0.5, which is not supported"),
        ({"is_causal": False}, r"is_causal is False"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, r"use_aux_hidden_state is False"),
        ({"eagle_config": 7}, r"eagle_config is 7; expected an object"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config"),
        ({"qkv_bias": True}, r"qkv_bias is True beside attention_bias False"),
        ({"layer_types": ["chunked_attention"]}, r"layer_types is \['chunked_attention'\]; expected a list of 1"),
        (
            {"layer_types": ["full_attention"] * 2},
            r"layer_types is .*; expected a list of 1, one of full",
        ),
        ({"layer_types": "sliding_attention"}, r"layer_types is 'sliding_attention'; expected a list of 1"),
        ({"layer_types": ["sliding_attention"]}, r"sliding_window is None beside layers of sliding_attention"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, r"sliding_window is 0 beside.*1 or more"),
        ({"layer_types": ["sliding_attention"], "sliding_window": "8"}, r"sliding_window is '8' beside"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": False},
            r"use_sliding_window is false beside layer_types \['sliding_attention'\]; expected them to agree",
        ),
        ({"use_sliding_window": True, "sliding_window": 8}, r"use_sliding_window is True without layer_types"),
        ({"model_type": "qwen3"}, r"'qwen3'; expected 'llama'"),
        ({"transformer_layer_config": 3}, r"transformer_layer_config is 3; expected an object"),
        ({"transformer_layer_config": {}}, r"speculators_model_type is None; expected 'peagle'"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": {}}, r"'eagle3'; expected 'peagle', since"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"'dynamic' is not supported"),
    ],
)
def test_a_config_that_asks_for_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    def edit(config: dict[str, Any], _tensors: Tensors) -> None:
        for key, value in changes.items():
            if value is ...:
                config.pop(key)
            else:
                config[key] = value

    assert re.search(says, refusal(write(tmp_path, edit=edit)))


@pytest.mark.parametrize(
    ("tensor", "value", "says"),
    [
        ("d2t", np.full(37, 30), r"ids 30\.\.66; expected 0\.\.60"),
        ("d2t", np.arange(37, 0, -1), r"37 draft ids to 1 target ids"),
        ("d2t", None, r"d2t is missing; a draft vocabulary of 37"),
        ("mask_hidden", np.zeros((1, 1, 20), np.float32), r"\[1, 1, 20\]; expected \[1, 1, 36\]"),
        ("mask_hidden", np.zeros((2, 36), np.float32), r"\[2, 36\]; expected \[1, 1, 36\]"),
        ("norm.weight", np.zeros(20, np.int32), r"norm.weight has dtype int32; expected floating-point"),
        ("layers.0.norm.weight", np.zeros(20, np.float32), r"both midlayer\.\* and layers\.0\.\*"),
    ],
)
def test_a_tensor_that_makes_no_sense_is_refused(
    tmp_path: Path, tensor: str, value: np.ndarray | None, says: str
) -> None:
    def edit(_config: dict[str, Any], tensors: Tensors) -> None:
        if value is None:
            del tensors[tensor]
        else:
            tensors[tensor] = value

    assert re.search(says, refusal(write(tmp_path, edit=edit)))


def test_a_head_tied_to_the_embedding_is_refused_if_none_is_stored(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        config["tie_word_embeddings"] = True
        tensors.pop("lm_head.weight", None)

    assert "tie_word_embeddings is true" in refusal(write(tmp_path, edit=edit))


def test_the_random_start_has_every_shape_that_a_file_has(tmp_path: Path) -> None:
    """init_params equals its saved and loaded copy: norms one, biases zero, the lowest ids as draft vocabulary."""
    config: DrafterConfig = CONFIGS[ONE]
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    save_drafter(tmp_path / "saved", params, config)
    assert_same(load_drafter(tmp_path / "saved")[0], params)
    assert params.draft_to_target is not None
    assert params.draft_to_target.tolist() == list(range(config.draft_vocab_size))
    assert all((np.asarray(layer.norm) == 1).all() for layer in params.layers)


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
def test_norms_of_queries_and_keys_load_as_qwen3_layers(tmp_path: Path, dialect: Dialect) -> None:
    """As vLLM takes them in speculators' files; without the layers' kind the tensors say it."""
    directory = write(tmp_path, HEADS_NORMED, dialect)
    config = json.loads((directory / "config.json").read_text())
    geometry = config if dialect == "vllm" else config["transformer_layer_config"]
    assert geometry["model_type"] == "qwen3"
    loaded, read = load_drafter(directory)
    assert read == CONFIGS[HEADS_NORMED]
    assert_same(loaded, random_params(CONFIGS[HEADS_NORMED]))
    for kind, says in ((None, None), ("llama", "model_type 'llama'; expected 'qwen3'")):

        def edit(config: dict[str, Any], _tensors: Tensors, kind: str | None = kind) -> None:
            place = config if dialect == "vllm" else config["transformer_layer_config"]
            if kind is None:
                del place["model_type"]
            else:
                place["model_type"] = kind

        directory = write(tmp_path / str(kind), HEADS_NORMED, dialect, edit)
        if says is None:
            assert load_drafter(directory)[1] == read
        else:
            assert says in refusal(directory)


def test_buffers_of_rope_are_ignored(tmp_path: Path) -> None:
    def add(_config: dict[str, Any], tensors: Tensors) -> None:
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    assert_same(load_drafter(write(tmp_path, edit=add))[0], random_params(CONFIGS[ONE]))
