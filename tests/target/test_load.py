"""Checkpoints load and save; a bad one raises an error of one line."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from peagle.ops.checkpoint import read_checkpoint, write_checkpoint
from peagle.ops.errors import InputError
from peagle.ops.expert_matmul import ExpandedExperts, FusedExperts, PackedExperts
from peagle.ops.mxfp4 import dequantize, quantize
from peagle.ops.rope import Llama3, RopeConfig, Yarn
from peagle.workflows.random_checkpoint import SIZES, random_tensors
from target import load
from target.config import FULL
from target.dialects import ORIGINAL, TRANSFORMERS, parse_config, render_config, tensor_shapes
from target.load import inspect_target, load_target, save_target, write_target
from tests.target.test_model import CONFIG, random_params

MXFP4_CONFIG = dataclasses.replace(SIZES["tiny"], layer_types=("sliding_attention", "full_attention"))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("load") / "mxfp4"
    tensors = random_tensors(MXFP4_CONFIG, mxfp4=True, seed=0)
    write_target(directory, MXFP4_CONFIG, tensors, mxfp4=True, stop_token_ids=(7, 5), shard_bytes=200_000)
    return directory


def assert_equal(left: object, right: object) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(a, b, str(path))


def contents(directory: Path) -> tuple[dict, dict[str, np.ndarray]]:
    checkpoint = read_checkpoint(directory)
    return checkpoint.config, {name: checkpoint.take(name) for name in checkpoint.names}


def changed(directory: Path, to: Path, change: Callable[[dict, dict[str, np.ndarray]], None]) -> Path:
    """Copy a checkpoint with its config and tensors changed."""
    config, tensors = contents(directory)
    change(config, tensors)
    write_checkpoint(to, config, tensors)
    return to


# round trips


@pytest.mark.parametrize("fused_up_to", [4, 0], ids=["fused", "expanded"])
def test_unquantised_weights_survive_saving_and_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused_up_to: int
) -> None:
    params = random_params()
    save_target(tmp_path / "a", params, CONFIG, dtype=np.float32, mxfp4=False, stop_token_ids=(3, 9), pad_token_id=1)
    monkeypatch.setattr(load, "FUSED_UP_TO", fused_up_to)
    loaded = load_target(tmp_path / "a")
    assert (loaded.config, loaded.stop_token_ids, loaded.mxfp4) == (CONFIG, (3, 9), False)
    if fused_up_to:
        assert loaded.experts == "fused"
        assert_equal(loaded.params, params)
    else:
        assert loaded.experts == "expanded"
        assert isinstance(loaded.params.layers[0].moe.experts, ExpandedExperts)
    save_target(tmp_path / "b", loaded.params, CONFIG, dtype=np.float32, mxfp4=False)
    first, second = contents(tmp_path / "a")[1], contents(tmp_path / "b")[1]
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("experts", ["packed", "expanded"])
def test_mxfp4_survives_loading_and_saving_in_any_layout(mxfp4: Path, tmp_path: Path, experts: str) -> None:
    loaded = load_target(mxfp4, dtype=jnp.bfloat16, experts=experts)  # type: ignore[arg-type]
    save_target(tmp_path / "again", loaded.params, loaded.config, stop_token_ids=loaded.stop_token_ids)
    before, after = contents(mxfp4), contents(tmp_path / "again")
    assert before[0] == after[0]
    assert before[0]["quantization_config"]["quant_method"] == "mxfp4"
    for name, value in before[1].items():
        back = after[1][name]
        assert back.dtype == value.dtype
        if not name.endswith(("_blocks", "_scales")):
            np.testing.assert_array_equal(back, value, name)
        if name.endswith("_blocks"):  # compare values: a small block may be written with a smaller scale
            scales = name.removesuffix("_blocks") + "_scales"
            np.testing.assert_array_equal(
                dequantize(back, after[1][scales]), dequantize(value, before[1][scales]), name
            )


def test_packed_keeps_the_bytes(mxfp4: Path) -> None:
    loaded = load_target(mxfp4, experts="packed")
    experts = loaded.params.layers[1].moe.experts
    assert isinstance(experts, PackedExperts)
    stored = read_checkpoint(mxfp4).take("model.layers.1.mlp.experts.down_proj_blocks")
    np.testing.assert_array_equal(experts.down_blocks, stored)
    assert loaded.stop_token_ids == (7, 5)


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


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(10, 5e5),
        RopeConfig(10, 1e4, Llama3(8.0, 64, 1.0, 4.0)),
        RopeConfig(10, 1e4, Yarn(4.0, 64, 16.0, 2.0, truncate=True, concentration=1.5)),
    ],
    ids=["plain", "llama3", "yarn"],
)
def test_a_config_survives(rope: RopeConfig) -> None:
    config = dataclasses.replace(CONFIG, rope=rope)
    assert parse_config(json.loads(json.dumps(render_config(config)))) == config


# other layouts and choices


def test_the_original_layout_is_the_same_model(mxfp4: Path, tmp_path: Path) -> None:
    """openai's own names: fused q, k, v; other keys in config.json; no model_type."""
    config, tensors = contents(mxfp4)
    original: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if any(f".{letter}_proj." in name for letter in "qkv"):
            continue
        for theirs, openais in (
            ("model.layers.", "block."),
            ("model.embed_tokens.weight", "embedding.weight"),
            ("lm_head.weight", "unembedding.weight"),
            ("model.norm.weight", "norm.scale"),
            ("input_layernorm.weight", "attn.norm.scale"),
            ("post_attention_layernorm.weight", "mlp.norm.scale"),
            ("self_attn.o_proj", "attn.out"),
            ("self_attn.sinks", "attn.sinks"),
            ("mlp.router", "mlp.gate"),
            ("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias"),
            ("mlp.experts.down_proj_bias", "mlp.mlp2_bias"),
            ("mlp.experts.gate_up_proj_", "mlp.mlp1_weight."),
            ("mlp.experts.down_proj_", "mlp.mlp2_weight."),
        ):
            name = name.replace(theirs, openais)
        original[name] = value
    for layer in range(MXFP4_CONFIG.num_layers):
        for kind in ("weight", "bias"):
            parts = [tensors[f"model.layers.{layer}.self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            original[f"block.{layer}.attn.qkv.{kind}"] = np.concatenate(parts)
    scaling = config["rope_scaling"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    write_checkpoint(
        tmp_path / "original",
        {
            **{name: config[name] for name in (*kept, "head_dim", "vocab_size", "sliding_window", "swiglu_limit")},
            "num_experts": config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "initial_context_length": scaling["original_max_position_embeddings"],
            "rope_theta": config["rope_theta"],
            "rope_scaling_factor": scaling["factor"],
            "rope_ntk_alpha": scaling["beta_slow"],
            "rope_ntk_beta": scaling["beta_fast"],
        },
        original,
    )
    for experts in ("packed", "expanded"):
        ours, theirs = load_target(tmp_path / "original", experts=experts), load_target(mxfp4, experts=experts)
        assert_equal(ours.params, theirs.params)
        # openai's config.json does not name the number of positions
        assert dataclasses.replace(ours.config, max_positions=theirs.config.max_positions) == theirs.config


def test_auto_expands_on_cpu_if_it_fits(mxfp4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_target(mxfp4).experts == "fused"
    weights = sum(np.prod(shape) for shape in tensor_shapes(MXFP4_CONFIG, mxfp4=False).values())
    monkeypatch.setattr(load, "available_memory_bytes", lambda: int(4 * weights))  # exactly as much as needed
    assert load_target(mxfp4).experts == "packed"
    assert load_target(mxfp4, dtype=jnp.bfloat16).experts == "fused"  # half as large
    assert load_target(mxfp4, experts="expanded").experts == "fused"  # by name, whether it fits or not
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert load_target(mxfp4, dtype=jnp.bfloat16).experts == "packed"


def test_progress_counts_every_byte_once(mxfp4: Path) -> None:
    told: list[tuple[int, int]] = []
    load_target(mxfp4, progress=lambda done, of: told.append((done, of)))
    total = sum(value.nbytes for value in contents(mxfp4)[1].values())
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert {of for _, of in told} == {total}


@pytest.mark.parametrize("quantised", [True, False])
def test_inspecting_finds_what_loading_finds(mxfp4: Path, tmp_path: Path, quantised: bool) -> None:
    directory = mxfp4
    if not quantised:
        directory = tmp_path / "dense"
        write_target(directory, MXFP4_CONFIG, random_tensors(MXFP4_CONFIG, mxfp4=False, seed=0), mxfp4=False)
    files = inspect_target(directory)
    stored = contents(directory)[1]
    dense = tensor_shapes(MXFP4_CONFIG, mxfp4=False)
    experts = sum(int(np.prod(shape)) for name, shape in dense.items() if name.endswith("_proj") and "mlp" in name)
    assert (files.config, files.mxfp4) == (MXFP4_CONFIG, quantised)
    assert files.stop_token_ids == ((7, 5) if quantised else ())
    assert files.num_parameters == sum(int(np.prod(shape)) for shape in dense.values())
    assert files.num_expert_parameters == experts
    assert files.tensor_bytes == sum(value.nbytes for value in stored.values())
    assert files.expert_tensor_bytes == (experts // 2 + experts // 32 if quantised else 2 * experts)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
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
def test_stop_tokens(tmp_path: Path, config: dict, generation: dict | None, expected: tuple[int, ...]) -> None:
    directory = tmp_path / "stop"
    save_target(directory, random_params(), CONFIG, mxfp4=False)
    (directory / "config.json").write_text(json.dumps(render_config(CONFIG) | config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert load_target(directory).stop_token_ids == expected


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("tokenizer_config.json", "<|return|>", 12),
        ("tokenizer_config.json", {"content": "<|return|>", "lstrip": False}, 12),
        ("special_tokens_map.json", "b", 1),
        ("tokenizer_config.json", "unheard of", None),
        ("tokenizer_config.json", None, None),
    ],
)
def test_the_tokenizer_names_the_stop_token_if_no_config_does(
    mxfp4: Path, tmp_path: Path, name: str, token: object, expected: int | None
) -> None:
    directory = changed(mxfp4, tmp_path / "stop", say(eos_token_id=None))
    (directory / "generation_config.json").unlink(missing_ok=True)
    tokenizer = {"added_tokens": [{"id": 12, "content": "<|return|>"}], "model": {"vocab": {"a": 0, "b": 1}}}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / name).write_text(json.dumps({"eos_token": token}))
    files = inspect_target(directory)
    assert files.stop_token_ids == (() if expected is None else (expected,))
    assert files.stop_tokens_from == (None if expected is None else name)


def test_extra_files_travel(tmp_path: Path) -> None:
    save_target(tmp_path / "a", random_params(), CONFIG, mxfp4=False, extra_files={"tokenizer.json": b"{}"})
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == b"{}"


# bad input

SCALES = "model.layers.1.mlp.experts.gate_up_proj_scales"


def drop(name: str) -> Callable[[dict, dict], None]:
    return lambda _, tensors: tensors.pop(name)


def put(name: str, value: np.ndarray) -> Callable[[dict, dict], None]:
    return lambda _, tensors: tensors.update({name: value})


def say(**values: object) -> Callable[[dict, dict], None]:
    return lambda config, _: config.update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("model.layers.1.self_attn.sinks"), r"missing: model\.layers\.1\.self_attn\.sinks"),
        (put("extra", np.zeros(1, np.float32)), "no place for: extra"),
        (put("model.norm.weight", np.zeros(5, np.float32)), r"model\.norm\.weight has shape \[5\], expected \[96\]"),
        (put("model.norm.weight", np.zeros(96, np.int32)), r"model\.norm\.weight has dtype int32; expected floats"),
        (put(SCALES, np.full((5, 128, 3), 255, np.uint8)), f"{SCALES} has a scale of 255"),
        (put(SCALES, np.zeros((5, 128, 3), np.int8)), f"{SCALES} has dtype int8; expected uint8"),
        (say(model_type="llama"), "model_type is 'llama'; expected 'gpt_oss'"),
        (say(num_hidden_layers=1, layer_types=None), r"no place for: model\.layers\.1\."),
        (say(num_hidden_layers=3, layer_types=None), r"missing: model\.layers\.2\."),
        (say(quantization_config={"quant_method": "awq"}), "quantization_config names 'awq'"),
        (say(quantization_config="mxfp4"), "quantization_config is 'mxfp4'; expected an object"),
        (say(swiglu_alpha=1.0), r"swiglu_alpha is 1\.0"),
        (say(hidden_size="wide"), "hidden_size is 'wide'; expected a whole number"),
        (say(hidden_size=True), "hidden_size is True; expected a whole number"),
        (say(eos_token_id="</s>"), "eos_token_id"),
        (say(eos_token_id=400), r"eos_token_id is \[400\]; expected token ids in 0\.\.319"),
        (say(eos_token_id=10**12), r"eos_token_id is \[1000000000000\]"),
        (say(num_key_value_heads=0), "num_key_value_heads is 0; expected a whole number of 1 or more"),
        (say(sliding_window=0), "sliding_window is 0; expected a whole number of 1 or more"),
        (say(sliding_window=-1), "sliding_window is -1"),
        (say(sliding_window=None), "sliding_window is null"),
        (say(rms_norm_eps=0), "rms_norm_eps is 0; expected a number above 0"),
        (say(layer_types="full_attention"), "layer_types is 'full_attention'; expected a list"),
        (lambda config, _: config.pop("vocab_size"), "vocab_size is missing"),
        (
            put("model.layers.0.mlp.experts.gate_up_projs.0.weight", np.zeros((2, 2), np.float32)),
            "each expert by itself",
        ),
    ],
)
def test_bad_input_is_named(mxfp4: Path, tmp_path: Path, change: Callable, message: str) -> None:
    directory = changed(mxfp4, tmp_path / "bad", change)
    with pytest.raises(InputError, match=message) as caught:
        load_target(directory, experts="packed")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(directory))


def test_layers_that_all_see_everything_need_no_window(tmp_path: Path) -> None:
    """transformers takes sliding_window: null beside full layers."""
    config = dataclasses.replace(CONFIG, layer_types=(FULL,) * CONFIG.num_layers)
    expected = dataclasses.replace(config, sliding_window=None)
    save_target(tmp_path / "a", random_params(), config, mxfp4=False)
    edited = {**render_config(config), "sliding_window": None}
    (tmp_path / "a" / "config.json").write_text(json.dumps(edited))
    loaded = load_target(tmp_path / "a")
    assert loaded.config == expected
    assert parse_config(render_config(expected)) == expected
    assert {loaded.config.window(layer) for layer in range(config.num_layers)} == {None}


def test_packed_needs_mxfp4(tmp_path: Path) -> None:
    save_target(tmp_path / "a", random_params(), CONFIG, mxfp4=False)
    with pytest.raises(InputError, match="packed needs an MXFP4 checkpoint") as caught:
        load_target(tmp_path / "a", experts="packed")
    assert caught.value.field == "experts"


def test_every_dialect_names_every_tensor() -> None:
    assert ORIGINAL.names.keys() == TRANSFORMERS.names.keys()


def test_widths_that_mxfp4_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="multiples of 32"):
        save_target(tmp_path / "a", random_params(), CONFIG, mxfp4=True)
    assert not (tmp_path / "a").exists()


def test_a_diverged_model_is_not_written(tmp_path: Path) -> None:
    params = random_params()
    with pytest.raises(InputError, match=r"model\.norm\.weight has values that are not finite"):
        save_target(tmp_path / "a", params.replace(norm=params.norm.at[3].set(jnp.nan)), CONFIG, mxfp4=False)
    assert not (tmp_path / "a").exists()


# the script of random checkpoints


def test_random_checkpoints_depend_on_their_seed_alone() -> None:
    first, again, other = (dict(random_tensors(MXFP4_CONFIG, mxfp4=True, seed=seed)) for seed in (3, 3, 4))
    shapes = tensor_shapes(MXFP4_CONFIG, mxfp4=True)
    assert first.keys() == shapes.keys()
    for name, value in first.items():
        assert value.shape == shapes[name]
        assert value.dtype == (np.uint8 if name.endswith(("_blocks", "_scales")) else ml_dtypes.bfloat16)
        np.testing.assert_array_equal(value, again[name])
        assert not np.array_equal(value, other[name])


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
