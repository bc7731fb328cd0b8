"""`peagle train` from data to a drafter that runs, and what it says to what cannot work."""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import peagle.loading.load
from drafter.config import DrafterConfig
from drafter.load import load_drafter, save_drafter
from drafter.params import DrafterParams
from drafter.propose import Eagle3
from drafter.train.folder import LOG, best_held_out, read_log
from drafter.train.row_batches import RowBatches
from drafter.train.shards import Document, open_folder, read_shards, write_shard
from drafter.train.trainer import Trainer
from drafter.trained import RECIPE
from drafter.vocabulary import FREQUENT_TOKENS
from peagle.answers.result import decode
from peagle.base.errors import InputWarning
from peagle.engine.request import Request
from peagle.pair import Pair
from peagle.workflows.new_drafter import init_params_of
from target.load import load_target
from tests.peagle.workflows.training.conftest import PROMPTS, SMALL, Lab, train, write_prompts
from tests.support.drafters import random_params
from tests.support.pairs import DRAFTER, MAX_POSITIONS, STOP, TARGET, VOCAB_SIZE, Directories, press_ctrl_c_at

pytestmark = pytest.mark.compile

FROM_DRAFTER = f"--layers {DRAFTER.num_layers} --mlp-width {DRAFTER.mlp_width}"  # of the tests' own drafter


def drafter_of(out: Path) -> tuple[DrafterParams, DrafterConfig]:
    return load_drafter(out / "drafter", np.dtype(np.float32))


def same_weights(*outs: Path) -> bool:
    one, other = (load_file(out / "drafter" / "model.safetensors") for out in outs)
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def recipe_of(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / RECIPE).read_text())
    return record


def card_of(out: Path) -> str:
    return (out / "drafter" / "README.md").read_text()


def steps_of(out: Path, kind: str = "loss") -> list[int]:
    """Return the steps with a line of this kind in the log."""
    return [line["step"] for line in read_log(out / LOG) if kind in line]


def write_data(folder: Path, rows: np.ndarray, trained: Sequence[bool]) -> Path:
    """Write documents of equal length with these tokens, and the same ones of each trained."""
    open_folder(folder, {})
    write_shard(folder, 0, [Document(row.astype(np.int32), np.array(trained, bool)) for row in rows])
    return folder


def trained_tokens(data: Path) -> set[int]:
    return {token for document in read_shards(data) for token in document.token_ids[document.trained].tolist()}


def expect_plain_decodings_tokens(pair: Pair, data: Path) -> None:
    """Expect a pair to emit what the data hold, which the target wrote by itself."""
    drafted = pair.generate(PROMPTS[0], num_speculative_tokens=3, max_new_tokens=20)
    assert [*PROMPTS[0], *drafted.output_ids] == read_shards(data)[0].token_ids.tolist()


def expect_all(messages: str, *lines: str) -> None:
    for line in lines:
        assert line in messages


@pytest.fixture(scope="module")
def other_target(directories: Directories, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that differs by a bit."""
    other = tmp_path_factory.mktemp("other") / "target"
    shutil.copytree(directories.target, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    return other


# Drafters


def test_from_data_to_a_drafter_that_runs(
    lab: Lab, curves: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.cli.training.draw", curves)
    monkeypatch.setattr("peagle.workflows.training.LEAST_BETWEEN_EVALUATIONS", 2)
    evaluation = f"--evaluate {lab.prompts}"
    expect_all(
        lab.train(evaluation),
        "5 of the 5 --evaluate prompts are in the data, too",
        "left out     of --evaluate 1 row without a usable prompt",
    )
    assert steps_of(lab.out)[-1] == 4
    evaluations = [line["evaluation"] for line in read_log(lab.out / LOG) if "evaluation" in line]
    assert [figures["num_left_out"] for figures in evaluations] == [1, 1]
    assert all(1 <= figures["acceptance_length"] <= 4 for figures in evaluations)
    curve = (lab.out / "curve.svg").read_bytes()
    assert b"Loss" in curve
    assert (lab.out / "drafter" / "curve.svg").read_bytes() == curve
    assert "](curve.svg)" in card_of(lab.out)
    pair = peagle.loading.load.load(lab.target, lab.out / "drafter")
    assert pair.loaded.drafter_window == "off, by default: no file names one"
    expect_plain_decodings_tokens(pair, lab.data)
    lab.train(evaluation)  # it has all of its steps


@pytest.mark.parametrize(
    "kind",
    ["", *(pytest.param(f"--drafter {kind}", marks=pytest.mark.slow) for kind in ("eagle-3", "dflash --blocks 64"))],
    ids=["P-EAGLE", "EAGLE-3", "DFlash"],
)
def test_what_was_learnt_by_heart_is_drafted_right(lab: Lab, kind: str) -> None:
    """Trained on one answer alone, a drafter has every draft of it accepted, but for those of the final step."""
    k, num_tokens, data = 3, 29, lab.root / "data"
    prompt = write_prompts(lab.root / "prompt.jsonl", PROMPTS[0])
    lab.run(0, f"data --target {lab.target} --prompt-file {prompt} --out {data} -n {num_tokens}")
    rows = f"--width {len(PROMPTS[0]) + num_tokens} --depth {k} --ratio 1 --rows 1 --aux-layer-ids 0,1,2 --layers 1"
    rates = "--steps 120 --optimizer muon --learning-rate 0.02"
    lab.run(0, f"train --target {lab.target} --data {data} --out {lab.out}", rows, rates, kind)
    pair = peagle.loading.load.load(lab.target, lab.out / "drafter")
    engine = pair.engine(pair.engine_config(k, context=128))
    (result,) = decode(engine, [Request(tuple(PROMPTS[0]), num_tokens)], None)
    accepted = [step.num_accepted for step in result.steps]
    assert len(accepted) > 3
    assert accepted[:-1] == [k] * (len(accepted) - 1)


def test_the_baseline_proposes_in_turn_and_changes_no_token(lab: Lab) -> None:
    """An EAGLE-3 drafter, by the same command."""
    lab.train("--drafter eagle-3 --learning-rate 1e-2")
    params, config = drafter_of(lab.out)
    assert params.mask_hidden is None
    assert not config.parallel
    pair = peagle.loading.load.load(lab.target, lab.out / "drafter")
    assert isinstance(pair.drafter, Eagle3)
    expect_plain_decodings_tokens(pair, lab.data)


def test_a_smaller_draft_vocabulary_and_a_window(lab: Lab) -> None:
    """What nobody else loads is written and read here, with no promise in the card; positions are the target's."""
    lab.train("--draft-vocab 40 --hidden-size 24 --mask-hiddens 2 --drafter-window 5 --loss kl")
    params, config = drafter_of(lab.out)
    assert (config.draft_vocab_size, config.hidden_size, config.num_mask_hiddens) == (40, 24, 2)
    assert (config.max_positions, config.windows) == (MAX_POSITIONS, (5,))
    assert config.mask_token_id == VOCAB_SIZE - 1, "the highest id that the data never uses"
    assert "vLLM cannot load it: it has 2 mask hiddens, expected one." in card_of(lab.out)
    assert "vllm serve" not in card_of(lab.out)
    assert 0 < recipe_of(lab.out)["coverage"]["frac"] <= 1
    assert params.draft_to_target is not None
    kept, used = set(params.draft_to_target.tolist()), trained_tokens(lab.data)
    assert STOP in kept
    assert len(used & kept) >= min(len(used), 39)


def test_a_dflash_drafter_is_trained_written_and_trained_again(lab: Lab) -> None:
    """In z-lab's layout, its window in speculation.json; embedding and head are the target's all the while."""
    learning, drafter, again = "--learning-rate 1e-3 --blocks 6 --parts 2", lab.out / "drafter", lab.root / "again"
    lab.train(learning, "--drafter dflash --drafter-window 8")
    recipe, config = recipe_of(lab.out), json.loads((drafter / "config.json").read_text())
    assert (recipe["recipe"]["blocks"], recipe["recipe"]["draft_decay"]) == (6, 4.0)
    assert recipe["drafter"]["num_target_layers"] == 3
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == recipe["recipe"]["depth"] + 1
    assert json.loads((drafter / "speculation.json").read_text()) == {"drafter_window": 8}
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(drafter / "model.safetensors").keys()
    assert "# DFlash drafter" in card_of(lab.out)
    pair = peagle.loading.load.load(lab.target, drafter)
    assert pair.loaded.drafter_window == "8 positions, by speculation.json"
    expect_plain_decodings_tokens(pair, lab.data)
    lab.train(learning, f"--init {drafter}", out=again)  # by the same program
    assert recipe_of(again)["drafter"] == {**recipe["drafter"], "max_positions": MAX_POSITIONS}
    for more, says in (
        ("--depth 5", "--depth is 5, and a block of the drafter has 3 drafts; expected the same"),
        ("--drafter p-eagle", "is a DFlash drafter; leave out --drafter"),
    ):
        assert says in lab.train(f"--init {drafter}", more, code=2, out=lab.root / "other")


def test_a_drafter_to_begin_with_may_share_the_targets_embedding_and_head(lab: Lab) -> None:
    """Copies: training overwrites what it begins with, and the target is still needed."""
    config, directory = dataclasses.replace(DRAFTER, hidden_size=TARGET.hidden_size), lab.root / "drafter"
    save_drafter(directory, random_params(config), config)
    weights = load_file(directory / "model.safetensors")
    del weights["embed_tokens.weight"], weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors")
    target = load_target(lab.target)
    params = init_params_of(str(directory), target)
    for one, other in ((params.embedding, target.params.embedding), (params.lm_head, target.params.lm_head)):
        assert isinstance(one, jax.Array)
        np.testing.assert_array_equal(one, other)
        one.delete()
        assert np.isfinite(other).all()


# What cannot be

REFUSED = [
    ("--width 8", "longer than the 8 tokens of a row, the longest"),
    ("--rows 0", "--rows is 0; expected 1 or more"),
    ("--rows 4 --data {data}:3 --data {data}:4", "--rows is 4; expected a multiple of 8"),
    ("--aux-layer-ids 0,1,9", "--aux-layer-ids names the output of layer 9; expected 0..2"),
    ("--aux-layer-ids 0,1,1", "--aux-layer-ids is 0,1,1; expected each layer once"),
    ("--drafter eagle-3 --mask-hiddens 2", "--mask-hiddens is 2; expected 1 to 1"),
    ("--drafter medusa", "--drafter is 'medusa'; expected"),
    ("--drafter dflash --hidden-size 8", "--hidden-size is 8; expected the target's 64"),
    ("--drafter dflash --draft-vocab 9", "a DFlash drafter has its target's head"),
    ("--drafter dflash --mask-hiddens 2", "--mask-hiddens is 2; expected 1 to 1"),
    ("--drafter dflash --depth 1", "--depth is 1; expected 2 or more"),
    ("--blocks 4", "--blocks is given, and a P-EAGLE drafter has none"),
    ("--parts 99", "--parts is 99; expected 1 to 32"),
    ("--drafter-window 3", "--drafter-window is 3; expected 4 or more, for the drafts of --depth 3"),
    ("--drafter-window wide", "--drafter-window is 'wide'; expected"),
    (f"--drafter-window {9**9}", f"the target has {MAX_POSITIONS} positions, so it would hide nothing"),
    ("--drafter-window 8 --parts 3", "--parts is 3, and does not divide the 32 tokens of --width"),
    ("--width 512", "a row has 512 tokens (--width), and all of the data"),
    ("--mask-hiddens 3", "--mask-hiddens is 3; expected 1 to 2"),
    ("--data missing", "cannot be read"),
    ("--init {drafter} --drafter eagle-3", "is a P-EAGLE drafter; leave out --drafter"),
    ("--init {drafter} --layers 3", "--layers asks for 3, but --init {drafter} has 2"),
    (f"--init {{drafter}} {FROM_DRAFTER} --aux-layer-ids 0,1,3", "names the output of layer 3; expected 0..2"),
]


@pytest.mark.parametrize(("more", "says"), REFUSED)
def test_what_cannot_be_trained_is_one_line_and_nothing_is_written(lab: Lab, more: str, says: str) -> None:
    places = {"data": lab.data, "drafter": lab.drafter}
    assert says.format(**places) in lab.train(more.format(**places), code=2)
    assert not lab.out.exists()


def test_data_that_teach_nothing_are_refused(lab: Lab, taught: Path) -> None:
    corrupt, masked = lab.root / "corrupt", lab.root / "masked"
    shutil.copytree(lab.data, corrupt)
    (corrupt / "shard_00001.safetensors").write_bytes(b"cut")
    write_data(masked, np.arange(5)[None], [False] * 5)
    for data, more, says in (
        (masked, "", "has no token to train on: all of it"),
        (corrupt, "", "shard_00001.safetensors is not a whole shard"),
        (taught, "--aux-layer-ids 0,2,1", "holds the outputs of layers [0, 1, 2], the drafter reads [0, 2, 1]"),
        (taught, "--aux-layer-ids 0,2,1", "give --aux-layer-ids 0,1,2 for a new one"),
    ):
        assert says in lab.train(more, code=2, data=data)
    assert not lab.out.exists()


def test_a_list_of_tokens_that_no_answer_holds_is_refused(lab: Lab) -> None:
    used, listed = sorted(trained_tokens(lab.data)), lab.root / "listed.json"
    absent = sorted(set(range(VOCAB_SIZE)) - set(used))
    listed.write_text(json.dumps(absent[:9]))
    none = "none of the 9 tokens of the draft vocabulary is in an answer of the data"
    assert none in lab.train("--draft-vocab", listed, code=2)


EVERYTHING = [token for token in range(VOCAB_SIZE) for _ in range(1 + (token != 7))]  # 7 is the rarest


@pytest.mark.parametrize(
    ("ids", "init", "mask_token", "says"),
    [
        ([5, DRAFTER.mask_token_id, 9, 9], True, DRAFTER.mask_token_id, "1 of the data's 64"),
        (EVERYTHING, False, 7, "it is the rarest token, and none is free"),
    ],
    ids=["--init", "no token is free"],
)
def test_a_mask_token_in_the_data_that_nobody_chose_is_a_warning(
    lab: Lab, no_step: str, ids: list[int], init: bool, mask_token: int, says: str
) -> None:
    width = 64
    rows = np.array([*ids, *[9] * (-len(ids) % width)]).reshape(-1, width)
    data = write_data(lab.root / "mine", rows, [place > 1 for place in range(width)])
    more = f"--init {lab.drafter} {FROM_DRAFTER}" if init else ""
    messages = lab.train(f"--width {width} --rows 1", more, code=2, data=data)
    expect_all(messages, no_step, f"the mask token {mask_token} is in use: ", says)


def test_data_and_drafters_of_another_target_are_told(
    lab: Lab, taught: Path, trained: Path, other_target: Path, no_step: str
) -> None:
    """Text of it is a warning before the first step, hidden states of it are refused."""
    begun, drafter = lab.root / "begun", trained / "drafter"
    shutil.copytree(trained, begun)
    for data, out, says in (
        (taught, lab.out, "holds what another target computed"),
        (lab.data, begun, "was begun with --target"),
    ):
        assert says in lab.train(code=2, target=other_target, data=data, out=out)
        assert not lab.out.exists()
    for number, target in enumerate((lab.target, other_target)):
        messages = lab.train("" if number else "--quiet", code=2, target=target, out=lab.root / f"out_{number}")
        assert (messages.count("holds what another target wrote"), no_step in messages) == (number, True)
    line = f"{drafter} was trained for another target than {other_target}, by recipe.json beside it"
    for command in (f"info {other_target}", f"speculate a -n 4 -k 2 --raw-prompt --target {other_target} --drafter"):
        assert lab.output(command, drafter).count(line) == 1
    assert "another target" not in lab.output("info", lab.target, drafter)


# Stopping and continuing


@contextlib.contextmanager
def ctrl_c(monkeypatch: pytest.MonkeyPatch, batch: int) -> Iterator[None]:
    """Press Ctrl-C when so many batches are made."""
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, RowBatches, "at", batch)
        yield


def test_ctrl_c_before_the_first_step_is_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, Trainer, "run")
        messages = lab.train(code=130)
    assert "interrupted before the first step was kept; the same command begins again" in messages
    assert messages.count("interrupted") == 1


def test_a_training_goes_on_after_ctrl_c_to_the_same_bits_and_takes_more_steps(
    lab: Lab, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same command, or by --resume, which needs nothing else."""
    for out, again in ((lab.out, lab.resume), (lab.root / "other", lab.train)):
        with ctrl_c(monkeypatch, 2):
            messages = lab.train(code=130, out=out)
        expect_all(
            messages,
            f"interrupted: 2 of 4 steps are kept in {out}; the same command goes on",
            f"to try what they learned: peagle speculate --target {lab.target} --drafter {out / 'drafter'}",
        )
        learned = load_file(out / "drafter" / "model.safetensors")
        if again == lab.resume:  # a killed process leaves checkpoints only
            shutil.rmtree(out / "drafter")
            assert "no step is trained with --minutes 0; " in lab.resume("--minutes 0", out=out)
            assert steps_of(out) == [2]
            written = load_file(out / "drafter" / "model.safetensors")
            assert all(np.array_equal(written[name], learned[name]) for name in learned)
        again(out=out)
        assert steps_of(out) == [2, 4]
        assert same_weights(out, trained)
    lab.resume("--steps 6")
    record = recipe_of(lab.out)
    assert (record["steps"], record["continued"]) == (6, [{"at": 4, "steps_before": 4}])
    assert steps_of(lab.out) == [2, 4, 6]
    assert "6 steps of 2 rows" in card_of(lab.out)


def test_a_recipe_without_a_part_is_refused_without_resume_too(lab: Lab, trained: Path) -> None:
    out = Path(shutil.copytree(trained, lab.out))
    record = recipe_of(out)
    assert {"command", "steps", "data"} < record.keys()
    for part in record.keys() - {"provenance"}:
        (out / RECIPE).write_text(json.dumps({key: value for key, value in record.items() if key != part}))
        says = "cannot be read" if part == "recipe" else f"has no {part}"
        assert f"recipe.json {says}; expected what peagle train writes" in lab.train(code=2)


DAMAGED = [  # (a part, its value, or the values of its keys, what is said)
    ("steps", "many", "steps is 'many'; expected a whole number of 1 or more"),
    ("steps", None, "steps is null; expected a number"),
    ("steps", math.inf, "steps is inf; expected a whole number of 1 or more"),
    ("steps", -4, "steps is -4; expected a whole number of 1 or more"),
    ("data", None, "data.held_out is None; expected a valid number"),
    ("data", [], "data is []; expected an object"),
    ("data", {"held_out": 7}, "data.held_out is 7; expected a fraction from 0 to 0.5"),
    ("recipe", {"room": None}, "recipe.room is None; expected a list"),
    ("recipe", {"room": [[1.5]]}, "recipe.room is [(1.5,)]; expected a list"),
    ("recipe", {"room": [[3]]}, "recipe.room is [[3]]; expected numbers for 2 depths of 1 part"),
    ("recipe", {"parts": 0}, "parts is 0; expected 1 to 32, the tokens of a row"),
    ("recipe", {"rows": "two"}, "recipe.rows is 'two'; expected a valid integer"),
    ("recipe", {"optimizer": None}, "recipe.optimizer is None; expected one of 'adamw', 'muon'"),
    ("recipe", {"optimizer": "muon", "other_rate": None}, "recipe.other_rate is None; expected a valid number"),
    ("continued", 3, "continued is 3; expected a list"),
]


def test_a_damaged_record_is_refused_in_one_line(lab: Lab, trained: Path) -> None:
    """With the value and a remedy, with --resume and without."""
    out = Path(shutil.copytree(trained, lab.out))
    record = recipe_of(out)
    for part, value, says in DAMAGED:
        changed = {**record[part], **value} if isinstance(value, dict) else value
        (out / RECIPE).write_text(json.dumps({**record, part: changed}))
        for messages in (lab.train(code=2), lab.resume(code=2)):
            assert f"recipe.json: {says}: take another --out" in messages


@pytest.mark.usefixtures("no_step")
def test_a_command_without_resume_mends_the_recorded_one(lab: Lab, trained: Path) -> None:
    out = Path(shutil.copytree(trained, lab.out))
    record = recipe_of(out)
    (out / RECIPE).write_text(json.dumps({**record, "command": []}))
    assert "repeat the command without --resume instead" in lab.resume(code=2)
    lab.train("--steps 4")
    assert recipe_of(out)["command"]["target"] == record["command"]["target"]


def test_what_does_not_go_on_is_refused(lab: Lab, trained: Path) -> None:
    """Another recipe, fewer steps, a folder of something else, no step yet to write a drafter from."""
    shutil.copytree(trained, lab.out)
    mine, none = lab.root / "mine", lab.root / "none"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    changed = "--width 32 (now 48), --seed 0 (now 7), --drafter-window None (now [9])"
    fewer = "was begun with 4 steps, now it is 3; expected as many or more"
    assert f"was begun with {changed}; exp" in lab.train("--seed 7 --width 48 --drafter-window 9", code=2)
    assert fewer in lab.train("--steps 3", code=2)
    assert "holds files, but no recipe.json" in lab.train(code=2, out=mine)
    expect_all(lab.resume("--seed 5", code=2), "--resume takes its options from the recipe in", "leave out --seed")
    assert "holds no training" in lab.resume(code=2, out=none)
    shutil.rmtree(lab.out / "checkpoints")
    assert "has no checkpoint yet to write a drafter from" in lab.resume("--minutes 0", code=2)


def test_a_training_goes_on_from_any_folder_with_files_that_have_moved(
    lab: Lab, taught: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are recorded with whole paths; a file that has moved is named, one of other content is refused."""
    here, elsewhere = lab.root / "here", lab.root / "elsewhere"
    for name, folder in (("runs/data", lab.data), ("target", lab.target), ("runs/drafter", lab.drafter)):
        shutil.copytree(folder, here / name)
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    names = "train --target target --data runs/data:1 --init runs/drafter --out run"
    with ctrl_c(monkeypatch, 2):
        lab.run(130, names, SMALL, FROM_DRAFTER)
    monkeypatch.chdir(elsewhere)
    (here / "runs" / "data").rename(elsewhere / "data")
    run = here / "run"
    gone = f"{here / 'runs' / 'data'} is not there any more; expected --data with its place now"
    assert gone in lab.resume(code=2, out=run)
    assert "was begun with --data" in lab.resume(f"--data {taught}", code=2, out=run)
    lab.resume("--data data", out=run)
    lab.resume("--steps 5", out=run)  # the place is known now
    assert steps_of(run)[-1] == 5
    assert recipe_of(run)["command"]["target"] == str(here / "target")
    shutil.copytree(lab.drafter, elsewhere / "another")
    save_drafter(elsewhere / "another", random_params(DRAFTER, seed=9), DRAFTER)
    assert "was begun with --init of other content" in lab.resume("--data data --init another", code=2, out=run)


def test_documents_are_held_out_and_the_best_step_is_the_drafter(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.workflows.training.LEAST_BETWEEN", 1)
    more = "--held-out 0.4 --steps 6 --learning-rate 0.5"
    messages = lab.train(more)
    assert steps_of(lab.out, "held_out") == [1, 2, 3, 4, 5, 6]
    log = list(read_log(lab.out / LOG))
    best = (best_held_out(log) or {})["step"]
    assert best < 6, log  # at so high a rate
    assert f"drafter      {lab.out / 'drafter'} | step {best} of 6, the best on held-out documents" in messages
    assert [line["epochs"] for line in log if "loss" in line][-1] == [4.0]  # 6 steps of 2 rows, of 3
    record = recipe_of(lab.out)
    assert (record["data"]["documents"], record["data"]["held_out"]) == (5, 0.4)
    assert "was begun with --held-out 0.4 (now 0.0)" in lab.train(more, "--held-out 0", code=2)


@pytest.fixture
def step_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Say how long a step takes."""
    return lambda seconds: monkeypatch.setattr("peagle.cli.training.seconds_per_step", lambda *_: seconds)


def minutes(lab: Lab, minutes: float, *more: object, code: int = 0) -> str:
    """Run a small training for so many minutes, without --steps."""
    command = train(lab.target, lab.data, lab.out, *more)
    place = command.index("--steps")
    return lab.run(code, *command[:place], *command[place + 2 :], f"--minutes {minutes:g}")


def test_minutes_plan_the_steps_of_a_new_training_and_are_a_deadline(
    lab: Lab, trained: Path, monkeypatch: pytest.MonkeyPatch, step_s: Callable[[float], None]
) -> None:
    """A step is said to take a minute; the time is said to be over after the first, which does not count."""
    step_s(60.0)
    too_few = "--minutes is 0.5, and a step takes 60 s; expected time for a step"
    assert too_few in minutes(lab, 0.5, code=2)
    assert not lab.out.exists()
    with monkeypatch.context() as patch:
        budget_s = property(lambda clock: 180.0 if clock._end is None else 0.0)
        patch.setattr("drafter.train.clock.Clock.budget_s", budget_s)
        messages = minutes(lab, 3)
    expect_all(
        messages,
        "measuring a step: how many fit into 3 minutes",
        "a step takes 60 s: 2 steps are planned for 90% of the time",
        f"--minutes 3 are over: 1 of 2 steps are kept in {lab.out}",
    )
    assert "1 of 2 steps of 2 rows" in card_of(lab.out)
    assert "training steps 2 to 2" in minutes(lab, 3)
    assert "is complete (2 steps); give a larger --steps to continue" in minutes(lab, 3)
    step_s(30.0)
    continues = lab.root / "continues"
    shutil.copytree(trained, continues)
    lab.resume("--minutes 2", out=continues)  # .9 of it: three steps
    assert recipe_of(continues)["steps"] == 4 + 3


# The folder of a training


def test_a_drafter_of_all_tokens_lists_the_frequent_ones(trained: Path) -> None:
    """From it, `--draft-vocab N` narrows the drafter when it is loaded."""
    listed = json.loads((trained / "drafter" / FREQUENT_TOKENS).read_text())
    assert listed
    assert len(set(listed)) == len(listed)


def test_a_report_draws_the_curve_of_a_training_again(lab: Lab, trained: Path) -> None:
    lab.run(0, "report", trained, "--out", lab.root / "again")
    assert [path.name for path in (lab.root / "again").iterdir()] == ["curve.svg"]
    assert "is not compared" in lab.run(2, "report", trained, lab.root / "other", "--out", lab.root / "both")


def verifier_of(drafter: Path) -> str:
    name: str = json.loads((drafter / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"]
    return name


def test_export_takes_the_target_from_the_training(lab: Lab, trained: Path) -> None:
    """One that is gone must be named: the drafter does not load without."""
    shutil.copytree(trained, lab.out)
    params, config = load_drafter(trained / "drafter")
    save_drafter(lab.out / "drafter", params, config.with_window(9))
    theirs, again = lab.root / "theirs", lab.root / "again"
    command = f"export {lab.out / 'drafter'} --dialect speculators --out"
    line = f"verifier     {lab.target}, in config.json and README.md; other machines need a name: --verifier"
    assert line in lab.run(0, command, theirs)
    assert verifier_of(theirs) == str(lab.target)
    written = json.loads((theirs / "config.json").read_text())
    assert written["transformer_layer_config"]["sliding_window"] == 9
    record = recipe_of(trained)
    record["command"]["target"] = "gone/with/the/wind"
    (lab.out / RECIPE).write_text(json.dumps(record))
    says = "the name or folder of the target; gone/with/the/wind, the target of its training, is not there"
    assert says in lab.run(2, command, again)
    lab.run(0, command, again, "--verifier some/target")


@pytest.mark.parametrize(
    ("part", "says"),
    [("command", "--dialect speculators needs --verifier"), ("data", "recipe.json or log.jsonl is damaged")],
)
def test_a_damaged_record_is_told_when_the_drafter_is_exported(lab: Lab, trained: Path, part: str, says: str) -> None:
    shutil.copytree(trained, lab.out)
    (lab.out / RECIPE).write_text(json.dumps({**recipe_of(trained), part: []}))
    out = lab.root / "theirs"
    assert says in lab.run(2, f"export {lab.out} --dialect speculators --out {out}")
    assert not out.exists()


def test_the_folder_of_a_training_is_its_drafter(lab: Lab, trained: Path) -> None:
    """In every command that takes a drafter, with one line that names it. --init begins with its weights."""
    line = f"{trained} is a folder of peagle train: the drafter is {trained / 'drafter'}"
    pair = f"--target {lab.target} --drafter {trained}"
    for command in (
        f"speculate a -n 4 -k 2 --raw-prompt --quiet {pair}",
        f"info {trained}",
        f"info {lab.target} {trained}",
        f"export {trained} --out {lab.root / 'theirs'} --dialect speculators",
    ):
        assert lab.run(0, command).count(line) == 1, command
    assert lab.train(f"--steps 1 --learning-rate 1e-9 --init {trained}").count(line) == 1
    np.testing.assert_allclose(drafter_of(lab.out)[0].fc, drafter_of(trained)[0].fc, atol=1e-3)
    assert drafter_of(lab.out)[1] == drafter_of(trained)[1]
    with pytest.warns(InputWarning, match="is a folder of peagle train"):
        assert peagle.loading.load.load(lab.target, trained).drafter is not None


def test_a_training_without_a_drafter_is_told_from_a_checkpoint(lab: Lab, trained: Path) -> None:
    shutil.copytree(trained, lab.out, ignore=shutil.ignore_patterns("drafter"))
    says = f"is a folder of peagle train without a drafter yet; peagle train --out {lab.out} --res"
    for command in (
        f"speculate a --target {lab.target} --drafter {lab.out}",
        f"export {lab.out} --out {lab.root / 't'}",
    ):
        assert says in lab.run(2, command)
