"""What a drafter's folder says about drafting."""

import json
from pathlib import Path

import pytest

from peagle.base.errors import InputError
from peagle.engine.auto.speculation import (
    DEFAULT_DRAFTS,
    SPECULATION_FILE,
    Speculation,
    read_speculation,
    read_window,
    speculation_file,
    write_speculation,
)
from peagle.engine.auto.state import EDGES, NUM_BINS

COUNTS = tuple(tuple(tuple((float(n + k), float(n)) for n in range(NUM_BINS)) for k in range(2)) for _ in range(2))


def test_written_speculation_is_read_back(tmp_path: Path) -> None:
    assert read_speculation(tmp_path) == Speculation(DEFAULT_DRAFTS, None)
    write_speculation(
        speculation_file(tmp_path), Speculation(4, COUNTS), drafter_window=64, measured={"target": "demo"}
    )
    assert read_speculation(tmp_path) == Speculation(4, COUNTS)
    assert read_window(tmp_path) == 64
    assert json.loads((tmp_path / SPECULATION_FILE).read_text())["measured"] == {"target": "demo"}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"num_speculative_tokens": 0}',
        '{"num_speculative_tokens": true}',
        json.dumps({"num_speculative_tokens": 2, "acceptance": {"greedy": COUNTS[0], "sampled": COUNTS[1]}}),
        json.dumps({"edges": EDGES, "acceptance": {"greedy": COUNTS[0]}}),
        json.dumps({"edges": EDGES, "acceptance": {"greedy": [[[1, 2]] * NUM_BINS], "sampled": COUNTS[1]}}),
        json.dumps({"edges": EDGES, "acceptance": {"greedy": [[[2, 1]]], "sampled": COUNTS[1]}}),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / SPECULATION_FILE).write_text(text)
    with pytest.raises(InputError, match=r"(does not say how to draft|is no JSON object)") as refusal:
        read_speculation(tmp_path)
    assert "\n" not in str(refusal.value)


def test_auto_drafts_no_more_than_was_trained_unless_the_file_says_so(tmp_path: Path) -> None:
    assert read_speculation(tmp_path, 4) == Speculation(4, None, 4)
    (tmp_path / SPECULATION_FILE).write_text('{"num_speculative_tokens": 9}')
    assert read_speculation(tmp_path, 4) == Speculation(9, None, 4)


@pytest.mark.parametrize("window", ["0", "-3", '"on"', "true", "1.5"])
def test_a_window_is_a_number_of_positions_or_off(tmp_path: Path, window: str) -> None:
    (tmp_path / SPECULATION_FILE).write_text(f'{{"drafter_window": {window}}}')
    with pytest.raises(InputError, match="expected the positions that the drafter sees"):
        read_window(tmp_path)


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    assert speculation_file(tmp_path) == tmp_path / SPECULATION_FILE
    assert speculation_file(tmp_path / "table.json") == tmp_path / "table.json"
    (tmp_path / "table.json").write_text("{}")
    for path, message in (
        (tmp_path / "table.json", "exists; expected a new file"),
        (tmp_path / "no" / "table.json", "does not exist"),
        (tmp_path / "table", "is no folder"),
    ):
        with pytest.raises(InputError, match=message):
            speculation_file(path)
