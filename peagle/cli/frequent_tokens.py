"""`peagle frequent-tokens`: rank the tokens that a target generates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peagle.ops.flag import Flag


@dataclass(frozen=True, kw_only=True)
class FrequentTokens:
    """Rank the tokens a target generates, for --draft-vocab.

    Writes a JSON list of token ids, the most frequent first.

    [bold]Examples[/bold]

      from training data
        [cyan]peagle frequent-tokens DATA/shard_*.safetensors --out TOKENS.json[/cyan]
      from the answers of peagle generate --json
        [cyan]peagle frequent-tokens OUT.json --out TOKENS.json[/cyan]
    """

    files: Annotated[tuple[Path, ...], Flag(names=("FILE...",))]
    """Files of generate or speculate --json, and shards of peagle data."""
    out: Annotated[Path, Flag(metavar="FILE")]
    """File to write."""

    def run(self) -> int:
        from peagle.cli.display import Display
        from peagle.cli.output import show_lines
        from peagle.workflows.frequent_tokens import list_frequent_tokens

        with Display().stage("counting tokens"):
            counted = list_frequent_tokens(self.files, self.out)
        marks = ", ".join(f"the first {size} are {share:.1%}" for size, share in counted.shares.items())
        show_lines([f"{self.out}: {counted.num_listed} tokens; of {counted.num_counted} tokens counted, {marks}"])
        return 0
