"""`peagle frequent-tokens`: rank the tokens that a target generates."""

from collections.abc import Sequence
from pathlib import Path

from peagle.cli.display import Display
from peagle.cli.output import show_lines
from peagle.workflows.frequent_tokens import list_frequent_tokens


def frequent_tokens_command(files: Sequence[Path], out: Path) -> int:
    """Write the list, and print its coverage. Raises InputError for a file without responses."""
    with Display(text=False, quiet=False, total=1, streaming=False).stage("counting tokens"):
        counted = list_frequent_tokens(files, out)
    marks = ", ".join(f"the first {size} are {share:.1%}" for size, share in counted.shares.items())
    line = f"{out}: {counted.num_listed} tokens; of {counted.num_counted} tokens counted, {marks}"
    show_lines([line])
    return 0
