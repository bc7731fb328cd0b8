"""Text to ids and back: no character is split, no token is looked at twice, the date stands still."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.ops.errors import InputError
from peagle.text import (
    ByteLevelTokenizer,
    Detokenizer,
    chat_messages,
    detokenize,
    final_message,
    fix_date,
    load_tokenizer,
    parse_date,
)
from tests.peagle.conftest import SPECIALS, VOCAB_SIZE, ByteTokenizer, Directories


@given(st.text(), st.lists(st.integers(1, 5)))
def test_a_piece_is_whole_characters_as_soon_as_they_are_whole(text: str, sizes: list[int]) -> None:
    data = text.encode()
    detokenizer, shown, start = Detokenizer(ByteTokenizer()), "", 0
    for size in [*sizes, max(len(data), 1)]:
        shown += detokenizer.add(data[start : start + size])
        start += size
        done = data[:start]
        whole = done.decode(errors="ignore")  # drops only an incomplete end: the rest is valid
        assert shown == whole
    assert shown + detokenizer.flush() == text


@given(st.lists(st.integers(0, 255)))
def test_bytes_that_are_no_character_come_out_as_the_standard_decoder_has_them(data: list[int]) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    pieces = [detokenizer.add([byte]) for byte in data]
    assert "".join(pieces) + detokenizer.flush() == bytes(data).decode(errors="replace")


def test_an_incomplete_character_is_held_back_and_flushed_once() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert [detokenizer.add([byte]) for byte in "é".encode()[:1]] == [""]
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_every_token_is_looked_at_once() -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    for _ in range(1000):
        detokenizer.add([0xF0])  # never a whole character: nothing is decided, nothing is decoded again
    assert tokenizer.asked == 1000


def test_ids_decode_as_the_library_decodes_them(tokenizer: ByteLevelTokenizer) -> None:
    inner = tokenizer._inner

    @given(st.lists(st.integers(0, VOCAB_SIZE - 9), max_size=30))
    def check(ids: list[int]) -> None:
        expected = inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert detokenize(tokenizer, ids) == expected

    check()


@pytest.mark.parametrize("text", ["naïve 東京 🎉", "def f(x):\n\treturn x  # größer", "\x00\x7f­"])
def test_text_survives_the_way_there_and_back(tokenizer: ByteLevelTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert detokenize(tokenizer, ids) == text


def test_ids_that_the_tokenizer_does_not_know_are_no_text(tokenizer: ByteLevelTokenizer) -> None:
    assert detokenize(tokenizer, [VOCAB_SIZE - 1, VOCAB_SIZE + 1000]) == ""


def rendered(tokenizer: ByteLevelTokenizer, *arguments, **options) -> str:
    return detokenize(tokenizer, tokenizer.encode_chat(*arguments, **options))


def test_the_template_gets_a_fixed_date_and_the_effort(tokenizer: ByteLevelTokenizer) -> None:
    assert rendered(tokenizer, ["Hi"], []) == (
        "<|start|>system<|message|>Today: 2025-08-05<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>"
    )
    other = rendered(tokenizer, ["Hi"], [], date="2031-02-28", reasoning_effort="high", system="Be brief.")
    assert "Today: 2031-02-28 Reasoning: high<|end|><|start|>system<|message|>Be brief.<|end|>" in other


def test_special_tokens_of_the_template_are_one_token_each(tokenizer: ByteLevelTokenizer) -> None:
    assert tokenizer.encode_chat(["Hi"], [])[0] == SPECIALS.index("<|start|>")


def test_the_history_alternates_and_ends_with_the_last_turn(tokenizer: ByteLevelTokenizer) -> None:
    text = rendered(tokenizer, ["One", "Two"], ["<|channel|>analysis<|message|>Hm.<|end|>first"])
    assert text.index("One") < text.index("final<|message|>Hm.<|end|>") < text.index("Two")
    with pytest.raises(ValueError, match="shorter"):
        chat_messages(["One", "Two"], [], None)


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("plain", "plain"),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42", "42"),
        ("<|channel|>final<|message|>42<|return|>", "42"),
        ("", ""),
    ],
)
def test_only_the_last_message_of_an_answer_is_remembered(answer: str, final: str) -> None:
    assert final_message(answer) == final


def test_the_date_reaches_macros_and_leaves_other_templates_alone() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = (
        "\n{% macro head() %}{{ strftime_now(\"%Y-%m-%d\") }}/{{ strftime_now('%d %B') }}{% endmacro %}{{ head() }}"
    )
    fixed, variables = fix_date(template, "2024-02-29")
    text = ImmutableSandboxedEnvironment(trim_blocks=True).from_string(fixed).render(**variables)
    assert text == "\n2024-02-29/29 February"  # the template's own first line break is still there
    assert fix_date("{{ messages }}", "2024-02-29") == ("{{ messages }}", {})


@pytest.mark.parametrize("date", ["today", "2025-13-01", "2025-02-30", ""])
def test_a_date_that_is_none_is_refused(date: str) -> None:
    with pytest.raises(InputError, match="YYYY-MM-DD"):
        parse_date(date)


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_is_refused_in_one_line(directories: Directories, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    content = json.loads((directories.target / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="byte-level"):
        load_tokenizer(tmp_path)


def test_a_chat_without_a_template_or_against_it_is_refused(directories: Directories, tmp_path: Path) -> None:
    shutil.copy(directories.target / "tokenizer.json", tmp_path)
    shutil.copy(directories.target / "tokenizer_config.json", tmp_path)
    bare = load_tokenizer(tmp_path)
    assert bare is not None
    assert bare.encode("Hi")
    with pytest.raises(InputError, match="no chat template"):
        bare.encode_chat(["Hi"], [])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    strict = load_tokenizer(tmp_path)
    assert strict is not None
    with pytest.raises(InputError, match="refuses this chat: no"):
        strict.encode_chat(["Hi"], [])
