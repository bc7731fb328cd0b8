"""A page as Markdown and as HTML: the same content, escaped; the HTML loads nothing."""

import base64
import re
from pathlib import Path

import pytest

from peagle.measure.reports import Commands, Picture, Table, heading, html, markdown, plain, write

HOSTILE = "<script>alert(1)</script> ![x](http://a/b.png) [y](http://a) <http://a>"
SVG = "<svg id='a'/>"
BLOCKS = [
    heading("a < b", 1),
    f"`x<y>` **b** {HOSTILE}",
    Table(("h|1", "other"), ((HOSTILE, "`a|b`"), ("new\nline", ""))),
    Picture("p", SVG, 'a"b'),
]


def test_markdown_keeps_a_table_together_and_names_the_pictures() -> None:
    text = markdown(BLOCKS)
    assert text.startswith("# a < b\n\n")
    assert "| h\\|1 | other |\n|---|---|\n" in text
    assert "| new\\nline |  |" in text
    assert text.endswith('![a"b](p.svg)\n')


def test_html_shows_the_same_and_loads_nothing() -> None:
    text = html(BLOCKS)
    assert "<title>a &lt; b</title>" in text
    assert "<h1>a &lt; b</h1>" in text
    assert "<code>x&lt;y&gt;</code> <strong>b</strong>" in text
    assert "<th>h|1</th>" in text
    assert "<td><code>a|b</code></td>" in text
    assert "<script" not in text
    loaded = re.findall(r"<[^>]*(?:href|src)=.([^'\"]*)", text)
    assert [source.partition(",")[0] for source in loaded] == ["data:image/svg+xml;base64"]
    assert "url(" not in text
    (image,) = re.findall(r"<img [^>]*>", text)
    assert 'alt="a&quot;b"' in image
    assert base64.b64decode(re.findall(r"base64,([^\"]+)", image)[0]).decode() == SVG


@pytest.mark.parametrize("name", ["a*b*c", "_x_", "my_drafter_v2", "`c`", "[y](http://a)", "a\\b", "<b>", "1. x"])
def test_a_name_in_a_paragraph_shows_as_it_is(name: str) -> None:
    text = html([heading("t", 1), f"**{plain(name)}:** {plain(name)}."])
    shown = name.replace("<", "&lt;").replace(">", "&gt;")
    assert f"<p><strong>{shown}:</strong> {shown}.</p>" in text


def test_lists_and_commands_are_themselves_in_both() -> None:
    blocks = [heading("t", 1), "- **a:** b\n- **c:** d", Commands(["peagle x 'y z'", "peagle <y>"])]
    assert markdown(blocks).endswith("\n\n```bash\npeagle x 'y z'\npeagle <y>\n```\n")
    text = html(blocks)
    assert text.count("<li><strong>") == 2
    assert "peagle x 'y z'\npeagle &lt;y&gt;\n</code></pre>" in text


def test_columns_of_numbers_are_to_the_right() -> None:
    table = Table(("K", "speed", "real?"), (("1", "+1.00", "yes"), ("3, two", "-", "no")))
    assert "\n|---|---:|---|\n" in markdown([table])
    text = html([heading("t", 1), table])
    right = 'style="text-align:right"'
    assert f"<td>1</td>\n<td {right}>+1.00</td>\n<td>yes</td>" in text


def test_a_page_is_a_folder_with_its_pictures(tmp_path: Path) -> None:
    write(tmp_path / "new" / "run", BLOCKS)
    assert {path.name for path in (tmp_path / "new" / "run").iterdir()} == {"README.md", "report.html", "p.svg"}
