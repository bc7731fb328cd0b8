"""Every setting of the system, declared and checked once. Without JAX.

SamplingParams: how tokens are sampled. LoadConfig: which models, and how they are loaded. EngineConfig: how requests
are decoded. Each is a group of command-line options, of keyword arguments in Python and of keys in configuration files.
The docstring below a field is the help of its flag.
"""

import dataclasses
import functools
import itertools
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

from peagle.base.errors import InputError, meant
from peagle.base.flag import (
    ENGINE,
    MACHINE,
    MODEL,
    OUTPUT,
    SAMPLING,
    SPECULATION,
    Flag,
    check_least,
    check_type,
    layers_reader,
)
from peagle.base.sizes import parse_size

SMALLEST_SEED, LARGEST_SEED = -(2**63), 2**64 - 1  # 64 bits, signed or unsigned, as OpenAI and vLLM take them
MOST_BIASES = 300  # per slot; the limit of OpenAI's API
GREEDY_BELOW = 1e-5  # temperature; at 1e-5 the smallest difference of two float32 logits near 10 becomes 0.1
HOTTEST = 1e30  # temperature; float32 holds it and its reciprocal, by which XLA multiplies
LARGEST_PENALTY = 2.0  # presence and frequency, as in OpenAI's API
LARGEST_BIAS = 1e9
DEFAULT_CHUNK, GPU_CHUNK = 128, 2048  # prompt tokens per prefill pass; a GPU multiplies more rows in the same time
MOST_SLOTS = 1 << 16  # more than any memory holds
MAX_NUM_DRAFTS = 128  # no acceptance length outweighs a wider pass
MOST_LOGPROBS = 20  # log-probabilities of the likeliest tokens; the limit of OpenAI's API
MOST_STOP_STRINGS, LONGEST_STOP_STRING = 64, 1024  # characters
DEFAULT_DRAFTS = 7  # most of a step of K "auto", if the drafter's folder does not say it
AUTO: Literal["auto"] = "auto"  # as K: verify drafts that are likely enough to save time (peagle.engine.auto)
NumDrafts = int | str | None  # K as users say it (`Drafts.parse`)
DtypeName = Literal["float32", "bfloat16"]
ExpertsChoice = Literal["auto", "packed", "expanded"]
KernelsChoice = Literal["auto", "native", "xla"]
Reduction = Literal["ordered", "psum"]
PrefixCacheSize: TypeAlias = int | Literal["on", "off"]  # bytes; on: `peagle.Pair.engine_config` chooses them


def read_bias(typed: str) -> tuple[int, float]:
    """Read (token id, value added to its logit) from ID=VALUE. Raises InputError for anything else."""
    token, _, value = typed.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        message = f"logit_bias is {typed!r}; expected ID=VALUE, a token id and a number: 13=-5"
        raise InputError(message, "logit_bias") from None


@dataclass(frozen=True)
class Drafts:
    """K, parsed: the most tokens that a step drafts, and whether steps choose how many (peagle.engine.auto)."""

    num_drafts: int
    adaptive: bool = False

    @classmethod
    def parse(cls, k: NumDrafts, default: int = 0) -> "Drafts":
        """Parse a number, auto or auto:N. default: N of auto and None. Raises InputError for anything else."""
        if isinstance(k, int):
            check_num_drafts(k)
            return cls(k)
        auto, colon, most = (AUTO if k is None else k).partition(":")
        if auto != AUTO or (colon and not (most.isascii() and most.removeprefix("-").isdecimal())):
            message = f"K is {k!r}; expected a number of drafted tokens, auto, or auto:N for at most N of them"
            raise InputError(message, "num_speculative_tokens")
        if colon and not 1 <= int(most) <= MAX_NUM_DRAFTS:
            message = f"K is {k!r}; expected auto:N, N from 1 to {MAX_NUM_DRAFTS}: the most drafted tokens of a step"
            raise InputError(message, "num_speculative_tokens")
        return cls(int(most) if colon else default, adaptive=True)


def read_num_drafts(typed: str) -> NumDrafts:
    """Read K: a number, auto or auto:N. Raises InputError for anything else."""
    try:
        return int(typed)
    except ValueError:
        Drafts.parse(typed)
        return typed


def _reader(name: str, words: Mapping[str, Any], read: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """Make the reader of a setting: one of the words, which stand for these values, or what `read` takes."""

    def read_setting(typed: str) -> Any:
        try:
            return words[typed] if typed in words else read(typed)
        except ValueError:
            raise InputError(f"{name} is {typed!r}; expected {expected}", name) from None

    return read_setting


_read_bytes = functools.partial(parse_size, option="")
read_prefill_chunk = _reader("prefill_chunk", {"all": "all"}, int, "a number of tokens, or all, for a whole prompt")
read_kv_memory = _reader("kv_memory", {AUTO: None}, _read_bytes, "a size, as 512MB or 2GB, or auto")
read_prefix_cache = _reader(
    "prefix_cache", {"on": "on", "off": "off"}, _read_bytes, "a size, as 512MB or 2GB, or on, or off"
)


def check_num_drafts(k: int, plain: bool = True) -> None:
    """Raise InputError for an impossible K. plain: K = 0 is possible."""
    if not (0 if plain else 1) <= k <= MAX_NUM_DRAFTS:
        least = "0 (plain decoding)" if plain else "1"
        message = f"K is {k}; expected {least} to {MAX_NUM_DRAFTS} drafted tokens"
        raise InputError(message, "num_speculative_tokens")


def check_block(num_drafts: int, block_drafts: int | None, drafter: str = "the drafter") -> None:
    """Raise InputError for more drafts than a DFlash block has. block_drafts None: any number is possible."""
    if block_drafts is not None and num_drafts > block_drafts:
        raise InputError(
            f"K is {num_drafts}; expected at most {block_drafts}, since a block of {drafter} has {block_drafts + 1} "
            f"rows, the pending token and {block_drafts} drafts: lower -k",
            "num_speculative_tokens",
        )


def check_rates(rates: tuple[float, ...] | None, num_drafts: int) -> None:
    """Raise InputError for rates of synthetic acceptance that are impossible or too few."""
    if rates is None:
        return
    if any(not 0 <= after <= before for before, after in itertools.pairwise((1.0, *rates))):
        raise InputError(
            f"synthetic acceptance is {list(rates)}; expected rates from 0 to 1, none larger than the one before: each "
            "is a share of all steps",
            "synthetic_acceptance",
        )
    if len(rates) < num_drafts:
        raise InputError(
            f"synthetic acceptance has {len(rates)} rates for K = {num_drafts}; expected one for each draft",
            "synthetic_acceptance",
        )


def configs_of(options: Mapping[str, Any], *kinds: type[Any]) -> list[Any]:
    """Make one config per kind from keyword arguments; lists become tuples.

    Raises InputError for a name that is no field, and for a value of another type.
    """
    names = {field.name: kind for kind in kinds for field in dataclasses.fields(kind) if field.init}
    values: dict[type[Any], dict[str, Any]] = {kind: {} for kind in kinds}
    for name, value in options.items():
        if name not in names:
            hint = f"did you mean {close}?" if (close := meant(name, names)) else f"expected one of {', '.join(names)}"
            raise InputError(f"{name} is not an option; {hint}", name)
        value = _plain(value)
        check_type(name, value, field_types(names[name])[name])  # type: ignore[arg-type]  # a class has a hash
        values[names[name]][name] = value
    return [kind(**values[kind]) for kind in kinds]


def _plain(value: Any) -> Any:
    """Return a list as a tuple, and a NumPy number as a Python number."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


@functools.cache
def field_types(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Everything acts on the target's logits, before acceptance: min_tokens, biases and penalties
    (peagle.engine.step.adjust), then temperature, top-k, top-p, min-p. Random numbers depend only on (seed, the
    request's index, position), never on other requests, slot or time.
    """

    temperature: Annotated[float, Flag(SAMPLING, "T")] = 0.0
    """Sampling temperature; below 1e-5: greedy."""
    top_k: Annotated[int, Flag(SAMPLING, "N")] = 0
    """Sample from the N most likely tokens; 0: all."""
    top_p: Annotated[float, Flag(SAMPLING, "P")] = 1.0
    """Sample from the most likely tokens of total probability P; 1: all."""
    min_p: Annotated[float, Flag(SAMPLING, "P")] = 0.0
    """Least probability relative to the most likely token's; 0: off."""
    seed: Annotated[int, Flag(SAMPLING, "S")] = 0
    """Random seed for sampling."""
    presence_penalty: Annotated[float, Flag(SAMPLING, "X")] = 0.0
    """Subtract X (-2 to 2) from logits of generated tokens."""
    frequency_penalty: Annotated[float, Flag(SAMPLING, "X")] = 0.0
    """The same for each time that a token was generated."""
    repetition_penalty: Annotated[float, Flag(SAMPLING, "X")] = 1.0
    """Divide positive logits of used tokens by X, multiply negative ones."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], Flag(SAMPLING, "ID=X", read=read_bias)] = ()
    """Add X to the logit of token ID; repeatable."""
    min_tokens: Annotated[int, Flag(SAMPLING, "N")] = 0
    """Allow no stop token or string before N tokens."""

    def __post_init__(self) -> None:
        smallest, largest, penalty = 1 / HOTTEST, HOTTEST, LARGEST_PENALTY
        penalties = f"a number from {-penalty:g} to {penalty:g}"
        greedy_or_hotter = f"a number between 0 (greedy) and {largest:g}"
        bits = f"an integer of 64 bits, {SMALLEST_SEED}..{LARGEST_SEED}"
        off_at_1 = f"a number from {smallest:g} to {largest:g} (1 is off)"
        for name, label, valid, expected in (
            ("temperature", "temperature is", 0 <= self.temperature <= largest, greedy_or_hotter),
            ("top_k", "top-k is", 0 <= self.top_k < 2**31, "0 (off) or more"),
            ("top_p", "top-p is", 0 < self.top_p <= 1, "a number above 0 and at most 1 (off)"),
            ("min_p", "min-p is", 0 <= self.min_p <= 1, "a number from 0 (off) to 1"),
            ("seed", "seed is", SMALLEST_SEED <= self.seed <= LARGEST_SEED, bits),
            ("presence_penalty", "presence penalty is", abs(self.presence_penalty) <= penalty, penalties),
            ("frequency_penalty", "frequency penalty is", abs(self.frequency_penalty) <= penalty, penalties),
            ("repetition_penalty", "repetition penalty is", smallest <= self.repetition_penalty <= largest, off_at_1),
            ("min_tokens", "min tokens are", 0 <= self.min_tokens < 2**31, "0 (off) or more"),
        ):
            if not valid:
                raise InputError(f"{label} {getattr(self, name)}; expected {expected}", name)
        if len(self.logit_bias) > MOST_BIASES:
            raise InputError(
                f"logit bias is set for {len(self.logit_bias)} tokens; expected at most {MOST_BIASES}", "logit_bias"
            )
        tokens = [token for token, _ in self.logit_bias]
        if twice := [token for token in tokens if tokens.count(token) > 1]:
            raise InputError(f"logit bias is set twice for token {twice[0]}; expected one value", "logit_bias")
        for token, value in self.logit_bias:
            if token < 0 or not -LARGEST_BIAS <= value <= LARGEST_BIAS:
                raise InputError(
                    f"logit bias is {value} for token {token}; expected a token id of 0 or more and a number from "
                    f"{-LARGEST_BIAS:g} to {LARGEST_BIAS:g}",
                    "logit_bias",
                )

    @property
    def adjusts(self) -> bool:
        """Whether `peagle.engine.step.adjust` changes the target's logits."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.logit_bias)
            or self.min_tokens > 0
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def check_stop_strings(stop: tuple[str, ...]) -> None:
    """Raise InputError for stop strings that are empty, not Unicode text, too long or too many."""
    if len(stop) > MOST_STOP_STRINGS:
        raise InputError(
            f"{len(stop)} stop strings are given; expected at most {MOST_STOP_STRINGS}: leave some out", "stop"
        )
    for number, text in enumerate(stop, 1):
        which = f"stop string {number} of {len(stop)}"
        if not text:
            raise InputError(f"{which} is empty; expected a character or more: leave it out", "stop")
        if len(text) > LONGEST_STOP_STRING:
            raise InputError(
                f"{which} has {len(text)} characters; expected at most {LONGEST_STOP_STRING}: give only its beginning",
                "stop",
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(f"{which} is not valid Unicode text; expected UTF-8", "stop") from None


def check_logprobs(count: int | None) -> None:
    """Raise InputError for a number of likeliest tokens that no step returns."""
    if count is not None and not 0 <= count <= MOST_LOGPROBS:
        raise InputError(f"logprobs is {count}; expected 0..{MOST_LOGPROBS}", "logprobs")


@dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """When an answer ends, and which log-probabilities it has."""

    max_new_tokens: Annotated[int, Flag(SAMPLING, "N", ("-n", "--max-new-tokens"))] = 256
    """Maximum tokens of an answer."""
    ignore_eos: Annotated[bool, Flag(SAMPLING)] = False
    """Ignore stop tokens; generate -n tokens."""
    stop: Annotated[tuple[str, ...], Flag(SAMPLING, "TEXT")] = ()
    """The answer ends before this text; repeatable."""
    logprobs: Annotated[int | None, Flag(OUTPUT, "N")] = None
    """Show, or write to --json, log-probabilities of each token and the N (0 to 20) likeliest."""

    def __post_init__(self) -> None:
        check_least(self, max_new_tokens=1)
        check_stop_strings(self.stop)
        check_logprobs(self.logprobs)


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Which target and drafter, and how they are loaded."""

    target: Annotated[str | None, Flag(MODEL, "DIR|OWNER/NAME")] = None
    """GPT-OSS checkpoint: a directory or a Hugging Face name. Default: demo."""
    drafter: Annotated[str | None, Flag(MODEL, "DIR|ngram")] = None
    """P-EAGLE, EAGLE-3 or DFlash checkpoint; ngram: prompt lookup; demo-eagle3, demo-dflash. Default: demo."""
    aux_layer_ids: Annotated[tuple[int, ...] | None, Flag(MODEL, "L,L,L", read=layers_reader("aux_layer_ids"))] = None
    """Target layers (0-based) that the drafter reads. Default: as in its config.json."""
    draft_vocab: Annotated[str | None, Flag(SPECULATION, "N|FILE")] = None
    """Draft only the N most frequent tokens, or a JSON list of ids: a cheaper head."""
    drafter_window: Annotated[str, Flag(SPECULATION, "N|auto|off")] = "auto"
    """Positions that the drafter sees; auto: as in the checkpoint."""
    retain_full_kv: Annotated[bool, Flag(ENGINE)] = False
    """Keep all positions of sliding layers, so that a prompt can reuse any part of a cached prefix: more memory."""
    query_blocks: Annotated[int, Flag(ENGINE, "N")] = 1
    """Compute a prompt pass's attention in N blocks of rows, of 32 or more: less memory, more time."""
    ffn_blocks: Annotated[int, Flag(ENGINE, "M")] = 1
    """Compute its experts in M blocks of rows: less memory, but each block reads their weights."""
    dtype: Annotated[DtypeName | None, Flag(MACHINE, "DTYPE")] = None
    """Compute in float32 or bfloat16. Default: bfloat16; on a CPU, float32 without kernels or for a float32 target."""
    experts: Annotated[ExpertsChoice, Flag(MACHINE, "LAYOUT")] = "auto"
    """packed: MXFP4 in memory; expanded: dequantised; auto: the fastest that fits."""
    kernels: KernelsChoice = "auto"  # native: the compiled kernels, or an error; xla: XLA's own code
    mesh: Annotated[str | None, Flag(MACHINE, "tp=N,ep=N,dp=N")] = None
    """Devices of the target: tp splits each expert, ep distributes experts; dp: replicas, which share the slots."""
    reduce: Reduction = "ordered"  # how devices sum: in rank order, so that verifying equals decoding; psum: all-reduce
    process: Annotated[str | None, Flag(MACHINE, "I/N@HOST:PORT")] = None
    """This process is I of N that share --mesh; 0 listens at HOST:PORT and runs the command. Trusted networks only."""

    def __post_init__(self) -> None:
        check_least(self, query_blocks=1, ffn_blocks=1)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `peagle.load`."""
        beside = ("target", "drafter", "process")
        return {name: value for name, value in vars(self).items() if name not in beside}


@dataclass(frozen=True)
class EngineConfig:
    """How an engine decodes, as users set it. `Pair.resolve` decides the defaults."""

    num_speculative_tokens: Annotated[
        NumDrafts, Flag(SPECULATION, "K|auto|auto:N", ("-k", "--num-speculative-tokens"), read_num_drafts)
    ] = None
    """Tokens drafted per step (K); 0: plain decoding; auto: drafts likely to save time, and n-grams; auto:N: at most
    N."""
    slots: Annotated[int, Flag(ENGINE, "N")] = 1
    """Requests decoded at once (continuous batching)."""
    context: Annotated[int | None, Flag(ENGINE, "N")] = None
    """Context length in tokens, prompt plus answer. Default: the model's, or what prompts need or the memory holds."""
    prefill_chunk: Annotated[int | Literal["all"] | None, Flag(ENGINE, "N|all", read=read_prefill_chunk)] = None
    """Prompt tokens per prefill pass. Fewer: other requests wait less, less memory. Default: 128, on a GPU 2048."""
    kv_memory: Annotated[int | None, Flag(ENGINE, "SIZE|auto", read=read_kv_memory)] = None
    """Memory for keys and values, such as 4GB; requests that need more wait. Default: the context of every slot, at
    most 8192 positions each."""
    prefix_cache: Annotated[PrefixCacheSize | None, Flag(ENGINE, "on|off|SIZE", read=read_prefix_cache)] = None
    """Keep keys and values for prompts with the same beginning, in SIZE of extra memory; on: in a tenth of the free
    memory, or what requests leave of --kv-memory. Default: on, but off for one request."""
    synthetic_acceptance: tuple[float, ...] | None = None  # accept draft i in this share of steps: for timing

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():  # type: ignore[arg-type]  # a class has a hash
            check_type(name, getattr(self, name), kind)
        Drafts.parse(self.num_speculative_tokens)
        for name, least, unit in (("slots", 1, ""), ("prefill_chunk", 1, " tokens")):
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise InputError(f"{name} is {value}{unit}; expected {least} or more", name)
        if self.slots > MOST_SLOTS:
            raise InputError(f"slots is {self.slots}; expected 1 to {MOST_SLOTS}", "slots")
        if self.kv_memory is not None and self.kv_memory < 1:
            raise InputError(f"kv_memory is {self.kv_memory} bytes; expected more than 0", "kv_memory")
        if isinstance(self.prefix_cache, int) and self.prefix_cache < 0:
            raise InputError(f"prefix_cache is {self.prefix_cache} bytes; expected 0 or more", "prefix_cache")
        self._check_together()

    def _check_together(self) -> None:
        """Check fields against each other; `ResolvedConfig` replaces these checks."""
        k, rates = self.num_speculative_tokens, self.synthetic_acceptance
        check_rates(rates, k if isinstance(k, int) and rates is not None and len(rates) > 1 else 0)
