"""`peagle export`: from any dialect to any, bit for bit, with a card."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from drafter.load import load_drafter
from drafter.train.folder import LOG, RECIPE
from drafter.vocabulary import FREQUENT_TOKENS
from peagle.cli import main
from peagle.cli.export import card
from peagle.pair import DEMO_DIRECTORY
from tests.peagle.conftest import DRAFTER

GOLDEN = Path(__file__).parents[1] / "golden" / "drafter_speculators"


def export(source: Path | str, out: Path, *more: str) -> int:
    return main(["export", str(source), "--out", str(out), "--quiet", *more])


@pytest.mark.parametrize("name", ["plain", "variant", "eagle3", "eagle3_variant"])
def test_there_and_back_is_the_same_drafter(tmp_path: Path, name: str) -> None:
    """A checkpoint that the speculators package wrote, as vLLM's, and as theirs again."""
    assert export(GOLDEN / name, tmp_path / "vllm", "--dialect", "vllm") == 0
    assert export(tmp_path / "vllm", tmp_path / "back", "--dialect", "speculators", "--verifier", "some/target") == 0
    theirs, back = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, tmp_path / "back"))
    assert theirs.keys() == back.keys()
    assert all(theirs[key].dtype == back[key].dtype and (theirs[key] == back[key]).all() for key in theirs)
    (params, config), (again, config_again) = load_drafter(GOLDEN / name), load_drafter(tmp_path / "vllm")
    assert config == config_again
    assert jax.tree.structure(params) == jax.tree.structure(again)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True))
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    their_config = json.loads((GOLDEN / name / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert written["speculators_config"].keys() == their_config["speculators_config"].keys()
    card = (tmp_path / "back" / "README.md").read_text()
    assert "some/target" in card
    assert ("EAGLE-3" if name.startswith("eagle3") else "P-EAGLE") in card


def test_the_demo_drafter_keeps_its_list_of_tokens_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export("demo", tmp_path / "out") == 0
    for name in (FREQUENT_TOKENS, "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (DEMO_DIRECTORY / "drafter" / name).read_bytes()
    assert export("demo", tmp_path / "out") == 2
    assert "exists; expected a new folder" in capsys.readouterr().err
    assert export("demo", tmp_path / "other", "--dialect", "speculators") == 2
    assert "needs --verifier" in capsys.readouterr().err
    assert export(tmp_path / "missing", tmp_path / "other") == 2
    assert not (tmp_path / "other").exists()


def test_a_card_tells_what_a_training_reached_with_a_dash_for_what_nobody_knows(tmp_path: Path) -> None:
    recipe = {"steps": 9, "width": 32, "optimizer": "adamw", "loss": "half", "cod": {"depth": 3, "ratio": 0.8}}
    record = {"recipe": recipe, "rows_per_step": 2, "data": {"documents": 5, "tokens": 99}}
    (tmp_path / RECIPE).write_text(json.dumps(record))
    found = {"num_outputs": 3, "num_outputs_without_loops": 3, "num_speculative_tokens": 7}
    evaluation = found | {"acceptance_length": None, "acceptance_length_without_loops": None}
    lines = [{"step": 9, "loss": 1.0}, {"step": 9, "evaluation": evaluation}]
    (tmp_path / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = card(DRAFTER, "vllm", None, tmp_path)
    assert "\n9 steps of 2 rows" in text
    assert "Acceptance length on 3 held-out prompts, greedy, K = 7: -.\n" in text
    (tmp_path / LOG).write_text(json.dumps({"step": 4, "loss": 1.0}))
    assert "\n4 of 9 steps of 2 rows" in card(DRAFTER, "vllm", None, tmp_path)
