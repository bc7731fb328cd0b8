"""The options of `frequent-tokens`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


@dataclass(frozen=True, kw_only=True)
class FrequentTokensSettings:
    """Rank the tokens a target generates, for --draft-vocab.

    Writes a JSON list of token ids, the most frequent first.

    [bold]Examples[/bold]

      from training data
        [cyan]peagle frequent-tokens DATA/shard_*.safetensors --out TOKENS.json[/cyan]
      from the responses of peagle generate --json
        [cyan]peagle frequent-tokens OUT.json --out TOKENS.json[/cyan]
    """

    files: Annotated[
        tuple[Path, ...],
        Argument(
            metavar="FILE...",
            show_default=False,
            help="Files of generate or speculate --json, and shards of peagle data.",
        ),
    ]
    out: Annotated[Path, Option("--out", metavar="FILE", show_default=False, help="File to write.")]
