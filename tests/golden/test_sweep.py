"""A sweep's folder as it was written before rows were typed: it opens, and the figures that stayed are the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from peagle.cli import main
from peagle.measure.sweep.figures import alone, concurrent, rows
from peagle.measure.sweep.store import IN_SHORT, RUN, open_run

RECORDED = Path(__file__).with_name("sweep")
RESULTS = Path(__file__).parents[2] / "results"
DROPPED = {  # figures of before: they follow from others of run.json, or from raw.jsonl
    *("conditional_rate", "speedup_median", "tpot_s", "plain_step_s", "verify_cost"),
    *("per_request",),
}
WITHOUT_INTERVAL = {"draft_s", "verify_s", "host_s"}
WITHOUT_LOOPS = ("num_requests", "acceptance_length", "speedup")


def same(recorded: Any, computed: Any) -> bool:
    """Compare JSON values: every recorded key is there still, numbers equal to nine digits."""
    if isinstance(recorded, dict):
        recorded = {name: value for name, value in recorded.items() if name not in DROPPED}
        for name in WITHOUT_INTERVAL & recorded.keys():
            recorded[name] = recorded[name] and {"value": recorded[name]["value"]}
        if "without_loops" in recorded:
            recorded["without_loops"] = {name: recorded["without_loops"][name] for name in WITHOUT_LOOPS}
        return all(name in computed and same(value, computed[name]) for name, value in recorded.items())
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


def test_a_recorded_run_is_reported(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    assert main(["report", str(run)]) == 0
    assert "many requests at once" in (run / "README.md").read_text()
    assert main(["report", str(run), str(RECORDED), "--out", str(tmp_path / "both"), "--quiet"]) == 0
    assert " equal |" in (tmp_path / "both" / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob(f"*/{RUN}")), ids=lambda path: path.parent.name)
def test_published_results_are_told_from_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads(path.read_text()).get("kind") == IN_SHORT
    assert main(["report", str(path.parent)]) == 2
    error = capsys.readouterr().err
    assert ("holds the summary of a run" if summary else "holds no run of peagle sweep") in error
    assert error.count("\n") == 1
