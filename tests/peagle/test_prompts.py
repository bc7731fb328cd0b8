"""Prompts in, conversations out; what does not work is named with its line."""

from pathlib import Path

import pytest

from peagle.ops.errors import InputError
from peagle.prompts import Conversation, Rendering, from_ids, from_text, parse_ids, read_prompt_file
from peagle.text import ByteLevelTokenizer, detokenize


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
    single, turns, ids, one_turn = read_prompt_file(path)
    assert (single.turns, single.num_requests, single.numbered) == (("a",), 1, False)
    assert (turns.turns, turns.num_requests, turns.numbered) == (("b", "c"), 2, True)
    assert (ids.prompt_ids, ids.num_requests, ids.numbered) == ((0, 5), 1, False)
    assert (one_turn.num_requests, one_turn.numbered) == (1, True)
    assert turns.name == f"{path} line 3"


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


def test_ids_are_read_as_typed() -> None:
    assert parse_ids("1, 2,30").prompt_ids == (1, 2, 30)
    assert parse_ids("-1").prompt_ids == (-1,)  # refused where the vocabulary is known, with its bounds


@pytest.mark.parametrize("typed", ["", "  ", "1,,2", "1,a", "1.5", "1_000", "٣", "1 2", "9" * 5000, "+1"])
def test_what_is_no_list_of_ids_is_refused(typed: str) -> None:
    with pytest.raises(InputError):
        parse_ids(typed)


def test_empty_texts_and_ids_are_refused() -> None:
    with pytest.raises(InputError, match="is empty"):
        from_text(" \n")
    with pytest.raises(InputError, match="is empty"):
        from_ids([])
    with pytest.raises(InputError, match="not valid Unicode"):
        from_text("a\udc80")


def test_a_turn_is_rendered_with_the_answers_before_it(tokenizer: ByteLevelTokenizer) -> None:
    conversation = Conversation("it", turns=("one", "two", "three"), numbered=True)
    rendering = Rendering(system="Be brief.")
    first, second = (conversation.encode(answers, tokenizer, rendering) for answers in ([], ["uno"]))
    assert detokenize(tokenizer, first).count("one") == 1
    text = detokenize(tokenizer, second)
    assert text.index("Be brief.") < text.index("one") < text.index("uno") < text.index("two")
    assert "three" not in text


def test_raw_text_is_the_text_and_nothing_else(tokenizer: ByteLevelTokenizer) -> None:
    assert detokenize(tokenizer, from_text("def f(").encode([], tokenizer, Rendering(raw=True))) == "def f("


def test_ids_need_no_tokenizer_and_text_does() -> None:
    assert from_ids([3, 4]).encode([], None, Rendering()) == (3, 4)
    with pytest.raises(InputError, match=r"no tokenizer\.json; give token ids"):
        from_text("Hi").encode([], None, Rendering())


def test_what_only_a_template_can_do_is_refused_without_it(tokenizer: ByteLevelTokenizer) -> None:
    with pytest.raises(InputError, match="2 turns"):
        Conversation("it", turns=("a", "b")).encode([], tokenizer, Rendering(raw=True))
    with pytest.raises(InputError, match="--raw-prompt"):
        Rendering(raw=True, system="Be brief.")
    with pytest.raises(InputError, match="YYYY-MM-DD"):
        Rendering(date="soon")
    with pytest.raises(InputError, match="system text is empty"):
        Rendering(system="")
