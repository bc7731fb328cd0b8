"""The options of `peagle train`, and the record of them from which a training goes on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from drafter.train.folder import COMMAND
from drafter.train.recipe import DrafterShape, Recipe
from drafter.trained import RECIPE
from peagle.cli.command import read_record, record
from peagle.cli.train import Train
from peagle.config import LoadConfig
from peagle.workflows.training import PARTS
from tests.support.commands import all_refused, refused, run

GIVEN = Train(
    data=("a:2", "b"),
    out="run",
    load=LoadConfig(target="t"),
    steps=9,
    minutes=1.5,
    shape=DrafterShape(
        init="d",
        aux_layer_ids=(1, 2),
        kind="eagle-3",
        layers=2,
        hidden_size=8,
        mlp_width=16,
        drafter_window="64",
        mask_hiddens=2,
        draft_vocab="40",
    ),
    recipe=Recipe(
        rows=4,
        width=64,
        depth=3,
        ratio=0.5,
        blocks=9,
        parts=2,
        loss="kl",
        optimizer="muon",
        learning_rate=0.1,
        weight_decay=0.3,
        compute_dtype="bfloat16",
        seed=7,
    ),
    save_every=3,
    evaluate="e.jsonl",
    held_out=0.25,
    resume=True,
    quiet=True,
)
FILLED = Recipe(depth=3, optimizer="adamw", learning_rate=0.1, room=((5, 4),))


def test_a_record_is_read_as_it_was_written() -> None:
    usual = record(Train(out=""))
    assert not [name for name, value in record(GIVEN).items() if value == usual[name]], "every option is another"
    assert read_record(Train, json.loads(json.dumps(record(GIVEN)))) == GIVEN


BAD_RECORDS = [  # (the options, or those that differ, what is said)
    ({"dept": 4}, "dept is not an option of this version (did you mean depth?); expected"),
    ({"shape": {}}, "shape is not an option of this version"),
    ({"depth": 0}, "depth is 0; expected 1 or more"),
    ({"depth": "three"}, "depth is 'three'; expected a valid integer"),
    ({"rows": True}, "rows is True; expected a valid integer"),
    ({"aux_layer_ids": ["a"]}, "aux_layer_ids is ['a']; expected a list of whole numbers"),
    ({"loss": "hinge"}, "loss is 'hinge'; expected one of"),
    ([], "command is []; expected an object"),
    (None, "command is None; expected an object"),
]


@pytest.mark.parametrize(("changed", "says"), BAD_RECORDS)
def test_a_record_that_is_not_understood_is_refused(
    changed: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = {**record(GIVEN), **changed} if changed else changed
    whole = {**dict.fromkeys(PARTS), "steps": 9, "data": {"held_out": 0.1}, "recipe": dataclasses.asdict(FILLED)}
    (tmp_path / RECIPE).write_text(json.dumps({**whole, COMMAND: command}))
    refused(run(capsys, "train", "--out", str(tmp_path), "--resume"), says, "repeat the command without --resume")


def test_what_stands_beside_resume_is_named_by_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = (("--ratio", "0.1"), ("--dtype", "bfloat16"), ("--layers", "3"))
    table = [(words, f"leave out {words[0]}, or start a new run") for words in typed]
    all_refused(capsys, ("train", "--out", str(tmp_path), "--resume"), table)


REFUSED = [
    (("--layers", "0"), "--layers is 0; expected 1 or more"),
    (("--mask-hiddens", "0"), "--mask-hiddens is 0; expected 1 or more"),
    (("--steps", "1.5"), "--steps is 1.5; expected a valid integer"),
    (("--width", "0"), "--width is 0; expected 3 or more"),
    (("--depth", "0"), "--depth is 0; expected 1 or more"),
    (("--ratio", "2"), "--ratio is 2.0; expected a number above 0 and at most 1"),
    (("--learning-rate", "nan"), "--learning-rate is nan; expected a number above 0"),
    (("--held-out", "nan"), "--held-out is nan; expected a fraction from 0 to 0.5"),
    (("--minutes", "0"), "--minutes is 0; expected a number above 0"),
    (("--weight-decay", "-1"), "--weight-decay is -1.0; expected 0 or more"),
    (("--parts", "513"), "--parts is 513; expected 1 to 512, the tokens of a row"),
    (("--seed", "-1"), "--seed is -1; expected 0 or more"),
    (("--aux-layer-ids", "a,b"), "--aux-layer-ids is 'a,b'; expected layers with commas between them"),
]


def test_what_an_option_does_not_take_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("train", "--data", str(tmp_path), "--out", str(tmp_path / "run"), "--steps", "1")
    all_refused(capsys, command, REFUSED)
    assert not (tmp_path / "run").exists()
