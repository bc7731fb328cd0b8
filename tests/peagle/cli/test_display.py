"""What is shown of progress where nobody looks at a terminal, and of an answer's channels where somebody does."""

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.text import Text

from peagle.cli import display
from peagle.cli.display import PART, Display, Stage
from peagle.engine.request import Request
from tests.support.channels import PROMPT, HarmonyTokenizer, ids, split


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print lines of progress at once."""
    monkeypatch.setattr(display, "LINE_SECONDS", 0.01)


def awaited(capsys: pytest.CaptureFixture[str], pattern: str) -> str:
    """Wait for a line on standard error, for as long as a busy machine may take; return what was printed."""
    deadline, printed = time.monotonic() + 60, ""
    while not re.search(pattern, printed):
        assert time.monotonic() < deadline, printed
        time.sleep(0.01)
        printed += capsys.readouterr().err
    return printed


def decode_plainly(shows: Display) -> None:
    shows.run_stage("comparing", 0, 1)
    shows.compared(20, 1000)


# what begins, how many requests there are, the line
LINES: list[tuple[Callable[[Display], Any], int, str]] = [
    (lambda shows: shows.stage("loading"), 1, r"loading: \d+ s so far$"),
    (lambda shows: shows.begin_run("measuring", 1, 3), 1, "measuring: run 2 of 3"),
    (lambda shows: shows.begin_run("compiling", 0, 3, unit=PART), 1, r"compiling: part 1 of 3, \d+ s so far$"),
    (
        lambda shows: shows.begin_run("compiling", 1, 3, 3600.0, unit=PART),
        1,
        r".*part 2 of 3, about \d+ min \d+ s left$",
    ),
    (decode_plainly, 1, "comparing with plain decoding.*: 20 of 1,000 tokens"),
    (lambda shows: shows.run_stage("decoding", 0, 7), 7, "decoding: 0 of 7 requests$"),
]


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(("begin", "total", "line"), LINES)
def test_without_a_terminal_lines_say_how_far_it_is_while_it_lasts(
    capsys: pytest.CaptureFixture[str], begin: Callable[[Display], Any], total: int, line: str
) -> None:
    shows = Display(total=total)
    with begin(shows) or contextlib.nullcontext():
        awaited(capsys, f"(?m)^{line}")
    shows.end_all()
    shows.clear()
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("quickly")
def test_no_line_falls_into_a_text_that_streams(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output and standard error may go to one file."""
    shows = Display(text=True, streaming=True)
    shows.run_stage("decoding", 0, 1)
    request = Request((1,), 10)
    shows.started(request, None)
    awaited(capsys, "(?m)^decoding: ")  # a long prompt is read
    shows.emitted(request, (1,), "a")
    capsys.readouterr()
    time.sleep(0.05)
    shows.emitted(request, (2,), "b")
    assert tuple(capsys.readouterr()) == ("b", "")
    shows.end_all()


@pytest.mark.parametrize(
    ("unit", "far", "shown"),
    [
        (None, (0, 0, None), ""),
        (None, (0, 10, None), "0%"),
        (None, (2, 10, None), "20%, about 4 min 20 s left"),  # 65 s for the first two
        (None, (2, 10, 7.0), "20%, about 7 s left"),
        ("run", (2, 10, None), "run 3 of 10, about 4 min 20 s left"),
        ("test", (10, 10, None), "test 10 of 10"),
        ("tokens", (2, 1000, 0.1), "2 of 1,000 tokens"),
    ],
)
def test_progress_is_a_share_or_a_count_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, unit: str | None, far: tuple[int, int, float | None], shown: str
) -> None:
    clock = iter([0.0, 300.0, 365.0, 365.0])  # made, told first, told, shown
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    stage = Stage("decoding", unit, lambda: None)
    stage(0, far[1])
    stage(*far)
    assert stage.progress == shown


def test_what_came_before_the_first_report_says_nothing_about_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step that compiles for a minute, in a training that goes on after 500 steps."""
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    stage = Stage("training", "steps", lambda: None)
    shown = []
    for now, done in ((60.0, 501), (62.0, 503)):  # noqa: B007  # the clock reads it
        stage(done, 600)
        shown.append(stage.progress)
    assert shown == ["501 of 600 steps", "503 of 600 steps, about 1 min 37 s left"]


def test_text_goes_where_standard_output_goes_while_progress_is_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, screen = io.StringIO(), Screen()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", screen)
    shows = Display(text=True, streaming=True)
    shows.run_stage("decoding", 0, 1)
    request = Request((1,), 10)
    shows.started(request, None)
    shows.emitted(request, (1,), "abc")
    shows.end(request.index)
    shows.end_all()
    assert out.getvalue() == "abc\n"
    assert "1 of 10 tokens" in screen.getvalue()
    assert "abc" not in screen.getvalue()


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
    shows = Display(text=True, quiet=quiet, streaming=True)
    shows.set_tokenizer(HarmonyTokenizer())
    request = Request(PROMPT, 100)
    shows.started(request, None)
    shows.emitted(request, ids(split(ANSWER)), ANSWER)
    shows.end(request.index)
    assert out.getvalue() == shown


PARTS = [("a", 0), ("b", 1), ("c\n", 2), ("d", 0)]
COLOURS = {"TERM": "xterm-256color"}


def with_environment(monkeypatch: pytest.MonkeyPatch, out: io.StringIO, environment: dict[str, str]) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out)


@pytest.mark.parametrize(
    ("out", "environment", "quiet", "coloured"),
    [
        (Screen, COLOURS, False, True),
        (Screen, COLOURS, True, False),
        (Screen, {**COLOURS, "NO_COLOR": "1"}, False, False),
        (Screen, {"TERM": "dumb"}, False, False),
        (io.StringIO, COLOURS, False, False),
    ],
)
def test_accepted_drafts_are_coloured_on_a_terminal_with_colours_alone(
    monkeypatch: pytest.MonkeyPatch, out: type[io.StringIO], environment: dict[str, str], quiet: bool, coloured: bool
) -> None:
    written = out()
    with_environment(monkeypatch, written, environment)
    shows = Display(text=True, quiet=quiet, streaming=True, drafts=True)
    request = Request((1,), 10)
    shows.started(request, None)
    shows.emitted(request, (1, 2, 3, 4), "abc\nd", PARTS)
    shows.end(request.index)
    assert shows.shows_drafts == coloured
    assert len(re.findall(r"\x1b\[38;\S+?m[bc]", written.getvalue())) == 2 * coloured
    assert Text.from_ansi(written.getvalue()).plain == "abc\nd\n"
