"""Answers that a file holds become documents: the prompt as the target gets it, the answer as it writes it."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafter.train.shards import Document
from peagle.base.errors import InputError
from peagle.text.prompt_files import read_prompt_file, read_prompts
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import Tokenizer, detokenize, load_tokenizer
from peagle.workflows.recorded import Reader
from tests.support.harmony import CALL, RETURN
from tests.support.pairs import VOCAB_SIZE, write_tokenizer
from tests.support.servers import HARMONY_SPECIALS, HARMONY_TEMPLATE

F = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [F]}
RESULT = {"role": "tool", "content": "5"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the harmony format's control tokens and chat template."""
    directory = tmp_path_factory.mktemp("harmony")
    write_tokenizer(directory, HARMONY_SPECIALS, HARMONY_TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def documents_of(
    directory: Path, path: Path, *rows: Any, context: int = 4096, stops: tuple[int, ...] = (RETURN, CALL)
) -> tuple[list[Document], list[str]]:
    """Write rows and read them; return (documents, reasons of those left out)."""
    path = path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversations = read_prompt_file(path, strict=True).conversations
    reader = Reader(directory, load_tokenizer(directory), Rendering(), stops, VOCAB_SIZE, context)
    reasons: list[str] = []
    done: list[bool] = []
    documents = list(
        reader.documents(conversations, 7, lambda reason, _: reasons.append(reason), lambda: done.append(True))
    )
    assert len(done) == len(rows)
    return documents, reasons


@pytest.mark.parametrize(
    ("chat", "answers"),
    [
        ([user("a"), assistant("b")], ["<|channel|>final<|message|>b<|return|>"]),
        (
            [user("a"), assistant("b", reasoning_content="Hm."), user("c"), assistant("d", thinking="So.")],
            [
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
                "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>",
            ],
        ),
        (  # as a server without a parser spells it
            [
                user("a"),
                assistant("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>b"),
            ],
            ["<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"],
        ),
        (
            [user("a"), CALLS | {"reasoning": "Look."}, RESULT, assistant("b")],
            [
                "<|channel|>analysis<|message|>Look.<|end|>"
                "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
                "<|channel|>final<|message|>b<|return|>",
            ],
        ),
        ([assistant("goes on"), user("a"), assistant("b")], ["<|channel|>final<|message|>b<|return|>"]),
        ([assistant("goes"), assistant("on"), user("a"), assistant("b")], ["<|channel|>final<|message|>b<|return|>"]),
        ([user("a"), assistant("b<|return|>")], ["<|channel|>final<|message|>b<|return|>"]),
        ([user("a"), assistant("b"), user("c")], ["<|channel|>final<|message|>b<|return|>"]),
    ],
)
def test_an_answer_is_trained_after_the_prompt_that_asked_for_it(
    directory: Path, tokenizer: Tokenizer, tmp_path: Path, chat: list[dict[str, Any]], answers: list[str]
) -> None:
    documents, left_out = documents_of(directory, tmp_path, {"messages": chat})
    assert not left_out
    assert [detokenize(tokenizer, document.token_ids[document.trained].tolist()) for document in documents] == answers
    assert {document.conversation for document in documents} == {7}
    first = next(at for at, message in enumerate(chat) if message["role"] != "assistant")
    places = [at for at, message in enumerate(chat) if at > first and message["role"] == "assistant"]
    for document, place in zip(documents, places, strict=True):
        asked = tmp_path / "asked.jsonl"
        asked.write_text(json.dumps({"messages": chat[:place]}))
        (conversation,) = read_prompts(asked, directory, Rendering(), strict=True).conversations
        assert tuple(document.prompt) == conversation.encode((), tokenizer, Rendering())


def test_rows_of_other_shapes_hold_answers_too(directory: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """ShareGPT's, pairs of a prompt and a completion (TRL), and Alpaca's."""
    share = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    pair = {"prompt": [user("a")], "completion": [assistant("b")]}
    for row in (share, pair, {"prompt": "a", "completion": "b"}, {"instruction": "a", "input": "", "output": "b"}):
        ((document,), _) = documents_of(directory, tmp_path, row)
        assert (
            detokenize(tokenizer, document.token_ids[document.trained].tolist())
            == "<|channel|>final<|message|>b<|return|>"
        )


def test_token_ids_are_taken_with_their_mask_up_to_the_context(directory: Path, tmp_path: Path) -> None:
    rows = [
        {"input_ids": [9, 8, 7, 6], "loss_mask": [0, 0, 1, 1], "id": "a_gen0", "primary_id": "a"},
        {"input_ids": [9, 8, 7, 6, 5, 4, 3], "loss_mask": [0, 1, 0, 1, 1, 1, 1], "id": "a_gen1", "primary_id": "a"},
        {"input_ids": [9, 8, 7, 6, 5, 4], "loss_mask": [0, 0, 0, 0, 0, 1]},
        {"input_ids": [9, VOCAB_SIZE], "loss_mask": [0, 1]},
        {"input_ids": [9, 10**30], "loss_mask": [0, 1]},
    ]
    documents, left_out = documents_of(directory, tmp_path, *rows, context=5)
    assert [document.token_ids.tolist() for document in documents] == [[9, 8, 7, 6], [9, 8, 7, 6, 5]]
    assert [document.trained.tolist() for document in documents] == [
        [False, False, True, True],
        [False, True, False, True, True],
    ]
    assert [document.conversation for document in documents] == [7, 8]
    room, outside, far = left_out
    assert "line 3 has 5 tokens before an answer, but --context is 5; expected at most 4: raise it" in room
    assert f"token ids 9..{VOCAB_SIZE}; expected those of the target, 0..{VOCAB_SIZE - 1}" in outside
    assert "line 5" in far


THOUGHT, SAYS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "<|channel|>final<|message|>b"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (assistant(f"{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>"), "spells"),
        (assistant(f"{THOUGHT}<|channel|>commentary<|message|>A plan.<|end|><|start|>assistant{SAYS}"), "spells"),
        (assistant("<|channel|>commentary<|message|>A plan.<|end|>"), "spells"),
        (assistant(f"{THOUGHT}{THOUGHT}{SAYS}"), "spells"),
        (assistant(f"Hm.<|end|><|start|>assistant{SAYS}"), "spells"),
        (assistant("<|channel|>final <|constrain|>json<|message|>{}"), "spells"),
        (assistant("<|channel|>analysis<|message|>Hm"), "spells"),
        (assistant("<|channel|>analysis<|message|>Hm.<|end|>"), "spells"),
        (assistant("", reasoning_content="Hm."), "has neither content nor a tool call"),
        (assistant(""), "has neither content nor a tool call"),
        ({"role": "assistant", "content": None}, "has neither content nor a tool call"),
        (CALLS | {"tool_calls": [F, F]}, "has 2 tool calls"),
    ],
)
def test_an_answer_that_a_template_does_not_write_as_the_target_did_is_left_out(
    directory: Path, tmp_path: Path, answer: Any, why: str
) -> None:
    """The next one is trained."""
    documents, left_out = documents_of(
        directory, tmp_path, {"messages": [user("a"), answer, user("c"), assistant("d")]}
    )
    assert len(documents) == 1
    (line,) = left_out
    assert f"line 1: a recorded answer {why}" in line


def test_an_answer_whose_end_a_template_hides_is_left_out(directory: Path, tmp_path: Path) -> None:
    documents, (why,) = documents_of(directory, tmp_path, {"messages": [user("a"), assistant("b")]}, stops=(0,))
    assert not documents
    assert f"the chat template in {directory} does not render an answer as the target writes it" in why


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [user("a")]}, "has no recorded answer"),
        ({"messages": [assistant("b"), user("a")]}, "has no recorded answer"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "has no recorded answer"),
        ({"question": "a", "answer": "b"}, "has no recorded answer"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "loss_mask that begins with 1; expected a prompt before"),
        ({"input_ids": [1, 2], "loss_mask": [0]}, "expected two lists of one length"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "the second of 0 and 1"),
        ({"input_ids": [1, "x"], "loss_mask": [0, 1]}, "expected integers"),
    ],
)
def test_a_row_without_an_answer_is_named(directory: Path, tmp_path: Path, row: Any, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(InputError, match=why):
        read_prompts(path, directory, Rendering(), strict=True, answered=True)
