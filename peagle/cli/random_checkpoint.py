"""`peagle random`: a checkpoint of random weights."""

from pathlib import Path

from peagle.cli.display import Display
from peagle.cli.output import show_lines
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new
from peagle.workflows.random_checkpoint import SIZES, write_random_checkpoint


def random_command(size: str, directory: Path, mxfp4: bool, seed: int) -> int:
    """Write a checkpoint of random weights. Raises InputError for an unknown size, and for a directory that exists."""
    if size not in SIZES:
        raise InputError(f"SIZE is {size!r}; expected one of {', '.join(SIZES)}")
    if seed < 0:
        raise InputError(f"--seed is {seed}; expected 0 or more")
    expect_new(directory)
    with Display(text=False, quiet=False, total=1, streaming=False).stage(f"writing {directory}"):
        write_random_checkpoint(directory, SIZES[size], mxfp4=mxfp4, seed=seed)
    show_lines([f"{directory}: {size}, seed {seed}"])
    return 0
