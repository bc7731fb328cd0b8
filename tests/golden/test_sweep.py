"""A recorded sweep's folder opens, and its figures are the recorded ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.cli import main
from peagle.measure.sweep.figures import alone, concurrent, rows
from peagle.measure.sweep.store import IN_SHORT, KIND, RUN, open_run

RECORDED = Path(__file__).with_name("sweep")
RESULTS = Path(__file__).parents[2] / "results"


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
    """One at a time and two at once, fixed K and auto, at a temperature, profiled, by category."""
    folder = open_run(RECORDED)
    computed = json.loads(json.dumps([row.to_json() for row in [*alone(rows(folder)), *concurrent(rows(folder))]]))
    recorded = [*folder.record["rows"], *folder.record["by_concurrency"]]
    assert [row["label"] for row in recorded] == ["0", "2", "auto"] * 2
    assert all(row["draft_s"] and row["by_category"] for row in recorded[:3])
    assert same(recorded, computed)
    changed = json.loads(json.dumps(recorded))
    changed[1]["by_category"][0]["speedup"]["value"] *= 1.001
    assert not same(changed, computed), "the comparison reaches figures of parts"


def test_a_copy_without_raw_lines_is_a_summary(tmp_path: Path) -> None:
    shutil.copy(RECORDED / RUN, tmp_path / RUN)
    with pytest.raises(InputError, match="holds the summary of a run"):
        open_run(tmp_path)


def test_a_recorded_run_is_reported(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    assert main(["report", str(run)]) == 0
    assert "many requests at once" in (run / "README.md").read_text()
    assert main(["report", str(run), str(RECORDED), "--out", str(tmp_path / "both"), "--quiet"]) == 0
    assert " equal |" in (tmp_path / "both" / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob(f"*/{RUN}")), ids=lambda path: path.parent.name)
def test_published_results_are_told_from_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads(path.read_text()).get("kind") in (IN_SHORT, KIND)
    assert main(["report", str(path.parent)]) == 2
    error = capsys.readouterr().err
    assert ("holds the summary of a run" if summary else "holds no run of peagle sweep") in error
    assert error.count("\n") == 1
