"""What `auto` begins with: acceptance by the drafter's confidence."""

import dataclasses
import json

import numpy as np
import pytest

from peagle.engine.auto.speculation import Speculation, read_speculation
from peagle.measure.sweep.plan import k_order, parse_ks
from tests.peagle.measure.sweep.runs import Lab, load_in_place, shared_pair

pytestmark = pytest.mark.usefixtures("quickly")


def test_a_run_counts_and_writes_what_auto_begins_with(lab: Lab) -> None:
    drafter = lab.root / "drafter"
    drafter.mkdir()
    load_in_place(lab.monkeypatch, dataclasses.replace(shared_pair(), speculation=Speculation(2)))
    lab.sweep("-k 2,auto --num-prompts 8 -n 24 --write-widths", drafter)
    written = read_speculation(drafter)
    assert written.num_drafts == 2
    greedy = np.asarray(written.counts)[0]
    assert greedy[0, :, 0].sum() > 8
    assert (greedy[..., 1] <= greedy[..., 0]).all()
    np.testing.assert_allclose(greedy[0, :, 1].sum(), greedy[1, :, 0].sum())  # a draft counts after right ones
    measured = json.loads((drafter / "speculation.json").read_text())["measured"]
    assert measured["time"] == lab.folder.origins[0]["time"]
    (drafter / "speculation.json").unlink()
    lab.resume("--write-widths", drafter)
    assert read_speculation(drafter) == written


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
