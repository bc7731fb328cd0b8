"""`peagle data` and `peagle train` from a target to a drafter that runs, and what they say to what cannot work."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import peagle.cli.training
import peagle.loading
import peagle.workflows.answers
from drafter.load import load_drafter, save_drafter
from drafter.propose import Eagle3
from drafter.train.batches import Batches
from drafter.train.config import DrafterShape
from drafter.train.folder import LOG, best_held_out, read_log
from drafter.train.shards import read_shards
from drafter.trained import RECIPE
from peagle.cli import main
from peagle.cli.training import _shown
from peagle.config import SamplingParams
from peagle.engine.request import Request
from peagle.ops.errors import InputError, InputWarning
from peagle.pair import Pair
from peagle.result import decode
from peagle.text.prompts import Rendering, from_ids
from peagle.workflows.answers import Asking, answer
from peagle.workflows.dataset import lengths_in_words, passes, rows_of_pass
from peagle.workflows.new_drafter import given_params
from peagle.workflows.training import Deadline, planned_steps
from peagle.workflows.training_advice import parted_curves, weak_drafter
from target.load import load_target
from tests.support.drafters import random_params
from tests.support.pairs import (
    DRAFTER,
    MAX_POSITIONS,
    STOP,
    TARGET,
    VOCAB_SIZE,
    Directories,
    press_ctrl_c_at,
)
from tests.support.toys import costs

Run = Callable[..., tuple[int, str]]
PROMPTS = [[17, 4, 90], [5, 5, 5, 5], [200, 31], [9, 8, 7, 6, 5, 4], [77]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit code, the last line on standard error); of what is refused there is one that says why."""

    def call(*arguments: object) -> tuple[int, str]:
        code = main([str(each) for each in arguments])
        lines = capsys.readouterr().err.splitlines()
        assert sum("error" in line for line in lines) == (code == 2), lines
        return code, lines[-1] if lines else ""

    return call


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS) + '{"prompt_ids": []}\n')
    return path


@pytest.fixture(scope="module")
def made(directories: Directories, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of the tiny target."""
    out = tmp_path_factory.mktemp("data") / "data"
    arguments = ["data", "--target", directories.target, "--prompt-file", prompts, "--out", out, "-n", 20]
    assert main([*map(str, arguments), "--shard-prompts", "2", "--slots", "2", "--quiet"]) == 0
    return out


def train(directories: Directories, data: object, out: Path, *more: object) -> list[object]:
    small = ["--taps", "0,1,2", "--width", 32, "--depth", 3, "--rows", 2, "--layers", 1, "--mlp-width", 16]
    return ["train", "--target", directories.target, "--data", data, "--out", out, "--steps", 4, *small, *more]


@pytest.fixture(scope="module")
def trained(directories: Directories, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of four steps."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert main([*map(str, train(directories, made, out)), "--quiet"]) == 0
    return out


@pytest.fixture(autouse=True)
def curves(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Draw no curves, which takes as long as a training of a few steps; return what draws them."""
    draw = peagle.cli.training.draw
    monkeypatch.setattr("peagle.cli.training.draw", lambda *_: "none")
    return draw


@pytest.fixture
def no_step(monkeypatch: pytest.MonkeyPatch) -> str:
    """End each training with an error of this text where its first step begins, before the step is compiled."""

    def refuse(*_: object) -> None:
        raise InputError("the first step begins")

    monkeypatch.setattr(Batches, "at", refuse)
    return "the first step begins"


def test_data_are_the_targets_own_answers(made: Path, pair: Pair) -> None:
    documents = read_shards(made)
    assert len(list(made.glob("shard_*"))) == 3
    for ids, document in zip(PROMPTS, documents, strict=True):
        answer = pair.generate(ids, num_speculative_tokens=0, max_new_tokens=20).output_ids
        assert document.token_ids.tolist() == [*ids, *answer]
        assert document.trained.tolist() == [False] * len(ids) + [True] * len(answer)


def test_answers_are_counted_when_they_end_not_when_all_have_ended(pair: Pair) -> None:
    class Stop(Exception):
        pass

    def stop(_: int) -> None:
        raise Stop

    conversations = [from_ids(ids) for ids in PROMPTS[:2]]
    asking = Asking(Rendering(), SamplingParams(), max_new_tokens=8, context=64, slots=1)
    with pytest.raises(Stop):  # before the first answer is there
        next(answer(pair, conversations, asking, 0, pytest.fail, stop))
    counted: list[int] = []
    assert len(list(answer(pair, conversations, asking, 0, pytest.fail, counted.append))) == 2
    assert counted == [1, 1]


def test_data_go_on_where_they_were_cut_off_and_are_the_same(
    directories: Directories, made: Path, prompts: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("data", "--target", directories.target, "--prompt-file", prompts, "-n", 20, "--shard-prompts", 2)
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    (copy / "shard_00001.safetensors").unlink()
    before = (copy / "shard_00002.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, peagle.workflows.answers, "submit")
        code, said = run(*arguments, "--out", copy, "--slots", 2)
    assert code == 130
    assert f"interrupted: 2 of 3 shards are in {copy}; the same command goes on" in said
    assert not (copy / "shard_00001.safetensors").exists()
    code, said = run(*arguments, "--out", copy, "--slots", 2)
    assert code == 0
    line = f"1 row without a usable prompt, the first: {prompts} line {len(PROMPTS) + 1}"
    assert said.startswith(f"left out     {line}")
    code, said = run(*arguments, "--out", tmp_path / "strict", "--strict")
    assert (code, "is empty" in said, (tmp_path / "strict").exists()) == (2, True, False)
    assert (copy / "shard_00002.safetensors").stat().st_mtime_ns == before
    for one, other in zip(read_shards(made), read_shards(copy), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
    code, said = run(*arguments, "--out", copy, "--temperature", 1)
    assert code == 2
    assert "was made with --temperature 0.0 (now 1.0); expected the same" in said
    code, said = run(*arguments, "--out", copy, "--temperature", 1, "--seed", 3, "--shard-prompts", 3)
    assert "--shard-prompts 2 (now 3), --temperature 0.0 (now 1.0), --seed 0 (now 3)" in said


def test_the_end_of_a_prompt_is_kept_with_what_the_target_computed_of_all_of_it(
    directories: Directories, prompts: Path, tmp_path: Path, run: Run
) -> None:
    asked = ("--target", directories.target, "--prompt-file", prompts, "-n", 4, "--taps", "0,1,2")
    out, whole = tmp_path / "data", tmp_path / "whole"
    assert run("data", *asked, "--hidden", "--top", 2, "--out", whole)[0] == 0
    code, said = run("data", *asked, "--hidden", "--top", 2, "--keep-prompt", 2, "--out", out)
    assert code == 0
    for each, kept in zip(read_shards(whole), read_shards(out), strict=True):
        first = max(0, int(np.argmax(each.trained)) - 2)
        np.testing.assert_array_equal(kept.token_ids, each.token_ids[first:])
        np.testing.assert_array_equal(kept.trained, each.trained[first:])
        assert kept.teacher.keys() == each.teacher.keys()
        for name in kept.teacher:
            np.testing.assert_array_equal(kept.teacher[name], each.teacher[name][first:])
    code, said = run(*train(directories, out, tmp_path / "run", "--width", 16))
    assert (code, "holds the last 2 tokens of a prompt, the drafter reads all of them; give a smaller" in said) == (
        2,
        1,
    )
    code, said = run(*train(directories, out, tmp_path / "run", "--width", 16, "--drafter-window", 5))
    assert (code, "the drafter reads the last 8 with its windows and --depth 3" in said) == (2, True)
    code, said = run("data", *asked, "--hidden", "--keep-prompt", 2, "--out", tmp_path / "other")
    assert (code, "give --hidden and --top, too, or leave it out" in said) == (2, True)


def test_the_teacher_reads_few_long_documents_at_a_time_and_each_once() -> None:
    sizes = [100, 5000, 90, 700, 2047, *[300] * 40]
    found = list(passes(sizes))
    assert sorted(place for group, _ in found for place in group) == list(range(len(sizes)))
    for group, width in found:
        assert max(sizes[place] for place in group) <= width
        assert len(group) <= rows_of_pass(width)
        assert rows_of_pass(width) * width <= 32 * 512
    assert [width for _, width in found][-1] == 5120
    assert lengths_in_words(sizes) == "90 to 5,000 tokens; 42 up to 512, 1 up to 1,024, 1 up to 2,048, 1 up to 8,192"


def test_data_begun_without_a_shard_are_begun_anew(
    directories: Directories, prompts: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("data", "--target", directories.target, "--prompt-file", prompts, "--out", tmp_path / "data")
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, peagle.workflows.answers, "submit")
        assert run(*arguments, "-n", 20)[0] == 130
    assert (tmp_path / "data" / "manifest.json").exists()
    assert run(*arguments, "-n", 10)[0] == 0
    assert json.loads((tmp_path / "data" / "manifest.json").read_text())["max_new_tokens"] == 10


def test_a_turn_is_asked_with_the_answers_before_it(
    directories: Directories, pair: Pair, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"turns": ["1 + 2", "and?"]}) + "\n")
    out = tmp_path / "data"
    assert run("data", "--target", directories.target, "--prompt-file", path, "--out", out, "-n", 6)[0] == 0
    first, second = read_shards(out)
    said = [token for token in first.token_ids[first.trained].tolist() if token != STOP]
    assert pair.tokenizer is not None
    text = peagle.text.tokenizer.detokenize(pair.tokenizer, said)
    expected = pair.tokenizer.encode_chat(peagle.text.channels.chat_messages(["1 + 2", "and?"], [text], None))
    assert tuple(second.token_ids[~second.trained].tolist()) == expected


@pytest.mark.parametrize("more", [(), pytest.param(("--hidden", "--top", 4), marks=pytest.mark.slow)])
def test_from_data_to_a_drafter_that_runs(
    directories: Directories,
    prompts: Path,
    made: Path,
    tmp_path: Path,
    run: Run,
    curves: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[object, ...],
) -> None:
    """With the target inside the step, and with all it says in the data."""
    monkeypatch.setattr("peagle.cli.training.draw", curves)
    data, out = made, tmp_path / "run"
    if more:
        data = tmp_path / "data"
        asked = ("--prompt-file", prompts, "--out", data, "-n", 20, "--taps", "0,1,2", *more)
        assert run("data", "--target", directories.target, *asked)[0] == 0
        assert sorted(read_shards(data)[0].teacher) == ["aux_hidden", "log_total", "top_ids", "top_logits"]
    evaluation: tuple[object, ...] = ("--evaluate", prompts, "--evaluate-every", 2, "-k", 3)
    if more:
        evaluation = ("--drafter-window", 5, "--parts", 2)
    assert main([*map(str, train(directories, data, out, *evaluation))]) == 0
    said = capsys.readouterr().err
    for words in ("held out: the answers to --evaluate; ", "5 of the 5 --evaluate prompts are in the data, too"):
        assert (words in said) == (not more)
    assert ("left out     of --evaluate 1 row without a usable prompt" in said) == (not more)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "loss" in line][-1] == 4
    if not more:
        assert [line["step"] for line in log if "held_out" in line] == [4]
        assert json.loads((out / RECIPE).read_text())["data"]["held_out"] == 0
        lengths = [line["evaluation"]["acceptance_length"] for line in log if "evaluation" in line]
        assert [line["evaluation"]["num_left_out"] for line in log if "evaluation" in line] == [1, 1]
        assert len(lengths) == 2
        assert all(1 <= length <= 4 for length in lengths)
    curve = (out / "curve.svg").read_bytes()
    assert b"Loss" in curve
    assert (out / "drafter" / "curve.svg").read_bytes() == curve
    assert "](curve.svg)" in (out / "drafter" / "README.md").read_text()
    speculative = peagle.loading.load(directories.target, out / "drafter")
    assert speculative.loaded.drafter_window == (
        "5 positions, by config.json" if more else "off, by default: no file names one"
    )
    plain = speculative.generate(PROMPTS[0], num_speculative_tokens=0, max_new_tokens=30)
    assert speculative.generate(PROMPTS[0], num_speculative_tokens=3, max_new_tokens=30).output_ids == plain.output_ids
    # the same command again finds it done
    assert run(*train(directories, data, out, *evaluation))[0] == 0


@pytest.mark.parametrize(
    "kind",
    [
        ("--layers", 2),
        pytest.param(("--layers", 1, "--autoregressive"), marks=pytest.mark.slow),
        ("--layers", 2, "--drafter", "dflash", "--blocks", 64),
    ],
    ids=["P-EAGLE", "EAGLE-3", "DFlash"],
)
def test_what_was_learnt_by_heart_is_drafted_right(
    directories: Directories, tmp_path: Path, run: Run, kind: tuple[object, ...]
) -> None:
    """Trained on one answer alone, a drafter has every draft of it accepted, but for those of the final step."""
    k, tokens = 3, 29
    prompt = tmp_path / "prompt.jsonl"
    prompt.write_text(json.dumps({"prompt_ids": PROMPTS[0]}) + "\n")
    asked = ("--prompt-file", prompt, "--out", tmp_path / "data", "-n", tokens)
    assert run("data", "--target", directories.target, *asked)[0] == 0
    recipe = (
        "--width",
        len(PROMPTS[0]) + tokens,
        "--depth",
        k,
        "--ratio",
        1,
        "--rows",
        1,
        "--taps",
        "0,1,2",
        "--steps",
        120,
    )
    rates = ("--optimizer", "muon", "--learning-rate", 0.02, "--other-rate", 0.01, "--decay", 0.5)
    given = ("--target", directories.target, "--data", tmp_path / "data", "--out", tmp_path / "run")
    code, said = run("train", *given, *recipe, *rates, *kind)
    assert code == 0, said
    speculative = peagle.loading.load(directories.target, tmp_path / "run" / "drafter")
    engine = speculative.engine(speculative.engine_config(k, context=128))
    (result,) = decode(engine, [Request(tuple(PROMPTS[0]), tokens)], None)
    accepted = [step.num_accepted for step in result.steps]
    assert len(accepted) > 3
    assert accepted[:-1] == [k] * (len(accepted) - 1)


def test_the_baseline_proposes_in_turn_and_changes_no_token(
    directories: Directories, made: Path, tmp_path: Path, run: Run
) -> None:
    """An EAGLE-3 drafter, by the same command, in the engine: in slots, with rows that pause, never sampled."""
    out = tmp_path / "run"
    code, said = run(*train(directories, made, out, "--autoregressive", "--learning-rate", 1e-2))
    assert code == 0, said
    params, config = load_drafter(out / "drafter", np.dtype(np.float32))
    assert params.mask_hidden is None
    assert not config.parallel
    speculative = peagle.loading.load(directories.target, out / "drafter")
    assert isinstance(speculative.drafter, Eagle3)
    requests = [Request(tuple(ids), 24, index=index) for index, ids in enumerate(PROMPTS)]
    requests.append(Request(tuple(PROMPTS[0]), 12, SamplingParams(1.0, seed=5), index=len(PROMPTS)))
    shapes = (
        speculative.engine_config(0, slots=3, context=128),
        speculative.engine_config(2, slots=3, context=128, adaptive=True),
    )
    speculative.engine(shapes[1]).one.costs = costs(2, {1: True})
    plain, adaptive = (decode(speculative.engine(shape), requests, None) for shape in shapes)
    assert [result.output_ids for result in adaptive] == [result.output_ids for result in plain]
    widths = [len(step.draft_token_ids) for result in adaptive for step in result.steps]
    assert 2 in widths
    code, said = run("info", directories.target, out / "drafter")
    assert code == 0, said


def test_a_smaller_draft_vocabulary_and_the_other_dialect(
    directories: Directories, made: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """What nobody else loads is written and read here, with no promise in the card; positions are the target's."""
    more = ("--draft-vocab", 40, "--dialect", "speculators", "--hidden-size", 24, "--loss", "kl", "--mask-hiddens", 2)
    code, said = run(*train(directories, made, tmp_path / "run", *more))
    assert code == 0, said
    params, config = load_drafter(tmp_path / "run" / "drafter", np.dtype(np.float32))
    assert (config.draft_vocab_size, config.hidden_size, config.num_mask_hiddens) == (40, 24, 2)
    assert config.max_positions == MAX_POSITIONS
    text = (tmp_path / "run" / "drafter" / "README.md").read_text()
    assert "vLLM cannot load it: it has 2 mask hiddens, expected one." in text
    covered = json.loads((tmp_path / "run" / RECIPE).read_text())["coverage"]
    words = f"{covered['frac']:.1%} of the tokens, so at most {covered['acceptance_limit']:.2f} a step at K = 7"
    assert f"- proposes 40 of the target's 320 tokens; in its training data {words}" in text
    assert said.startswith(f"proposes     {words}")
    assert main(["info", str(tmp_path / "run" / "drafter")]) == 0
    assert f"40 of the target's 320 tokens; in its training data {words}" in capsys.readouterr().out
    shutil.copytree(tmp_path / "run" / "drafter", tmp_path / "elsewhere")
    assert main(["info", str(tmp_path / "elsewhere")]) == 0
    assert "320 tokens; peagle parity measures how many of an answer's they are" in capsys.readouterr().out
    assert "vllm serve" not in text
    assert params.draft_to_target is not None
    listed = set(params.draft_to_target.tolist())
    seen = {token for each in read_shards(made) for token in each.token_ids[each.trained].tolist()}
    assert STOP in listed
    assert len(seen & listed) >= min(len(seen), 39)
    assert config.mask_token_id == VOCAB_SIZE - 1, "the highest id that the data never uses"


def test_what_a_list_of_tokens_covers_is_said_and_none_is_refused(
    directories: Directories, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_step: str
) -> None:
    """Before the first step, with how many of the tokens no answer holds."""
    said = sorted({token for each in read_shards(made) for token in each.token_ids[each.trained].tolist()})
    absent = sorted(set(range(VOCAB_SIZE)) - set(said))
    for listed, begins, words in (
        (
            said + absent[:2],
            True,
            f"proposes {len(said) + 2:,} tokens, 2 of which no answer holds: 100.0% of the tokens",
        ),
        (absent[:9], False, "none of the 9 tokens of the draft vocabulary is in an answer of the data"),
    ):
        (tmp_path / "listed.json").write_text(json.dumps(listed))
        arguments = train(directories, made, tmp_path / f"run_{begins}", "--draft-vocab", tmp_path / "listed.json")
        assert main([*map(str, arguments)]) == 2
        lines = capsys.readouterr().err
        assert words in lines
        assert (no_step in lines) == begins
        assert not begins or lines.index(words) < lines.index("training steps 1")


@pytest.mark.slow
def test_training_goes_on_from_a_drafter(directories: Directories, made: Path, tmp_path: Path, run: Run) -> None:
    assert run(*train(directories, made, tmp_path / "first"))[0] == 0
    begun, shape = load_drafter(tmp_path / "first" / "drafter", np.dtype(np.float32))
    more = ("--init", tmp_path / "first" / "drafter", "--learning-rate", 1e-9)
    code, said = run(*train(directories, made, tmp_path / "second", *more))
    assert code == 0, said
    params, config = load_drafter(tmp_path / "second" / "drafter", np.dtype(np.float32))
    assert config == shape
    np.testing.assert_allclose(params.fc, begun.fc, atol=1e-3)


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


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--loss", "hinge"), "--loss is 'hinge'; expected one of"),
        (("--width", 8), "longer than the 8 tokens of a row, the longest"),
        (("--rows", 0), "--rows is 0; expected a multiple of 1"),
        (("--mask-token", 17), "the mask token 17 is in use: 1 of the data's "),
        (("--mask-token", 400), "mask token 400 lies outside"),
        (("--taps", "0,1,9"), "--taps names the output of layer 9; expected 0..2"),
        (("--taps", "0,1,1"), "--taps is 0,1,1; expected each layer once"),
        (("--taps", "a,b"), "--taps is 'a,b'; expected layers"),
        (("--aux-layer-ids", "0,1,2"), "--aux-layer-ids says what --init reads, and there is none"),
        (("--depth", 0), "--depth is 0; expected 1 or more"),
        (("--autoregressive", "--mask-token", 4), "an EAGLE-3 drafter has no mask slots"),
        (("--drafter", "medusa"), "--drafter is 'medusa'; expected"),
        (("--drafter", "dflash", "--autoregressive"), "--autoregressive means an EAGLE-3 drafter, and --drafter is"),
        (("--drafter", "dflash", "--hidden-size", 8), "--hidden-size is 8; expected the target's 64"),
        (("--drafter", "dflash", "--draft-vocab", 9), "a DFlash drafter has its target's head"),
        (("--drafter", "dflash", "--mask-hiddens", 2), "a DFlash drafter has no mask hiddens"),
        (("--drafter", "dflash", "--depth", 1), "--depth is 1; expected 2 or more"),
        (("--drafter", "dflash", "--dialect", "speculators"), "a DFlash drafter has a layout of its own"),
        (("--drafter", "dflash", "--evaluate", "missing.jsonl"), "-k is 7; expected at most 3, since a block"),
        (("--blocks", 4), "--blocks is given, and a P-EAGLE drafter has none"),
        (("--draft-decay", 4), "--draft-decay is given, and a P-EAGLE drafter has none"),
        (("--draft-decay", 0), "--draft-decay is 0.0; expected a number above 0"),
        (("--parts", 99), "99 parts of a sequence of 32"),
        (("--drafter-window", 3), "--drafter-window is 3; expected 4 or more, for the drafts of --depth 3"),
        (("--drafter-window", "wide"), "--drafter-window is 'wide'; expected"),
        (("--drafter-window", 9**9), f"the target has {MAX_POSITIONS} positions, so it would hide nothing"),
        (("--mix", "32"), "--mix is '32'; expected lengths that rise"),
        (("--mix", "32:2,8:1"), "--mix is '32:2,8:1'; expected lengths that rise"),
        (("--mix", "20:2,32:1"), "--rows is 2; expected a multiple of 3, the sum of the shares of --mix"),
        (("--mix", "1:1,32:1"), "no document of 1 to 1 tokens is there to train on: the longest has 26"),
        (("--mix", "64:1"), "--mix names documents of 64 tokens; expected at most --width, 32"),
        (("--mix", "8:1"), "--mix ends at 8 tokens, and the longest document has 26"),
        (("--width", 512), "a row has 512 tokens (--width), and all of the data"),
        (("--drafter-window", 8, "--parts", 3), "--parts is 3, and does not divide the 32 tokens of --width"),
        (("--learning-rate", -1), "--learning-rate is -1.0; expected a number above 0"),
        (("--heads", 5), "5 query heads do not divide"),
        (("--weight-decay", -1), "--weight-decay is -1.0; expected 0 or more"),
        (("--clip", 0), "--clip is 0.0; expected a number above 0"),
        (("--minutes", 0), "--minutes is 0; expected a number above 0"),
        (("--minutes", "nan"), "--minutes is nan; expected a number above 0"),
        (("--mask-hiddens", 3), "--mask-hiddens is 3; expected 1..2"),
        (("--data", "missing"), "cannot be read"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_nothing_is_written(
    directories: Directories, made: Path, tmp_path: Path, run: Run, more: tuple[object, ...], says: str
) -> None:
    code, said = run(*train(directories, made, tmp_path / "run", *more))
    assert code == 2
    assert says in said
    assert not (tmp_path / "run").exists()


def test_a_dflash_drafter_is_trained_written_and_trained_again(
    directories: Directories, made: Path, tmp_path: Path, run: Run
) -> None:
    """In z-lab's layout, its window in speculation.json; embedding and head are the target's all the while."""
    first, again = tmp_path / "first", tmp_path / "again"
    more = ("--drafter", "dflash", "--drafter-window", 8, "--blocks", 6)
    code, said = run(*train(directories, made, first, *more))
    assert code == 0, said
    recipe = json.loads((first / "recipe.json").read_text())
    assert (recipe["recipe"]["blocks"], recipe["recipe"]["draft_decay"]) == (6, 4.0)
    assert recipe["drafter"]["num_target_layers"] == 3
    config = json.loads((first / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == recipe["recipe"]["cod"]["depth"] + 1
    assert json.loads((first / "drafter" / "speculation.json").read_text()) == {"drafter_window": 8}
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(first / "drafter" / "model.safetensors").keys()
    assert "# DFlash drafter" in (first / "drafter" / "README.md").read_text()
    speculative = peagle.loading.load(directories.target, first / "drafter")
    assert speculative.loaded.drafter_window == "8 positions, by speculation.json"
    plain = speculative.generate(PROMPTS[0], num_speculative_tokens=0, max_new_tokens=30)
    assert speculative.generate(PROMPTS[0], num_speculative_tokens=3, max_new_tokens=30).output_ids == plain.output_ids
    code, said = run(*train(directories, made, again, "--init", first / "drafter", "--blocks", 6))
    assert code == 0, said
    written = {**recipe["drafter"], "max_positions": MAX_POSITIONS}
    assert json.loads((again / "recipe.json").read_text())["drafter"] == written
    code, said = run(*train(directories, made, tmp_path / "other", "--init", first / "drafter", "--depth", 5))
    assert code == 2
    assert "--depth is 5, and a block of the drafter has 3 drafts; expected the same" in said
    code, said = run(*train(directories, made, tmp_path / "other", "--init", first / "drafter", "--drafter", "p-eagle"))
    assert code == 2
    assert "is a DFlash drafter; leave out --drafter" in said


def test_a_drafter_to_begin_with_keeps_its_kind(directories: Directories, made: Path, tmp_path: Path, run: Run) -> None:
    more = ("--init", directories.drafter, "--autoregressive")
    code, said = run(*train(directories, made, tmp_path / "run", *more))
    assert code == 2
    assert "is a P-EAGLE drafter; leave out --autoregressive" in said


def test_what_a_drafter_to_begin_with_reads_can_be_given(
    directories: Directories, made: Path, tmp_path: Path, run: Run
) -> None:
    _, shape = load_drafter(directories.drafter)
    same = ("--layers", shape.num_layers, "--mlp-width", shape.mlp_width)
    more = ("--init", directories.drafter, *same, "--aux-layer-ids")
    code, said = run(*train(directories, made, tmp_path / "run", *more, "0,1,3"))
    assert (code, "--aux-layer-ids names the output of layer 3; expected 0..2" in said) == (2, True)
    code, said = run(*train(directories, made, tmp_path / "run", *more, "0,2,1"))
    assert (code, "--taps asks for (0, 1, 2), but --init" in said) == (2, True)


def test_a_drafter_to_begin_with_keeps_its_shape(
    directories: Directories, made: Path, tmp_path: Path, run: Run
) -> None:
    _, config = load_drafter(directories.drafter)
    more = ("--init", directories.drafter, "--mlp-width", config.mlp_width, "--layers", config.num_layers + 1)
    code, said = run(*train(directories, made, tmp_path / "run", *more))
    assert code == 2
    assert (
        f"--layers asks for {config.num_layers + 1}, but --init {directories.drafter} has {config.num_layers}" in said
    )


def test_each_share_is_a_whole_number_of_rows(directories: Directories, made: Path, tmp_path: Path, run: Run) -> None:
    shares = ("--rows", 4, "--data", f"{made}:3", "--data", f"{made}:3")
    code, said = run(*train(directories, f"{made}:2", tmp_path / "run", *shares))
    assert code == 2
    assert "--rows is 4; expected a multiple of 8" in said


@pytest.fixture(scope="module")
def taught(directories: Directories, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that hold the taps 0, 1, 2, too."""
    out = tmp_path_factory.mktemp("taught") / "data"
    arguments = ["data", "--target", directories.target, "--prompt-file", prompts, "--out", out, "-n", 4]
    assert main([*map(str, arguments), "--hidden", "--top", "2", "--taps", "0,1,2", "--quiet"]) == 0
    return out


def test_hidden_states_are_those_that_the_drafter_reads(
    directories: Directories, taught: Path, tmp_path: Path, run: Run
) -> None:
    code, said = run(*train(directories, taught, tmp_path / "run", "--taps", "0,2,1"))
    assert code == 2
    assert "holds the outputs of layers [0, 1, 2], the drafter reads [0, 2, 1]" in said
    assert "give --taps 0,1,2" in said
    assert not (tmp_path / "run").exists()


def test_hidden_states_and_a_training_are_of_one_target(
    directories: Directories, made: Path, trained: Path, taught: Path, tmp_path: Path, run: Run
) -> None:
    shutil.copytree(trained, tmp_path / "begun")
    other = tmp_path / "other"
    shutil.copytree(directories.target, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    elsewhere = dataclasses.replace(directories, target=other)
    code, said = run(*train(elsewhere, taught, tmp_path / "run"))
    assert code == 2
    assert "holds what another target computed" in said
    code, said = run(*train(elsewhere, made, tmp_path / "run", "--strict"))
    assert code == 2
    assert f"{made} holds what another target wrote ({directories.target}), and a drafter learns best from" in said
    assert not (tmp_path / "run").exists()
    code, said = run(*train(elsewhere, made, tmp_path / "begun"))
    assert code == 2
    assert "was begun with --target" in said


def test_text_of_another_target_is_a_warning_before_the_first_step(
    directories: Directories,
    made: Path,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_step: str,
) -> None:
    """And so is, in every command that loads a pair, a drafter that was trained for another target."""
    other = tmp_path / "other"
    shutil.copytree(directories.target, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    elsewhere, line = dataclasses.replace(directories, target=other), "holds what another target wrote"
    assert main([*map(str, train(elsewhere, made, tmp_path / "run", "--steps", 1)), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert (said.count(line), no_step in said) == (1, True)
    assert main([*map(str, train(directories, made, tmp_path / "same", "--steps", 1))]) == 2
    said = capsys.readouterr().err
    assert (said.count(line), no_step in said) == (0, True)

    line = f"{trained / 'drafter'} was trained for another target than {other}, by recipe.json beside it"
    speculate = ["speculate", "1 + 2", "-n", "4", "-k", "2", "--raw-prompt", "--quiet", "--target", str(other)]
    for command in (["info", str(other)], [*speculate, "--drafter"]):
        assert main([*command, str(trained / "drafter")]) == 0
        captured = capsys.readouterr()
        assert (captured.out + captured.err).count(line) == 1
    assert main(["info", str(directories.target), str(trained / "drafter")]) == 0
    assert "another target" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("-n", 0), "-n is 0; expected 1 or more"),
        (("--seed", 2**64), f"--seed is {2**64}; expected an integer of 64 bits"),
        (("--top", 100_000), f"--top is 100000; expected at most {VOCAB_SIZE}"),
        (("--taps", "0,1,2"), "give --hidden, too"),
    ],
)
def test_a_mistake_in_what_is_asked_leaves_no_folder(
    directories: Directories, prompts: Path, tmp_path: Path, run: Run, more: tuple[object, ...], says: str
) -> None:
    out = tmp_path / "data"
    code, said = run("data", "--target", directories.target, "--prompt-file", prompts, "--out", out, *more)
    assert code == 2
    assert says in said
    assert not out.exists()


@pytest.mark.parametrize("inside", ["", "data"])
def test_a_file_in_the_place_of_a_folder_is_one_line(
    directories: Directories, made: Path, prompts: Path, tmp_path: Path, run: Run, inside: str
) -> None:
    out = tmp_path / "file"
    out.write_text("mine")
    for arguments in (
        ("data", "--target", directories.target, "--prompt-file", prompts, "-n", 4, "--out", out / inside),
        train(directories, made, out / inside),
        ("export", "demo", "--out", out / inside),
    ):
        code, said = run(*arguments)
        assert code == 2
        assert str(out) in said
    assert out.read_text() == "mine"


def test_a_run_goes_on_after_ctrl_c_and_with_more_steps_and_is_not_mixed_with_another(
    directories: Directories, made: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, Batches, "at", 2)
        code, said = run(*train(directories, made, out))
    assert code == 130
    assert f"interrupted: 2 of 4 steps are kept in {out}; the same command goes on" in said
    assert not (out / "drafter").exists()
    assert run(*train(directories, made, out))[0] == 0
    assert [line["step"] for line in read_log(out / LOG)] == [2, 4]
    code, said = run(*train(directories, made, out, "--seed", 7, "--width", 48, "--drafter-window", 9))
    assert code == 2
    assert "was begun with --width 32 (now 48), --seed 0 (now 7), --drafter-window None (now [9]); expected" in said
    code, said = run(*train(directories, made, out, "--steps", 3))
    assert code == 2
    assert "was begun with 4 steps, now it is 3; expected as many or more" in said
    assert run(*train(directories, made, out, "--steps", 6))[0] == 0
    record = json.loads((out / RECIPE).read_text())
    assert (record["recipe"]["steps"], record["continued"]) == (6, [{"at": 4, "steps_before": 4}])
    assert [line["step"] for line in read_log(out / LOG)] == [2, 4, 6]
    assert "6 steps of 2 rows" in (out / "drafter" / "README.md").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    code, said = run(*train(directories, made, tmp_path / "mine"))
    assert code == 2
    assert "holds files, but no recipe.json" in said


def test_data_with_nothing_to_train_on_is_refused(
    directories: Directories, made: Path, tmp_path: Path, run: Run
) -> None:
    from drafter.train.shards import Document, open_folder, write_shard

    open_folder(tmp_path / "masked", {})
    write_shard(tmp_path / "masked", 0, [Document(np.arange(5), np.zeros((5,), bool))])
    code, said = run(*train(directories, tmp_path / "masked", tmp_path / "run"))
    assert code == 2
    assert "has no token to train on: all of it is masked" in said
    corrupt = tmp_path / "corrupt"
    shutil.copytree(made, corrupt)
    (corrupt / "shard_00001.safetensors").write_bytes(b"cut")
    code, said = run(*train(directories, corrupt, tmp_path / "run"))
    assert code == 2
    assert "shard_00001.safetensors is not a whole shard" in said


def test_minutes_plan_the_steps_of_a_new_training_and_are_a_deadline(
    directories: Directories,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A step is said to take a minute; the time is said to be over after the first."""
    monkeypatch.setattr("peagle.cli.training.seconds_per_step", lambda *_: 60.0)
    out = tmp_path / "run"
    given = [str(each) for each in train(directories, made, out)]
    del given[given.index("--steps") : given.index("--steps") + 2]
    assert main([*given, "--minutes", "0.5"]) == 2
    assert "--minutes is 0.5, and a step takes 60 s; expected time for a step" in capsys.readouterr().err
    assert not out.exists()
    over = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr("peagle.workflows.training.Deadline.over", lambda _: next(over))
        assert main([*given, "--minutes", "3"]) == 0
    said = capsys.readouterr().err
    assert "measuring a step: how many fit into 3 minutes" in said
    assert "a step takes 60 s: 2 steps are planned" in said
    assert f"--minutes 3 are over: 1 of 2 steps are kept in {out}" in said
    assert "1 of 2 steps of 2 rows" in (out / "drafter" / "README.md").read_text()
    assert main([*given, "--minutes", "3"]) == 0
    assert "training steps 2 to 2" in capsys.readouterr().err
    assert main([*given, "--minutes", "3"]) == 0
    assert "has all of its steps, 2; a larger --steps goes on with more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step_s", "more", "says", "recipe"),
    [
        (60.0, (), "muon at rates of 0.008 and 0.003, rising over 2% of the steps", ("muon", 0.008)),
        (0.05, (), "adamw at a rate of 0.0001, rising over 0.25% of the steps", ("adamw", 1e-4)),
        (60.0, ("--learning-rate", 0.01), "over the last 100%: as given", ("adamw", 0.01)),
    ],
)
def test_minutes_choose_the_recipe_by_the_steps_that_fit(
    directories: Directories,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_step: str,
    step_s: float,
    more: tuple[object, ...],
    says: str,
    recipe: tuple[str, float],
) -> None:
    """Said before the first step. A training that goes on keeps its recipe, however many steps it gets."""
    monkeypatch.setattr("peagle.cli.training.seconds_per_step", lambda *_: step_s)
    out = tmp_path / "run"
    given = [str(each) for each in train(directories, made, out, *more)]
    del given[given.index("--steps") : given.index("--steps") + 2]
    assert main([*given, "--minutes", "3"]) == 2
    said = capsys.readouterr().err
    assert no_step in said
    assert says in said[said.index("recipe: ") : said.index("training steps 1 to")]
    for arguments in ([], ["train", "--out", str(out), "--resume", "--steps", "9999", "--minutes", "3"]):
        if arguments:
            assert main(arguments) == 2
            assert no_step in capsys.readouterr().err
        record = json.loads((out / RECIPE).read_text())["recipe"]
        assert (record["optimizer"], record["learning_rate"]) == recipe
    assert record["steps"] == 9999


def older(run: Path) -> None:
    """Make the folder of a training look as an earlier version wrote it."""
    record = json.loads((run / RECIPE).read_text())
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
    (run / RECIPE).write_text(json.dumps(record))
    lines = [{key: value for key, value in line.items() if key != "epochs"} for line in read_log(run / LOG)]
    (run / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_training_of_an_earlier_version_goes_on(
    directories: Directories, made: Path, tmp_path: Path, run: Run
) -> None:
    """By its own recipe and without held-out documents, by either command; complete ones are read, too."""
    out, rates = tmp_path / "run", ("--optimizer", "adamw", "--learning-rate", 0.01, "--warmup", 0.0025)
    assert run(*train(directories, made, out, *rates, "--decay", 1))[0] == 0
    older(out)
    before = json.loads((out / RECIPE).read_text())["recipe"]
    code, said = run("train", "--out", out, "--resume")
    assert code == 0, said
    code, said = run(*train(directories, made, out, "--steps", 5))
    assert code == 0, said
    code, said = run("train", "--out", out, "--resume", "--steps", 6)
    assert code == 0, said
    assert json.loads((out / RECIPE).read_text())["recipe"] == before | {"steps": 6}
    assert not any("held_out" in line for line in read_log(out / LOG))
    code, said = run(*train(directories, made, out, "--steps", 6, "--held-out", 0.4))
    assert (code, "was begun with --held-out 0.0 (now 0.4)" in said) == (2, True)


def test_the_answers_to_evaluate_are_held_out(
    directories: Directories,
    made: Path,
    taught: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Without documents kept back, though the data hold what the target says; the drafter that runs has it inside."""
    others = tmp_path / "others.jsonl"
    others.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in ([8, 8, 8], [30, 40])))
    evaluation = ("--evaluate-every", 0, "-k", 3, "--steps", 2, "--evaluate", others)

    def said(code: int, data: Path, out: Path, *more: object) -> str:
        assert main([*map(str, train(directories, data, out, *evaluation, *more))]) == code
        return capsys.readouterr().err

    words = said(0, taught, tmp_path / "run")
    assert "held out: the answers to --evaluate; the step that is best on them" in words
    assert "--evaluate prompts are in the data, too" not in words
    assert [line["step"] for line in read_log(tmp_path / "run" / LOG) if "held_out" in line] == [2]
    assert json.loads((tmp_path / "run" / RECIPE).read_text())["data"]["held_out"] == 0
    no_step = request.getfixturevalue("no_step")
    for name, more in (("on", ()), ("off", ("--held-out", 0))):
        words = said(2, made, tmp_path / name, *more)
        assert no_step in words
        assert ("held out: the answers to --evaluate; the step that is best on them" in words) == (name == "on")
        assert "--evaluate prompts are in the data, too" not in words


def test_a_mask_token_in_the_data_that_nobody_chose_is_a_warning(
    directories: Directories, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_step: str
) -> None:
    """That of --init, and where no token is free the rarest."""
    from drafter.train.shards import Document, open_folder, write_shard

    _, config = load_drafter(directories.drafter)
    rarest, width = 7, 64
    everything = [token for token in range(VOCAB_SIZE) for _ in range(1 + (token != rarest))]
    for name, ids, more, says in (
        ("init", [5, config.mask_token_id, 9, 9], ("--init", directories.drafter), "1 of the data's 64 tokens"),
        ("full", everything, (), "it is the rarest token, and none is free"),
    ):
        open_folder(tmp_path / name, {})
        rows = np.array([*ids, *[9] * (-len(ids) % width)], np.int32).reshape(-1, width)
        write_shard(tmp_path / name, 0, [Document(row, np.arange(width) > 1) for row in rows])
        shape = ("--width", width, "--depth", 3, "--rows", 1, "--steps", 1, *more)
        new = () if more else ("--taps", "0,1,2", "--layers", 1, "--mlp-width", 16)
        given = ("train", "--target", directories.target, "--data", tmp_path / name, "--out", tmp_path / f"run_{name}")
        assert main([*map(str, (*given, *shape, *new))]) == 2
        said = capsys.readouterr().err
        assert no_step in said
        assert f"the mask token {config.mask_token_id if more else rarest} is in use: " in said
        assert says in said


def test_documents_are_held_out_and_the_best_step_is_the_drafter(
    directories: Directories,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After Ctrl-C, too: it goes on with the same documents, and ends with the same bits."""
    monkeypatch.setattr("peagle.workflows.training.LEAST_BETWEEN", 1)
    out, again = tmp_path / "run", tmp_path / "again"
    more = ("--held-out", 0.4, "--steps", 6, "--learning-rate", 0.5)
    assert main([*map(str, train(directories, made, out, *more))]) == 0
    said = capsys.readouterr().err
    assert "held out: 2 of the 5 documents; the step that is best on them is kept (--held-out 0: the last" in said
    assert "training steps 1 to 6, 4.0 epochs in all" in said
    assert "step 6 of 6, 4.0 epochs: loss" in said
    log = list(read_log(out / LOG))
    assert [line["step"] for line in log if "held_out" in line] == [1, 2, 3, 4, 5, 6]
    best = (best_held_out(log) or {})["step"]
    assert best < 6, log  # at so high a rate
    assert f"drafter      {out / 'drafter'} | step {best} of 6, the best on held-out documents" in said
    assert [line["epochs"] for line in log if "loss" in line][-1] == [4.0]  # 6 steps of 2 rows, of 3
    record = json.loads((out / RECIPE).read_text())
    assert (record["data"]["documents"], record["data"]["held_out"]) == (5, 0.4)
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, Batches, "at", 9)
        assert run(*train(directories, made, again, *more))[0] == 130
    assert run("train", "--out", again, "--resume")[0] == 0
    assert list(read_log(again / LOG))[-1] == list(read_log(out / LOG))[-1]
    one, other = (load_file(each / "drafter" / "model.safetensors") for each in (out, again))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    code, said = run(*train(directories, made, out, "--steps", 6, "--learning-rate", 0.5, "--held-out", 0))
    assert code == 2
    assert "was begun with --held-out 0.4 (now 0.0)" in said


def test_a_curve_may_have_one_point(tmp_path: Path, curves: Callable[..., str]) -> None:
    for log in ([logged(1, 0.5)], [logged(1, 0.5), held_out_line(1, 0.4)]):
        assert curves(log, tmp_path) == str(tmp_path / "curve.svg")


def test_every_line_of_a_curve_is_readable_on_a_dark_page(tmp_path: Path, curves: Callable[..., str]) -> None:
    depths = 9
    log = [{"step": step, "loss": 3.0 - step, "hits_by_depth": [0.1 * step] * depths} for step in (1, 2)]
    lengths = {"acceptance_length": 2.0, "acceptance_length_without_loops": 1.5}
    log.append({"step": 2, "evaluation": {**lengths, "num_speculative_tokens": 7}})
    rules, _, body = Path(curves(log, tmp_path)).read_text(encoding="utf-8").partition("</style>")
    assert "@media (prefers-color-scheme: dark)" in rules
    lines = set(re.findall(r"fill: none; stroke: (#\w{6}); stroke-width: 1.5", body))
    assert len(lines) == depths
    on_dark = [found for color in lines for found in re.findall(rf"stroke: {color}.. {{ stroke: (#\w{{6}})", rules)]
    assert len(set(on_dark)) == depths


def test_a_deadline_begins_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("peagle.workflows.training.time", SimpleNamespace(monotonic=lambda: now[0]))
    deadline, unending = Deadline(1.0), Deadline(None)
    now[0] += 500  # loading
    seen = [deadline.over()]
    now[0] += 59  # compiling, evaluations
    seen += [deadline.over()]
    now[0] += 1
    seen += [deadline.over()]
    assert seen == [False, False, True]
    assert not unending.over()
    now[0] += 1e9
    assert not unending.over()


def test_evaluations_take_their_part_of_the_minutes() -> None:
    """Nine tenths of ten minutes: steps of one second, an evaluation of 20 s at the end and after each 100."""
    assert planned_steps(10.0, 1.0, 0.0, 0) == 540
    assert planned_steps(10.0, 1.0, 20.0, 0) == 520
    assert planned_steps(10.0, 1.0, 20.0, 100) == 440  # and five evaluations
    assert planned_steps(10.0, 1.0, 0.0, 0, 2.0) == 500  # and twenty losses on held-out documents
    assert planned_steps(1.0, 1.0, 0.0, 0, 2.0) == 44  # and five, one every ten steps
    assert planned_steps(0.1, 1.0, 20.0, 100) == 0


def test_resume_needs_nothing_else_and_takes_more(
    directories: Directories,
    made: Path,
    trained: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, Batches, "at", 2)
        assert run(*train(directories, made, out))[0] == 130
    assert run("train", "--out", out, "--resume")[0] == 0
    one, other = (load_file(each / "drafter" / "model.safetensors") for each in (out, trained))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert run("train", "--out", out, "--resume", "--steps", 6)[0] == 0
    assert json.loads((out / RECIPE).read_text())["recipe"]["steps"] == 6
    monkeypatch.setattr("peagle.cli.training.seconds_per_step", lambda *_: 30.0)
    assert run("train", "--out", out, "--resume", "--minutes", 2)[0] == 0  # .9 of it: three steps
    assert json.loads((out / RECIPE).read_text())["recipe"]["steps"] == 9
    code, said = run("train", "--out", out, "--resume", "--seed", 5)
    assert code == 2
    assert "--resume takes its options from the recipe in" in said
    assert "leave out --seed" in said
    code, said = run("train", "--out", tmp_path / "none", "--resume")
    assert code == 2
    assert "holds no training" in said
    record = json.loads((out / RECIPE).read_text())
    del record["command"]
    (out / RECIPE).write_text(json.dumps(record))
    assert "was begun by an older version" in run("train", "--out", out, "--resume")[1]


def logged(step: int, right: float, loss: float = 3.0, epochs: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "hits_by_depth": [right, 0.1], "epochs": [epochs]}


def held_out_line(step: int, right: float, loss: float = 3.0) -> dict[str, Any]:
    figures = {"loss": loss, "hits_by_depth": [right, 0.1], "score": 1 + 1.1 * right, "documents": "a"}
    return {"step": step, "held_out": figures}


def evaluated(step: int, length: float) -> dict[str, Any]:
    return {"step": step, "evaluation": {"acceptance_length": length}}


@pytest.mark.parametrize(
    ("log", "init", "says"),
    [
        ([], False, None),
        ([logged(10, 0.5), evaluated(10, 2.0)], False, None),
        ([logged(10, 0.95)], False, None),  # 1 + .95 + .95 * .1
        ([logged(10, 0.02)], False, "the first draft is right in .02 of the places"),
        ([logged(10, 0.95), held_out_line(10, 0.3)], False, "the first draft is right in .30 of the places"),
        ([logged(10, 0.95), evaluated(10, 1.25)], False, "the acceptance length is 1.25, and drafting pays little"),
        (
            [logged(10, 0.2), evaluated(10, 1.25)],
            False,
            "next try more minutes (--out RUN --resume --minutes N), more prompts (peagle data), --init with a trained "
            "drafter, peagle parity --drafter RUN/drafter, which looks for other causes",
        ),
        ([logged(10, 0.2, epochs=5.0), evaluated(10, 1.25)], True, "more prompts (peagle data), more minutes ("),
        ([logged(10, 0.2, epochs=5.0), evaluated(10, 1.25)], True, "N), peagle parity"),
        (
            [logged(10, 0.6, epochs=8.0), held_out_line(10, 0.19), evaluated(10, 1.25)],
            True,
            "next try more prompts (peagle data), peagle parity",  # the curves part
        ),
    ],
)
def test_a_weak_drafter_is_a_warning_with_what_to_try_next(log: Any, init: bool, says: str | None) -> None:
    told = weak_drafter(log, Path("RUN"), init=init)
    assert told is None if says is None else says in (told or "")


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ([logged(10, 0.2)], None),
        ([logged(10, 0.2), held_out_line(10, 0.2)], None),
        ([logged(10, 0.2), held_out_line(10, 0.2), logged(20, 0.3, 2.5), held_out_line(20, 0.25, 2.8)], None),
        # right more often in training
        (
            [logged(10, 0.57, epochs=8.0), held_out_line(10, 0.19)],
            "after 8.0 epochs, the first draft is right in .57 of the places there and in .19 of held-out ones",
        ),
        # the held-out loss rises
        (
            [logged(10, 0.2), held_out_line(10, 0.2), logged(20, 0.3, 2.5), held_out_line(20, 0.2, 3.2)],
            "at step 20, after 1.0 epochs, the first draft is right in .30 of the places there and in .20 of held-out "
            "ones (best step: 10)",
        ),
        # both losses rise: no training by heart
        ([logged(10, 0.2), held_out_line(10, 0.2), logged(20, 0.2, 3.4), held_out_line(20, 0.2, 3.2)], None),
    ],
)
def test_curves_that_part_are_a_warning(log: Any, says: str | None) -> None:
    told = parted_curves(log)
    assert told is None if says is None else says in (told or "")


def test_export_takes_the_target_from_the_training(
    directories: Directories, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    params, config = load_drafter(trained / "drafter")
    save_drafter(tmp_path / "run" / "drafter", params, config.with_window(9))
    out = tmp_path / "theirs"
    assert main(["export", str(tmp_path / "run" / "drafter"), "--out", str(out), "--dialect", "speculators"]) == 0
    line = f"verifier     {directories.target}, in config.json and README.md; other machines need a name: --verifier"
    assert line in capsys.readouterr().err
    written = json.loads((out / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == str(directories.target)
    assert written["transformer_layer_config"]["sliding_window"] == 9


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
def test_a_target_is_written_as_others_find_it(
    directories: Directories, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    """By its whole path, whatever was typed, in training as in export, and wherever they run."""
    (tmp_path / "target").symlink_to(directories.target)
    monkeypatch.chdir(tmp_path)
    here = dataclasses.replace(directories, target=Path("target"))
    more = ("--steps", 1, "--heads", 4, "--dialect", dialect, "--quiet")
    assert main([*map(str, train(here, made, Path("run"), *more))]) == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["export", "../run/drafter", "--out", "theirs", "--dialect", dialect, "--quiet"]) == 0
    for folder in (tmp_path / "run" / "drafter", elsewhere / "theirs"):
        card = (folder / "README.md").read_text()
        assert f'peagle speculate --target {directories.target} --drafter . "..."' in card
        if dialect == "vllm":
            assert f"`vllm serve {directories.target} --speculative-config" in card
            assert '"model": "."' in card
        else:
            assert "`vllm serve .`" in card
            config = json.loads((folder / "config.json").read_text())
            assert config["speculators_config"]["verifier"]["name_or_path"] == str(directories.target)


def test_a_training_whose_target_is_gone_needs_a_verifier(trained: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(trained, tmp_path / "run")
    record = json.loads((tmp_path / "run" / RECIPE).read_text())
    record["command"]["target"] = "gone/with/the/wind"
    (tmp_path / "run" / RECIPE).write_text(json.dumps(record))
    arguments = ("export", tmp_path / "run" / "drafter", "--out", tmp_path / "theirs", "--dialect", "speculators")
    code, said = run(*arguments)
    assert code == 2
    assert (
        "needs --verifier, the target: it loads no drafter without, and gone/with/the/wind, the training's, is" in said
    )
    assert run(*arguments, "--verifier", "some/target")[0] == 0


def test_the_folder_of_a_training_is_its_drafter(
    directories: Directories, made: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every command that takes a drafter, with one line that names it."""
    line = f"{trained} is a folder of peagle train: the drafter is {trained / 'drafter'}"
    pair = ("--target", directories.target, "--drafter", trained)
    prompt = tmp_path / "prompts.jsonl"
    prompt.write_text(json.dumps({"prompt_ids": [17, 4, 90]}) + "\n")
    sweep = ("sweep", "--out", tmp_path / "sweep", "--prompts", prompt, "-n", 4, "-k", "2,auto", "--repeats", 1)
    writing = ("--write-widths", tmp_path / "copy")
    shutil.copytree(trained, tmp_path / "copy")
    learning = ("train", "--target", directories.target, "--data", made, "--out", tmp_path / "run", "--steps", 1)
    for command in (
        ("speculate", "1 + 2", "-n", 4, "-k", 2, "--raw-prompt", "--quiet", *pair),
        ("info", trained),
        ("info", directories.target, trained),
        ("export", trained, "--out", tmp_path / "theirs", "--dialect", "speculators"),
        (*learning, "--init", trained, "--width", 32, "--depth", 3, "--rows", 2),
        (*sweep, *writing, *pair),
    ):
        assert main([str(word) for word in command]) == 0, command
        assert capsys.readouterr().err.count(line) == 1, command
    assert not (tmp_path / "copy" / "speculation.json").exists()
    assert (tmp_path / "copy" / "drafter" / "speculation.json").exists()
    with pytest.warns(InputWarning, match="is a folder of peagle train"):
        assert peagle.loading.load(directories.target, trained).drafter is not None


def test_a_training_without_a_drafter_is_told_from_a_checkpoint(
    directories: Directories, trained: Path, tmp_path: Path, run: Run
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "drafter")
    pair = ("--target", directories.target, "--drafter", tmp_path / "run")
    for command in (("speculate", "1 + 2", *pair), ("export", tmp_path / "run", "--out", tmp_path / "theirs")):
        code, said = run(*command)
        assert code == 2
        assert f"is a folder of peagle train without a drafter yet; peagle train --out {tmp_path / 'run'} --res" in said


def test_an_acceptance_that_nobody_knows_is_a_dash() -> None:
    """Every answer one token: no step drafted."""
    found = {"acceptance_length": None, "acceptance_length_without_loops": None, "num_outputs": 3}
    line = {"step": 4, "evaluation": found}
    assert _shown(line) == "step 4: acceptance length -, without loops -, of 3 held-out prompts"
