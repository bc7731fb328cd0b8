"""Reports of a run, of an unfinished one, of two compared runs; errors of runs that do not compare."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.cli import main
from peagle.cli.report import show
from peagle.measure.estimates import Estimate
from peagle.measure.reports import Table
from peagle.measure.sweep import charts, layout
from peagle.measure.sweep.compare import differences
from peagle.measure.sweep.figures import WithoutLoops, rows
from peagle.measure.sweep.headline import headlines
from peagle.measure.sweep.plan import PLAIN, Variant
from peagle.measure.sweep.store import RAW, RUN, Folder, open_run
from tests.peagle.measure.sweep.runs import Lab, example_row, lines_of, with_lines, with_plan
from tests.support.commands import words
from tests.support.terminal import ROOT

pytestmark = pytest.mark.compile

Runs = tuple[Folder, Folder]


@pytest.fixture
def runs(once: Path, tmp_path: Path) -> Runs:
    """Make two runs of equal results."""
    one, two = (open_run(Path(shutil.copytree(once, tmp_path / name))) for name in ("one", "two"))
    return one, two


def rewrite(folder: Folder, change: Callable[[dict[str, Any]], None]) -> None:
    """Give each line a made-up time, so that no test depends on the machine; then `change` it."""
    lines = lines_of(folder)
    for line in lines:
        line["decode_s"] = (2.0 if line["k"] == 0 else 1.0) + 0.01 * line["repeat"]
        change(line)
    with_lines(folder, lines)


def page_of(directory: Path) -> str:
    return (directory / "README.md").read_text()


def words_of(line: str) -> str:
    return " ".join(line.split())


def now_and_then_slower(line: dict[str, Any]) -> None:
    if line["k"] == 3:
        line["decode_s"] *= 1.2 if line["request"] % 2 else 0.8


def one_more_step_accepts_nothing(line: dict[str, Any]) -> None:
    if line["k"] == 3:
        line["histogram"][0] += 3
        line["decode_s"] *= 2


def test_a_run_is_rendered_once_more_and_an_unfinished_one_says_so(lab: Lab, runs: Runs) -> None:
    folder = runs[0]
    whole = page_of(folder.path)
    (folder.path / "README.md").unlink()
    lab.run(0, "report", folder.path)
    assert page_of(folder.path) == whole
    lines = (folder.path / RAW).read_text().splitlines(keepends=True)
    (folder.path / RAW).write_text("".join(lines[:-2]))
    folder.save(rows=None)
    lab.run(0, "report", folder.path)
    assert "**Not finished:**" in page_of(folder.path).partition("\n## ")[0]
    (folder.path / RAW).write_text("")
    assert "resume the run first" in lab.run(2, "report", folder.path)


def test_the_terminal_shows_all_variants_and_the_result(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs[0]
    rewrite(folder, lambda _: None)
    assert main(["report", str(folder.path)]) == 0
    shown, figures = capsys.readouterr().out, rows(folder)
    labels = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert all(row.label.split(",")[0] in labels for row in figures)
    (sentence,) = headlines(folder, figures)
    assert f"\n{sentence}.\n" in shown
    assert "report.html" in shown


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Table], list[str]]:
    """Show a table at 80 columns; return its lines."""
    monkeypatch.setenv("COLUMNS", "80")

    def lines_of(table: Table) -> list[str]:
        show([("title", table)], [])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        return lines

    return lines_of


def test_no_word_of_a_table_is_cut_at_80_columns(shown: Callable[[Table], list[str]]) -> None:
    """Columns that do not fit follow below, each with the first."""
    header = ("variant", "acceptance length", *(f"figure{place}" for place in range(6)))
    table = Table(header, [(f"K={k}", *(f"{place}.{k} (12345..67890)" for place in range(7))) for k in range(2)])
    words = sorted(word for line in shown(table) for word in line.split() if "─" not in word)
    expected = [word for cells in (table.header, *table.rows) for cell in cells for word in cell.split()]
    repeated = [cells[0] for cells in (table.header, *table.rows)] * (words.count("variant") - 1)
    assert repeated
    assert words == sorted(["title", *expected, *repeated])


@pytest.mark.parametrize("columns", [40, 80])
def test_no_word_of_a_sentence_is_cut_in_a_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to the library that prints
    sentence = "auto was the fastest, 1.62 times as fast as plain decoding " * 3
    show([], [sentence.strip()])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert [word for line in lines for word in line.split()] == f"{sentence.strip()}.".split()


def test_a_row_of_a_table_is_one_line_at_80_columns(shown: Callable[[Table], list[str]]) -> None:
    """Each figure beside its interval, in the line that begins with its K; headers end on one line."""
    rows = [(k, *[f"{place}.00 ({place}.00..9.00)" for place in range(3)], "2065", "100.0%") for k in ("0", "auto")]
    header = ("K", "acceptance length", "speed-up", "c(K)", "tok/s", "outputs equal to plain")
    lines = list(map(words_of, shown(Table(header, rows))))
    assert all(" ".join(row) in lines for row in rows)
    assert "K acceptance length speed-up c(K) tok/s plain" in lines


def test_every_colour_of_a_drawing_is_readable_on_a_dark_page() -> None:
    def luminance(color: str) -> float:
        return sum(part * int(color[at : at + 2], 16) / 255 for part, at in ((0.2126, 1), (0.7152, 3), (0.0722, 5)))

    line = [example_row(variant=Variant(1), speedup=Estimate(2.0, 1.0, 3.0))]
    series = {str(place): line for place in range(len(charts.COLORS))}
    drawn = charts.speedup(series) or ""
    rules, _, body = drawn.partition("</style>")
    assert "@media (prefers-color-scheme: dark)" in rules
    used = set(re.findall(r"(?:fill|stroke): (#\w{6})", body))
    assert used >= {charts.PAGE, *charts.COLORS}
    assert all(f'fill: {light}"] {{ fill: {dark} !' in rules for light, dark in charts.ON_DARK.items())
    page = luminance(charts.ON_DARK[charts.PAGE])
    for color in (charts.INK, *charts.COLORS):
        assert luminance(charts.ON_DARK.get(color, color)) > page + 0.3


def test_an_interval_is_in_the_legend_only_if_it_is_drawn() -> None:
    lines = ([example_row(variant=Variant(1), speedup=speedup)] for speedup in (Estimate(2.0), Estimate(2.0, 1.0, 3.0)))
    bare, with_interval = (charts.speedup({"a": line, "b": line}) or "" for line in lines)
    assert ("LineCollection" in bare, "LineCollection" in with_interval) == (False, True)


def test_long_names_are_cut_in_their_middle_unless_two_would_be_equal() -> None:
    assert charts.shortened(["a" * 10, "bcdefghijklm"], 10) == ["a" * 10, "bcdef…ijklm"]
    alike = ["runs/one/a", "runs/two/a"]
    assert charts.shortened(alike, 4) == alike
    line = [example_row(variant=Variant(1), speedup=Estimate(2.0, 1.0, 3.0))]
    drawn = charts.speedup({f"{'long' * 30}{place}": line for place in range(2)}) or ""
    assert drawn.count("…") == 2


def test_auto_stands_apart_and_what_was_not_measured_is_not_drawn() -> None:
    fixed = [example_row(variant=Variant(k), speedup=Estimate(1.0 + k)) for k in (1, 3)]
    auto = [example_row(variant=Variant("auto"), speedup=Estimate(2.0))]
    drawn, alone = (charts.speedup({"": rows}) or "" for rows in ([*fixed, *auto], fixed))
    assert ">auto<" in drawn
    assert ">auto<" not in alone
    lines = [len(re.findall(r'id="line2d_', text)) for text in (drawn, alone)]
    assert lines[0] > lines[1], "auto has points of its own, without a line to K = 3"
    assert charts.speedup({"": [example_row()]}) is charts.concurrency({"": [example_row(variant=PLAIN.at(1))]}) is None


@pytest.mark.parametrize(("looping", "num_slower", "equal"), [(0.0, 0, 1.0), (0.5, 2, 0.75)])
def test_a_column_stands_where_it_says_something(
    finished: Folder, looping: float, num_slower: int, equal: float
) -> None:
    calm = WithoutLoops(4, Estimate(2.0), None)
    row = example_row(
        workload=finished.plan.workloads[0],
        acceptance_length=Estimate(3.0),
        looping_frac=looping,
        without_loops=calm,
        num_slower=num_slower,
        equal_to_plain_frac=equal,
    )
    ((_, table),) = layout.terminal_tables(finished, [row])
    cells = dict(zip(table.header, table.rows[0], strict=True))
    extra = (
        {"length without loops": "2.00", "slower requests": "2 of 8", "outputs that differ": "4 of 16"}
        if looping
        else {}
    )
    assert cells == {"K": "0", "acceptance length": "3.00", **extra}


def three_are_slow(line: dict[str, Any]) -> None:
    if line["k"] == 3 and line["request"] < 3:
        line["decode_s"] *= 4


def test_slower_requests_are_counted_where_repeats_are_enough(runs: Runs) -> None:
    """Two repeats give no interval; of three, a request counts if its interval lies below."""
    folder = runs[0]
    rewrite(folder, three_are_slow)
    assert {(row.num_slower, row.num_compared) for row in rows(folder)} == {(0, 0)}
    lines = lines_of(folder)
    with_lines(folder, [*lines, *(line | {"repeat": 2} for line in lines if line["repeat"] == 1)])
    counted = {row.k: (row.num_slower, row.num_compared) for row in rows(with_plan(folder, repeats=3))}
    assert counted == {0: (0, 8), 1: (0, 8), 3: (3, 8)}


def test_without_matplotlib_there_is_the_page_without_pictures(lab: Lab, runs: Runs) -> None:
    folder = runs[0]
    whole = page_of(folder.path)
    lab.monkeypatch.setattr(charts, "can_draw", lambda: False)
    assert "pip install matplotlib" in lab.run(0, "report", folder.path)
    bare = page_of(folder.path)
    assert ("![" in whole, "![" in bare) == (True, False)
    tables = [[line for line in text.splitlines() if line.startswith("|")] for text in (whole, bare)]
    assert tables[0] == tables[1]


NOTEBOOK = "module://matplotlib_inline.backend_inline"


@pytest.mark.parametrize("backend", [NOTEBOOK, "no_such_backend", "tkagg"])
def test_pictures_are_the_same_whatever_backend_and_style_the_environment_names(backend: str, tmp_path: Path) -> None:
    """In a process of its own, since matplotlib reads its environment once. Text with letters that its font lacks."""
    (tmp_path / "matplotlibrc").write_text("font.size: 30\ntext.usetex: True\naxes.facecolor: red\n")
    code = (
        "from peagle.measure.sweep import charts\n"
        "print(charts.svg(lambda axis: axis.plot([1, 2], label='日本語') and axis.legend()))"
    )
    usual = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    drawings = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", code], env=usual | more, cwd=ROOT, check=True, capture_output=True
        )
        for more in ({}, {"MPLBACKEND": backend, "MATPLOTLIBRC": str(tmp_path)})
    ]
    assert "日本語" in drawings[0].stdout.decode()
    assert [drawing.stdout for drawing in drawings] == [drawings[0].stdout] * 2
    assert [drawing.stderr for drawing in drawings] == [b""] * 2


def test_a_picture_that_fails_is_a_warning_and_nothing_else(lab: Lab, runs: Runs) -> None:
    folder = runs[0]
    whole = page_of(folder.path)

    def broken() -> None:
        raise ImportError("no libfreetype\nhere")

    lab.monkeypatch.setattr(charts, "_matplotlib", broken)
    messages = lab.run(0, "report", folder.path)
    assert messages.startswith("peagle: warning: a picture cannot be drawn: ImportError: no libfreetype here; exp")
    assert messages.count("\n") == 1
    tables = [[line for line in text.splitlines() if line.startswith("|")] for text in (whole, page_of(folder.path))]
    assert tables[0] == tables[1]


def test_figures_are_shown_though_the_page_cannot_be_written(
    lab: Lab, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise InputError("no room")

    lab.monkeypatch.setattr("peagle.measure.reports.write", full)
    assert main(words("report", runs[0].path)) == 2
    shown = capsys.readouterr()
    assert "speed-up" in shown.out
    assert "report.html" not in shown.out
    assert "no room" in shown.err


# --- two runs ---


def test_equal_runs_do_not_differ(lab: Lab, runs: Runs) -> None:
    rewrite(runs[0], lambda _: None)
    rewrite(runs[1], now_and_then_slower)
    compared = differences(*runs)
    assert [(difference.label, difference.num_requests) for difference in compared] == [("1", 8), ("3", 8)]
    changes = [
        change for difference in compared for change in (difference.acceptance_length, difference.speedup) if change
    ]
    assert not any(change.real for change in changes)
    assert [change.equal for change in changes] == [True, True, True, False]
    lab.run(0, "report", runs[0].path, runs[1].path, "--out", lab.root / "both")
    text = page_of(lab.root / "both")
    assert "two against one" in text
    one, three = [line for line in text.splitlines() if line.startswith("| prompts, raw")]
    assert (one.count(", equal |"), three.count(", equal |"), three.count(", undecided |")) == (2, 1, 1)


def test_a_difference_of_every_request_is_real(runs: Runs) -> None:
    rewrite(runs[0], lambda _: None)
    rewrite(runs[1], one_more_step_accepts_nothing)
    (worse,) = [difference for difference in differences(*runs) if difference.label == "3"]
    for change in (worse.acceptance_length, worse.speedup):
        assert change is not None
        assert change.real
        assert (change.difference.high or 0) < 0


def test_runs_that_cannot_be_compared_are_refused_in_a_line(lab: Lab, runs: Runs) -> None:
    first, second = runs
    sources = json.loads((second.path / RUN).read_text())["plan"]["sources"]
    files = {path: path.read_text() for path in (second.path / RUN, second.path / RAW)}
    both, out = ["report", first.path, second.path], lab.root / "both"
    for plan, line in (
        ({"fingerprints": {"target": "another"}}, "another target"),
        ({"max_new_tokens": 99}, "another cap of new tokens (24 and 99)"),
        ({"temperatures": [0.7]}, "no workload and K in common"),
        ({"sources": [sources[0] | {"sha256": "0"}]}, "other prompts"),
    ):
        with_plan(second, **plan)
        if "temperatures" in plan:
            (second.path / RAW).write_text(files[second.path / RAW].replace('"temperature": 0.0', '"temperature": 0.7'))
        assert line in lab.run(2, *both, "--out", out)
        assert not out.exists()
        for path, text in files.items():
            path.write_text(text)
    assert "give --out DIR" in lab.run(2, *both)
