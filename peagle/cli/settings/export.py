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
    """Write a drafter in the layout of vLLM or of the speculators package, with a model card.

    [bold]Examples[/bold]

      for vLLM
        [cyan]peagle export DIR --out OTHER --verifier openai/gpt-oss-20b[/cyan]
      for speculators
        [cyan]peagle export DIR --out OTHER --dialect speculators --verifier NAME[/cyan]
    """

    drafter: Annotated[str, Argument(metavar="DRAFTER", help="Directory, of any dialect; or demo.")]
    out: NewFolder
    dialect: Annotated[
        Literal["vllm", "speculators"], Option("--dialect", rich_help_panel=OUTPUT, help="Whose layout to write.")
    ] = "vllm"
    verifier: Annotated[
        str | None,
        Option(
            "--verifier",
            metavar="NAME|DIR",
            rich_help_panel=OUTPUT,
            help="The target, as others are to find it; speculators needs it. A folder gives what the drafter lacks, "
            "too: positions, embedding, head.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    download: Download = False
    quiet: Annotated[bool, quiet_option("No summary")] = False
