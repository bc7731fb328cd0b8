"""Reports: a sentence for every outcome of a run; a difference of two runs is real only beyond prompts and rounds."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peagle.answers.result import Counters
from peagle.base.errors import InputError
from peagle.cli import main
from peagle.measure import charts
from peagle.measure.estimates import Estimate
from peagle.measure.metrics import total
from peagle.measure.sweep import page
from peagle.measure.sweep.compare import LENGTH, SPEEDUP, differences
from peagle.measure.sweep.figures import VariantRow, rows, rows_by_prompt
from peagle.measure.sweep.store import RAW, RUN, Folder, open_run
from tests.peagle.measure.sweep.runs import Lab, lines_of, with_lines, with_plan
from tests.support.commands import words
from tests.support.terminal import ROOT

pytestmark = pytest.mark.compile

Runs = tuple[Folder, Folder]
Changes = dict[str, Any]


def page_of(directory: Path) -> str:
    return (directory / "README.md").read_text()


# --- the result in a sentence ---

SURE, UNSURE = Estimate(1.19, 1.14, 1.24), Estimate(1.05, 0.94, 1.18)
SLOW, SLOWER = Estimate(0.95, 0.91, 0.99), Estimate(0.8, 0.7, 0.9)


def measured(folder: Folder, by_k: dict[int, Changes]) -> list[VariantRow]:
    """Return a run's rows with other figures."""
    even = [replace(row, speedup=Estimate(1.0, 1.0, 1.0)) for row in rows(folder)]
    return [replace(row, **by_k[row.k]) if isinstance(row.k, int) and row.k in by_k else row for row in even]


@pytest.mark.parametrize(
    ("by_k", "expected"),
    [
        (
            {1: {"speedup": UNSURE}, 3: {"speedup": SURE}},
            "K = 3: 1.19x plain decoding (95 %: 1.14 to 1.24), identical output",
        ),
        (
            {1: {"speedup": UNSURE}, 3: {"speedup": SLOW}},
            "K = 1: 1.05x plain decoding (95 %: 0.94 to 1.18), identical output; not surely faster",
        ),
        (
            {1: {"speedup": SLOW}, 3: {"speedup": SLOWER}},
            "no K beats plain decoding here: the best, K = 1, gives 0.95x (95 %: 0.91 to 0.99)",
        ),
        (
            {1: {"speedup": SLOW}, 3: {"speedup": Estimate(1.1)}},
            "K = 3: 1.10x plain decoding (too few prompts or repeats for an interval), identical output",
        ),
        (
            {1: {"speedup": SLOW}, 3: {"speedup": SURE, "num_differing": 2, "label": "3, two"}},
            "K = 3 with two: 1.19x plain decoding (95 %: 1.14 to 1.24), 2 of 16 outputs differ",
        ),
        ({k: {"counters": Counters(k, (0,) * (k + 1), (0,) * k)} for k in (1, 3)}, "nothing was drafted"),
        ({k: {"speedup": None} for k in (0, 1, 3)}, "no speed was measured, because no output has two tokens"),
    ],
)
def test_a_headline_says_what_was_measured(finished: Folder, by_k: dict[int, Changes], expected: str) -> None:
    (sentence,) = page.headlines(finished, measured(finished, by_k))
    assert sentence.startswith(expected)


def test_a_run_is_rendered_once_more_and_an_unfinished_one_says_so(lab: Lab, finished: Folder) -> None:
    whole = page_of(finished.path)
    (finished.path / "README.md").unlink()
    lab.run(0, "report", finished.path)
    assert page_of(finished.path) == whole
    with_lines(finished, [line for line in lines_of(finished) if line["k"] == 0 or line["request"] < 5])
    finished.save(rows=None)
    lab.run(0, "report", finished.path)
    assert "Not finished" in page_of(finished.path).partition("\n## ")[0]
    assert [row.num_requests for row in rows(finished)] == [8, 5, 5]
    (finished.path / RAW).write_text("")
    assert "resume the run first" in lab.run(2, "report", finished.path)


def test_a_small_set_has_a_line_per_prompt_and_several_sets_a_line_per_set(finished: Folder) -> None:
    """Beside the pooled length stands the mean of the prompts'; both follow from the lines by prompt."""
    figures = rows(finished)
    by_prompt = rows_by_prompt(finished, finished.plan.workloads[0])
    assert sorted(by_prompt) == list(range(8))
    for index, row in enumerate(figures[1:], 1):
        assert row.mean_length is not None
        lengths = [own[index].acceptance_length for own in by_prompt.values()]
        assert row.mean_length.value == pytest.approx(np.mean([length.value for length in lengths if length]))
        assert row.counters == total([own[index].counters for own in by_prompt.values()])
    titles = {title.partition(": ")[2]: table for title, table in page.tables(finished, figures)}
    table = titles["acceptance length and speed-up by prompt"]
    assert list(table.header) == ["row", "plain tok/s", "K = 1", "K = 3"]
    assert [line[0] for line in table.rows] == list("12345678")
    assert all(re.fullmatch(r"\d\.\d\d, \d+\.\d\dx|-", cell) for line in table.rows for cell in line[2:])
    (source,) = json.loads((finished.path / RUN).read_text())["plan"]["sources"]
    sets = with_plan(finished, sources=[source, source | {"name": "other"}])
    assert [line[0] for line in next(page.tables(sets, rows(sets)))[1].rows] == [at.label for at in sets.plan.workloads]


# --- pictures ---


def test_without_matplotlib_there_is_the_page_without_pictures(lab: Lab, finished: Folder) -> None:
    whole = page_of(finished.path)
    lab.monkeypatch.setattr(charts, "can_draw", lambda: False)
    assert "pip install matplotlib" in lab.run(0, "report", finished.path)
    assert page_of(finished.path) == re.sub(r"!\[.*\n\n", "", whole) != whole


def test_a_picture_that_fails_is_a_warning_and_nothing_else(lab: Lab, finished: Folder) -> None:
    def broken() -> None:
        raise ImportError("no libfreetype\nhere")

    whole = page_of(finished.path)
    lab.monkeypatch.setattr(charts, "_matplotlib", broken)
    messages = lab.run(0, "report", finished.path)
    assert messages.startswith("peagle: warning: a picture cannot be drawn: ImportError: no libfreetype here; exp")
    assert messages.count("\n") == 1
    assert page_of(finished.path) == re.sub(r"!\[.*\n\n", "", whole)


def test_pictures_are_the_same_whatever_backend_and_style_the_environment_names(tmp_path: Path) -> None:
    """In a process of its own, since matplotlib reads its environment once. Text with letters that its font lacks."""
    (tmp_path / "matplotlibrc").write_text("font.size: 30\ntext.usetex: True\naxes.facecolor: red\n")
    code = (
        "from peagle.measure import charts\n"
        "print(charts.svg(lambda axis: axis.plot([1, 2], label='日本語') and axis.legend()))"
    )
    usual = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    drawings = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", code], env=usual | more, cwd=ROOT, check=True, capture_output=True
        )
        for more in ({}, {"MPLBACKEND": "tkagg", "MATPLOTLIBRC": str(tmp_path)})
    ]
    assert "日本語" in drawings[0].stdout.decode()
    assert [drawing.stdout for drawing in drawings] == [drawings[0].stdout] * 2
    assert [drawing.stderr for drawing in drawings] == [b""] * 2


# --- two runs ---


@pytest.fixture
def runs(once: Path, tmp_path: Path) -> Runs:
    """Make two runs of equal results."""
    one, two = (open_run(Path(shutil.copytree(once, tmp_path / name))) for name in ("one", "two"))
    return one, two


def rewrite(folder: Folder, change: Callable[[Changes], object], repeats: int = 3) -> Folder:
    """Give each line a made-up time, so that no test depends on the machine; then `change` it."""
    lines = [line | {"repeat": repeat} for repeat in range(repeats) for line in lines_of(folder) if line["repeat"] == 0]
    for line in lines:
        line["decode_s"] = (2.0 if line["k"] == 0 else 1.0) + 0.001 * line["repeat"] * line["request"]
        change(line)
    with_lines(folder, lines)
    return with_plan(folder, repeats=repeats)


def verdicts(first: Folder, second: Folder) -> dict[str, tuple[str, ...]]:
    """Return by variant whether the differences of (speed-up, acceptance length) are real."""
    return {
        difference.label: tuple(difference.changes[name].verdict for name in (SPEEDUP, LENGTH))
        for difference in differences(first, second)
    }


def slower(line: Changes) -> None:
    line["decode_s"] *= 1.05 if line["k"] == 3 else 1


def slower_in_a_round(line: Changes) -> None:
    line["decode_s"] *= 1.8 if line["k"] == 3 and line["repeat"] == 1 else 1


def slower_for_some_prompts(line: Changes) -> None:
    line["decode_s"] *= (1.5 if line["request"] % 2 else 0.8) if line["k"] == 3 else 1


def one_more_step_accepts_nothing(line: Changes) -> None:
    if line["k"] == 3:
        line["histogram"][0] += 3


@pytest.mark.parametrize(
    ("change", "repeats", "expected"),
    [
        (lambda _: None, 3, ("no", "no")),
        (slower, 3, ("yes", "no")),
        (slower, 2, ("too few", "no")),  # the spread between rounds is unknown
        (slower_in_a_round, 3, ("no", "no")),  # in every request, but the machine may have been busy
        (slower_for_some_prompts, 3, ("no", "no")),
        (one_more_step_accepts_nothing, 3, ("no", "yes")),
    ],
)
def test_a_difference_is_real_beyond_the_spread_of_prompts_and_of_rounds(
    runs: Runs, change: Callable[[Changes], object], repeats: int, expected: tuple[str, ...]
) -> None:
    first, second = rewrite(runs[0], lambda _: None, repeats), rewrite(runs[1], change, repeats)
    other = "too few" if repeats == 2 else "no"
    assert verdicts(first, second) == {"1": (other, "no"), "3": expected}


def test_rounds_of_equal_runs_on_a_busy_machine_are_seldom_called_different(runs: Runs) -> None:
    """Each round is slower or faster as a whole, for all its requests by a variant."""
    real = 0
    for seed in range(20):
        noise = np.random.default_rng(seed).lognormal(0, 0.2, (2, 3, 4))
        first, second = (
            rewrite(run, lambda line, own=own: line.update(decode_s=own[line["repeat"], line["k"]]))  # type: ignore[misc]
            for run, own in zip(runs, noise, strict=True)
        )
        real += sum(speedup == "yes" for speedup, _ in verdicts(first, second).values())
    assert real <= 4, "of 40, at 5 %"


def test_runs_that_cannot_be_compared_are_refused_in_a_line(lab: Lab, runs: Runs) -> None:
    first, second = runs
    sources = json.loads((second.path / RUN).read_text())["plan"]["sources"]
    files = {path: path.read_text() for path in (second.path / RUN, second.path / RAW)}
    for plan, line in (
        ({"fingerprints": {"target": "another"}}, "another target"),
        ({"max_new_tokens": 99}, "another cap of new tokens (24 and 99)"),
        ({"temperatures": [0.7]}, "no workload and K in common"),
        ({"sources": [sources[0] | {"sha256": "0"}]}, "other prompts"),
    ):
        with_plan(second, **plan)
        if "temperatures" in plan:
            (second.path / RAW).write_text(files[second.path / RAW].replace('"temperature": 0.0', '"temperature": 0.7'))
        assert line in lab.run(2, "report", first.path, second.path, "--out", lab.root / "both")
        assert not (lab.root / "both").exists()
        for path, text in files.items():
            path.write_text(text)


def test_figures_are_shown_though_the_page_cannot_be_written(
    lab: Lab, finished: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise InputError("no room")

    lab.monkeypatch.setattr("peagle.measure.reports.write", full)
    assert main(words("report", finished.path)) == 2
    shown = capsys.readouterr()
    assert "speed-up" in shown.out
    assert "README.md" not in shown.out
    assert "no room" in shown.err
