"""The options of `speculate` and `generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Argument, Option

from peagle.cli.settings.shared import (
    ENGINE,
    OUTPUT,
    PROMPT,
    SAMPLING,
    SPECULATION,
    Batch,
    DraftOptions,
    Json,
    KVMemory,
    MaxNewTokens,
    MeshOptions,
    ModelOptions,
    PrefillOptions,
    PrefixCache,
    ProcessOptions,
    RenderingOptions,
    RetainFullKV,
    SamplingOptions,
    Strict,
    prompt_file_option,
    quiet_option,
    slots_option,
)
from peagle.config import DEFAULT_CHUNK, GPU_CHUNK


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The options that `speculate` and `generate` share."""

    prompt: Annotated[
        str | None,
        Argument(
            metavar="PROMPT",
            show_default=False,
            help="The prompt; - reads standard input. Default: a built-in example.",
        ),
    ] = None
    prompt_file: Annotated[
        Path | None,
        prompt_file_option(
            'JSON lines with {"prompt": TEXT}, {"turns": [TEXT, ...]}, {"messages": [...]} or {"prompt_ids": [ID, '
            "...]}; MT-Bench, HumanEval, MBPP, GSM8K, MATH-500, Alpaca, ShareGPT; or .txt, one prompt per line. May be "
            "gzipped."
        ),
    ] = None
    strict: Strict = False
    prompt_ids: Annotated[
        str | None,
        Option(
            "--prompt-ids",
            metavar="1,2,3",
            rich_help_panel=PROMPT,
            help="Prompt as token ids, without the chat template.",
        ),
    ] = None
    rendering: RenderingOptions = RenderingOptions()
    model: ModelOptions = ModelOptions()
    devices: MeshOptions = MeshOptions()
    processes: ProcessOptions = ProcessOptions()
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=ENGINE,
            help="Context length in tokens: prompt plus response. Default: what the prompt and -n need.",
        ),
    ] = None
    sampling: SamplingOptions = SamplingOptions()
    max_new_tokens: MaxNewTokens = 256
    slots: Annotated[int | None, slots_option(1)] = None
    batch: Batch = None
    prefill_chunk: Annotated[
        int | None,
        Option(
            "--prefill-chunk",
            metavar="N",
            rich_help_panel=ENGINE,
            help="Prompt tokens per prefill pass. More: a prompt is prefilled sooner; fewer: other requests wait less. "
            f"Default: {DEFAULT_CHUNK}, on a GPU {GPU_CHUNK}.",
        ),
    ] = None
    prefill: PrefillOptions = PrefillOptions()
    kv_memory: KVMemory = "auto"
    prefix_cache: PrefixCache = "auto"
    retain_full_kv: RetainFullKV = False
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", rich_help_panel=SAMPLING, help="Ignore stop tokens; generate -n tokens.")
    ] = False
    stop: Annotated[
        tuple[str, ...],
        Option(
            "--stop",
            metavar="TEXT",
            rich_help_panel=SAMPLING,
            help="Stop string: the response ends before it; repeatable.",
        ),
    ] = ()
    json_schema: Annotated[
        Path | None,
        Option(
            "--json-schema",
            metavar="FILE",
            rich_help_panel=SAMPLING,
            help="Constrain the response, or its final message, to JSON that follows this schema.",
        ),
    ] = None
    regex: Annotated[
        str | None,
        Option(
            "--regex",
            metavar="REGEX",
            rich_help_panel=SAMPLING,
            help="Constrain the response, or its final message, to match this regular expression in full.",
        ),
    ] = None
    json: Json = None
    trace: Annotated[
        str | None,
        Option(
            "--trace",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            help="Write a JSON line per step: the drafts, how many were accepted, the next token.",
        ),
    ] = None
    profile: Annotated[
        str | None,
        Option(
            "--profile",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="After the run, trace some steps with JAX's profiler into this directory and report where their time "
            "goes.",
        ),
    ] = None
    quiet: Annotated[bool, quiet_option("Print only the generated text")] = False


@dataclass(frozen=True, kw_only=True)
class SpeculateSettings(DecodeSettings):
    """Generate with speculative decoding and report the speed-up.

    Streams the response, then decodes the prompt again without drafts to compare
    speed and tokens.

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
    logprobs: ClassVar[int | None] = None
    drafting: DraftOptions = DraftOptions()
    draft_sampling: Annotated[bool, Option("--draft-sampling", hidden=True)] = False  # of earlier versions: no effect
    synthetic_acceptance: Annotated[
        str | None,
        Option(
            "--synthetic-acceptance",
            metavar="P|P,P",
            rich_help_panel=SPECULATION,
            help="To time random weights: accept draft i in this share of the steps (one P: P to the power of i), "
            "whatever the target's logits. The generated text is meaningless.",
        ),
    ] = None
    show_drafts: Annotated[
        bool,
        Option(
            "--show-drafts",
            rich_help_panel=OUTPUT,
            help="In a terminal, colour accepted drafts by their position in the step, or put them in brackets if "
            "it has no colours.",
        ),
    ] = False
    no_baseline: Annotated[
        bool,
        Option("--no-baseline", rich_help_panel=SPECULATION, help="Skip plain decoding; no speed-up is reported."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(DecodeSettings):
    """Generate with plain decoding: the target alone, no drafter.

    [bold]Examples[/bold]

      the demo target     [cyan]peagle generate 'def mean(values):'[/cyan]
      log-probabilities   [cyan]peagle generate 'def mean(values):' --logprobs 5[/cyan]
      your checkpoint     [cyan]peagle generate --target DIR 'Why?' --temperature 0.8[/cyan]
    """

    command: ClassVar[str] = "generate"
    drafting: ClassVar[DraftOptions] = DraftOptions(num_speculative_tokens="0")
    draft_sampling: ClassVar[bool] = False
    synthetic_acceptance: ClassVar[str | None] = None
    no_baseline: ClassVar[bool] = True
    show_drafts: ClassVar[bool] = False
    logprobs: Annotated[
        int | None,
        Option(
            "--logprobs",
            metavar="N",
            rich_help_panel=OUTPUT,
            help="Print each token's log-probability and those of the N (0 to 20) most likely tokens, or write them to "
            "--json. Slower.",
        ),
    ] = None
