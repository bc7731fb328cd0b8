"""The options of `frequent-tokens`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


@dataclass(frozen=True, kw_only=True)
class FrequentTokensSettings:
    """List a target's most frequent tokens, for --draft-vocab."""

    files: Annotated[
        tuple[Path, ...],
        Argument(metavar="FILE...", show_default=False, help="Files of --json, or shards of peagle data."),
    ]
    out: Annotated[Path, Option("--out", metavar="FILE", show_default=False, help="File to write.")]
