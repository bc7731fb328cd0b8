"""Options of `peagle speculate` and `peagle generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from peagle.cli.command import Takes
from peagle.cli.flags import JSON, PROMPT_FILE, QUIET, STRICT
from peagle.config import (
    AnswerConfig,
    EngineConfig,
    LoadConfig,
    NumDrafts,
    SamplingParams,
    check_num_drafts,
    read_num_drafts,
)
from peagle.ops.flag import OUTPUT, PROMPT, SAMPLING, SPECULATION, Flag
from peagle.text.prompts import Rendering

CONTEXT = "Context length in tokens: prompt plus answer. Default: what the prompt and -n need."
PLAIN = EngineConfig(num_speculative_tokens=0)
# fields that plain decoding does not take
ENGINE_FIELDS = ("num_speculative_tokens", "synthetic_acceptance")
DRAFTER_FIELDS = ("drafter", "aux_layer_ids", "draft_vocab", "drafter_window")


def read_drafts(typed: str) -> NumDrafts:
    """Read K of a command that always drafts. Raises InputError for anything but a number above 0 or auto."""
    k = read_num_drafts(typed)
    if isinstance(k, int):
        check_num_drafts(k, plain=False, instead=" (peagle generate decodes plainly)")
    return k


@dataclass(frozen=True, kw_only=True)
class Decode:
    """The options that `speculate` and `generate` share."""

    command: ClassVar[str]
    prompt: Annotated[str | None, Flag(names=("PROMPT",))] = None
    """The prompt; - reads standard input. Default: a built-in example."""
    prompt_file: Annotated[Path | None, PROMPT_FILE] = None
    """JSON lines with {"prompt": TEXT}, {"turns": [TEXT, ...]}, {"messages": [...]} or {"prompt_ids": [ID, ...]};
    MT-Bench, HumanEval, MBPP, GSM8K, MATH-500, Alpaca, ShareGPT; or .txt, one prompt per line. May be gzipped."""
    strict: Annotated[bool, STRICT] = False
    prompt_ids: Annotated[str | None, Flag(PROMPT, "1,2,3")] = None
    """Prompt as token ids, without the chat template."""
    rendering: Rendering = Rendering()
    load: LoadConfig = LoadConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingParams = SamplingParams()
    answer: Annotated[AnswerConfig, Takes(without=("logprobs",))] = AnswerConfig()
    json_schema: Annotated[Path | None, Flag(SAMPLING, "FILE")] = None
    """Constrain the answer, or its final message, to JSON that follows this schema."""
    regex: Annotated[str | None, Flag(SAMPLING, "REGEX")] = None
    """Constrain the answer, or its final message, to match this regular expression in full."""
    json: Annotated[str | None, JSON] = None
    trace: Annotated[str | None, Flag(OUTPUT, "FILE")] = None
    """Write a JSON line per step: the drafts, how many were accepted, the next token."""
    profile: Annotated[str | None, Flag(OUTPUT, "DIR")] = None
    """After the run, trace some steps with JAX's profiler into this directory and report where their time goes."""
    quiet: Annotated[bool, QUIET] = False
    """Print only the generated text. Warnings and errors are still printed."""
    no_baseline: bool = False

    def run(self) -> int:
        from peagle.cli.processes import run_together
        from peagle.cli.run_speculate import decode

        return run_together(self, self.load, decode)


@dataclass(frozen=True, kw_only=True)
class Speculate(Decode):
    """Generate with speculative decoding and report the speed-up.

    Streams the answer, then decodes the prompt again with and without drafts
    to compare speed and tokens. A terminal shows accepted drafts in colour, by
    their position in the step.

    [bold]Examples[/bold]

      built-in example    [cyan]peagle speculate[/cyan]
      K = 5, 128 tokens   [cyan]peagle speculate 'def mean(values):' -k 5 -n 128[/cyan]
      standard input      [cyan]echo 'def mean(values):' | peagle speculate -[/cyan]
      your checkpoints    [cyan]peagle speculate --target DIR --drafter DIR 'Why?'[/cyan]
      without a drafter   [cyan]peagle speculate --target DIR --drafter ngram 'Why?'[/cyan]
      many prompts
        [cyan]peagle speculate --prompt-file IN.jsonl --slots 8 --json OUT.json[/cyan]
    """

    command: ClassVar[str] = "speculate"
    engine: Annotated[
        EngineConfig, Takes(helps={"context": CONTEXT}, reads={"num_speculative_tokens": read_drafts})
    ] = EngineConfig()
    no_baseline: Annotated[bool, Flag(SPECULATION)] = False
    """Skip plain decoding; no speed-up is reported."""


@dataclass(frozen=True, kw_only=True)
class Generate(Decode):
    """Generate with plain decoding: the target alone, no drafter.

    [bold]Examples[/bold]

      the demo target     [cyan]peagle generate 'def mean(values):'[/cyan]
      log-probabilities   [cyan]peagle generate 'def mean(values):' --logprobs 5[/cyan]
      your checkpoint     [cyan]peagle generate --target DIR 'Why?' --temperature 0.8[/cyan]
    """

    command: ClassVar[str] = "generate"
    load: Annotated[LoadConfig, Takes(without=DRAFTER_FIELDS)] = LoadConfig()
    engine: Annotated[EngineConfig, Takes(without=ENGINE_FIELDS, helps={"context": CONTEXT})] = PLAIN
    answer: AnswerConfig = AnswerConfig()
