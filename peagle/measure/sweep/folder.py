"""The folder of a run.

A run that is killed at any moment loses at most the requests being decoded.

    run.json        schema, plan, provenance (one entry per process: the run and each --resume); at the end profiles
                    ("shares") and figures
    prompts.jsonl   a line per request: set, raw, row, turn, category, prompt_ids; and those left out, with the reason
    asking.jsonl    until prompts.jsonl is complete: a line per conversation
    raw.jsonl       a line per decoded request, in order of decoding

All other files (README.md, report.html, pictures) are made from these.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from peagle.measure.sweep.plan import PLAIN, Arm, K, Plan, Setting
from peagle.ops.errors import InputError
from peagle.ops.files import expect_new, reason_of, write_text_whole, writing
from peagle.ops.strict_json import dumps
from peagle.result import Counters, Result

SCHEMA, KIND = 3, "sweep"
IN_SHORT = "sweep in short"  # the kind of a run's summary by scripts.publish
ITL_QUANTILES = (0.5, 0.9, 0.99)
FEWEST_WAITS = 4  # between arrivals, for quantiles
RUN, PROMPTS, ASKING, RAW = "run.json", "prompts.jsonl", "asking.jsonl", "raw.jsonl"

Json = dict[str, Any]
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class SweepRequest:
    """One request of a setting's prompts: the same for every arm and temperature."""

    prompts: str
    raw: bool
    request: int  # its number among the setting's
    row: int  # of the conversation, from 0
    turn: int
    category: str | None
    prompt_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A conversation that was left out or cut short, or a row of the file without a usable prompt."""

    prompts: str
    raw: bool | None
    row: int | None  # None: a row of the file, which `why` names
    why: str


@dataclasses.dataclass(frozen=True)
class SweepConversation:
    """A conversation's requests, with the answers to earlier turns in their prompts."""

    prompts: str
    raw: bool
    row: int
    asked: tuple[SweepRequest, ...]
    why: str | None  # the reason, if it ends early


@dataclasses.dataclass(frozen=True)
class Sample:
    """The result of one request, decoded once: a line of raw.jsonl. Times in seconds."""

    prompts: str
    raw: bool
    temperature: float
    k: K
    drafter: str | None
    draft_vocab: str | None
    repeat: int
    request: int
    output_tokens: int
    finish_reason: str
    loop_share: float | None
    ttft_s: float | None
    decode_s: float | None
    itl_s: tuple[float, ...] | None  # ITL_QUANTILES
    num_speculative_tokens: int
    histogram: tuple[int, ...]
    verified: tuple[int, ...]
    tried: tuple[int, ...]
    num_plain_steps: int
    output_sha256: str  # of the ids, shortened, to compare outputs
    output_ids: tuple[int, ...] | None = None  # of plain decoding's first repeat
    concurrency: int | None = None
    drafter_window: str | None = None
    bound: Json | None = None  # of the first repeat at a temperature: the fields of peagle.measure.bound.Bound

    @property
    def setting(self) -> Setting:
        return Setting(self.prompts, self.raw, self.temperature)

    @property
    def arm(self) -> Arm:
        return Arm(self.k, self.drafter, self.draft_vocab, self.concurrency, self.drafter_window)

    @property
    def counters(self) -> Counters:
        return Counters(self.num_speculative_tokens, self.histogram, self.verified, self.num_plain_steps, self.tried)

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token after the first; needs two tokens."""
        return (self.decode_s or 0.0) / (self.output_tokens - 1)

    @property
    def num_steps(self) -> int:
        """Passes of the target, plain ones included."""
        return self.counters.num_steps + self.num_plain_steps


Key = tuple[Setting, Arm, int, int]  # of a sample: setting, arm, repeat, request


def key(sample: Sample) -> Key:
    return sample.setting, sample.arm, sample.repeat, sample.request


class Folder:
    """A run's folder, made by `begin` or opened by `open_run`."""

    def __init__(self, path: Path, record: Json) -> None:
        self.path, self.record = path, record
        try:
            self.plan = Plan.from_json(record["plan"])
            missing = [name for name in ("sittings", "shares", "rows") if name not in record]
        except (KeyError, TypeError) as error:
            missing = [repr(error)]
        if missing:
            raise InputError(f"{path / RUN} is incomplete ({missing[0]}); expected a folder of peagle sweep")

    @property
    def finished(self) -> bool:
        return self.record["rows"] is not None

    def save(self, **changes: Any) -> None:
        """Write run.json with these keys changed."""
        self.record = self.record | changes
        _write(self.path / RUN, dumps(self.record, indent=1) + "\n")

    def discard(self) -> None:
        """Remove the folder, unless it holds decoded requests or answers to earlier turns."""
        if not self.samples() and all(len(each.asked) < 2 for each in self.posed()):
            for name in (ASKING, RAW, RUN):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()

    def asked(self) -> tuple[list[SweepRequest], list[LeftOut]] | None:
        """Read (requests, conversations and rows left out); None if they are not all determined yet."""
        if not (self.path / PROMPTS).exists():
            return None
        found = [
            _made(LeftOut if "why" in line else SweepRequest, line, self.path / PROMPTS, number)
            for number, line in _lines(self.path / PROMPTS)
        ]
        return [each for each in found if isinstance(each, SweepRequest)], [e for e in found if isinstance(e, LeftOut)]

    def save_asked(self, posed: Sequence[SweepConversation], left_out: Mapping[str, Sequence[str]]) -> None:
        """Write all prompts, and the rows left out of each source; then remove asking.jsonl."""
        lines = [dataclasses.asdict(asked) for each in posed for asked in each.asked]
        lines += [dataclasses.asdict(LeftOut(name, None, None, why)) for name, some in left_out.items() for why in some]
        lines += [dataclasses.asdict(LeftOut(each.prompts, each.raw, each.row, each.why)) for each in posed if each.why]
        _write(self.path / PROMPTS, "".join(dumps(line) + "\n" for line in lines))
        (self.path / ASKING).unlink(missing_ok=True)

    def posed(self) -> list[SweepConversation]:
        """Read the conversations that were finished before the run was interrupted."""
        path = self.path / ASKING
        return [
            _made(
                SweepConversation,
                {**line, "asked": [_made(SweepRequest, each, path, number) for each in line["asked"]]},
                path,
                number,
            )
            for number, line in _lines(path)
        ]

    def samples(self) -> list[Sample]:
        """Read all decoded requests, without an incomplete last line."""
        absent: Json = dict.fromkeys(("drafter", "draft_vocab", "loop_share", "ttft_s", "decode_s", "itl_s"))
        return [
            _made(Sample, absent | line, self.path / RAW, number)
            for number, line in _lines(self.path / RAW)
            if "error" not in line
        ]

    def errors(self) -> dict[tuple[Setting, Arm], str]:
        """Read why arms failed; an arm that succeeded later is left out."""
        found: dict[tuple[Setting, Arm], str] = {}
        for _, line in _lines(self.path / RAW):
            found.pop(arm_of(line), None)
            if "error" in line:
                found[arm_of(line)] = line["error"]
        return found

    @contextlib.contextmanager
    def appending(self, name: str = RAW) -> Iterator["Appender"]:
        """Append to raw.jsonl, or asking.jsonl. The command that runs the sweep has the folder `alone`."""
        path = self.path / name
        with writing(path):
            file = path.open("a+b")
        with file:
            _cut_torn_line(file)
            yield Appender(file)


class Appender:
    """Append lines to a file and flush them, so that they outlive the process."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def posed(self, posed: SweepConversation) -> None:
        self._lines([dataclasses.asdict(posed)])

    def samples(self, samples: Sequence[Sample]) -> None:
        """Append lines in a single write, since requests decoded together belong together."""
        self._lines(
            [
                {name: value for name, value in dataclasses.asdict(sample).items() if value is not None}
                for sample in samples
            ]
        )

    def error(self, setting: Setting, arm: Arm, message: str) -> None:
        self._lines([{**dataclasses.asdict(setting), **dataclasses.asdict(arm), "error": message}])

    def _lines(self, values: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._file.write("".join(dumps(value) + "\n" for value in values).encode())
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"{self._file.name} cannot be written: {reason_of(error)}; requests decoded before are kept: make "
                "room, then continue with --resume"
            ) from None


def begin(path: Path, plan: Plan, provenance: Json) -> Folder:
    """Create a folder with a plan. Raises InputError if the path exists."""
    expect_new(path)
    record: Json = {"schema": SCHEMA, "kind": KIND, "plan": plan.to_json(), "sittings": [provenance]}
    record |= {"shares": [], "rows": None}
    hidden = path.with_name(f".{path.name}.tmp")  # so that no folder is without its plan
    with writing(path):
        hidden.mkdir(parents=True, exist_ok=True)
        Folder(hidden, record).save()
        os.rename(hidden, path)
    return Folder(path, record)


def open_run(path: Path) -> Folder:
    """Open the folder of a run.

    Raises InputError for another kind of folder, or another schema.
    """
    try:
        record = json.loads((path / RUN).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path / RUN} cannot be read: {reason_of(error)}; expected a folder of peagle sweep"
        ) from None
    except ValueError as error:
        raise InputError(f"{path / RUN} is not valid JSON ({error}); expected a folder of peagle sweep") from None
    schema = record.get("schema") if isinstance(record, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise InputError(f"{path} has schema {schema} of a newer peagle; expected at most {SCHEMA}: update peagle")
    if isinstance(record, dict) and record.get("kind") == IN_SHORT:
        raise InputError(f"{path} holds the summary of a run; expected the folder of peagle sweep, with its raw lines")
    if schema not in (2, SCHEMA) or record.get("kind") != KIND:
        raise InputError(f"{path} holds no run of peagle sweep (schema {schema}); expected schema {SCHEMA}")
    if schema == 2:  # its shares are of no single request, so they cannot be used
        record |= {"schema": SCHEMA, "shares": []}
    return Folder(path, record)


def sample_of(setting: Setting, arm: Arm, repeat: int, result: Result, bound: Json | None = None) -> Sample:
    """Make the line of a result."""
    counters = result.counters
    itl = np.quantile(result.itl_s, ITL_QUANTILES) if len(result.itl_s) >= FEWEST_WAITS else None
    return Sample(
        **dataclasses.asdict(setting),
        **dataclasses.asdict(arm),
        repeat=repeat,
        request=result.request.index,
        output_tokens=len(result.output_ids),
        finish_reason=result.finish_reason or "interrupted",
        loop_share=result.loop_share,
        ttft_s=_rounded(result.ttft_s),
        decode_s=_rounded(result.decode_s),
        itl_s=None if itl is None else tuple(round(float(seconds), 7) for seconds in itl),
        num_speculative_tokens=result.num_speculative_tokens,
        histogram=counters.histogram,
        verified=counters.verified,
        tried=counters.tried,
        num_plain_steps=counters.num_plain_steps,
        output_sha256=hashlib.sha256(dumps(result.output_ids).encode()).hexdigest()[:16],
        output_ids=result.output_ids if repeat == 0 and arm == PLAIN else None,
        bound=bound,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)


def _made(kind: type[Made], line: Json, path: Path, number: int) -> Made:
    """Make an object from a line. Raises InputError if keys are missing or unknown."""
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in line.items()})
    except TypeError as error:
        raise InputError(f"{path} line {number} is incomplete ({error}); remove the line, and resume the run") from None


def arm_of(line: Json) -> tuple[Setting, Arm]:
    """Return the setting and the arm of a line, or of a share."""
    setting = Setting(*(line[field.name] for field in dataclasses.fields(Setting)))
    ways = (line.get(name) for name in ("drafter", "draft_vocab", "concurrency", "drafter_window"))
    return setting, Arm(line["k"], *ways)


def _lines(path: Path) -> Iterator[tuple[int, Json]]:
    """Yield complete lines with their numbers.

    Raises InputError for a line that is no JSON object.

    A last line without a line break was cut off and is left out.
    """
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise InputError(f"{path} line {number} is no JSON object; remove the line, and resume the run")
        yield number, value


def _cut_torn_line(file: IO[bytes]) -> None:
    """Truncate the file after its last line break."""
    file.seek(0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)
    file.seek(0, os.SEEK_END)


def _write(path: Path, text: str) -> None:
    with writing(path):
        write_text_whole(path, text)
