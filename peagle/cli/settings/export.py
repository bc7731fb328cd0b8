"""The options of `export`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Argument, Option

from peagle.cli.settings.shared import (
    OUTPUT,
    AuxLayerIds,
    Download,
    NewFolder,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Convert a drafter for vLLM or speculators.

    Writes the same weights bit for bit, and a model card.

    [bold]Examples[/bold]

      the demo drafter   [cyan]peagle export demo --out OUT[/cyan]
      for vLLM
        [cyan]peagle export DIR --out OUT --verifier openai/gpt-oss-20b[/cyan]
      for speculators
        [cyan]peagle export DIR --out OUT --dialect speculators --verifier NAME[/cyan]
    """

    drafter: Annotated[str, Argument(metavar="DRAFTER", help="Drafter checkpoint, in any layout; or demo.")]
    out: NewFolder
    dialect: Annotated[
        Literal["vllm", "speculators"],
        Option("--dialect", metavar="LAYOUT", rich_help_panel=OUTPUT, help="Layout to write: vllm or speculators."),
    ] = "vllm"
    verifier: Annotated[
        str | None,
        Option(
            "--verifier",
            metavar="NAME|DIR",
            rich_help_panel=OUTPUT,
            help="Target, as named in the exported config; required for speculators. A directory also supplies what "
            "the drafter lacks: positions, embedding, head.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    download: Download = False
    quiet: Annotated[bool, quiet_option("Hide the summary")] = False
