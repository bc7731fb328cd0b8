"""A page as Markdown: whatever a name holds, it shows as it is."""

from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from peagle.measure.reports import Picture, Table, command, heading, markdown, plain, write

PAGE = MarkdownIt("commonmark", {"html": True}).enable("table")


def test_a_page_is_a_file_with_its_pictures_beside_it(tmp_path: Path) -> None:
    table = Table(("h|1", "K", "real?"), (("a", "+1.00", "yes"), ("new\nline", "-", "no")))
    write(
        tmp_path / "new" / "run", [heading("a < b", 1), table, Picture("p", "<svg/>", "a picture"), command("a 'b c'")]
    )
    page = (tmp_path / "new" / "run" / "README.md").read_text()
    assert page.startswith("# a < b\n\n| h\\|1 | K | real? |\n|---|---:|---|\n| a | +1.00 | yes |\n| new\\nline |")
    assert page.endswith("![a picture](p.svg)\n\n```bash\na 'b c'\n```\n")
    assert (tmp_path / "new" / "run" / "p.svg").read_text() == "<svg/>"


@pytest.mark.parametrize("name", ["a*b*c", "_x_", "my_drafter_v2", "`c`", "[y](http://a)", "a\\b", "<b>", "1. x"])
def test_a_name_in_a_paragraph_shows_as_it_is(name: str) -> None:
    shown = name.replace("<", "&lt;").replace(">", "&gt;")
    page = PAGE.render(markdown([heading("t", 1), f"**{plain(name)}:** {plain(name)}."]))
    assert f"<p><strong>{shown}:</strong> {shown}.</p>" in page
