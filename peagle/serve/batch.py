"""Answer files of requests in the format of OpenAI's Batch API, with the server's code and without HTTP.

An input line is {"custom_id": ..., "method": "POST", "url": one of ENDPOINTS, "body": ...}. An output line is
{"id": ..., "custom_id": ..., "response": {"status_code": ..., "request_id": ..., "body": ...}, "error": null}. Output
lines stand in the order in which answers end.

A malformed line gets an error and no response. A refused body gets a response with an error object. A second run
answers the lines that have no response with a status below 500. An answer's id is a hash of its request, so a second
run notices if a custom_id now has another request.
"""

import asyncio
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import pydantic_core

from peagle.base.errors import InputError
from peagle.base.files import locked, reason_of, write_whole
from peagle.base.settings import brief
from peagle.base.strict_json import dumps
from peagle.serve.app import ENDPOINTS
from peagle.serve.errors import ApiError
from peagle.serve.request_body import read_json
from peagle.serve.shared_state import SharedState

POLL_S = 0.1  # between checks for Ctrl-C
LINE_START = b'{"id": "batch_req_'  # of every output line

LOG = logging.getLogger("peagle.batch")


class LineError(Exception):
    """An input line is malformed."""

    def __init__(self, custom_id: str | None, message: str) -> None:
        super().__init__(message)
        self.custom_id, self.message = custom_id, message


@dataclass(frozen=True)
class Line:
    """An input line. body: JSON."""

    number: int  # from 1
    custom_id: str
    url: str
    body: bytes

    @property
    def id(self) -> str:
        parts = (self.custom_id.encode("utf-8", "surrogatepass"), self.url.encode(), self.body)
        return f"batch_req_{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:32]}"


@dataclass
class Answered:
    """The lines that a run keeps of an earlier output: those with a status below 500.

    ids, models: by custom_id. refused: custom_ids whose response is an error. has_others: the file has other lines,
    too, which the run removes.
    """

    lines: list[bytes] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    has_others: bool = False


@dataclass
class Counts:
    """Counts of input lines, and of the tokens of their answers."""

    total: int = 0
    known: int = 0  # answered by an earlier run
    known_refused: int = 0  # answered by an earlier run with an error object
    answered: int = 0
    refused: int = 0  # malformed, or answered with an error object
    failed: int = 0  # the server failed; the next run tries again
    tokens: int = 0

    @property
    def done(self) -> int:
        return self.known + self.answered + self.refused + self.failed

    @property
    def all_refused(self) -> bool:
        """Whether the file has lines and all of them were refused, by this run or an earlier one."""
        return 0 < self.total == self.refused + self.known_refused


def count_lines(source: Path) -> int:
    """Count the lines that are not blank. Raises InputError for a file that cannot be read twice."""
    try:
        if source.exists() and not source.is_file():  # a pipe can be read only once
            raise InputError(f"{source} is no regular file; expected a file with one request per line")
        with source.open("rb") as file:
            return sum(not line.isspace() for line in file)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {reason_of(error)}; expected one request per line") from None


def read_answers(out: Path) -> Answered:
    """Read the output of an earlier run.

    Leaves out malformed lines, failures of the server and a last line without its end, so that this run answers them.
    Raises InputError for a file that is no such output.
    """
    answered = Answered()
    if not out.exists():
        return answered
    *lines, cut = out.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            custom_id, response, answer_id = answer["custom_id"], answer["response"], answer["id"]
            status = None if response is None else int(response["status_code"])
            model = None if response is None else response["body"].get("model")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise _not_an_output(out, number) from None
        if isinstance(custom_id, str) and status is not None and status < 500:
            answered.lines.append(line + b"\n")
            answered.ids[custom_id] = str(answer_id)
            if status >= 400:
                answered.refused.add(custom_id)
            if isinstance(model, str):
                answered.models[custom_id] = model
    if not lines and not (LINE_START.startswith(cut) or cut.startswith(LINE_START)):
        raise _not_an_output(out, 1)
    answered.has_others = len(answered.lines) < len(lines) or bool(cut)
    return answered


def _not_an_output(out: Path, number: int) -> InputError:
    return InputError(f"{out} exists, and its line {number} is no answer of a batch; give another file, or remove it")


def known_answers(source: Path, out: Path, model: str) -> Answered:
    """Read the output of an earlier run. Raises InputError if it answers other requests or is of another model."""
    known = read_answers(out)
    for line in read_lines(source):
        if isinstance(line, Line) and known.ids.get(line.custom_id, line.id) != line.id:
            raise InputError(
                f"{out} has an answer to another request with the custom_id {brief(line.custom_id)} of line "
                f"{line.number}; give another file, or remove it"
            )
    if others := {*known.models.values()} - {model}:
        raise InputError(
            f"{out} has answers of the model {brief(others.pop())}, but this one is {brief(model)}; give another file, "
            "or load that model"
        )
    return known


def read_lines(source: Path) -> Iterator[Line | LineError]:
    """Parse the lines that are not blank; yield an error for a malformed one."""
    custom_ids: set[str] = set()
    with source.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.isspace():
                continue
            try:
                yield _read_line(number, text, custom_ids)
            except LineError as error:
                yield error


def _read_line(number: int, text: bytes, custom_ids: set[str]) -> Line:
    """Parse an input line and add its custom_id to `custom_ids`, those of the lines before. Raises LineError."""
    where = f"line {number}"
    try:
        fields = read_json(text)
    except ValueError as error:
        raise LineError(None, f"{where} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise LineError(None, f"{where} is {brief(fields)}; expected an object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError(None, f"the custom_id of {where} is {brief(custom_id)}; expected a text of its own")
    if custom_id in custom_ids:
        raise LineError(custom_id, f"the custom_id {brief(custom_id)} of {where} is also that of an earlier line")
    custom_ids.add(custom_id)
    if fields.get("method") != "POST":
        raise LineError(custom_id, f"the method of {where} is {brief(fields.get('method'))}; expected 'POST'")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise LineError(custom_id, f"the url of {where} is {brief(url)}; expected one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, dict):
        raise LineError(custom_id, f"the body of {where} is {brief(body)}; expected an object")
    return Line(number, custom_id, url, pydantic_core.to_json(body))


@runtime_checkable
class Answerer(Protocol):
    """What answers lines: the engine of this process (`EngineAnswerer`), or a server (`peagle.serve.remote`)."""

    @property
    def model(self) -> str:
        """Return the model's name."""
        ...

    @property
    def failure(self) -> str | None:
        """Say why no further line can be answered; None while they can."""
        ...

    async def reply(self, line: Line) -> tuple[Mapping[str, Any], str, int]:
        """Return (the reply to a line, its id, the number of its tokens). Raises ApiError for a refused one."""
        ...


@dataclass(frozen=True)
class EngineAnswerer:
    """Answers lines with the server's code."""

    shared: SharedState

    @property
    def model(self) -> str:
        return self.shared.model

    @property
    def failure(self) -> str | None:
        return self.shared.loop.failure

    async def reply(self, line: Line) -> tuple[Mapping[str, Any], str, int]:
        generation = await ENDPOINTS[line.url].generation(self.shared, line.body)
        try:
            if generation.stream:
                raise ApiError(400, "stream is set; a batch has no streams: leave it out", "stream")
            body = await generation.reply()
            return body, generation.formatter.id, sum(len(result.output_ids) for result in generation.results())
        finally:
            self.shared.finish(generation, line.url)


@dataclass
class BatchFile:
    """An input file and its output. at_once: the most lines in flight."""

    answerer: Answerer
    source: Path
    out: Path
    at_once: int
    counts: Counts = field(default_factory=Counts)

    async def run(self, should_stop: Callable[[], bool], progress: Callable[[Counts], object]) -> None:
        """Answer all lines that have no response. Stop early if `should_stop` returns true or the answerer fails.

        Raises InputError if another run writes the output, or if it has answers to other requests or of another model.
        """

        def ends() -> bool:
            progress(self.counts)
            return should_stop() or self.answerer.failure is not None

        self.counts.total = count_lines(self.source)
        with locked(self.out):
            known = known_answers(self.source, self.out, self.answerer.model)
            if known.has_others:
                write_whole(self.out, lambda path: path.write_bytes(b"".join(known.lines)))
            await self._answer_all(known, ends)
        progress(self.counts)

    async def _answer_all(self, known: Answered, ends: Callable[[], bool]) -> None:
        """Answer lines until `ends` returns true."""
        running: set[asyncio.Task[None]] = set()
        with self.out.open("ab") as file:
            try:
                for line in self._unanswered(known, file):
                    running.add(asyncio.create_task(self._answer(line, file)))
                    while not (stopped := ends()) and len(running) >= self.at_once:
                        running = await _wait(running)
                    if stopped:
                        break
                while running and not ends():
                    running = await _wait(running)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def _unanswered(self, known: Answered, file: BinaryIO) -> Iterator[Line]:
        """Yield the lines that have no response; write the errors of malformed ones."""
        for line in read_lines(self.source):
            if isinstance(line, LineError):
                self.counts.refused += 1
                _write(file, line.custom_id, None, {"code": "invalid_line", "message": line.message})
            elif line.custom_id in known.ids:
                self.counts.known += 1
                self.counts.known_refused += line.custom_id in known.refused
            else:
                yield line

    async def _answer(self, line: Line, file: BinaryIO) -> None:
        """Write the answer to a line, an error object if it is refused or the server fails."""
        request_id = f"req_{uuid.uuid4().hex}"
        try:
            body, request_id, num_tokens = await self.answerer.reply(line)
            self.counts.tokens += num_tokens
            status = 200
        except Exception as error:
            if not isinstance(error, ApiError | InputError):
                LOG.exception("the request %s failed", brief(line.custom_id))
            refusal = ApiError.of(error)
            body, status = refusal.body(), refusal.status
        if status == 200:
            self.counts.answered += 1
        elif status < 500:
            self.counts.refused += 1
        else:
            self.counts.failed += 1
        _write(file, line.custom_id, {"status_code": status, "request_id": request_id, "body": body}, None, line.id)


async def _wait(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until a task ends, at most POLL_S; return those that run. Raises if a task has failed."""
    done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return running


def _write(file: BinaryIO, custom_id: str | None, response: Any, error: Any, answer_id: str | None = None) -> None:
    """Append an output line and flush it, so that a run that is killed loses no answer."""
    answer_id = answer_id or f"batch_req_{uuid.uuid4().hex}"
    value = {"id": answer_id, "custom_id": custom_id, "response": response, "error": error}
    file.write(dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    file.flush()


def check_files(source: Path, out: Path, model: str) -> Counts:
    """Count the lines and those that have an answer, before a model is loaded. Writes nothing.

    Raises InputError for files that cannot be read or written, and as `known_answers`.
    """
    counts = Counts(total=count_lines(source))
    if not counts.total:
        raise InputError(f"{source} is empty; expected a request as JSON on each line")
    if out.exists() and os.path.samefile(source, out):
        raise InputError(f"{out} is the file of the requests; expected another one for the answers")
    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"{out} cannot be written; expected a file in a folder that exists")
    known = known_answers(source, out, model)
    answered = [line.custom_id for line in read_lines(source) if isinstance(line, Line) and line.custom_id in known.ids]
    counts.known, counts.known_refused = len(answered), len(known.refused.intersection(answered))
    return counts
