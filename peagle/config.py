"""Every setting of the system, declared and checked once. Without JAX.

SamplingParams: how tokens are sampled. LoadConfig: which models, and how they are loaded. EngineConfig: how requests
are decoded. Each is a group of command-line options, of keyword arguments in Python and of keys in configuration files.
The docstring below a field is the help of its flag.
"""

import dataclasses
import difflib
import functools
import itertools
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

from peagle.ops.errors import InputError
from peagle.ops.flag import (
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
from peagle.ops.sizes import PrefixCacheSize, parse_size

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
KEPT_PREFIXES = (  # the help of --prefix-cache in commands for many requests
    "Keep the keys and values of prompts and answers for later prompts that begin with them. SIZE: extra memory for "
    "them, such as 512MB. on: up to a tenth of the free memory; with --kv-memory SIZE, what requests leave of it."
)
AUTO: Literal["auto"] = "auto"  # as K: verify drafts that are likely enough to save time (peagle.engine.auto)
NumDrafts = int | str | None  # K as users say it (`Drafts.parse`)
DtypeName = Literal["float32", "bfloat16"]
ExpertsChoice = Literal["auto", "packed", "expanded"]
KernelsChoice = Literal["auto", "native", "xla"]
Reduction = Literal["ordered", "psum"]


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

    most: int
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


def read_rates(typed: str) -> tuple[float, ...]:
    """Read acceptance rates with commas between them. Raises InputError for anything else."""
    try:
        return tuple(float(part) for part in typed.split(","))
    except ValueError:
        message = f"synthetic acceptance is {typed!r}; expected rates with commas between, or one"
        raise InputError(message, "synthetic_acceptance") from None


def read_prefill_chunk(typed: str) -> int | Literal["all"]:
    """Read a number of tokens, or all. Raises InputError for anything else."""
    if typed == "all":
        return "all"
    try:
        return int(typed)
    except ValueError:
        message = f"prefill_chunk is {typed!r}; expected a number of tokens, or all, for a whole prompt"
        raise InputError(message, "prefill_chunk") from None


def read_kv_memory(typed: str) -> int | None:
    """Read bytes, or None for auto. Raises InputError for anything else."""
    if typed == AUTO:
        return None
    size = _read_size(typed, "kv_memory", "auto")
    if not size:
        raise InputError(f"kv_memory is {typed}; expected more than 0, or auto", "kv_memory")
    return size


def read_prefix_cache(typed: str) -> PrefixCacheSize | None:
    """Read bytes, on, off, or None for auto. Raises InputError for anything else."""
    if typed == AUTO:
        return None
    if typed == "on" or typed == "off":
        return "on" if typed == "on" else "off"
    return _read_size(typed, "prefix_cache", "on, off or auto")


def read_kept_prefixes(typed: str) -> PrefixCacheSize:
    """Read bytes, on or off, for commands with many requests: auto is on. Raises InputError for anything else."""
    size = read_prefix_cache(typed)
    return "on" if size is None else size


def _read_size(typed: str, field: str, others: str) -> int:
    try:
        return parse_size(typed, field)
    except InputError:
        raise InputError(f"{field} is {typed!r}; expected a size, as 512MB or 2GB, or {others}", field) from None


def check_num_drafts(k: int, plain: bool = True, instead: str = "") -> None:
    """Raise InputError for an impossible K. plain: K = 0 is possible. instead: the end of the message."""
    if not (0 if plain else 1) <= k <= MAX_NUM_DRAFTS:
        least = "0 (plain decoding)" if plain else "1"
        message = f"K is {k}; expected {least} to {MAX_NUM_DRAFTS} drafted tokens{instead}"
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
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}"
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
    """Sample from the most likely tokens with a cumulative probability of P; 1: all."""
    min_p: Annotated[float, Flag(SAMPLING, "P")] = 0.0
    """Minimum probability of a token relative to the most likely one; 0: off."""
    seed: Annotated[int, Flag(SAMPLING, "S")] = 0
    """Random seed for sampling."""
    presence_penalty: Annotated[float, Flag(SAMPLING, "X")] = 0.0
    """Subtract X (-2 to 2) from the logits of tokens already generated."""
    frequency_penalty: Annotated[float, Flag(SAMPLING, "X")] = 0.0
    """Subtract X (-2 to 2) from a token's logit for each time it was generated."""
    repetition_penalty: Annotated[float, Flag(SAMPLING, "X")] = 1.0
    """Divide positive logits of tokens in the prompt or answer by X, multiply negative ones; 1: off."""
    logit_bias: Annotated[tuple[tuple[int, float], ...], Flag(SAMPLING, "ID=X", read=read_bias)] = ()
    """Add X to the logit of token ID; repeatable."""
    min_tokens: Annotated[int, Flag(SAMPLING, "N")] = 0
    """Allow no stop token and no stop string before N tokens are generated."""

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
    """Stop string: the answer ends before it; repeatable."""
    logprobs: Annotated[int | None, Flag(OUTPUT, "N")] = None
    """Print each token's log-probability and those of the N (0 to 20) most likely tokens, or write them to --json.
    Slower."""

    def __post_init__(self) -> None:
        check_least(self, max_new_tokens=1)
        check_stop_strings(self.stop)
        check_logprobs(self.logprobs)


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Which target and drafter, and how they are loaded."""

    target: Annotated[str | None, Flag(MODEL, "DIR|OWNER/NAME")] = None
    """GPT-OSS checkpoint: a directory, or a Hugging Face name. Default: the demo target."""
    drafter: Annotated[str | None, Flag(MODEL, "DIR|ngram")] = None
    """P-EAGLE, EAGLE-3 or DFlash checkpoint; ngram: prompt lookup, without weights; demo-eagle3, demo-dflash: the
    demo's other drafters. Default: the demo's P-EAGLE."""
    aux_layer_ids: Annotated[tuple[int, ...] | None, Flag(MODEL, "L,L,L", read=layers_reader("aux_layer_ids"))] = None
    """Target layers (0-based) whose outputs the drafter reads. Default: as in the drafter's config.json."""
    download: Annotated[bool, Flag(MODEL)] = False
    """Download checkpoints named OWNER/NAME from the Hugging Face Hub unless they are in its local cache. Without it,
    nothing is downloaded."""
    draft_vocab: Annotated[str | None, Flag(SPECULATION, "N|FILE")] = None
    """Draft only the N most frequent tokens, or the ids in a JSON list: a cheaper head, lower acceptance."""
    drafter_window: Annotated[str, Flag(SPECULATION, "N|auto|off")] = "auto"
    """Sliding window of the drafter's attention, in positions: keeps acceptance up after long prompts. auto: from its
    speculation.json or config.json."""
    retain_full_kv: Annotated[bool, Flag(ENGINE)] = False
    """Keep all positions in sliding-window layers. It takes more memory, but a prompt can reuse any part of a cached
    prefix."""
    query_blocks: Annotated[int, Flag(ENGINE, "N")] = 1
    """Compute a prompt pass's attention in N blocks of rows, of 32 or more: less memory, more passes over weights."""
    ffn_blocks: Annotated[int, Flag(ENGINE, "M")] = 1
    """Compute a prompt pass's experts in M blocks of rows, of 32 or more: less memory, but each block reads them."""
    dtype: Annotated[DtypeName | None, Flag(MACHINE, "DTYPE")] = None
    """Compute in float32 or bfloat16. Default: bfloat16; on a CPU float32 without the native kernels, or for a target
    that is not stored in bfloat16."""
    experts: Annotated[ExpertsChoice, Flag(MACHINE, "LAYOUT")] = "auto"
    """packed: keep MXFP4 in memory; expanded: dequantise at load; auto: the fastest that fits."""
    kernels: Annotated[KernelsChoice, Flag(MACHINE, "KIND")] = "auto"
    """native: the compiled kernels, or an error; xla: XLA's own code; auto: native if they run here."""
    mesh: Annotated[str | None, Flag(MACHINE, "tp=N,ep=N,dp=N")] = None
    """Split the target over tp x ep devices. tp splits each expert, ep distributes the experts, all devices share
    heads, caches and vocabulary. dp: that many replicas, each on its own devices, share the slots. Default: one."""
    reduce: Annotated[Reduction, Flag(MACHINE, "HOW")] = "ordered"
    """How devices sum. ordered: in rank order, so that verifying equals decoding bit for bit; psum: all-reduce."""
    coordinator: Annotated[str | None, Flag(MACHINE, "HOST:PORT")] = None
    """Address at which process 0 waits for the others; PORT alone: this machine. --mesh then spans the devices of all
    processes. Trusted networks only."""
    process_id: Annotated[int | None, Flag(MACHINE, "I")] = None
    """This process's rank. Rank 0 runs the command; the others work for it."""
    num_processes: Annotated[int | None, Flag(MACHINE, "N")] = None
    """Number of processes, 2 or more."""

    def __post_init__(self) -> None:
        check_least(self, query_blocks=1, ffn_blocks=1)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `peagle.load`."""
        beside = ("target", "drafter", "download", "coordinator", "process_id", "num_processes")
        return {name: value for name, value in vars(self).items() if name not in beside}


@dataclass(frozen=True)
class EngineConfig:
    """How an engine decodes, as users set it. `Pair.resolve` decides the defaults."""

    num_speculative_tokens: Annotated[
        NumDrafts, Flag(SPECULATION, "K|auto|auto:N", ("-k", "--num-speculative-tokens"), read_num_drafts)
    ] = None
    """Tokens drafted per step (K). auto: verify only drafts that are likely to save time, and also draft by n-grams of
    the text so far; at most as many as the drafter's speculation.json says. auto:N: at most N. Default: auto."""
    slots: Annotated[int, Flag(ENGINE, "N")] = 1
    """Requests decoded at once (continuous batching)."""
    context: Annotated[int | None, Flag(ENGINE, "N")] = None
    """Context length in tokens: the most of one request, prompt plus answer. Default: the model's limit, or what the
    memory holds if that is less."""
    prefill_chunk: Annotated[int | Literal["all"] | None, Flag(ENGINE, "N|all", read=read_prefill_chunk)] = None
    """Prompt tokens per prefill pass; all: the whole prompt. More: a prompt is prefilled sooner; fewer: other requests
    wait less, and a pass takes less memory. Default: 128, on a GPU 2048."""
    kv_memory: Annotated[int | None, Flag(ENGINE, "SIZE|auto", read=read_kv_memory, default="auto")] = None
    """Memory for the keys and values of all requests together, such as 4GB; requests that need more wait. auto: room
    for the context of every slot, at most 8192 positions per slot."""
    prefix_cache: Annotated[
        PrefixCacheSize | None, Flag(ENGINE, "on|off|SIZE", read=read_prefix_cache, default="auto")
    ] = None
    """Keep the keys and values of prompts and answers for later prompts that begin with them. SIZE: extra memory for
    them, such as 512MB. on: up to a tenth of the free memory; with --kv-memory SIZE, what requests leave of it.
    auto: on, off for a single request."""
    synthetic_acceptance: Annotated[tuple[float, ...] | None, Flag(SPECULATION, "P|P,P", read=read_rates)] = None
    """For timing random weights: accept draft i in share P_i of the steps, whatever the target's logits. A single P
    means P, P^2, P^3, ... The generated text is meaningless."""

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
