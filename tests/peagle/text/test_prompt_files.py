"""Prompt files in the common layouts; errors name the row."""

import gzip
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.text.prompt_files import CONVERT, PLACEHOLDER, Skipped, read_prompt_file, read_prompts
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import load_tokenizer
from tests.support.pairs import Directories, copy_tokenizer


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
    assert [conversation.category for conversation in (single, turns, ids, one_turn)] == [None, "writing", None, None]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        (b'{"prompt": "\xff"}', "line 3 is not UTF-8; expected text in UTF-8"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ('{"prompt": "a", "category": "\\ud800"}', "category is not valid Unicode"),
        ("{}", "expected exactly one of"),
        ('{"prompt": "a", "prompt_ids": [1]}', "prompt and prompt_ids"),
        ('{"prompt": 3}', "expected a text"),
        ('{"prompt": "  "}', "is empty"),
        ('{"turns": ["a", 2]}', "expected a list of texts"),
        ('{"prompt_ids": []}', "is empty"),
        ('{"prompt_ids": [1, 2.5]}', "2.5"),
        ("[" * 100_000, "not valid JSON"),
        ('{"prompt": ' + "[" * 800 + "]" * 800 + "}", ""),
        (
            '{"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": '
            + "[" * 800
            + "]" * 800
            + '}}, {"role": "user", "content": "a"}]}',
            "",
        ),
        ('{"question": "b", "answer": "c"}', "has the layout gsm8k, the rows before it prompts"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_left_out_or_refused(
    tmp_path: Path, line: str | bytes, what: str
) -> None:
    path = write(tmp_path, '{"prompt": "fine"}', "", line)
    with pytest.raises(InputError) as caught:
        read_prompt_file(path, strict=True)
    prompts = read_prompt_file(path)
    assert (prompts.num_rows, len(prompts.conversations), prompts.skipped) == (2, 1, (Skipped(3, str(caught.value)),))
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


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CODE = 'def f(x):\n    """Doubles."""\n'


@pytest.mark.parametrize(
    ("row", "layout", "turns"),
    [
        (  # HumanEval
            {"task_id": "HumanEval/0", "prompt": CODE, "entry_point": "f", "canonical_solution": "", "test": ""},
            "humaneval",
            (CODE,),
        ),
        ({"question": "How many?", "answer": "#### 4"}, "gsm8k", ("How many?",)),
        (  # MT-Bench on the Hub
            {"prompt": ["Write a poem.", "Shorter."], "prompt_id": 1, "category": "writing", "reference": ["x"]},
            "prompts",
            ("Write a poem.", "Shorter."),
        ),
        (  # MATH-500
            {"problem": "1 + 1?", "solution": "2.", "answer": "2", "subject": "Algebra", "level": 1, "unique_id": "a"},
            "math",
            ("1 + 1?",),
        ),
        (  # MBPP
            {"task_id": 1, "text": "Add.", "code": "a + b", "test_list": ["assert 1"], "test_setup_code": "",
             "challenge_test_list": []},
            "mbpp",
            ("Add.",),
        ),
        ({"prompt": "Add.", "code": "a", "task_id": 1, "test_imports": [], "test_list": ["assert 1"],
          "source_file": "a"}, "prompts", ("Add.",)),  # MBPP, sanitized
        ({"question": "Why?"}, "gsm8k", ("Why?",)),
        ({"instruction": "Sum up.", "input": "", "output": "b"}, "alpaca", ("Sum up.",)),
        ({"instruction": "Sum up.", "input": "a", "output": "b"}, "alpaca", ("Sum up.\n\na",)),
        (  # SPEED-Bench
            {"question_id": "a", "category": "rag", "sub_category": "b", "turns": ["c"], "source": "d", "src_id": "e",
             "difficulty": "f", "multiturn": False},
            "prompts",
            ("c",),
        ),
    ],
)  # fmt: skip
def test_public_sets_are_read_as_they_are(tmp_path: Path, row: Any, layout: str, turns: tuple[str, ...]) -> None:
    prompts = read_prompt_file(lines(tmp_path / "rows.jsonl", row), strict=True)
    assert (prompts.layout, prompts.conversations[0].turns, prompts.warnings) == (layout, turns, ())
    assert prompts.conversations[0].numbered == (len(turns) > 1 or "turns" in row)


PIRATE = "You are a pirate."
TOOL = {"type": "function", "function": {"description": "", "name": "f", "parameters": {}}}


@pytest.mark.parametrize("prompt", [
    {"conversations": [{"from": "human", "value": "a"}]}, {"messages": [{"role": "user", "content": "a"}]},
    {"prompt": "a"}, {"turns": ["a"]}, {"question": "a", "answer": "b"}, {"prompt": [{"role": "user", "content": "a"}]},
])  # fmt: skip
@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message"])
def test_a_row_of_any_layout_may_have_a_system_text_and_tools(tmp_path: Path, prompt: Any, key: str) -> None:
    row = {key: PIRATE, "tools": [TOOL], **prompt}
    prompts = read_prompt_file(lines(tmp_path / "rows.jsonl", row), strict=True)
    (conversation,) = prompts.conversations
    assert (conversation.system, conversation.tools, conversation.turns) == (PIRATE, (TOOL,), ("a",))
    assert prompts.warnings == ()


@pytest.mark.parametrize(
    ("row", "system", "tools"),
    [
        ({"system": PIRATE, "messages": [{"role": "system", "content": "S"}, user("a")]}, f"{PIRATE}\n\nS", ()),
        ({"system": PIRATE, "messages": [{"role": "system", "content": PIRATE}, user("a")]}, PIRATE, ()),
        ({"system": "", "messages": [{"role": "system", "content": "S"}, user("a")]}, "S", ()),
        ({"system": None, "tools": None, "messages": [user("a")]}, None, ()),
        ({"body": {"model": "m", "messages": [user("a")], "tools": [TOOL]}}, None, (TOOL,)),
        ({"tools": json.dumps([TOOL["function"]]), "prompt": "a"}, None, (TOOL,)),
    ],
)
def test_a_rows_system_text_comes_before_that_of_its_messages(
    tmp_path: Path, row: Any, system: str | None, tools: tuple[Any, ...]
) -> None:
    (conversation,) = read_prompt_file(lines(tmp_path / "rows.jsonl", row), strict=True).conversations
    assert (conversation.system, conversation.tools) == (system, tools)


def test_a_key_that_has_no_effect_is_named_once_with_its_count(tmp_path: Path) -> None:
    rows = [
        {"messages": [user("a")], "id": 1, "max_tokens": 5, "images": []},
        {"messages": [{**user("a"), "images": ["b.png"]}, user("b")], "max_tokens": 5, "temperature": 0},
        {"messages": [], "top_k": 3},
        {"body": {"messages": [user("a")], "model": "m", "max_tokens": 5}, "custom_id": "1", "method": "POST"},
    ]
    prompts = read_prompt_file(lines(tmp_path / "rows.jsonl", *rows))
    skipped, unused = prompts.warnings
    assert skipped.startswith("left out of rows: 1 row without a usable prompt, the first: ")
    assert unused == (
        "rows has keys that have no effect: max_tokens (3 rows), temperature (1 row), messages[].images (1 row)"
    )


@pytest.mark.parametrize(
    ("template", "read"), [("{{ tools }}{{ messages }}", True), ("{{ messages }}", False)]
)  # fmt: skip
def test_tools_that_the_template_does_not_show_are_no_prompt(
    directories: Directories, tmp_path: Path, template: str, read: bool
) -> None:
    copy_tokenizer(directories.target, tmp_path, template)
    path = lines(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "a", "tools": [TOOL]})
    prompts = read_prompts(path, tmp_path, Rendering(), strict=False)
    assert len(prompts.conversations) == 1 + read
    assert [row.line for row in prompts.skipped] == [] if read else [2]
    with_tools = Rendering(raw=True)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="has tools, which needs the chat template"):
        read_prompts(path, tmp_path, with_tools, strict=True).conversations[1].encode((), tokenizer, with_tools)
    if read:
        first, second = (conversation.encode((), tokenizer, Rendering()) for conversation in prompts.conversations)
        assert len(second) > len(first)


def test_of_sharegpt_the_persons_messages_are_asked(tmp_path: Path) -> None:
    def chat(*messages: tuple[str, str]) -> dict[str, Any]:
        return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in messages]}

    rows = [
        chat(("system", "Be kind."), ("human", "Hi"), ("gpt", "Hello"), ("human", "Why?"), ("gpt", "So.")),
        chat(("gpt", "goes on"), ("human", "and on")),
        chat(("gpt", "alone")),
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(rows))
    prompts = read_prompt_file(path)
    assert (prompts.layout, prompts.num_rows) == ("sharegpt", 3)
    assert [(conversation.turns, conversation.system) for conversation in prompts.conversations] == [
        (("Hi", "Why?"), "Be kind."),
        (("and on",), None),
    ]
    assert prompts.skipped == (Skipped(3, f"{path} row 3 holds no message of a user"),)


def test_openai_messages_bring_their_history(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    rows = [
        {"messages": [{"role": "system", "content": "S"}, user(parts), assistant("A")]},
        {"messages": [user("a"), assistant("b"), user("c")]},
        {"custom_id": "1", "method": "POST", "body": {"model": "m", "messages": [user("d")]}},
    ]
    prompts = read_prompt_file(lines(tmp_path / "m.jsonl", *rows))
    assert prompts.layout == "messages"
    assert [
        (conversation.turns, conversation.history, conversation.system, conversation.num_requests)
        for conversation in prompts.conversations
    ] == [
        (("one two",), (), "S", 1),  # the last answer is generated anew
        (("c",), (user("a"), assistant("b")), None, 1),
        (("d",), (), None, 1),
    ]


CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED_FUNCTION = {"name": "f", "arguments": {"x": 1}}
CALLED = {**assistant(""), "tool_calls": [{**CALL, "function": CALLED_FUNCTION}]}


@pytest.mark.parametrize(
    ("row", "layout", "history", "turns"),
    [
        ({"conversations": [user("a"), assistant("b"), user("c")]}, "sharegpt", [], ("a", "c")),  # SpecForge's own
        ({"conversations": [{"from": "Human", "value": "a"}]}, "sharegpt", [], ("a",)),
        ({"messages": [{"role": "User", "content": "a"}]}, "messages", [], ("a",)),
        ({"messages": [user("a"), user("b")]}, "messages", [user("a")], ("b",)),
        ({"messages": [assistant("a"), user("b")]}, "messages", [assistant("a")], ("b",)),
        ({"messages": [user("a"), assistant(None), user("b")]}, "messages", [user("a"), assistant("")], ("b",)),
        ({"messages": [user([{"type": "input_text", "text": "a"}])]}, "messages", [], ("a",)),
        ({"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": None}, "b"])]},
         "messages", [], ("ab",)),
        ({"prompt": [user("a")], "completion": [assistant("b")]}, "messages", [], ("a",)),
        ([user("a"), assistant("b"), user("c")], "messages", [user("a"), assistant("b")], ("c",)),
        ({"messages": [user("a"), {**assistant(None), "tool_calls": [CALL]}, {"role": "tool", "content": "5"}]},
         "messages", [user("a"), CALLED, {"role": "tool", "content": "5"}], ()),
        ({"messages": [user("a"), {**assistant(None), "tool_calls": [CALL]}, {"role": "tool", "content": "5"},
                       assistant("c"), user("d")]},
         "messages", [user("a"), CALLED, {"role": "tool", "content": "5"}, assistant("c")], ("d",)),
        ({"conversations": [user("a"), {**assistant(None), "function_call": CALL["function"]},
                            {"role": "function", "name": "f", "content": "5"}]},
         "sharegpt",
         [user("a"), {**assistant(""), "tool_calls": [{"type": "function", "function": CALLED_FUNCTION}]},
          {"role": "tool", "name": "f", "content": "5"}],
         ()),
        # reasoning that led to calls is kept before them
        ({"messages": [user("a"), {**assistant("Let me see."), "reasoning_content": "Hm.", "tool_calls": [CALL]},
                       {"role": "tool", "content": "5"}]},
         "messages", [user("a"), {**CALLED, "thinking": "Hm.\n\nLet me see."}, {"role": "tool", "content": "5"}], ()),
        ({"messages": [user("a"), {**assistant("b"), "reasoning_content": "Hm."}, user("c")]},
         "messages", [user("a"), assistant("b")], ("c",)),
        # analysis is left out of the history, text that looks like it is kept
        ({"messages": [user("a"), assistant("<|channel|>analysis<|message|>Hm."), user("b")]},
         "messages", [user("a"), assistant("")], ("b",)),
        ({"messages": [user("a"), assistant("Put <|message|> there"), user("b")]},
         "messages", [user("a"), assistant("Put <|message|> there")], ("b",)),
    ],
)  # fmt: skip
def test_chats_are_read_as_people_have_them(
    tmp_path: Path, row: Any, layout: str, history: list[Any], turns: tuple[str, ...]
) -> None:
    """As lines, as a single object, as one list, and gzipped."""
    text = json.dumps(row)
    (tmp_path / "lines.jsonl").write_text(f"{text}\n{text}\n")
    (tmp_path / "one.jsonl").write_text(f"{text}\n")
    (tmp_path / "list.json").write_text(json.dumps([row, row], indent=1))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(f"{text}\n{text}\n".encode()))
    for name, count in (("lines.jsonl", 2), ("one.jsonl", 1), ("list.json", 2), ("packed.jsonl.gz", 2)):
        prompts = read_prompt_file(tmp_path / name, strict=True)
        assert (prompts.name, prompts.layout, len(prompts.conversations)) == (name.partition(".")[0], layout, count)
        for conversation in prompts.conversations:
            assert (list(conversation.history), conversation.turns) == (history, turns)
            assert conversation.num_requests == max(1, len(turns))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.csv", b"id,prompt\n1,a\n", "a.csv is CSV; expected JSON lines, or .txt, in UTF-8; to convert it: python"),
        ("a.jsonl", b"id,prompt\n1,a\n", "a.jsonl is CSV"),
        ("a.jsonl", b"not json\n", "holds no prompts: "),
        ("empty.txt", b"", "empty.txt holds no prompts; expected one prompt per line"),
        ("a.parquet", b"PAR1\x15\x04\xff\n{}", "a.parquet is parquet"),
        ("a.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "a.jsonl is UTF-16"),
        ("a.jsonl", '{"prompt": "a"}\n'.encode("utf-16-be"), "a.jsonl is no text"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n', mtime=0)[:-9], "cannot be unpacked"),
        ("a.json", b'[{"prompt": "a"},\n{"prompt": "b"}\n', "a.json is not valid JSON"),
    ],
)
def test_a_file_that_is_something_else_is_refused_in_a_line_that_says_how_to_convert_it(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_prompt_file(tmp_path / name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "comma"), [("CSV", ","), ("TSV", "\t")])
def test_the_line_that_converts_does(tmp_path: Path, kind: str, comma: str) -> None:
    (tmp_path / "FILE").write_text(f'id{comma}prompt\n1{comma}"a{comma}\nb ""c"""\n')
    command = shlex.split(CONVERT[kind])
    assert command[:2] == ["python", "-c"]
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True)
    (conversation,) = read_prompt_file(tmp_path / "NEW.jsonl").conversations
    assert conversation.turns == (f'a{comma}\nb "c"',)


def test_a_name_and_a_category_are_fit_for_a_report(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    path.write_text(json.dumps({"prompt": "a", "category": "東京\n\x1b"}) + '\n{"prompt": ""}\n')
    prompts = read_prompt_file(path)
    assert (prompts.name, prompts.conversations[0].category) == ("caf\\udce9", "東京\\n\\x1b")
    assert prompts.skipped == (Skipped(2, f"{path} line 2 is empty; expected some text"),)


def test_rows_that_the_template_refuses_are_left_out(directories: Directories, tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ message.content }}{% endfor %}"
    )
    copy_tokenizer(directories.target, tmp_path, template)
    rows = [{"messages": [user("a")]}, {"messages": [user("a"), {"role": "tool", "content": "5"}]}]
    path = lines(tmp_path / "rows.jsonl", *rows, {"messages": []})
    prompts = read_prompts(path, tmp_path, Rendering(), strict=False)
    assert [conversation.turns for conversation in prompts.conversations] == [("a",)]
    first, second = prompts.skipped
    assert (first.line, second) == (2, Skipped(3, f"{path} line 3 holds no message of a user"))
    assert first.reason.startswith(f"{path} line 2: ")
    assert "the chat template refuses this chat: no tools" in first.reason
    with pytest.raises(InputError, match=r"line 2: .*no tools"):
        read_prompts(path, tmp_path, Rendering(), strict=True)
    assert len(read_prompts(path, directories.target, Rendering(), strict=False).conversations) == 2
    lines(path, rows[1])
    for strict in (False, True):
        with pytest.raises(InputError, match=r"line 1: .*no tools"):
            read_prompts(path, tmp_path, Rendering(), strict=strict)


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"[1] is a list\r\n\nWhy?\n")
    prompts = read_prompt_file(path)
    assert prompts.layout == "text"
    assert [conversation.turns for conversation in prompts.conversations] == [("[1] is a list",), ("Why?",)]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([{"article": "a"}], "a row of HumanEval (task_id"),
        ([{"prompt": []}], "prompt is []; expected a text, a list of texts or one of messages"),
        ([{"turns": ["a", PLACEHOLDER]}], "line 1 holds SPEED-Bench's placeholder"),
        ([{"messages": [user(PLACEHOLDER), user("a")]}], "line 1 holds SPEED-Bench's placeholder"),
        ([{"system": 3, "prompt": "a"}], "system is 3; expected a text"),
        ([{"system": "S", "prompt_ids": [1]}], "a system text with token ids"),
        ([{"tools": [3], "prompt": "a"}], "tools holds 3; expected functions"),
        ([{"messages": [{**user("a"), "tool_calls": [CALL]}]}], "of the role user has tool_calls"),
        ([{"conversations": "a"}], "expected a list of messages"),
        (
            [{"conversations": [{"from": "dog", "value": "a"}]}],
            "message 0 has the role 'dog'; expected one of user, human",
        ),
        ([{"conversations": [{"value": "a"}]}], "expected an object with role and content, or from and value"),
        ([{"messages": [assistant("a")]}], "holds no message of a user"),
        ([{"messages": [user([{"type": "image_url"}])]}], "expected a text"),
        (
            [{"messages": [user("a"), {**assistant("b"), "tool_calls": [{"function": 3}]}, user("c")]}],
            "expected a function",
        ),
        ([{"messages": [user("a"), assistant("\ud800"), user("c")]}], "line 1 is not valid Unicode text"),
    ],
)
def test_a_layout_that_is_not_as_it_should_be_is_one_line(tmp_path: Path, rows: list[Any], what: str) -> None:
    path = lines(tmp_path / "rows.jsonl", *rows)
    for strict in (True, False):
        with pytest.raises(InputError) as caught:
            read_prompt_file(path, strict=strict)
        assert what in f"holds no prompts: {caught.value}"
        assert "\n" not in str(caught.value)
