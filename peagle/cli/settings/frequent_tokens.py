"""The options of `frequent-tokens`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


@dataclass(frozen=True, kw_only=True)
class FrequentTokensSettings:
    """List the tokens that a target writes, the most frequent first: for --draft-vocab."""

    files: Annotated[
        tuple[Path, ...],
        Argument(metavar="FILE...", show_default=False, help="Documents of --json, shards of peagle data."),
    ]
    out: Annotated[Path, Option("--out", metavar="FILE", show_default=False, help="The list to write.")]
