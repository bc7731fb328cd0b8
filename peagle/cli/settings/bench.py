"""The options of `bench`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from peagle.cli.settings.shared import (
    MODEL,
    OUTPUT,
    RUNNING,
    SPECULATION,
    Batch,
    Download,
    DrafterWindow,
    Json,
    KVMemory,
    LoadOptions,
    MeshOptions,
    PrefillOptions,
)


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Time a target's prefill, decoding and verify passes.

    v(T) is the time of a verify pass over T rows divided by that over one row.
    Drafting K = T - 1 tokens can pay only if a step emits more than v(T) tokens.

    [bold]Examples[/bold]

      the demo target       [cyan]peagle bench[/cyan]
      a checkpoint          [cyan]peagle bench DIR[/cyan]
      decoding only         [cyan]peagle bench DIR -p 0 -t 1 -n 64,256 --context 1024[/cyan]
      batch sizes           [cyan]peagle bench DIR -p 0 -t 1 --slots 1,2,4,8,16,32[/cyan]
      cost of drafting
        [cyan]peagle bench DIR --drafter DIR -p 0 -t 1 --slots 1,4,16 -k 1,3[/cyan]
      for a report          [cyan]peagle bench DIR --markdown - --json OUT.json[/cyan]
    """

    target: Annotated[
        str | None,
        Argument(metavar="TARGET", show_default=False, help="GPT-OSS checkpoint. Default: the demo target."),
    ] = None
    prompt_lengths: Annotated[
        str,
        Option(
            "-p",
            "--prompt-lengths",
            metavar="N,N",
            rich_help_panel=RUNNING,
            help="Prompt lengths to prefill (pp); 0: none.",
        ),
    ] = "128,512"
    new_tokens: Annotated[
        str,
        Option("-n", "--new-tokens", metavar="N,N", rich_help_panel=RUNNING, help="Tokens to decode (tg); 0: none."),
    ] = "64"
    widths: Annotated[
        str,
        Option(
            "-t",
            "--widths",
            metavar="T,T",
            rich_help_panel=RUNNING,
            help="Rows of the verify passes; 1 is always included.",
        ),
    ] = "1,2,4,8"
    context: Annotated[
        int,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=RUNNING,
            help="Tokens in the KV cache before decoding and verifying.",
        ),
    ] = 128
    slots: Annotated[
        str | None,
        Option(
            "--slots",
            metavar="N,N",
            rich_help_panel=RUNNING,
            help="Requests decoded at once. With several numbers, decoding runs at each and at 1, all else at 1. "
            "Default: 1.",
        ),
    ] = None
    batch: Batch = None
    kv_memory: KVMemory = "auto"
    num_speculative_tokens: Annotated[
        str | None,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,K",
            rich_help_panel=SPECULATION,
            help="Also time decoding with K drafts per step, all rejected: the cost of a drafted step.",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            metavar="DIR|ngram",
            rich_help_panel=MODEL,
            help="Drafter for -k: a checkpoint, or ngram. Default: the demo drafter.",
        ),
    ] = None
    drafter_window: DrafterWindow = "auto"
    prefill: PrefillOptions = PrefillOptions()
    repeats: Annotated[
        int, Option("--repeats", metavar="R", rich_help_panel=RUNNING, help="Measurements per test.")
    ] = 5
    loading: LoadOptions = LoadOptions()
    devices: MeshOptions = MeshOptions()
    download: Download = False
    json: Json = None
    markdown: Annotated[
        str | None,
        Option(
            "--markdown",
            metavar="FILE|-",
            rich_help_panel=OUTPUT,
            help="Write the table in Markdown; -: to standard output.",
        ),
    ] = None
