"""Options and groups of options that several commands share, and how their values are read."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from typer import Option

from peagle.cli.output import say
from peagle.engine.request import SamplingParams
from peagle.ops.errors import InputError
from peagle.ops.row_blocks import BlockedPrefill
from peagle.ops.sizes import parse_size
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import DEFAULT_DATE

PROMPT, MODEL, SPECULATION, SAMPLING = "Prompt", "Model", "Speculation", "Sampling"
RUNNING, OUTPUT, DRAFTER, LEARNING, DATA, MESH = "Running", "Output", "Drafter", "Learning", "Data", "Mesh"

Target = Annotated[
    str | None,
    Option(
        "--target",
        metavar="DIR|OWNER/NAME",
        rich_help_panel=MODEL,
        help="GPT-OSS checkpoint. Default: the demo's.",
    ),
]
Download = Annotated[
    bool,
    Option(
        "--download",
        rich_help_panel=MODEL,
        help="Fetch checkpoints that are named OWNER/NAME from the Hugging Face Hub, as far as its local cache lacks "
        "them: weights in safetensors, configuration, tokenizer. Else the network is never used.",
    ),
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


def quiet_option(shown: str) -> Any:
    """Return the option --quiet of a command; `shown` says what still is, or what is not."""
    return Option("--quiet", "-q", rich_help_panel=OUTPUT, help=f"{shown}. Warnings and errors are always shown.")


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
RetainFullKV = Annotated[
    bool,
    Option(
        "--retain-full-kv",
        rich_help_panel=RUNNING,
        help="Layers with a window keep all positions: more memory, and prompts reuse any beginning that they share "
        "with the prefix cache, not only up to ends of chunks, prompts and turns.",
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
class PrefillOptions:
    """How a prompt is read: in chunks, or at once in blocks of rows."""

    prefill: Annotated[
        Literal["chunked", "blocked"],
        Option(
            "--prefill",
            rich_help_panel=RUNNING,
            help="chunked: in turns with the steps of others, and from known beginnings; blocked: a whole prompt in "
            "one pass. The same tokens.",
        ),
    ] = "chunked"
    query_blocks: Annotated[
        int | None,
        Option(
            "--query-blocks",
            metavar="N",
            rich_help_panel=RUNNING,
            help="Of --prefill blocked: attention takes the padded context in N blocks. More: less memory. Default: of "
            "128 rows.",
        ),
    ] = None
    ffn_blocks: Annotated[
        int | None,
        Option(
            "--ffn-blocks",
            metavar="M",
            rich_help_panel=RUNNING,
            help="Of --prefill blocked: experts take it in M blocks. More: less memory, and each expert is read more "
            "often. Default: of at most 2048 rows.",
        ),
    ] = None

    def blocked(self) -> BlockedPrefill | None:
        """Return the blocks, None for chunks. Raises InputError for blocks of a prompt that is read in chunks."""
        if self.prefill == "blocked":
            return BlockedPrefill(self.query_blocks, self.ffn_blocks)
        for name, number in (("--query-blocks", self.query_blocks), ("--ffn-blocks", self.ffn_blocks)):
            if number is not None:
                raise InputError(f"{name} is given, but prompts are read in chunks; give --prefill blocked, too")
        return None


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
class MeshOptions:
    """The devices that the target is cut over, and its replicas."""

    mesh: Annotated[
        str | None,
        Option(
            "--mesh",
            metavar="tp=N,ep=N,dp=N",
            rich_help_panel=MODEL,
            help="Cut the target over tp x ep devices: heads, caches and vocabulary over all of them, each expert over "
            "tp, the experts by number over ep. dp: that many copies, on devices of their own, share the slots. "
            "Default: one device.",
        ),
    ] = None
    reduce: Annotated[
        Literal["ordered", "psum"],
        Option(
            "--reduce",
            rich_help_panel=MODEL,
            help="How devices sum: ordered, by which verifying equals decoding bit for bit, or psum, an all-reduce.",
        ),
    ] = "ordered"


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The processes whose devices make one mesh. All are given the same options but for --process-id."""

    coordinator: Annotated[
        str | None,
        Option(
            "--coordinator",
            metavar="HOST:PORT",
            rich_help_panel=MODEL,
            help="Where process 0 of several listens for the others; PORT alone: on this machine. --mesh goes over the "
            "devices of all. Trusted networks only.",
        ),
    ] = None
    process_id: Annotated[
        int | None,
        Option(
            "--process-id",
            metavar="I",
            rich_help_panel=MODEL,
            help="Which of them this one is, from 0. Process 0 speaks to people, the others follow it.",
        ),
    ] = None
    num_processes: Annotated[
        int | None, Option("--num-processes", metavar="N", rich_help_panel=MODEL, help="How many there are.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """Which target, and how it is loaded."""

    target: Target = None
    download: Download = False


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
