"""The options of `data`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from peagle.cli.settings.shared import (
    ENGINE,
    OUTPUT,
    PROMPT,
    SAMPLING,
    Batch,
    ModelOptions,
    OwnFolder,
    RenderingOptions,
    SamplingOptions,
    Strict,
    Taps,
    prompt_file_option,
    quiet_option,
    slots_option,
)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Generate training data: a target's responses to prompts.

    Writes the responses in shards. The same command resumes with the shards that
    are missing.

    [bold]Examples[/bold]

      the demo target   [cyan]peagle data --prompt-file IN.jsonl --out DATA[/cyan]
      your target
        [cyan]peagle data --target DIR --prompt-file IN.jsonl --out DATA -n 512[/cyan]
      with aux_hidden and logits: training then does not run the target
        [cyan]peagle data --prompt-file IN.jsonl --out DATA --hidden --top 32[/cyan]
      long prompts
        [cyan]peagle data --target DIR --prompt-file IN.jsonl --out DATA --context 8192[/cyan]
    """

    prompt_file: Annotated[
        tuple[Path, ...],
        prompt_file_option("Prompt file, in a format of peagle speculate; repeatable."),
    ]
    out: OwnFolder
    num_prompts: Annotated[
        int | None,
        Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="Use the first N prompts."),
    ] = None
    strict: Strict = False
    rendering: RenderingOptions = RenderingOptions()
    model: ModelOptions = ModelOptions()
    max_new_tokens: Annotated[
        int,
        Option("-n", "--max-new-tokens", metavar="N", rich_help_panel=SAMPLING, help="Maximum tokens of a response."),
    ] = 256
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=ENGINE,
            help="Context length in tokens: prompt plus response; a prompt that leaves no room is skipped.",
        ),
    ] = 512
    slots: Annotated[int | None, slots_option(32)] = None
    batch: Batch = None
    shard_prompts: Annotated[
        int, Option("--shard-prompts", metavar="N", rich_help_panel=OUTPUT, help="Prompts per shard.")
    ] = 512
    hidden: Annotated[
        bool, Option("--hidden", rich_help_panel=OUTPUT, help="Also store the aux_hidden of every token (large).")
    ] = False
    top: Annotated[
        int,
        Option(
            "--top",
            metavar="N",
            rich_help_panel=OUTPUT,
            help="Also store the target's N largest logits after every token.",
        ),
    ] = 0
    keep_prompt: Annotated[
        int | None,
        Option(
            "--keep-prompt",
            min=0,
            metavar="N",
            rich_help_panel=OUTPUT,
            help="Store only the last N tokens of a prompt; the target still reads all of it. For drafters whose "
            "windows reach no further; needs --hidden and --top.",
        ),
    ] = None
    taps: Taps = None
    sampling: SamplingOptions = SamplingOptions()
    quiet: Annotated[bool, quiet_option("Hide progress and summary")] = False
