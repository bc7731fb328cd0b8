"""Checkpoints load and save; a bad one is one line that names the fault."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.base.checkpoint import read_checkpoint, write_checkpoint
from peagle.base.errors import InputError
from peagle.ops.expert_matmul import ExpandedExperts, FusedExperts, PackedExperts
from peagle.ops.mxfp4 import dequantize, quantize
from peagle.ops.rope import Llama3, RopeConfig, Yarn
from peagle.workflows.random_checkpoint import SIZES, random_tensors
from target import load
from target.config import FULL
from target.dialects import ORIGINAL, TRANSFORMERS, parse_config, render_config, tensor_shapes
from target.load import inspect_target, load_target, save_target, write_target
from tests.support.checkpoints import GONE, assert_same, contents, copy_changed, refusal
from tests.target.test_model import CONFIG, random_params

MXFP4_CONFIG = dataclasses.replace(SIZES["tiny"], layer_types=("sliding_attention", "full_attention"))
STOPS = (7, 5)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("load") / "mxfp4"
    tensors = random_tensors(MXFP4_CONFIG, mxfp4=True, seed=0)
    write_target(directory, MXFP4_CONFIG, tensors, mxfp4=True, stop_token_ids=STOPS, shard_bytes=200_000)
    return directory


# Saving


@pytest.mark.parametrize(("fused_up_to", "experts"), [(4, "fused"), (0, "expanded")])
def test_unquantised_weights_survive_saving_and_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused_up_to: int, experts: str
) -> None:
    params, extra_files = random_params(), {"tokenizer.json": b"{}"}
    options: dict[str, Any] = {"stop_token_ids": (3, 9), "pad_token_id": 1, "extra_files": extra_files}
    save_target(tmp_path / "a", params, CONFIG, dtype=np.float32, mxfp4=False, **options)
    monkeypatch.setattr(load, "FUSED_UP_TO", fused_up_to)
    loaded = load_target(tmp_path / "a")
    assert (loaded.config, loaded.stop_token_ids, loaded.mxfp4, loaded.experts) == (CONFIG, (3, 9), False, experts)
    if experts == "fused":
        assert_same(loaded.params, params)
    else:
        assert isinstance(loaded.params.layers[0].moe.experts, ExpandedExperts)
    save_target(tmp_path / "b", loaded.params, CONFIG, dtype=np.float32, mxfp4=False)
    assert_same(contents(tmp_path / "a")[1], contents(tmp_path / "b")[1])
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == b"{}"
    assert json.loads((tmp_path / "a" / "config.json").read_text())["pad_token_id"] == 1


@pytest.mark.parametrize("experts", ["packed", "expanded"])
def test_mxfp4_survives_loading_and_saving_in_any_layout(mxfp4: Path, tmp_path: Path, experts: str) -> None:
    """Compared are values: a small block may be written with a smaller scale."""
    loaded = load_target(mxfp4, dtype=jnp.bfloat16, experts=experts)  # type: ignore[arg-type]
    save_target(tmp_path / "again", loaded.params, loaded.config, stop_token_ids=loaded.stop_token_ids)
    before, after = contents(mxfp4), contents(tmp_path / "again")
    assert before[0] == after[0]
    assert before[0]["quantization_config"]["quant_method"] == "mxfp4"
    assert_same(*(with_values(tensors) for _, tensors in (before, after)))


def with_values(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put the values of MXFP4 in the place of blocks and scales."""
    blocks = {name for name in tensors if name.endswith("_blocks")}
    scales = {name: name.removesuffix("_blocks") + "_scales" for name in blocks}
    plain = {name: value for name, value in tensors.items() if name not in blocks | set(scales.values())}
    return plain | {name: dequantize(tensors[name], tensors[scales[name]]) for name in blocks}


def test_quantising_on_save_rounds_to_the_nearest(tmp_path: Path) -> None:
    params = random_params(MXFP4_CONFIG)
    save_target(tmp_path / "q", params, MXFP4_CONFIG, dtype=np.float32)
    saved = load_target(tmp_path / "q", experts="expanded").params
    experts, exact = saved.layers[0].moe.experts, params.layers[0].moe.experts
    assert isinstance(experts, FusedExperts)
    down = np.asarray(exact.down).reshape(MXFP4_CONFIG.num_experts, MXFP4_CONFIG.expert_width, -1)
    rounded = dequantize(*quantize(down.swapaxes(1, 2))).swapaxes(1, 2)
    np.testing.assert_array_equal(experts.down, rounded.reshape(-1, MXFP4_CONFIG.hidden_size))
    np.testing.assert_array_equal(saved.layers[0].attention.qkv, params.layers[0].attention.qkv)


def test_weights_that_cannot_be_are_not_written(tmp_path: Path) -> None:
    params = random_params()
    diverged = params.replace(norm=params.norm.at[3].set(jnp.nan))
    for weights, quantised, says in (
        (params, True, "multiples of 32"),
        (diverged, False, r"model\.norm\.weight has values that are not finite"),
    ):
        with pytest.raises(InputError, match=says):
            save_target(tmp_path / "a", weights, CONFIG, mxfp4=quantised)
        assert not (tmp_path / "a").exists()


# Configs


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": RopeConfig(10, 5e5)},
        {"rope": RopeConfig(10, 1e4, Llama3(8.0, 64, 1.0, 4.0))},
        {"rope": RopeConfig(10, 1e4, Yarn(4.0, 64, 16.0, 2.0, truncate=True, concentration=1.5))},
        # transformers takes sliding_window: null beside full layers
        {"layer_types": (FULL,) * CONFIG.num_layers, "sliding_window": None},
    ],
    ids=["plain", "Llama 3", "YaRN", "no window"],
)
def test_a_config_survives(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    written = json.loads(json.dumps(render_config(config)))
    assert parse_config(written) == config
    windows = {config.window(layer) for layer in range(config.num_layers)}
    assert windows == ({None} if written["sliding_window"] is None else {None, CONFIG.sliding_window})


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        ({"eos_token_id": 4}, None, (4,)),
        ({"eos_token_id": [4, 2, 4]}, None, (4, 2)),
        ({}, None, ()),
        ({"eos_token_id": 4}, {"eos_token_id": [12, 9]}, (12, 9)),
        ({"eos_token_id": 4}, {"temperature": 1.0}, (4,)),
        ({"eos_token_id": 4}, {"eos_token_id": []}, (4,)),
        ({}, {"eos_token_id": None}, ()),
    ],
)
def test_stop_tokens(
    mxfp4: Path, tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, stops: tuple[int, ...]
) -> None:
    directory = copy_changed(mxfp4, tmp_path / "stop", {"eos_token_id": GONE} | config)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert inspect_target(directory).stop_token_ids == stops


@pytest.mark.parametrize(
    ("name", "token", "stops"),
    [
        ("tokenizer_config.json", "<|return|>", (12,)),
        ("tokenizer_config.json", {"content": "<|return|>", "lstrip": False}, (12,)),
        ("special_tokens_map.json", "b", (1,)),
        ("tokenizer_config.json", "unheard of", ()),
        ("tokenizer_config.json", None, ()),
    ],
)
def test_the_tokenizer_names_the_stop_token_if_no_config_does(
    mxfp4: Path, tmp_path: Path, name: str, token: object, stops: tuple[int, ...]
) -> None:
    directory = copy_changed(mxfp4, tmp_path / "stop", {"eos_token_id": None})
    tokenizer = {"added_tokens": [{"id": 12, "content": "<|return|>"}], "model": {"vocab": {"a": 0, "b": 1}}}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / name).write_text(json.dumps({"eos_token": token}))
    files = inspect_target(directory)
    assert (files.stop_token_ids, files.stop_tokens_from) == (stops, name if stops else None)


# Loading

OPENAIS = {
    "model.layers.": "block.",
    "model.embed_tokens.weight": "embedding.weight",
    "lm_head.weight": "unembedding.weight",
    "model.norm.weight": "norm.scale",
    "input_layernorm.weight": "attn.norm.scale",
    "post_attention_layernorm.weight": "mlp.norm.scale",
    "self_attn.o_proj": "attn.out",
    "self_attn.sinks": "attn.sinks",
    "mlp.router": "mlp.gate",
    "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
    "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
    "mlp.experts.gate_up_proj_": "mlp.mlp1_weight.",
    "mlp.experts.down_proj_": "mlp.mlp2_weight.",
}


def test_the_original_layout_is_the_same_model(mxfp4: Path, tmp_path: Path) -> None:
    """openai's own names: fused q, k, v; other keys in config.json; no model_type, nor a number of positions."""
    config, tensors = contents(mxfp4)

    def renamed(name: str) -> str:
        return functools.reduce(lambda name, names: name.replace(*names), OPENAIS.items(), name)

    original = {renamed(name): value for name, value in tensors.items() if not re.search(r"\.[qkv]_proj\.", name)}
    for layer in range(MXFP4_CONFIG.num_layers):
        for kind in ("weight", "bias"):
            parts = [tensors[f"model.layers.{layer}.self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            original[f"block.{layer}.attn.qkv.{kind}"] = np.concatenate(parts)
    scaling = config["rope_scaling"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept = (*sizes, "head_dim", "vocab_size", "sliding_window", "swiglu_limit", "rope_theta")
    openais = {
        "num_experts": config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "initial_context_length": scaling["original_max_position_embeddings"],
        "rope_scaling_factor": scaling["factor"],
        "rope_ntk_alpha": scaling["beta_slow"],
        "rope_ntk_beta": scaling["beta_fast"],
    }
    write_checkpoint(tmp_path / "original", {name: config[name] for name in kept} | openais, original)
    ours, theirs = load_target(tmp_path / "original", experts="packed"), load_target(mxfp4, experts="packed")
    assert_same(ours.params, theirs.params)
    assert dataclasses.replace(ours.config, max_positions=theirs.config.max_positions) == theirs.config
    assert ORIGINAL.names.keys() == TRANSFORMERS.names.keys()


def test_packed_keeps_the_bytes_and_auto_expands_on_a_cpu_if_it_fits(
    mxfp4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = load_target(mxfp4, experts="packed").params.layers[1].moe.experts
    assert isinstance(experts, PackedExperts)
    stored = read_checkpoint(mxfp4).take("model.layers.1.mlp.experts.down_proj_blocks")
    np.testing.assert_array_equal(experts.down_blocks, stored)
    assert load_target(mxfp4).experts == "fused"
    weights = sum(np.prod(shape) for shape in tensor_shapes(MXFP4_CONFIG, mxfp4=False).values())
    monkeypatch.setattr(load, "available_memory_bytes", lambda: int(4 * weights))  # exactly as much as needed
    assert load_target(mxfp4).experts == "packed"
    assert load_target(mxfp4, dtype=jnp.bfloat16).experts == "fused"  # half as large
    assert load_target(mxfp4, experts="expanded").experts == "fused"  # by name, whether it fits or not
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert load_target(mxfp4, dtype=jnp.bfloat16).experts == "packed"


def test_progress_counts_every_byte_once(mxfp4: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_target(mxfp4, progress=lambda done, of: calls.append((done, of)))
    total = sum(value.nbytes for value in contents(mxfp4)[1].values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert {of for _, of in calls} == {total}


@pytest.mark.parametrize("quantised", [True, False])
def test_inspecting_finds_what_loading_finds(mxfp4: Path, tmp_path: Path, quantised: bool) -> None:
    directory = mxfp4
    if not quantised:
        directory = tmp_path / "dense"
        write_target(directory, MXFP4_CONFIG, random_tensors(MXFP4_CONFIG, mxfp4=False, seed=0), mxfp4=False)
    files = inspect_target(directory)
    dense = tensor_shapes(MXFP4_CONFIG, mxfp4=False)
    experts = sum(int(np.prod(shape)) for name, shape in dense.items() if name.endswith("_proj") and "mlp" in name)
    assert (files.config, files.mxfp4) == (MXFP4_CONFIG, quantised)
    assert files.stop_token_ids == (STOPS if quantised else ())
    assert files.num_parameters == sum(int(np.prod(shape)) for shape in dense.values())
    assert files.num_expert_parameters == experts
    assert files.tensor_bytes == sum(value.nbytes for value in contents(directory)[1].values())
    assert files.expert_tensor_bytes == (experts // 2 + experts // 32 if quantised else 2 * experts)


# What is refused

SCALES, NORM = "model.layers.1.mlp.experts.gate_up_proj_scales", "model.norm.weight"


@pytest.mark.parametrize(
    ("tensor", "value", "says"),
    [
        ("model.layers.1.self_attn.sinks", GONE, r"missing: model\.layers\.1\.self_attn\.sinks"),
        ("extra", np.zeros(1, np.float32), "no place for: extra"),
        (NORM, np.zeros(5, np.float32), r"model\.norm\.weight has shape \[5\], expected \[96\]"),
        (NORM, np.zeros(96, np.int32), r"model\.norm\.weight has dtype int32; expected floats"),
        (SCALES, np.full((5, 128, 3), 255, np.uint8), f"{SCALES} has a scale of 255"),
        (SCALES, np.zeros((5, 128, 3), np.int8), f"{SCALES} has dtype int8; expected uint8"),
        (
            "model.layers.0.mlp.experts.gate_up_projs.0.weight",
            np.zeros((2, 2), np.float32),
            "each expert by itself",
        ),
    ],
)
def test_a_bad_tensor_is_named(mxfp4: Path, tmp_path: Path, tensor: str, value: Any, says: str) -> None:
    directory = copy_changed(mxfp4, tmp_path / "bad", tensors={tensor: value})
    assert re.search(says, refusal(functools.partial(load_target, experts="packed"), directory))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; expected 'gpt_oss'"),
        ({"num_hidden_layers": 1, "layer_types": None}, r"no place for: model\.layers\.1\."),
        ({"num_hidden_layers": 3, "layer_types": None}, r"missing: model\.layers\.2\."),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; expected a list"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config names 'awq'"),
        ({"quantization_config": "mxfp4"}, "quantization_config is 'mxfp4'; expected an object"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha is 1\.0"),
        ({"vocab_size": GONE}, "vocab_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True; expected a whole number"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": 400}, r"eos_token_id is \[400\]; expected token ids in 0\.\.319"),
        ({"eos_token_id": 10**12}, r"eos_token_id is \[1000000000000\]"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; expected a whole number of 1 or more"),
        ({"sliding_window": 0}, "sliding_window is 0; expected a whole number of 1 or more"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"sliding_window": None}, "sliding_window is null"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a number above 0"),
    ],
)
def test_a_bad_config_is_named(mxfp4: Path, tmp_path: Path, config: dict[str, Any], says: str) -> None:
    assert re.search(says, refusal(load_target, copy_changed(mxfp4, tmp_path / "bad", config)))


def test_packed_needs_mxfp4(tmp_path: Path) -> None:
    save_target(tmp_path / "a", random_params(), CONFIG, mxfp4=False)
    with pytest.raises(InputError, match="packed needs an MXFP4 checkpoint") as caught:
        load_target(tmp_path / "a", experts="packed")
    assert caught.value.field == "experts"


def test_published_geometries() -> None:
    """The shapes of the published 20b, and the sizes of the random checkpoints."""
    shapes = tensor_shapes(SIZES["20b"], mxfp4=True)
    assert shapes["model.layers.23.self_attn.q_proj.weight"] == (4096, 2880)
    assert shapes["model.layers.0.mlp.experts.gate_up_proj_blocks"] == (32, 5760, 90, 16)
    assert shapes["model.layers.0.mlp.experts.down_proj_scales"] == (32, 2880, 90)
    assert len(shapes) == 24 * 19 + 3
    for name, millions in {"S": 11, "M": 183, "L": 1834, "20b": 20915}.items():
        count = sum(int(np.prod(shape)) for shape in tensor_shapes(SIZES[name], mxfp4=False).values())
        assert count / 1e6 == pytest.approx(millions, rel=0.01)
