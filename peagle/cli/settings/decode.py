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
    """What `speculate` and `generate` share."""

    prompt: Annotated[
        str | None,
        Argument(
            metavar="PROMPT",
            show_default=False,
            help="What to answer; - reads standard input. Default: a built-in example.",
        ),
    ] = None
    prompt_file: Annotated[
        Path | None,
        Option(
            "--prompt-file",
            metavar="FILE",
            rich_help_panel=PROMPT,
            help='JSON lines with {"prompt": TEXT}, {"turns": [TEXT, ...]} or {"prompt_ids": [ID, ...]}; MT-Bench, '
            "HumanEval, GSM8K, ShareGPT, OpenAI messages; or .txt, a prompt a line. Any of them .gz.",
        ),
    ] = None
    strict: Strict = False
    prompt_ids: Annotated[
        str | None,
        Option("--prompt-ids", metavar="1,2,3", rich_help_panel=PROMPT, help="Token ids, taken as they are."),
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
            help="Positions for prompt and output. Default: what the prompt and -n need.",
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
            help="Tokens of a prompt in one pass. More: prompts are read sooner; fewer: other requests wait less. "
            f"Default: {DEFAULT_CHUNK}, on a GPU {GPU_CHUNK}.",
        ),
    ] = None
    prefill: PrefillOptions = PrefillOptions()
    prefix_cache: PrefixCache = "auto"
    retain_full_kv: RetainFullKV = False
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", rich_help_panel=RUNNING, help="Do not end at stop tokens, but after -n tokens.")
    ] = False
    stop: Annotated[
        tuple[str, ...],
        Option(
            "--stop",
            metavar="TEXT",
            rich_help_panel=RUNNING,
            help="End the answer before this text; may be given several times.",
        ),
    ] = ()
    json_schema: Annotated[
        Path | None,
        Option(
            "--json-schema",
            metavar="FILE",
            rich_help_panel=RUNNING,
            help="The answer, or its final message, is a JSON text that follows this schema.",
        ),
    ] = None
    regex: Annotated[
        str | None,
        Option(
            "--regex",
            metavar="REGEX",
            rich_help_panel=RUNNING,
            help="The answer, or its final message, matches this regular expression as a whole.",
        ),
    ] = None
    json: Json = None
    trace: Annotated[
        str | None,
        Option(
            "--trace",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            help="A JSON line per step: drafts and what became of them.",
        ),
    ] = None
    profile: Annotated[
        str | None,
        Option(
            "--profile",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="Trace some of the steps once more, into this directory, and say where their time goes.",
        ),
    ] = None
    quiet: Annotated[bool, quiet_option("The text alone: no progress, no notes, no summary")] = False


@dataclass(frozen=True, kw_only=True)
class SpeculateSettings(DecodeSettings):
    """Stream an answer with speculative decoding, then measure plain decoding beside it.

    [bold]Examples[/bold]

      K = 5, 128 tokens   [cyan]peagle speculate 'def mean(values):' -k 5 -n 128[/cyan]
      no drafter needed   [cyan]peagle speculate --target DIR --drafter ngram 'Why?'[/cyan]
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
            help="With a temperature: sample the drafts instead of taking the drafter's most likely tokens.",
        ),
    ] = False
    synthetic_acceptance: Annotated[
        str | None,
        Option(
            "--synthetic-acceptance",
            metavar="P|P,P",
            rich_help_panel=SPECULATION,
            help="To time random weights: keep draft i with this rate of all steps (one P: P to the power of i), "
            "whatever the target says. The output means nothing, and says so.",
        ),
    ] = None
    show_drafts: Annotated[
        bool,
        Option(
            "--show-drafts",
            rich_help_panel=OUTPUT,
            help="Colour accepted drafts by their place in the step, in a terminal.",
        ),
    ] = False
    no_baseline: Annotated[
        bool,
        Option(
            "--no-baseline", rich_help_panel=SPECULATION, help="Leave out plain decoding: no comparison, no speed-up."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(DecodeSettings):
    """Stream an answer with plain decoding, one token a step: what speculation is measured against.

    [bold]Examples[/bold]

      as it is           [cyan]peagle generate 'def mean(values):'[/cyan]
      with the 5 best    [cyan]peagle generate 'def mean(values):' --logprobs 5 --json -[/cyan]
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
            help="Per token its log-probability and the N (<= 20) likeliest with theirs; in --json, too. Costs time.",
        ),
    ] = None
