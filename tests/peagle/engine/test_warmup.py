"""Which measured costs are kept for later runs."""

from pathlib import Path

import pytest

from peagle.engine import warmup
from peagle.engine.warmup import WarmUp
from peagle.ops.processors import ThreadTimes
from peagle.pair import Pair


@pytest.mark.parametrize(("waited_s", "agree", "kept"), [(0.2, True, True), (0.6, True, False), (0.2, False, False)])
def test_costs_that_another_program_disturbed_are_measured_again(
    toy: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waited_s: float, agree: bool, kept: bool
) -> None:
    """They differed between rounds, or threads waited for processors: times on a busy machine may agree, too."""
    file, measured, times = tmp_path / "costs.json", [], [ThreadTimes(0.0, 0.0), ThreadTimes(0.4, waited_s)]
    measure = WarmUp.measure_costs
    monkeypatch.setattr(warmup, "store_for", lambda *_: file)
    monkeypatch.setattr(warmup, "thread_times", lambda: times[len(measured) % 2])
    monkeypatch.setattr(warmup, "_differ", lambda _: not agree)
    monkeypatch.setattr(warmup, "MOST_S", 0.0)
    monkeypatch.setattr(WarmUp, "measure_costs", lambda *known: (measure(*known), measured.append(1))[0])
    engine = toy.engine(toy.engine_config("auto:2", context=128))
    engine.warm_up()
    assert len(measured) == 1
    assert file.exists() == kept
    WarmUp(engine.one).costs(lambda *_: None)
    assert len(measured) == (1 if kept else 2)
