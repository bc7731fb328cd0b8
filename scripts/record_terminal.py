"""Record the first command in a terminal as an SVG: text with coloured drafts, and the summary.

    python -m scripts.record_terminal results/first_command.svg [-k K] [PROMPT]

The picture needs no network: its font is whatever monospaced one the reader has.
"""

import argparse
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

import peagle
from peagle.cli.decoding import EXAMPLE
from peagle.cli.display import DRAFT_COLOURS, draft_text
from peagle.cli.document import summary_lines
from peagle.config import EngineConfig
from peagle.engine.request import Request
from peagle.text.prompts import from_text
from peagle.workflows.run import Observer, RunConfig, run

WIDTH = 100
FONT_FACES = re.compile(r"@font-face \{.*?\}\n", re.DOTALL)


class Recorder(Observer):
    """Print parts in the colours of their origins."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def emitted(
        self,
        request: Request,  # noqa: ARG002
        token_ids: Sequence[int],  # noqa: ARG002
        text: str,  # noqa: ARG002
        parts: Sequence[tuple[str, int]] = (),
    ) -> None:
        for piece, origin in parts:
            self._console.print(draft_text(piece, origin), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="FILE.svg")
    parser.add_argument("prompt", nargs="?", default=EXAMPLE, metavar="PROMPT")
    parser.add_argument("-k", type=int, default=3, metavar="K")
    given = parser.parse_args(arguments)
    pair = peagle.load()
    config = RunConfig(engine=EngineConfig(given.k), show_drafts=True)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_terminal=True)
    console.print(f"$ peagle speculate -k {given.k} --show-drafts", style="bold")
    console.print(f"{given.prompt}\n", style="dim", markup=False)
    run(pair, [from_text(given.prompt)], config, Recorder(console))
    done = run(pair, [from_text(given.prompt)], config)  # warm, and without a recorder's time
    legend = Text("\n\naccepted draft at place ")
    for place in range(1, given.k + 1):
        legend.append(f" {place} ", style=f"bold {DRAFT_COLOURS[place - 1]}")
    console.print(legend.append("  others are the target's own\n"))
    for line in summary_lines(done, config, None):
        console.print(line, markup=False)
    svg = console.export_svg(title="peagle")
    given.out.write_text(FONT_FACES.sub("", svg), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
