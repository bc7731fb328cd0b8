"""How many tokens a row drafts, and when it stops: pure functions."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.widths import (
    SPECULATION_FILE,
    WidthTable,
    allowance,
    credit_after,
    read_widths,
    widths_file,
    write_widths,
)
from peagle.ops.errors import InputError


def test_the_nearest_smaller_entry_holds() -> None:
    table = WidthTable({1: 4, 4: 2, 16: 0}, {1: 2.0, 8: 3.0})
    assert [table.at(rows) for rows in (0, 1, 3, 4, 15, 16, 99)] == [4, 4, 4, 2, 2, 0, 0]
    assert [table.cost(rows) for rows in (1, 7, 8, 99)] == [2.0, 2.0, 3.0, 3.0]
    assert table.most == 4
    assert WidthTable.constant(3).cost(1) is None
    with pytest.raises(ValueError, match="begins at 2 active rows"):
        WidthTable({2: 3})


def test_drafts_that_cannot_pay_even_if_all_are_right_go() -> None:
    paying = WidthTable({1: 4, 8: 1}).paying({1: 3.0, 2: 5.5, 8: 1.9, 16: 2.0})
    assert paying.drafts == {1: 4, 2: 0, 8: 1, 16: 0}


@given(st.lists(st.tuples(st.integers(0, 7), st.floats(1, 9)), min_size=1), st.integers(1, 4096))
def test_a_row_never_loses_more_than_its_allowance_and_one_step(steps: list[tuple[int, float]], budget: int) -> None:
    credit, worst = allowance(budget), 0.0
    for num_accepted, cost in steps:
        if credit < 0:
            break
        credit = credit_after(credit, float(num_accepted), cost)
        worst = max(worst, cost - 1)
    assert allowance(budget) - credit <= max(4.0, 0.03 * budget) + worst


def test_a_table_is_read_from_beside_the_drafter(tmp_path: Path) -> None:
    assert read_widths(tmp_path) is None
    (tmp_path / SPECULATION_FILE).write_text('{"drafts": {"4": 2, "1": 5}}')
    found = read_widths(tmp_path)
    assert found is not None
    assert (dict(found.drafts), found.costs) == ({1: 5, 4: 2}, None)


def test_a_table_that_is_written_is_read_with_whatever_stands_beside_it(tmp_path: Path) -> None:
    file = widths_file(tmp_path)
    write_widths(
        file,
        WidthTable({4: 2, 1: 5, 16: 0}, sampled=False),
        rule="the best",
        measured={"time": "now", "nothing": float("nan")},
    )
    found = read_widths(tmp_path)
    assert found is not None
    assert list(found.drafts.items()) == [(1, 5), (4, 2), (16, 0)]
    assert not found.sampled
    assert json.loads(file.read_text())["measured"] == {"time": "now", "nothing": None}
    with pytest.raises(InputError, match=r"speculation\.json exists; expected a new file"):
        widths_file(tmp_path)
    with pytest.raises(InputError, match=r"absent does not exist"):
        widths_file(tmp_path / "absent" / "table.json")
    assert widths_file(tmp_path / "table.json") == tmp_path / "table.json"
    with pytest.raises(InputError, match="cannot be written"):
        write_widths(tmp_path / "absent" / "table.json", WidthTable({1: 2}))


def test_a_table_in_words() -> None:
    assert (
        WidthTable({1: 3, 2: 3, 4: 1, 16: 0, 32: 0}).in_words() == "3 from 1 active request on, 1 from 4, none from 16"
    )
    assert WidthTable.constant(0).in_words() == "none from 1 active request on"
    assert WidthTable({1: 3}, sampled=False).in_words() == "3 from 1 active request on; none with a temperature"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"drafts": 3}',
        '{"drafts": {}}',
        '{"drafts": {"1": -1}}',
        '{"drafts": {"1": 2}, "sampled": 1}',
        '{"drafts": {"1": true}}',
        '{"drafts": {"2": 1}}',
        '{"drafts": {"one": 1}}',
    ],
)
def test_a_table_that_is_none_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / SPECULATION_FILE).write_text(text)
    with pytest.raises(
        InputError, match=r"speculation\.json holds no table of drafts; expected .*: correct it, or remove it"
    ):
        read_widths(tmp_path)
