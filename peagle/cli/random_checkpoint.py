"""`peagle random`: a checkpoint of random weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peagle.base.errors import InputError
from peagle.base.flag import Flag


@dataclass(frozen=True, kw_only=True)
class RandomCheckpoint:
    """Write a GPT-OSS checkpoint with random weights.

    For tests of speed, memory and format.

    [bold]Examples[/bold]

      1 MB, for tests     [cyan]peagle random tiny CHECKPOINT[/cyan]
      13 GB, for speed    [cyan]peagle random 20b CHECKPOINT[/cyan]
    """

    size: Annotated[str, Flag(names=("SIZE",))]
    """tiny, S, M, L, 20b or 120b."""
    directory: Annotated[Path, Flag(names=("DIR",))]
    """Output directory; it must not exist yet."""
    unquantized: Annotated[bool, Flag()] = False
    """Write experts in bfloat16 instead of MXFP4."""

    def run(self) -> int:
        from peagle.base.files import expect_new
        from peagle.cli.display import Display
        from peagle.cli.output import show_lines
        from peagle.workflows.random_checkpoint import SIZES, write_random_checkpoint

        if self.size not in SIZES:
            raise InputError(f"size is {self.size!r}; expected one of {', '.join(SIZES)}", "size")
        expect_new(self.directory)
        with Display().stage(f"writing {self.directory}"):
            write_random_checkpoint(self.directory, SIZES[self.size], mxfp4=not self.unquantized)
        show_lines([f"{self.directory}: {self.size}"])
        return 0
