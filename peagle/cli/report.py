"""`peagle report`: render a sweep or the curve of a training again, or compare sweeps."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.box
import rich.table
from rich.console import Console
from rich.measure import Measurement
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

UNBROKEN = 2000  # characters, more than any table has in a line


@dataclass(frozen=True, kw_only=True)
class Report:
    """Render the report of a sweep or a training, or compare sweeps.

    Of a sweep: figures, and Markdown with plots. Compares each of several sweeps
    with the first, request by request, to tell a difference from noise. Of a
    training: the plot of its log.

    [bold]Examples[/bold]

      render again         [cyan]peagle report RUN[/cyan]
      before and after     [cyan]peagle report BEFORE AFTER --out DIFF[/cyan]
    """

    runs: Annotated[tuple[Path, ...], Flag(names=("RUN",))]
    """Output directories of peagle sweep, or one of peagle train."""
    out: Annotated[Path | None, Flag(OUTPUT, "DIR")] = None
    """Output directory; it must not exist yet. Default: the run's own; of several runs: none, only print."""
    quiet: Annotated[bool, QUIET] = False

    def run(self) -> int:
        """Write the page into --out, or of one run into its own directory. Return the exit code."""
        from peagle.cli.display import Display
        from peagle.measure.sweep import page
        from peagle.measure.sweep.compare import differences
        from peagle.measure.sweep.figures import alone, rows
        from peagle.measure.sweep.store import open_run

        if trainings := [path for path in self.runs if (path / LOG).is_file()]:
            return self._draw_curve(trainings[0])
        folders = [open_run(path) for path in dict.fromkeys(self.runs)]
        if self.out is not None:
            expect_new(self.out)
        display = Display(quiet=self.quiet)
        with display.stage("figures"):
            figures = {folder: rows(folder) for folder in folders}  # finished or not
            if empty := [folder.path for folder in folders if not alone(figures[folder])]:
                raise InputError(f"{empty[0]} holds no request with all of its repeats; resume the run first")
            first, *others = folders
            if others:
                compared = [differences(first, folder) for folder in others]
                blocks = functools.partial(page.comparison_blocks, figures, compared)
                tables, sentences = list(page.difference_tables(folders, compared)), [page.real_text(folders)]
            else:
                blocks = functools.partial(page.run_blocks, first, figures[first])
                tables = list(page.tables(first, figures[first]))
                lines = *page.headlines(first, figures[first]), *page.notes(first, figures[first])
                sentences = [*lines, page.INTERVALS]
        finish(display, tables, sentences, self.out or (None if others else first.path), blocks)
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
    where: Path | None,
    blocks: Callable[[], Sequence[reports.Block]],
) -> None:
    """Write the page, show the figures, and name the page. If it cannot be written, the figures are shown all the same.

    blocks: draws the pictures and returns the page. where: its folder; None: none.
    """
    from peagle.measure import charts

    try:
        if where is not None:
            with display.stage("drawing"):
                reports.write(where, blocks())
    finally:
        if not display.quiet:
            for title, table in tables:
                show_lines([title])
                show_table(table, Console(highlight=False))
            show_lines(f"{printable(sentence)}." for sentence in sentences)
    if where is not None and not charts.can_draw():
        display.note(f"no plots: matplotlib is not installed; pip install matplotlib, then: peagle report {where}")
    if where is not None and not display.quiet:
        show_lines([str(where / "README.md")])


def show_table(table: reports.Table, console: Console) -> None:
    """Print a table. Names of rows and the last column break between words; no figure is ever cut."""
    shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, caption in enumerate(table.header):
        breaks = index < table.num_names or index == len(table.header) - 1
        longest = max(len(word) for row in (table.header, *table.rows) for word in row[index].split() or [""])
        justify: Any = "left" if index < table.num_names else "right"
        shown.add_column(caption, justify=justify, no_wrap=not breaks, min_width=longest)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    needed, width = Measurement.get(console, console.options.update(max_width=UNBROKEN), shown), console.width
    console.width = max(width, needed.minimum) if console.is_terminal else needed.maximum
    console.print(shown, crop=False)
    console.width = width
