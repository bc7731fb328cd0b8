"""The plan of a sweep, checked, and as JSON."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.base.errors import InputError
from peagle.base.files import printable
from peagle.config import AUTO, MAX_NUM_DRAFTS, Drafts, EngineConfig, SamplingParams

FULL = "full"  # the drafter's whole vocabulary
TARGET, TEMPLATE = "target", "chat template and tokenizer"  # keys of fingerprints

K = int | str  # auto or auto:N: draft by confidence (peagle.config)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to decode. k = 0: plain decoding, without a drafter."""

    k: K
    drafter: str | None = None
    draft_vocab: str | None = None  # None: full
    concurrency: int | None = None  # slots for all requests at once; None: one request at a time, variants in turns

    @property
    def speculates(self) -> bool:
        return self.k != 0

    def at(self, concurrency: int | None) -> "Variant":
        """Return this variant with another number of slots."""
        return dataclasses.replace(self, concurrency=concurrency)


PLAIN = Variant(0)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests to compare variants on, and their sampling."""

    prompts: str  # name of a PromptSource
    raw: bool  # without the chat template
    temperature: float

    @property
    def label(self) -> str:
        sampling = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"{printable(self.prompts)}, {'raw' if self.raw else 'chat'}, {sampling}"


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """A file of prompts as it was read; its checksum, because published copies of a set differ."""

    name: str
    file: str  # its whole path, or demo
    layout: str
    sha256: str
    num_rows: int
    num_skipped: int  # rows without a usable prompt
    num_used: int  # conversations
    max_turns: int | None  # used of a conversation; None: all


@dataclasses.dataclass(frozen=True)
class Plan:
    """All settings of a sweep. Names of checkpoints and files that are paths are whole ones."""

    target: str
    drafters: tuple[str, ...]
    draft_vocabs: tuple[str | None, ...]
    ks: tuple[K, ...]
    sources: tuple[PromptSource, ...]
    raw: tuple[bool, ...]
    temperatures: tuple[float, ...]
    repeats: int
    max_new_tokens: int
    max_prompt_tokens: int | None
    seed: int
    dtype: str | None
    experts: str
    kernels: str
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of TARGET, TEMPLATE, "drafter NAME"
    concurrencies: tuple[int, ...] = ()  # with each number of slots, variants also decode all requests at once
    drafter_window: str = AUTO
    mesh: str | None = None

    def __post_init__(self) -> None:
        if any(not 0 <= t < float("inf") for t in self.temperatures):
            raise InputError(f"--temperature is {max(self.temperatures, key=abs)}; expected finite numbers, 0 or more")
        if (fewest := min(self.concurrencies, default=1)) < 1:
            raise InputError(f"--concurrency is {fewest}; expected 1 or more requests at once")
        for seed in (self.seed, self.seed + self.repeats - 1):
            SamplingParams(seed=seed)  # check it
        for k in self.ks:
            EngineConfig(k)  # check it
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two files of prompts have the name {twice}; give them different names")

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants that decode one request at a time: plain decoding, then by `k_order`."""
        ks = sorted(self.ks, key=k_order)
        return (PLAIN, *itertools.starmap(Variant, itertools.product(ks, self.drafters, self.draft_vocabs)))

    @property
    def concurrent(self) -> tuple[Variant, ...]:
        """The variants that decode many requests at once: each of `variants` with each number of slots."""
        return tuple(
            variant.at(slots) for slots, variant in itertools.product(sorted(self.concurrencies), self.variants)
        )

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return tuple(
            Workload(source.name, raw, temperature)
            for source, raw, temperature in itertools.product(self.sources, self.raw, self.temperatures)
        )

    def label(self, variant: Variant) -> str:
        """Name a variant by the fields that tell it from the plan's others."""
        parts = [str(variant.k)]
        if variant.drafter is not None and len(self.drafters) > 1:
            parts.append(short_names(self.drafters)[self.drafters.index(variant.drafter)])
        if variant.draft_vocab is not None:
            parts.append(f"{printable(Path(variant.draft_vocab).name)} tokens")
        if variant.concurrency is not None:
            parts.append(f"{variant.concurrency} at once")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Plan":
        """Undo `to_json`. Raises KeyError, TypeError or InputError for any other value."""
        if not all(isinstance(k, int | str) for k in value["ks"]):
            raise TypeError(f"ks is {value['ks']}")
        fields: dict[str, Any] = {
            name: tuple(field) if isinstance(field, list) else field for name, field in value.items()
        }
        return cls(**fields | {"sources": tuple(PromptSource(**source) for source in value["sources"])})


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """Shorten paths to their last distinct parts. Example: runs/a/x and runs/b/x become a/x and b/x."""
    parts = [Path(printable(str(path))).parts or ("",) for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [printable(str(path)) for path in paths]


def k_order(k: K) -> tuple[bool, int]:
    """Return a key that sorts numbers first, then auto:N by N, then auto."""
    drafts = Drafts.parse(k, default=MAX_NUM_DRAFTS + 1)
    return drafts.adaptive, drafts.num_drafts


def parse_ks(text: str) -> tuple[K, ...]:
    """Parse a list such as "1-3,5,auto,auto:9". 0 is dropped, because plain decoding always runs."""
    ks: list[K] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if low.startswith(AUTO):
            Drafts.parse(part.strip())
            ks.append(part.strip())
        elif low.isdecimal() and (high.isdecimal() or not dash):
            values = range(int(low), int(high or low) + 1)
            if not values:
                raise InputError(f"-k is {text!r}; expected a range with the smaller number first, as 1-5")
            ks += values
        else:
            expected = "expected numbers, ranges, auto or auto:N, separated by commas, as 1-3,5,auto"
            raise InputError(f"-k is {text!r}; {expected}")
    unique = tuple(dict.fromkeys(k for k in ks if k != 0))
    if not unique:
        raise InputError(f"-k is {text!r}; expected at least one K of 1 to {MAX_NUM_DRAFTS}, or auto")
    return unique


def numbers(flag: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Parse numbers separated by commas; duplicates are dropped."""
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"{flag} is {text!r}; expected numbers separated by commas") from None
