"""Write a page once: as Markdown beside its pictures, and as one HTML file that needs no other file and no network."""

import base64
import dataclasses
from collections.abc import Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from peagle.ops.files import encoded, printable, write_text_whole, writing


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as plain text; `|` is escaped."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """An SVG drawing; its file is `name`.svg."""

    name: str
    svg: str
    caption: str


Block = str | Table | Picture  # a string is Markdown: a heading, or a paragraph with `code` and **bold**

# no links, no images, no HTML: whatever a name holds, the page loads nothing
_HTML_OF = MarkdownIt("zero").enable(["heading", "table", "backticks", "emphasis", "escape"])
_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --head: #f3f4f6; --quiet: #57606a }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --page: #16181c; --line: #3a3f46; --head: #23272e; --quiet: #a4adb8 } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; padding: 0 1.5em; max-width: 110em;
  color: var(--text); background: var(--page) }
h1 { font-size: 1.6em } h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid var(--line) }
p { max-width: 60em; text-wrap: pretty } code { overflow-wrap: anywhere }
table { display: block; width: fit-content; max-width: 100%; overflow-x: auto; border-collapse: collapse;
  font-size: .87em; margin: .6em 0 1.6em; font-variant-numeric: tabular-nums }
th, td { border: 1px solid var(--line); padding: .25em .55em; text-align: right }
th { background: var(--head); vertical-align: bottom; max-width: 7.5em }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page) }
th:first-child { background: var(--head) }
figure { display: inline-block; margin: .8em 1.6em 1.6em 0; width: 34em; max-width: 100%; vertical-align: top }
img { width: 100%; border-radius: 4px } figcaption { font-size: .87em; color: var(--quiet) }
@media print { body { max-width: none; margin: 0; font-size: 10pt } figure, table { break-inside: avoid }
  table { display: table; font-size: 7pt } th, td { padding: .1em .3em } }
"""


def heading(text: str, level: int = 2) -> str:
    """Make a heading; level 1 is the page's title."""
    return f"{'#' * level} {printable(text)}"


def markdown(blocks: Sequence[Block]) -> str:
    """Render a page whose pictures are files beside it (`pictures` makes them)."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def html(blocks: Sequence[Block]) -> str:
    """Render a page, which begins with its title, as one file with its pictures inside. It prints well, too."""
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
    """Collect SVG texts by the names of their files."""
    return {f"{block.name}.svg": block.svg for block in blocks if isinstance(block, Picture)}


def write(path: Path, blocks: Sequence[Block]) -> None:
    """Write README.md with its pictures, and report.html, into a folder. Raises InputError if that fails."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        for name, text in {"README.md": markdown(blocks), "report.html": html(blocks), **pictures(blocks)}.items():
            write_text_whole(path / name, text)


def _markdown(block: Block) -> str:
    match block:
        case Table(header, rows):
            head, *lines = (f"| {' | '.join(map(_cell, row))} |" for row in (header, *rows))
            return "\n".join([head, "|---" * len(header) + "|", *lines])
        case Picture(name, _, caption):
            return f"![{caption}]({name}.svg)"
        case text:
            return text


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")


def _figure(picture: Picture) -> str:
    """Embed a drawing as an image, so that ids inside it do not meet those of another drawing."""
    data, caption = base64.b64encode(encoded(picture.svg)).decode(), escape(picture.caption)
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{caption}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
