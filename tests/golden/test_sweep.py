"""A recorded sweep's folder opens, and its figures are the recorded ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.measure.sweep.figures import alone, concurrent, rows
from peagle.measure.sweep.store import RUN, open_run

RECORDED = Path(__file__).with_name("sweep")


def same(recorded: Any, computed: Any) -> bool:
    """Compare JSON values: the same keys, numbers equal to six digits."""
    if isinstance(recorded, dict):
        return recorded.keys() == computed.keys() and all(
            same(value, computed[name]) for name, value in recorded.items()
        )
    if isinstance(recorded, list):
        return len(recorded) == len(computed) and all(map(same, recorded, computed))
    return bool(recorded == (pytest.approx(computed, rel=1e-6) if isinstance(recorded, float) else computed))


def test_figures_of_a_recorded_run_are_the_recorded_ones() -> None:
    """One at a time and two at once, fixed K and auto, at a temperature."""
    folder = open_run(RECORDED)
    computed = json.loads(json.dumps([row.to_json() for row in [*alone(rows(folder)), *concurrent(rows(folder))]]))
    recorded = [*folder.record["rows"], *folder.record["by_concurrency"]]
    assert [row["label"] for row in recorded] == ["0", "2", "auto"] * 2
    assert same(recorded, computed)
    changed = json.loads(json.dumps(recorded))
    changed[1]["speedup"]["value"] *= 1.001
    assert not same(changed, computed), "the comparison reaches the figures"


def test_a_copy_without_raw_lines_is_a_summary(tmp_path: Path) -> None:
    shutil.copy(RECORDED / RUN, tmp_path / RUN)
    with pytest.raises(InputError, match="holds the summary of a run"):
        open_run(tmp_path)
