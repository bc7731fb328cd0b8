"""An output has one writer at a time."""

from pathlib import Path

import pytest

from peagle.base.errors import InputError
from peagle.base.files import locked


def test_a_second_run_is_refused_and_nothing_of_the_first_stays(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "one"
    with locked(out):
        with pytest.raises(InputError, match="one is being written by another run"), locked(out):
            raise AssertionError("two write it")
        with locked(tmp_path / "runs" / "two"):
            pass
    with locked(out):
        pass
    assert list(tmp_path.rglob("*")) == [out.parent]


def test_a_place_that_cannot_be_written_is_named_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written: "), locked(tmp_path / "file" / "out"):
        raise AssertionError("it can")
