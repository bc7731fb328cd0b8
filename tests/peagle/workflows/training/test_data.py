"""`peagle data`: the target's own answers, which continue where they were cut off."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import peagle.workflows.answers
from drafter.train.shards import read_shards
from peagle.config import SamplingParams
from peagle.pair import Pair
from peagle.text.prompts import Rendering, chat_messages, from_ids
from peagle.text.tokenizer import detokenize
from peagle.workflows.answers import AnswerOptions, answer
from peagle.workflows.dataset import lengths_in_words, passes, rows_of_pass
from tests.peagle.workflows.training.conftest import PROMPTS, Lab
from tests.support.pairs import STOP, VOCAB_SIZE, press_ctrl_c_at


def test_data_are_the_targets_own_answers(data: Path, pair: Pair) -> None:
    documents = read_shards(data)
    assert len(list(data.glob("shard_*"))) == 3
    for ids, document in zip(PROMPTS, documents, strict=True):
        output_ids = pair.generate(ids, num_speculative_tokens=0, max_new_tokens=20).output_ids
        assert document.token_ids.tolist() == [*ids, *output_ids]
        assert document.trained.tolist() == [False] * len(ids) + [True] * len(output_ids)


def test_answers_are_counted_when_they_end_not_when_all_have_ended(pair: Pair) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    conversations = [from_ids(ids) for ids in PROMPTS[:2]]
    options = AnswerOptions(Rendering(), SamplingParams(), max_new_tokens=8, context=64, slots=1)
    with pytest.raises(Stop):  # before the first answer is there
        next(answer(pair, conversations, options, 0, pytest.fail, stop))
    ended: list[bool] = []
    assert len(list(answer(pair, conversations, options, 0, pytest.fail, lambda: ended.append(True)))) == 2
    assert len(ended) == 2


def test_data_go_on_where_they_were_cut_off_and_are_the_same(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"data --target {lab.target} --prompt-file {lab.prompts} --shard-prompts 2 --slots 2 --out"
    out, new = lab.root / "copy", lab.root / "new"
    shutil.copytree(lab.data, out)
    (out / "shard_00001.safetensors").unlink()
    before = (out / "shard_00002.safetensors").stat().st_mtime_ns
    for folder, line in ((out, f"interrupted: 2 of 3 shards are in {out}; the same command goes on"), (new, "")):
        with monkeypatch.context() as patch:
            press_ctrl_c_at(patch, peagle.workflows.answers, "submit")
            assert line in lab.run(130, command, folder, "-n 20")
    assert not (out / "shard_00001.safetensors").exists()
    assert "-n 20 (now 10)" not in lab.run(0, command, new, "-n 10"), "begun without a shard, it is begun anew"
    assert json.loads((new / "manifest.json").read_text())["max_new_tokens"] == 10
    left_out = f"1 row without a usable prompt, the first: {lab.prompts} line {len(PROMPTS) + 1}"
    assert f"\nleft out     {left_out}" in lab.run(0, command, out, "-n 20")
    assert (out / "shard_00002.safetensors").stat().st_mtime_ns == before
    for one, other in zip(read_shards(lab.data), read_shards(out), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
    others = "--shard-prompts 2 (now 3), --temperature 0.0 (now 1.0), --seed 0 (now 3)"
    for more, says in (
        ("--temperature 1", "was made with --temperature 0.0 (now 1.0); expected the same"),
        ("--temperature 1 --seed 3 --shard-prompts 3", others),
    ):
        assert says in lab.run(2, command, out, "-n 20", more)


def test_the_end_of_a_prompt_is_kept_with_what_the_target_computed_of_all_of_it(lab: Lab) -> None:
    command = f"data --target {lab.target} --prompt-file {lab.prompts} -n 4 --taps 0,1,2 --hidden"
    out, whole = lab.root / "data", lab.root / "whole"
    lab.run(0, command, "--top 2 --out", whole)
    lab.run(0, command, "--top 2 --keep-prompt 2 --out", out)
    for complete, kept in zip(read_shards(whole), read_shards(out), strict=True):
        first = max(0, int(np.argmax(complete.trained)) - 2)
        np.testing.assert_array_equal(kept.token_ids, complete.token_ids[first:])
        np.testing.assert_array_equal(kept.trained, complete.trained[first:])
        assert kept.teacher.keys() == complete.teacher.keys()
        for name in kept.teacher:
            np.testing.assert_array_equal(kept.teacher[name], complete.teacher[name][first:])
    for more, says in (
        ("", "holds the last 2 tokens of a prompt, the drafter reads all of them; give a smaller"),
        ("--drafter-window 5", "the drafter reads the last 8 with its windows and --depth 3"),
    ):
        assert says in lab.train("--width 16", more, code=2, data=out)
    without_top = lab.run(2, command, "--keep-prompt 2 --out", lab.root / "other")
    assert "give --hidden and --top, too, or leave it out" in without_top


def test_the_teacher_reads_few_long_documents_at_a_time_and_each_once() -> None:
    sizes = [100, 5000, 90, 700, 2047, *[300] * 40]
    groups = list(passes(sizes))
    assert sorted(index for group, _ in groups for index in group) == list(range(len(sizes)))
    for group, width in groups:
        assert max(sizes[index] for index in group) <= width
        assert len(group) <= rows_of_pass(width)
        assert rows_of_pass(width) * width <= 32 * 512
    assert [width for _, width in groups][-1] == 5120
    assert lengths_in_words(sizes) == "90 to 5,000 tokens; 42 up to 512, 1 up to 1,024, 1 up to 2,048, 1 up to 8,192"


def test_a_turn_is_asked_with_the_answers_before_it(lab: Lab, pair: Pair) -> None:
    path, out = lab.root / "prompts.jsonl", lab.root / "data"
    path.write_text(json.dumps({"turns": ["1 + 2", "and?"]}) + "\n")
    lab.run(0, f"data --target {lab.target} --prompt-file {path} --out {out} -n 6")
    first, second = read_shards(out)
    answered = [token for token in first.token_ids[first.trained].tolist() if token != STOP]
    assert pair.tokenizer is not None
    messages = chat_messages(["1 + 2", "and?"], [detokenize(pair.tokenizer, answered)], None)
    assert tuple(second.token_ids[~second.trained].tolist()) == pair.tokenizer.encode_chat(messages)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("-n 0", "-n is 0; expected 1 or more"),
        (f"--seed {2**64}", f"--seed is {2**64}; expected an integer of 64 bits"),
        ("--top 100000", f"--top is 100000; expected at most {VOCAB_SIZE}"),
        ("--taps 0,1,2", "give --hidden, too"),
        ("--strict", "is empty"),
    ],
)
def test_a_mistake_in_the_options_leaves_no_folder(lab: Lab, more: str, says: str) -> None:
    assert says in lab.run(2, f"data --target {lab.target} --prompt-file {lab.prompts} --out {lab.out}", more)
    assert not lab.out.exists()


def test_a_file_in_the_place_of_a_folder_is_one_line(lab: Lab) -> None:
    """In the place of --out, and of a folder above it."""
    file = lab.root / "file"
    file.write_text("mine")
    for out in (file, file / "data"):
        for command in (
            f"data --target {lab.target} --prompt-file {lab.prompts} -n 4 --out {out}",
            f"export demo --out {out}",
        ):
            assert str(file) in lab.run(2, command)
        assert str(file) in lab.train(code=2, out=out)
    assert file.read_text() == "mine"
