"""The fast tier leaves out modules by name, so every name must be a module."""

from pathlib import Path

from tests.conftest import COMPILING


def test_modules_that_compile_for_long_are_there() -> None:
    missing = [name for name in COMPILING if not (Path(__file__).parent / name).is_file()]
    assert not missing
