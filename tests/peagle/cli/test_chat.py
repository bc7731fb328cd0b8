"""`peagle chat`: what each turn is asked with, what ends it, and what a message can do to it."""

import dataclasses
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import peagle.cli.processes
from peagle.base import interrupt
from peagle.cli.display import Display
from peagle.pair import Pair
from peagle.text.prompts import Conversation, Rendering
from peagle.text.tokenizer import load_tokenizer
from tests.support.commands import Captured, last_of_each, refused, run
from tests.support.pairs import MAX_POSITIONS, Directories, copy_tokenizer, press_ctrl_c_at, toy_pair
from tests.support.terminal import CTRL_C, IN_A_CALLBACK, TOY_PROCESS, Terminal

pytestmark = pytest.mark.compile

Chat = Callable[..., Captured]
OPTIONS = ("--target", "toy", "--drafter", "ngram", "-k", "3", "-n", "12")


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy: Pair) -> Chat:
    """Pipes lines into the command, which runs in this process on the toy pair: (exit code, standard output, error)."""

    def piped(lines: bytes, *options: str, pair: Pair = toy) -> Captured:
        monkeypatch.setattr(peagle.cli.processes, "load_models", lambda *_, **__: pair)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        return run(capsys, *last_of_each(["chat", *OPTIONS, *options]))

    return piped


def answers(pair: Pair, *turns: str, system: str | None = None, **options: Any) -> list[str]:
    """What the pair says to each turn, decoded plainly, each with what was said before."""
    said: list[str] = []
    conversation = Conversation("chat", turns=turns)
    for _ in turns:
        prompt = conversation.encode(said, pair.tokenizer, Rendering(system=system))
        text = pair.generate(prompt, **{"max_new_tokens": 12, "num_speculative_tokens": 0, **options}).text
        assert text is not None
        said.append(text)
    return said


@pytest.fixture
def real_pair(pair: Pair) -> Pair:
    """The pair with weights, whose answer depends on the whole conversation, without a token that ends it."""
    return dataclasses.replace(pair, stop_token_ids=())


def lines(*texts: str) -> str:
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)


def test_the_second_turn_sees_the_first_until_reset_and_exit_ends_it(chat: Chat, real_pair: Pair) -> None:
    code, out, err = chat(b"hello\nand you?\n/reset\n  \nand you?\r\n/exit\nnever\n", pair=real_pair)
    first, second = answers(real_pair, "hello", "and you?")
    (anew,) = answers(real_pair, "and you?")
    assert second != anew  # or this would say nothing
    assert (code, out) == (0, lines(first, second, anew))
    figures = [line for line in err.splitlines() if "tok/s" in line]
    assert len(figures) == 3
    assert all("tokens |" in line and "acceptance length" in line and "finish: " in line for line in figures)
    assert "speed-up" not in err
    assert "new conversation" in err


def test_options_are_those_of_speculate(chat: Chat, toy: Pair) -> None:
    (whole,) = answers(toy, "Hi", system="Be brief.", temperature=1.0, seed=4)
    options = ("--system", "Be brief.", "--temperature", "1", "--seed", "4")
    code, out, err = chat(b"Hi\n", *options, "--quiet", "-k", "0")  # beside --drafter
    assert (code, out) == (0, f"{whole}\n")
    assert err == "peagle: warning: --drafter: no effect with -k 0, plain decoding\n"


def test_a_conversation_that_does_not_fit_says_so_and_goes_on(chat: Chat) -> None:
    long = b"a " * 40
    messages = [long, long, b"/reset", long, 9 * long, b"Hi"]
    code, out, err = chat(b"\n".join(messages), "--context", "200")
    assert (code, len(out.splitlines())) == (0, 3)
    complaints = [line for line in err.splitlines() if line.startswith("peagle: error: ")]
    assert len(complaints) == 2
    for line in complaints:
        assert "the conversation with this message has" in line
        assert "the context holds 200 positions; /reset starts a new one" in line
    code, out, err = chat(b"b" * 1000 + b"\nHi\n", "--context", str(MAX_POSITIONS))
    assert (code, len(out.splitlines())) == (0, 1)
    assert f"the context holds {MAX_POSITIONS} positions; shorten it, or start again with a larger --context" in err


def test_a_context_without_room_for_any_message_is_refused_at_once(chat: Chat, toy: Pair) -> None:
    least = len(Conversation("", turns=("a",)).encode((), toy.tokenizer, Rendering()))
    expected = f"--context is {least}; expected {least + 1} or more: in the chat template the shortest message takes"
    refused(chat(b"Hi\nAnd you?\n", "--context", str(least)), expected)
    code, out, _ = chat(b"a\n", "--context", str(least + 1), "-n", "1")
    assert (code, len(out.splitlines())) == (0, 1)
    refused(chat(b"Hi\n", "--context", "100000"), "--context is 100000; expected 2..")


def test_a_pipe_of_which_no_message_is_answered_is_bad_input(chat: Chat) -> None:
    code, out, err = chat(b"b" * 1000 + b"\n\xff\n", "--context", str(MAX_POSITIONS))
    assert (code, out, err.count("peagle: error: ")) == (2, "", 2)
    assert chat(b"", "--quiet") == (0, "", "")


def test_no_message_shows_a_traceback(chat: Chat, toy: Pair) -> None:
    control = "\x1b[31mred\x07 \x00 <|return|> \u202e"
    code, out, err = chat(control.encode() + b"\n\xff\xfe\n" + b"/unknown\n/usr/bin\n", pair=toy)
    first, third = answers(toy, control, "/usr/bin")
    assert "/unknown is not a command; expected /reset or /exit" in err
    assert (code, out) == (0, f"{first}\n{third}\n")
    assert "peagle: error: the message is not UTF-8 text; expected UTF-8\n" in err
    assert "\x1b" not in err


def test_without_a_tokenizer_or_a_template_there_is_no_chat(
    chat: Chat, directories: Directories, tmp_path: Path
) -> None:
    code, _, err = chat(b"Hi\n", pair=toy_pair(None))
    assert (code, "toy has no tokenizer.json, so it cannot chat" in err) == (2, True)
    copy_tokenizer(directories.target, tmp_path)
    code, _, err = chat(b"Hi\n", pair=toy_pair(load_tokenizer(tmp_path)))
    assert (code, "has no chat template" in err, "cannot chat" in err) == (2, True, True)


def test_ctrl_c_keeps_the_answer_as_far_as_it_came(chat: Chat, toy: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each Ctrl-C stops its own answer: the second one does not end the process."""
    prompts: list[Conversation] = []
    encode = Conversation.encode

    def noting(self: Conversation, *arguments: Any) -> tuple[int, ...]:
        prompts.append(self)
        return encode(self, *arguments)

    monkeypatch.setattr(Conversation, "encode", noting)
    press_ctrl_c_at(monkeypatch, Display, "emitted", 3)
    code, out, err = chat(b"Hi\nGo on\n", "-n", "200", pair=toy)
    whole = answers(toy, "Hi", max_new_tokens=200)[0]
    first = out.splitlines()[0]
    assert code == 0
    assert 0 < len(first) < len(whole)
    assert whole.startswith(first)
    assert "finish: interrupted" in err
    assert "finish: length" in err
    second = next(conversation for conversation in prompts if conversation.turns == ("Go on",))
    assert [dict(message) for message in second.history] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": first},
    ]
    assert not interrupt.pressed()


def test_in_a_terminal_ctrl_c_stops_the_answer_and_at_the_prompt_the_chat() -> None:
    """Though an exception would get lost where the first one comes."""
    process = TOY_PROCESS.replace("import toy_pair", "import ByteTokenizer, toy_pair").replace(
        "toy_pair(None)", "toy_pair(ByteTokenizer())"
    )
    with Terminal(
        IN_A_CALLBACK.format(then="raise KeyboardInterrupt") + process, *last_of_each(["chat", *OPTIONS, "-n", "150"])
    ) as terminal:
        terminal.wait_for(b"> ")
        terminal.press(b"Hi\n")
        terminal.wait_for(b"press")
        terminal.press(CTRL_C)
        terminal.wait_for(b"finish: interrupted")
        terminal.press(b"Go on\n")
        terminal.wait_for(b"finish: length")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert terminal.shown.count(b"Traceback") == 1  # Python's, of the exception that is lost
    assert b"/reset starts a new conversation" in terminal.shown
