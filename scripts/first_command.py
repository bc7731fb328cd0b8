"""Make the README's picture: the first command in a terminal.

python -m scripts.first_command results/first_command.svg
"""

import contextlib
import io
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from scripts.runs import new_parser

COMMAND = ("speculate",)
COLUMNS = 100
ENVIRONMENT = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(COLUMNS)}
DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"


class Screen(io.StringIO):
    """Standard output: a terminal with colours."""

    def isatty(self) -> bool:
        return True


class Notes(io.StringIO):
    """Standard error, on the same screen: dim before the answer, and only then a terminal, so no progress is drawn."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen, self._written = screen, ""

    def isatty(self) -> bool:
        return self._screen.getvalue() != self._written

    def write(self, text: str) -> int:
        before = not self.isatty()
        self._screen.write(f"{DIM}{text}{NOT_DIM}" if before else text)
        self._written = self._screen.getvalue() if before else self._written
        return len(text)


def main() -> int:
    """Run the command, and draw what a terminal shows."""
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path, help="the picture, an SVG")
    out = parser.parse_args().out
    os.environ.update(ENVIRONMENT)
    os.environ.pop("NO_COLOR", None)
    from peagle.cli import main as run

    screen = Screen()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(Notes(screen)):
        code = run([*COMMAND])
    print(screen.getvalue())
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True, color_system="truecolor")
    console.print(Text.assemble((f"$ peagle {' '.join(COMMAND)}", "bold")))
    console.print(Text.from_ansi(screen.getvalue()))
    if code == 0:
        out.write_text(console.export_svg(title="peagle", unique_id="terminal"), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
