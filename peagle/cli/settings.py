"""What was asked for on the command line, as it was typed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.engine.request import SamplingParams
from peagle.ops.errors import InputError


@dataclass(frozen=True)
class SamplingSettings:
    """How logits are to become tokens, in all commands that decode for people."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[str, ...]  # "ID=VALUE"
    min_tokens: int

    def params(self) -> SamplingParams:
        """What the engine is asked for. Raises InputError for what cannot be."""
        biases = tuple(parse_bias(each) for each in self.logit_bias)
        return SamplingParams(**{**vars(self), "logit_bias": biases})


def parse_bias(typed: str) -> tuple[int, float]:
    """(token id, what is added to its logit) of "ID=VALUE"."""
    token, _, value = typed.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(f"--logit-bias is {typed!r}; expected ID=VALUE, a token id and a number: 13=-5") from None


@dataclass(frozen=True)
class Settings:
    """The arguments of `speculate` and `generate`; None: the default, which the run chooses."""

    command: Literal["speculate", "generate"]
    prompt: str | None
    prompt_file: Path | None
    strict: bool
    prompt_ids: str | None
    raw_prompt: bool
    special_tokens: bool
    system: str | None
    reasoning_effort: str | None
    date: str | None
    target: str | None
    drafter: str | None
    dtype: str | None
    experts: str
    kernels: str
    context: int | None
    prefill_chunk: int
    num_speculative_tokens: str | None  # a number, or auto
    draft_sampling: bool
    synthetic_acceptance: str | None
    draft_vocab: str | None
    baseline: bool
    sampling: SamplingSettings
    max_new_tokens: int
    slots: int
    ignore_eos: bool
    stop: tuple[str, ...]
    logprobs: int | None
    json: str | None
    trace: str | None
    profile: str | None
    quiet: bool
    aux_layer_ids: str | None = None
    drafter_window: str = "auto"  # a number of positions, auto, or off


@dataclass(frozen=True)
class ChatSettings:
    """The arguments of `chat`; None: the default, which the run chooses."""

    system: str | None
    reasoning_effort: str | None
    date: str | None
    target: str | None
    drafter: str | None
    dtype: str | None
    experts: str
    kernels: str
    context: int | None
    num_speculative_tokens: str | None  # a number, or auto
    draft_vocab: str | None
    baseline: bool
    sampling: SamplingSettings
    max_new_tokens: int
    stop: tuple[str, ...]
    quiet: bool
    aux_layer_ids: str | None = None
    drafter_window: str = "auto"


@dataclass(frozen=True)
class BenchSettings:
    """The arguments of `bench`; None: the default, which the run chooses."""

    target: str | None
    prompt_lengths: str
    new_tokens: str
    widths: str
    context: int
    slots: str
    num_speculative_tokens: str | None
    drafter: str | None
    repeats: int
    dtype: str | None
    experts: str
    kernels: str
    json: str | None
    markdown: str | None
    drafter_window: str = "auto"


@dataclass(frozen=True)
class DataSettings:
    """The arguments of `data`; None: the default, which the run chooses."""

    target: str | None
    prompt_files: tuple[Path, ...]
    out: str
    num_prompts: int | None
    max_new_tokens: int
    context: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    slots: int
    shard_prompts: int
    hidden: bool
    top: int
    taps: tuple[int, ...] | None
    strict: bool
    raw_prompt: bool
    special_tokens: bool
    system: str | None
    reasoning_effort: str | None
    date: str | None
    dtype: str | None
    experts: str
    kernels: str
    quiet: bool


@dataclass(frozen=True)
class TrainSettings:
    """The arguments of `train`; None: the default, which the run chooses."""

    target: str | None
    data: tuple[str, ...]
    out: str
    steps: int | None
    minutes: float | None
    init: str | None
    autoregressive: bool
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    mlp_width: int | None
    taps: tuple[int, ...] | None
    mask_token: int | None
    mask_hiddens: int
    draft_vocab: str | None
    rows: int
    width: int
    depth: int
    ratio: float
    min_ratio: float
    parts: int
    loss: str
    optimizer: str
    learning_rate: float
    other_rate: float | None
    weight_decay: float
    warmup: float
    decay: float
    clip: float | None
    freeze_embedding: bool
    dtype: str
    seed: int
    save_every: int
    evaluate: str | None
    evaluate_every: int
    evaluate_prompts: int
    strict: bool
    num_speculative_tokens: int
    dialect: str
    quiet: bool
    aux_layer_ids: str | None = None


@dataclass(frozen=True)
class ExportSettings:
    """The arguments of `export`."""

    drafter: str
    out: str
    dialect: str
    verifier: str | None
    quiet: bool
    aux_layer_ids: str | None = None


@dataclass(frozen=True)
class SweepSettings:
    """The arguments of `sweep`; None: the default, which the run chooses."""

    out: str
    resume: bool
    dry_run: bool
    continue_on_error: bool
    num_speculative_tokens: str
    target: str | None
    drafters: str | None
    draft_vocab: str
    prompt_files: tuple[Path, ...]
    num_prompts: int | None
    turns: int | None
    strict: bool
    render: Literal["chat", "raw", "both"]
    special_tokens: bool
    temperature: str
    max_prompt_tokens: int | None
    too_long: Literal["skip", "error"]
    buckets: str
    repeats: int
    in_a_row: int
    max_new_tokens: int
    seed: int
    dtype: str | None
    experts: str
    kernels: str
    quiet: bool
    aux_layer_ids: str | None = None
    concurrency: str | None = None
    write_widths: Path | None = None
    drafter_window: str = "auto"  # several, with commas between


@dataclass(frozen=True)
class ParitySettings:
    """The arguments of `parity`; None: the default, which the run chooses."""

    target: str | None
    drafter: str | None
    prompts: Path | None
    num_prompts: int
    render: Literal["chat", "raw"]
    num_speculative_tokens: int
    max_new_tokens: int
    reference_steps: int
    dtype: str | None
    kernels: str
    json: str | None
    quiet: bool
    strict: bool = False
    special_tokens: bool = False
    aux_layer_ids: str | None = None
    drafter_window: str = "auto"


def parse_layers(typed: str | None, option: str = "--aux-layer-ids") -> tuple[int, ...] | None:
    """The numbers of layers that were typed. Raises InputError for anything else."""
    if typed is None:
        return None
    try:
        return tuple(int(part) for part in typed.split(","))
    except ValueError:
        raise InputError(f"{option} is {typed!r}; expected layers with commas between them, as 1,11,20") from None
