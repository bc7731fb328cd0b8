"""`peagle report`: render a sweep or the curve of a training again, or compare sweeps."""

import functools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

from drafter.train.folder import LOG, read_log
from peagle.base.errors import InputError
from peagle.base.files import expect_new, printable
from peagle.base.flag import OUTPUT, Flag
from peagle.cli.flags import QUIET
from peagle.cli.output import show_lines
from peagle.measure import reports

if TYPE_CHECKING:  # it imports JAX
    from peagle.cli.display import Display

BETWEEN = 2  # characters between two columns of a table
EDGES = 2  # characters outside the outer columns


@dataclass(frozen=True, kw_only=True)
class Report:
    """Render the report of a sweep or a training, or compare sweeps.

    Of a sweep: one self-contained HTML file, and Markdown with plots. Compares each
    of several sweeps with the first, request by request, to tell a difference from
    noise. Of a training: the plot of its log.

    [bold]Examples[/bold]

      render again         [cyan]peagle report RUN[/cyan]
      before and after     [cyan]peagle report BEFORE AFTER --out DIFF[/cyan]
    """

    runs: Annotated[tuple[Path, ...], Flag(names=("RUN",))]
    """Output directories of peagle sweep, or one of peagle train."""
    out: Annotated[Path | None, Flag(OUTPUT, "DIR")] = None
    """Output directory; it must not exist yet. Default: the run's own. Required for several runs."""
    quiet: Annotated[bool, QUIET] = False

    def run(self) -> int:
        """Write the pages into --out, or of one run into its own directory. Return the exit code."""
        from peagle.cli.display import Display
        from peagle.measure.sweep import layout
        from peagle.measure.sweep.compare import differences
        from peagle.measure.sweep.figures import alone, rows
        from peagle.measure.sweep.headline import headlines
        from peagle.measure.sweep.store import open_run

        if trainings := [path for path in self.runs if (path / LOG).is_file()]:
            return self._draw_curve(trainings[0])
        folders = [open_run(path) for path in dict.fromkeys(self.runs)]
        if len(folders) > 1 and self.out is None:
            raise InputError("a comparison of several runs needs its own directory; give --out DIR")
        if self.out is not None:
            expect_new(self.out)
        display = Display(quiet=self.quiet)
        with display.stage("figures"):
            figures = {folder: rows(folder) for folder in folders}  # finished or not
            if empty := [folder.path for folder in folders if not alone(figures[folder])]:
                raise InputError(f"{empty[0]} holds no request with all of its repeats; resume the run first")
            if len(folders) == 1:
                (folder,) = folders
                blocks = functools.partial(layout.run_blocks, folder, figures[folder])
                tables = list(layout.terminal_tables(folder, figures[folder]))
                sentences = headlines(folder, figures[folder])
            else:
                compared = [differences(folders[0], folder) for folder in folders[1:]]
                blocks = functools.partial(layout.comparison_blocks, figures, compared)
                tables = list(layout.difference_tables(folders, compared))
                sentences = layout.comparison_sentences(folders, compared)
        finish(display, tables, sentences, self.out or folders[0].path, blocks)
        return 0

    def _draw_curve(self, training: Path) -> int:
        """Plot the log of a training into --out, or into its own directory. Return the exit code."""
        from peagle.workflows.training_curve import draw

        if len(self.runs) > 1:
            raise InputError(f"{training} is a training, which is not compared; expected it alone, or sweeps")
        out = training if self.out is None else self.out
        if self.out is not None:
            expect_new(out)
            out.mkdir(parents=True)
        show_lines([f"curve: {draw(list(read_log(training / LOG)), out)}"])
        return 0


def finish(
    display: "Display",
    tables: Iterable[tuple[str, reports.Table]],
    sentences: Iterable[str],
    where: Path,
    blocks: Callable[[], Sequence[reports.Block]],
) -> None:
    """Write the page, show the figures, and name the page. If it cannot be written, the figures are shown all the same.

    blocks: draws the pictures and returns the page.
    """
    from peagle.measure.sweep import charts

    try:
        with display.stage("drawing"):
            reports.write(where, blocks())
    finally:
        if not display.quiet:
            show(tables, sentences)
    if not charts.can_draw():
        display.note(f"no plots: matplotlib is not installed; pip install matplotlib, then: peagle report {where}")
    if not display.quiet:
        show_lines([str(where / "report.html")])


def show(tables: Iterable[tuple[str, reports.Table]], sentences: Iterable[str]) -> None:
    """Print tables with their titles, and the result in sentences."""
    console = Console(highlight=False)
    for title, table in tables:
        _show_table(console, title, table)
    show_lines(f"{printable(sentence)}." for sentence in sentences)


def _show_table(console: Console, title: str, table: reports.Table) -> None:
    """Print a table; if it is too wide, as several tables with some of its columns.

    A figure and its interval stay on one line; headers and the names of rows break between words.
    """
    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.header)
    least = []
    for index, (caption, cells) in enumerate(zip(table.header, columns, strict=True)):
        words = " ".join(cells).split() if index < table.num_names else cells
        least.append(max(map(len, (*caption.split(), *words))))
    for part, indices in enumerate(fitting(least, console.width, table.num_names)):
        shown = rich.table.Table(
            title=None if part else Text(title),
            title_justify="left",
            box=rich.box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        needed = _total(least[index] for index in indices)
        room = max(console.width, needed)
        spare = room - needed
        widths = {}
        for index in indices:
            more = min(spare, max(map(len, (table.header[index], *columns[index]))) - least[index])
            spare -= more
            widths[index] = least[index] + more
        headers = {index: textwrap.wrap(table.header[index], width) for index, width in widths.items()}
        height = max(map(len, headers.values()))
        for index, width in widths.items():
            header = Text("\n" * (height - len(headers[index])) + "\n".join(headers[index]))
            shown.add_column(header, justify="left" if index < table.num_names else "right", width=width)
        for row in table.rows:
            shown.add_row(*(Text(row[index]) for index in indices))
        # never cut a figure: in a terminal narrower than two columns, the lines break
        console.print(shown, width=room, crop=False)


def fitting(widths: Sequence[int], room: int, num_names: int = 1) -> list[list[int]]:
    """Split columns into tables that fit. A table has the first `num_names` columns and at least one other."""
    tables: list[list[int]] = []
    for index in range(num_names, len(widths)):
        if tables and _total(widths[column] for column in (*tables[-1], index)) <= room:
            tables[-1].append(index)
        else:
            tables.append([*range(num_names), index])
    return tables


def _total(widths: Iterable[int]) -> int:
    widths = list(widths)
    return sum(widths) + BETWEEN * (len(widths) - 1) + EDGES
