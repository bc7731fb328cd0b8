"""The options of `info`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument

from peagle.cli.settings.shared import (
    AuxLayerIds,
)


@dataclass(frozen=True, kw_only=True)
class InfoSettings:
    """Say what a checkpoint is: geometry, bytes, memory it will need, taps; with two, whether target and drafter fit.

    Reads config.json and the headers of the weights only, so it is quick for any size. Without DIR: the demo pair.

    [bold]Examples[/bold]

      a target or a drafter        [cyan]peagle info DIR[/cyan]
      both, and whether they fit   [cyan]peagle info TARGET DRAFTER[/cyan]
    """

    directories: Annotated[
        tuple[str, ...], Argument(metavar="DIR", show_default=False, help="Target, drafter, or both.")
    ] = ()
    aux_layer_ids: AuxLayerIds = None
