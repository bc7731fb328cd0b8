"""The folder of a run. A run that is killed loses at most the requests being decoded.

    run.json             schema, plan, provenance ("origins": one per process of the run and its resumes); at the end
                         profiles ("shares"), figures ("rows"), and figures of many requests at once ("by_concurrency")
    prompts.jsonl        a line per request, and a line per conversation or row left out, with the reason
    conversations.jsonl  a line per conversation, until prompts.jsonl is complete
    raw.jsonl            a line per decoded request, in the order of decoding

README.md, report.html and the pictures are made from these.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from peagle.answers.result import Counters, Result
from peagle.base.errors import InputError
from peagle.base.files import expect_new, reason_of, write_text_whole, writing
from peagle.base.strict_json import dumps
from peagle.measure.bound import Bound
from peagle.measure.sweep.plan import PLAIN, Plan, Variant, Workload

SCHEMA, KIND = 3, "sweep"
IN_SHORT = "sweep in short"  # the kind of summaries in results/; later ones are copies without raw lines
ITL_QUANTILES = (0.5, 0.9, 0.99)
FEWEST_WAITS = 4  # between two arrivals of tokens, for quantiles
RUN, PROMPTS, CONVERSATIONS, RAW = "run.json", "prompts.jsonl", "conversations.jsonl", "raw.jsonl"

Json = dict[str, Any]
# fields whose own fields stand in the line itself
_FLAT: dict[str, Any] = {"workload": Workload, "variant": Variant, "counters": Counters}

Record = TypeVar("Record")
Key = tuple[Workload, Variant, int, int]  # of a sample: workload, variant, repeat, request


@dataclasses.dataclass(frozen=True)
class SweepRequest:
    """A request of a source, for all variants and temperatures."""

    prompts: str
    raw: bool
    request: int  # its number in the set
    row: int  # number of its conversation, from 0
    turn: int
    category: str | None
    prompt_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A conversation that was left out or cut short, or a row of the file without a usable prompt."""

    prompts: str
    raw: bool | None
    row: int | None  # number of the conversation; None: a row of the file, named in `why`
    why: str


@dataclasses.dataclass(frozen=True)
class SweepConversation:
    """The requests of a conversation; their prompts hold the answers to earlier turns."""

    prompts: str
    raw: bool
    row: int
    requests: tuple[SweepRequest, ...]
    why: str | None = None  # why it ends before its last turn


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
    itl_s: tuple[float, ...] | None = None  # at ITL_QUANTILES
    counters: Counters
    output_sha256: str  # of the ids, shortened, to compare outputs
    output_ids: tuple[int, ...] | None = None  # plain decoding's first repeat only
    bound: Bound | None = None  # first repeat above temperature 0 only

    @property
    def key(self) -> Key:
        return self.workload, self.variant, self.repeat, self.request

    @property
    def num_passes(self) -> int:
        """Passes of the target, plain ones included."""
        return self.counters.num_steps + self.counters.num_plain_steps

    @classmethod
    def of(
        cls, workload: Workload, variant: Variant, repeat: int, result: Result, bound: Bound | None = None
    ) -> "Sample":
        itl = np.quantile(result.itl_s, ITL_QUANTILES) if len(result.itl_s) >= FEWEST_WAITS else None
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
            itl_s=None if itl is None else tuple(round(float(seconds), 7) for seconds in itl),
            counters=result.counters,
            output_sha256=hashlib.sha256(dumps(result.output_ids).encode()).hexdigest()[:16],
            output_ids=result.output_ids if repeat == 0 and variant == PLAIN else None,
            bound=bound,
        )


@dataclasses.dataclass(frozen=True)
class Share:
    """Milliseconds of a request's step under the profiler, or the reason for their absence."""

    workload: Workload
    variant: Variant
    request: int
    num_steps: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    why_not: str | None = None

    @property
    def key(self) -> tuple[Workload, Variant, int]:
        return self.workload, self.variant, self.request


class Folder:
    """A run's folder, made by `begin` or opened by `open_run`."""

    def __init__(self, path: Path, record: Json) -> None:
        self.path, self.record = path, record
        try:
            self.plan = Plan.from_json(record["plan"])
            missing = [name for name in ("origins", "shares", "rows") if name not in record]
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

    @property
    def shares(self) -> list[Share]:
        """The profiles, without those that failed."""
        return [record_of(Share, line) for line in self.record["shares"] if "why_not" not in line]

    def save(self, **changes: Any) -> None:
        """Change keys of run.json, and write it."""
        self.record = self.record | changes
        _write(self.path / RUN, dumps(self.record, indent=1) + "\n")

    def discard(self) -> None:
        """Remove the folder, unless it holds decoded requests, or later turns, whose prompts took decoding."""
        if not self.samples() and all(len(conversation.requests) < 2 for conversation in self.conversations()):
            for name in (CONVERSATIONS, RAW, RUN):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()

    def prompts(self) -> tuple[list[SweepRequest], list[LeftOut]] | None:
        """Read (requests, conversations and rows left out); None before prompts.jsonl is complete."""
        if not (self.path / PROMPTS).exists():
            return None

        def record(line: Json) -> SweepRequest | LeftOut:
            return record_of(LeftOut, line) if "why" in line else record_of(SweepRequest, line)

        records = list(_records(self.path / PROMPTS, record))
        return (
            [record for record in records if isinstance(record, SweepRequest)],
            [record for record in records if isinstance(record, LeftOut)],
        )

    def requests(self, workload: Workload) -> list[SweepRequest]:
        requests, _ = self.prompts() or ([], [])
        return [request for request in requests if (request.prompts, request.raw) == (workload.prompts, workload.raw)]

    def save_prompts(self, conversations: Sequence[SweepConversation], skipped: Mapping[str, Sequence[str]]) -> None:
        """Write prompts.jsonl; remove conversations.jsonl. skipped: reasons for rows without a prompt, by source."""
        records: list[SweepRequest | LeftOut] = [
            *(request for conversation in conversations for request in conversation.requests),
            *(LeftOut(name, None, None, why) for name, reasons in skipped.items() for why in reasons),
            *(LeftOut(cut.prompts, cut.raw, cut.row, cut.why) for cut in conversations if cut.why),
        ]
        _write(self.path / PROMPTS, "".join(dumps(dataclasses.asdict(record)) + "\n" for record in records))
        (self.path / CONVERSATIONS).unlink(missing_ok=True)

    def conversations(self) -> list[SweepConversation]:
        """Read conversations.jsonl."""
        return list(_records(self.path / CONVERSATIONS, lambda line: record_of(SweepConversation, line)))

    def samples(self) -> list[Sample]:
        """Read raw.jsonl, without its errors."""
        records = _records(self.path / RAW, lambda line: None if "error" in line else record_of(Sample, line))
        return [sample for sample in records if sample is not None]

    def errors(self) -> dict[tuple[Workload, Variant], str]:
        """Read the errors of variants that have not decoded a request since."""
        errors: dict[tuple[Workload, Variant], str] = {}
        lines = _records(self.path / RAW, lambda line: (_take(Workload, line), _take(Variant, line), line.get("error")))
        for workload, variant, error in lines:
            errors.pop((workload, variant), None)
            if error is not None:
                errors[workload, variant] = error
        return errors

    def append_samples(self, samples: Sequence[Sample]) -> None:
        """Append lines to raw.jsonl in one write, so that requests decoded together stay together."""
        _append(self.path / RAW, [line_of(sample) for sample in samples])

    def append_error(self, workload: Workload, variant: Variant, message: str) -> None:
        _append(self.path / RAW, [line_of(workload) | line_of(variant) | {"error": message}])

    def append_conversation(self, conversation: SweepConversation) -> None:
        _append(self.path / CONVERSATIONS, [line_of(conversation)])


def begin(path: Path, plan: Plan, provenance: Json) -> Folder:
    """Create a run's folder. Raises InputError if the path exists."""
    expect_new(path)
    record: Json = {"schema": SCHEMA, "kind": KIND, "plan": plan.to_json(), "origins": [provenance]}
    record |= {"shares": [], "rows": None}
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
    if kind == IN_SHORT or (kind == KIND and record.get("rows") and not (path / RAW).exists()):
        raise InputError(f"{path} holds the summary of a run; expected the folder of peagle sweep, with its raw lines")
    if schema != SCHEMA or kind != KIND:
        raise InputError(f"{path / RUN} holds no run of peagle sweep (schema {schema}); expected schema {SCHEMA}")
    return Folder(path, record)


def line_of(record: Any) -> Json:
    """Make a record's line, without fields that are None."""
    line = dataclasses.asdict(record)
    for name in reversed(_FLAT):
        line = line.pop(name, {}) | line
    return {name: value for name, value in line.items() if value is not None}


def record_of(kind: type[Record], line: Json) -> Record:
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
            elif name == "bound":
                value = _take(Bound, value)
            values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)


def _records(path: Path, make: Callable[[Json], Record]) -> Iterator[Record]:
    """Make a record of every line, except of a last one that was cut off.

    Raises InputError for a line that is no JSON object, or lacks keys or has unknown ones.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield make(dict(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise InputError(f"{path} line {number} is damaged ({why}); remove the line, and resume the run") from None


def _append(path: Path, lines: Sequence[Json]) -> None:
    """Append lines; a last one that was cut off is removed. The caller must have `locked` the folder."""
    try:
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write("".join(dumps(line) + "\n" for line in lines).encode())
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {reason_of(error)}; requests decoded before are kept: make room, then continue "
            "with --resume"
        ) from None


def _write(path: Path, text: str) -> None:
    with writing(path):
        write_text_whole(path, text)
