"""Options of `peagle sweep`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from peagle.cli.command import Takes, refuse_other_options
from peagle.cli.flags import PROMPT_FILE, QUIET, SPECIAL_TOKENS, STRICT
from peagle.config import LoadConfig
from peagle.ops.flag import MODEL, OUTPUT, PROMPT, RUNNING, SAMPLING, SPECULATION, Flag, check_least

LOADED = Takes(("target", "aux_layer_ids", "download", "dtype", "experts", "kernels"))
# allowed with --resume, because they do not change the measurements
FREE = ("out", "resume", "dry_run", "continue_on_error", "write_widths", "quiet")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Measure acceptance length and speed over K.

    Decodes every prompt with every K and plainly, in turns. Writes the plan, all
    decoded requests, and a report: figures with confidence intervals, an HTML
    page and plots.

    [bold]Examples[/bold]

      the demo models    [cyan]peagle sweep --out RUN[/cyan]
      resume             [cyan]peagle sweep --out RUN --resume[/cyan]
      batch sizes        [cyan]peagle sweep --out RUN --concurrency 1,2,4,8,16[/cyan]
      the acceptance that -k auto begins with
        [cyan]peagle sweep --out RUN --resume --write-widths DRAFTER[/cyan]
      your checkpoints
        [cyan]peagle sweep --out RUN --target DIR --drafter DIR --prompts IN.jsonl[/cyan]
      two drafters
        [cyan]peagle sweep --out RUN -k 1-7,auto --drafter demo,ngram --repeats 5[/cyan]
      print the plan
        [cyan]peagle sweep --out RUN -k 0-8 --render both --temperature 0,1 --dry-run[/cyan]
    """

    out: Annotated[str, Flag(OUTPUT, "DIR")]
    """Output directory: a new one, or a run to --resume."""
    num_speculative_tokens: Annotated[str, Flag(SPECULATION, "K,K", ("-k", "--num-speculative-tokens"))] = (
        "1-3,5,7,auto"
    )
    """Values of K, ranges of them, auto, and auto:N (auto with at most N). Plain decoding (0) is always included."""
    drafter: Annotated[str | None, Flag(MODEL, "DIR,DIR|ngram")] = None
    """Drafters, separated by commas; every K runs with each. Default: the demo drafter."""
    draft_vocab: Annotated[str, Flag(SPECULATION, "N,N|full")] = "full"
    """Draft vocabularies (see peagle speculate --help), or full; every K runs with each."""
    drafter_window: Annotated[str, Flag(SPECULATION, "N,N|auto|off")] = "auto"
    """Drafter windows (see peagle speculate --help); every K runs with each."""
    load: Annotated[LoadConfig, LOADED] = LoadConfig()
    prompts: Annotated[tuple[Path, ...], PROMPT_FILE] = ()
    """Prompt file, in a format of peagle speculate; repeatable. Default: the demo's held-out prompts."""
    num_prompts: Annotated[int | None, Flag(PROMPT, "N")] = None
    """Use the first N prompts of each file; 0: all. Default: all of a file, 60 of the demo's."""
    strict: Annotated[bool, STRICT] = False
    turns: Annotated[int | None, Flag(PROMPT, "N")] = None
    """Use the first N turns, 1 or more, of a conversation. Default: all."""
    render: Annotated[Literal["chat", "raw", "both"], Flag(PROMPT, "HOW")] = "chat"
    """chat: apply the chat template; raw: continue the prompt as plain text; or both."""
    special_tokens: Annotated[bool, SPECIAL_TOKENS] = False
    max_prompt_tokens: Annotated[int | None, Flag(PROMPT, "N")] = None
    """Longest prompt, in tokens, 1 or more. Default: the model's limit."""
    too_long: Annotated[Literal["skip", "error"], Flag(PROMPT, "HOW")] = "skip"
    """What to do with longer prompts. skip: leave them out and count them; error: refuse to run."""
    buckets: Annotated[str, Flag(OUTPUT, "N,N")] = "128,512,2048"
    """Prompt lengths that separate the buckets of the report."""
    temperature: Annotated[str, Flag(SAMPLING, "T,T")] = "0"
    """Sampling temperatures, each measured on its own; 0: greedy."""
    seed: Annotated[int, Flag(SAMPLING, "S")] = 0
    """Random seed of the first repeat; the next ones use S + 1, S + 2, ..."""
    repeats: Annotated[int, Flag(RUNNING, "R")] = 3
    """Repeats of every request, 1 or more."""
    in_a_row: Annotated[int, Flag(RUNNING, "N")] = 1
    """Requests that a variant (K, drafter, ...) decodes before the next variant's turn. The first request after a
    switch is slower; a larger N hides this."""
    concurrency: Annotated[str | None, Flag(RUNNING, "N,N")] = None
    """Also decode all requests N at a time, plainly and with each K, and report the total throughput."""
    max_new_tokens: Annotated[int, Flag(RUNNING, "N", ("-n", "--max-new-tokens"))] = 256
    """Maximum tokens of an answer, 2 or more."""
    resume: Annotated[bool, Flag(RUNNING)] = False
    """Resume the run in --out by its stored plan."""
    dry_run: Annotated[bool, Flag(RUNNING)] = False
    """Check options and files, print the plan, and exit."""
    continue_on_error: Annotated[bool, Flag(RUNNING)] = False
    """Skip a K or drafter that fails; run the others."""
    write_widths: Annotated[Path | None, Flag(OUTPUT, "DIR|FILE")] = None
    """Write how often drafts were accepted, by the drafter's confidence: to a file, or into a drafter's directory as
    speculation.json. -k auto starts from it. Needs auto in -k; the largest K becomes the most drafts of a step."""
    quiet: Annotated[bool, QUIET] = False
    """Hide progress and table; the results are in --out. Warnings and errors are still printed."""

    def __post_init__(self) -> None:
        check_least(self, num_prompts=0, turns=1, max_prompt_tokens=1, repeats=1, in_a_row=1, max_new_tokens=2)

    def run(self) -> int:
        from peagle.cli.run_sweep import sweep

        if self.resume:
            refuse_other_options(self, "--resume", FREE, f"the plan in {self.out}")
        return sweep(self)
