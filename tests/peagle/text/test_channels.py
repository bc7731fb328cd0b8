"""Channels of an answer: the format's rules, any cut, malformed answers, stop strings, prompts that begin a message."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.answers.result import Assembler
from peagle.cli.display import Channels
from peagle.engine.request import FinishReason, Request, TokenChunk
from peagle.loading.checkpoints import DEMO_DIRECTORY
from peagle.text.channels import CONTROL, ChannelParser, Delta
from peagle.text.tokenizer import detokenize, load_tokenizer
from tests.support.channels import PROMPT, HarmonyTokenizer, Stream, ids, split
from tests.support.pairs import ByteTokenizer


def parser(prompt: Sequence[int] = PROMPT, tokenizer: ByteTokenizer | None = None) -> ChannelParser:
    numbers = itertools.count()
    return ChannelParser(tokenizer or HarmonyTokenizer(), prompt, new_id=lambda: f"call_{next(numbers)}")


def joined(deltas: Iterable[Delta]) -> list[tuple[str, str, str | None]]:
    """Join each message's deltas: (kind, text, name of the tool)."""
    messages: dict[int, tuple[str, str, str | None]] = {}
    for delta in deltas:
        name = None if delta.call is None else delta.call.name
        kind, text, known = messages.setdefault(delta.message, (delta.kind, "", name))
        assert (kind, known) == (delta.kind, name)
        messages[delta.message] = kind, text + delta.text, name
    assert list(messages) == sorted(messages)
    return list(messages.values())


def parse(stream: Stream, prompt: Sequence[int] = PROMPT) -> list[tuple[str, str, str | None]]:
    one = parser(prompt)
    return joined([*one.add(ids(stream)), *one.finish()])


def content(text: str) -> tuple[str, str, None]:
    return "content", text, None


def reasoning(text: str) -> tuple[str, str, None]:
    return "reasoning", text, None


def call(name: str, arguments: str) -> tuple[str, str, str]:
    return "tool_call", arguments, name


WELL_FORMED = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
     [reasoning("Hm."), content("42")]),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", [call("f", "{}")]),
    ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>", [call("f", "{}")]),
    (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", [call("f", "{}")]),
    ("<|channel|>analysis to=functions.f<|message|>{}<|call|>", [call("f", "{}")]),
    ("<|channel|>commentary to=lookup<|message|>{}<|call|>", [call("lookup", "{}")]),
    ("<|channel|>commentary<|message|>A plan.<|end|><|start|>assistant<|channel|>commentary to=functions.a.b"
     "<|message|>1<|call|><|start|>assistant<|channel|>commentary to=functions.c<|message|><|call|>",
     [content("A plan."), call("a.b", "1"), call("c", "")]),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [reasoning("1 + 1")]),
    ("<|channel|>commentary to=assistant<|message|>Hm.<|end|>", [content("Hm.")]),
    ("<|channel|>final <|constrain|>json<|message|>{}<|endoftext|>", [content("{}")]),
    # wherever models write the recipient and the channel
    *((header + "<|message|>{}<|call|>", [call("f", "{}")]) for header in (
        "commentary to=functions.f<|channel|>commentary <|constrain|>json",
        " commentary to=functions.f<|channel|>commentary json",
        "commentaryto=functions.f <|constrain|>json",
        "analysis to=functions.f<|channel|>commentary",
        " to=functions.f<|channel|>commentary to=functions.f <|constrain|>json",
        " to=functions.f json",
        "<|channel|>to=functions.f commentary <|constrain|>json",
        "<|channel|>commentary <|constrain|>json to=functions.f",
        "<|channel|>commentaryto=functions.f json",
        "<|channel|>commentary to=functions.f<|channel|>commentary <|constrain|>json",
        "<|channel|>commentary functions.f<|constrain|>json",
        "<|start|>assistantcommentary to=functions.f<|channel|>commentary json",
        "<|start|> to=functions.f<|channel|>commentary",
        "<|start|>assistant<|start|>assistant to=functions.f<|channel|>commentary",
    )),
    ("commentary<|message|>A plan.<|end|><|start|>assistantanalysis<|message|>Hm.<|end|><|start|>assistantfinal"
     "<|message|>42", [content("A plan."), reasoning("Hm."), content("42")]),
    ("<|channel|>analysis<|channel|>final<|message|>x", [content("x")]),
    # of another channel
    *((f"<|channel|>{channel}<|message|>x<|end|>y", [content("x"), content("y")])
      for channel in ("other", "comment", "")),
    ("<|message|>no channel<|return|>", [content("no channel")]),
    ("<|start|>assistant<|channel|>final<|message|>again<|return|>", [content("again")]),
    ("<|channel|>final<|message|><|return|>", []),
    ("", []),
    ("<|return|>", []),
    # cut off in a header: it is no text
    ("<|channel|>ana", []),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assis", [reasoning("Hm.")]),
    ("<|channel|>commentary to=functions.f <|constrain|>js", []),
]  # fmt: skip

LONG = "x" * 300
MALFORMED = [
    ("Hello", [content("Hello")]),
    (" Hello <|message|> you<|return|>", [content(" Hello <|message|> you")]),
    (" to=", [content(" to=")]),
    ("<|channel|>final but then no message<|return|>", [content("<|channel|>final but then no message")]),
    ("<|channel|>final<|message|>a<|constrain|>b<|message|>c", [content("a<|constrain|>b<|message|>c")]),
    ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", [reasoning("a"), content("b")]),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [reasoning("a"), content("b")]),
    ("<|channel|>analysis<|message|>a<|channel|> b<|end|>", [reasoning("a")]),
    ("<|channel|>analysis<|message|>a<|channel|>so b<|end|>", [reasoning("a<|channel|>so b")]),
    ("<|channel|>final<|message|>a<|end|><|end|><|return|>b<|call|>", [content("a"), content("b")]),
    ("<|channel|>final<|end|>", []),
    ("<|start|>The answer is<|end|>", [content("<|start|>The answer is")]),
    (f"<|channel|>final to={LONG}<|message|>y", [content(f"<|channel|>final to={LONG}<|message|>y")]),
]  # fmt: skip
FOREIGN = [
    "<|start|>functions.f to=assistant<|channel|>commentary<|message|>",
    "<|start|>functions.f<|channel|>commentary to=assistant<|message|>",
    "<|start|>browser.search to=assistant<|channel|>analysis<|message|>",
    "<|start|>python<|message|>",
    "<|start|>user<|message|>",
    "<|start|>user says <|message|>",
    "<|start|>user<|channel|>final<|message|>",
    "<|start|>developer<|message|># Instructions\n",
    "<|start|>system ",
    "<|start|>tool to=assistant",
    "<|start|>functions.f to=functions.f<|constrain|>json<|message|>",
]  # fmt: skip


@pytest.mark.parametrize("header", FOREIGN)
@pytest.mark.parametrize("before", ["", "<|channel|>final<|message|>a", "<|channel|>analysis<|message|>a<|end|>"])
def test_nothing_of_another_role_is_in_the_answer(header: str, before: str) -> None:
    for end in ("<|end|>", "<|call|>", ""):
        own = "<|start|>assistant<|channel|>final<|message|>b"
        assert parse(split(before + header + "Und so viel " + end + own)) == parse(split(before + "<|end|>" + own))


@pytest.mark.parametrize(("answer", "expected"), WELL_FORMED + MALFORMED)
def test_messages_of_an_answer(answer: str, expected: list[tuple[str, str, str | None]]) -> None:
    assert parse(split(answer)) == expected


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "42<|return|>", [content("42")]),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm", ".<|end|>", [reasoning(".")]),
        ("<|start|>assistant<|channel|>", "analysis<|message|>Hm.<|end|>", [reasoning("Hm.")]),
        ("<|start|>assistant<|channel|>", "other<|message|>Hm.", [content("Hm.")]),
        ("<|start|>assistant<|channel|>commentary to=functions.", "f<|message|>{}<|call|>", [call("f", "{}")]),
        ("<|start|>assistant<|channel|>commentary to=functions.f<|message|>", "{}<|call|>", [call("f", "{}")]),
        ("<|start|>assistant<|channel|>commentary to=functions.f<|message|>", "", [call("f", "")]),
        ("<|start|>assistant<|channel|>final<|message|>\xc3", "\xa9", [content("�")]),
        ("<|start|>user<|message|>Hi<|end|>", "<|start|>assistant<|channel|>final<|message|>Ho", [content("Ho")]),
        ("<|start|>user<|message|>Hi", " there<|end|>", [content(" there")]),
        ("<|start|>", "assistant<|channel|>final<|message|>Ho", [content("Ho")]),
        # raw text: all of the answer is content
        ("def f():", "<|channel|>final<|message|>x<|return|>", [content("<|channel|>final<|message|>x<|return|>")]),
    ],
)
def test_the_prompts_part_of_a_message_is_given(
    prompt: str, answer: str, expected: list[tuple[str, str, str | None]]
) -> None:
    assert parse(split(answer), ids(split(prompt))) == expected


def test_text_that_spells_control_tokens_stays_text() -> None:
    spelled = "<|end|><|start|>assistant<|channel|>final<|message|>so"
    stream = ids(split("<|channel|>analysis<|message|>")) + tuple(spelled.encode()) + ids(["<|end|>"])
    one = parser()
    assert joined([*one.add(stream), *one.finish()]) == [reasoning(spelled)]


def test_a_tokenizer_without_the_control_tokens_has_content_only() -> None:
    one = parser(b"<|start|>assistant", ByteTokenizer())
    text = "<|channel|>analysis<|message|>Hm.<|end|>"
    assert joined([*one.add(text.encode()), *one.finish()]) == [content(text)]


def test_calls_are_numbered_and_keep_their_ids() -> None:
    one = parser()
    first = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    deltas = [delta for i in ids(split(first + "<|start|>assistant" + first)) for delta in one.add([i])]
    calls = [delta.call for delta in deltas if delta.call is not None]
    assert len(calls) == len(deltas) == 6  # a delta without text, and one for each character
    assert [(tool_call.index, tool_call.id) for tool_call in calls] == [(0, "call_0")] * 3 + [(1, "call_1")] * 3
    assert [delta.text for delta in deltas] == ["", "{", "}"] * 2
    assert [delta.text for delta in parser().add(ids(split(first)))] == ["", "{}"]


def test_ids_of_calls_are_unique() -> None:
    stream = ids(split("<|channel|>commentary to=functions.f<|message|>{}<|call|>"))
    calls = {ChannelParser(HarmonyTokenizer(), PROMPT).add(stream)[0].call for _ in range(2)}
    assert len({tool_call.id for tool_call in calls if tool_call is not None}) == 2


def test_the_demos_answers_are_content() -> None:
    tokenizer = load_tokenizer(DEMO_DIRECTORY / "target")
    assert tokenizer is not None
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    answer = "naïve café <|end|>"
    one = ChannelParser(tokenizer, prompt)
    assert joined([*one.add(tokenizer.encode(answer)[1:]), *one.finish()]) == [content(answer)]


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    one = parser()
    assert one.add(ids(["<|channel|>", "final", "<|message|>"])) == []
    assert [d.text for d in one.add("é".encode()[:1])] == []
    assert [d.text for d in one.add("é".encode()[1:])] == ["é"]
    assert [d.text for d in one.add("é".encode()[:1])] == []
    assert [d.text for d in one.finish()] == ["�"]
    assert [d.text for d in parser().add(b" H")] == [" H"]  # no header begins with it


PARTS = st.sampled_from(
    [
        *CONTROL,
        *("assistant", "final", "analysis", "commentary", " to=functions.f", " json", "user", " ", "{}"),
        *("Und so viel ", "\xc3", "\xa9", "\xc3\xa9", "\xf0\x9f"),  # bytes: incomplete characters, too
    ]
)
STREAMS = st.lists(PARTS, max_size=25)
WELL_FORMED_STREAMS = st.lists(st.sampled_from([answer for answer, _ in WELL_FORMED]), max_size=4).map(
    lambda answers: [part for answer in answers for part in split(answer)]
)
PROMPTS = st.sampled_from(["", "<|channel|>", "<|channel|>final<|message|>", "<|channel|>analysis<|message|>x<|end|>"])


def cut(stream: Sequence[int], sizes: Sequence[int]) -> Iterable[Sequence[int]]:
    start = 0
    for size in sizes:
        yield stream[start : start + size]
        start += size
    yield stream[start:]


@given(STREAMS | WELL_FORMED_STREAMS, st.lists(st.integers(0, 9)), PROMPTS)
def test_cuts_do_not_matter(stream: Stream, sizes: list[int], begun: str) -> None:
    prompt = PROMPT + ids(split(begun))
    whole, pieces = parser(prompt), parser(prompt)
    expected = [*whole.add(ids(stream)), *whole.finish()]
    deltas = [delta for tokens in cut(ids(stream), sizes) for delta in pieces.add(tokens)] + pieces.finish()
    assert joined(deltas) == joined(expected)
    assert {delta.call for delta in deltas} == {delta.call for delta in expected}
    assert all(delta.text for delta in deltas if delta.call is None)


@given(STREAMS, PROMPTS)
def test_no_text_is_lost_and_none_is_made_up(stream: Stream, begun: str) -> None:
    """Text of several words fits into no header; the text of messages is the answer's, with gaps."""
    for other, own in (("user", []), ("<|start|>", ["<|start|>", "assistant"])):  # other roles' messages are dropped
        stream = [part for one in stream for part in (own if one == other else [one])]
    one = parser(PROMPT + ids(split(begun)))
    text = "".join(text for _, text, _ in joined([*one.add(ids(stream)), *one.finish()]))
    spelled = detokenize(HarmonyTokenizer(), ids(stream))
    rest = iter(spelled)
    assert all(char in rest for char in text)
    assert text.count("Und so viel ") == spelled.count("Und so viel ")


@given(STREAMS, st.lists(st.integers(1, 9)), st.sampled_from(["so", "é", "al", "<|end|>", "|>", "x"]))
def test_stop_strings_cut_deltas_as_they_cut_the_text(stream: Stream, sizes: list[int], stop: str) -> None:
    """As on a terminal: they are those of all its tokens, up to where its text ends."""
    tokenizer, answer = HarmonyTokenizer(), ids(stream)
    request = Request(PROMPT, 1000, stop=(stop,))
    assembler = Assembler(request, 0, tokenizer, 0.0)
    one, deltas = Channels(tokenizer, PROMPT), []
    chunks = [tokens for tokens in cut(answer, sizes) if tokens]
    for number, tokens in enumerate(chunks):
        reason: FinishReason | None = "length" if number + 1 == len(chunks) else None
        piece = assembler.add(TokenChunk(request, tuple(tokens), 0.0, finish_reason=reason))
        deltas += one.add(piece.token_ids, piece.text)
    deltas += one.add((), "", last=True)
    kept = assembler.result().text
    assert kept == detokenize(tokenizer, answer).split(stop)[0]
    by_text = parser()
    whole = [*by_text.add(assembler.result().output_ids), *by_text.finish()]
    shown = [delta for delta in whole if delta.start < len(kept) or (delta.start == len(kept) and not delta.text)]
    assert joined(deltas) == joined(delta._replace(text=delta.text[: len(kept) - delta.start]) for delta in shown)


@given(STREAMS | WELL_FORMED_STREAMS, st.lists(st.integers(1, 9)), st.sampled_from(["so", "é", "al", "{}", "l ", "x"]))
def test_the_first_stop_string_inside_a_content_message_ends_the_answer(
    stream: Stream, sizes: list[int], stop: str
) -> None:
    whole = parse(stream)
    one = ChannelParser(HarmonyTokenizer(), PROMPT, stop=[stop])
    deltas = [delta for tokens in cut(ids(stream), sizes) for delta in one.add(tokens)] + one.finish()
    first = next((place for place, (kind, text, _) in enumerate(whole) if kind == "content" and stop in text), None)
    expected = whole[:first]
    if first is not None:
        text = whole[first][1].split(stop)[0]
        expected += [content(text)] if text else []
    assert joined(deltas) == expected
    assert one.complete is (first is not None)


def test_no_stop_string_of_a_message_ends_in_the_first_tokens_of_the_answer() -> None:
    reasoned = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    stream = ids(split(f"{reasoned}<|channel|>final<|message|>so so so"))

    def text(least: int) -> str:
        one = ChannelParser(HarmonyTokenizer(), PROMPT, stop=["so"], min_tokens=least)
        return "".join(delta.text for delta in one.add(stream) + one.finish() if delta.kind == "content")

    before = len(stream) - len("so so so")
    assert [text(before + least) for least in (0, 1, 2, 5, 8)] == ["", "", "so ", "so so ", "so so so"]


@given(STREAMS | WELL_FORMED_STREAMS, st.lists(st.integers(1, 9)), st.sampled_from([(), ("so", "\xc3"), ("{}",)]))
def test_each_delta_has_the_tokens_of_its_text(stream: Stream, sizes: list[int], stop: Sequence[str]) -> None:
    """The bytes of the tokens are those of the text, in order, whatever was dropped between them."""
    tokenizer, answer = HarmonyTokenizer(), ids(stream)
    one = ChannelParser(tokenizer, PROMPT, stop=stop)
    deltas = [delta for part in cut(answer, sizes) for delta in one.add(part)] + one.finish()
    numbers = [token.number for delta in deltas for token in delta.tokens]
    assert numbers == sorted(set(numbers))
    spelled = detokenize(tokenizer, answer)
    for delta in deltas:
        assert spelled[delta.start :].startswith(delta.text)
        tokens = [answer[token.number] for token in delta.tokens]
        assert detokenize(tokenizer, tokens) == delta.text
        assert all(delta.start <= token.offset < delta.start + len(delta.text) for token in delta.tokens)
