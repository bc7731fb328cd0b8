"""Assembling answers from chunks: stop strings, and the text shown meanwhile."""

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.answers.result import Assembler, decode, follow, submit
from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.host.engine import Engine
from peagle.engine.request import FinishReason, Request, StepRecord, TokenChunk
from peagle.engine.resolved import ResolvedConfig
from peagle.pair import Pair
from tests.support.pairs import ByteTokenizer, toy_pair
from tests.support.toys import MarkovTarget

pytestmark = pytest.mark.compile

PIECES = (b"a", b"b", b"ab", b"aab", b"bab", b"", b"\xc3", b"\xa9", b"\xc3\xa9", b"b\xc3", b"\xa9a")
PROMPT = (1, 2, 3)
K = 3


class PieceTokenizer(ByteTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


def brute_force(token_ids: Sequence[int], stop: Sequence[str], least: int, stopped: bool) -> tuple[str, int, bool]:
    """Reference: decode all tokens anew after each; return (text, number of tokens, whether stopped).

    A stop string counts if a token after the first `least` completes it.
    """

    def decoded(count: int) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return decoder.decode(b"".join(PIECES[token] for token in shown[:count]))

    shown = token_ids[:-1] if stopped else token_ids
    for count in range(least + 1, len(shown) + 1):
        text, start = decoded(count), len(decoded(least))
        places = [text.find(string, max(0, start + 1 - len(string))) for string in stop]
        if places := [place for place in places if place >= 0]:
            return text[: min(places)], count, True
    return b"".join(PIECES[token] for token in shown).decode(errors="replace"), len(token_ids), False


tokens = st.integers(0, len(PIECES) - 1)
runs = st.lists(tokens, min_size=1, max_size=K + 1)
stops = st.lists(st.text("abé\ufffd", min_size=1, max_size=4), max_size=3)
ENDS: tuple[FinishReason | None, ...] = ("length", "stop", "aborted", None)


@settings(max_examples=400, deadline=None)
@given(
    tokens,
    st.lists(st.lists(runs, min_size=1, max_size=3), max_size=5),
    stops,
    st.sampled_from([0, 0, 1, 3, 6]),
    st.sampled_from(ENDS),
)
def test_an_answer_is_the_whole_text_cut_at_the_first_stop_string(
    first: int, dispatches: list[list[list[int]]], stop: list[str], least: int, end: FinishReason | None
) -> None:
    """Each dispatch gives a chunk of one or more steps; each step a run of tokens."""
    request = Request(PROMPT, 1000, SamplingParams(min_tokens=least), stop=tuple(stop))
    chunks, starts = [TokenChunk(request, (first,), 0.0)], []
    token_ids = [first]
    for number, steps in enumerate(dispatches, 1):
        chunk, records = [], []
        for run in steps:
            starts.append((len(token_ids) + len(chunk), len(run)))
            records.append(StepRecord(len(PROMPT) + starts[-1][0] - 1, (0,) * K, len(run) - 1, run[-1]))
            chunk += run
        token_ids += chunk
        chunks.append(TokenChunk(request, tuple(chunk), float(number), tuple(records)))
    chunks[-1] = dataclasses.replace(chunks[-1], finish_reason=end)

    assembler = Assembler(request, K, PieceTokenizer(), 0.0)
    pieces = [assembler.add(chunk) for chunk in chunks]
    shown = "".join(piece.text for piece in pieces) + assembler.close()
    result = assembler.result()

    text, count, cut = brute_force(token_ids, stop, least, end == "stop")
    assert shown == result.text == text
    assert result.output_ids == tuple(token_ids[:count])
    assert [token for piece in pieces for token in piece.token_ids] == token_ids[:count]
    assert result.finish_reason == ("stop" if cut else end)
    kept = [(begin, width) for begin, width in starts if not cut or begin < count]
    assert len(result.steps) == len(kept)
    assert result.num_truncated == 1 + sum(width for _, width in kept) - count
    assert len(result.times_s) == sum(bool(piece.token_ids) for piece in pieces)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    request = Request(PROMPT, 9, stop=("END", "N!"))
    assembler = Assembler(request, 0, ByteTokenizer(), 0.0)

    def add(text: str, reason: FinishReason | None = None) -> str:
        return assembler.add(TokenChunk(request, tuple(text.encode()), 1.0, (), reason)).text

    assert [add("an E"), add("at"), add(" EN"), add("E")] == ["an ", "Eat", " ", "EN"]
    assert add("N", "length") == "EN"  # the answer ends there: it was no stop string
    assert (add("never"), assembler.close()) == ("", "")
    assert assembler.result().text == "an Eat ENEN"


def test_no_stop_string_ends_in_the_first_min_tokens_but_one_may_begin_there() -> None:
    def text(least: int, stop: tuple[str, ...] = ("END", "ENDING")) -> str | None:
        request = Request(PROMPT, 99, SamplingParams(min_tokens=least), stop=stop)
        assembler = Assembler(request, 0, ByteTokenizer(), 0.0)
        assembler.add(TokenChunk(request, tuple(b"an END, the ENDS"), 1.0, (), "length"))
        return assembler.result().text

    assert [text(least) for least in (0, 5, 6, 14, 15)] == [
        "an ",
        "an ",
        "an END, the ",
        "an END, the ",
        "an END, the ENDS",
    ]
    assert text(6, ("END, the E",)) == "an "


def test_of_several_strings_that_a_token_completes_the_first_in_the_text_counts() -> None:
    class Whole(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"x abc y"

    for stop in (("c", "abc"), ("abc", "c"), ("b", "c", "abc")):
        request = Request(PROMPT, 9, stop=stop)
        assembler = Assembler(request, 0, Whole(), 0.0)
        assert assembler.add(TokenChunk(request, (0, 0), 1.0)).text == "x "
        assert assembler.result().output_ids == (0,)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (("a", ""), "stop string 2 of 2 is empty; expected"),
        (("a",) * 65, "65 stop strings are given; expected at most 64: leave some out"),
        (("a" * 1025,), "stop string 1 of 1 has 1025 characters; expected at most 1024"),
        (("\ud800",), "not valid Unicode text"),
    ],
)
def test_stop_strings_that_cannot_be_are_refused(stop: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Request(PROMPT, 5, stop=stop)
    Request(PROMPT, 5, stop=("a" * 1024,) * 64)


# --- through the engine ----------------------------------------------------------------------------------------------


def counting(end: Sequence[float] | None = None) -> MarkovTarget:
    """Make a target of byte tokens, each followed by the next one; after "w", the given logits."""
    table = np.full((256, 256), -9.0, np.float32)
    table[np.arange(256), (np.arange(256) + 1) % 256] = 9
    if end is not None:
        table[ord("w")] = end
    return MarkovTarget(jnp.asarray(table))


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("together", [1, 4])
def test_a_stop_string_ends_its_request_in_the_engine_and_no_other(k: int, together: int) -> None:
    drafter = NGram() if k else None
    engine = Engine(counting(), drafter, ResolvedConfig(k, 2, 96, steps_per_dispatch=together))
    requests = [
        Request((ord("a"),), 12, stop=("gh",)),
        Request((ord("A"),), 10),
        Request((ord("c"),), 90, stop=("x", "zz", "stu")),  # after "stu" there would be many more
    ]
    results = decode(engine, requests, ByteTokenizer())
    assert [result.text for result in results] == ["bcdef", "BCDEFGHIJK", "defghijklmnopqr"]
    assert [bytes(result.output_ids) for result in results] == [b"bcdefgh", b"BCDEFGHIJK", b"defghijklmnopqrstu"]
    assert [result.finish_reason for result in results] == ["stop", "length", "stop"]
    assert not engine.busy
    for result in results:
        decided = sum(step.num_accepted + 1 for step in result.steps)
        assert len(result.output_ids) == 1 + decided - result.num_truncated


@pytest.mark.parametrize("together", [1, 4])
def test_tokens_after_a_stop_string_may_be_anything(together: int) -> None:
    """Speculation may meet outputs that are not finite before the host reads the end of the answer."""
    target = counting(end=[np.nan] * 256)
    engine = Engine(target, None, ResolvedConfig(0, 1, 96, steps_per_dispatch=together))
    (result,) = decode(engine, [Request((ord("p"),), 20, stop=("vw",))], ByteTokenizer())
    assert (result.text, result.finish_reason) == ("qrstu", "stop")
    with pytest.raises(InputError, match="not finite"):
        decode(engine, [Request((ord("p"),), 20, stop=("wx",))], ByteTokenizer())


def test_a_reader_that_stops_early_frees_every_slot() -> None:
    engine = Engine(counting(), None, ResolvedConfig(0, 2, 96))
    handles = submit(engine, [Request((ord("a"),), 90), Request((ord("b"),), 90)], ByteTokenizer())
    pieces = follow(engine, handles)
    next(pieces)
    assert engine.busy
    pieces.close()
    assert not engine.busy


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_speculation_ends_where_plain_decoding_does(toy: Pair, options: dict[str, Any]) -> None:
    whole = toy.generate("Hi", max_new_tokens=60, num_speculative_tokens=0, **options)
    assert whole.text is not None
    for begin, length in ((3, 1), (10, 3), (25, 6)):
        stop = whole.text[begin : begin + length]
        plain = toy.generate("Hi", max_new_tokens=60, num_speculative_tokens=0, stop=stop, **options)
        assert plain.text == whole.text[: whole.text.index(stop)]
        assert plain.finish_reason == "stop"
        stream = toy.stream("Hi", max_new_tokens=60, num_speculative_tokens=K, stop=["\x00", stop], **options)
        assert "".join(stream) == plain.text
        assert stream.result.output_ids == plain.output_ids
    assert not any(engine.busy for engine in toy.engines.values())


def test_without_a_tokenizer_there_is_no_text_to_stop() -> None:
    with pytest.raises(InputError, match=r"stop strings are text, but .* no tokenizer.json; leave them out"):
        toy_pair(None).stream([50], stop="a")
    engine = Engine(counting(), None, ResolvedConfig())
    with pytest.raises(InputError, match="stop strings are text"):
        decode(engine, [Request(PROMPT, 5, SamplingParams(), stop=("a",))], None)
