"""The commands that measure: `peagle sweep`, `peagle report` and `peagle parity`."""

import inspect
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.app import (
    MODEL,
    OUTPUT,
    PROMPT,
    RUNNING,
    SAMPLING,
    SPECULATION,
    AuxLayerIds,
    DrafterWindow,
    DtypeOption,
    Experts,
    ExpertsOption,
    Json,
    Kernels,
    KernelsOption,
    Quiet,
    SpecialTokens,
    Strict,
    Target,
    app,
    guarded,
)
from peagle.cli.settings import ParitySettings, SweepSettings
from peagle.ops.errors import InputError

SWEEP_HELP = """
Measure acceptance and speed over K: every prompt decoded in every way, in turns, plain decoding among them.

The folder holds the plan, every decoded request, and at the end figures with intervals, a page and pictures.

[bold]Examples[/bold]

  the demo pair           [cyan]peagle sweep --out RUN[/cyan]
  your own                [cyan]peagle sweep --out RUN --target DIR --drafter DIR --prompts mt.jsonl[/cyan]
  two drafters            [cyan]peagle sweep --out RUN -k 1-7,auto --drafter DIR,ngram --repeats 5[/cyan]
  many at once            [cyan]peagle sweep --out RUN --concurrency 1,2,4,8,16[/cyan]
  and its table for auto  [cyan]peagle sweep --out RUN --resume --write-widths DRAFTER[/cyan]
  cut off? go on          [cyan]peagle sweep --out RUN --resume[/cyan]
  only say what it does   [cyan]peagle sweep --out RUN -k 0-8 --render both --temperature 0,1 --dry-run[/cyan]
"""
REPORT_HELP = """
Render runs of peagle sweep: one HTML file that needs no network, and Markdown with pictures.

Of several runs each is compared with the first, request by request: is the difference real?

[bold]Examples[/bold]

  a run once more      [cyan]peagle report RUN[/cyan]
  before and after     [cyan]peagle report BEFORE AFTER --out DIR[/cyan]
"""

PARITY_HELP = """
Say whether a pair does what it should, and why its acceptance is what it is.

The target is compared layer by layer with transformers (where torch is installed), the drafter with a reference in
float64, the engine with both. Then the checkpoint is read in other ways (taps one layer off, another mask token,
norm, vocabulary map, the target's embedding, raw prompts): one that is accepted more often is the likely cause, and
what to change is said as the file names it. Exit code 1 where anything is.

[bold]Examples[/bold]

  the demo pair             [cyan]peagle parity[/cyan]
  "my acceptance is 1.4"    [cyan]peagle parity --target DIR --drafter DIR --prompts FILE[/cyan]
"""

# what may be given beside --resume: it does not change what is measured
FREE = ("out", "resume", "dry_run", "continue_on_error", "write_widths", "quiet")


class Render(StrEnum):
    chat = "chat"
    raw = "raw"
    both = "both"


class OneRender(StrEnum):
    chat = "chat"
    raw = "raw"


class TooLong(StrEnum):
    skip = "skip"
    error = "error"


@app.command(help=SWEEP_HELP)
def sweep(
    out: Annotated[str, typer.Option("--out", metavar="DIR", rich_help_panel=OUTPUT, help="New folder to write.")],
    num_speculative_tokens: Annotated[
        str,
        typer.Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,K",
            rich_help_panel=SPECULATION,
            help="Numbers of drafted tokens, ranges, or auto. Plain decoding (0) is always among them.",
        ),
    ] = "1-3,5,7,auto",
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            metavar="DIR,DIR|ngram",
            rich_help_panel=MODEL,
            help="Checkpoints, or ngram, with commas between: each K with each. Default: the demo's.",
        ),
    ] = None,
    aux_layer_ids: AuxLayerIds = None,
    draft_vocab: Annotated[
        str,
        typer.Option(
            "--draft-vocab",
            metavar="N,N|full",
            rich_help_panel=SPECULATION,
            help="Numbers of tokens the drafter may propose, or files that list them: each K with each.",
        ),
    ] = "full",
    drafter_window: Annotated[
        str,
        typer.Option(
            "--drafter-window",
            metavar="N,N|auto|off",
            rich_help_panel=SPECULATION,
            help="Positions that the drafter's attention sees, as of speculate: each K with each.",
        ),
    ] = "auto",
    target: Target = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            rich_help_panel=PROMPT,
            help="Repeatable; layouts as of speculate --prompt-file. Default: the demo's held-out prompts.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            min=0,
            metavar="N",
            rich_help_panel=PROMPT,
            help="The first of each file; 0: all. Default: 60 of the demo's, all of a file.",
        ),
    ] = None,
    strict: Strict = False,
    turns: Annotated[
        int | None,
        typer.Option("--turns", min=1, metavar="N", rich_help_panel=PROMPT, help="Of a conversation. Default: all."),
    ] = None,
    render: Annotated[
        Render, typer.Option("--render", rich_help_panel=PROMPT, help="With the chat template, the raw text, or both.")
    ] = Render.chat,
    special_tokens: SpecialTokens = False,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-prompt-tokens", min=1, metavar="N", rich_help_panel=PROMPT, help="Of a prompt that is used."
        ),
    ] = None,
    too_long: Annotated[
        TooLong,
        typer.Option("--too-long", rich_help_panel=PROMPT, help="Longer prompts: left out and counted, or refused."),
    ] = TooLong.skip,
    buckets: Annotated[
        str,
        typer.Option(
            "--buckets", metavar="N,N", rich_help_panel=OUTPUT, help="Prompt tokens at which a bucket begins."
        ),
    ] = "128,512,2048",
    temperature: Annotated[
        str,
        typer.Option("--temperature", metavar="T,T", rich_help_panel=SAMPLING, help="Each is a setting; 0: greedy."),
    ] = "0",
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="S", rich_help_panel=SAMPLING, help="Of the first repeat; the next has S + 1, and so on."
        ),
    ] = 0,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, metavar="R", rich_help_panel=RUNNING, help="Of every request.")
    ] = 3,
    in_a_row: Annotated[
        int,
        typer.Option(
            "--in-a-row",
            min=1,
            metavar="N",
            rich_help_panel=RUNNING,
            help="Requests of an arm before the next one's turn. A program that others ran before begins slower: with "
            "answers of milliseconds 1 is like requests that come alone, 12 like a stream of them.",
        ),
    ] = 1,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            metavar="N,N",
            rich_help_panel=RUNNING,
            help="Also decode all requests with so many at once, plainly and by each K: tokens a second in all.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", min=2, metavar="N", rich_help_panel=RUNNING, help="Of an answer.")
    ] = 256,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=RUNNING, help="Go on with the run in --out, by its own plan.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", rich_help_panel=RUNNING, help="Check options and files, say what would run, stop."),
    ] = False,
    continue_on_error: Annotated[
        bool,
        typer.Option("--continue-on-error", rich_help_panel=RUNNING, help="Go on without a K or drafter that fails."),
    ] = False,
    write_widths: Annotated[
        Path | None,
        typer.Option(
            "--write-widths",
            metavar="DIR|FILE",
            rich_help_panel=OUTPUT,
            help="Write the best K by number of active requests, which auto reads beside a drafter: into its directory "
            "as speculation.json, or as a file. Needs --concurrency 1,...",
        ),
    ] = None,
    dtype: DtypeOption = None,
    experts: ExpertsOption = Experts.auto,
    kernels: KernelsOption = Kernels.auto,
    quiet: Quiet = False,
) -> int:
    given = dict(locals())
    settings = SweepSettings(
        out=out,
        resume=resume,
        dry_run=dry_run,
        continue_on_error=continue_on_error,
        num_speculative_tokens=num_speculative_tokens,
        target=target,
        drafters=drafter,
        draft_vocab=draft_vocab,
        drafter_window=drafter_window,
        prompt_files=tuple(prompts or ()),
        num_prompts=num_prompts,
        strict=strict,
        turns=turns,
        render=render.value,
        special_tokens=special_tokens,
        temperature=temperature,
        max_prompt_tokens=max_prompt_tokens,
        too_long=too_long.value,
        buckets=buckets,
        repeats=repeats,
        in_a_row=in_a_row,
        concurrency=concurrency,
        write_widths=write_widths,
        max_new_tokens=max_new_tokens,
        seed=seed,
        dtype=dtype and dtype.value,
        experts=experts.value,
        kernels=kernels.value,
        quiet=quiet,
        aux_layer_ids=aux_layer_ids,
    )

    def run() -> int:
        from peagle.cli.sweep import sweep_command

        defaults = {name: each.default for name, each in inspect.signature(sweep).parameters.items()}
        if resume and (others := [name for name in given if name not in FREE and given[name] != defaults[name]]):
            raise InputError(
                f"--resume goes on by the plan in {out}, and {others[0].replace('_', ' ')} is given, too; leave it "
                "out, or begin another run with another --out"
            )
        return sweep_command(settings)

    return guarded(run)


@app.command(help=REPORT_HELP)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", show_default=False, help="Folders of peagle sweep.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="New folder to write. Default: the run's own; several runs need one.",
        ),
    ] = None,
    quiet: Quiet = False,
) -> int:
    def run() -> int:
        from peagle.cli.sweep import report_command

        return report_command(runs, out, quiet)

    return guarded(run)


@app.command(help=PARITY_HELP)
def parity(
    target: Target = None,
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", metavar="DIR", rich_help_panel=MODEL, help="Its checkpoint. Default: the demo's."),
    ] = None,
    aux_layer_ids: AuxLayerIds = None,
    drafter_window: DrafterWindow = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", rich_help_panel=PROMPT, help="Default: the demo's held-out prompts."),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="Of the file.")
    ] = 10,
    strict: Strict = False,
    render: Annotated[
        OneRender, typer.Option("--render", rich_help_panel=PROMPT, help="As you ask: chat template, or raw text.")
    ] = OneRender.chat,
    special_tokens: SpecialTokens = False,
    num_speculative_tokens: Annotated[
        int, typer.Option("-k", "--num-speculative-tokens", min=1, metavar="K", rich_help_panel=SPECULATION)
    ] = 5,
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", min=2, metavar="N", rich_help_panel=RUNNING, help="Of an answer.")
    ] = 64,
    reference_steps: Annotated[
        int,
        typer.Option("--reference-steps", min=1, metavar="N", rich_help_panel=RUNNING, help="In float64: slow ones."),
    ] = 6,
    dtype: DtypeOption = None,
    kernels: KernelsOption = Kernels.auto,
    json: Json = None,
    quiet: Quiet = False,
) -> int:
    settings = ParitySettings(
        target=target,
        drafter=drafter,
        prompts=prompts,
        num_prompts=num_prompts,
        strict=strict,
        render=render.value,
        special_tokens=special_tokens,
        num_speculative_tokens=num_speculative_tokens,
        max_new_tokens=max_new_tokens,
        reference_steps=reference_steps,
        dtype=dtype and dtype.value,
        kernels=kernels.value,
        json=json,
        quiet=quiet,
        aux_layer_ids=aux_layer_ids,
        drafter_window=drafter_window,
    )

    def run() -> int:
        from peagle.cli.parity import parity_command

        return parity_command(settings)

    return guarded(run)
