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
    """Have a target answer prompts, and keep what it said as training data for its drafter.

    The folder is made of shards, each whole or absent: the same command goes on where it was cut off.

    [bold]Examples[/bold]

      greedy answers         [cyan]peagle data --prompt-file IN.jsonl --out DIR[/cyan]
      of your own target
        [cyan]peagle data --target DIR --prompt-file IN.jsonl --out DIR -n 512[/cyan]
      with what it thought
        [cyan]peagle data --prompt-file IN.jsonl --out DIR --hidden --top 32[/cyan]
      long prompts
        [cyan]peagle data --prompt-file IN.jsonl --out DIR --context 8192[/cyan]
    """

    prompt_file: Annotated[
        tuple[Path, ...],
        Option("--prompt-file", metavar="FILE.jsonl", rich_help_panel=PROMPT, help="JSON lines; repeatable."),
    ]
    out: OwnFolder
    num_prompts: Annotated[
        int | None, Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="So many at most.")
    ] = None
    strict: Strict = False
    rendering: RenderingOptions = RenderingOptions()
    model: ModelOptions = ModelOptions()
    max_new_tokens: Annotated[
        int, Option("-n", "--max-new-tokens", metavar="N", rich_help_panel=RUNNING, help="Of an answer.")
    ] = 256
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=RUNNING,
            help="Prompt and answer together; a prompt that leaves no room is skipped. Default: what the model has.",
        ),
    ] = 512
    slots: Slots = None
    batch: Batch = None
    shard_prompts: Annotated[
        int, Option("--shard-prompts", metavar="N", rich_help_panel=OUTPUT, help="Prompts of a shard.")
    ] = 512
    hidden: Annotated[
        bool, Option("--hidden", rich_help_panel=OUTPUT, help="Keep the aux_hidden of every token, too (large).")
    ] = False
    top: Annotated[
        int,
        Option("--top", metavar="N", rich_help_panel=OUTPUT, help="Keep the target's N best after every token."),
    ] = 0
    keep_prompt: Annotated[
        int | None,
        Option(
            "--keep-prompt",
            min=0,
            metavar="N",
            rich_help_panel=OUTPUT,
            help="Of a prompt keep the last N tokens, with what the target computed of all: enough for a drafter whose "
            "windows reach no further.",
        ),
    ] = None
    taps: Taps = None
    sampling: SamplingOptions = SamplingOptions()
    quiet: Annotated[bool, quiet_option("No progress, no summary")] = False
