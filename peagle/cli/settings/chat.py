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
    """Chat: answer one line after another, each with what was said before; streaming, with speculative decoding.

    /reset forgets the conversation, /exit or the end of input ends it. Ctrl-C stops an answer, at the prompt the chat.

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
            help="Positions for the whole conversation. Default: 4096, or all that the model has.",
        ),
    ] = None
    baseline: Annotated[
        bool,
        Option("--baseline", rich_help_panel=SPECULATION, help="Decode each answer plainly, too: the speed-up."),
    ] = False
    sampling: SamplingOptions = SamplingOptions()
    max_new_tokens: MaxNewTokens = 1024
    stop: Annotated[
        tuple[str, ...],
        Option("--stop", metavar="TEXT", rich_help_panel=RUNNING, help="End an answer before this text; repeatable."),
    ] = ()
    prefix_cache: PrefixCache = "auto"
    retain_full_kv: RetainFullKV = False
    quiet: Annotated[bool, quiet_option("The answers alone: no progress, no line under an answer")] = False
