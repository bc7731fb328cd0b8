"""A page as Markdown and as HTML: the same content, escaped; the HTML loads nothing."""

import base64
import re
from pathlib import Path

from peagle.measure.pages import Picture, Table, heading, html, markdown, write

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
    assert [each.partition(",")[0] for each in loaded] == ["data:image/svg+xml;base64"]
    assert "url(" not in text
    (image,) = re.findall(r"<img [^>]*>", text)
    assert 'alt="a&quot;b"' in image
    assert base64.b64decode(re.findall(r"base64,([^\"]+)", image)[0]).decode() == SVG


def test_a_page_is_a_folder_with_its_pictures(tmp_path: Path) -> None:
    write(tmp_path / "new" / "run", BLOCKS)
    assert {path.name for path in (tmp_path / "new" / "run").iterdir()} == {"README.md", "report.html", "p.svg"}
