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
    """Measure a target by itself: prefill (pp), decoding (tg), and verify passes of several widths.

    v(T) is what a pass over T rows costs, in passes over one: with K = T - 1 drafts,
    speculation pays where a step gives more tokens than that. Without TARGET: the demo's.

    [bold]Examples[/bold]

      a checkpoint          [cyan]peagle bench DIR[/cyan]
      decoding alone        [cyan]peagle bench DIR -p 0 -t 1 -n 64,256 --context 1024[/cyan]
      many requests         [cyan]peagle bench DIR -p 0 -t 1 --slots 1,2,4,8,16,32[/cyan]
      what drafting costs
        [cyan]peagle bench DIR --drafter DIR -p 0 -t 1 --slots 1,4,16 -k 1,3[/cyan]
      for a report          [cyan]peagle bench DIR --markdown - --json OUT[/cyan]
    """

    target: Annotated[
        str | None,
        Argument(metavar="TARGET", show_default=False, help="GPT-OSS checkpoint. Default: the demo's."),
    ] = None
    prompt_lengths: Annotated[
        str, Option("-p", "--prompt-lengths", metavar="N,N", help="Tokens of the prompts (pp); 0: no such test.")
    ] = "128,512"
    new_tokens: Annotated[
        str, Option("-n", "--new-tokens", metavar="N,N", help="Tokens to decode (tg); 0: no such test.")
    ] = "64"
    widths: Annotated[
        str, Option("-t", "--widths", metavar="T,T", help="Rows of a verify pass; 1 is always measured, too.")
    ] = "1,2,4,8"
    context: Annotated[
        int, Option("--context", metavar="N", help="Tokens in the caches when decoding and verifying start.")
    ] = 128
    slots: Annotated[
        str | None,
        Option(
            "--slots",
            metavar="N,N",
            help="Requests decoded at once. Several: decoding at each, and at 1; all else at 1. Default: 1.",
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
            help="Decoding also with K drafts a step, all refused: what such a step costs over a plain one.",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        Option(
            "--drafter", metavar="DIR|ngram", rich_help_panel=MODEL, help="Its checkpoint, for -k. Default: the demo's."
        ),
    ] = None
    drafter_window: DrafterWindow = "auto"
    prefill: PrefillOptions = PrefillOptions()
    repeats: Annotated[int, Option("--repeats", metavar="R", help="Measurements of each test.")] = 5
    loading: LoadOptions = LoadOptions()
    devices: MeshOptions = MeshOptions()
    download: Download = False
    json: Json = None
    markdown: Annotated[
        str | None,
        Option("--markdown", metavar="FILE|-", rich_help_panel=OUTPUT, help="The table, to be put into a text."),
    ] = None
