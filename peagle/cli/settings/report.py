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
    """Render a sweep's report, or compare sweeps by request.

    Writes one self-contained HTML file, and Markdown with plots. Compares each of
    several runs with the first, request by request, to tell a difference from
    noise.

    [bold]Examples[/bold]

      render again         [cyan]peagle report RUN[/cyan]
      before and after     [cyan]peagle report BEFORE AFTER --out DIFF[/cyan]
    """

    runs: Annotated[
        tuple[Path, ...], Argument(metavar="RUN...", show_default=False, help="Output directories of peagle sweep.")
    ]
    out: Annotated[
        Path | None,
        Option(
            "--out",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="Output directory; it must not exist yet. Default: the run's own. Required for several runs.",
        ),
    ] = None
    quiet: Annotated[bool, quiet_option("Hide progress and table")] = False
