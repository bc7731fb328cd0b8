"""Prompt files in the layouts people have; what does not work is named with its row."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from peagle.ops.errors import InputError
from peagle.prompt_files import read_prompt_file


def write(directory: Path, *lines: str | bytes) -> Path:
    path = directory / "prompts.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_the_three_kinds_of_lines_become_conversations(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '\ufeff{"prompt": "a", "task_id": 1}\r',
        "",
        '{"turns": ["b", "c"], "category": "writing"}',
        '{"prompt_ids": [0, 5]}',
        '{"turns": ["d"]}',
        "",
    )
    single, turns, ids, one_turn = read_prompt_file(path).conversations
    assert (single.turns, single.num_requests, single.numbered) == (("a",), 1, False)
    assert (turns.turns, turns.num_requests, turns.numbered) == (("b", "c"), 2, True)
    assert (ids.prompt_ids, ids.num_requests, ids.numbered) == ((0, 5), 1, False)
    assert (one_turn.num_requests, one_turn.numbered) == (1, True)
    assert turns.name == f"{path} line 3"
    assert [each.category for each in (single, turns, ids, one_turn)] == [None, "writing", None, None]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not valid JSON"),
        ('{"prompt": "a"} {"prompt": "b"}', "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('"text"', "expected a JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ("{}", "expected exactly one of"),
        ('{"text": "a"}', "'text'"),
        ('{"prompt": "a", "prompt_ids": [1]}', "prompt and prompt_ids"),
        ('{"prompt": 3}', "expected a text"),
        ('{"prompt": "  "}', "is empty"),
        ('{"turns": "a"}', "expected a list of texts"),
        ('{"turns": []}', "expected a list of texts"),
        ('{"turns": ["a", 2]}', "expected a list of texts"),
        ('{"turns": ["a", ""]}', "is empty"),
        ('{"prompt_ids": []}', "is empty"),
        ('{"prompt_ids": "1,2"}', "expected a list of integers"),
        ('{"prompt_ids": [1, 2.5]}', "2.5"),
        ('{"prompt_ids": [true]}', "True"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: str | bytes, what: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}', "", line)
    with pytest.raises(InputError) as caught:
        read_prompt_file(path)
    assert "line 3" in str(caught.value)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_prompt_file(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read_prompt_file(tmp_path)
    with pytest.raises(InputError, match="holds no prompts"):
        read_prompt_file(write(tmp_path, "", "  "))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mt_bench_and_spec_bench_are_turns_with_a_category(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorter."], "reference": []},
        {"question_id": 82, "category": "math", "turns": ["1 + 1?"]},
    ]
    path = lines(tmp_path / "question.jsonl", *rows)
    found = read_prompt_file(path)
    assert (found.name, found.layout, found.num_rows) == ("question", "prompts", 2)
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [(each.turns, each.category) for each in found.conversations] == [
        (("Write a poem.", "Shorter."), "writing"),
        (("1 + 1?",), "math"),
    ]


def test_humaneval_and_gsm8k_are_asked_as_they_are(tmp_path: Path) -> None:
    code = 'def f(x):\n    """Doubles."""\n'
    row = {"task_id": "HumanEval/0", "prompt": code, "entry_point": "f", "canonical_solution": "", "test": ""}
    found = read_prompt_file(lines(tmp_path / "h.jsonl", row))
    assert (found.layout, found.conversations[0].turns) == ("humaneval", (code,))
    found = read_prompt_file(lines(tmp_path / "g.jsonl", {"question": "How many?", "answer": "#### 4"}))
    assert (found.layout, found.conversations[0].turns) == ("gsm8k", ("How many?",))


def test_of_sharegpt_the_persons_messages_are_asked(tmp_path: Path) -> None:
    def said(*messages: tuple[str, str]) -> dict[str, Any]:
        return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in messages]}

    rows = [
        said(("system", "Be kind."), ("human", "Hi"), ("gpt", "Hello"), ("human", "Why?"), ("gpt", "So.")),
        said(("gpt", "goes on"), ("human", "and on")),
        said(("gpt", "alone")),
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(rows))
    found = read_prompt_file(path)
    assert (found.layout, found.num_rows) == ("sharegpt", 3)
    assert [(each.turns, each.system) for each in found.conversations] == [
        (("Hi", "Why?"), "Be kind."),
        (("and on",), None),
    ]
    assert found.skipped == (f"{path} row 3 holds no message of a person",)


def test_openai_messages_bring_their_history(tmp_path: Path) -> None:
    def message(role: str, content: Any) -> dict[str, Any]:
        return {"role": role, "content": content}

    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    rows = [
        {"messages": [message("system", "S"), message("user", parts), message("assistant", "A")]},
        {"messages": [message("user", "a"), message("assistant", "b"), message("user", "c")]},
        {"custom_id": "1", "method": "POST", "body": {"model": "m", "messages": [message("user", "d")]}},
    ]
    found = read_prompt_file(lines(tmp_path / "m.jsonl", *rows))
    assert found.layout == "messages"
    assert [(each.turns, each.given, each.system, each.num_requests) for each in found.conversations] == [
        (("one two",), (), "S", 1),  # the last answer is what is asked for
        (("a", "c"), ("b",), None, 1),
        (("d",), (), None, 1),
    ]


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"[1] is a list\r\n\nWhy?\n")
    found = read_prompt_file(path)
    assert found.layout == "text"
    assert [each.turns for each in found.conversations] == [("[1] is a list",), ("Why?",)]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (
            [{"prompt": "a"}, {"question": "b", "answer": "c"}],
            "line 2 has the layout gsm8k, the rows before it prompts",
        ),
        ([{"instruction": "a"}], "a row of HumanEval (task_id"),
        ([{"conversations": "a"}], "expected a list of messages"),
        ([{"conversations": [{"from": "dog", "value": "a"}]}], "message 0 is from 'dog'"),
        ([{"conversations": [{"value": "a"}]}], "expected an object with from and value"),
        ([{"conversations": [{"from": "human", "value": None}]}], "value of message 0 is None"),
        ([{"messages": []}], "holds no prompts: "),
        ([{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}], "the user first"),
        ([{"messages": [{"role": "tool", "content": "a"}]}], "message 0, system texts aside, is of the 'tool'"),
        ([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}], "expected a text"),
        ([{"question": 3, "answer": "4"}], "question is 3; expected a text"),
    ],
)
def test_a_layout_that_is_not_as_it_should_be_is_one_line(tmp_path: Path, rows: list[Any], what: str) -> None:
    with pytest.raises(InputError) as caught:
        read_prompt_file(lines(tmp_path / "rows.jsonl", *rows))
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)
