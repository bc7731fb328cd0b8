"""DFlash drafters: drafts of the float64 reference, blocks that see forward and are dropped, files and refusals."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafter.aux_layers import default_dflash_layers
from drafter.dflash import lay_out_block
from drafter.dialects import is_drafter_config, open_drafter, parse_config, render_config
from drafter.load import load_drafter, save_drafter, shared_tensors, to_tensors
from drafter.params import DrafterParams
from drafter.propose import DFlash
from drafter.vocabulary import DraftVocab, narrow
from peagle.base.errors import InputError
from peagle.ops.attention import MASKED
from peagle.ops.messages import DrafterInput
from tests.support.drafters import (
    BIASED,
    DFLASH_CONFIGS,
    PLAIN,
    Text,
    dflash,
    logits_of,
    prompt_state,
    propose,
    random_params,
    random_text,
    stack_fresh,
)

K = 3


def test_the_rows_of_a_pass() -> None:
    """The example of `lay_out_block`, and a sequence that is inactive."""
    tokens = jnp.asarray([[11, 12, 9, 9], [20, 9, 9, 9], [7, 9, 9, 9]])
    drafter_input = DrafterInput(tokens, jnp.zeros((3, 4, 1)), jnp.asarray([2, 1, 1]), jnp.asarray([5, 9, -1]))
    rows = lay_out_block(drafter_input, jnp.asarray([True, False, True]), 4, 99)
    assert rows.token_ids.tolist() == [[12, 99, 99, 99], [20, 99, 99, 99], [7, 99, 99, 99]]
    assert rows.positions.tolist() == [[5, 6, -1, -1, 7, 8, 9, 10], [9, *[-1] * 7], [-1] * 8]
    assert rows.until.tolist() == [[-1, -1, -1, -1, 10, 10, 10, 10], [-1] * 8, [-1] * 8]


def step(drafter: DFlash, text: Text, known: int, num_drafts: int, width: int | None = None) -> np.ndarray:
    """Return the logits [K, V] after `known` rows of a text, all but the last two by prefill."""
    state = prompt_state(drafter, [text], [known - 1], num_drafts)
    widths = None if width is None else jnp.asarray([width])
    fresh = stack_fresh([text], [known - 2], [2], num_drafts)
    return logits_of(propose(drafter, state, fresh, num_drafts=num_drafts, widths=widths)[0])[0]


@pytest.mark.parametrize("name", DFLASH_CONFIGS)
def test_fewer_drafts_are_the_first_of_the_whole_block(name: str) -> None:
    """Fewer in a pass, or for one slot of a pass: the block that the drafter learned stays whole."""
    drafter = dflash(name, with_logits=True)
    text, most = random_text(drafter.config, 6), drafter.config.block_drafts or 0
    whole = step(drafter, text, 9, most)
    for width in (1, 2):
        np.testing.assert_allclose(step(drafter, text, 9, width), whole[:width], atol=1e-5)
        np.testing.assert_allclose(step(drafter, text, 9, most, width)[:width], whole[:width], atol=1e-5)


def test_drafts_fit_the_block() -> None:
    drafter = dflash(PLAIN)
    fresh = stack_fresh([random_text(drafter.config, 19)], [5], [1], 5)
    assert drafter.block_drafts == 4
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"{count} drafts; expected 1 to 4"):
            drafter.propose(drafter.init_state(1, 16, 12), fresh, jnp.asarray([1]), count)


def test_a_narrowed_vocabulary_drafts_its_tokens_alone(tmp_path: Path) -> None:
    """As when it is loaded with fewer tokens: the target's head is cut, and the file cannot hold that."""
    drafter, kept = dflash(BIASED, with_logits=True), (5, 50, 17, 2)
    params, config = narrow(drafter.params, drafter.config, DraftVocab(kept, "a test"))
    text = random_text(drafter.config, 20)
    full = step(drafter, text, 9, K)
    narrowed = step(drafter.replace(params=params, config=config), text, 9, K)
    ids = sorted(kept)
    np.testing.assert_allclose(narrowed[:, ids], full[:, ids], atol=1e-5)
    assert (np.delete(narrowed, ids, axis=1) == MASKED).all()
    with pytest.raises(InputError, match="proposes 4 of 53 tokens; expected all"):
        save_drafter(tmp_path / "drafter", params, config)


# Files

Tensors = dict[str, np.ndarray]
Edit = Callable[[dict[str, Any], Tensors], None]


def ends_of(params: DrafterParams) -> dict[str, Any]:
    return {"target_embedding": params.embedding, "target_lm_head": params.lm_head}


def written(directory: Path, name: str, edit: Edit = lambda _config, _tensors: None) -> Path:
    """Write a drafter's directory, after editing its config and tensors in place."""
    config = DFLASH_CONFIGS[name]
    entries, tensors = render_config(config, "vllm", "float32"), to_tensors(random_params(config), config)
    edit(entries, tensors)
    (directory / "config.json").write_text(json.dumps(entries))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", DFLASH_CONFIGS)
def test_a_drafter_comes_back_bit_for_bit_beside_its_target(tmp_path: Path, name: str) -> None:
    config = DFLASH_CONFIGS[name]
    for dtype in (jnp.float32, jnp.bfloat16):
        params = jax.tree.map(
            lambda leaf, dtype=dtype: jnp.asarray(np.asarray(leaf).astype(dtype)), random_params(config)
        )
        save_drafter(tmp_path / "saved", params, config)
        loaded, loaded_config = load_drafter(tmp_path / "saved", **ends_of(params))
        assert loaded_config == config
        assert jax.tree.structure(loaded) == jax.tree.structure(params)
        for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_the_layout_of_the_file(tmp_path: Path) -> None:
    """As z-lab's: names and shapes, neither embedding nor head; a drafter by its config.json, whatever its type."""
    c = DFLASH_CONFIGS[BIASED]
    save_drafter(tmp_path, random_params(c), c)
    expected = {"fc.weight": (24, 48), "hidden_norm.weight": (24,), "norm.weight": (24,)}
    for layer in range(2):
        expected |= {f"layers.{layer}.{x}_layernorm.weight": (24,) for x in ("input", "post_attention")}
        for x, outputs in (("q", 60), ("k", 20), ("v", 20)):
            expected |= {f"layers.{layer}.self_attn.{x}_proj.weight": (outputs, 24)}
            expected |= {f"layers.{layer}.self_attn.{x}_proj.bias": (outputs,)}
        expected |= {f"layers.{layer}.self_attn.{x}_norm.weight": (10,) for x in ("q", "k")}
        expected |= {
            f"layers.{layer}.self_attn.o_proj.weight": (24, 60),
            f"layers.{layer}.self_attn.o_proj.bias": (24,),
        }
        expected |= {f"layers.{layer}.mlp.{x}_proj.weight": (34, 24) for x in ("gate", "up")}
        expected |= {f"layers.{layer}.mlp.down_proj.weight": (24, 34)}
    assert {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()} == expected
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 3]}
    assert config["block_size"] == 8
    assert is_drafter_config(config)
    assert shared_tensors(open_drafter(tmp_path)) == ["embed_tokens.weight", "lm_head.weight"]


def test_layout_of_z_lab_is_read(tmp_path: Path) -> None:
    """The target's type, null keys, `model.` before names, RoPE by layer type; vLLM's ids at the top win."""

    def as_published(config: dict[str, Any], tensors: Tensors) -> None:
        config |= {
            "model_type": "gpt_oss",
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "sliding_window": None,
        }
        config |= {"use_sliding_window": False, "tie_word_embeddings": False, "max_window_layers": 2, "mlp_bias": None}
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling")}
        config["dflash_config"]["block_size"] = config.pop("block_size")
        config["dflash_config"] |= {"use_swa": False, "swa_window_size": 1024}  # without effect
        config |= {"use_swa": None}
        config["dflash_config"] |= {"causal": False, "use_aux_hidden_state": True, "num_target_layers": None}
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    directory = written(tmp_path, BIASED, as_published)
    params = random_params(DFLASH_CONFIGS[BIASED])
    assert load_drafter(directory, **ends_of(params))[1] == DFLASH_CONFIGS[BIASED]

    def top(config: dict[str, Any], _tensors: Tensors) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = [2, 5]

    assert parse_config(open_drafter(written(tmp_path, BIASED, top))).aux_layer_ids == (1, 4)
    assert parse_config(open_drafter(tmp_path), (0, 5)).aux_layer_ids == (0, 5)


def test_layers_that_are_not_named_are_spread_over_the_target(tmp_path: Path) -> None:
    assert default_dflash_layers(5, 36) == (1, 9, 17, 25, 33)
    assert default_dflash_layers(1, 24) == (12,)

    def unnamed(config: dict[str, Any], _tensors: Tensors) -> None:
        del config["dflash_config"]["target_layer_ids"]

    config = parse_config(open_drafter(written(tmp_path, BIASED, unnamed)))
    assert (config.aux_layer_ids, config.num_aux_layers) == (None, 2)


def change(**changes: Any) -> Edit:
    """Change keys of config.json, those of dflash_config as dflash_config__KEY; None removes one."""

    def edit(config: dict[str, Any], _tensors: Tensors) -> None:
        for key, value in changes.items():
            *outer, name = key.split("__")
            place = config[outer[0]] if outer else config
            place.pop(name, None)
            place |= {} if value is None else {name: value}

    return edit


def drop(*names: str) -> Edit:
    def edit(_config: dict[str, Any], tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


def add(name: str, *shape: int) -> Edit:
    def edit(_config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = np.zeros(shape, np.float32)

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (change(block_size=None), "block_size is missing; expected one number"),
        (change(block_size=1), "block_size is 1; expected 2 or more"),
        (change(dflash_config__block_size=9), "block_size is 8 in config.json and 9 in dflash_config"),
        (change(dflash_config__mask_token_id=None), "mask_token_id is missing"),
        (change(dflash_config__mask_token_id=53), "mask token 53 lies outside 0..52"),
        (change(dflash_config__target_layer_ids=[1, 1]), "one of them twice"),
        (change(dflash_config__target_layer_ids=[-1, 2]), "expected 0 or more each"),
        (change(dflash_config__target_layer_ids="1,2"), "expected a list of layers"),
        (change(dflash_config__target_layer_ids=[0, 1, 2]), "reads 48 values; expected 3 hidden states of 24"),
        (change(dflash_config__causal=True), "causal is True, which is not supported; expected a block whose rows"),
        (change(dflash_config__use_aux_hidden_state=False), "use_aux_hidden_state is False, which is not supported"),
        (change(dflash_config__use_swa=True), "use_swa is True, which is not supported; expected full attention"),
        (change(use_swa=True), "use_swa is True, which is not supported; expected full attention"),
        (change(dflash_config__selector_rank=8), "dflash_config has selector_rank, which is not supported"),
        (change(architectures=["DFlash2DraftModel"]), "['DFlash2DraftModel']; expected DFlashDraftModel"),
        (change(layer_types=["full_attention", "sliding_attention"]), "sliding attention is not supported"),
        (change(use_sliding_window=True), "use_sliding_window is True, which is not supported"),
        (change(transformer_layer_config={}), "DFlash in the layout with transformer_layer_config is not supported"),
        (change(draft_vocab_size=40), "expected the target's vocabulary"),
        (change(num_target_layers="many"), "num_target_layers is 'many'; expected a whole number"),
        (drop("hidden_norm.weight"), "tensors are missing: hidden_norm.weight;"),
        (drop("layers.1.self_attn.k_norm.weight"), "tensors are missing: layers.1.self_attn.k_norm.weight;"),
        (drop("layers.0.self_attn.q_proj.bias"), "tensors are missing: layers.0.self_attn.q_proj.bias;"),
        (change(attention_bias=False), "self_attn.k_proj.bias"),
        (add("embed_tokens.weight", 53, 24), "embed_tokens.weight"),
        (add("mask_hidden", 1, 1, 48), "mask_hidden"),
        (add("layers.2.input_layernorm.weight", 24), "layers.2.input_layernorm.weight"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, edit: Edit, says: str) -> None:
    with pytest.raises(InputError) as caught:
        load_drafter(written(tmp_path, BIASED, edit), **ends_of(random_params(DFLASH_CONFIGS[BIASED])))
    line = str(caught.value)
    assert says in line, line
    assert "\n" not in line


def test_a_drafter_without_its_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing: this drafter shares its target's") as caught:
        load_drafter(written(tmp_path, BIASED))
    assert "store the tensor" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"windows": (9, 9)}, "has a window of 9 positions, which its config.json cannot hold"),
        ({"draft_vocab_size": 20}, "proposes 20 of 53 tokens; expected all"),
    ],
)
def test_drafter_that_the_layout_cannot_hold_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    config = dataclasses.replace(DFLASH_CONFIGS[BIASED], **changes)
    with pytest.raises(InputError, match=says):
        save_drafter(tmp_path / "drafter", random_params(DFLASH_CONFIGS[BIASED]), config)
    with pytest.raises(InputError, match="not in that of speculators"):
        render_config(DFLASH_CONFIGS[BIASED], "speculators", "float32")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": 1}, "block_size is 1; expected 2 or more"),
        ({"mask_token_id": None}, "a block_size and no mask token"),
        ({"target_hidden_size": 32}, "hidden_size is 24, its target's 32; expected them equal"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        dataclasses.replace(DFLASH_CONFIGS[BIASED], **changes)
