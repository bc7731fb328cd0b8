"""Options and groups of options that several commands share, and how their values are read."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from typer import Option

from peagle.cli.output import say
from peagle.config import SamplingParams, read_bias
from peagle.ops.errors import InputError
from peagle.ops.row_blocks import BlockedPrefill
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import DEFAULT_DATE

# the groups of a command's help
PROMPT, MODEL, SPECULATION, SAMPLING = "Prompt", "Target and drafter", "Speculation", "Sampling"
ENGINE, MACHINE, SERVER, RUNNING, OUTPUT = "Engine", "Machine", "Server", "Run", "Output"
DRAFTER, LEARNING, DATA, PLAN = "Drafter", "Training", "Data", "Memory plan"

Target = Annotated[
    str | None,
    Option(
        "--target",
        metavar="DIR|OWNER/NAME",
        rich_help_panel=MODEL,
        help="GPT-OSS checkpoint: a directory, or a Hugging Face name. Default: the demo target.",
    ),
]
Download = Annotated[
    bool,
    Option(
        "--download",
        rich_help_panel=MODEL,
        help="Download checkpoints named OWNER/NAME from the Hugging Face Hub unless they are in its local cache. "
        "Without it, nothing is downloaded.",
    ),
]
AuxLayerIds = Annotated[
    str | None,
    Option(
        "--aux-layer-ids",
        metavar="L,L,L",
        rich_help_panel=MODEL,
        help="Target layers (0-based) whose outputs the drafter reads. Default: as in the drafter's config.json.",
    ),
]
Taps = Annotated[
    str | None,
    Option(
        "--taps",
        metavar="L,L,L",
        rich_help_panel=DRAFTER,
        help="Target layers (0-based) whose outputs a new drafter reads. Default: 1, n/2 - 1 and n - 4 of n layers.",
    ),
]
Strict = Annotated[
    bool,
    Option(
        "--strict",
        rich_help_panel=PROMPT,
        help="Fail on a row of a prompt file that cannot be used, instead of skipping it with a note.",
    ),
]
SpecialTokens = Annotated[
    bool,
    Option(
        "--special-tokens",
        rich_help_panel=PROMPT,
        help="In a raw prompt, encode the spelling of a special token as that token.",
    ),
]
Batch = Annotated[int | None, Option("--batch", hidden=True)]  # the old name of --slots
MaxNewTokens = Annotated[
    int,
    Option("-n", "--max-new-tokens", metavar="N", rich_help_panel=SAMPLING, help="Maximum tokens of a response."),
]
MeasuredTokens = Annotated[
    int,
    Option("-n", "--max-new-tokens", min=2, metavar="N", rich_help_panel=RUNNING, help="Maximum tokens of a response."),
]  # speeds need two tokens
NewFolder = Annotated[
    str, Option("--out", metavar="DIR", rich_help_panel=OUTPUT, help="Output directory; it must not exist yet.")
]
OwnFolder = Annotated[
    str,
    Option("--out", metavar="DIR", rich_help_panel=OUTPUT, help="Output directory; the same command resumes it."),
]
Json = Annotated[
    str | None,
    Option(
        "--json",
        metavar="FILE|-",
        rich_help_panel=OUTPUT,
        help="Write all results as one JSON object; -: to standard output, and nothing else there.",
    ),
]


def prompt_file_option(summary: str) -> Any:
    """Return the option for files of prompts, which has two names in every command that reads them."""
    return Option("--prompt-file", "--prompts", metavar="FILE", rich_help_panel=PROMPT, help=summary)


def slots_option(default: int) -> Any:
    """Return the option --slots of a command that also takes --batch, so that None means the default."""
    summary = f"Requests decoded at once (continuous batching). Default: {default}."
    return Option("--slots", metavar="N", rich_help_panel=ENGINE, help=summary)


def quiet_option(hidden: str) -> Any:
    """Return the option --quiet of a command; `hidden` says what it does not print then."""
    return Option("--quiet", "-q", rich_help_panel=OUTPUT, help=f"{hidden}. Warnings and errors are still printed.")


def kv_memory_option(auto: str) -> Any:
    """Return the option --kv-memory of a command; `auto` says what that comes to."""
    return Option(
        "--kv-memory",
        metavar="SIZE|auto",
        rich_help_panel=ENGINE,
        help="Memory for the keys and values of all requests together, such as 4GB; requests that need more wait. "
        f"auto: {auto}.",
    )


def prefix_cache_option(auto: str) -> Any:
    """Return the option --prefix-cache of a command; `auto` says what that comes to."""
    return Option(
        "--prefix-cache",
        metavar="on|off|SIZE",
        rich_help_panel=ENGINE,
        help="Keep the keys and values of prompts and responses for later prompts that begin with them. SIZE: in so "
        "much more memory, such as 512MB. on: up to a tenth of the free memory; with --kv-memory SIZE, in what "
        f"requests leave of it. {auto}",
    )


KVMemory = Annotated[str, kv_memory_option("the context of every slot, of which 8192 positions count at most")]
PrefixCache = Annotated[str, prefix_cache_option("Default: on, off for a single request.")]
KeptPrefixes = Annotated[str, prefix_cache_option("Default: on.")]
RetainFullKV = Annotated[
    bool,
    Option(
        "--retain-full-kv",
        rich_help_panel=ENGINE,
        help="Keep all positions in sliding-window layers: more memory, but a prompt reuses any cached prefix, not "
        "only one up to the end of a chunk, prompt or turn.",
    ),
]
DrafterWindow = Annotated[
    str,
    Option(
        "--drafter-window",
        metavar="N|auto|off",
        rich_help_panel=SPECULATION,
        help="Sliding window of the drafter's attention, in positions: keeps acceptance up after long prompts. auto: "
        "from its speculation.json or config.json.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """How a prompt is prefilled: in chunks, or in one pass in blocks of rows."""

    prefill: Annotated[
        Literal["chunked", "blocked"],
        Option(
            "--prefill",
            metavar="MODE",
            rich_help_panel=ENGINE,
            help="chunked: alternate chunks with decoding steps; blocked: the whole prompt in one pass. Both start "
            "after a cached prefix, and the tokens are the same.",
        ),
    ] = "chunked"
    query_blocks: Annotated[
        int | None,
        Option(
            "--query-blocks",
            metavar="N",
            rich_help_panel=ENGINE,
            help="With --prefill blocked: split attention over the prompt into N blocks of rows; more blocks take less "
            "memory. Default: blocks of 128 rows.",
        ),
    ] = None
    ffn_blocks: Annotated[
        int | None,
        Option(
            "--ffn-blocks",
            metavar="M",
            rich_help_panel=ENGINE,
            help="With --prefill blocked: split the expert layers into M blocks of rows; more blocks take less memory "
            "and read each expert more often. Default: blocks of at most 2048 rows.",
        ),
    ] = None

    def blocked(self) -> BlockedPrefill | None:
        """Return the blocks, None for chunks. Raises InputError for blocks of a prompt that is read in chunks."""
        if self.prefill == "blocked":
            return BlockedPrefill(self.query_blocks, self.ffn_blocks)
        for name, number in (("--query-blocks", self.query_blocks), ("--ffn-blocks", self.ffn_blocks)):
            if number is not None:
                raise InputError(f"{name} is given, but prompts are prefilled in chunks; give --prefill blocked, too")
        return None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How weights are loaded and computed with."""

    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option(
            "--dtype",
            metavar="DTYPE",
            rich_help_panel=MACHINE,
            help="Compute in float32 or bfloat16. Default: float32 on CPU, bfloat16 elsewhere.",
        ),
    ] = None
    experts: Annotated[
        Literal["auto", "packed", "expanded"],
        Option(
            "--experts",
            metavar="LAYOUT",
            rich_help_panel=MACHINE,
            help="packed: keep MXFP4 in memory; expanded: dequantise at load; auto: the fastest that fits.",
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "xla"],
        Option(
            "--kernels",
            metavar="KIND",
            rich_help_panel=MACHINE,
            help="native: the compiled kernels, or an error; xla: XLA's own code; auto: native if they run here.",
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
            rich_help_panel=MACHINE,
            help="Shard the target over tp x ep devices: heads, caches and vocabulary over all, each expert over tp, "
            "the set of experts over ep. dp: that many replicas, each on its own devices, share the slots. "
            "Default: one device.",
        ),
    ] = None
    reduce: Annotated[
        Literal["ordered", "psum"],
        Option(
            "--reduce",
            metavar="HOW",
            rich_help_panel=MACHINE,
            help="How devices sum. ordered: in rank order, so that verifying equals decoding bit for bit; psum: "
            "all-reduce.",
        ),
    ] = "ordered"


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The processes whose devices make one mesh. All take the same options except --process-id."""

    coordinator: Annotated[
        str | None,
        Option(
            "--coordinator",
            metavar="HOST:PORT",
            rich_help_panel=MACHINE,
            help="Address at which process 0 waits for the others; PORT alone: this machine. --mesh then spans the "
            "devices of all processes. Trusted networks only.",
        ),
    ] = None
    process_id: Annotated[
        int | None,
        Option(
            "--process-id",
            metavar="I",
            rich_help_panel=MACHINE,
            help="This process's rank. Rank 0 runs the command; the others follow.",
        ),
    ] = None
    num_processes: Annotated[
        int | None,
        Option("--num-processes", metavar="N", rich_help_panel=MACHINE, help="Number of processes, 2 or more."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which target."""

    target: Target = None
    download: Download = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions, TargetOptions):
    """Which target, and how it is loaded."""


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Which drafter, and how many tokens it proposes."""

    drafter: Annotated[
        str | None,
        Option(
            "--drafter",
            metavar="DIR|ngram",
            rich_help_panel=MODEL,
            help="P-EAGLE or EAGLE-3 checkpoint; ngram: prompt lookup, without weights; demo-eagle3: the demo's "
            "autoregressive drafter. Default: the demo drafter.",
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
            help="Tokens drafted per step (K). auto: by the number of active requests, from the drafter's "
            "speculation.json, and none while drafting does not pay. Default: auto on CPU, elsewhere the largest K of "
            "that table.",
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
    """What a chat template is filled with."""

    system: Annotated[
        str | None, Option("--system", metavar="TEXT", rich_help_panel=PROMPT, help="System message.")
    ] = None
    reasoning_effort: Annotated[
        Literal["low", "medium", "high"] | None,
        Option(
            "--reasoning-effort",
            metavar="LEVEL",
            rich_help_panel=PROMPT,
            help="low, medium or high, if the chat template has it. Default: the template's.",
        ),
    ] = None
    date: Annotated[
        str,
        Option(
            "--date",
            metavar="YYYY-MM-DD",
            rich_help_panel=PROMPT,
            help="Current date for chat templates that show it; fixed, so that results are reproducible.",
        ),
    ] = DEFAULT_DATE

    def rendering(self) -> Rendering:
        """Return how prompts become token ids. Raises InputError for options that exclude each other."""
        return Rendering(system=self.system, reasoning_effort=self.reasoning_effort, date=self.date)


@dataclass(frozen=True, kw_only=True)
class RenderingOptions(TemplateOptions):
    """How prompts become token ids: by the chat template, or as plain text."""

    raw_prompt: Annotated[
        bool,
        Option(
            "--raw-prompt",
            rich_help_panel=PROMPT,
            help="Continue the prompt as plain text, without the chat template: acceptance is lower.",
        ),
    ] = False
    special_tokens: SpecialTokens = False

    def rendering(self) -> Rendering:
        return Rendering(self.raw_prompt, self.system, self.reasoning_effort, self.date, self.special_tokens)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are sampled, in all commands that generate."""

    temperature: Annotated[
        float,
        Option(
            "--temperature",
            metavar="T",
            rich_help_panel=SAMPLING,
            help="Sampling temperature; below 1e-5: greedy.",
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
            help="Sample from the most likely tokens with a cumulative probability of P; 1: all.",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(
            "--min-p",
            metavar="P",
            rich_help_panel=SAMPLING,
            help="Minimum probability of a token relative to the most likely one; 0: off.",
        ),
    ] = 0.0
    seed: Annotated[int, Option("--seed", metavar="S", rich_help_panel=SAMPLING, help="Random seed for sampling.")] = 0
    presence_penalty: Annotated[
        float,
        Option(
            "--presence-penalty",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="Subtract X (-2 to 2) from the logits of tokens already generated.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            "--frequency-penalty",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="Subtract X (-2 to 2) from a token's logit for each time it was generated.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            "--repetition-penalty",
            metavar="X",
            rich_help_panel=SAMPLING,
            help="Divide positive logits of tokens in the prompt or response by X, multiply negative ones; 1: off.",
        ),
    ] = 1.0
    logit_bias: Annotated[
        tuple[str, ...],
        Option(
            "--logit-bias",
            metavar="ID=X",
            rich_help_panel=SAMPLING,
            help="Add X to the logit of token ID; repeatable.",
        ),
    ] = ()
    min_tokens: Annotated[
        int,
        Option(
            "--min-tokens",
            metavar="N",
            rich_help_panel=SAMPLING,
            help="Allow no stop token before N tokens are generated.",
        ),
    ] = 0

    def params(self) -> SamplingParams:
        """Return what the engine reads. Raises InputError for values out of range."""
        return SamplingParams(**{**vars(self), "logit_bias": tuple(read_bias(each) for each in self.logit_bias)})


def parse_layers(typed: str | None, option: str = "--aux-layer-ids") -> tuple[int, ...] | None:
    """Read layer numbers with commas between them. Raises InputError for anything else."""
    if typed is None:
        return None
    try:
        return tuple(int(part) for part in typed.split(","))
    except ValueError:
        raise InputError(f"{option} is {typed!r}; expected layers with commas between them, as 1,11,20") from None


Given = TypeVar("Given", int, str)


def chosen_slots(slots: Given | None, batch: int | None, default: Given) -> Given:
    """Return --slots, or --batch, its old name, with a warning. Raises InputError if both are given."""
    if batch is None:
        return default if slots is None else slots
    if slots is not None:
        raise InputError("--slots and --batch are both given; --batch is the old name of --slots: leave it out")
    say("warning", "--batch is now called --slots")
    return type(default)(batch)
