"""Render a page both as Markdown with pictures beside it and as one HTML file that loads nothing."""

import base64
import dataclasses
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from peagle.base.files import encoded, printable, write_text_whole, writing


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


@dataclasses.dataclass(frozen=True)
class Commands:
    """Shell commands to copy."""

    lines: Sequence[str]


# a string is Markdown: a heading, a list, a paragraph
Block = str | Table | Picture | Commands

# without links, images and HTML, so that the page loads nothing, whatever a name holds
_HTML_OF = MarkdownIt("zero").enable(["heading", "table", "backticks", "emphasis", "escape", "list", "fence"])
_MARKUP = re.compile(r"[\\`*<\[]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word is itself
_NUMBER = re.compile(r"[-+.\d]|$")
_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --head: #f3f4f6; --quiet: #57606a }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --page: #16181c; --line: #3a3f46; --head: #23272e; --quiet: #a4adb8 } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; padding: 0 1.5em; max-width: 110em;
  color: var(--text); background: var(--page) }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere }
h1 { font-size: 1.6em } h2 { font-size: 1.25em; margin-top: 2em; padding-bottom: .2em;
  border-bottom: 1px solid var(--line) } h3 { font-size: 1.05em; margin: 2em 0 .6em }
p, ul { max-width: 60em; overflow-wrap: anywhere; text-wrap: pretty } ul { padding-left: 1.3em } li { margin: .25em 0 }
code { overflow-wrap: anywhere } pre { max-width: 60em; padding: .7em 1em; border-radius: 4px; font-size: .92em;
  background: var(--head); white-space: pre-wrap }
table { display: block; width: fit-content; max-width: 100%; overflow-x: auto; border-collapse: collapse;
  font-size: .87em; margin: .6em 0 1.6em; font-variant-numeric: tabular-nums }
th, td { border: 1px solid var(--line); padding: .25em .55em; text-align: left; vertical-align: top }
th { background: var(--head); vertical-align: bottom; max-width: 7.5em }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page) }
th:first-child { background: var(--head) }
figure { display: inline-block; margin: .6em 1.6em .6em 0; width: 34em; max-width: 100%; vertical-align: top }
img { width: 100%; border-radius: 4px } figcaption { font-size: .87em; color: var(--quiet) }
@media (max-width: 40em) { body { margin: 1em auto; padding: 0 1em } figure { margin-right: 0 }
  th:first-child, td:first-child { position: static } }
@media print { body { max-width: none; margin: 0; font-size: 10pt } figure, table { break-inside: avoid }
  table { display: table; font-size: 7pt } th, td { padding: .1em .3em } }
"""


def heading(text: str, level: int = 2) -> str:
    """Make a heading; level 1 is the page's title."""
    return f"{'#' * level} {printable(text)}"


def plain(text: str) -> str:
    """Escape the Markdown in a text."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def markdown(blocks: Sequence[Block]) -> str:
    """Render a page that shows the files of `pictures`."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def html(blocks: Sequence[Block]) -> str:
    """Render a page with its pictures inside. Its first block is its title."""
    title = escape(_markdown(blocks[0]).lstrip("# "))
    body = "\n".join(
        _figure(block) if isinstance(block, Picture) else _HTML_OF.render(_markdown(block)) for block in blocks
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def pictures(blocks: Sequence[Block]) -> dict[str, str]:
    """Return the pictures' SVG texts by file name."""
    return {f"{block.name}.svg": block.svg for block in blocks if isinstance(block, Picture)}


def write(path: Path, blocks: Sequence[Block]) -> None:
    """Write README.md, its pictures and report.html into a folder. Raises InputError."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        for name, text in {"README.md": markdown(blocks), "report.html": html(blocks), **pictures(blocks)}.items():
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
        case Commands(lines):
            return "\n".join(["```bash", *map(printable, lines), "```"])
        case Picture(name, _, caption):
            return f"![{caption}]({name}.svg)"
        case text:
            return text


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")


def _figure(picture: Picture) -> str:
    """Embed a drawing as an image, so that ids of two drawings do not clash."""
    data, caption = base64.b64encode(encoded(picture.svg)).decode(), escape(picture.caption)
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{caption}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
