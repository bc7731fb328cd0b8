"""The options of `random`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


@dataclass(frozen=True, kw_only=True)
class RandomSettings:
    """Write a GPT-OSS checkpoint of random weights: for speed, memory and format, not for sense."""

    size: Annotated[str, Argument(metavar="SIZE", show_default=False, help="tiny, S, M, L, 20b or 120b.")]
    directory: Annotated[Path, Argument(metavar="DIR", show_default=False, help="A new directory.")]
    unquantized: Annotated[bool, Option("--unquantized", help="Experts in bfloat16, not MXFP4.")] = False
    seed: Annotated[int, Option("--seed", metavar="N", help="Equal seeds give equal bytes.")] = 0
