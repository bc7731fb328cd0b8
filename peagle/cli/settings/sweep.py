"""The options of `sweep`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from peagle.cli.settings.shared import (
    MODEL,
    OUTPUT,
    PROMPT,
    RUNNING,
    SAMPLING,
    SPECULATION,
    AuxLayerIds,
    MeasuredTokens,
    ModelOptions,
    NewFolder,
    SpecialTokens,
    Strict,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """Measure acceptance length and speed-up over K.

    Every prompt is decoded by every variant in turn, plain decoding included. The folder holds the plan, every decoded
    request and, at the end, a report with confidence intervals and charts.

    [bold]Examples[/bold]

      the demo models         [cyan]peagle sweep --out RUN[/cyan]
      your own checkpoints
        [cyan]peagle sweep --out RUN --target DIR --drafter DIR --prompts mt.jsonl[/cyan]
      two drafters
        [cyan]peagle sweep --out RUN -k 1-7,auto --drafter DIR,ngram --repeats 5[/cyan]
      many requests at once   [cyan]peagle sweep --out RUN --concurrency 1,2,4,8,16[/cyan]
      write the table that -k auto reads
        [cyan]peagle sweep --out RUN --resume --write-widths DRAFTER[/cyan]
      resume                  [cyan]peagle sweep --out RUN --resume[/cyan]
      only print the plan
        [cyan]peagle sweep --out RUN -k 0-8 --render both --temperature 0,1 --dry-run[/cyan]
    """

    out: NewFolder
    num_speculative_tokens: Annotated[
        str,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,K",
            rich_help_panel=SPECULATION,
            help="Draft tokens per step: numbers, ranges, auto. Plain decoding (0) is always included.",
        ),
    ] = "1-3,5,7,auto"
    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            metavar="DIR,DIR|ngram",
            rich_help_panel=MODEL,
            help="Drafters, separated by commas; each is run with each K. Default: demo.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    draft_vocab: Annotated[
        str,
        Option(
            "--draft-vocab",
            metavar="N,N|full",
            rich_help_panel=SPECULATION,
            help="Draft vocabularies: sizes, or files that list token ids; each is run with each K.",
        ),
    ] = "full"
    drafter_window: Annotated[
        str,
        Option(
            "--drafter-window",
            metavar="N,N|auto|off",
            rich_help_panel=SPECULATION,
            help="Windows of the drafter's attention, as for speculate; each is run with each K.",
        ),
    ] = "auto"
    model: ModelOptions = ModelOptions()
    prompts: Annotated[
        tuple[Path, ...],
        Option(
            "--prompts",
            "--prompt-file",
            metavar="FILE",
            rich_help_panel=PROMPT,
            help="Prompt file, in any layout that speculate reads. Repeatable. Default: the demo's held-out prompts.",
        ),
    ] = ()
    num_prompts: Annotated[
        int | None,
        Option(
            "--num-prompts",
            min=0,
            metavar="N",
            rich_help_panel=PROMPT,
            help="Prompts to use from each file; 0: all. Default: all; of the demo's prompts, 60.",
        ),
    ] = None
    strict: Strict = False
    turns: Annotated[
        int | None,
        Option(
            "--turns", min=1, metavar="N", rich_help_panel=PROMPT, help="Most turns of a conversation. Default: all."
        ),
    ] = None
    render: Annotated[
        Literal["chat", "raw", "both"],
        Option("--render", rich_help_panel=PROMPT, help="Apply the chat template, use the raw text, or both."),
    ] = "chat"
    special_tokens: SpecialTokens = False
    max_prompt_tokens: Annotated[
        int | None,
        Option("--max-prompt-tokens", min=1, metavar="N", rich_help_panel=PROMPT, help="Longest prompt to use."),
    ] = None
    too_long: Annotated[
        Literal["skip", "error"],
        Option("--too-long", rich_help_panel=PROMPT, help="skip longer prompts and count them, or end with an error."),
    ] = "skip"
    buckets: Annotated[
        str,
        Option(
            "--buckets",
            metavar="N,N",
            rich_help_panel=OUTPUT,
            help="Prompt lengths at which the report's buckets begin.",
        ),
    ] = "128,512,2048"
    temperature: Annotated[
        str,
        Option(
            "--temperature",
            metavar="T,T",
            rich_help_panel=SAMPLING,
            help="Sampling temperatures, separated by commas; 0 is greedy.",
        ),
    ] = "0"
    seed: Annotated[
        int,
        Option(
            "--seed",
            metavar="S",
            rich_help_panel=SAMPLING,
            help="Seed of the first repeat; the next uses S + 1, and so on.",
        ),
    ] = 0
    repeats: Annotated[
        int, Option("--repeats", min=1, metavar="R", rich_help_panel=RUNNING, help="Repetitions of every request.")
    ] = 3
    in_a_row: Annotated[
        int,
        Option(
            "--in-a-row",
            min=1,
            metavar="N",
            rich_help_panel=RUNNING,
            help="Requests that a variant decodes before the next variant's turn. A program is slower just after "
            "another ran: 1 resembles single requests, 12 a stream of them.",
        ),
    ] = 1
    concurrency: Annotated[
        str | None,
        Option(
            "--concurrency",
            metavar="N,N",
            rich_help_panel=RUNNING,
            help="Also decode the requests N at once, plainly and with each K, and measure total throughput.",
        ),
    ] = None
    max_new_tokens: MeasuredTokens = 256
    resume: Annotated[
        bool, Option("--resume", rich_help_panel=RUNNING, help="Resume the run in --out by its own plan.")
    ] = False
    dry_run: Annotated[
        bool,
        Option("--dry-run", rich_help_panel=RUNNING, help="Check options and files, print what would run, and stop."),
    ] = False
    continue_on_error: Annotated[
        bool,
        Option("--continue-on-error", rich_help_panel=RUNNING, help="Continue without a K or drafter that fails."),
    ] = False
    write_widths: Annotated[
        Path | None,
        Option(
            "--write-widths",
            metavar="DIR|FILE",
            rich_help_panel=OUTPUT,
            help="Write the best K by number of active requests, for -k auto: to speculation.json in a drafter's "
            "directory, or to a file. Needs --concurrency 1,...",
        ),
    ] = None
    quiet: Annotated[bool, quiet_option("Print no progress and no table")] = False
