"""The options of `random`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


@dataclass(frozen=True, kw_only=True)
class RandomSettings:
    """Write a GPT-OSS checkpoint with random weights.

    For tests of speed, memory and format.

    [bold]Examples[/bold]

      1 MB, for tests     [cyan]peagle random tiny CHECKPOINT[/cyan]
      13 GB, for speed    [cyan]peagle random 20b CHECKPOINT[/cyan]
    """

    size: Annotated[str, Argument(metavar="SIZE", show_default=False, help="tiny, S, M, L, 20b or 120b.")]
    directory: Annotated[
        Path, Argument(metavar="DIR", show_default=False, help="Output directory; it must not exist yet.")
    ]
    unquantized: Annotated[bool, Option("--unquantized", help="Write experts in bfloat16 instead of MXFP4.")] = False
    seed: Annotated[int, Option("--seed", metavar="N", help="Random seed; equal seeds give equal files.")] = 0
