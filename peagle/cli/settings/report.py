"""The options of `report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from peagle.cli.settings.shared import (
    OUTPUT,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Render runs of peagle sweep: one HTML file that needs no network, and Markdown with pictures.

    Of several runs each is compared with the first, request by request: is the difference real?

    [bold]Examples[/bold]

      a run once more      [cyan]peagle report RUN[/cyan]
      before and after     [cyan]peagle report BEFORE AFTER --out DIR[/cyan]
    """

    runs: Annotated[tuple[Path, ...], Argument(metavar="RUN...", show_default=False, help="Folders of peagle sweep.")]
    out: Annotated[
        Path | None,
        Option(
            "--out",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="New folder to write. Default: the run's own; several runs need one.",
        ),
    ] = None
    quiet: Annotated[bool, quiet_option("No table: the pages are written alone")] = False
