"""The options of `random`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


@dataclass(frozen=True, kw_only=True)
class RandomSettings:
    """Write a GPT-OSS checkpoint with random weights.

    For measuring speed and memory.
    """

    size: Annotated[str, Argument(metavar="SIZE", show_default=False, help="tiny, S, M, L, 20b or 120b.")]
    directory: Annotated[Path, Argument(metavar="DIR", show_default=False, help="New directory.")]
    unquantized: Annotated[bool, Option("--unquantized", help="Write experts in bfloat16 instead of MXFP4.")] = False
    seed: Annotated[int, Option("--seed", metavar="N", help="Seed of the weights; equal seeds give equal bytes.")] = 0
