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
    SpecialTokens,
    Strict,
    prompt_file_option,
    quiet_option,
)


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """Measure acceptance length and speed over K.

    Decodes every prompt with every K and plainly, in turns. Writes the plan, all
    decoded requests, and a report: figures with confidence intervals, an HTML
    page and plots.

    [bold]Examples[/bold]

      the demo models      [cyan]peagle sweep --out RUN[/cyan]
      resume             [cyan]peagle sweep --out RUN --resume[/cyan]
      batch sizes        [cyan]peagle sweep --out RUN --concurrency 1,2,4,8,16[/cyan]
      best K by batch size, for -k auto
        [cyan]peagle sweep --out RUN --resume --write-widths DRAFTER[/cyan]
      your checkpoints
        [cyan]peagle sweep --out RUN --target DIR --drafter DIR --prompts IN.jsonl[/cyan]
      two drafters
        [cyan]peagle sweep --out RUN -k 1-7,auto --drafter demo,ngram --repeats 5[/cyan]
      print the plan
        [cyan]peagle sweep --out RUN -k 0-8 --render both --temperature 0,1 --dry-run[/cyan]
    """

    out: Annotated[
        str,
        Option(
            "--out", metavar="DIR", rich_help_panel=OUTPUT, help="Output directory: a new one, or a run to --resume."
        ),
    ]
    num_speculative_tokens: Annotated[
        str,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,K",
            rich_help_panel=SPECULATION,
            help="Values of K, ranges of them, and auto. Plain decoding (0) is always included.",
        ),
    ] = "1-3,5,7,auto"
    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            metavar="DIR,DIR|ngram",
            rich_help_panel=MODEL,
            help="Drafters, separated by commas; every K runs with each. Default: the demo drafter.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    draft_vocab: Annotated[
        str,
        Option(
            "--draft-vocab",
            metavar="N,N|full",
            rich_help_panel=SPECULATION,
            help="Draft vocabularies, as of speculate --draft-vocab, or full; every K runs with each.",
        ),
    ] = "full"
    drafter_window: Annotated[
        str,
        Option(
            "--drafter-window",
            metavar="N,N|auto|off",
            rich_help_panel=SPECULATION,
            help="Drafter windows, as of speculate --drafter-window; every K runs with each.",
        ),
    ] = "auto"
    model: ModelOptions = ModelOptions()
    prompts: Annotated[
        tuple[Path, ...],
        prompt_file_option(
            "Prompt file, in a format of peagle speculate; repeatable. Default: the demo's held-out prompts."
        ),
    ] = ()
    num_prompts: Annotated[
        int | None,
        Option(
            "--num-prompts",
            min=0,
            metavar="N",
            rich_help_panel=PROMPT,
            help="Use the first N prompts of each file; 0: all. Default: all of a file, 60 of the demo's.",
        ),
    ] = None
    strict: Strict = False
    turns: Annotated[
        int | None,
        Option(
            "--turns",
            min=1,
            metavar="N",
            rich_help_panel=PROMPT,
            help="Use the first N turns of a conversation. Default: all.",
        ),
    ] = None
    render: Annotated[
        Literal["chat", "raw", "both"],
        Option(
            "--render",
            metavar="HOW",
            rich_help_panel=PROMPT,
            help="chat: apply the chat template; raw: continue the prompt as plain text; or both.",
        ),
    ] = "chat"
    special_tokens: SpecialTokens = False
    max_prompt_tokens: Annotated[
        int | None,
        Option(
            "--max-prompt-tokens",
            min=1,
            metavar="N",
            rich_help_panel=PROMPT,
            help="Longest prompt, in tokens. Default: the model's limit.",
        ),
    ] = None
    too_long: Annotated[
        Literal["skip", "error"],
        Option(
            "--too-long",
            metavar="HOW",
            rich_help_panel=PROMPT,
            help="Longer prompts. skip: leave them out and count them; error: refuse to run.",
        ),
    ] = "skip"
    buckets: Annotated[
        str,
        Option(
            "--buckets",
            metavar="N,N",
            rich_help_panel=OUTPUT,
            help="Prompt lengths at which the report begins a new bucket.",
        ),
    ] = "128,512,2048"
    temperature: Annotated[
        str,
        Option(
            "--temperature",
            metavar="T,T",
            rich_help_panel=SAMPLING,
            help="Sampling temperatures, each measured on its own; 0: greedy.",
        ),
    ] = "0"
    seed: Annotated[
        int,
        Option(
            "--seed",
            metavar="S",
            rich_help_panel=SAMPLING,
            help="Random seed of the first repeat; the next ones use S + 1, S + 2, ...",
        ),
    ] = 0
    repeats: Annotated[
        int, Option("--repeats", min=1, metavar="R", rich_help_panel=RUNNING, help="Repeats of every request.")
    ] = 3
    in_a_row: Annotated[
        int,
        Option(
            "--in-a-row",
            min=1,
            metavar="N",
            rich_help_panel=RUNNING,
            help="Requests per variant (K, drafter, ...) before the next one's turn. A program starts slower after "
            "another one: for responses of milliseconds, 1 measures single requests and 12 a stream.",
        ),
    ] = 1
    concurrency: Annotated[
        str | None,
        Option(
            "--concurrency",
            metavar="N,N",
            rich_help_panel=RUNNING,
            help="Also decode all requests N at a time, plainly and with each K, and report the total throughput.",
        ),
    ] = None
    max_new_tokens: MeasuredTokens = 256
    resume: Annotated[
        bool, Option("--resume", rich_help_panel=RUNNING, help="Resume the run in --out by its stored plan.")
    ] = False
    dry_run: Annotated[
        bool,
        Option("--dry-run", rich_help_panel=RUNNING, help="Check options and files, print the plan, and exit."),
    ] = False
    continue_on_error: Annotated[
        bool,
        Option("--continue-on-error", rich_help_panel=RUNNING, help="Skip a K or drafter that fails; run the others."),
    ] = False
    write_widths: Annotated[
        Path | None,
        Option(
            "--write-widths",
            metavar="DIR|FILE",
            rich_help_panel=OUTPUT,
            help="Write the best K by number of active requests, for -k auto: into a drafter's directory, as "
            "speculation.json, or to a file. Needs --concurrency with 1 and other numbers.",
        ),
    ] = None
    quiet: Annotated[bool, quiet_option("Hide progress and table; the results are in --out")] = False
