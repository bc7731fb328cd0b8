"""Prompts in, conversations out."""

from collections.abc import Callable
from pathlib import Path

import pytest

from peagle.base.errors import InputError
from peagle.text.prompts import Conversation, Rendering, from_ids, from_text, parse_ids
from peagle.text.tokenizer import Tokenizer, detokenize, load_tokenizer
from tests.support.pairs import TEMPLATE, write_tokenizer


def test_ids_are_read_as_typed() -> None:
    assert parse_ids("1, 2,30").prompt_ids == (1, 2, 30)
    assert parse_ids("-1").prompt_ids == (-1,)  # refused by `Request.check_vocabulary`, with its bounds


@pytest.mark.parametrize("typed", ["", "  ", "1,,2", "1,a", "1.5", "1_000", "٣", "1 2", "9" * 5000, "+1"])
def test_malformed_list_of_ids_is_refused(typed: str) -> None:
    with pytest.raises(InputError):
        parse_ids(typed)


def test_empty_texts_and_ids_are_refused() -> None:
    with pytest.raises(InputError, match="is empty"):
        from_text(" \n")
    with pytest.raises(InputError, match="is empty"):
        from_ids([])


@pytest.mark.parametrize(
    "enter",
    [
        lambda: from_text("a\udc80"),
        lambda: Conversation("it", turns=("fine", "a\ud800b")),
        lambda: Conversation("it", turns=("a",), history=({"role": "assistant", "content": "\udfff"},)),
        lambda: Conversation("it", turns=("a",), history=({"role": "tool", "content": "", "x": {"\ud800": 1}},)),
        lambda: Conversation("it", turns=("a",), system="\ud800"),
        lambda: Conversation("it", turns=("a",), tools=({"function": {"name": "\ud800"}},)),
        lambda: Conversation("it", turns=("a",), category="\ud800"),
        lambda: Rendering(system="\ud800"),
    ],
)
def test_half_a_character_is_refused_where_it_enters(enter: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=r"is not valid Unicode text: it holds the lone surrogate \\ud"):
        enter()


def test_a_turn_is_rendered_with_the_answers_before_it(tokenizer: Tokenizer) -> None:
    conversation = Conversation("it", turns=("one", "two", "three"), numbered=True)
    rendering = Rendering(system="Be brief.")
    first, second = (conversation.encode(answers, tokenizer, rendering) for answers in ([], ["uno"]))
    assert detokenize(tokenizer, first).count("one") == 1
    text = detokenize(tokenizer, second)
    assert text.index("Be brief.") < text.index("one") < text.index("uno") < text.index("two")
    assert "three" not in text


def test_a_history_and_its_own_system_text_come_first(tokenizer: Tokenizer) -> None:
    history = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "uno"})
    conversation = Conversation("it", turns=("two", "three"), history=history, system="Be kind.")
    assert conversation.num_requests == 2
    text = detokenize(tokenizer, conversation.encode([], tokenizer, Rendering(system="Be brief.")))
    assert text.index("Be kind.") < text.index("one") < text.index("uno") < text.index("two")
    assert "Be brief." not in text
    assert "three" in detokenize(tokenizer, conversation.encode(["dos"], tokenizer, Rendering()))


def test_raw_text_is_the_text_and_nothing_else(tokenizer: Tokenizer) -> None:
    assert detokenize(tokenizer, from_text("def f(").encode([], tokenizer, Rendering(raw=True))) == "def f("


def test_ids_need_no_tokenizer_and_text_does() -> None:
    assert from_ids([3, 4]).encode([], None, Rendering()) == (3, 4)
    with pytest.raises(InputError, match=r"no tokenizer\.json; give token ids"):
        from_text("Hi").encode([], None, Rendering())


@pytest.mark.parametrize(
    ("template", "rendering", "idle"),
    [
        (TEMPLATE, Rendering(system="S", reasoning_effort="low", date="2024-01-01"), []),
        ("{{ messages }}", Rendering(system="S", reasoning_effort="low"), ["--reasoning-effort"]),
        ("{{ messages[-1].content }}", Rendering(system="S", date="2024-01-01"), ["--system", "--date"]),
        ("{{ messages }}", Rendering(raw=True, date="2024-01-01", special_tokens=True), ["--date"]),
        ("{{ messages }}", Rendering(), []),
    ],
)
def test_options_that_the_template_does_not_show_are_named(
    tmp_path: Path, template: str, rendering: Rendering, idle: list[str]
) -> None:
    write_tokenizer(tmp_path, template=template)
    assert rendering.without_effect(load_tokenizer(tmp_path)) == idle


def test_features_of_a_template_are_refused_without_one(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="2 turns"):
        Conversation("it", turns=("a", "b")).encode([], tokenizer, Rendering(raw=True))
    with pytest.raises(InputError, match="a system text"):
        Conversation("it", turns=("a",), system="Be brief.").encode([], tokenizer, Rendering(raw=True))
    with pytest.raises(InputError, match="a history"):
        Conversation("it", history=({"role": "user", "content": "a"},)).encode([], tokenizer, Rendering(raw=True))
    with pytest.raises(InputError, match="has tools, which needs the chat template"):
        Conversation("it", turns=("a",), tools=({"type": "function"},)).encode([], tokenizer, Rendering(raw=True))
    with pytest.raises(InputError, match="only in raw text"):
        Rendering(special_tokens=True)
    with pytest.raises(InputError, match="--raw-prompt"):
        Rendering(raw=True, system="Be brief.")
    with pytest.raises(InputError, match="YYYY-MM-DD"):
        Rendering(date="soon")
    with pytest.raises(InputError, match="system text is empty"):
        Rendering(system="")
