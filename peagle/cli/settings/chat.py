"""The options of `chat`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from peagle.cli.settings.shared import (
    MODEL,
    RUNNING,
    SPECULATION,
    DraftOptions,
    MaxNewTokens,
    MeshOptions,
    ModelOptions,
    PrefixCache,
    ProcessOptions,
    RetainFullKV,
    SamplingOptions,
    TemplateOptions,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Chat in the terminal, with speculative decoding.

    /reset clears the conversation; /exit or the end of input ends it. Ctrl-C stops an answer or, at the prompt, the
    chat.

    [bold]Examples[/bold]

      your own checkpoints   [cyan]peagle chat --target DIR --drafter DIR[/cyan]
      from a pipe
        [cyan]printf 'Hi\\nAnd you?\\n' | peagle chat --target DIR --drafter ngram[/cyan]
    """

    template: TemplateOptions = TemplateOptions()
    model: ModelOptions = ModelOptions()
    devices: MeshOptions = MeshOptions()
    processes: ProcessOptions = ProcessOptions()
    drafting: DraftOptions = DraftOptions()
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=MODEL,
            help="Most positions of the conversation. Default: 4096, or the model's own limit.",
        ),
    ] = None
    baseline: Annotated[
        bool,
        Option(
            "--baseline", rich_help_panel=SPECULATION, help="Also decode each answer plainly, and print the speed-up."
        ),
    ] = False
    sampling: SamplingOptions = SamplingOptions()
    max_new_tokens: MaxNewTokens = 1024
    stop: Annotated[
        tuple[str, ...],
        Option("--stop", metavar="TEXT", rich_help_panel=RUNNING, help="Stop before this text. Repeatable."),
    ] = ()
    prefix_cache: PrefixCache = "auto"
    retain_full_kv: RetainFullKV = False
    quiet: Annotated[bool, quiet_option("Print only the answers: no progress, no summary lines")] = False
