"""The folder of a run, written so that a run that is killed at any moment loses at most the request it was in, or all
that were decoded together with it.

    run.json        schema, plan, where it ran (one entry per sitting); at the end where the time of a step goes, and
                    the figures
    prompts.jsonl   a line per request: set, raw, row, turn, category, prompt_ids; and those left out, with the reason
    asking.jsonl    as long as that is not whole: a line per conversation
    raw.jsonl       a line per decoded request, in the order they were decoded

What else is there (README.md, report.html, pictures) follows from these.
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
from peagle.ops.files import expect_new, write_text_whole
from peagle.ops.strict_json import dumps
from peagle.result import Counters, Result

SCHEMA, KIND = 3, "sweep"
IN_SHORT = "sweep in short"  # what scripts.publish makes of a run
ITL_QUANTILES = (0.5, 0.9, 0.99)
FEWEST_WAITS = 4  # between arrivals, of which a quantile says anything
RUN, PROMPTS, ASKING, RAW = "run.json", "prompts.jsonl", "asking.jsonl", "raw.jsonl"

Json = dict[str, Any]
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request of a setting's prompts: the same for every arm and temperature."""

    prompts: str
    raw: bool
    request: int  # its number among them
    row: int  # of the conversation, from 0
    turn: int
    category: str | None
    prompt_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A conversation that was not asked, or not to its end, and why; or a row of the file that is none, which `why`
    names."""

    prompts: str
    raw: bool | None
    row: int | None
    why: str


@dataclasses.dataclass(frozen=True)
class Posed:
    """A conversation's requests, put together with the answers to its earlier turns; and why it ends early, if so."""

    prompts: str
    raw: bool
    row: int
    asked: tuple[Asked, ...]
    why: str | None


@dataclasses.dataclass(frozen=True)
class Sample:
    """What became of one request, decoded once: a line of raw.jsonl. Times in seconds."""

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
    output_sha256: str  # of the ids, shortened: tells whether two outputs are equal
    output_ids: tuple[int, ...] | None = None  # of plain decoding's first repeat
    concurrency: int | None = None
    drafter_window: str | None = None

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
        """Of the tokens behind the first, of which there must be some."""
        return (self.decode_s or 0.0) / (self.output_tokens - 1)

    @property
    def num_steps(self) -> int:
        """Passes of the target, plain ones among them."""
        return self.counters.num_steps + self.num_plain_steps


Key = tuple[Setting, Arm, int, int]  # a sample's: repeat, request


def key(sample: Sample) -> Key:
    return sample.setting, sample.arm, sample.repeat, sample.request


class Folder:
    """A run's folder: begun by `begin`, opened again by `open_run`."""

    def __init__(self, path: Path, record: Json) -> None:
        self.path, self.record = path, record
        try:
            self.plan = Plan.from_json(record["plan"])
            missing = [name for name in ("sittings", "shares", "rows") if name not in record]
        except (KeyError, TypeError) as error:
            missing = [repr(error)]
        if missing:
            raise InputError(f"{path / RUN} is not whole ({missing[0]}); expected what peagle sweep writes")

    @property
    def finished(self) -> bool:
        return self.record["rows"] is not None

    def save(self, **changes: Any) -> None:
        """run.json holds these, too."""
        self.record = self.record | changes
        _write(self.path / RUN, dumps(self.record, indent=1) + "\n")

    def discard(self) -> None:
        """The folder, as `begin` made it, is gone, unless anything was decoded: requests, or answers to ask with."""
        if not self.samples() and all(len(each.asked) < 2 for each in self.posed()):
            for name in (ASKING, RAW, RUN):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()

    def asked(self) -> tuple[list[Asked], list[LeftOut]] | None:
        """None where that is not known yet."""
        if not (self.path / PROMPTS).exists():
            return None
        found = [
            _made(LeftOut if "why" in line else Asked, line, self.path / PROMPTS, number)
            for number, line in _lines(self.path / PROMPTS)
        ]
        return [each for each in found if isinstance(each, Asked)], [e for e in found if isinstance(e, LeftOut)]

    def save_asked(self, posed: Sequence[Posed], left_out: Mapping[str, Sequence[str]]) -> None:
        """Write down all prompts, and the rows of each source that are left out; the file of those posed goes."""
        lines = [dataclasses.asdict(asked) for each in posed for asked in each.asked]
        lines += [dataclasses.asdict(LeftOut(name, None, None, why)) for name, some in left_out.items() for why in some]
        lines += [dataclasses.asdict(LeftOut(each.prompts, each.raw, each.row, each.why)) for each in posed if each.why]
        _write(self.path / PROMPTS, "".join(dumps(line) + "\n" for line in lines))
        (self.path / ASKING).unlink(missing_ok=True)

    def posed(self) -> list[Posed]:
        """The conversations that were put together before the run was cut off."""
        path = self.path / ASKING
        return [
            _made(Posed, {**line, "asked": [_made(Asked, each, path, number) for each in line["asked"]]}, path, number)
            for number, line in _lines(path)
        ]

    def samples(self) -> list[Sample]:
        """All that was decoded; a last line that was cut off is not there."""
        absent: Json = dict.fromkeys(("drafter", "draft_vocab", "loop_share", "ttft_s", "decode_s", "itl_s"))
        return [
            _made(Sample, absent | line, self.path / RAW, number)
            for number, line in _lines(self.path / RAW)
            if "error" not in line
        ]

    def errors(self) -> dict[tuple[Setting, Arm], str]:
        """Why arms could not go on, as it was last; of those that did later there is none."""
        found: dict[tuple[Setting, Arm], str] = {}
        for _, line in _lines(self.path / RAW):
            found.pop(where(line), None)
            if "error" in line:
                found[where(line)] = line["error"]
        return found

    @contextlib.contextmanager
    def appending(self, name: str = RAW) -> Iterator["Appender"]:
        """To raw.jsonl, or asking.jsonl. Raises InputError where another process is at it."""
        path = self.path / name
        try:
            file = path.open("a+b")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None
        with file:
            _lock(file, self.path)
            _cut_torn_line(file)
            yield Appender(file)


class Appender:
    """Lines at the end of a file: each is with the system before the next request begins."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def posed(self, posed: Posed) -> None:
        self._lines([dataclasses.asdict(posed)])

    def samples(self, samples: Sequence[Sample]) -> None:
        """Append lines that belong together: they are written together."""
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
                f"{self._file.name} cannot be written: {error.strerror}; what was decoded before is kept: make room, "
                "and go on with --resume"
            ) from None


def begin(path: Path, plan: Plan, provenance: Json) -> Folder:
    """The new folder holds the plan. Raises InputError where there is something already."""
    expect_new(path)
    record: Json = {"schema": SCHEMA, "kind": KIND, "plan": plan.to_json(), "sittings": [provenance]}
    record |= {"shares": [], "rows": None}
    hidden = path.with_name(f".{path.name}.tmp")  # a folder without its plan is never there
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        Folder(hidden, record).save()
        os.rename(hidden, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    return Folder(path, record)


def open_run(path: Path) -> Folder:
    """A run that was begun. Raises InputError for what is none, or of another schema."""
    try:
        record = json.loads((path / RUN).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path / RUN} cannot be read: {error.strerror}; expected a folder of peagle sweep") from None
    except ValueError as error:
        raise InputError(f"{path / RUN} is not valid JSON ({error}); expected a folder of peagle sweep") from None
    schema = record.get("schema") if isinstance(record, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise InputError(f"{path} was written by a newer peagle (schema {schema}, this one knows {SCHEMA}); update it")
    if isinstance(record, dict) and record.get("kind") == IN_SHORT:
        raise InputError(f"{path} holds a run in short; expected the folder of peagle sweep, with its raw lines")
    if schema not in (2, SCHEMA) or record.get("kind") != KIND:
        raise InputError(f"{path} holds no run of peagle sweep (schema {schema}); expected schema {SCHEMA}")
    if schema == 2:  # whose shares are not of a request: where a step's time goes is not known
        record |= {"schema": SCHEMA, "shares": []}
    return Folder(path, record)


def sample_of(setting: Setting, arm: Arm, repeat: int, result: Result) -> Sample:
    """A result as its line."""
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
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)


def _made(kind: type[Made], line: Json, path: Path, number: int) -> Made:
    """A line as what it stands for. Raises InputError for one that lacks something, or holds more."""
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in line.items()})
    except TypeError as error:
        raise InputError(
            f"{path} line {number} is not whole ({error}); take the line out, and resume the run"
        ) from None


def where(line: Json) -> tuple[Setting, Arm]:
    """The setting and the arm that a line, or a share, is of."""
    setting = Setting(*(line[field.name] for field in dataclasses.fields(Setting)))
    ways = (line.get(name) for name in ("drafter", "draft_vocab", "concurrency", "drafter_window"))
    return setting, Arm(line["k"], *ways)


def _lines(path: Path) -> Iterator[tuple[int, Json]]:
    """Whole lines, numbered. Raises InputError for one that is no JSON object; a last one without its line break was
    cut off, and is passed over."""
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
            raise InputError(f"{path} line {number} is damaged; take the line out, and resume the run")
        yield number, value


def _cut_torn_line(file: IO[bytes]) -> None:
    """The file ends with a line break, or is empty."""
    file.seek(0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)
    file.seek(0, os.SEEK_END)


def _lock(file: IO[bytes], path: Path) -> None:
    """Held until the file is closed, however the process ends."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: nothing to lock with
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"another process is writing to {path}; wait for it, or end it") from None


def _write(path: Path, text: str) -> None:
    try:
        write_text_whole(path, text)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
