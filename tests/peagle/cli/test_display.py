"""What is shown of progress where nobody looks at a terminal, and of an answer's channels where somebody does."""

import io
import sys

import pytest
from rich.console import Console

from peagle.cli import display
from peagle.cli.display import Display
from peagle.cli.output import wrapped
from peagle.engine.request import Request
from tests.peagle.text.test_channels import PROMPT, HarmonyTokenizer, ids, split


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "LINE_SECONDS", 60)
    clock = iter([0.0, 10.0, 65.0, 70.0, 130.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    with Display(text=False, quiet=False, total=1, streaming=False).stage("decoding") as progress:
        for done in range(1, 5):
            progress(done, 10)
    assert capsys.readouterr().err.splitlines() == [
        "decoding: 20%, about 4 min 20 s left",
        "decoding: 40%, about 3 min 15 s left",
    ]


def test_quietly_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(display, "LINE_SECONDS", 0)
    with Display(text=False, quiet=True, total=1, streaming=False).stage("decoding") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""


ANSWER = (
    "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    "<|start|>assistant<|channel|>final<|message|>4\x1b2<|return|>"
)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "term", "quiet", "shown"),
    [
        (Screen(), "xterm", False, "\x1b[2mHm.\x1b[22m\n\n\x1b[2mf \x1b[22m\x1b[2m{}\x1b[22m\n\n4�2\n"),
        (Screen(), "dumb", False, "Hm.\n\nf {}\n\n4�2\n"),
        (Screen(), "xterm", True, ANSWER.replace("\x1b", "�") + "\n"),
        (io.StringIO(), "xterm", False, ANSWER + "\n"),
    ],
)
def test_on_a_terminal_reasoning_is_dim_and_the_answer_is_not(
    monkeypatch: pytest.MonkeyPatch, out: io.StringIO, term: str, quiet: bool, shown: str
) -> None:
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv("TERM", term)
    shows = Display(text=True, quiet=quiet, total=1, streaming=True)
    shows.read_by(HarmonyTokenizer())
    request = Request(PROMPT, 100)
    shows.started(request, None)
    shows.emitted(request, ids(split(ANSWER)), ANSWER)
    shows.end(request)
    assert out.getvalue() == shown


def test_runs_of_a_measurement_are_counted_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "LINE_SECONDS", 0)
    clock = iter([0.0, 0.0, 2.0, 4.0, 5.0, 5.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    shows = Display(text=False, quiet=False, total=1, streaming=False)
    for done in range(3):
        shows.run_of("measuring", done, 5)
    shows.run_of("compiling", 0, 2, unit="test")  # something else begins anew
    assert capsys.readouterr().err.splitlines() == [
        "measuring: run 1 of 5",
        "measuring: run 2 of 5, about 8 s left",
        "measuring: run 3 of 5, about 6 s left",
        "compiling: test 1 of 2",
    ]


@pytest.mark.parametrize(("columns", "terminal"), [(40, True), (40, False)])
def test_lines_are_broken_between_words_in_a_terminal_alone(columns: int, terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=columns, force_terminal=terminal)
    line = "acceptance   length 3.84 | 17 steps of K = 3 | rate per position 1.00 .94 .88"
    text = wrapped(f"{line}\n  indented: {line}", console, 13)
    if not terminal:
        assert text == f"{line}\n  indented: {line}"
        return
    parts = text.split("\n")
    assert max(map(len, parts)) <= columns
    assert text.split() == f"{line} indented: {line}".split()  # no word is broken
    assert parts[1].startswith(" " * 13)
    assert parts[3].startswith("  indented")
