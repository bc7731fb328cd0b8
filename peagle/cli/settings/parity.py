"""The options of `parity`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from peagle.cli.settings.shared import (
    MODEL,
    PROMPT,
    RUNNING,
    SPECULATION,
    AuxLayerIds,
    DrafterWindow,
    Json,
    MeasuredTokens,
    ModelOptions,
    SpecialTokens,
    Strict,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class ParitySettings:
    """Compare models with references; explain low acceptance.

    Compares the target layer by layer with transformers (if torch is installed), the drafter with a float64 reference,
    and the engine with both. Then it reads the checkpoint in other ways (aux layers one off, another mask token, norm,
    vocabulary map, the target's embedding, raw prompts). If one of them is accepted more often, it is the likely cause,
    and the key to change is printed. Exit code 1 if a check fails.

    [bold]Examples[/bold]

      the demo models           [cyan]peagle parity[/cyan]
      "my acceptance is 1.4"
        [cyan]peagle parity --target DIR --drafter DIR --prompts FILE[/cyan]
    """

    drafter: Annotated[
        str | None,
        Option("--drafter", metavar="DIR", rich_help_panel=MODEL, help="P-EAGLE or EAGLE-3 checkpoint. Default: demo."),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    drafter_window: DrafterWindow = "auto"
    model: ModelOptions = ModelOptions()
    prompts: Annotated[
        Path | None,
        Option(
            "--prompts",
            "--prompt-file",
            metavar="FILE",
            rich_help_panel=PROMPT,
            help="Prompt file. Default: the demo's held-out prompts.",
        ),
    ] = None
    num_prompts: Annotated[
        int, Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="Prompts to use.")
    ] = 10
    strict: Strict = False
    render: Annotated[
        Literal["chat", "raw"],
        Option("--render", rich_help_panel=PROMPT, help="Apply the chat template, or use the raw text."),
    ] = "chat"
    special_tokens: SpecialTokens = False
    num_speculative_tokens: Annotated[
        int,
        Option(
            "-k", "--num-speculative-tokens", metavar="K", rich_help_panel=SPECULATION, help="Draft tokens per step."
        ),
    ] = 5
    max_new_tokens: MeasuredTokens = 64
    reference_steps: Annotated[
        int,
        Option(
            "--reference-steps",
            min=1,
            metavar="N",
            rich_help_panel=RUNNING,
            help="Steps to compare with the float64 reference, which is slow.",
        ),
    ] = 6
    json: Json = None
    quiet: Annotated[bool, quiet_option("Print only the findings: no progress, no notes")] = False
