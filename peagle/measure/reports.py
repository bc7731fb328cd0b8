"""Render a page as Markdown, with pictures in files beside it."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from peagle.base.files import printable, write_text_whole, writing


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells of plain text. The first `num_names` columns name a row, the others are its figures."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1


@dataclasses.dataclass(frozen=True)
class Picture:
    """An SVG drawing, stored as NAME.svg."""

    name: str
    svg: str
    caption: str


# a string is Markdown: a heading, a list, a paragraph
Block = str | Table | Picture

_MARKUP = re.compile(r"[\\`*<\[]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word is itself
_NUMBER = re.compile(r"[-+.\d]|$")


def heading(text: str, level: int = 2) -> str:
    """Make a heading; level 1 is the page's title."""
    return f"{'#' * level} {printable(text)}"


def plain(text: str) -> str:
    """Escape the Markdown in a text."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def command(text: str) -> str:
    """Show a shell command to copy."""
    return f"```bash\n{printable(text)}\n```"


def markdown(blocks: Sequence[Block]) -> str:
    """Render a page that shows the files of its pictures."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def write(path: Path, blocks: Sequence[Block]) -> None:
    """Write README.md and its pictures into a folder. Raises InputError."""
    files = {f"{block.name}.svg": block.svg for block in blocks if isinstance(block, Picture)}
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        for name, text in {"README.md": markdown(blocks), **files}.items():
            write_text_whole(path / name, text)


def _markdown(block: Block) -> str:
    """Render a block. Columns of numbers are aligned to the right, except the first."""
    match block:
        case Table(header, rows):
            head, *lines = (f"| {' | '.join(map(_cell, row))} |" for row in (header, *rows))
            columns = [[row[index] for row in rows] for index in range(len(header))]
            numeric = [index > 0 and all(map(_NUMBER.match, cells)) for index, cells in enumerate(columns)]
            marks = "".join("|---:" if right else "|---" for right in numeric)
            return "\n".join([head, f"{marks}|", *lines])
        case Picture(name, _, caption):
            return f"![{caption}]({name}.svg)"
        case text:
            return text


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")
