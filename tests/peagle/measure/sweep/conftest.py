"""Runs that the tests of sweeps share: a sweep takes seconds."""

import shutil
from pathlib import Path

import pytest

from peagle.measure.sweep.run import SweepRun
from peagle.measure.sweep.store import Folder, open_run
from tests.peagle.measure.sweep.runs import swept


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a finished run of `swept`, profiled and with pictures; variants take turns after three requests."""
    with pytest.MonkeyPatch.context() as patch:
        return swept(patch, tmp_path_factory.mktemp("swept") / "run", "--in-a-row", 3).path


@pytest.fixture
def finished(once: Path, tmp_path: Path) -> Folder:
    """Copy the finished run for a test that changes it."""
    return open_run(Path(shutil.copytree(once, tmp_path / "run")))


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep without pictures and profiles."""
    monkeypatch.setattr("peagle.measure.sweep.charts.can_draw", lambda: False)
    monkeypatch.setattr(SweepRun, "profile", lambda *_: None)
