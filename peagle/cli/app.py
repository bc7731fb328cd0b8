"""The commands: arguments in, one frozen Settings, one call. What can be mended becomes one line and exit code 2."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO, TypeVar

import typer

from peagle.cli.output import say
from peagle.cli.settings import BenchSettings, ChatSettings, SamplingSettings, Settings, parse_layers
from peagle.engine.request import DEFAULT_CHUNK
from peagle.ops import interrupt
from peagle.ops.errors import InputError, InputWarning
from peagle.ops.jax_cure import MiscompilingJaxError

OK, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 2, interrupt.EXIT_CODE, 141

MAIN_HELP = """
Lossless speculative decoding of GPT-OSS models with a P-EAGLE drafter, in JAX.

A small drafter proposes K tokens at once, the target checks them in one pass:
what comes out is, token for token, what the target alone would have said.

[bold]Start here[/bold]  (the demo pair comes with the package)

  a built-in example        [cyan]peagle speculate[/cyan]
  your own prompt           [cyan]peagle speculate 'def mean(values):'[/cyan]
  your own checkpoints      [cyan]peagle speculate --target DIR --drafter DIR 'Why?'[/cyan]
  several turns             [cyan]peagle chat --target DIR --drafter DIR[/cyan]
  what a checkpoint is      [cyan]peagle info DIR[/cyan]
"""
SPECULATE_HELP = """
Stream an answer with speculative decoding, then measure plain decoding beside it.

[bold]Examples[/bold]

  K = 5, 128 tokens   [cyan]peagle speculate 'def mean(values):' -k 5 -n 128[/cyan]
  no drafter needed   [cyan]peagle speculate --target DIR --drafter ngram 'Why?'[/cyan]
  many prompts        [cyan]peagle speculate --prompt-file IN.jsonl --json OUT[/cyan]
  standard input      [cyan]cat text | peagle speculate - --temperature 0.8[/cyan]
"""
GENERATE_HELP = """
Stream an answer with plain decoding, one token a step: what speculation is measured against.

[bold]Examples[/bold]

  as it is           [cyan]peagle generate 'def mean(values):'[/cyan]
  with the 5 best    [cyan]peagle generate 'def mean(values):' --logprobs 5 --json -[/cyan]
"""
CHAT_HELP = """
Chat: answer one line after another, each with what was said before; streaming, with speculative decoding.

/reset forgets the conversation, /exit or the end of input ends it. Ctrl-C stops an answer, at the prompt the chat.

[bold]Examples[/bold]

  your own checkpoints   [cyan]peagle chat --target DIR --drafter DIR[/cyan]
  from a pipe            [cyan]printf 'Hi\\nAnd you?\\n' | peagle chat --target DIR --drafter ngram[/cyan]
"""
INFO_HELP = """
Say what a checkpoint is: geometry, bytes, memory it will need, taps; with two, whether target and drafter fit.

Reads config.json and the headers of the weights only, so it is quick for any size. Without DIR: the demo pair.

[bold]Examples[/bold]

  a target or a drafter        [cyan]peagle info DIR[/cyan]
  both, and whether they fit   [cyan]peagle info TARGET DRAFTER[/cyan]
"""
BENCH_HELP = """
Measure a target by itself: prefill (pp), decoding (tg), and verify passes of several widths.

v(T) is what a pass over T rows costs, in passes over one: with K = T - 1 drafts,
speculation pays where a step gives more tokens than that. Without TARGET: the demo's.

[bold]Examples[/bold]

  a checkpoint          [cyan]peagle bench DIR[/cyan]
  decoding alone        [cyan]peagle bench DIR -p 0 -t 1 -n 64,256 --context 1024[/cyan]
  many requests         [cyan]peagle bench DIR -p 0 -t 1 --slots 1,2,4,8,16,32[/cyan]
  what drafting costs   [cyan]peagle bench DIR --drafter DIR -p 0 -t 1 --slots 1,4,16 -k 1,3[/cyan]
  for a report          [cyan]peagle bench DIR --markdown - --json OUT[/cyan]
"""

PROMPT, MODEL, SPECULATION, SAMPLING, RUNNING, OUTPUT = (
    "Prompt",
    "Model",
    "Speculation",
    "Sampling",
    "Running",
    "Output",
)


class Effort(StrEnum):
    low = "low"
    medium = "medium"
    high = "high"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Experts(StrEnum):
    auto = "auto"
    packed = "packed"
    expanded = "expanded"


class Kernels(StrEnum):
    auto = "auto"
    native = "native"
    xla = "xla"


PromptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        show_default=False,
        help="What to answer; - reads standard input. Default: a built-in example.",
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        rich_help_panel=PROMPT,
        help='JSON lines with {"prompt": TEXT}, {"turns": [TEXT, ...]} or {"prompt_ids": [ID, ...]}; MT-Bench, '
        "HumanEval, GSM8K, ShareGPT, OpenAI messages; or .txt, a prompt a line. Any of them .gz.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        rich_help_panel=PROMPT,
        help="Refuse a file with a row that cannot be asked, instead of leaving the row out and saying so.",
    ),
]
PromptIds = Annotated[
    str | None,
    typer.Option("--prompt-ids", metavar="1,2,3", rich_help_panel=PROMPT, help="Token ids, taken as they are."),
]
RawPrompt = Annotated[
    bool,
    typer.Option("--raw-prompt", rich_help_panel=PROMPT, help="Go on with the text as it is: no chat template."),
]
SpecialTokens = Annotated[
    bool,
    typer.Option(
        "--special-tokens",
        rich_help_panel=PROMPT,
        help="In a raw prompt: special tokens that the text spells are control tokens, not characters.",
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", rich_help_panel=PROMPT, help="A system message before it.")
]
ReasoningEffort = Annotated[
    Effort | None,
    typer.Option("--reasoning-effort", rich_help_panel=PROMPT, help="How long to think, where the template knows it."),
]
Date = Annotated[
    str | None,
    typer.Option(
        "--date",
        metavar="YYYY-MM-DD",
        rich_help_panel=PROMPT,
        help="What a template is told that asks for today's date. Fixed by default, so that results do not drift.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option("--target", metavar="DIR", rich_help_panel=MODEL, help="GPT-OSS checkpoint. Default: the demo's."),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="DIR|ngram",
        rich_help_panel=MODEL,
        help="P-EAGLE or EAGLE-3 checkpoint, or ngram: looks back in the text, needs no weights. Default: the demo's; "
        "demo-eagle3 is its autoregressive one.",
    ),
]
AuxLayerIds = Annotated[
    str | None,
    typer.Option(
        "--aux-layer-ids",
        metavar="L,L,L",
        rich_help_panel=MODEL,
        help="Target's layers, from 0, whose outputs the drafter reads. Default: as its config.json says.",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option("--dtype", rich_help_panel=MODEL, help="Of the arithmetic. Default: float32 on CPU, else bfloat16."),
]
ExpertsOption = Annotated[
    Experts,
    typer.Option(
        "--experts",
        rich_help_panel=MODEL,
        help="packed keeps MXFP4 in memory, expanded dequantises at load, auto takes what is fastest and fits.",
    ),
]
KernelsOption = Annotated[
    Kernels,
    typer.Option(
        "--kernels",
        rich_help_panel=MODEL,
        help="native runs the compiled CPU kernels or refuses, xla does without; auto: native where they run.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        rich_help_panel=MODEL,
        help="Positions for prompt and output. Default: what the prompt and -n need.",
    ),
]
NumSpeculative = Annotated[
    str | None,
    typer.Option(
        "-k",
        "--num-speculative-tokens",
        metavar="K|auto",
        rich_help_panel=SPECULATION,
        help="Tokens drafted per step; auto: by the drafter's table, none where they do not pay. Default on CPU: auto.",
    ),
]
DraftSampling = Annotated[
    bool,
    typer.Option(
        "--draft-sampling",
        rich_help_panel=SPECULATION,
        help="With a temperature: sample the drafts instead of taking the drafter's most likely tokens.",
    ),
]
SyntheticAcceptance = Annotated[
    str | None,
    typer.Option(
        "--synthetic-acceptance",
        metavar="P|P,P",
        rich_help_panel=SPECULATION,
        help="To time random weights: keep draft i with this rate of all steps (one P: P to the power of i), whatever "
        "the target says. The output means nothing, and says so.",
    ),
]
DraftVocab = Annotated[
    str | None,
    typer.Option(
        "--draft-vocab",
        metavar="N|FILE",
        rich_help_panel=SPECULATION,
        help="Draft only the N most frequent tokens, or the ids in a JSON list: a cheaper head, fewer hits.",
    ),
]
NoBaseline = Annotated[
    bool,
    typer.Option(
        "--no-baseline", rich_help_panel=SPECULATION, help="Leave out plain decoding: no comparison, no speed-up."
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option("-n", "--max-new-tokens", metavar="N", rich_help_panel=RUNNING, help="Most tokens to answer.")
]
SLOTS_HELP = "Requests decoded at once; one that ends is replaced at the next dispatch."
Slots = Annotated[
    int | None,
    typer.Option("--slots", metavar="N", rich_help_panel=RUNNING, help=f"{SLOTS_HELP} Default: 1."),
]
Batch = Annotated[int | None, typer.Option("--batch", hidden=True)]  # the old name of --slots
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", rich_help_panel=RUNNING, help="Go on behind stop tokens, up to -n.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        rich_help_panel=RUNNING,
        help="End the answer before this text; may be given several times.",
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", metavar="T", rich_help_panel=SAMPLING, help="0, or below 1e-5: always the most likely token."
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", metavar="N", rich_help_panel=SAMPLING, help="Among the N likeliest; 0: all.")
]
TopP = Annotated[
    float,
    typer.Option("--top-p", metavar="P", rich_help_panel=SAMPLING, help="Among the likeliest of joint mass P; 1: all."),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", rich_help_panel=SAMPLING, help="The same seed draws the same tokens.")
]
MinP = Annotated[
    float,
    typer.Option("--min-p", metavar="P", rich_help_panel=SAMPLING, help="At least P times as likely as the likeliest."),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty", metavar="X", rich_help_panel=SAMPLING, help="Lower the logit of emitted tokens by X."
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        metavar="X",
        rich_help_panel=SAMPLING,
        help="The same by X for each time it was emitted.",
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        rich_help_panel=SAMPLING,
        help="Divide positive logits of tokens of prompt and answer by X, multiply negative ones; 1: off.",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias", metavar="ID=X", rich_help_panel=SAMPLING, help="Add X to a token's logit; repeatable."
    ),
]
MinTokens = Annotated[
    int, typer.Option("--min-tokens", metavar="N", rich_help_panel=SAMPLING, help="No stop token before N tokens.")
]
PrefillChunk = Annotated[
    int,
    typer.Option(
        "--prefill-chunk",
        metavar="N",
        rich_help_panel=RUNNING,
        help="Tokens of a prompt in one pass. More: prompts are read sooner; fewer: other requests wait less.",
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        rich_help_panel=OUTPUT,
        help="Per token its log-probability and the N (<= 20) likeliest with theirs; in --json, too. Costs time.",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        rich_help_panel=OUTPUT,
        help="All results as one JSON object; with - nothing else goes to standard output.",
    ),
]
Trace = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="FILE", rich_help_panel=OUTPUT, help="A JSON line per step: drafts and what became of them."
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="DIR",
        rich_help_panel=OUTPUT,
        help="Trace some of the steps once more, into this directory, and say where their time goes.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="The text only: no progress, no summary.")
]

app = typer.Typer(
    name="peagle",
    help=MAIN_HELP,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def peagle(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    if version:
        import importlib.metadata

        try:
            print(importlib.metadata.version("peagle"))
        except importlib.metadata.PackageNotFoundError:
            print("not installed")
        raise typer.Exit


@app.command(help=SPECULATE_HELP)
def speculate(
    prompt: PromptArgument = None,
    prompt_file: PromptFile = None,
    strict: Strict = False,
    prompt_ids: PromptIds = None,
    raw_prompt: RawPrompt = False,
    special_tokens: SpecialTokens = False,
    system: System = None,
    reasoning_effort: ReasoningEffort = None,
    date: Date = None,
    target: Target = None,
    drafter: Drafter = None,
    aux_layer_ids: AuxLayerIds = None,
    dtype: DtypeOption = None,
    experts: ExpertsOption = Experts.auto,
    kernels: KernelsOption = Kernels.auto,
    context: Context = None,
    prefill_chunk: PrefillChunk = DEFAULT_CHUNK,
    num_speculative_tokens: NumSpeculative = None,
    draft_sampling: DraftSampling = False,
    synthetic_acceptance: SyntheticAcceptance = None,
    draft_vocab: DraftVocab = None,
    no_baseline: NoBaseline = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    logit_bias: LogitBias = None,
    min_tokens: MinTokens = 0,
    max_new_tokens: MaxNewTokens = 256,
    slots: Slots = None,
    batch: Batch = None,
    ignore_eos: IgnoreEos = False,
    stop: Stop = None,
    json: Json = None,
    trace: Trace = None,
    profile: Profile = None,
    quiet: Quiet = False,
) -> int:
    settings = Settings(
        command="speculate",
        prompt=prompt,
        prompt_file=prompt_file,
        strict=strict,
        prompt_ids=prompt_ids,
        raw_prompt=raw_prompt,
        special_tokens=special_tokens,
        system=system,
        reasoning_effort=reasoning_effort and reasoning_effort.value,
        date=date,
        target=target,
        drafter=drafter,
        dtype=dtype and dtype.value,
        experts=experts.value,
        kernels=kernels.value,
        context=context,
        prefill_chunk=prefill_chunk,
        num_speculative_tokens=num_speculative_tokens,
        draft_sampling=draft_sampling,
        synthetic_acceptance=synthetic_acceptance,
        draft_vocab=draft_vocab,
        baseline=not no_baseline,
        sampling=SamplingSettings(
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            tuple(logit_bias or ()),
            min_tokens,
        ),
        max_new_tokens=max_new_tokens,
        slots=chosen_slots(slots, batch, 1),
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
        logprobs=None,
        json=json,
        trace=trace,
        profile=profile,
        quiet=quiet,
        aux_layer_ids=aux_layer_ids,
    )
    return _run(settings)


@app.command(help=GENERATE_HELP)
def generate(
    prompt: PromptArgument = None,
    prompt_file: PromptFile = None,
    strict: Strict = False,
    prompt_ids: PromptIds = None,
    raw_prompt: RawPrompt = False,
    special_tokens: SpecialTokens = False,
    system: System = None,
    reasoning_effort: ReasoningEffort = None,
    date: Date = None,
    target: Target = None,
    dtype: DtypeOption = None,
    experts: ExpertsOption = Experts.auto,
    kernels: KernelsOption = Kernels.auto,
    context: Context = None,
    prefill_chunk: PrefillChunk = DEFAULT_CHUNK,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    logit_bias: LogitBias = None,
    min_tokens: MinTokens = 0,
    max_new_tokens: MaxNewTokens = 256,
    slots: Slots = None,
    batch: Batch = None,
    ignore_eos: IgnoreEos = False,
    stop: Stop = None,
    logprobs: Logprobs = None,
    json: Json = None,
    trace: Trace = None,
    profile: Profile = None,
    quiet: Quiet = False,
) -> int:
    settings = Settings(
        command="generate",
        prompt=prompt,
        prompt_file=prompt_file,
        strict=strict,
        prompt_ids=prompt_ids,
        raw_prompt=raw_prompt,
        special_tokens=special_tokens,
        system=system,
        reasoning_effort=reasoning_effort and reasoning_effort.value,
        date=date,
        target=target,
        drafter=None,
        dtype=dtype and dtype.value,
        experts=experts.value,
        kernels=kernels.value,
        context=context,
        prefill_chunk=prefill_chunk,
        num_speculative_tokens="0",
        draft_sampling=False,
        synthetic_acceptance=None,
        draft_vocab=None,
        baseline=False,
        sampling=SamplingSettings(
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            tuple(logit_bias or ()),
            min_tokens,
        ),
        max_new_tokens=max_new_tokens,
        slots=chosen_slots(slots, batch, 1),
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
        logprobs=logprobs,
        json=json,
        trace=trace,
        profile=profile,
        quiet=quiet,
    )
    return _run(settings)


@app.command(help=CHAT_HELP)
def chat(
    system: System = None,
    reasoning_effort: ReasoningEffort = None,
    date: Date = None,
    target: Target = None,
    drafter: Drafter = None,
    aux_layer_ids: AuxLayerIds = None,
    dtype: DtypeOption = None,
    experts: ExpertsOption = Experts.auto,
    kernels: KernelsOption = Kernels.auto,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            rich_help_panel=MODEL,
            help="Positions for the whole conversation. Default: 4096, or all that the model has.",
        ),
    ] = None,
    num_speculative_tokens: NumSpeculative = None,
    draft_vocab: DraftVocab = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline", rich_help_panel=SPECULATION, help="Decode each answer plainly, too, and say the speed-up."
        ),
    ] = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    logit_bias: LogitBias = None,
    min_tokens: MinTokens = 0,
    max_new_tokens: MaxNewTokens = 1024,
    stop: Stop = None,
    quiet: Quiet = False,
) -> int:
    settings = ChatSettings(
        system=system,
        reasoning_effort=reasoning_effort and reasoning_effort.value,
        date=date,
        target=target,
        drafter=drafter,
        dtype=dtype and dtype.value,
        experts=experts.value,
        kernels=kernels.value,
        context=context,
        num_speculative_tokens=num_speculative_tokens,
        draft_vocab=draft_vocab,
        baseline=baseline,
        sampling=SamplingSettings(
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            tuple(logit_bias or ()),
            min_tokens,
        ),
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        quiet=quiet,
        aux_layer_ids=aux_layer_ids,
    )

    def run() -> int:
        from peagle.cli.chat import chat_command

        return chat_command(settings)

    return guarded(run)


@app.command(help=INFO_HELP)
def info(
    directories: Annotated[
        list[str] | None, typer.Argument(metavar="DIR", show_default=False, help="Target, drafter, or both.")
    ] = None,
    aux_layer_ids: AuxLayerIds = None,
) -> int:
    def run() -> int:
        from peagle.cli.info import show

        return show(directories or [], parse_layers(aux_layer_ids))

    return guarded(run)


@app.command(help=BENCH_HELP)
def bench(
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", show_default=False, help="GPT-OSS checkpoint. Default: the demo's."),
    ] = None,
    prompt_lengths: Annotated[
        str, typer.Option("-p", "--prompt-lengths", metavar="N,N", help="Tokens of the prompts (pp); 0: no such test.")
    ] = "128,512",
    new_tokens: Annotated[
        str, typer.Option("-n", "--new-tokens", metavar="N,N", help="Tokens to decode (tg); 0: no such test.")
    ] = "64",
    widths: Annotated[
        str, typer.Option("-t", "--widths", metavar="T,T", help="Rows of a verify pass; 1 is always measured, too.")
    ] = "1,2,4,8",
    context: Annotated[
        int, typer.Option("--context", metavar="N", help="Tokens in the caches when decoding and verifying start.")
    ] = 128,
    slots: Annotated[
        str | None,
        typer.Option(
            "--slots",
            metavar="N,N",
            help="Requests decoded at once. Several: decoding at each, and at 1; all else at 1. Default: 1.",
        ),
    ] = None,
    batch: Batch = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,K",
            rich_help_panel=SPECULATION,
            help="Decoding also with K drafts a step, all refused: what such a step costs over a plain one.",
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter", metavar="DIR|ngram", rich_help_panel=MODEL, help="Its checkpoint, for -k. Default: the demo's."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="R", help="Measurements of each test.")] = 5,
    dtype: DtypeOption = None,
    experts: ExpertsOption = Experts.auto,
    kernels: KernelsOption = Kernels.auto,
    json: Json = None,
    markdown: Annotated[
        str | None,
        typer.Option("--markdown", metavar="FILE|-", rich_help_panel=OUTPUT, help="The table, to be put into a text."),
    ] = None,
) -> int:
    settings = BenchSettings(
        target=target,
        prompt_lengths=prompt_lengths,
        new_tokens=new_tokens,
        widths=widths,
        context=context,
        slots=chosen_slots(slots, None if batch is None else str(batch), "1"),
        num_speculative_tokens=num_speculative_tokens,
        drafter=drafter,
        repeats=repeats,
        dtype=dtype and dtype.value,
        experts=experts.value,
        kernels=kernels.value,
        json=json,
        markdown=markdown,
    )

    def run() -> int:
        from peagle.cli.bench import bench_command

        return bench_command(settings)

    return guarded(run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0; 2 after one line on stderr about bad input or usage; 130
    after Ctrl-C; 141 where nobody reads the output any more."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # nothing is ever fetched: a library that would ask the network may not
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for stream in (sys.stdout, sys.stderr):  # a name, say of a file, can be shown whatever it holds
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    try:
        code = command.main(args=given or ["--help"], prog_name="peagle", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except InputError as error:
        return _complain(str(error))
    except Exception as error:
        if type(error).__name__ == "Abort":
            return INTERRUPTED
        if not hasattr(error, "format_message"):  # not the parser's: a bug of ours, whose traceback is wanted
            raise
        return _complain(f"{error.format_message()} (peagle --help shows the usage)")
    return code if isinstance(code, int) else OK


Given = TypeVar("Given", int, str)


def chosen_slots(slots: Given | None, batch: Given | None, default: Given) -> Given:
    """Take the number of slots from --slots, or from --batch, its old name; say so if the old one was typed.

    Raises InputError where both were.
    """
    if batch is None:
        return default if slots is None else slots
    if slots is not None:
        raise InputError("--slots and --batch, its old name, are both given; expected --slots alone")
    say("warning", "--batch is now called --slots")
    return batch


def guarded(run: Callable[[], int]) -> int:
    """The exit code of a run, which is one that may compile, with what a person can mend told in one line."""
    from peagle.cli.compilation_cache import keep_compiled

    keep_compiled()
    try:
        with _warnings_in_one_line():
            return run()
    except (InputError, MiscompilingJaxError) as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read the output has gone; nothing is left to say, and nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _complain(f"{where}{error.strerror or error}; expected a place that can be read and written")
    except Exception as error:
        if _out_of_memory(error):
            return _complain(
                f"out of memory: {str(error).splitlines()[0] if str(error) else 'no more is free'}; lower --context or "
                "--slots, or keep the experts small with --experts packed or --dtype bfloat16"
            )
        raise


def _run(settings: Settings) -> int:
    def run() -> int:
        from peagle.cli.run import run_command

        return run_command(settings)

    return guarded(run)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (
        type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and "RESOURCE_EXHAUSTED" in str(error)
    )


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print what checkpoints may be meant otherwise as one line each, once; all other warnings as ever."""
    told: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", InputWarning)
        as_ever = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, InputWarning):
                as_ever(message, category, filename, lineno, file, line)
            elif str(message) not in told:
                told.add(str(message))
                say("warning", str(message))

        warnings.showwarning = show
        yield


def _complain(message: str) -> int:
    say("error", message)
    return BAD_INPUT


@app.command(help="Check this machine: its kernels against references, and speculation against plain decoding.")
def check() -> int:
    def run() -> int:
        from peagle.cli.check import check_command

        return check_command()

    return guarded(run)


@app.command(help="Write a GPT-OSS checkpoint of random weights: for speed, memory and format, not for sense.")
def random(
    size: Annotated[str, typer.Argument(metavar="SIZE", show_default=False, help="tiny, S, M, L, 20b or 120b.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="A new directory.")],
    unquantized: Annotated[bool, typer.Option("--unquantized", help="Experts in bfloat16, not MXFP4.")] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Equal seeds give equal bytes.")] = 0,
) -> int:
    def run() -> int:
        from peagle.cli.random_checkpoint import random_command

        return random_command(size, directory, not unquantized, seed)

    return guarded(run)


@app.command(help="List the tokens that a target writes, the most frequent first: for --draft-vocab.")
def frequent_tokens(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", show_default=False, help="Documents of --json, shards of peagle data."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", show_default=False, help="The list to write.")],
) -> int:
    def run() -> int:
        from peagle.cli.frequent_tokens import frequent_tokens_command

        return frequent_tokens_command(files, out)

    return guarded(run)
