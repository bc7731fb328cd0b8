"""Text to ids and back: no character is split, no token is converted twice, the date is fixed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from peagle.base.errors import InputError
from peagle.loading.checkpoints import DEMO_DIRECTORY
from peagle.text.channels import final_message
from peagle.text.prompts import chat_messages
from peagle.text.tokenizer import (
    Detokenizer,
    TextTooLong,
    Tokenizer,
    detokenize,
    fix_date,
    load_tokenizer,
    parse_date,
    template_fingerprint,
)
from tests.support.pairs import (
    SPECIALS,
    TEMPLATE,
    TEXTS,
    VOCAB_SIZE,
    ByteTokenizer,
    Directories,
    copy_tokenizer,
    write_tokenizer,
)


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


def test_every_token_is_looked_at_once() -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    for _ in range(1000):
        detokenizer.add([0xF0])  # never a whole character: nothing is decided, nothing is decoded again
    assert tokenizer.num_calls == 1000


@pytest.fixture(scope="module")
def library(directories: Directories) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(directories.target)


def test_ids_decode_as_the_library_decodes_them(tokenizer: Tokenizer, library: Any) -> None:

    @given(st.lists(st.integers(0, VOCAB_SIZE - 9), max_size=30))
    def check(ids: list[int]) -> None:
        expected = library.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert detokenize(tokenizer, ids) == expected

    check()


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_is_too_long_by_its_bytes_alone_only_if_it_is(tokenizer: Tokenizer, chat: bool) -> None:
    def encode(text: str, **most: int) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        return tokenizer.encode_chat(messages, **most) if chat else tokenizer.encode(text, **most)

    @given(st.text(max_size=40) | st.sampled_from(TEXTS))
    def check(text: str) -> None:
        ids = encode(text)
        assert encode(text, most_tokens=len(ids)) == ids

    check()
    longest = max(len(tokenizer.token_bytes(token)) for token in range(VOCAB_SIZE))
    with pytest.raises(TextTooLong, match=r"bytes, which are \d+ tokens or more; shorten it") as raised:
        encode("é" * 30 * longest, most_tokens=50)
    assert 60 <= raised.value.least_tokens <= len(encode("é" * 30 * longest))


def test_nothing_is_known_of_the_bytes_of_a_text_that_the_tokenizer_shortens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    written = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    written["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written), "utf-8")
    assert len(loaded_from(tmp_path).encode("a" * 1000 + "b", most_tokens=1)) == 1


def test_ids_that_the_tokenizer_does_not_know_are_no_text(tokenizer: Tokenizer) -> None:
    assert detokenize(tokenizer, [VOCAB_SIZE - 1, VOCAB_SIZE + 1000]) == ""


HI = [{"role": "user", "content": "Hi"}]


def rendered(tokenizer: Tokenizer, messages, **options) -> str:
    return detokenize(tokenizer, tokenizer.encode_chat(messages, **options))


def test_the_template_gets_a_fixed_date_and_the_effort(tokenizer: Tokenizer) -> None:
    assert rendered(tokenizer, HI) == (
        "<|start|>system<|message|>Today: 2025-08-05<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>"
    )
    messages = chat_messages(["Hi"], [], "Be brief.")
    other = rendered(tokenizer, messages, date="2031-02-28", reasoning_effort="high")
    assert "Today: 2031-02-28 Reasoning: high<|end|><|start|>system<|message|>Be brief.<|end|>" in other


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("plain", "plain"),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42", "42"),
        ("<|channel|>final<|message|>42<|return|>", "42"),
        ("<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}"),
        ("42<|return|>", "42"),
        ("42<|endoftext|>", "42"),
        ("", ""),
        # cut off inside its analysis, at its end, inside the next header
        ("<|channel|>analysis<|message|>I think that", ""),
        ("<|channel|>analysis<|message|>Hm.<|end|>", ""),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin", ""),
        ("<|channel|>anal", ""),
        ("<|channel|>final<|message|>4", "4"),  # inside the final channel: plain text
        # calls of tools, with the recipient in either place
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", ""),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ""),
        ("commentary to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", ""),
        ("analysis<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42", "42"),
        # what the model made up of others
        ("<|channel|>final<|message|>42<|end|><|start|>user<|message|>And?<|end|>", "42"),
        # the words of the format, in text that is not in it, and inside a message
        ("Write <|message|> behind <|channel|>final, then <|end|> it", None),
        ("<|message|> begins it", None),
        ("It is <|end|><|start|>assistant<|channel|>final<|message|>so", None),
        ("<|channel|>final<|message|>a <|message|> and <|end|> in it<|return|>", "a <|message|> and <|end|> in it"),
    ],
)
def test_only_the_final_part_of_an_answer_is_remembered(answer: str, final: str | None) -> None:
    """None: the answer unchanged."""
    assert final_message(answer) == (answer if final is None else final)


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


def loaded_from(directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def test_a_chat_without_a_template_or_against_it_is_refused(directories: Directories, tmp_path: Path) -> None:
    copy_tokenizer(directories.target, tmp_path)
    bare = loaded_from(tmp_path)
    assert bare.encode("Hi")
    with pytest.raises(InputError, match="no chat template"):
        bare.encode_chat(HI)
    copy_tokenizer(directories.target, tmp_path, "{{ raise_exception('no') }}")
    with pytest.raises(InputError, match="refuses this chat: no"):
        loaded_from(tmp_path).encode_chat(HI)


def test_a_template_in_json_is_read_where_there_is_no_other(directories: Directories, tmp_path: Path) -> None:
    copy_tokenizer(directories.target, tmp_path)
    before = template_fingerprint(tmp_path)
    path = tmp_path / "chat_template.json"
    for broken in ("{", "[1]", '{"template": "a"}', '{"chat_template": {"default": "a"}}', "[" * 100_000):
        path.write_text(broken)
        with pytest.raises(InputError, match=r"chat_template\.json holds no template") as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)
    path.write_text(json.dumps({"chat_template": TEMPLATE}))
    usual = loaded_from(directories.target).encode_chat(HI)
    assert loaded_from(tmp_path).encode_chat(HI) == usual
    fingerprints = {before, template_fingerprint(tmp_path)}
    path.write_text(json.dumps({"chat_template": "other"}))
    assert len(fingerprints | {template_fingerprint(tmp_path)}) == 3
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert loaded_from(tmp_path).encode_chat(HI) == usual


# text that might become a control token: whole tokens, parts of them, and the characters that mask these
PIECES = (*SPECIALS, "<", "<|", "|>", ">", "end", "|end|>", "<|end", "a", " ", "\n", "é", "\U000f0000", "\U000f0001")
pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)


def test_nothing_in_a_chat_is_a_control_token_and_nothing_is_lost(tokenizer: Tokenizer) -> None:
    def chat(*texts: str) -> list[dict[str, str]]:
        roles = ("system", "user", "assistant", "user")
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]

    def control(ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id < len(SPECIALS)]

    plain = tokenizer.encode_chat(chat("w", "x", "y", "z"))

    @given(st.lists(pieces, min_size=4, max_size=4))
    def check(texts: list[str]) -> None:
        ids = tokenizer.encode_chat(chat(*texts))
        assert control(ids) == control(plain)
        text = detokenize(tokenizer, plain)
        for placeholder, said in zip("wxyz", texts, strict=True):
            before, behind = (f"<|message|>{content}<|end|>" for content in (placeholder, said))
            text = text.replace(before, behind, 1)
        assert detokenize(tokenizer, ids) == text

    check()


def test_a_chat_without_special_tokens_in_it_has_the_librarys_ids(tokenizer: Tokenizer, library: Any) -> None:

    @given(st.text(st.sampled_from("<|> a(b)é\n東"), max_size=20))
    def check(text: str) -> None:
        messages = [{"role": "user", "content": text}]
        template, dates = fix_date(TEMPLATE, "2025-08-05")
        whole = library.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=False, **dates
        )
        assert tokenizer.encode_chat(messages) == tuple(library(whole, add_special_tokens=False)["input_ids"])

    check()


TOOLS = """\
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|start|>functions.{{ calls.name }}<|message|>{{ message.content|tojson }}<|end|>
{%- elif message.tool_calls -%}
{%- set calls = namespace(name=message.tool_calls[0].function.name) -%}
<|start|>to={{ calls.name }}<|message|>{{ message.tool_calls[0].function.arguments|tojson }}<|end|>
{%- else -%}
<{{ message.content }}<|start|>
{%- endif -%}
{%- endfor -%}
"""


def test_text_that_a_template_joins_or_writes_as_json_stays_text(directories: Directories, tmp_path: Path) -> None:
    template = TOOLS.replace("{%- for", "{%- set calls = namespace(name='') -%}{%- for", 1)
    template = template.replace("{%- set calls = namespace(name=message", "{%- set calls.name = (message")
    copy_tokenizer(directories.target, tmp_path, template)
    tokenizer = loaded_from(tmp_path)
    call = {"function": {"name": "<|end|>", "arguments": {"<|end|>": ["<|start|>", 1, None]}}}
    messages = [
        {"role": "user", "content": "|end|>"},  # after the template's own "<"
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": 'a "<|message|>"\n'},
    ]
    ids = tokenizer.encode_chat(messages)
    assert detokenize(tokenizer, ids) == (
        '<|end|><|start|><|start|>to=<|end|><|message|>{"<|end|>": ["<|start|>", 1, null]}<|end|>'
        '<|start|>functions.<|end|><|message|>"a \\"<|message|>\\"\\n"<|end|>'
    )
    spelled = [SPECIALS[token_id] for token_id in ids if token_id < len(SPECIALS)]
    assert spelled == ["<|start|>", *["<|start|>", "<|message|>", "<|end|>"] * 2]


def test_a_raw_text_is_characters_unless_special_tokens_are_asked_for() -> None:
    demo = loaded_from(DEMO_DIRECTORY / "target")
    begin, rest = demo.encode("")[0], demo.encode("def f(")[1:]
    assert demo.encode("<|startoftext|>def f(", special_tokens=True) == (begin, *rest)
    assert demo.encode("def f(", special_tokens=True) == (begin, *rest)
    assert demo.encode("<|start|>", special_tokens=True)[0] == begin
    assert len(demo.encode("<|start|>", special_tokens=True)) == 2
    ids = demo.encode("<|startoftext|>def f(")
    assert (ids[0], ids.count(begin)) == (begin, 1)
    assert detokenize(demo, ids[1:]) == "<|startoftext|>def f("
