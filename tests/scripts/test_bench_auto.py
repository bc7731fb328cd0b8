"""scripts.bench and its scenario `auto`."""

from pathlib import Path

import pytest

from scripts import bench


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["huge"], "huge is no size; expected some of tiny, S"),
        (["S", "--rates", "1.5"], "--rates is '1.5'; expected numbers from 0.01 to 0.99"),
        (["S", "--temperatures", "-1"], "--temperatures is '-1'; expected numbers from 0 to 2"),
        (["S", "-k", "0"], "-k is '0'; expected numbers of 1 or more"),
        (["S", "--requests", "a"], "--requests is 'a'; expected numbers with commas between"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert bench.main(["auto", "--out", str(tmp_path / "run"), *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
