"""The options of `data`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from peagle.cli.settings.shared import (
    OUTPUT,
    PROMPT,
    RUNNING,
    Batch,
    ModelOptions,
    OwnFolder,
    RenderingOptions,
    SamplingOptions,
    Slots,
    Strict,
    Taps,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Generate training data: the target answers prompts.

    The folder consists of shards. The same command resumes after the last complete shard.

    [bold]Examples[/bold]

      greedy answers         [cyan]peagle data --prompt-file IN.jsonl --out DIR[/cyan]
      your own target
        [cyan]peagle data --target DIR --prompt-file IN.jsonl --out DIR -n 512[/cyan]
      with hidden states and logits
        [cyan]peagle data --prompt-file IN.jsonl --out DIR --hidden --top 32[/cyan]
      long prompts
        [cyan]peagle data --prompt-file IN.jsonl --out DIR --context 8192[/cyan]
    """

    prompt_file: Annotated[
        tuple[Path, ...],
        Option(
            "--prompt-file",
            "--prompts",
            metavar="FILE.jsonl",
            rich_help_panel=PROMPT,
            help="Prompts as JSON lines. Repeatable.",
        ),
    ]
    out: OwnFolder
    num_prompts: Annotated[
        int | None, Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="Most prompts to use.")
    ] = None
    strict: Strict = False
    rendering: RenderingOptions = RenderingOptions()
    model: ModelOptions = ModelOptions()
    max_new_tokens: Annotated[
        int,
        Option(
            "-n", "--max-new-tokens", metavar="N", rich_help_panel=RUNNING, help="Most tokens to generate per prompt."
        ),
    ] = 256
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=RUNNING,
            help="Most tokens of prompt and answer together; longer prompts are skipped.",
        ),
    ] = 512
    slots: Slots = None
    batch: Batch = None
    shard_prompts: Annotated[
        int, Option("--shard-prompts", metavar="N", rich_help_panel=OUTPUT, help="Prompts per shard.")
    ] = 512
    hidden: Annotated[
        bool, Option("--hidden", rich_help_panel=OUTPUT, help="Also store aux_hidden of every token (large).")
    ] = False
    top: Annotated[
        int,
        Option(
            "--top",
            metavar="N",
            rich_help_panel=OUTPUT,
            help="Store the target's N most likely next tokens at every position.",
        ),
    ] = 0
    keep_prompt: Annotated[
        int | None,
        Option(
            "--keep-prompt",
            min=0,
            metavar="N",
            rich_help_panel=OUTPUT,
            help="Store only the last N tokens of each prompt; the target still reads all of it. Enough for a drafter "
            "whose window is no larger.",
        ),
    ] = None
    taps: Taps = None
    sampling: SamplingOptions = SamplingOptions()
    quiet: Annotated[bool, quiet_option("Print no progress and no summary")] = False
