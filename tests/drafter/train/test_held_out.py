"""Which documents are kept back, and how they are packed to be measured."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from drafter.train.folder import best_held_out
from drafter.train.held_out import HeldOut, keep_back, rows_of_evaluation, score_of
from drafter.train.recipe import Recipe
from drafter.train.row_batches import DocumentSource, RowBatches, pack
from drafter.train.shards import ALONE, Document
from peagle.base.errors import InputError
from peagle.workflows.dataset import cut_prompt
from tests.support.trainers import with_room

RECIPE = with_room(Recipe(width=24, depth=3))


def document(*token_ids: int, prompt: int = 2, conversation: int = ALONE) -> Document:
    return Document(np.array(token_ids, np.int32), np.arange(len(token_ids)) >= prompt, conversation=conversation)


def split(documents: list[Document], frac: float, num_tokens: int, seed: int) -> tuple[list[Document], list[Document]]:
    (trained_and_held_out,) = keep_back([(documents, num_tokens)], frac, seed)
    return trained_and_held_out


def ids(documents: list[Document]) -> list[list[int]]:
    return [document.token_ids.tolist() for document in documents]


@pytest.mark.parametrize(
    ("number", "frac", "num_tokens", "held_out"),
    [
        (30, 0.1, 1000, 3),
        (30, 0.1, 8, 2),  # of four tokens each
        (30, 0.1, 1, 1),
        (29, 0.1, 1000, 2),
        (9, 0.1, 1000, 0),
        (30, 0.0, 1000, 0),
        (30, 0.5, 1000, 15),
    ],
)
def test_a_part_of_the_documents_is_kept_back(number: int, frac: float, num_tokens: int, held_out: int) -> None:
    """Every document once, in order; the same ones each time, others with another seed."""
    documents = [document(token, 50, 60, 70) for token in range(number)]
    trained, kept_back = split(documents, frac, num_tokens, seed=0)
    assert len(kept_back) == held_out
    assert sorted(ids(trained) + ids(kept_back)) == ids(documents)
    assert ids(trained) == sorted(ids(trained))
    assert ids(kept_back) == sorted(ids(kept_back))
    assert ids(split(documents, frac, num_tokens, seed=0)[1]) == ids(kept_back)
    if held_out == 15:
        assert ids(split(documents, frac, num_tokens, seed=1)[1]) != ids(kept_back)


def in_turns(number: int) -> list[Document]:
    """Three turns, each a document whose prompt repeats the turns before it; its teacher knows the number."""
    first = document(number, 50, 100 + number)
    second = document(*first.token_ids, 200 + number, 80, prompt=4)
    turns = first, second, document(*second.token_ids, 90, prompt=5)
    return [
        dataclasses.replace(turn, conversation=number, teacher={"number": np.full(len(turn.token_ids), number)})
        for turn in turns
    ]


@pytest.mark.parametrize(
    "arranged",
    [
        lambda turns: turns,
        lambda turns: sorted(turns, key=lambda turn: len(turn.token_ids)),  # all first turns, then all second ones
        lambda turns: [dataclasses.replace(turn, conversation=ALONE) for turn in turns],  # rows of their own in a file
        lambda turns: [cut_prompt(turn, 2) for turn in turns],  # without what the prompts have in common
    ],
)
def test_no_turn_of_a_held_out_conversation_is_trained_on(arranged: Any) -> None:
    turns = [turn for number in range(20) for turn in in_turns(number)]
    trained, kept_back = split(arranged(turns), 0.1, 1000, seed=0)
    assert len(kept_back) == 6
    assert len(trained) == 54
    numbers = [{int(turn.teacher["number"][0]) for turn in texts} for texts in (trained, kept_back)]
    assert numbers[0].isdisjoint(numbers[1])


def test_no_held_out_prompt_is_trained_on() -> None:
    """Thirty answers to ten prompts, of two folders with conversations of their own."""
    documents = [document(index % 10, 50, 60 + index, conversation=index) for index in range(30)]
    (trained, kept_back), (others, others_kept) = keep_back([(documents[:20], 1000), (documents[20:], 1000)], 0.3, 0)
    assert (len(trained), len(kept_back), len(others), len(others_kept)) == (14, 6, 7, 3)
    prompts = [{int(text.token_ids[0]) for text in texts} for texts in (trained + others, kept_back + others_kept)]
    assert prompts[0].isdisjoint(prompts[1])


@pytest.mark.parametrize("frac", [0.1, 0.5])
def test_a_part_of_prompts_of_another_keeps_some_to_train_on(frac: float) -> None:
    """Whichever are held out of the larger one."""
    for seed in range(30):
        large = [document(index, 50, 60) for index in range(30)]
        small = [document(index, 50, 70) for index in (3, 7)]
        for parts in ([large, small], [small, large]):
            for part, (trained, kept_back) in zip(
                parts, keep_back([(d, 1000) for d in parts], frac, seed), strict=True
            ):
                assert len(kept_back) <= frac * len(part)
                assert trained


def test_a_part_keeps_a_document_that_trains_something() -> None:
    documents = [document(1, 50, 60), document(2, 50, 60), document(3, 50, prompt=2), document(4, 50, prompt=2)]
    for seed in range(10):
        trained, kept_back = split(documents, 0.9, 1000, seed)
        assert len(kept_back) == 1
        assert any(one.trained.any() for one in trained)


def test_one_prompt_for_all_is_held_out_by_none() -> None:
    documents = [document(1, 2, 60 + index) for index in range(30)]
    assert split(documents, 0.5, 1000, seed=0) == (documents, [])


def test_text_without_a_prompt_is_related_to_the_same_text() -> None:
    documents = [document(5, 6, 7 + index // 2, prompt=0) for index in range(40)]
    trained, kept_back = split(documents, 0.1, 1000, seed=0)
    assert len(kept_back) == 4
    assert {one.token_ids[2] for one in trained}.isdisjoint(one.token_ids[2] for one in kept_back)


@pytest.mark.parametrize(("rows_per_step", "rows"), [(1, 32), (3, 33), (8, 32), (64, 64)])
def test_an_evaluation_is_whole_steps(rows_per_step: int, rows: int) -> None:
    assert rows_of_evaluation(rows_per_step) == rows


def batches(rows_per_step: int) -> RowBatches:
    source = DocumentSource(pack([document(*range(20))], RECIPE.width), rows_per_step)
    return RowBatches((source,), RECIPE)


def test_every_held_out_document_is_measured_once_the_same_way_each_time() -> None:
    """Five rows in batches of two: the sixth row holds nothing that counts."""
    documents = [document(*range(start, start + 20)) for start in range(5)]
    held_out = HeldOut.of(documents, batches(2))
    first, again = list(held_out), list(held_out)
    assert [batch.token_ids.shape for batch in first] == [(2, RECIPE.width)] * 3
    assert sum(batch.trained.sum() for batch in first) == 5 * 18
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.anchors[0], other.anchors[0])
    assert held_out.digest == HeldOut.of(documents, batches(8)).digest
    assert held_out.digest != HeldOut.of(documents[1:], batches(2)).digest


@pytest.mark.parametrize(
    ("lines", "best"),
    [
        ([(10, 1.2, 3.0), (20, 1.4, 3.2), (30, 1.3, 2.9)], 20),  # more is right, at a higher loss
        ([(10, 1.0, 3.0), (20, 1.0, 2.9), (30, 1.0, 3.1)], 20),  # nothing is right yet
        ([(10, 1.2, 3.0), (20, 1.2, 3.0)], 10),
        ([(10, 9.0, 3.0, {"documents": "others"}), (20, 1.2, 3.0), (30, 1.1, 3.0)], 20),
        ([], None),
    ],
)
def test_the_best_step_is_that_of_the_highest_score(lines: list[Any], best: int | None) -> None:
    """Among those on the same documents."""
    log: list[dict[str, Any]] = [{"step": 10, "loss": 1.0}]
    for step, score, loss, *more in lines:
        figures = {"score": score, "loss": loss, "documents": "ours"}
        other = more[0] if more else {}
        log.append({"step": step, "held_out": figures | other})
    line = best_held_out(log)
    assert (line and line["step"]) == best


@pytest.mark.parametrize(
    ("loss", "score"),
    [("half", 1 + 0.5 + 0.5 * 0.4), ("kl", 1 + 0.5 + 0.5 * 0.4), ("total_variation", 0.7)],
)
def test_a_score_is_what_is_accepted(loss: Any, score: float) -> None:
    """Of sampled drafts the share that total variation leaves."""
    assert score_of(loss, 0.3, [0.5, 0.4]) == pytest.approx(score)


def test_documents_that_hold_nothing_to_measure_are_refused() -> None:
    with pytest.raises(InputError, match="no token that the target wrote"):
        HeldOut.of([document(1, 2, 3, prompt=3)], batches(1))
