"""Declare options and groups of options that several commands share, and parse their values."""

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
        help="GPT-OSS checkpoint: a directory, or a name in the Hub's local cache. Default: demo.",
    ),
]
Download = Annotated[
    bool,
    Option(
        "--download",
        rich_help_panel=MODEL,
        help="Download checkpoints given as OWNER/NAME from the Hugging Face Hub if they are not in its local cache. "
        "Without it the network is never used.",
    ),
]
AuxLayerIds = Annotated[
    str | None,
    Option(
        "--aux-layer-ids",
        metavar="L,L,L",
        rich_help_panel=MODEL,
        help="Target layers (0-based) whose outputs the drafter reads. Default: from its config.json.",
    ),
]
Taps = Annotated[
    str | None,
    Option(
        "--taps",
        metavar="L,L,L",
        rich_help_panel=DRAFTER,
        help="Target layers (0-based) whose outputs the drafter reads. Default: 1, n/2 - 1, n - 4.",
    ),
]
Strict = Annotated[
    bool,
    Option(
        "--strict",
        rich_help_panel=PROMPT,
        help="Refuse a file that has an unusable row. Default: skip the row with a warning.",
    ),
]
SpecialTokens = Annotated[
    bool,
    Option(
        "--special-tokens",
        rich_help_panel=PROMPT,
        help="Parse special tokens in raw prompts. Default: read their spelling as text.",
    ),
]
Slots = Annotated[
    int | None,
    Option(
        "--slots",
        metavar="N",
        rich_help_panel=RUNNING,
        help="Most requests decoded at once. Default: 1; for data, 32.",
    ),
]
Batch = Annotated[int | None, Option("--batch", hidden=True)]  # the old name of --slots
MaxNewTokens = Annotated[
    int, Option("-n", "--max-new-tokens", metavar="N", rich_help_panel=RUNNING, help="Most tokens to generate.")
]
MeasuredTokens = Annotated[
    int, Option("-n", "--max-new-tokens", min=2, metavar="N", rich_help_panel=RUNNING, help="Most tokens to generate.")
]  # speeds need two tokens
NewFolder = Annotated[str, Option("--out", metavar="DIR", rich_help_panel=OUTPUT, help="New folder for the results.")]
OwnFolder = Annotated[
    str,
    Option(
        "--out",
        metavar="DIR",
        rich_help_panel=OUTPUT,
        help="Folder for the results; an unfinished run in it is resumed.",
    ),
]
Json = Annotated[
    str | None,
    Option(
        "--json",
        metavar="FILE|-",
        rich_help_panel=OUTPUT,
        help="Write all results as one JSON object; - writes it to standard output, and nothing else.",
    ),
]


def quiet_option(shown: str) -> Any:
    """Return the option --quiet; `shown` says what the command still prints, or no longer prints."""
    return Option("--quiet", "-q", rich_help_panel=OUTPUT, help=f"{shown}. Warnings and errors are still shown.")


PrefixCache = Annotated[
    str,
    Option(
        "--prefix-cache",
        metavar="SIZE|auto",
        rich_help_panel=RUNNING,
        help="Memory for reusing prompts and answers as prefixes of later prompts, such as 512MB or 2GB; 0 turns it "
        "off. auto: a tenth of the free memory if there are several requests.",
    ),
]
RetainFullKV = Annotated[
    bool,
    Option(
        "--retain-full-kv",
        rich_help_panel=RUNNING,
        help="Keep all positions in sliding-window layers, so that any shared prefix can be reused, not only one that "
        "ends with a chunk, a prompt or a turn. Takes more memory.",
    ),
]
DrafterWindow = Annotated[
    str,
    Option(
        "--drafter-window",
        metavar="N|auto|off",
        rich_help_panel=SPECULATION,
        help="Limit the drafter's attention to the last N positions, which helps acceptance after long prompts. "
        "auto: from its speculation.json or config.json.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """How prompts are prefilled: in chunks, or at once in blocks of rows."""

    prefill: Annotated[
        Literal["chunked", "blocked"],
        Option(
            "--prefill",
            rich_help_panel=RUNNING,
            help="chunked: prefill in chunks, between the steps of other requests. blocked: prefill a whole prompt "
            "in one pass, without prefix caching. Both give the same tokens.",
        ),
    ] = "chunked"
    query_blocks: Annotated[
        int | None,
        Option(
            "--query-blocks",
            metavar="N",
            rich_help_panel=RUNNING,
            help="For --prefill blocked: split attention queries into N blocks. More blocks take less memory. Default: "
            "blocks of 128 rows.",
        ),
    ] = None
    ffn_blocks: Annotated[
        int | None,
        Option(
            "--ffn-blocks",
            metavar="M",
            rich_help_panel=RUNNING,
            help="For --prefill blocked: split the rows of the experts into M blocks. More blocks take less memory "
            "and read the experts more often. Default: blocks of at most 2048 rows.",
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
    """How weights are loaded, and which kernels compute with them."""

    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option(
            "--dtype",
            rich_help_panel=MODEL,
            help="Data type of activations. Default: float32 on CPU, bfloat16 elsewhere.",
        ),
    ] = None
    experts: Annotated[
        Literal["auto", "packed", "expanded"],
        Option(
            "--experts",
            rich_help_panel=MODEL,
            help="packed: keep experts in MXFP4. expanded: dequantize them at load. auto: the fastest that fits.",
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "xla"],
        Option(
            "--kernels",
            rich_help_panel=MODEL,
            help="native: compiled CPU kernels, or an error. xla: XLA only. auto: native if they run here.",
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The devices that the target is sharded over, and its replicas."""

    mesh: Annotated[
        str | None,
        Option(
            "--mesh",
            metavar="tp=N,ep=N,dp=N",
            rich_help_panel=MODEL,
            help="Shard the target over tp x ep devices: tp splits heads and each expert, ep distributes the "
            "experts. dp: number of replicas, each on its own devices; they share the slots. Default: one device.",
        ),
    ] = None
    reduce: Annotated[
        Literal["ordered", "psum"],
        Option(
            "--reduce",
            rich_help_panel=MODEL,
            help="How devices add partial sums. ordered: in rank order, bitwise reproducible. psum: an all-reduce.",
        ),
    ] = "ordered"


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The processes whose devices form one mesh. All take the same options, except --process-id."""

    coordinator: Annotated[
        str | None,
        Option(
            "--coordinator",
            metavar="HOST:PORT",
            rich_help_panel=MODEL,
            help="Address at which process 0 listens for the others; PORT alone means this machine. --mesh then "
            "spans the devices of all processes. For trusted networks only.",
        ),
    ] = None
    process_id: Annotated[
        int | None,
        Option(
            "--process-id",
            metavar="I",
            rich_help_panel=MODEL,
            help="Rank of this process. Rank 0 runs the command; the others follow it.",
        ),
    ] = None
    num_processes: Annotated[
        int | None, Option("--num-processes", metavar="N", rich_help_panel=MODEL, help="Number of processes.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """The target, and how it is loaded."""

    target: Target = None
    download: Download = False


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """The drafter, and how many tokens it proposes."""

    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            metavar="DIR|ngram",
            rich_help_panel=MODEL,
            help="P-EAGLE or EAGLE-3 checkpoint; ngram looks drafts up in the text and needs no weights. Default: "
            "demo; demo-eagle3 is its EAGLE-3 drafter.",
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
            help="Draft tokens per step. auto: from the drafter's table by load, and none while drafting does not pay. "
            "Default on CPU: auto.",
        ),
    ] = None
    draft_vocab: Annotated[
        str | None,
        Option(
            "--draft-vocab",
            metavar="N|FILE",
            rich_help_panel=SPECULATION,
            help="Draft only the N most frequent tokens, or the ids in a JSON list: a cheaper head, lower acceptance.",
        ),
    ] = None
    drafter_window: DrafterWindow = "auto"


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """The variables of a chat template."""

    system: Annotated[
        str | None, Option("--system", metavar="TEXT", rich_help_panel=PROMPT, help="System message.")
    ] = None
    reasoning_effort: Annotated[
        Literal["low", "medium", "high"] | None,
        Option("--reasoning-effort", rich_help_panel=PROMPT, help="Reasoning effort, if the chat template has it."),
    ] = None
    date: Annotated[
        str,
        Option(
            "--date",
            metavar="YYYY-MM-DD",
            rich_help_panel=PROMPT,
            help="Date for chat templates that show it. Fixed by default, so that results are reproducible.",
        ),
    ] = DEFAULT_DATE

    def rendering(self) -> Rendering:
        """Return how prompts become token ids. Raises InputError for options that exclude each other."""
        return Rendering(system=self.system, reasoning_effort=self.reasoning_effort, date=self.date)


@dataclass(frozen=True, kw_only=True)
class RenderingOptions(TemplateOptions):
    """How prompts become token ids: with the chat template, or raw."""

    raw_prompt: Annotated[
        bool,
        Option(
            "--raw-prompt",
            rich_help_panel=PROMPT,
            help="Continue the text without the chat template. Lowers acceptance.",
        ),
    ] = False
    special_tokens: SpecialTokens = False

    def rendering(self) -> Rendering:
        return Rendering(self.raw_prompt, self.system, self.reasoning_effort, self.date, self.special_tokens)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are sampled, in every command that generates."""

    temperature: Annotated[
        float,
        Option(
            "--temperature",
            metavar="T",
            rich_help_panel=SAMPLING,
            help="Sampling temperature; 0 is greedy decoding.",
        ),
    ] = 0.0
    top_k: Annotated[
        int,
        Option("--top-k", metavar="N", rich_help_panel=SAMPLING, help="Sample from the N most likely tokens; 0: all."),
    ] = 0
    top_p: Annotated[
        float,
        Option(
            "--top-p",
            metavar="P",
            rich_help_panel=SAMPLING,
            help="Sample from the most likely tokens with total probability P; 1: all.",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(
            "--min-p",
            metavar="P",
            rich_help_panel=SAMPLING,
            help="Drop tokens less likely than P times the most likely one; 0: none.",
        ),
    ] = 0.0
    seed: Annotated[
        int,
        Option(
            "--seed",
            metavar="S",
            rich_help_panel=SAMPLING,
            help="Seed of sampling; the same seed gives the same tokens.",
        ),
    ] = 0
    presence_penalty: Annotated[
        float,
        Option(
            "--presence-penalty",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="Subtract X from the logits of generated tokens.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            "--frequency-penalty",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="Subtract X from a token's logit for each time it was generated.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            "--repetition-penalty",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="Divide positive logits of tokens in the prompt and output by X, multiply negative ones; 1: off.",
        ),
    ] = 1.0
    logit_bias: Annotated[
        tuple[str, ...],
        Option(
            "--logit-bias", metavar="ID=X", rich_help_panel=SAMPLING, help="Add X to the logit of token ID. Repeatable."
        ),
    ] = ()
    min_tokens: Annotated[
        int,
        Option(
            "--min-tokens",
            metavar="N",
            rich_help_panel=SAMPLING,
            help="Generate at least N tokens before a stop token.",
        ),
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
