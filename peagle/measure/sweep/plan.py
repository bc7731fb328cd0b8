"""The plan of a sweep: frozen, checked, and unchanged by a round trip through JSON."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from peagle.config import MAX_NUM_DRAFTS, SamplingParams
from peagle.engine.resolved import ResolvedConfig
from peagle.ops.errors import InputError
from peagle.ops.files import printable

AUTO: Literal["auto"] = "auto"  # as K: draft by the pair's table, and pause if it does not pay
FULL = "full"  # the drafter's whole vocabulary
BUCKETS = (128, 512, 2048)  # prompt tokens at which a new bucket begins
PROFILED, PROFILED_TOKENS = 12, 32  # conversations of each arm that run under the profiler, and tokens of each

K = int | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One method of decoding; k 0 is plain decoding, without a drafter."""

    k: K
    drafter: str | None = None
    draft_vocab: str | None = None  # None: full
    concurrency: int | None = None  # slots that all requests share; None: one request at a time, arms in turns
    drafter_window: str | None = None  # None: as the drafter's files say

    @property
    def speculates(self) -> bool:
        return self.k != 0


PLAIN = Arm(0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The conditions that arms share when they are compared."""

    prompts: str  # a source's name
    raw: bool  # without the chat template
    temperature: float

    @property
    def label(self) -> str:
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"{printable(self.prompts)}, {'raw' if self.raw else 'chat'}, {how}"


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of prompts as it was read (published copies of a set differ)."""

    name: str
    file: str  # as typed, or demo
    layout: str
    sha256: str
    num_rows: int
    num_skipped: int  # rows without a usable prompt
    num_used: int  # conversations
    max_turns: int | None  # of each; None: all


@dataclasses.dataclass(frozen=True)
class Plan:
    """A whole sweep.

    `fingerprints`: hashes of the files of "target" and of each "drafter NAME".
    """

    target: str
    drafters: tuple[str, ...]
    draft_vocabs: tuple[str | None, ...]
    ks: tuple[K, ...]
    sources: tuple[Source, ...]
    raw: tuple[bool, ...]
    temperatures: tuple[float, ...]
    repeats: int
    max_new_tokens: int
    max_prompt_tokens: int | None  # longer prompts are left out, or refused
    too_long: Literal["skip", "error"]
    buckets: tuple[int, ...]
    seed: int
    dtype: str | None
    experts: str
    kernels: str
    template: str = ""  # sha256 of the target's chat template and tokenizer
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_a_row: int = 1  # requests of an arm before the next arm's turn
    special_tokens: bool = False  # special tokens spelled in raw text are control tokens
    aux_layer_ids: tuple[int, ...] | None = None  # of every drafter with weights; None: by its config.json
    concurrencies: tuple[int, ...] = ()  # numbers of slots; with each, every arm also decodes all requests at once
    drafter_windows: tuple[str | None, ...] = (None,)

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InputError(f"--repeats is {self.repeats}; expected 1 or more")
        if self.max_new_tokens < 2:
            raise InputError(f"-n is {self.max_new_tokens}; expected 2 or more: a speed needs two tokens")
        if self.in_a_row < 1:
            raise InputError(f"--in-a-row is {self.in_a_row}; expected 1 or more requests")
        if self.special_tokens and True not in self.raw:
            raise InputError("--special-tokens applies to raw text only; give --render raw, too, or leave it out")
        if any(not 0 <= t < float("inf") for t in self.temperatures):
            raise InputError(f"--temperature is {max(self.temperatures, key=abs)}; expected finite numbers, 0 or more")
        if list(self.buckets) != sorted(set(self.buckets)) or any(edge < 1 for edge in self.buckets):
            typed = ",".join(map(str, self.buckets))
            raise InputError(f"--buckets is {typed}; expected numbers of tokens that rise, such as 128,512")
        if wrong := [slots for slots in self.concurrencies if slots < 1]:
            raise InputError(f"--concurrency is {wrong[0]}; expected 1 or more requests at once")
        for seed in (self.seed, self.seed + self.repeats - 1):
            SamplingParams(seed=seed)  # check it
        for k in self.ks:
            ResolvedConfig(k if isinstance(k, int) else 1)  # check K
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise InputError(f"two files of prompts have the name {_twice(names)}; give them different names")

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Plain decoding first, then by K."""
        ks: list[K] = [*sorted(k for k in self.ks if isinstance(k, int)), *([AUTO] if AUTO in self.ks else [])]
        ways = list(itertools.product(self.drafters, self.draft_vocabs, self.drafter_windows))
        return (PLAIN, *(Arm(k, d, v, drafter_window=w) for k in ks for d, v, w in ways))

    @property
    def loads(self) -> tuple[Arm, ...]:
        """The arms of many requests at once: each arm with each number of slots."""
        return tuple(
            dataclasses.replace(arm, concurrency=slots)
            for slots, arm in itertools.product(sorted(self.concurrencies), self.arms)
        )

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(
            Setting(source.name, raw, temperature)
            for source, raw, temperature in itertools.product(self.sources, self.raw, self.temperatures)
        )

    def label(self, arm: Arm) -> str:
        """Name an arm by the parts in which arms differ."""
        parts = [str(arm.k)]
        if arm.drafter is not None and len(self.drafters) > 1:
            parts.append(short_names(self.drafters)[self.drafters.index(arm.drafter)])
        if arm.draft_vocab is not None:
            parts.append(f"{printable(Path(arm.draft_vocab).name)} tokens")
        if arm.drafter_window is not None:
            parts.append(f"window {printable(arm.drafter_window)}")
        if arm.concurrency is not None:
            parts.append(f"{arm.concurrency} at once")
        return ", ".join(parts)

    def bucket(self, prompt_tokens: int) -> str:
        """Name the bucket of a prompt, such as 128..511."""
        edges = (0, *self.buckets)
        place = sum(prompt_tokens >= edge for edge in self.buckets)
        return f"{edges[place]}.." + (str(edges[place + 1] - 1) if place < len(self.buckets) else "")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Plan":
        """Undo `to_json`. Raises KeyError or TypeError for any other value."""
        lists = {
            name: tuple(value[name]) for name in ("drafters", "draft_vocabs", "ks", "raw", "temperatures", "buckets")
        }
        if any(k != AUTO and not isinstance(k, int) for k in lists["ks"]):
            raise TypeError(f"ks is {value['ks']}")
        for name in ("aux_layer_ids", "concurrencies", "drafter_windows"):  # missing in older runs
            if value.get(name) is not None:
                lists[name] = tuple(value[name])
        return cls(**{**value, **lists, "sources": tuple(Source(**source) for source in value["sources"])})


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """Shorten paths to their shortest distinct ends, printable.

    Example: runs/a/drafter and runs/b/drafter become a/drafter and b/drafter.
    """
    parts = [Path(printable(str(path))).parts or ("",) for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [printable(str(path)) for path in paths]


def parse_ks(text: str) -> tuple[K, ...]:
    """Parse numbers of drafted tokens, ranges and auto: "1-3,5,auto".

    0 is dropped: plain decoding always runs.
    """
    found: list[K] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if part.strip() == AUTO:
            found.append(AUTO)
        elif low.isdecimal() and (high.isdecimal() or not dash):
            between = range(int(low), int(high or low) + 1)
            if not between:
                raise InputError(f"-k is {text!r}: {part.strip()} is no range; expected the smaller number first")
            found += between
        else:
            raise InputError(f"-k is {text!r}; expected numbers, ranges or auto, separated by commas, as 1-3,5,auto")
    unique = tuple(dict.fromkeys(k for k in found if k != 0))
    if not unique:
        raise InputError(f"-k is {text!r}; expected at least one K of 1 to {MAX_NUM_DRAFTS}, or auto")
    return unique


def numbers(flag: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"{flag} is {text!r}; expected numbers separated by commas") from None


def _twice(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)
