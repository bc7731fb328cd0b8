"""The options of `speculate` and `generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Argument, Option

from peagle.cli.settings.shared import (
    MODEL,
    OUTPUT,
    PROMPT,
    RUNNING,
    SPECULATION,
    Batch,
    DraftOptions,
    Json,
    MaxNewTokens,
    MeshOptions,
    ModelOptions,
    PrefillOptions,
    PrefixCache,
    ProcessOptions,
    RenderingOptions,
    RetainFullKV,
    SamplingOptions,
    Slots,
    Strict,
    quiet_option,
)
from peagle.engine.request import DEFAULT_CHUNK, GPU_CHUNK


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
        Option(
            "--prompt-file",
            "--prompts",
            metavar="FILE",
            rich_help_panel=PROMPT,
            help='JSON lines with {"prompt": TEXT}, {"turns": [TEXT, ...]}, {"messages": [...]} or {"prompt_ids": '
            "[ID, ...]}; "
            "MT-Bench, HumanEval, MBPP, GSM8K, MATH-500, Alpaca, ShareGPT; or .txt with one prompt per line. All may be "
            ".gz.",
        ),
    ] = None
    strict: Strict = False
    prompt_ids: Annotated[
        str | None,
        Option(
            "--prompt-ids", metavar="1,2,3", rich_help_panel=PROMPT, help="Prompt as token ids, without a template."
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
            rich_help_panel=MODEL,
            help="Most positions of prompt and output. Default: what the prompt and -n need.",
        ),
    ] = None
    sampling: SamplingOptions = SamplingOptions()
    max_new_tokens: MaxNewTokens = 256
    slots: Slots = None
    batch: Batch = None
    prefill_chunk: Annotated[
        int | None,
        Option(
            "--prefill-chunk",
            metavar="N",
            rich_help_panel=RUNNING,
            help="Prompt tokens per prefill pass. More: lower time to first token; fewer: other requests wait less. "
            f"Default: {DEFAULT_CHUNK}, on a GPU {GPU_CHUNK}.",
        ),
    ] = None
    prefill: PrefillOptions = PrefillOptions()
    prefix_cache: PrefixCache = "auto"
    retain_full_kv: RetainFullKV = False
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", rich_help_panel=RUNNING, help="Ignore stop tokens: generate -n tokens.")
    ] = False
    stop: Annotated[
        tuple[str, ...],
        Option(
            "--stop",
            metavar="TEXT",
            rich_help_panel=RUNNING,
            help="Stop before this text. Repeatable.",
        ),
    ] = ()
    json_schema: Annotated[
        Path | None,
        Option(
            "--json-schema",
            metavar="FILE",
            rich_help_panel=RUNNING,
            help="Constrain the answer, or its final message, to this JSON schema.",
        ),
    ] = None
    regex: Annotated[
        str | None,
        Option(
            "--regex",
            metavar="REGEX",
            rich_help_panel=RUNNING,
            help="Constrain the answer, or its final message, to this regular expression.",
        ),
    ] = None
    json: Json = None
    trace: Annotated[
        str | None,
        Option(
            "--trace",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            help="Write one JSON line per step: drafts and accepted tokens.",
        ),
    ] = None
    profile: Annotated[
        str | None,
        Option(
            "--profile",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="Profile some steps into this directory, and print where their time goes.",
        ),
    ] = None
    quiet: Annotated[bool, quiet_option("Print only the text: no progress, notes or summary")] = False


@dataclass(frozen=True, kw_only=True)
class SpeculateSettings(DecodeSettings):
    """Generate with speculative decoding; compare with plain.

    [bold]Examples[/bold]

      K = 5, 128 tokens   [cyan]peagle speculate 'def mean(values):' -k 5 -n 128[/cyan]
      without weights     [cyan]peagle speculate --target DIR --drafter ngram 'Why?'[/cyan]
      many prompts        [cyan]peagle speculate --prompt-file IN.jsonl --json OUT[/cyan]
      standard input      [cyan]cat text | peagle speculate - --temperature 0.8[/cyan]
    """

    command: ClassVar[str] = "speculate"
    logprobs: ClassVar[int | None] = None
    drafting: DraftOptions = DraftOptions()
    draft_sampling: Annotated[
        bool,
        Option(
            "--draft-sampling",
            rich_help_panel=SPECULATION,
            help="If the temperature is above 0: sample the drafts, instead of taking the drafter's argmax.",
        ),
    ] = False
    synthetic_acceptance: Annotated[
        str | None,
        Option(
            "--synthetic-acceptance",
            metavar="P|P,P",
            rich_help_panel=SPECULATION,
            help="For timing random weights: accept draft i at this rate (one P: P to the power of i), whatever the "
            "target says. The output is meaningless, and marked so.",
        ),
    ] = None
    show_drafts: Annotated[
        bool,
        Option(
            "--show-drafts",
            rich_help_panel=OUTPUT,
            help="Colour accepted drafts by their position in the step; brackets in a terminal without colours.",
        ),
    ] = False
    no_baseline: Annotated[
        bool,
        Option("--no-baseline", rich_help_panel=SPECULATION, help="Skip plain decoding, and with it the speed-up."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(DecodeSettings):
    """Generate with plain decoding, one token per step.

    [bold]Examples[/bold]

      greedy             [cyan]peagle generate 'def mean(values):'[/cyan]
      log-probabilities  [cyan]peagle generate 'def mean(values):' --logprobs 5 --json -[/cyan]
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
            help="Print log-probabilities of each token and of the N (<= 20) most likely ones; also in --json. Slower.",
        ),
    ] = None
