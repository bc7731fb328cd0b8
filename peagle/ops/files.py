"""Files that are whole or not there."""

import os
from collections.abc import Callable
from pathlib import Path

from peagle.ops.errors import InputError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """What `write` makes at the path it is given is at `path`, with the permissions of any new file. Where it cannot be
    written, `path` is what it was before."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def umask() -> int:
    """What new files are not allowed."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def expect_new(out: Path) -> None:
    """Raises InputError where there is something already: no result is overwritten."""
    if out.exists():
        raise InputError(f"{out} exists; expected a new folder, so that no result is overwritten")
