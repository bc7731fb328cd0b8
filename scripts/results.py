"""The folders of results/."""

from pathlib import Path

from peagle.ops.errors import InputError


def expect_new(out: Path) -> None:
    """Raises InputError where there is something already: no result is overwritten."""
    if out.exists():
        raise InputError(f"{out} exists; expected a new folder, so that no result is overwritten")
