"""The folder of a run. A run that is killed loses at most the requests being decoded.

    run.json       schema, plan, provenance ("origins": one per process of the run and its resumes); at the end figures:
                   "rows", and of many requests at once "by_concurrency"
    prompts.jsonl  a line per conversation: its requests, and why it is left out or cut short
    raw.jsonl      a line per decoded request, or per error of a variant, in the order of decoding

README.md and the pictures are made from these.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from peagle.answers.result import Counters, Result
from peagle.base.errors import InputError
from peagle.base.files import expect_new, reason_of, write_text_whole, writing
from peagle.base.strict_json import dumps
from peagle.measure import record
from peagle.measure.record import Json
from peagle.measure.sweep.plan import PLAIN, Plan, Variant, Workload

SCHEMA, KIND = 4, "sweep"
RUN, PROMPTS, RAW = "run.json", "prompts.jsonl", "raw.jsonl"
# fields whose own fields stand in the line itself
_FLAT: dict[str, Any] = {"workload": Workload, "variant": Variant, "counters": Counters}

Line = TypeVar("Line")
Key = tuple[Workload, Variant, int, int]  # of a sample: workload, variant, repeat, request


@dataclasses.dataclass(frozen=True)
class SweepRequest:
    """A request of a source, for all variants and temperatures."""

    request: int  # its number in the set
    row: int  # number of its conversation, from 0
    prompt_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SweepConversation:
    """The requests of a conversation; their prompts hold the answers to earlier turns."""

    prompts: str
    raw: bool
    row: int
    requests: tuple[SweepRequest, ...]
    why: str | None = None  # why it ends before its last turn, or has no request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """The result of decoding a request once: a line of raw.jsonl."""

    workload: Workload
    variant: Variant
    repeat: int
    request: int
    output_tokens: int
    finish_reason: str
    loop_share: float | None = None
    ttft_s: float | None = None  # of many at once: since all were added, so it includes the wait for a slot
    decode_s: float | None = None
    counters: Counters
    output_sha256: str  # of the ids, shortened, to compare outputs
    output_ids: tuple[int, ...] | None = None  # plain decoding's first repeat only

    @property
    def key(self) -> Key:
        return self.workload, self.variant, self.repeat, self.request

    @property
    def num_passes(self) -> int:
        """Passes of the target, plain ones included."""
        return self.counters.num_steps + self.counters.num_plain_steps

    @classmethod
    def of(cls, workload: Workload, variant: Variant, repeat: int, result: Result) -> "Sample":
        return cls(
            workload=workload,
            variant=variant,
            repeat=repeat,
            request=result.request.index,
            output_tokens=len(result.output_ids),
            finish_reason=result.finish_reason or "interrupted",
            loop_share=result.loop_share,
            ttft_s=_rounded(result.ttft_s),
            decode_s=_rounded(result.decode_s),
            counters=result.counters,
            output_sha256=hashlib.sha256(dumps(result.output_ids).encode()).hexdigest()[:16],
            output_ids=result.output_ids if repeat == 0 and variant == PLAIN else None,
        )


class Folder:
    """A run's folder, made by `begin` or opened by `open_run`."""

    def __init__(self, path: Path, record: Json) -> None:
        self.path, self.record = path, record
        try:
            self.plan = Plan.from_json(record["plan"])
            missing = [name for name in ("origins", "rows") if name not in record]
        except InputError as error:
            raise InputError(f"{path / RUN}: {error}") from None
        except (KeyError, TypeError) as error:
            missing = [repr(error)]
        if missing:
            raise InputError(f"{path / RUN} is incomplete ({missing[0]}); expected a folder of peagle sweep")

    @property
    def finished(self) -> bool:
        return self.record["rows"] is not None

    @property
    def origins(self) -> list[Json]:
        """The provenance of each process of the run."""
        origins: list[Json] = self.record["origins"]
        return origins

    def save(self, **changes: Any) -> None:
        """Change keys of run.json, and write it."""
        self.record = self.record | changes
        with writing(self.path / RUN):
            write_text_whole(self.path / RUN, dumps(self.record, indent=1) + "\n")

    def discard(self) -> None:
        """Remove the folder, unless it holds decoded requests, or later turns, whose prompts took decoding."""
        if not self.samples() and all(len(conversation.requests) < 2 for conversation in self.conversations()):
            for name in (PROMPTS, RAW, RUN):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()

    def conversations(self) -> list[SweepConversation]:
        """Read prompts.jsonl, which may still lack conversations (`has_prompts`)."""
        return list(record.read(self.path / PROMPTS, lambda line: record_of(SweepConversation, line)))

    def left_out(self) -> dict[str, list[str]]:
        """List by source why conversations are left out or cut short."""
        conversations = self.conversations()
        return {
            source.name: [known.why for known in conversations if known.prompts == source.name and known.why]
            for source in self.plan.sources
        }

    @property
    def has_prompts(self) -> bool:
        """Whether prompts.jsonl holds all conversations of the plan."""
        return len(self.conversations()) == len(self.plan.raw) * sum(source.num_used for source in self.plan.sources)

    def requests(self, workload: Workload) -> list[SweepRequest]:
        place = workload.prompts, workload.raw
        return [
            request
            for conversation in self.conversations()
            if (conversation.prompts, conversation.raw) == place
            for request in conversation.requests
        ]

    def samples(self) -> list[Sample]:
        """Read raw.jsonl, without its errors."""
        lines = record.read(self.path / RAW, lambda line: None if "error" in line else record_of(Sample, line))
        return [sample for sample in lines if sample is not None]

    def errors(self) -> dict[tuple[Workload, Variant], str]:
        """Read the errors of variants that have not decoded a request since."""
        errors: dict[tuple[Workload, Variant], str] = {}
        for workload, variant, error in record.read(
            self.path / RAW, lambda line: (_take(Workload, line), _take(Variant, line), line.get("error"))
        ):
            errors.pop((workload, variant), None)
            if error is not None:
                errors[workload, variant] = error
        return errors

    def append_samples(self, samples: Sequence[Sample]) -> None:
        record.append(self.path / RAW, map(line_of, samples))

    def append_error(self, workload: Workload, variant: Variant, message: str) -> None:
        record.append(self.path / RAW, [line_of(workload) | line_of(variant) | {"error": message}])

    def append_conversation(self, conversation: SweepConversation) -> None:
        record.append(self.path / PROMPTS, [line_of(conversation)])


def begin(path: Path, plan: Plan, provenance: Json) -> Folder:
    """Create a run's folder. Raises InputError if the path exists."""
    expect_new(path)
    record: Json = {"schema": SCHEMA, "kind": KIND, "plan": plan.to_json(), "origins": [provenance], "rows": None}
    hidden = path.with_name(f".{path.name}.tmp")  # renamed with run.json in it, so that no folder lacks one
    with writing(path):
        hidden.mkdir(parents=True, exist_ok=True)
        Folder(hidden, record).save()
        os.rename(hidden, path)
    return Folder(path, record)


def open_run(path: Path) -> Folder:
    """Open a run's folder. Raises InputError for another kind of folder, or another schema."""
    try:
        record = json.loads((path / RUN).read_text(encoding="utf-8"))
        kind, schema = record.get("kind"), record.get("schema")
    except OSError as error:
        why = f"{path / RUN} cannot be read: {reason_of(error)}; expected a folder of peagle sweep"
        raise InputError(why) from None
    except (ValueError, AttributeError):  # no JSON, or no object
        kind = schema = None
    if schema != SCHEMA or kind != KIND:
        raise InputError(f"{path / RUN} holds no run of peagle sweep (schema {schema}); expected schema {SCHEMA}")
    if record.get("rows") and not (path / RAW).exists():
        raise InputError(f"{path} holds the summary of a run; expected the folder of peagle sweep, with its raw lines")
    return Folder(path, record)


def line_of(record: Any) -> Json:
    """Make a record's line, without fields that are None."""
    line = dataclasses.asdict(record)
    for name in reversed(_FLAT):
        line = line.pop(name, {}) | line
    return {name: value for name, value in line.items() if value is not None}


def record_of(kind: type[Line], line: Json) -> Line:
    """Undo `line_of`. Raises KeyError for a missing field, TypeError for an unknown one."""
    rest = dict(line)
    record = _take(kind, rest)
    if rest:
        raise TypeError(f"{next(iter(rest))} is unknown")
    return record


def _take(kind: Any, line: Json) -> Any:
    """Make a record of its keys, which are removed from the line."""
    values: Json = {}
    for field in dataclasses.fields(kind):
        name = field.name
        if name in _FLAT:
            values[name] = _take(_FLAT[name], line)
        elif name in line or field.default is dataclasses.MISSING:
            value = line.pop(name)
            if name == "requests":
                value = [record_of(SweepRequest, request) for request in value]
            values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)
