"""What is shown of progress where nobody looks at a terminal."""

import pytest

from peagle.cli import display
from peagle.cli.display import Display


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
