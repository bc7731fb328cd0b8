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
    """Convert a drafter to vLLM's or speculators' layout.

    Writes a model card, too.

    [bold]Examples[/bold]

      for vLLM
        [cyan]peagle export DIR --out OTHER --verifier openai/gpt-oss-20b[/cyan]
      for speculators
        [cyan]peagle export DIR --out OTHER --dialect speculators --verifier NAME[/cyan]
    """

    drafter: Annotated[str, Argument(metavar="DRAFTER", help="Drafter checkpoint of any dialect, or demo.")]
    out: NewFolder
    dialect: Annotated[
        Literal["vllm", "speculators"], Option("--dialect", rich_help_panel=OUTPUT, help="Layout to write.")
    ] = "vllm"
    verifier: Annotated[
        str | None,
        Option(
            "--verifier",
            metavar="NAME|DIR",
            rich_help_panel=OUTPUT,
            help="Target to name in the files; speculators needs it. A directory also fills in what the drafter lacks: "
            "positions, embedding, head.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    download: Download = False
    quiet: Annotated[bool, quiet_option("Print no summary")] = False
