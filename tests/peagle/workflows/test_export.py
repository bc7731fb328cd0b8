"""`peagle export`: from any dialect to any, bit for bit, with a card."""

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

from drafter.config import DrafterConfig
from drafter.dialects import open_drafter, parse_config
from drafter.load import load_drafter, save_drafter
from drafter.vocabulary import FREQUENT_TOKENS
from peagle.cli import main
from peagle.loading.checkpoints import DEMO_DIRECTORY
from target.load import inspect_target, load_target
from tests.support.checkpoints import assert_same
from tests.support.drafters import random_params
from tests.support.pairs import DRAFTER, MAX_POSITIONS, TARGET, Directories, edit_json

pytestmark = pytest.mark.compile

GOLDEN = Path(__file__).parents[2] / "golden" / "drafter_speculators"


Export = Callable[..., str]


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Export:
    """Export a drafter by the command; return its standard error. code: what it ends with."""

    def call(source: Path | str, out: Path, *more: object, code: int = 0) -> str:
        assert main(["export", str(source), "--out", str(out), *map(str, more)]) == code
        return capsys.readouterr().err

    return call


@pytest.mark.parametrize("name", ["plain", "variant", "eagle3", "eagle3_variant"])
def test_there_and_back_is_the_same_drafter(export: Export, tmp_path: Path, name: str) -> None:
    """A checkpoint that the speculators package wrote, as vLLM's, and as theirs again."""
    export(GOLDEN / name, tmp_path / "vllm", "--dialect", "vllm")
    export(tmp_path / "vllm", tmp_path / "back", "--dialect", "speculators", "--verifier", "some/target")
    assert_same(*(load_file(folder / "model.safetensors") for folder in (GOLDEN / name, tmp_path / "back")))
    (params, config), (again, config_again) = load_drafter(GOLDEN / name), load_drafter(tmp_path / "vllm")
    assert config == config_again
    assert_same(params, again)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    their_config = json.loads((GOLDEN / name / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert written["speculators_config"].keys() == their_config["speculators_config"].keys()
    card = (tmp_path / "back" / "README.md").read_text()
    assert "some/target" in card
    assert ("EAGLE-3" if name.startswith("eagle3") else "P-EAGLE") in card


def test_the_demo_drafter_keeps_its_list_of_tokens_and_nothing_is_overwritten(export: Export, tmp_path: Path) -> None:
    export("demo", tmp_path / "out")
    for name in (FREQUENT_TOKENS, "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (DEMO_DIRECTORY / "drafter" / name).read_bytes()
    assert "exists; expected a new folder" in export("demo", tmp_path / "out", code=2)
    assert "needs --verifier" in export("demo", tmp_path / "other", "--dialect", "speculators", code=2)
    assert "missing" in export(tmp_path / "missing", tmp_path / "other", code=2)
    assert not (tmp_path / "other").exists()


def stored(directory: Path) -> DrafterConfig:
    return parse_config(open_drafter(directory))


def write(directory: Path, **changes: Any) -> Path:
    """Write a random drafter of the tests' target, of bfloat16."""
    config = dataclasses.replace(DRAFTER, **changes)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_params(config))
    save_drafter(directory, params, config)
    return directory


def test_positions_are_written_always(export: Export, directories: Directories, tmp_path: Path) -> None:
    """Those of the target if the drafter names none; without a target to ask there is no file."""
    most = inspect_target(DEMO_DIRECTORY / "target").config.max_positions
    for name in ("drafter", "drafter_eagle3", "drafter_dflash"):
        assert stored(DEMO_DIRECTORY / name).max_positions == most
    source = write(tmp_path / "drafter")
    for verifier in ((), ("--verifier", "some/target")):
        assert "names no max_position_embeddings" in export(source, tmp_path / "out", *verifier, code=2)
        assert not (tmp_path / "out").exists()
    for dialect in ("vllm", "speculators"):
        export(source, tmp_path / dialect, "--verifier", directories.target, "--dialect", dialect)
        assert stored(tmp_path / dialect).max_positions == MAX_POSITIONS
    edit_json(source / "config.json", max_position_embeddings=77)
    export(source, tmp_path / "own", "--verifier", directories.target)
    assert stored(tmp_path / "own").max_positions == 77


@pytest.mark.parametrize("draft_vocab_size", [DRAFTER.vocab_size, 45])
def test_shared_tensors_are_exported_from_the_target(
    export: Export, directories: Directories, tmp_path: Path, draft_vocab_size: int
) -> None:
    source = write(tmp_path / "drafter", hidden_size=TARGET.hidden_size, draft_vocab_size=draft_vocab_size)
    weights = load_file(source / "model.safetensors")
    del weights["embed_tokens.weight"], weights["lm_head.weight"]
    save_file(weights, source / "model.safetensors")
    messages = export(source, tmp_path / "out", code=2)
    assert "does not store embed_tokens.weight and lm_head.weight" in messages
    assert "give --verifier DIR" in messages
    export(source, tmp_path / "out", "--verifier", directories.target)
    params, _ = load_drafter(tmp_path / "out")
    target = load_target(directories.target).params
    assert params.embedding.dtype == jnp.bfloat16
    np.testing.assert_array_equal(params.embedding.astype(jnp.float32), target.embedding)
    chosen = np.arange(draft_vocab_size) if params.draft_to_target is None else np.asarray(params.draft_to_target)
    assert isinstance(target.lm_head, jax.Array)
    np.testing.assert_array_equal(jnp.asarray(params.lm_head).astype(jnp.float32), target.lm_head[:, chosen])


def test_a_target_in_a_folder_is_the_drafters(export: Export, directories: Directories, tmp_path: Path) -> None:
    messages = export("demo", tmp_path / "out", "--verifier", directories.target, code=2)
    assert "does not fit the target" in messages


def test_aux_layers_are_sorted_and_that_is_said(export: Export, tmp_path: Path) -> None:
    source = write(tmp_path / "drafter", aux_layer_ids=(2, 0, 1), max_positions=64)
    assert "aux layers   sorted" in export(source, tmp_path / "out")
    (before, _), (after, config) = load_drafter(source), load_drafter(tmp_path / "out")
    assert config.aux_layer_ids == (0, 1, 2)
    width = TARGET.hidden_size
    np.testing.assert_array_equal(after.fc[2 * width :], before.fc[:width])
    assert "sorted, with" not in export(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
@pytest.mark.parametrize(
    ("changes", "refused", "says"),
    [
        ({"num_mask_hiddens": 2}, ("vllm", "speculators"), "it has 2 mask hiddens, expected one"),
        ({"num_heads": 6}, ("vllm",), "its width is 40, expected a multiple of its 6 heads"),
        ({}, (), "its width is 40, expected the target's 64"),
    ],
)
def test_export_warns_of_what_others_cannot_load(
    export: Export, tmp_path: Path, dialect: str, changes: dict[str, Any], refused: tuple[str, ...], says: str
) -> None:
    """Refused if nobody could load it in that dialect, else told beside who does, and in the card."""
    source = write(tmp_path / "drafter", max_positions=64, **changes)
    more = ("--dialect", dialect, "--verifier", "some/target")
    messages = export(source, tmp_path / "out", *more, code=2 if dialect in refused else 0)
    if dialect in refused:
        loaders = "vLLM or the speculators package" if dialect == "speculators" else "vLLM"
        assert f"cannot be loaded by {loaders}: {says}" in messages
        assert ("take --dialect speculators" in messages) == ("speculators" not in refused)
        assert not (tmp_path / "out").exists()
        return
    text = (tmp_path / "out" / "README.md").read_text()
    assert "vLLM: `vllm serve" in text
    assert (f"speculators package, which cannot load them: {says}" in text) == (dialect == "speculators")
    assert (f"refused      by the speculators package: {says}" in messages) == (dialect == "speculators")


def test_a_dflash_drafter_is_written_in_its_own_layout(
    export: Export, directories: Directories, tmp_path: Path
) -> None:
    """Without embedding and head, which it reads from the target; the card says how vLLM runs it."""
    source = write(tmp_path / "drafter", hidden_size=TARGET.hidden_size, block_size=6, qk_norm=True)
    target = ("--verifier", directories.target)
    for more, says in (
        ((), "does not store embed_tokens.weight and lm_head.weight"),
        ((*target, "--dialect", "speculators"), "written in its own layout, not in that of speculators"),
    ):
        assert says in export(source, tmp_path / "out", *more, code=2)
    export(source, tmp_path / "out", *target)
    assert_same(*(load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out")))
    assert stored(tmp_path / "out") == dataclasses.replace(stored(source), max_positions=MAX_POSITIONS)
    card = (tmp_path / "out" / "README.md").read_text()
    for part in ("# DFlash drafter", '"method": "dflash"', '"num_speculative_tokens": 5', "up to 5 of them"):
        assert part in card
