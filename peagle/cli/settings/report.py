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
    """Write the report of a sweep, or compare sweeps.

    Writes one HTML file that needs no network, and Markdown with charts. Given several runs, each is compared with the
    first, request by request, with confidence intervals.

    [bold]Examples[/bold]

      one run              [cyan]peagle report RUN[/cyan]
      before and after     [cyan]peagle report BEFORE AFTER --out DIR[/cyan]
    """

    runs: Annotated[
        tuple[Path, ...], Argument(metavar="RUN...", show_default=False, help="Folders written by peagle sweep.")
    ]
    out: Annotated[
        Path | None,
        Option(
            "--out",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="New folder for the report. Default: the run's own folder; required for several runs.",
        ),
    ] = None
    quiet: Annotated[bool, quiet_option("Print no table; only write the report")] = False
