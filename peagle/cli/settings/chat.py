"""The options of `chat`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from peagle.cli.settings.shared import (
    ENGINE,
    SAMPLING,
    SPECULATION,
    DraftOptions,
    KeptPrefixes,
    KVMemory,
    MaxNewTokens,
    MeshOptions,
    ModelOptions,
    ProcessOptions,
    RetainFullKV,
    SamplingOptions,
    TemplateOptions,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Chat in the terminal with speculative decoding.

    Each line of input is a message. /reset starts a new conversation; /exit or
    the end of input quits. Ctrl-C stops a response, and at the prompt it quits.

    [bold]Examples[/bold]

      your checkpoints    [cyan]peagle chat --target DIR --drafter DIR[/cyan]
      without a drafter   [cyan]peagle chat --target DIR --drafter ngram[/cyan]
      from a pipe         [cyan]printf 'Hi\\nAnd you?\\n' | peagle chat --target DIR[/cyan]
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
            rich_help_panel=ENGINE,
            help="Context length of the conversation, in tokens. Default: the model's limit, or what the memory holds "
            "if that is less.",
        ),
    ] = None
    baseline: Annotated[
        bool,
        Option(
            "--baseline", rich_help_panel=SPECULATION, help="Also decode each response plainly; report the speed-up."
        ),
    ] = False
    sampling: SamplingOptions = SamplingOptions()
    max_new_tokens: MaxNewTokens = 1024
    stop: Annotated[
        tuple[str, ...],
        Option(
            "--stop",
            metavar="TEXT",
            rich_help_panel=SAMPLING,
            help="Stop string: a response ends before it; repeatable.",
        ),
    ] = ()
    kv_memory: KVMemory = "auto"
    prefix_cache: KeptPrefixes = "on"
    retain_full_kv: RetainFullKV = False
    quiet: Annotated[bool, quiet_option("Print only the responses")] = False
