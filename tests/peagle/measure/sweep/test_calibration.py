"""What `auto` begins with: acceptance by the drafter's confidence."""

import dataclasses
import json

import numpy as np
import pytest

from peagle.engine.auto.speculation import Speculation, read_speculation
from peagle.engine.auto.state import MIDDLES, NUM_BINS
from peagle.measure.reports import markdown
from peagle.measure.sweep import charts
from peagle.measure.sweep.calibration import Calibration, calibrations_of
from peagle.measure.sweep.figures import rows
from peagle.measure.sweep.layout import run_blocks
from peagle.measure.sweep.plan import k_order, parse_ks
from tests.peagle.measure.sweep.runs import Lab, load_in_place, shared_pair

pytestmark = pytest.mark.usefixtures("quickly")


def test_a_run_counts_and_writes_what_auto_begins_with(lab: Lab) -> None:
    drafter = lab.root / "drafter"
    drafter.mkdir()
    load_in_place(lab.monkeypatch, dataclasses.replace(shared_pair(), speculation=Speculation(2)))
    lab.sweep("-k 2,auto --num-prompts 8 -n 24 --write-widths", drafter)
    folder = lab.folder
    (calibration,) = calibrations_of(folder)
    assert calibration.num_drafts == 2
    greedy = np.asarray(calibration.counts)[0]
    assert greedy[0, :, 0].sum() > 8
    assert (greedy[..., 1] <= greedy[..., 0]).all()
    np.testing.assert_allclose(greedy[0, :, 1].sum(), greedy[1, :, 0].sum())  # a draft counts after right ones
    assert read_speculation(drafter) == Speculation(2, calibration.counts)
    measured = json.loads((drafter / "speculation.json").read_text())["measured"]
    assert measured["time"] == folder.origins[0]["time"]
    assert Calibration.from_json(json.loads(json.dumps(calibration.to_json()))) == calibration
    with lab.monkeypatch.context() as patch:
        patch.setattr(charts, "can_draw", lambda: True)
        assert "![Share of drafts that were right, of those after" in markdown(run_blocks(folder, rows(folder)))
    (drafter / "speculation.json").unlink()
    lab.resume("--write-widths", drafter)
    assert read_speculation(drafter) == Speculation(2, calibration.counts)


def test_points_are_shares_of_all_drafts_of_a_step() -> None:
    """Of bins with enough tries."""
    empty = [(0.0, 0.0)] * (NUM_BINS - 2)
    greedy = (((30.0, 3.0), (5.0, 4.0), *empty), ((10.0, 5.0), (2.0, 2.0), *empty))
    calibration = Calibration("a", 2, (greedy, greedy))
    assert calibration.points("greedy") == [(MIDDLES[0], 8 / 40)]


def test_auto_of_at_most_so_many_drafts_stands_beside_auto(lab: Lab) -> None:
    """In the order of the report: K, auto:N by N, auto. It counts acceptance, too, and a resumed run knows it."""
    assert sorted(parse_ks("auto,auto:12,2,auto:3,1"), key=k_order) == [1, 2, "auto:3", "auto:12", "auto"]
    lab.sweep("-k 1,auto:3 --num-prompts 2 -n 24")
    by_k = {row["k"]: row for row in lab.folder.record["rows"]}
    assert list(by_k) == [0, 1, "auto:3"]
    assert len(by_k["auto:3"]["rate_per_position"]) == 3
    assert "| auto:3 |" in lab.page
    lab.resume("--write-widths", lab.root / "auto.json")
    assert json.loads((lab.root / "auto.json").read_text())["num_speculative_tokens"] == 1  # the largest K of the run
