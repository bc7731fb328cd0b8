"""The sentences of a report: right for every outcome of a run, and only the caveats that hold."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from peagle.cli import main
from peagle.measure.estimates import Estimate
from peagle.measure.reports import Commands, Table
from peagle.measure.sweep import layout
from peagle.measure.sweep.compare import Change, Difference
from peagle.measure.sweep.figures import VariantRow, WithoutLoops, rows
from peagle.measure.sweep.headline import caveats, commands, compared, headlines, title, verdicts
from peagle.measure.sweep.plan import Variant, Workload
from peagle.measure.sweep.store import Folder
from tests.peagle.measure.sweep.runs import lines_of, with_lines, with_plan

Changes = dict[str, Any]
GREEDY = Workload("prompts", True, 0.0)


@pytest.fixture
def folder(finished: Folder) -> Folder:
    """Eight raw prompts, plainly and by K = 1 and 3; two repeats."""
    return finished


def measured(folder: Folder, by_k: dict[int, Changes]) -> list[VariantRow]:
    """Return a run's rows with other figures: nothing loops, nothing differs, unless `by_k` says so."""
    calm = {"looping_frac": 0.0, "equal_to_plain_frac": 1.0, "num_slower": 0, "num_compared": 8}
    even = [replace(row, speedup=Estimate(1.0, 1.0, 1.0), **calm) for row in rows(folder)]
    return [replace(row, **by_k[row.k]) if isinstance(row.k, int) and row.k in by_k else row for row in even]


SURE, UNSURE = Estimate(1.19, 1.14, 1.24), Estimate(1.05, 0.94, 1.18)
SLOW, SLOWER = Estimate(0.95, 0.91, 0.99), Estimate(0.8, 0.7, 0.9)


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
            "K = 3: 1.10x plain decoding (no interval with fewer than 8 prompts), identical output",
        ),
        (
            {1: {"speedup": SLOW}, 3: {"speedup": SURE, "equal_to_plain_frac": 14 / 16}},
            "K = 3: 1.19x plain decoding (95 %: 1.14 to 1.24), 2 of 16 outputs differ",
        ),
        (
            {1: {"speedup": SLOW}, 3: {"speedup": SURE, "label": "3, two, window 128"}},
            "K = 3 with two, window 128: 1.19x plain decoding (95 %: 1.14 to 1.24), identical output",
        ),
        (
            {1: {"num_spec_steps": 0}, 3: {"num_spec_steps": 0}},
            "nothing was drafted, so every step was one of plain decoding",
        ),
        (
            {0: {"speedup": None}, 1: {"speedup": None}, 3: {"speedup": None}},
            "no speed was measured, because no output has two tokens",
        ),
    ],
)
def test_a_headline_says_what_was_measured(folder: Folder, by_k: dict[int, Changes], expected: str) -> None:
    assert headlines(folder, measured(folder, by_k)) == [expected]


def rewrite(folder: Folder, keep: Callable[[Changes], bool], *more: Changes) -> Folder:
    """Keep some lines of the raw file, and add more."""
    folder.save(rows=None)
    return with_lines(folder, [*filter(keep, lines_of(folder)), *more])


def failed(k: int, drafter: str | None) -> Changes:
    return {"prompts": "prompts", "raw": True, "temperature": 0.0, "k": k, "drafter": drafter, "error": "out of memory"}


@pytest.mark.parametrize(
    ("keep", "errors", "expected"),
    [
        (lambda line: line["k"] > 0, [failed(0, None)], "no speed-up is known, because plain decoding failed: out of"),
        (lambda line: line["k"] > 0, [], "no speed-up is known yet: no request has all its repeats with plain"),
        (lambda line: line["k"] == 0, [], "no speed-up is known yet: no request has all its repeats with plain"),
        (lambda line: line["k"] == 0, [failed(3, "demo")], "no K was measured: K = 3 failed: out of memory"),
        (lambda line: line["repeat"] == 0, [], "no speed-up is known yet"),
    ],
    ids=[
        "plain decoding failed",
        "without plain decoding",
        "plain decoding alone",
        "every K failed",
        "one repeat of two",
    ],
)
def test_a_run_without_a_speed_up_says_why(
    folder: Folder, keep: Callable[[Changes], bool], errors: Sequence[Changes], expected: str
) -> None:
    part = rewrite(folder, keep, *errors)
    figures = rows(part)
    (sentence,) = headlines(part, figures)
    assert sentence.startswith(expected)
    blocks = layout.run_blocks(part, figures)
    assert f"**{sentence}.**" in blocks
    assert not any(isinstance(block, str) and "What to do" in block for block in blocks)


def test_an_unfinished_run_is_judged_by_the_requests_that_all_its_variants_have(folder: Folder) -> None:
    part = rewrite(folder, lambda line: line["k"] == 0 or line["request"] < 5)
    (verdict,) = verdicts(part, rows(part))
    assert verdict.fastest is not None
    assert verdict.fastest.num_requests == 5
    assert any("Not finished" in block for block in layout.run_blocks(part, rows(part)) if isinstance(block, str))


LOOPS = {"looping_frac": 0.25, "without_loops": WithoutLoops(6, None, Estimate(0.98, 0.9, 1.05))}


@pytest.mark.parametrize(
    ("by_k", "name", "text"),
    [
        (
            {3: {"speedup": SURE, **LOOPS}},
            "Outputs that loop",
            "25 % of the outputs loop, and loops are easy to draft; without them K = 3 gives 0.98x",
        ),
        ({1: {"equal_to_plain_frac": 15 / 16}, 3: {"speedup": SURE}}, "Outputs that differ", "K = 1 in 1 of 16"),
        ({3: {"speedup": SURE}}, "A larger K", "K = 3 is the largest K measured"),
        ({1: {"speedup": SURE}}, None, ""),
    ],
)
def test_a_caveat_stands_where_it_holds(folder: Folder, by_k: dict[int, Changes], name: str | None, text: str) -> None:
    """Beside that of raw prompts, which this run has."""
    figures = dict(caveats(folder, measured(folder, by_k)))
    assert "--render chat" in figures.pop("Raw prompts")
    if name is None:
        assert not figures
    else:
        assert text in figures.pop(name)
        assert set(figures) <= {"A larger K"}


def test_outputs_that_differ_with_many_at_once_are_told(folder: Folder) -> None:
    figures = measured(folder, {})
    at_once = replace(figures[2], variant=figures[2].variant.at(4), num_repeats=3, equal_to_plain_frac=23 / 24)
    assert "Outputs that differ" not in dict(caveats(folder, figures))
    text = dict(caveats(folder, [*figures, at_once]))["Outputs that differ"]
    assert "K = 3 with 4 requests at once in 1 of 24" in text


@pytest.mark.parametrize(
    ("behind", "close"),
    [(Estimate(1.2, 1.1, 1.25), False), (Estimate(1.4, 1.2, 1.6), True), (Estimate(1.4), True)],
    ids=["surely behind", "perhaps", "no interval"],
)
def test_another_drafter_is_named_unless_it_is_surely_behind(folder: Folder, behind: Estimate, close: bool) -> None:
    plainly, row, _ = measured(folder, {})
    paths = ["runs/one/drafter", "runs/two/drafter"]
    figures = [
        replace(row, variant=Variant(1, path), speedup=speedup, label=f"1, {path[5:]}")
        for path, speedup in zip(paths, (behind, Estimate(1.5, 1.3, 1.7)), strict=True)
    ]
    both = with_plan(folder, drafters=paths)
    assert title(both).startswith("Speculative decoding of demo with drafters one/drafter and two/drafter, 20")
    text = dict(caveats(both, [plainly, *figures])).get("Another drafter may be as good", "")
    assert text.startswith(f"K = 1 with one/drafter gives {behind.value:.2f}x" if close else "")
    assert bool(text) == close


def test_workloads_have_their_names_and_raw_text_is_told_if_nothing_else_was_measured(folder: Folder) -> None:
    both = with_plan(folder, temperatures=[0.0, 0.7], raw=[False, True])
    workloads = [Workload("prompts", raw, t) for raw in (False, True) for t in (0.0, 0.7)]
    figures = [replace(row, workload=workload) for workload in workloads for row in measured(folder, {})]
    assert [sentence.partition(": ")[0] for sentence in headlines(both, figures)] == [
        *("prompts, chat, greedy", "prompts, chat, temperature 0.7", "prompts, raw, greedy"),
        "prompts, raw, temperature 0.7",
    ]
    assert "Raw prompts" not in dict(caveats(both, figures))


@pytest.mark.parametrize(
    ("speedup", "plan", "expected"),
    [
        (SURE, {}, "speculate --target demo --drafter demo -k 3 --raw-prompt 'your prompt'"),
        (SLOW, {}, "speculate --target demo -k 0 --raw-prompt 'your prompt'"),
        (
            SURE,
            {"target": "my target", "dtype": "bfloat16"},
            "speculate --target 'my target' --dtype bfloat16 --drafter demo -k 3",
        ),
    ],
)
def test_the_commands_are_commands(folder: Folder, speedup: Estimate, plan: Changes, expected: str) -> None:
    changed = with_plan(folder, **plan)
    (verdict,) = verdicts(changed, measured(changed, {1: {"speedup": SLOWER}, 3: {"speedup": speedup}}))
    lines = commands(changed.plan, verdict, for_workload=True)
    assert lines[0].startswith(f"peagle {expected}")
    for line in lines:
        _, *arguments = shlex.split(line)
        assert main([*arguments, "--help"]) == 0, "every option exists"


def test_the_answer_comes_first_and_the_command_last(folder: Folder) -> None:
    blocks = layout.run_blocks(folder, rows(folder))
    texts = [block if isinstance(block, str) else type(block).__name__ for block in blocks]
    headline = texts.index(f"**{headlines(folder, rows(folder))[0]}.**")
    order = [headline, *map(texts.index, ("## What to do", "Table", "Picture", "## How it was measured"))]
    assert headline == 1
    assert order == sorted(order)
    commands_of_page = [block for block in blocks if isinstance(block, Commands)]
    assert shlex.split(commands_of_page[-1].lines[0]) == folder.origins[0]["command"]
    (origin,) = (block for block in blocks[texts.index("## How it was measured") :] if isinstance(block, Table))
    assert {"machine", "target demo", "drafter demo"} <= {cells[0] for cells in origin.rows}


def difference(label: str, speedup: Change | None, length: Change | None = None) -> Difference:
    return Difference(GREEDY, label, 8, speedup, length)


def changed(first: float, second: float, low: float, high: float) -> Change:
    return Change(first, second, Estimate(second - first, low, high))


SAME = changed(3.0, 3.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        (
            [difference("1", changed(1.1, 1.1, -0.1, 0.1)), difference("3", changed(1.0, 1.25, 0.2, 0.3), SAME)],
            "K = 3: speed-up 1.00 in before, 1.25 in after (+0.25; 95 %: +0.20 to +0.30); acceptance length 3.00 in "
            "both",
        ),
        (
            [
                difference("5", changed(2.0, 1.0, -1.2, -0.8), changed(4.0, 3.5, -0.5, -0.5)),
                difference("1", changed(1.1, 1.2, 0.05, 0.2)),
            ],
            "K = 5: speed-up 2.00 in before, 1.00 in after (-1.00; 95 %: -1.20 to -0.80); acceptance length 4.00 in "
            "before, 3.50 in after (-0.50; 95 %: -0.50 to -0.50)",
        ),
        (
            [difference("3, two", changed(1.0, 1.02, -0.03, 0.08))],
            "K = 3 with two: speed-up 1.00 in before, 1.02 in after (+0.02; 95 %: -0.03 to +0.08), not surely "
            "different",
        ),
        ([difference("3", None, SAME)], "no speed-ups to compare, because no request was timed in both runs"),
    ],
)
def test_two_runs_are_compared_by_their_fastest_k(differences: Sequence[Difference], expected: str) -> None:
    assert compared(differences, "before", "after") == [expected]
