"""What is shown of progress where nobody looks at a terminal, and of an answer's channels where somebody does."""

import io
import sys

import pytest

from peagle.cli import display
from peagle.cli.display import Display
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
