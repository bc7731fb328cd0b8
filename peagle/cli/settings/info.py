"""The options of `info`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Argument, Option

from peagle.cli.settings.shared import MESH, AuxLayerIds, Download


@dataclass(frozen=True, kw_only=True)
class InfoSettings:
    """Describe checkpoints; check that target and drafter fit.

    Prints geometry, size and memory. Reads only config.json and the headers of the weights, so it is fast for any
    size. Without DIR, it describes the demo models.

    [bold]Examples[/bold]

      a target or a drafter        [cyan]peagle info DIR[/cyan]
      both, and whether they fit   [cyan]peagle info TARGET DRAFTER[/cyan]
      a plan for eight devices
        [cyan]peagle info --mesh tp=8 --slots 16 --context 8192 --device H100 DIR[/cyan]
      memory of a replica that only decodes
        [cyan]peagle info TARGET DRAFTER --role decode --slots 8[/cyan]
    """

    directories: Annotated[
        tuple[str, ...], Argument(metavar="DIR", show_default=False, help="Target, drafter or both.")
    ] = ()
    aux_layer_ids: AuxLayerIds = None
    download: Download = False
    role: Annotated[
        Literal["both", "prefill", "decode"] | None,
        Option("--role", help="Also print the memory of an engine that only prefills, only decodes, or does both."),
    ] = None
    mesh: Annotated[
        str | None,
        Option(
            "--mesh",
            metavar="tp=N,ep=N,dp=N",
            rich_help_panel=MESH,
            help="Print what each device of this mesh would hold. The devices need not be here.",
        ),
    ] = None
    slots: Annotated[
        int | None,
        Option(
            "--slots",
            min=1,
            metavar="N",
            rich_help_panel=MESH,
            help="Most requests decoded at once, over all replicas. Default: one per replica.",
        ),
    ] = None
    context: Annotated[
        int, Option("--context", min=2, metavar="N", rich_help_panel=MESH, help="Most positions of a request.")
    ] = 4096
    device: Annotated[
        str,
        Option(
            "--device", metavar="H100|H200|B200", rich_help_panel=MESH, help="Device whose speeds the plan assumes."
        ),
    ] = "H100"
