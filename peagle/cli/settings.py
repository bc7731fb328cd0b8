"""The options of all commands, each named once: fields of frozen dataclasses, as they were typed.

None stands for a default that the run chooses. `peagle.cli.options` makes commands of these dataclasses. A nested one
is a group of options that several commands share, or that one workflow reads.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from typer import Argument, Option

from peagle.cli.output import say
from peagle.engine.request import DEFAULT_CHUNK, SamplingParams
from peagle.ops.errors import InputError
from peagle.ops.sizes import parse_size
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import DEFAULT_DATE

PROMPT, MODEL, SPECULATION, SAMPLING = "Prompt", "Model", "Speculation", "Sampling"
RUNNING, OUTPUT, DRAFTER, LEARNING, DATA = "Running", "Output", "Drafter", "Learning", "Data"

Target = Annotated[
    str | None,
    Option("--target", metavar="DIR", rich_help_panel=MODEL, help="GPT-OSS checkpoint. Default: the demo's."),
]
AuxLayerIds = Annotated[
    str | None,
    Option(
        "--aux-layer-ids",
        metavar="L,L,L",
        rich_help_panel=MODEL,
        help="Target's layers, from 0, whose outputs the drafter reads. Default: as its config.json says.",
    ),
]
Taps = Annotated[
    str | None,
    Option(
        "--taps",
        metavar="L,L,L",
        rich_help_panel=DRAFTER,
        help="Target's layers whose outputs the drafter reads, from 0. Default: 1, n/2 - 1, n - 4.",
    ),
]
Strict = Annotated[
    bool,
    Option(
        "--strict",
        rich_help_panel=PROMPT,
        help="Refuse a file with a row that cannot be used, instead of leaving the row out with a note.",
    ),
]
SpecialTokens = Annotated[
    bool,
    Option(
        "--special-tokens",
        rich_help_panel=PROMPT,
        help="In a raw prompt, read the spelling of a special token as that token, not as characters.",
    ),
]
Slots = Annotated[
    int | None,
    Option(
        "--slots",
        metavar="N",
        rich_help_panel=RUNNING,
        help="Requests decoded at once; one that ends is replaced at the next dispatch. Default: 1; of data, 32.",
    ),
]
Batch = Annotated[int | None, Option("--batch", hidden=True)]  # the old name of --slots
MaxNewTokens = Annotated[
    int, Option("-n", "--max-new-tokens", metavar="N", rich_help_panel=RUNNING, help="Most tokens to answer.")
]
MeasuredTokens = Annotated[
    int, Option("-n", "--max-new-tokens", min=2, metavar="N", rich_help_panel=RUNNING, help="Of an answer.")
]  # speeds need two tokens
NewFolder = Annotated[str, Option("--out", metavar="DIR", rich_help_panel=OUTPUT, help="New folder to write.")]
OwnFolder = Annotated[
    str, Option("--out", metavar="DIR", rich_help_panel=OUTPUT, help="Folder to write; goes on with its own.")
]
Json = Annotated[
    str | None,
    Option(
        "--json",
        metavar="FILE|-",
        rich_help_panel=OUTPUT,
        help="All results as one JSON object; with - nothing else goes to standard output.",
    ),
]
Quiet = Annotated[bool, Option("--quiet", "-q", rich_help_panel=OUTPUT, help="The text only: no progress, no summary.")]


PrefixCache = Annotated[
    str,
    Option(
        "--prefix-cache",
        metavar="SIZE|auto",
        rich_help_panel=RUNNING,
        help="Memory for prompts and answers that later prompts begin with, as 512MB or 2GB; 0: none. auto: a tenth of "
        "what is free if there are several requests.",
    ),
]
DrafterWindow = Annotated[
    str,
    Option(
        "--drafter-window",
        metavar="N|auto|off",
        rich_help_panel=SPECULATION,
        help="The drafter's attention sees the last N positions only, which keeps acceptance up after long prompts. "
        "auto: as speculation.json beside it or its config.json says.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How weights are loaded and computed with."""

    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option("--dtype", rich_help_panel=MODEL, help="Of the arithmetic. Default: float32 on CPU, else bfloat16."),
    ] = None
    experts: Annotated[
        Literal["auto", "packed", "expanded"],
        Option(
            "--experts",
            rich_help_panel=MODEL,
            help="packed keeps MXFP4 in memory, expanded dequantises at load, auto takes what is fastest and fits.",
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "xla"],
        Option(
            "--kernels",
            rich_help_panel=MODEL,
            help="native runs the compiled CPU kernels or refuses, xla does without; auto: native where they run.",
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """Which target, and how it is loaded."""

    target: Target = None


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Which drafter, and how many tokens it proposes."""

    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            metavar="DIR|ngram",
            rich_help_panel=MODEL,
            help="P-EAGLE or EAGLE-3 checkpoint, or ngram: looks back in the text, needs no weights. Default: the "
            "demo's; demo-eagle3 is its autoregressive one.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    num_speculative_tokens: Annotated[
        str | None,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K|auto",
            rich_help_panel=SPECULATION,
            help="Tokens drafted per step; auto: by the drafter's table, none where they do not pay. Default on CPU: "
            "auto.",
        ),
    ] = None
    draft_vocab: Annotated[
        str | None,
        Option(
            "--draft-vocab",
            metavar="N|FILE",
            rich_help_panel=SPECULATION,
            help="Draft only the N most frequent tokens, or the ids in a JSON list: a cheaper head, fewer hits.",
        ),
    ] = None
    drafter_window: DrafterWindow = "auto"


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """What a chat template is filled with."""

    system: Annotated[
        str | None, Option("--system", metavar="TEXT", rich_help_panel=PROMPT, help="A system message before it.")
    ] = None
    reasoning_effort: Annotated[
        Literal["low", "medium", "high"] | None,
        Option("--reasoning-effort", rich_help_panel=PROMPT, help="How long to think, if the template has this."),
    ] = None
    date: Annotated[
        str,
        Option(
            "--date",
            metavar="YYYY-MM-DD",
            rich_help_panel=PROMPT,
            help="Today's date for templates that show it. Fixed by default, so that results do not drift.",
        ),
    ] = DEFAULT_DATE

    def rendering(self) -> Rendering:
        """Return how prompts become token ids. Raises InputError for options that exclude each other."""
        return Rendering(system=self.system, reasoning_effort=self.reasoning_effort, date=self.date)


@dataclass(frozen=True, kw_only=True)
class RenderingOptions(TemplateOptions):
    """How prompts become token ids: by the chat template, or as they are."""

    raw_prompt: Annotated[
        bool,
        Option("--raw-prompt", rich_help_panel=PROMPT, help="Continue the text as it is: no chat template."),
    ] = False
    special_tokens: SpecialTokens = False

    def rendering(self) -> Rendering:
        return Rendering(self.raw_prompt, self.system, self.reasoning_effort, self.date, self.special_tokens)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn, in all commands that have a target answer."""

    temperature: Annotated[
        float,
        Option(
            "--temperature",
            metavar="T",
            rich_help_panel=SAMPLING,
            help="0, or below 1e-5: always the most likely token.",
        ),
    ] = 0.0
    top_k: Annotated[
        int, Option("--top-k", metavar="N", rich_help_panel=SAMPLING, help="Among the N likeliest; 0: all.")
    ] = 0
    top_p: Annotated[
        float,
        Option("--top-p", metavar="P", rich_help_panel=SAMPLING, help="Among the likeliest of joint mass P; 1: all."),
    ] = 1.0
    min_p: Annotated[
        float,
        Option("--min-p", metavar="P", rich_help_panel=SAMPLING, help="At least P times as likely as the likeliest."),
    ] = 0.0
    seed: Annotated[
        int, Option("--seed", metavar="S", rich_help_panel=SAMPLING, help="The same seed draws the same tokens.")
    ] = 0
    presence_penalty: Annotated[
        float,
        Option(
            "--presence-penalty", metavar="X", rich_help_panel=SAMPLING, help="Lower the logit of emitted tokens by X."
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            "--frequency-penalty",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="The same by X for each time it was emitted.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            "--repetition-penalty",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="Divide positive logits of tokens of prompt and answer by X, multiply negative ones; 1: off.",
        ),
    ] = 1.0
    logit_bias: Annotated[
        tuple[str, ...],
        Option("--logit-bias", metavar="ID=X", rich_help_panel=SAMPLING, help="Add X to a token's logit; repeatable."),
    ] = ()
    min_tokens: Annotated[
        int, Option("--min-tokens", metavar="N", rich_help_panel=SAMPLING, help="No stop token before N tokens.")
    ] = 0

    def params(self) -> SamplingParams:
        """Return what the engine reads. Raises InputError for values out of range."""
        return SamplingParams(**{**vars(self), "logit_bias": tuple(parse_bias(each) for each in self.logit_bias)})


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
        int,
        Option(
            "--prefill-chunk",
            metavar="N",
            rich_help_panel=RUNNING,
            help="Tokens of a prompt in one pass. More: prompts are read sooner; fewer: other requests wait less.",
        ),
    ] = DEFAULT_CHUNK
    prefix_cache: PrefixCache = "auto"
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
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class SpeculateSettings(DecodeSettings):
    """The options of `speculate`."""

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
    """The options of `generate`: plain decoding, so without any of a drafter's."""

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


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The options of `chat`."""

    template: TemplateOptions = TemplateOptions()
    model: ModelOptions = ModelOptions()
    drafting: DraftOptions = DraftOptions()
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=MODEL,
            help="Positions for the whole conversation. Default: 4096, or all that the model has.",
        ),
    ] = None
    baseline: Annotated[
        bool,
        Option("--baseline", rich_help_panel=SPECULATION, help="Decode each answer plainly, too: the speed-up."),
    ] = False
    sampling: SamplingOptions = SamplingOptions()
    max_new_tokens: MaxNewTokens = 1024
    stop: Annotated[
        tuple[str, ...],
        Option("--stop", metavar="TEXT", rich_help_panel=RUNNING, help="End an answer before this text; repeatable."),
    ] = ()
    prefix_cache: PrefixCache = "auto"
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The options of `serve`."""

    model: ModelOptions = ModelOptions()
    drafting: DraftOptions = DraftOptions()
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=MODEL,
            help="Positions of a prompt with its answer; every slot reserves them. Default: 4096, or all of the model.",
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        Option(
            "--served-model-name",
            metavar="NAME",
            rich_help_panel=MODEL,
            help="The model's name for clients. Default: that of the target's directory.",
        ),
    ] = None
    date: Annotated[
        str,
        Option(
            "--date",
            metavar="YYYY-MM-DD",
            rich_help_panel=MODEL,
            help="Today's date for templates that show it. Fixed by default, so that results do not drift.",
        ),
    ] = DEFAULT_DATE
    host: Annotated[
        str, Option("--host", metavar="ADDRESS", rich_help_panel=RUNNING, help="Address to listen on: this machine's.")
    ] = "127.0.0.1"
    port: Annotated[
        int, Option("--port", metavar="N", rich_help_panel=RUNNING, help="Port to listen on; 0: a free one.")
    ] = 8000
    slots: Annotated[int, Option("--slots", metavar="N", rich_help_panel=RUNNING, help="Requests decoded at once.")] = 4
    max_queue: Annotated[
        int,
        Option(
            "--max-queue",
            metavar="N",
            rich_help_panel=RUNNING,
            help="Requests that may wait for a slot; more are refused with status 429.",
        ),
    ] = 64
    max_body: Annotated[
        int, Option("--max-body", metavar="BYTES", rich_help_panel=RUNNING, help="Most bytes of a request.")
    ] = 4_000_000
    api_key_file: Annotated[
        Path | None,
        Option(
            "--api-key-file",
            metavar="FILE",
            rich_help_panel=RUNNING,
            help="Keys, one a line, of which a client must send one. Default: none is needed.",
        ),
    ] = None
    prefix_cache: PrefixCache = "auto"
    drain: Annotated[
        int,
        Option(
            "--drain",
            metavar="SECONDS",
            rich_help_panel=RUNNING,
            help="After SIGTERM or Ctrl-C, open answers may take this long to end.",
        ),
    ] = 30
    quiet: Annotated[
        bool, Option("--quiet", "-q", rich_help_panel=OUTPUT, help="No notes, no line for each request.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class InfoSettings:
    """The options of `info`."""

    directories: Annotated[
        tuple[str, ...], Argument(metavar="DIR", show_default=False, help="Target, drafter, or both.")
    ] = ()
    aux_layer_ids: AuxLayerIds = None


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The options of `bench`."""

    target: Annotated[
        str | None,
        Argument(metavar="TARGET", show_default=False, help="GPT-OSS checkpoint. Default: the demo's."),
    ] = None
    prompt_lengths: Annotated[
        str, Option("-p", "--prompt-lengths", metavar="N,N", help="Tokens of the prompts (pp); 0: no such test.")
    ] = "128,512"
    new_tokens: Annotated[
        str, Option("-n", "--new-tokens", metavar="N,N", help="Tokens to decode (tg); 0: no such test.")
    ] = "64"
    widths: Annotated[
        str, Option("-t", "--widths", metavar="T,T", help="Rows of a verify pass; 1 is always measured, too.")
    ] = "1,2,4,8"
    context: Annotated[
        int, Option("--context", metavar="N", help="Tokens in the caches when decoding and verifying start.")
    ] = 128
    slots: Annotated[
        str | None,
        Option(
            "--slots",
            metavar="N,N",
            help="Requests decoded at once. Several: decoding at each, and at 1; all else at 1. Default: 1.",
        ),
    ] = None
    batch: Batch = None
    num_speculative_tokens: Annotated[
        str | None,
        Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,K",
            rich_help_panel=SPECULATION,
            help="Decoding also with K drafts a step, all refused: what such a step costs over a plain one.",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        Option(
            "--drafter", metavar="DIR|ngram", rich_help_panel=MODEL, help="Its checkpoint, for -k. Default: the demo's."
        ),
    ] = None
    drafter_window: DrafterWindow = "auto"
    repeats: Annotated[int, Option("--repeats", metavar="R", help="Measurements of each test.")] = 5
    loading: LoadOptions = LoadOptions()
    json: Json = None
    markdown: Annotated[
        str | None,
        Option("--markdown", metavar="FILE|-", rich_help_panel=OUTPUT, help="The table, to be put into a text."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The options of `sweep`."""

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
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """The options of `report`."""

    runs: Annotated[tuple[Path, ...], Argument(metavar="RUN...", show_default=False, help="Folders of peagle sweep.")]
    out: Annotated[
        Path | None,
        Option(
            "--out",
            metavar="DIR",
            rich_help_panel=OUTPUT,
            help="New folder to write. Default: the run's own; several runs need one.",
        ),
    ] = None
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class ParitySettings:
    """The options of `parity`."""

    drafter: Annotated[
        str | None,
        Option("--drafter", metavar="DIR", rich_help_panel=MODEL, help="Its checkpoint. Default: the demo's."),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    drafter_window: DrafterWindow = "auto"
    model: ModelOptions = ModelOptions()
    prompts: Annotated[
        Path | None,
        Option("--prompts", metavar="FILE", rich_help_panel=PROMPT, help="Default: the demo's held-out prompts."),
    ] = None
    num_prompts: Annotated[
        int, Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="Of the file.")
    ] = 10
    strict: Strict = False
    render: Annotated[
        Literal["chat", "raw"],
        Option("--render", rich_help_panel=PROMPT, help="As you ask: chat template, or raw text."),
    ] = "chat"
    special_tokens: SpecialTokens = False
    num_speculative_tokens: Annotated[
        int, Option("-k", "--num-speculative-tokens", min=1, metavar="K", rich_help_panel=SPECULATION)
    ] = 5
    max_new_tokens: MeasuredTokens = 64
    reference_steps: Annotated[
        int,
        Option("--reference-steps", min=1, metavar="N", rich_help_panel=RUNNING, help="In float64: slow ones."),
    ] = 6
    json: Json = None
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The options of `data`."""

    prompt_file: Annotated[
        tuple[Path, ...],
        Option("--prompt-file", metavar="FILE.jsonl", rich_help_panel=PROMPT, help="JSON lines; repeatable."),
    ]
    out: OwnFolder
    num_prompts: Annotated[
        int | None, Option("--num-prompts", min=1, metavar="N", rich_help_panel=PROMPT, help="So many at most.")
    ] = None
    strict: Strict = False
    rendering: RenderingOptions = RenderingOptions()
    model: ModelOptions = ModelOptions()
    max_new_tokens: Annotated[
        int, Option("-n", "--max-new-tokens", metavar="N", rich_help_panel=RUNNING, help="Of an answer.")
    ] = 256
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="N",
            rich_help_panel=RUNNING,
            help="Prompt and answer together; a prompt that leaves no room is skipped. Default: what the model has.",
        ),
    ] = 512
    slots: Slots = None
    batch: Batch = None
    shard_prompts: Annotated[
        int, Option("--shard-prompts", metavar="N", rich_help_panel=OUTPUT, help="Prompts of a shard.")
    ] = 512
    hidden: Annotated[
        bool, Option("--hidden", rich_help_panel=OUTPUT, help="Keep the aux_hidden of every token, too (large).")
    ] = False
    top: Annotated[
        int,
        Option("--top", metavar="N", rich_help_panel=OUTPUT, help="Keep the target's N best after every token."),
    ] = 0
    taps: Taps = None
    sampling: SamplingOptions = SamplingOptions()
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Which drafter is trained. Fields are those of peagle.workflows.training.DrafterShape, as they were typed."""

    init: Annotated[
        str | None,
        Option("--init", metavar="DIR", rich_help_panel=DRAFTER, help="Begin with this drafter, its shape too."),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    autoregressive: Annotated[
        bool,
        Option("--autoregressive", rich_help_panel=DRAFTER, help="An EAGLE-3 drafter: a pass per draft. The baseline."),
    ] = False
    layers: Annotated[
        int | None, Option("--layers", min=1, rich_help_panel=DRAFTER, help="Default: 4; of EAGLE-3, 1.")
    ] = None
    hidden_size: Annotated[
        int | None, Option("--hidden-size", min=1, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None
    heads: Annotated[int | None, Option("--heads", min=1, rich_help_panel=DRAFTER, help="Default: the target's.")] = (
        None
    )
    kv_heads: Annotated[
        int | None, Option("--kv-heads", min=1, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None
    head_dim: Annotated[
        int | None, Option("--head-dim", min=2, rich_help_panel=DRAFTER, help="Default: the target's.")
    ] = None
    mlp_width: Annotated[
        int | None, Option("--mlp-width", min=1, rich_help_panel=DRAFTER, help="Default: twice the hidden size.")
    ] = None
    taps: Taps = None
    mask_token: Annotated[
        int | None,
        Option("--mask-token", metavar="ID", rich_help_panel=DRAFTER, help="Default: the highest id not in the data."),
    ] = None
    mask_hiddens: Annotated[
        int,
        Option("--mask-hiddens", min=1, metavar="N", rich_help_panel=DRAFTER, help="1: all mask slots share one."),
    ] = 1
    draft_vocab: Annotated[
        str | None,
        Option(
            "--draft-vocab",
            metavar="N|FILE",
            rich_help_panel=DRAFTER,
            help="Propose only the N tokens most frequent in the data, or those a file lists. Default: all.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The options of `train`."""

    data: Annotated[
        tuple[str, ...],
        Option(
            "--data",
            metavar="DIR[:SHARE]",
            rich_help_panel=DATA,
            help="What peagle data wrote; several, with their shares of a step's rows.",
        ),
    ]
    out: OwnFolder
    target: Target = None
    steps: Annotated[
        int | None,
        Option("--steps", min=1, rich_help_panel=LEARNING, help="So many; more than it has continue a folder's."),
    ] = None
    minutes: Annotated[
        float | None,
        Option(
            "--minutes",
            rich_help_panel=LEARNING,
            help="At most so long now, without evaluations; plans a new training's steps, by a measured one.",
        ),
    ] = None
    shape: ShapeOptions = ShapeOptions()
    rows: Annotated[int, Option("--rows", rich_help_panel=LEARNING, help="Of a step, over all devices.")] = 8
    width: Annotated[int, Option("--width", rich_help_panel=LEARNING, help="Tokens of a row.")] = 512
    depth: Annotated[
        int, Option("--depth", rich_help_panel=LEARNING, help="K_train: tokens ahead that are trained.")
    ] = 8
    ratio: Annotated[
        float, Option("--ratio", rich_help_panel=LEARNING, help="Of chains kept from depth to depth (COD).")
    ] = 0.8
    min_ratio: Annotated[float, Option("--min-ratio", rich_help_panel=LEARNING, help="Kept at least.")] = 0.2
    parts: Annotated[
        int, Option("--parts", rich_help_panel=LEARNING, help="Cut rows in so many: less memory, same gradient.")
    ] = 1
    loss: Annotated[
        Literal["half", "cross_entropy", "soft_cross_entropy", "kl"], Option("--loss", rich_help_panel=LEARNING)
    ] = "half"
    optimizer: Annotated[Literal["adamw", "muon"], Option("--optimizer", rich_help_panel=LEARNING)] = "adamw"
    learning_rate: Annotated[float, Option("--learning-rate", rich_help_panel=LEARNING)] = 1e-4
    other_rate: Annotated[
        float | None, Option("--other-rate", rich_help_panel=LEARNING, help="With muon: of all but matrices.")
    ] = None
    weight_decay: Annotated[float, Option("--weight-decay", rich_help_panel=LEARNING)] = 0.0
    warmup: Annotated[
        float, Option("--warmup", rich_help_panel=LEARNING, help="Part of the steps in which the rate rises.")
    ] = 0.0025
    decay: Annotated[
        float, Option("--decay", rich_help_panel=LEARNING, help="Part of the steps in which it falls.")
    ] = 1.0
    clip: Annotated[
        float | None, Option("--clip", min=0, rich_help_panel=LEARNING, help="Greatest length of a gradient.")
    ] = None
    freeze_embedding: Annotated[
        bool, Option("--freeze-embedding", rich_help_panel=LEARNING, help="Do not train it.")
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Option("--dtype", rich_help_panel=LEARNING, help="Of the arithmetic; weights are float32."),
    ] = "float32"
    seed: Annotated[int, Option("--seed", min=0, rich_help_panel=LEARNING)] = 0
    save_every: Annotated[
        int, Option("--save-every", min=1, metavar="STEPS", rich_help_panel=RUNNING, help="Between checkpoints.")
    ] = 100
    evaluate: Annotated[
        str | None,
        Option(
            "--evaluate",
            metavar="FILE.jsonl",
            rich_help_panel=RUNNING,
            help="Held-out prompts: the engine's own acceptance length on them.",
        ),
    ] = None
    evaluate_every: Annotated[
        int, Option("--evaluate-every", min=0, rich_help_panel=RUNNING, help="Steps between; 0: at the end only.")
    ] = 200
    evaluate_prompts: Annotated[int, Option("--evaluate-prompts", min=1, rich_help_panel=RUNNING)] = 20
    strict: Strict = False
    num_speculative_tokens: Annotated[
        int, Option("-k", "--num-speculative-tokens", min=1, rich_help_panel=RUNNING, help="K of the evaluation.")
    ] = 7
    dialect: Annotated[
        Literal["vllm", "speculators"],
        Option("--dialect", rich_help_panel=OUTPUT, help="Of the drafter that is written."),
    ] = "vllm"
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """The options of `export`."""

    drafter: Annotated[str, Argument(metavar="DRAFTER", help="Directory, of any dialect; or demo.")]
    out: NewFolder
    dialect: Annotated[
        Literal["vllm", "speculators"], Option("--dialect", rich_help_panel=OUTPUT, help="Whose layout to write.")
    ] = "vllm"
    verifier: Annotated[
        str | None,
        Option(
            "--verifier",
            metavar="NAME|DIR",
            rich_help_panel=OUTPUT,
            help="The target, as others are to find it; speculators needs it. A folder gives what the drafter lacks, "
            "too: positions, embedding, head.",
        ),
    ] = None
    aux_layer_ids: AuxLayerIds = None
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class RandomSettings:
    """The options of `random`."""

    size: Annotated[str, Argument(metavar="SIZE", show_default=False, help="tiny, S, M, L, 20b or 120b.")]
    directory: Annotated[Path, Argument(metavar="DIR", show_default=False, help="A new directory.")]
    unquantized: Annotated[bool, Option("--unquantized", help="Experts in bfloat16, not MXFP4.")] = False
    seed: Annotated[int, Option("--seed", metavar="N", help="Equal seeds give equal bytes.")] = 0


@dataclass(frozen=True, kw_only=True)
class FrequentTokensSettings:
    """The options of `frequent-tokens`."""

    files: Annotated[
        tuple[Path, ...],
        Argument(metavar="FILE...", show_default=False, help="Documents of --json, shards of peagle data."),
    ]
    out: Annotated[Path, Option("--out", metavar="FILE", show_default=False, help="The list to write.")]


def parse_bias(typed: str) -> tuple[int, float]:
    """Read (token id, value added to its logit) from "ID=VALUE". Raises InputError for anything else."""
    token, _, value = typed.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(f"--logit-bias is {typed!r}; expected ID=VALUE, a token id and a number: 13=-5") from None


def parse_layers(typed: str | None, option: str = "--aux-layer-ids") -> tuple[int, ...] | None:
    """Read layer numbers with commas between them. Raises InputError for anything else."""
    if typed is None:
        return None
    try:
        return tuple(int(part) for part in typed.split(","))
    except ValueError:
        raise InputError(f"{option} is {typed!r}; expected layers with commas between them, as 1,11,20") from None


def parse_prefix_cache(typed: str) -> int | None:
    """Read bytes, or None for auto. Raises InputError for anything else."""
    try:
        return None if typed == "auto" else parse_size(typed, "--prefix-cache")
    except InputError as error:
        raise InputError(f"{error}, or auto") from None


Given = TypeVar("Given", int, str)


def chosen_slots(slots: Given | None, batch: int | None, default: Given) -> Given:
    """Return --slots, or --batch, its old name, with one line about that. Raises InputError if both were given."""
    if batch is None:
        return default if slots is None else slots
    if slots is not None:
        raise InputError("--slots and --batch, its old name, are both given; expected --slots alone")
    say("warning", "--batch is now called --slots")
    return type(default)(batch)
