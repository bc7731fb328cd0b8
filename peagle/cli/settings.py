"""What was asked for on the command line, as it was typed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """The arguments of `speculate` and `generate`; None: the default, which the run chooses."""

    command: Literal["speculate", "generate"]
    prompt: str | None
    prompt_file: Path | None
    prompt_ids: str | None
    raw_prompt: bool
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
    draft_sampling: bool
    draft_vocab: str | None
    baseline: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_new_tokens: int
    batch: int
    ignore_eos: bool
    logprobs: int | None
    json: str | None
    trace: str | None
    profile: str | None
    quiet: bool


@dataclass(frozen=True)
class BenchSettings:
    """The arguments of `bench`; None: the default, which the run chooses."""

    target: str | None
    prompt_lengths: str
    new_tokens: str
    widths: str
    context: int
    batch: int
    repeats: int
    dtype: str | None
    experts: str
    kernels: str
    json: str | None
    markdown: str | None
