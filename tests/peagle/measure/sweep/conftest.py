"""Runs that the tests of sweeps share: a sweep takes seconds."""

import shutil
from pathlib import Path

import pytest

from peagle.measure.sweep.store import Folder, open_run
from tests.peagle.measure.sweep.runs import Lab, load_in_place, shared_pair, swept
from tests.support.toys import costs


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lab:
    load_in_place(monkeypatch, shared_pair())
    return Lab(tmp_path, monkeypatch, capsys)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep without pictures and measured costs: drafts always gain."""
    monkeypatch.setattr("peagle.measure.charts.can_draw", lambda: False)
    monkeypatch.setattr("peagle.engine.auto.measure.measure_costs", lambda *_: costs(7, {1: True}))


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a finished run, with pictures."""
    return swept(tmp_path_factory.mktemp("swept")).path


@pytest.fixture
def finished(once: Path, tmp_path: Path) -> Folder:
    """Copy the finished run for a test that changes it."""
    return open_run(Path(shutil.copytree(once, tmp_path / "run")))
