"""`peagle train` from data to a drafter that runs, and what it says to what cannot work."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import peagle.loading
from drafter.config import DrafterConfig
from drafter.load import load_drafter, save_drafter
from drafter.params import DrafterParams
from drafter.propose import Eagle3
from drafter.train.batches import Batches
from drafter.train.config import DrafterShape
from drafter.train.folder import LOG, best_held_out, read_log
from drafter.train.shards import Document, open_folder, read_shards, write_shard
from drafter.trained import RECIPE
from peagle.checkpoints import drafter_folder
from peagle.cli import main
from peagle.config import SamplingParams
from peagle.engine.request import Request
from peagle.engine.speculation import speculation_file
from peagle.ops.errors import InputWarning
from peagle.result import decode
from peagle.workflows.new_drafter import given_params
from target.load import load_target
from tests.peagle.workflows.training.conftest import PROMPTS, Run, train, words, write_prompts
from tests.support.drafters import random_params
from tests.support.pairs import DRAFTER, MAX_POSITIONS, STOP, TARGET, VOCAB_SIZE, Directories, press_ctrl_c_at
from tests.support.toys import costs

FROM_DRAFTER = f"--layers {DRAFTER.num_layers} --mlp-width {DRAFTER.mlp_width}"  # of the tests' own drafter


def drafter_of(out: Path) -> tuple[DrafterParams, DrafterConfig]:
    return load_drafter(out / "drafter", np.dtype(np.float32))


def same_weights(*outs: Path) -> bool:
    one, other = (load_file(out / "drafter" / "model.safetensors") for out in outs)
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def recipe_of(out: Path) -> dict:
    record: dict = json.loads((out / RECIPE).read_text())
    return record


def steps_of(out: Path, kind: str = "loss") -> list[int]:
    """Return the steps with a line of this kind in the log."""
    return [line["step"] for line in read_log(out / LOG) if kind in line]


def write_data(folder: Path, rows: np.ndarray, trained: Sequence[bool]) -> Path:
    """Write documents of equal length with these tokens, and the same ones of each trained."""
    open_folder(folder, {})
    write_shard(folder, 0, [Document(row.astype(np.int32), np.array(trained, bool)) for row in rows])
    return folder


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
    directories: Directories,
    prompts: Path,
    data: Path,
    tmp_path: Path,
    run: Run,
    curves: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peagle.cli.training.draw", curves)
    out = tmp_path / "run"
    command = train(directories.target, data, out, f"--evaluate {prompts} --evaluate-every 2 -k 3")
    said = run(0, *command)
    for line in (
        "held out: the answers to --evaluate; ",
        "5 of the 5 --evaluate prompts are in the data, too",
        "left out     of --evaluate 1 row without a usable prompt",
    ):
        assert line in said
    assert (steps_of(out)[-1], steps_of(out, "held_out")) == (4, [4])
    assert recipe_of(out)["data"]["held_out"] == 0
    evaluations = [line["evaluation"] for line in read_log(out / LOG) if "evaluation" in line]
    assert [evaluation["num_left_out"] for evaluation in evaluations] == [1, 1]
    assert all(1 <= evaluation["acceptance_length"] <= 4 for evaluation in evaluations)
    curve = (out / "curve.svg").read_bytes()
    assert b"Loss" in curve
    assert (out / "drafter" / "curve.svg").read_bytes() == curve
    assert "](curve.svg)" in (out / "drafter" / "README.md").read_text()
    pair = peagle.loading.load(directories.target, out / "drafter")
    assert pair.loaded.drafter_window == "off, by default: no file names one"
    drafted = pair.generate(PROMPTS[0], num_speculative_tokens=3, max_new_tokens=20)
    assert [*PROMPTS[0], *drafted.output_ids] == read_shards(data)[0].token_ids.tolist()  # plain decoding's
    run(0, *command)  # it has all of its steps


@pytest.mark.parametrize(
    "kind",
    ["", pytest.param("--autoregressive", marks=pytest.mark.slow), "--drafter dflash --blocks 64"],
    ids=["P-EAGLE", "EAGLE-3", "DFlash"],
)
def test_what_was_learnt_by_heart_is_drafted_right(
    directories: Directories, tmp_path: Path, run: Run, kind: str
) -> None:
    """Trained on one answer alone, a drafter has every draft of it accepted, but for those of the final step."""
    k, num_tokens, out = 3, 29, tmp_path / "run"
    prompt = write_prompts(tmp_path / "prompt.jsonl", PROMPTS[0])
    run(0, f"data --target {directories.target} --prompt-file {prompt} --out {tmp_path / 'data'} -n {num_tokens}")
    rows = f"--width {len(PROMPTS[0]) + num_tokens} --depth {k} --ratio 1 --rows 1 --taps 0,1,2 --layers 1"
    rates = "--steps 120 --optimizer muon --learning-rate 0.02 --other-rate 0.01 --decay 0.5"
    run(0, f"train --target {directories.target} --data {tmp_path / 'data'} --out {out}", rows, rates, kind)
    pair = peagle.loading.load(directories.target, out / "drafter")
    engine = pair.engine(pair.engine_config(k, context=128))
    (result,) = decode(engine, [Request(tuple(PROMPTS[0]), num_tokens)], None)
    accepted = [step.num_accepted for step in result.steps]
    assert len(accepted) > 3
    assert accepted[:-1] == [k] * (len(accepted) - 1)


def test_the_baseline_proposes_in_turn_and_changes_no_token(
    directories: Directories, data: Path, tmp_path: Path, run: Run
) -> None:
    """An EAGLE-3 drafter, by the same command, in the engine: in slots, with rows that pause, never sampled."""
    out = tmp_path / "run"
    run(0, *train(directories.target, data, out, "--autoregressive --learning-rate 1e-2"))
    params, config = drafter_of(out)
    assert params.mask_hidden is None
    assert not config.parallel
    pair = peagle.loading.load(directories.target, out / "drafter")
    assert isinstance(pair.drafter, Eagle3)
    requests = [Request(tuple(ids), 24, index=index) for index, ids in enumerate(PROMPTS)]
    requests.append(Request(tuple(PROMPTS[0]), 12, SamplingParams(1.0, seed=5), index=len(PROMPTS)))
    configs = [pair.engine_config(k, slots=3, context=128, adaptive=k > 0) for k in (0, 2)]
    pair.engine(configs[1]).one.costs = costs(2, {1: True})
    plain, adaptive = (decode(pair.engine(config), requests, None) for config in configs)
    assert [result.output_ids for result in adaptive] == [result.output_ids for result in plain]
    assert 2 in [len(step.draft_token_ids) for result in adaptive for step in result.steps]
    run(0, "info", directories.target, out / "drafter")


def test_a_smaller_draft_vocabulary_a_window_and_the_other_dialect(
    directories: Directories, data: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """What nobody else loads is written and read here, with no promise in the card; positions are the target's."""
    out = tmp_path / "run"
    shape = "--draft-vocab 40 --hidden-size 24 --mask-hiddens 2 --drafter-window 5 --dialect speculators --loss kl"
    said = run(0, *train(directories.target, data, out, shape))
    params, config = drafter_of(out)
    assert (config.draft_vocab_size, config.hidden_size, config.num_mask_hiddens) == (40, 24, 2)
    assert (config.max_positions, config.windows) == (MAX_POSITIONS, (5,))
    text = (out / "drafter" / "README.md").read_text()
    assert "vLLM cannot load it: it has 2 mask hiddens, expected one." in text
    assert "vllm serve" not in text
    covered = recipe_of(out)["coverage"]
    share = f"{covered['frac']:.1%} of the tokens, so at most {covered['acceptance_limit']:.2f} a step at K = 7"
    assert f"- proposes 40 of the target's 320 tokens; in its training data {share}" in text
    assert f"\nproposes     {share}" in said
    assert main(["info", str(out / "drafter")]) == 0
    assert f"40 of the target's 320 tokens; in its training data {share}" in capsys.readouterr().out
    shutil.copytree(out / "drafter", tmp_path / "elsewhere")
    assert main(["info", str(tmp_path / "elsewhere")]) == 0
    assert "320 tokens; peagle parity measures how many of an answer's they are" in capsys.readouterr().out
    assert params.draft_to_target is not None
    kept = set(params.draft_to_target.tolist())
    used = {token for document in read_shards(data) for token in document.token_ids[document.trained].tolist()}
    assert STOP in kept
    assert len(used & kept) >= min(len(used), 39)
    assert config.mask_token_id == VOCAB_SIZE - 1, "the highest id that the data never uses"


def test_a_dflash_drafter_is_trained_written_and_trained_again(
    directories: Directories, data: Path, tmp_path: Path, run: Run
) -> None:
    """In z-lab's layout, its window in speculation.json; embedding and head are the target's all the while."""
    first, again = tmp_path / "first", tmp_path / "again"
    learning = "--learning-rate 1e-3 --blocks 6 --parts 2"  # one program trains both
    run(0, *train(directories.target, data, first, learning, "--drafter dflash --drafter-window 8"))
    recipe = recipe_of(first)
    assert (recipe["recipe"]["blocks"], recipe["recipe"]["draft_decay"]) == (6, 4.0)
    assert recipe["drafter"]["num_target_layers"] == 3
    config = json.loads((first / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == recipe["recipe"]["cod"]["depth"] + 1
    assert json.loads((first / "drafter" / "speculation.json").read_text()) == {"drafter_window": 8}
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(first / "drafter" / "model.safetensors").keys()
    assert "# DFlash drafter" in (first / "drafter" / "README.md").read_text()
    pair = peagle.loading.load(directories.target, first / "drafter")
    assert pair.loaded.drafter_window == "8 positions, by speculation.json"
    drafted = pair.generate(PROMPTS[0], num_speculative_tokens=3, max_new_tokens=20)
    assert [*PROMPTS[0], *drafted.output_ids] == read_shards(data)[0].token_ids.tolist()  # plain decoding's
    run(0, *train(directories.target, data, again, learning, f"--init {first / 'drafter'}"))
    assert recipe_of(again)["drafter"] == {**recipe["drafter"], "max_positions": MAX_POSITIONS}
    for more, says in (
        ("--depth 5", "--depth is 5, and a block of the drafter has 3 drafts; expected the same"),
        ("--drafter p-eagle", "is a DFlash drafter; leave out --drafter"),
    ):
        assert says in run(2, *train(directories.target, data, tmp_path / "other", f"--init {first / 'drafter'}", more))


def test_a_drafter_to_begin_with_may_share_the_targets_embedding_and_head(
    directories: Directories, tmp_path: Path
) -> None:
    """Copies: training overwrites what it begins with, and the target is still needed."""
    config = dataclasses.replace(DRAFTER, hidden_size=TARGET.hidden_size)
    save_drafter(tmp_path / "drafter", random_params(config), config)
    weights = load_file(tmp_path / "drafter" / "model.safetensors")
    del weights["embed_tokens.weight"], weights["lm_head.weight"]
    save_file(weights, tmp_path / "drafter" / "model.safetensors")
    target = load_target(directories.target)
    params = given_params(str(tmp_path / "drafter"), target)
    for one, other in ((params.embedding, target.params.embedding), (params.lm_head, target.params.lm_head)):
        assert isinstance(one, jax.Array)
        np.testing.assert_array_equal(one, other)
        one.delete()
        assert np.isfinite(other).all()


# What cannot be

REFUSED = [
    ("--loss hinge", "--loss is 'hinge'; expected one of"),
    ("--width 8", "longer than the 8 tokens of a row, the longest"),
    ("--rows 0", "--rows is 0; expected a multiple of 1"),
    ("--rows 4 --data {data}:3 --data {data}:4", "--rows is 4; expected a multiple of 8"),
    ("--mask-token 17", "the mask token 17 is in use: 1 of the data's "),
    ("--mask-token 400", "mask token 400 lies outside"),
    ("--taps 0,1,9", "--taps names the output of layer 9; expected 0..2"),
    ("--taps 0,1,1", "--taps is 0,1,1; expected each layer once"),
    ("--aux-layer-ids 0,1,2", "--aux-layer-ids says what --init reads, and there is none"),
    ("--autoregressive --mask-token 4", "an EAGLE-3 drafter has no mask slots"),
    ("--drafter medusa", "--drafter is 'medusa'; expected"),
    ("--drafter dflash --autoregressive", "--autoregressive means an EAGLE-3 drafter, and --drafter is"),
    ("--drafter dflash --hidden-size 8", "--hidden-size is 8; expected the target's 64"),
    ("--drafter dflash --draft-vocab 9", "a DFlash drafter has its target's head"),
    ("--drafter dflash --mask-hiddens 2", "a DFlash drafter has no mask hiddens"),
    ("--drafter dflash --depth 1", "--depth is 1; expected 2 or more"),
    ("--drafter dflash --dialect speculators", "a DFlash drafter has a layout of its own"),
    ("--drafter dflash --evaluate missing.jsonl", "-k is 7; expected at most 3, since a block"),
    ("--blocks 4", "--blocks is given, and a P-EAGLE drafter has none"),
    ("--draft-decay 4", "--draft-decay is given, and a P-EAGLE drafter has none"),
    ("--draft-decay 0", "--draft-decay is 0.0; expected a number above 0"),
    ("--parts 99", "99 parts of a sequence of 32"),
    ("--drafter-window 3", "--drafter-window is 3; expected 4 or more, for the drafts of --depth 3"),
    ("--drafter-window wide", "--drafter-window is 'wide'; expected"),
    (f"--drafter-window {9**9}", f"the target has {MAX_POSITIONS} positions, so it would hide nothing"),
    ("--drafter-window 8 --parts 3", "--parts is 3, and does not divide the 32 tokens of --width"),
    ("--mix 32", "--mix is '32'; expected lengths that rise"),
    ("--mix 32:2,8:1", "--mix is '32:2,8:1'; expected lengths that rise"),
    ("--mix 20:2,32:1", "--rows is 2; expected a multiple of 3, the sum of the shares of --mix"),
    ("--mix 1:1,32:1", "no document of 1 to 1 tokens is there to train on: the longest has 26"),
    ("--mix 64:1", "--mix names documents of 64 tokens; expected at most --width, 32"),
    ("--mix 8:1", "--mix ends at 8 tokens, and the longest document has 26"),
    ("--width 512", "a row has 512 tokens (--width), and all of the data"),
    ("--heads 5", "5 query heads do not divide"),
    ("--weight-decay -1", "--weight-decay is -1.0; expected 0 or more"),
    ("--minutes 0", "--minutes is 0; expected a number above 0"),
    ("--minutes nan", "--minutes is nan; expected a number above 0"),
    ("--mask-hiddens 3", "--mask-hiddens is 3; expected 1..2"),
    ("--data missing", "cannot be read"),
    ("--init {drafter} --autoregressive", "is a P-EAGLE drafter; leave out --autoregressive"),
    ("--init {drafter} --layers 3", "--layers asks for 3, but --init {drafter} has 2"),
    (f"--init {{drafter}} {FROM_DRAFTER} --aux-layer-ids 0,1,3", "names the output of layer 3; expected 0..2"),
    (f"--init {{drafter}} {FROM_DRAFTER} --aux-layer-ids 0,2,1", "--taps asks for (0, 1, 2), but --init"),
]


@pytest.mark.parametrize(("more", "says"), REFUSED)
def test_what_cannot_be_trained_is_one_line_and_nothing_is_written(
    directories: Directories, data: Path, tmp_path: Path, run: Run, more: str, says: str
) -> None:
    places = {"data": data, "drafter": directories.drafter}
    said = run(2, *train(directories.target, data, tmp_path / "run", more.format(**places)))
    assert says.format(**places) in said
    assert not (tmp_path / "run").exists()


def test_data_that_teach_nothing_are_refused(
    directories: Directories, data: Path, taught: Path, tmp_path: Path, run: Run
) -> None:
    corrupt = tmp_path / "corrupt"
    shutil.copytree(data, corrupt)
    (corrupt / "shard_00001.safetensors").write_bytes(b"cut")
    for folder, more, says in (
        (write_data(tmp_path / "masked", np.arange(5)[None], [False] * 5), "", "has no token to train on: all of it"),
        (corrupt, "", "shard_00001.safetensors is not a whole shard"),
        (taught, "--taps 0,2,1", "holds the outputs of layers [0, 1, 2], the drafter reads [0, 2, 1]"),
    ):
        said = run(2, *train(directories.target, folder, tmp_path / "run", more))
        assert says in said
    assert "give --taps 0,1,2" in said
    assert not (tmp_path / "run").exists()


def test_what_a_list_of_tokens_covers_is_said_and_none_is_refused(
    directories: Directories, data: Path, tmp_path: Path, run: Run, no_step: str
) -> None:
    """Before the first step, with how many of the tokens no answer holds."""
    used = sorted({token for document in read_shards(data) for token in document.token_ids[document.trained].tolist()})
    absent = sorted(set(range(VOCAB_SIZE)) - set(used))
    listed, proposes = (
        tmp_path / "listed.json",
        f"proposes {len(used) + 2:,} tokens, 2 of which no answer holds: 100.0%",
    )
    command = train(directories.target, data, tmp_path / "run", "--draft-vocab", listed)
    listed.write_text(json.dumps(absent[:9]))
    assert "none of the 9 tokens of the draft vocabulary is in an answer of the data" in run(2, *command)
    listed.write_text(json.dumps(used + absent[:2]))
    said = run(2, *command)
    assert said.index(proposes) < said.index("training steps 1") < said.index(no_step)


def test_a_mask_token_in_the_data_that_nobody_chose_is_a_warning(
    directories: Directories, tmp_path: Path, run: Run, no_step: str
) -> None:
    """That of --init, and where no token is free the rarest."""
    rarest, width = 7, 64
    everything = [token for token in range(VOCAB_SIZE) for _ in range(1 + (token != rarest))]
    for name, ids, more, says in (
        (
            "init",
            [5, DRAFTER.mask_token_id, 9, 9],
            f"--init {directories.drafter} {FROM_DRAFTER}",
            "1 of the data's 64",
        ),
        ("full", everything, "", "it is the rarest token, and none is free"),
    ):
        rows = np.array([*ids, *[9] * (-len(ids) % width)]).reshape(-1, width)
        folder = write_data(tmp_path / name, rows, np.arange(width) > 1)  # type: ignore[arg-type]
        said = run(2, *train(directories.target, folder, tmp_path / f"run_{name}", f"--width {width} --rows 1", more))
        assert no_step in said
        assert f"the mask token {DRAFTER.mask_token_id if more else rarest} is in use: " in said
        assert says in said


def test_data_and_drafters_of_another_target_are_told(
    directories: Directories,
    data: Path,
    taught: Path,
    trained: Path,
    other_target: Path,
    tmp_path: Path,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    no_step: str,
) -> None:
    """Text of it is a warning before the first step, hidden states of it are refused."""
    begun, out = tmp_path / "begun", tmp_path / "run"
    shutil.copytree(trained, begun)
    for folder, place, more, says in (
        (taught, out, "", "holds what another target computed"),
        (data, out, "--strict", f"{data} holds what another target wrote ({directories.target}), and a drafter learns"),
        (data, begun, "", "was begun with --target"),
    ):
        assert says in run(2, *train(other_target, folder, place, more))
        assert not out.exists()
    for target, count in ((other_target, 1), (directories.target, 0)):
        said = run(2, *train(target, data, tmp_path / target.name / str(count), "--quiet" * count))
        assert (said.count("holds what another target wrote"), no_step in said) == (count, True)
    line = f"{trained / 'drafter'} was trained for another target than {other_target}, by recipe.json beside it"
    for command in (f"info {other_target}", f"speculate a -n 4 -k 2 --raw-prompt --target {other_target} --drafter"):
        assert main(words(command, trained / "drafter")) == 0
        captured = capsys.readouterr()
        assert (captured.out + captured.err).count(line) == 1
    assert main(words("info", directories.target, trained / "drafter")) == 0
    assert "another target" not in capsys.readouterr().out


# Stopping and continuing


def test_a_training_goes_on_after_ctrl_c_to_the_same_bits_and_takes_more_steps(
    directories: Directories, data: Path, trained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same command, or by --resume, which needs nothing else. Another recipe is refused."""
    out, other = tmp_path / "run", tmp_path / "other"
    for folder, again in ((out, "train --resume"), (other, train(directories.target, data, other))):
        with monkeypatch.context() as patch:
            press_ctrl_c_at(patch, Batches, "at", 2)
            said = run(130, *train(directories.target, data, folder))
        assert f"interrupted: 2 of 4 steps are kept in {folder}; the same command goes on" in said
        assert not (folder / "drafter").exists()
        run(0, *([again, "--out", folder] if isinstance(again, str) else again))
        assert steps_of(folder) == [2, 4]
        assert same_weights(folder, trained)
    run(0, "train --resume --steps 6 --out", out)
    record = recipe_of(out)
    assert (record["recipe"]["steps"], record["continued"]) == (6, [{"at": 4, "steps_before": 4}])
    assert steps_of(out) == [2, 4, 6]
    assert "6 steps of 2 rows" in (out / "drafter" / "README.md").read_text()
    monkeypatch.setattr("peagle.cli.training.seconds_per_step", lambda *_: 30.0)
    run(0, "train --resume --minutes 2 --out", out)  # .9 of it: three steps
    assert recipe_of(out)["recipe"]["steps"] == 9
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    changed = "--width 32 (now 48), --seed 0 (now 7), --drafter-window None (now [9])"
    for command, says in (
        (
            train(directories.target, data, out, "--seed 7 --width 48 --drafter-window 9"),
            f"was begun with {changed}; exp",
        ),
        (train(directories.target, data, out), "was begun with 9 steps, now it is 4; expected as many or more"),
        (train(directories.target, data, tmp_path / "mine"), "holds files, but no recipe.json"),
        (words("train --resume --seed 5 --out", out), "--resume takes its options from the recipe in"),
        (words("train --resume --seed 5 --out", out), "leave out --seed"),
        (words("train --resume --out", tmp_path / "none"), "holds no training"),
    ):
        assert says in run(2, *command)
    (out / RECIPE).write_text(json.dumps({key: value for key, value in record.items() if key != "command"}))
    assert "was begun by an older version" in run(2, "train --resume --out", out)


def test_documents_are_held_out_and_the_best_step_is_the_drafter(
    directories: Directories, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """After Ctrl-C, too: it goes on with the same documents, and ends with the same bits."""
    monkeypatch.setattr("peagle.workflows.training.LEAST_BETWEEN", 1)
    out, again = tmp_path / "run", tmp_path / "again"
    more = "--held-out 0.4 --steps 6 --learning-rate 0.5"
    said = run(0, *train(directories.target, data, out, more))
    assert steps_of(out, "held_out") == [1, 2, 3, 4, 5, 6]
    log = list(read_log(out / LOG))
    best = (best_held_out(log) or {})["step"]
    assert best < 6, log  # at so high a rate
    for line in (
        "held out: 2 of the 5 documents; the step that is best on them is kept (--held-out 0: the last",
        "training steps 1 to 6, 4.0 epochs in all",
        "step 6 of 6, 4.0 epochs: loss",
        f"drafter      {out / 'drafter'} | step {best} of 6, the best on held-out documents",
    ):
        assert line in said
    assert [line["epochs"] for line in log if "loss" in line][-1] == [4.0]  # 6 steps of 2 rows, of 3
    record = recipe_of(out)
    assert (record["data"]["documents"], record["data"]["held_out"]) == (5, 0.4)
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, Batches, "at", 9)
        run(130, *train(directories.target, data, again, more))
    run(0, "train --resume --out", again)
    assert list(read_log(again / LOG))[-1] == log[-1]
    assert same_weights(out, again)
    assert "was begun with --held-out 0.4 (now 0.0)" in run(
        2, *train(directories.target, data, out, more, "--held-out 0")
    )


def test_the_answers_to_evaluate_are_held_out(
    directories: Directories, data: Path, taught: Path, tmp_path: Path, run: Run, request: pytest.FixtureRequest
) -> None:
    """Without documents kept back, though the data hold what the target says; the drafter that runs has it inside."""
    others = write_prompts(tmp_path / "others.jsonl", [8, 8, 8], [30, 40])
    evaluation = f"--evaluate-every 0 -k 3 --steps 2 --evaluate {others}"
    held_out, known = "held out: the answers to --evaluate; the step that is best on them", "are in the data, too"
    said = run(0, *train(directories.target, taught, tmp_path / "run", evaluation))
    assert held_out in said
    assert known not in said
    assert steps_of(tmp_path / "run", "held_out") == [2]
    assert recipe_of(tmp_path / "run")["data"]["held_out"] == 0
    no_step = request.getfixturevalue("no_step")
    for more, holds_out in (("", True), ("--held-out 0", False)):
        said = run(2, *train(directories.target, data, tmp_path / f"run_{holds_out}", evaluation, more))
        assert (no_step in said, held_out in said, known in said) == (True, holds_out, False)


def without_steps(command: list[str]) -> list[str]:
    place = command.index("--steps")
    return command[:place] + command[place + 2 :]


def test_minutes_plan_the_steps_of_a_new_training_and_are_a_deadline(
    directories: Directories, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """A step is said to take a minute; the time is said to be over after the first."""
    monkeypatch.setattr("peagle.cli.training.seconds_per_step", lambda *_: 60.0)
    out = tmp_path / "run"
    command = without_steps(train(directories.target, data, out))
    assert "--minutes is 0.5, and a step takes 60 s; expected time for a step" in run(2, *command, "--minutes 0.5")
    assert not out.exists()
    over = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr("peagle.workflows.training.Deadline.over", lambda _: next(over))
        said = run(0, *command, "--minutes 3")
    for line in (
        "measuring a step: how many fit into 3 minutes",
        "a step takes 60 s: 2 steps are planned",
        f"--minutes 3 are over: 1 of 2 steps are kept in {out}",
    ):
        assert line in said
    assert "1 of 2 steps of 2 rows" in (out / "drafter" / "README.md").read_text()
    assert "training steps 2 to 2" in run(0, *command, "--minutes 3")
    assert "has all of its steps, 2; a larger --steps goes on with more" in run(0, *command, "--minutes 3")


@pytest.mark.parametrize(
    ("step_s", "more", "says", "recipe"),
    [
        (60.0, "", "muon at rates of 0.008 and 0.003, rising over 2% of the steps", ("muon", 0.008)),
        (0.05, "", "adamw at a rate of 0.0001, rising over 0.25% of the steps", ("adamw", 1e-4)),
        (60.0, "--learning-rate 0.01", "over the last 100%: as given", ("adamw", 0.01)),
    ],
)
def test_minutes_choose_the_recipe_by_the_steps_that_fit(
    directories: Directories,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    no_step: str,
    step_s: float,
    more: str,
    says: str,
    recipe: tuple[str, float],
) -> None:
    """Said before the first step. A training that goes on keeps its recipe, however many steps it gets."""
    monkeypatch.setattr("peagle.cli.training.seconds_per_step", lambda *_: step_s)
    out = tmp_path / "run"
    said = run(2, *without_steps(train(directories.target, data, out, more)), "--minutes 3")
    assert said.index("recipe: ") < said.index(says) < said.index("training steps 1 to") < said.index(no_step)
    assert no_step in run(2, "train --resume --steps 9999 --minutes 3 --out", out)
    record = recipe_of(out)["recipe"]
    assert (record["optimizer"], record["learning_rate"], record["steps"]) == (*recipe, 9999)


def older(out: Path) -> None:
    """Make the folder of a training look as an earlier version wrote it."""
    record = recipe_of(out)
    del record["data"]["held_out"], record["command"]["held_out"]
    recipe, command = record["recipe"], record["command"]
    shape = {field.name: command.pop(field.name) for field in dataclasses.fields(DrafterShape)}
    shape["taps"] = ",".join(map(str, shape["taps"]))
    for name, former in {"clip_norm": "clip", "compute_dtype": "dtype"}.items():
        command[former] = command.pop(name)
    for name in ("warmup_frac", "decay_frac"):
        command[name.removesuffix("_frac")] = command.pop(name) and recipe[name]
    command["freeze_embedding"] = not command.pop("train_embedding")
    rates = {"optimizer": recipe["optimizer"], "learning_rate": recipe["learning_rate"], "other_rate": None}
    record["command"] = command | rates | {"shape": shape}
    (out / RECIPE).write_text(json.dumps(record))
    lines = [{key: value for key, value in line.items() if key != "epochs"} for line in read_log(out / LOG)]
    (out / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_training_of_an_earlier_version_goes_on(
    directories: Directories, data: Path, tmp_path: Path, run: Run
) -> None:
    """By its own recipe and without held-out documents, by either command; complete ones are read, too."""
    out = tmp_path / "run"
    run(0, *train(directories.target, data, out, "--learning-rate 0.5 --optimizer adamw --warmup 0.0025 --decay 1"))
    older(out)
    before = recipe_of(out)["recipe"]
    run(0, "train --resume --out", out)
    run(0, *train(directories.target, data, out, "--steps 5"))
    run(0, "train --resume --steps 6 --out", out)
    assert recipe_of(out)["recipe"] == before | {"steps": 6}
    assert not steps_of(out, "held_out")
    said = run(2, *train(directories.target, data, out, "--steps 6 --held-out 0.4"))
    assert "was begun with --held-out 0.0 (now 0.4)" in said


# The folder of a training


def test_a_target_is_written_as_others_find_it(
    directories: Directories, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """By its whole path, whatever was typed, in training as in export, and wherever they run."""
    (tmp_path / "target").symlink_to(directories.target)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run(0, *train(Path("target"), data, Path("run"), "--steps 1 --dialect speculators"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    for dialect in ("vllm", "speculators"):
        run(0, f"export ../run/drafter --out {dialect} --dialect {dialect}")
    for folder in ("../run/drafter", "vllm", "speculators"):
        card = Path(folder, "README.md").read_text()
        assert f'peagle speculate --target {directories.target} --drafter . "..."' in card
        if folder == "vllm":
            assert f"`vllm serve {directories.target} --speculative-config" in card
            assert '"model": "."' in card
        else:
            assert "`vllm serve .`" in card
            verifier = json.loads(Path(folder, "config.json").read_text())["speculators_config"]["verifier"]
            assert verifier["name_or_path"] == str(directories.target)


def test_export_takes_the_target_from_the_training(
    directories: Directories, trained: Path, tmp_path: Path, run: Run
) -> None:
    """One that is gone must be named: the drafter does not load without."""
    shutil.copytree(trained, tmp_path / "run")
    params, config = load_drafter(trained / "drafter")
    save_drafter(tmp_path / "run" / "drafter", params, config.with_window(9))
    command = f"export {tmp_path / 'run' / 'drafter'} --dialect speculators --out"
    line = f"verifier     {directories.target}, in config.json and README.md; other machines need a name: --verifier"
    assert line in run(0, command, tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == str(directories.target)
    assert written["transformer_layer_config"]["sliding_window"] == 9
    record = recipe_of(trained)
    record["command"]["target"] = "gone/with/the/wind"
    (tmp_path / "run" / RECIPE).write_text(json.dumps(record))
    says = "needs --verifier, the target: it loads no drafter without, and gone/with/the/wind, the training's, is"
    assert says in run(2, command, tmp_path / "again")
    run(0, command, tmp_path / "again", "--verifier some/target")


def test_the_folder_of_a_training_is_its_drafter(
    directories: Directories, data: Path, trained: Path, tmp_path: Path, run: Run
) -> None:
    """In every command that takes a drafter, with one line that names it. --init begins with its weights."""
    line = f"{trained} is a folder of peagle train: the drafter is {trained / 'drafter'}"
    pair = f"--target {directories.target} --drafter {trained}"
    prompt, out = write_prompts(tmp_path / "prompts.jsonl", PROMPTS[0]), tmp_path / "run"
    sweep = f"sweep --out {tmp_path / 'sweep'} --prompts {prompt} -n 4 -k 2,auto --dry-run --write-widths {trained}"
    for command in (
        words(f"speculate a -n 4 -k 2 --raw-prompt --quiet {pair}"),
        words("info", trained),
        words("info", directories.target, trained),
        words(f"export {trained} --out {tmp_path / 'theirs'} --dialect speculators"),
        train(directories.target, data, out, f"--steps 1 --learning-rate 1e-9 --init {trained}"),
        words(sweep, pair),
    ):
        assert run(0, *command).count(line) == 1, command
    np.testing.assert_allclose(drafter_of(out)[0].fc, drafter_of(trained)[0].fc, atol=1e-3)
    assert drafter_of(out)[1] == drafter_of(trained)[1]
    with pytest.warns(InputWarning, match="is a folder of peagle train"):
        assert peagle.loading.load(directories.target, trained).drafter is not None
    with pytest.warns(InputWarning, match="is a folder of peagle train"):  # as --write-widths finds its file
        assert speculation_file(drafter_folder(trained)) == trained / "drafter" / "speculation.json"


def test_a_training_without_a_drafter_is_told_from_a_checkpoint(
    directories: Directories, trained: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained, out, ignore=shutil.ignore_patterns("drafter"))
    says = f"is a folder of peagle train without a drafter yet; peagle train --out {out} --res"
    for command in (
        f"speculate a --target {directories.target} --drafter {out}",
        f"export {out} --out {tmp_path / 't'}",
    ):
        assert says in run(2, command)
