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
    """Measure acceptance and speed over K: every prompt decoded in every way, in turns, plain decoding among them.

    The folder holds the plan, every decoded request, and at the end figures with intervals, a page and pictures.

    [bold]Examples[/bold]

      the demo pair           [cyan]peagle sweep --out RUN[/cyan]
      your own
        [cyan]peagle sweep --out RUN --target DIR --drafter DIR --prompts mt.jsonl[/cyan]
      two drafters
        [cyan]peagle sweep --out RUN -k 1-7,auto --drafter DIR,ngram --repeats 5[/cyan]
      many at once            [cyan]peagle sweep --out RUN --concurrency 1,2,4,8,16[/cyan]
      and its table for auto
        [cyan]peagle sweep --out RUN --resume --write-widths DRAFTER[/cyan]
      cut off? go on          [cyan]peagle sweep --out RUN --resume[/cyan]
      only say what it does
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
            help="Numbers of drafted tokens, ranges, or auto. Plain decoding (0) is always among them.",
        ),
    ] = "1-3,5,7,auto"
    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            metavar="DIR,DIR|ngram",
            rich_help_panel=MODEL,
            help="Checkpoints, or ngram, with commas between: each K with each. Default: the demo's.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    draft_vocab: Annotated[
        str,
        Option(
            "--draft-vocab",
            metavar="N,N|full",
            rich_help_panel=SPECULATION,
            help="Numbers of tokens the drafter may propose, or files that list them: each K with each.",
        ),
    ] = "full"
    drafter_window: Annotated[
        str,
        Option(
            "--drafter-window",
            metavar="N,N|auto|off",
            rich_help_panel=SPECULATION,
            help="Positions that the drafter's attention sees, as of speculate: each K with each.",
        ),
    ] = "auto"
    model: ModelOptions = ModelOptions()
    prompts: Annotated[
        tuple[Path, ...],
        Option(
            "--prompts",
            metavar="FILE",
            rich_help_panel=PROMPT,
            help="Repeatable; layouts as of speculate --prompt-file. Default: the demo's held-out prompts.",
        ),
    ] = ()
    num_prompts: Annotated[
        int | None,
        Option(
            "--num-prompts",
            min=0,
            metavar="N",
            rich_help_panel=PROMPT,
            help="The first of each file; 0: all. Default: 60 of the demo's, all of a file.",
        ),
    ] = None
    strict: Strict = False
    turns: Annotated[
        int | None,
        Option("--turns", min=1, metavar="N", rich_help_panel=PROMPT, help="Of a conversation. Default: all."),
    ] = None
    render: Annotated[
        Literal["chat", "raw", "both"],
        Option("--render", rich_help_panel=PROMPT, help="With the chat template, the raw text, or both."),
    ] = "chat"
    special_tokens: SpecialTokens = False
    max_prompt_tokens: Annotated[
        int | None,
        Option("--max-prompt-tokens", min=1, metavar="N", rich_help_panel=PROMPT, help="Of a prompt that is used."),
    ] = None
    too_long: Annotated[
        Literal["skip", "error"],
        Option("--too-long", rich_help_panel=PROMPT, help="Longer prompts: left out and counted, or refused."),
    ] = "skip"
    buckets: Annotated[
        str,
        Option("--buckets", metavar="N,N", rich_help_panel=OUTPUT, help="Prompt tokens at which a bucket begins."),
    ] = "128,512,2048"
    temperature: Annotated[
        str, Option("--temperature", metavar="T,T", rich_help_panel=SAMPLING, help="Each is a setting; 0: greedy.")
    ] = "0"
    seed: Annotated[
        int,
        Option(
            "--seed", metavar="S", rich_help_panel=SAMPLING, help="Of the first repeat; the next has S + 1, and so on."
        ),
    ] = 0
    repeats: Annotated[
        int, Option("--repeats", min=1, metavar="R", rich_help_panel=RUNNING, help="Of every request.")
    ] = 3
    in_a_row: Annotated[
        int,
        Option(
            "--in-a-row",
            min=1,
            metavar="N",
            rich_help_panel=RUNNING,
            help="Requests of an arm before the next one's turn. A program that others ran before begins slower: with "
            "answers of milliseconds 1 is like requests that come alone, 12 like a stream of them.",
        ),
    ] = 1
    concurrency: Annotated[
        str | None,
        Option(
            "--concurrency",
            metavar="N,N",
            rich_help_panel=RUNNING,
            help="Also decode all requests with so many at once, plainly and by each K: tokens a second in all.",
        ),
    ] = None
    max_new_tokens: MeasuredTokens = 256
    resume: Annotated[
        bool, Option("--resume", rich_help_panel=RUNNING, help="Go on with the run in --out, by its own plan.")
    ] = False
    dry_run: Annotated[
        bool,
        Option("--dry-run", rich_help_panel=RUNNING, help="Check options and files, say what would run, stop."),
    ] = False
    continue_on_error: Annotated[
        bool,
        Option("--continue-on-error", rich_help_panel=RUNNING, help="Go on without a K or drafter that fails."),
    ] = False
    write_widths: Annotated[
        Path | None,
        Option(
            "--write-widths",
            metavar="DIR|FILE",
            rich_help_panel=OUTPUT,
            help="Write the best K by number of active requests, which auto reads beside a drafter: into its directory "
            "as speculation.json, or as a file. Needs --concurrency 1,...",
        ),
    ] = None
    quiet: Annotated[bool, quiet_option("No progress, no table: all is in --out")] = False
