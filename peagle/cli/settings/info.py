"""The options of `info`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Argument, Option

from peagle.cli.settings.shared import MESH, AuxLayerIds, Download


@dataclass(frozen=True, kw_only=True)
class InfoSettings:
    """Say what a checkpoint is: geometry, bytes, memory it will need, taps; with two, whether target and drafter fit.

    Reads config.json and the headers of the weights only, so it is quick for any size. Without DIR: the demo pair.

    [bold]Examples[/bold]

      a target or a drafter        [cyan]peagle info DIR[/cyan]
      both, and whether they fit   [cyan]peagle info TARGET DRAFTER[/cyan]
      a plan for eight devices
        [cyan]peagle info --mesh tp=8 --slots 16 --context 8192 --device H100 DIR[/cyan]
      what decoding alone takes
        [cyan]peagle info TARGET DRAFTER --role decode --slots 8[/cyan]
    """

    directories: Annotated[
        tuple[str, ...], Argument(metavar="DIR", show_default=False, help="Target, drafter, or both.")
    ] = ()
    aux_layer_ids: AuxLayerIds = None
    download: Download = False
    role: Annotated[
        Literal["both", "prefill", "decode"] | None,
        Option("--role", help="Say also what an engine takes that only prefills, only decodes, or does both."),
    ] = None
    mesh: Annotated[
        str | None,
        Option(
            "--mesh",
            metavar="tp=N,ep=N,dp=N",
            rich_help_panel=MESH,
            help="Say what each of these devices would hold of the target. None of them needs to be here.",
        ),
    ] = None
    slots: Annotated[
        int | None,
        Option(
            "--slots",
            min=1,
            metavar="N",
            rich_help_panel=MESH,
            help="Requests decoded at once, by all replicas together. Default: one, or one in each.",
        ),
    ] = None
    context: Annotated[
        int, Option("--context", min=2, metavar="N", rich_help_panel=MESH, help="Positions of each slot.")
    ] = 4096
    device: Annotated[
        str, Option("--device", metavar="H100|H200|B200", rich_help_panel=MESH, help="Whose speeds to reckon with.")
    ] = "H100"
