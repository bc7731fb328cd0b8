"""`peagle data`: the target's own answers, which continue where they were cut off."""

import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import peagle.workflows.answers
from drafter.train.shards import Document, read_part, read_shards
from peagle.pair import Pair
from peagle.text.prompts import chat_messages
from peagle.text.tokenizer import detokenize, load_tokenizer
from peagle.workflows.dataset import Unfinished, lengths_in_words, passes, prompts_per_shard, rows_of_pass
from tests.peagle.workflows.training.conftest import PROMPTS, Lab, write_prompts
from tests.support.pairs import STOP, TEMPLATE, press_ctrl_c_at

pytestmark = pytest.mark.compile


def test_data_are_the_targets_own_answers(data: Path, pair: Pair) -> None:
    documents = read_shards(data)
    assert len(list(data.glob("shard_*"))) == 3
    for ids, document in zip(PROMPTS, documents, strict=True):
        output_ids = pair.generate(ids, num_speculative_tokens=0, max_new_tokens=20).output_ids
        assert document.token_ids.tolist() == [*ids, *output_ids]
        assert document.trained.tolist() == [False] * len(ids) + [True] * len(output_ids)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a shard for each prompt."""
    monkeypatch.setattr("peagle.workflows.dataset.SHARD_PROMPTS", 1)


def test_data_go_on_where_they_were_cut_off_and_are_the_same(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"data --target {lab.target} --prompt-file {lab.prompts} --slots 2 --out"
    monkeypatch.setattr("peagle.workflows.dataset.SHARD_PROMPTS", 2)
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
    others = "--temperature 0.0 (now 1.0), --seed 0 (now 3)"
    for more, says in (
        ("--temperature 1", "was made with --temperature 0.0 (now 1.0); expected the same"),
        ("--temperature 1 --seed 3", others),
    ):
        assert says in lab.run(2, command, out, "-n 20", more)


TURNS = [{"turns": ["1 + 2", "and?"]}, {"turns": ["café"]}, {"turns": ["def mean(values):", "why?"]}]


@pytest.fixture
def chats(lab: Lab) -> str:
    """The command that answers five turns in three conversations into one shard, but its --out."""
    path = lab.root / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TURNS))
    return f"data --target {lab.target} --prompt-file {path} -n 6 --slots 1 --out"


def same_documents(one: Path, other: Path) -> None:
    for before, after in zip(read_shards(one), read_shards(other), strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert after.trained.tolist() == before.trained.tolist()
        assert after.conversation == before.conversation


@pytest.mark.parametrize(  # among the first turns, and among the second ones
    ("number", "code", "call"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 4)], ids=["int", "term"]
)
def test_an_unfinished_shard_keeps_its_answers(
    lab: Lab, chats: str, monkeypatch: pytest.MonkeyPatch, number: int, code: int, call: int
) -> None:
    out, whole = lab.root / "data", lab.root / "whole"
    asked: list[int] = []
    submit = peagle.workflows.answers.submit
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, Unfinished, "add", call, number)
        said = lab.run(code, chats, out)
    assert f"interrupted: 0 of 1 shards are in {out}, and {call} answers of the next; the same command goes on" in said
    assert "was made with -n 6 (now 7)" in lab.run(2, chats.replace("-n 6", "-n 7"), out)
    with monkeypatch.context() as patch:
        patch.setattr(
            peagle.workflows.answers,
            "submit",
            lambda engine, new, *rest: asked.extend(new) or submit(engine, new, *rest),
        )
        lab.run(0, chats, out)
    assert len(asked) == 5 - call
    assert not list(out.glob("part_*"))
    lab.run(0, chats, whole)
    same_documents(whole, out)
    assert [document.conversation for document in read_shards(out)] == [0, 0, 1, 2, 2]


def test_an_unfinished_shard_keeps_what_the_teacher_computed(
    lab: Lab, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.workflows.dataset.PASS_DOCUMENTS", 2)
    teacher, whole = "--hidden --aux-layer-ids 0,1,2", lab.root / "whole"
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, peagle.workflows.dataset, "cut_prompt", 5 + 3)  # the command counts all tokens first
        assert "and 5 answers of the next" in lab.run(130, chats, lab.out, teacher)
    assert len(list(lab.out.glob("taught_*"))) == 1
    read: list[int] = []
    with monkeypatch.context() as patch:
        cut = peagle.workflows.dataset.cut_prompt
        patch.setattr(peagle.workflows.dataset, "cut_prompt", lambda *given: read.append(1) or cut(*given))
        lab.run(0, chats, lab.out, teacher)
    assert len(read) == 5 + 1
    assert not list(lab.out.glob("taught_*"))
    lab.run(0, chats, whole, teacher)
    same_documents(whole, lab.out)
    for one, other in zip(read_shards(whole), read_shards(lab.out), strict=True):
        for name in one.teacher:
            np.testing.assert_allclose(
                *(text.teacher[name].astype(float) for text in (one, other)), rtol=1e-2, atol=1e-2
            )


def test_a_shard_that_cannot_be_written_keeps_its_answers(
    lab: Lab, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("peagle.workflows.dataset.write_shard", full)
        assert "shard_00000.safetensors cannot be written: No space left" in lab.run(2, chats, lab.out)
    with monkeypatch.context() as patch:
        patch.setattr(peagle.workflows.answers, "submit", lambda *_: pytest.fail("it is answered already"))
        assert "5 documents" in lab.run(0, chats, lab.out)


def test_answers_are_saved_from_time_to_time(lab: Lab, chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process leaves."""
    monkeypatch.setattr("peagle.workflows.dataset.SAVE_S", 0)
    sizes: list[int] = []
    add = Unfinished.add

    def added(self: Unfinished, document: Document) -> None:
        add(self, document)
        sizes.append(len(read_part(lab.out, 0)))

    monkeypatch.setattr(Unfinished, "add", added)
    lab.run(0, chats, lab.out)
    assert sizes == [1, 2, 3, 4, 5]


def test_a_shard_without_room_is_refused_before_the_target_reads_it(
    lab: Lab, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr("peagle.workflows.dataset.with_teacher", lambda *_: pytest.fail("it reads"))
    said = lab.run(2, chats, lab.out, "--hidden --aux-layer-ids 0,1,2 --context 384")
    assert f"3 documents of up to 384 tokens take up to 747.6 kB in {lab.out}, which has room for 1.0 kB" in said
    assert re.search(rf"a shard of \d+ tokens takes [\d.]+ kB in {lab.out}, which has room for 1.0 kB; free some", said)
    assert len(read_part(lab.out, 0)) == 5


def test_answers_that_are_cut_and_turns_without_room_are_counted(lab: Lab) -> None:
    command = f"data --target {lab.target} --prompt-file {lab.prompts} --slots 2"
    said = lab.run(0, command, "--context 6 --out", lab.root / "short")
    assert "1 of 4 answers end at a stop token, 3 at --context 6" in said
    assert "3 of 4 answers are cut at --context 6, and a drafter learns no ends from them; a larger --context" in said
    assert "1 of 5 turns have no answer in the data, the first: " in said
    assert "3 of 4 answers are cut at -n 1, and" in lab.run(
        0, command, "--context 6 -n 1 --quiet --out", lab.root / "n"
    )
    said = lab.run(0, command, "--context 6 -n 4 --out", lab.root / "both")
    assert re.search(r"\d of 4 answers end at a stop token, \d at -n 4, \d at --context 6", said)
    longest = max(len(document.token_ids) for document in read_shards(lab.root / "short"))
    assert longest == 6
    command = command.replace(str(lab.prompts), str(write_prompts(lab.root / "long.jsonl", *PROMPTS[:4])))
    assert "none of the prompts can be answered, the first: " in lab.run(2, command, "--context 2 --out", lab.out)
    lab.run(0, command, "--context 6 --out", lab.out)  # the folder holds nothing


@pytest.mark.usefixtures("small_shards")
def test_data_go_on_with_the_same_chat_template_alone(lab: Lab, answering: Path) -> None:
    command = f"data --target {answering} --prompt-file {lab.prompts} --context 6 -n 1 --out"
    lab.run(0, command, lab.out)
    template = answering / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert "was made with --target" in lab.run(2, command, lab.out)


@pytest.mark.usefixtures("small_shards")
def test_a_shard_without_an_answer_stops_no_other(lab: Lab) -> None:
    command = f"data --target {lab.target} --prompt-file {lab.prompts} --context 6 -n 1 --out"
    lab.run(0, command, lab.out)
    assert len(read_shards(lab.out)) == 4
    assert "is complete: 5 shards" in lab.run(0, command, lab.out)


@pytest.fixture
def answering(lab: Lab) -> Path:
    """A copy of the target whose chat template ends answers as the target does."""
    target, ends = lab.root / "target", '{{ message.content }}{{ "<|return|>" if loop.last else "<|end|>" }}'
    begins = "<|start|>assistant<|channel|>final<|message|>"
    shutil.copytree(lab.target, target)
    shown, _, beginning = TEMPLATE.replace(f"{begins}{{{{ message.content }}}}<|end|>", begins + ends).rpartition(
        begins
    )
    template = f"{shown}{{%- if add_generation_prompt -%}}{begins}{beginning}{{%- endif -%}}"
    (target / "chat_template.jinja").write_text(template)
    return target


CHAT = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}]


def test_recorded_answers_are_taken_as_they_are(
    lab: Lab, answering: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in (CHAT, [*CHAT, *CHAT], CHAT[:1], [*CHAT, CHAT[0]]))
    )
    command = f"data --target {answering} --prompt-file {path} --answers recorded --out"
    with monkeypatch.context() as patch:
        patch.setattr("peagle.cli.models.load_pair", lambda *_: pytest.fail("it loads the target"))
        said = lab.run(0, command, lab.root / "data", "--temperature 1 -n 5")
        assert "none of the prompts can be answered, the first: " in lab.run(
            2, command.replace(str(answering), str(lab.target)), lab.root / "other"
        )
    assert "1 of 3 prompts repeat one before" in said
    assert "line 3 has no recorded answer" in said
    assert "-n, --temperature: no effect with --answers recorded" in said
    assert "4 documents" in said
    assert "4 of 4 answers end at a stop token\n" in said
    assert "are cut" not in said
    lab.run(0, command, lab.root / "data")  # it is complete, without what had no effect
    tokenizer = load_tokenizer(answering)
    assert tokenizer is not None
    documents = read_shards(lab.root / "data")
    assert len({document.conversation for document in documents}) == 1  # each begins with the first one
    for document, before in zip(documents, (CHAT[:1], CHAT[:1], [*CHAT, *CHAT[:1]], CHAT[:1]), strict=True):
        assert tuple(document.prompt) == tokenizer.encode_chat(before)
        assert detokenize(tokenizer, document.token_ids[document.trained].tolist()) == "3<|return|>"
    lab.run(0, command, lab.root / "taught", "--hidden --aux-layer-ids 0,1,2")
    assert {document.teacher["aux_hidden"].shape[1] for document in read_shards(lab.root / "taught")} == {192}
    said = lab.run(0, command.replace("--answers recorded", ""), lab.out, "-n 2")
    assert "recorded answers that are left out: 2; the target answers anew, and --answers recorded takes" in said


def test_rows_of_speculators_are_data(lab: Lab, tmp_path: Path) -> None:
    rows = [
        {"id": "a_gen0", "primary_id": "a", "input_ids": [9, 8, 7, STOP], "loss_mask": [0, 0, 1, 1]},
        {"id": "b_gen0", "primary_id": "b", "input_ids": [5, 6], "loss_mask": [0, 1]},
        {"id": "a_gen1", "primary_id": "a", "input_ids": [9, 8, 7, 6, 4, STOP], "loss_mask": [0, 0, 0, 0, 1, 1]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "metadata": {}, "debug": {}}) + "\n" for row in rows))
    said = lab.run(0, f"data --target {lab.target} --prompt-file {path} --answers recorded --out {lab.out}")
    assert "no effect" not in said
    assert "2 of 3 answers end at a stop token, 1 at another token" in said
    assert "1 of 3 recorded answers do not end at a stop token, and a drafter learns no ends from them" in said
    documents = read_shards(lab.out)
    assert [document.token_ids.tolist() for document in documents] == [row["input_ids"] for row in rows]
    assert [document.trained.astype(int).tolist() for document in documents] == [row["loss_mask"] for row in rows]
    assert [document.conversation for document in documents] == [0, 1, 0]


def test_the_end_of_a_prompt_is_kept_with_what_the_target_computed_of_all_of_it(lab: Lab) -> None:
    command = f"data --target {lab.target} --prompt-file {lab.prompts} -n 4 --aux-layer-ids 0,1,2 --hidden"
    out, whole = lab.root / "data", lab.root / "whole"
    lab.run(0, command, "--out", whole)
    lab.run(0, command, "--keep-prompt 2 --out", out)
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


TAUGHT = "--keep-prompt 2 --hidden --aux-layer-ids 0,1,2"


@pytest.mark.usefixtures("small_shards")
def test_turns_that_are_rows_of_their_own_stay_together_when_prompts_are_cut(lab: Lab) -> None:
    rows = [[17, 4, 90, 8], [17, 4, 90, 8, 5, 31, 7, 6], [17, 4, 90, 80], [9, 8, 7, 6]]
    path = write_prompts(lab.root / "rows.jsonl", *rows)
    lab.run(0, f"data --target {lab.target} --prompt-file {path} -n 2 --out", lab.out, TAUGHT)
    first, later, *others = (document.conversation for document in read_shards(lab.out))
    assert first == later
    assert len({first, *others}) == 3


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


def test_a_shard_of_large_documents_has_few_prompts() -> None:
    assert [prompts_per_shard(size) for size in (10, 10_000_000, 10**12)] == [512, 200, 1]


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
        ("--keep-prompt 2", "give --hidden, too"),
        ("--aux-layer-ids 0,1,2", "give --hidden, too"),
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


def test_recorded_answers_go_on_after_an_interruption(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "rows.jsonl", lab.root / "whole"
    rows = [{"input_ids": [9, 8, token], "loss_mask": [0, 0, 1]} for token in range(10, 15)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"data --target {lab.target} --prompt-file {path} --answers recorded --hidden --aux-layer-ids 0,1,2 --out"
    for where, name, call in ((Unfinished, "add", 2), (peagle.workflows.dataset, "cut_prompt", 1)):
        with monkeypatch.context() as patch:
            patch.setattr("peagle.workflows.dataset.PASS_DOCUMENTS", 2)
            press_ctrl_c_at(patch, where, name, call)
            lab.run(130, command, lab.out)
    assert "; 5 of the documents are of a run before" in lab.run(0, command, lab.out)
    lab.run(0, command, whole)
    same_documents(whole, lab.out)
