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
    """Say whether a pair does what it should, and why its acceptance is what it is.

    The target is compared layer by layer with transformers (where torch is installed), the drafter with a reference in
    float64, the engine with both. Then the checkpoint is read in other ways (taps one layer off, another mask token,
    norm, vocabulary map, the target's embedding, raw prompts): one that is accepted more often is the likely cause, and
    what to change is said as the file names it. Exit code 1 where anything is.

    [bold]Examples[/bold]

      the demo pair             [cyan]peagle parity[/cyan]
      "my acceptance is 1.4"
        [cyan]peagle parity --target DIR --drafter DIR --prompts FILE[/cyan]
    """

    drafter: Annotated[
        str | None,
        Option("--drafter", metavar="DIR", rich_help_panel=MODEL, help="Its checkpoint. Default: the demo's."),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    drafter_window: DrafterWindow = "auto"
    model: ModelOptions = ModelOptions()
    prompts: Annotated[
        Path | None,
        Option("--prompts", metavar="FILE", rich_help_panel=PROMPT, help="Default: the demo's held-out prompts."),
    ] = None
    num_prompts: Annotated[
        int, Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="Of the file.")
    ] = 10
    strict: Strict = False
    render: Annotated[
        Literal["chat", "raw"],
        Option("--render", rich_help_panel=PROMPT, help="As you ask: chat template, or raw text."),
    ] = "chat"
    special_tokens: SpecialTokens = False
    num_speculative_tokens: Annotated[
        int, Option("-k", "--num-speculative-tokens", metavar="K", rich_help_panel=SPECULATION)
    ] = 5
    max_new_tokens: MeasuredTokens = 64
    reference_steps: Annotated[
        int,
        Option("--reference-steps", min=1, metavar="N", rich_help_panel=RUNNING, help="In float64: slow ones."),
    ] = 6
    json: Json = None
    quiet: Annotated[bool, quiet_option("What was found alone: no progress, no notes")] = False
