"""The options of `bench`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from peagle.cli.settings.shared import (
    MODEL,
    OUTPUT,
    SPECULATION,
    Batch,
    Download,
    DrafterWindow,
    Json,
    LoadOptions,
    MeshOptions,
    PrefillOptions,
)


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Measure prefill, decoding and the cost of verifying.

    v(T) is the time of a pass over T rows over the time of a pass over one row. Speculation with K = T - 1 drafts pays
    if a step yields more tokens than that. Without TARGET, the demo target is measured.

    [bold]Examples[/bold]

      a checkpoint          [cyan]peagle bench DIR[/cyan]
      only decoding         [cyan]peagle bench DIR -p 0 -t 1 -n 64,256 --context 1024[/cyan]
      many requests         [cyan]peagle bench DIR -p 0 -t 1 --slots 1,2,4,8,16,32[/cyan]
      the cost of drafting
        [cyan]peagle bench DIR --drafter DIR -p 0 -t 1 --slots 1,4,16 -k 1,3[/cyan]
      for a report          [cyan]peagle bench DIR --markdown - --json OUT[/cyan]
    """

    target: Annotated[
        str | None,
        Argument(metavar="TARGET", show_default=False, help="GPT-OSS checkpoint. Default: demo."),
    ] = None
    prompt_lengths: Annotated[
        str, Option("-p", "--prompt-lengths", metavar="N,N", help="Prompt lengths to prefill (pp); 0 skips this test.")
    ] = "128,512"
    new_tokens: Annotated[
        str, Option("-n", "--new-tokens", metavar="N,N", help="Numbers of tokens to decode (tg); 0 skips this test.")
    ] = "64"
    widths: Annotated[
        str, Option("-t", "--widths", metavar="T,T", help="Rows of a verify pass; 1 is always measured.")
    ] = "1,2,4,8"
    context: Annotated[
        int, Option("--context", metavar="N", help="Tokens in the cache before decoding and verifying.")
    ] = 128
    slots: Annotated[
        str | None,
        Option(
            "--slots",
            metavar="N,N",
            help="Numbers of requests decoded at once; prefill and verifying are measured with 1. Default: 1.",
        ),
    ] = None
    batch: Batch = None
    num_speculative_tokens: Annotated[
        str | None,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,K",
            rich_help_panel=SPECULATION,
            help="Also decode with K drafts per step, all rejected: the cost of a step over a plain one.",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        Option("--drafter", metavar="DIR|ngram", rich_help_panel=MODEL, help="Drafter for -k. Default: demo."),
    ] = None
    drafter_window: DrafterWindow = "auto"
    prefill: PrefillOptions = PrefillOptions()
    repeats: Annotated[int, Option("--repeats", metavar="R", help="Repetitions of each test.")] = 5
    loading: LoadOptions = LoadOptions()
    devices: MeshOptions = MeshOptions()
    download: Download = False
    json: Json = None
    markdown: Annotated[
        str | None,
        Option("--markdown", metavar="FILE|-", rich_help_panel=OUTPUT, help="Write the table as Markdown."),
    ] = None
