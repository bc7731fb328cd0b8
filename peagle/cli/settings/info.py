"""The options of `info`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Argument, Option

from peagle.cli.settings.shared import PLAN, AuxLayerIds, Download


@dataclass(frozen=True, kw_only=True)
class InfoSettings:
    """Inspect checkpoints: geometry, memory, whether they fit.

    Reads only config.json and the headers of the weights, so it is fast for a
    checkpoint of any size.

    [bold]Examples[/bold]

      the demo models                 [cyan]peagle info[/cyan]
      a target or a drafter         [cyan]peagle info DIR[/cyan]
      both, and whether they fit    [cyan]peagle info TARGET DRAFTER[/cyan]
      memory on eight GPUs
        [cyan]peagle info --mesh tp=8 --slots 16 --context 8192 --device H100 DIR[/cyan]
      memory of an engine that only decodes
        [cyan]peagle info TARGET DRAFTER --role decode --slots 8[/cyan]
    """

    directories: Annotated[
        tuple[str, ...],
        Argument(metavar="DIR", show_default=False, help="Target, drafter, or both. Default: the demo models."),
    ] = ()
    aux_layer_ids: AuxLayerIds = None
    download: Download = False
    role: Annotated[
        Literal["both", "prefill", "decode"] | None,
        Option(
            "--role",
            metavar="ROLE",
            rich_help_panel=PLAN,
            help="Also print the cache memory of an engine, and how many tokens fit: one that only prefills (prefill), "
            "only decodes (decode), or does both.",
        ),
    ] = None
    mesh: Annotated[
        str | None,
        Option(
            "--mesh",
            metavar="tp=N,ep=N,dp=N",
            rich_help_panel=PLAN,
            help="Also print what each device of this mesh holds of the target. The devices need not be present.",
        ),
    ] = None
    slots: Annotated[
        int | None,
        Option(
            "--slots",
            min=1,
            metavar="N",
            rich_help_panel=PLAN,
            help="Requests decoded at once, over all replicas. Default: one per replica.",
        ),
    ] = None
    context: Annotated[
        int, Option("--context", min=2, metavar="N", rich_help_panel=PLAN, help="Context length in tokens.")
    ] = 4096
    device: Annotated[
        str,
        Option(
            "--device",
            metavar="H100|H200|B200",
            rich_help_panel=PLAN,
            help="Device of the mesh: its memory and bandwidth.",
        ),
    ] = "H100"
