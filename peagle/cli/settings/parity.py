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
    prompt_file_option,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class ParitySettings:
    """Check a pair against references; explain low acceptance.

    Compares the target with transformers layer by layer (if torch is installed),
    the drafter with a float64 reference, and the engine with both. Then reads the
    drafter in other ways: aux layers off by one, another mask token, norm,
    vocabulary map, the target's embedding, raw prompts. If a reading is accepted
    more often, it is a likely cause, and the report says what to change in the
    checkpoint. Exit code 1 if there is a difference or a likely cause.

    [bold]Examples[/bold]

      the demo models          [cyan]peagle parity[/cyan]
      low acceptance, why?
        [cyan]peagle parity --target DIR --drafter DIR --prompts IN.jsonl[/cyan]
    """

    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            metavar="DIR",
            rich_help_panel=MODEL,
            help="P-EAGLE or EAGLE-3 checkpoint. Default: the demo drafter.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    drafter_window: DrafterWindow = "auto"
    model: ModelOptions = ModelOptions()
    prompts: Annotated[
        Path | None,
        prompt_file_option(
            "Prompt file, in a format of peagle speculate; required for any other target than the demo's. Default: "
            "the demo's held-out prompts."
        ),
    ] = None
    num_prompts: Annotated[
        int, Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="Use the first N prompts.")
    ] = 10
    strict: Strict = False
    render: Annotated[
        Literal["chat", "raw"],
        Option(
            "--render",
            metavar="HOW",
            rich_help_panel=PROMPT,
            help="As you prompt the model. chat: with its chat template; raw: as plain text.",
        ),
    ] = "chat"
    special_tokens: SpecialTokens = False
    num_speculative_tokens: Annotated[
        int,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K",
            rich_help_panel=SPECULATION,
            help="Tokens drafted per step (K).",
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
    quiet: Annotated[bool, quiet_option("Hide progress and notes")] = False
