"""`peagle report`: render runs of peagle sweep again, or compare several."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

from peagle.cli.display import Display
from peagle.cli.settings.report import ReportSettings
from peagle.measure import pages
from peagle.measure.sweep import charts, concurrency, page
from peagle.measure.sweep.compare import differences
from peagle.measure.sweep.figures import rows
from peagle.measure.sweep.folder import open_run
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new

BETWEEN = 3  # characters between two columns of a table


def report_command(settings: ReportSettings) -> int:
    """Write the pages of one run into its folder, or those of one or several into a new one. Return the exit code.

    Raises InputError for a folder that is no run, for runs that cannot be compared, and for several runs without --out.
    """
    out = settings.out
    folders = [open_run(path) for path in dict.fromkeys(settings.runs)]
    if len(folders) > 1 and out is None:
        raise InputError("several runs are compared in a folder of their own; give --out DIR")
    if out is not None:
        expect_new(out)
    display = Display(text=False, quiet=settings.quiet, total=1, streaming=False)
    with display.stage("figures"):
        found = {folder: rows(folder) for folder in folders}  # of what is there, finished or not
        loads = concurrency.rows(folders[0])
        if empty := [folder.path for folder, some in found.items() if not some]:
            raise InputError(f"{empty[0]} holds no request whose repeats are all there; resume it first")
        if len(folders) == 1:
            blocks = page.run_blocks(folders[0], found[folders[0]], loads)
            tables = list(page.arms_blocks(folders[0], found[folders[0]]))
        else:
            compared = [differences(folders[0], folder) for folder in folders[1:]]
            blocks = page.comparison_blocks(found, compared)
            tables = list(page.difference_tables(folders, compared))
        where = out or folders[0].path
        pages.write(where, blocks)
    show(tables, where, settings.quiet)
    tell_of_pictures(display, where)
    return 0


def tell_of_pictures(display: Display, where: Path) -> None:
    """Note, if pages are without pictures, how to get them."""
    if not charts.can_draw():
        display.note(f"without pictures, which need matplotlib: pip install matplotlib; then: peagle report {where}")


def show(tables: Iterable[tuple[str, pages.Table]], where: Path, quiet: bool) -> None:
    """Print tables with their titles, and the path of the whole page."""
    if quiet:
        return
    console = Console(highlight=False)
    for title, table in tables:
        columns = list(zip(table.header, *table.rows, strict=True))
        least = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
        for part, places in enumerate(fitting(least, console.width)):
            shown = rich.table.Table(title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
            shown.title = None if part else Text(title)
            spare = max(0, console.width - _total(least[place] for place in places))
            for place in places:
                more = min(spare, max(map(len, columns[place])) - least[place])
                spare -= more
                name, justify = Text(table.header[place]), "right" if place else "left"
                shown.add_column(name, justify=justify, vertical="bottom", width=least[place] + more)  # type: ignore[arg-type]
            for row in table.rows:
                shown.add_row(*(Text(row[place]) for place in places))
            # no figure is cut: a terminal that is narrower than two columns breaks lines by itself
            console.print(shown, width=max(console.width, _total(least[place] for place in places)), crop=False)
    console.print(f"{where / 'report.html'}", markup=False, soft_wrap=True)


def fitting(widths: Sequence[int], room: int) -> list[list[int]]:
    """Cut a table's columns into tables that fit, each with the first column: at least one other a table."""
    tables: list[list[int]] = []
    for place in range(1, len(widths)):
        if tables and _total(widths[each] for each in (*tables[-1], place)) <= room:
            tables[-1].append(place)
        else:
            tables.append([0, place])
    return tables


def _total(widths: Iterable[int]) -> int:
    return sum(width + BETWEEN for width in widths) - 1  # the outer columns have one edge each
