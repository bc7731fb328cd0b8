"""Files of requests in the form of OpenAI's Batch API, answered by the server's code without a server.

A line of the input is {"custom_id": ..., "method": "POST", "url": one of ENDPOINTS, "body": ...}; a line of the output
{"id": ..., "custom_id": ..., "response": {"status_code": ..., "request_id": ..., "body": ...}, "error": null}, in the
order in which the answers end. A malformed line gets an error and no response; a refused body gets a response with an
error object. A second run answers all lines without a response below 500. An answer's id is a hash of its request:
a changed request under the same custom_id is noticed.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pydantic_core

from peagle.ops.errors import InputError
from peagle.ops.files import locked, reason_of, write_whole
from peagle.ops.settings import brief
from peagle.ops.strict_json import dumps
from peagle.serve.app import ENDPOINTS
from peagle.serve.errors import ApiError
from peagle.serve.service import Service

POLL_S = 0.1  # between looks at Ctrl-C
BEGINNING = b'{"id": "batch_req_'  # of an answer's line


LOG = logging.getLogger("peagle.batch")


class LineError(Exception):
    """A malformed line of the input."""

    def __init__(self, custom_id: str | None, message: str) -> None:
        super().__init__(message)
        self.custom_id, self.message = custom_id, message


@dataclass(frozen=True)
class Line:
    """A request of the input. body: its JSON."""

    custom_id: str
    url: str
    body: bytes

    @property
    def id(self) -> str:
        parts = (self.custom_id.encode("utf-8", "surrogatepass"), self.url.encode(), self.body)
        return f"batch_req_{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:32]}"


@dataclass
class Answered:
    """The lines of an earlier output with a response below 500. ids, models: of the answers, by custom_id.

    refused: custom_ids whose response is an error. changed: the file holds more than these lines.
    """

    lines: list[bytes] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    changed: bool = False


@dataclass
class Counts:
    """Counts of input lines, and the tokens of their answers."""

    total: int = 0
    known: int = 0  # with a response of an earlier run
    known_refused: int = 0  # of these, the ones whose response is an error
    answered: int = 0
    refused: int = 0  # malformed, or answered with an error object
    failed: int = 0  # by the server's fault; the next run tries again
    tokens: int = 0

    @property
    def done(self) -> int:
        return self.known + self.answered + self.refused + self.failed

    @property
    def all_refused(self) -> bool:
        """Whether there are lines, and each was refused, now or before."""
        return 0 < self.total == self.refused + self.known_refused


def count_lines(source: Path) -> int:
    """Count the lines of a file that are not blank. Raises InputError if it cannot be read twice."""
    try:
        if source.exists() and not source.is_file():  # a pipe can be read only once
            raise InputError(f"{source} is no regular file; expected a file with one request per line")
        with source.open("rb") as file:
            return sum(not line.isspace() for line in file)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {reason_of(error)}; expected one request per line") from None


def read_answers(out: Path) -> Answered:
    """Read an earlier run's output, without errors of lines or of the server, and without a cut-off last line.

    Raises InputError for another kind of file.
    """
    answered = Answered()
    if not out.exists():
        return answered
    *lines, cut = out.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            custom_id, response, own_id = answer["custom_id"], answer["response"], answer["id"]
            status = None if response is None else int(response["status_code"])
            model = None if response is None else response["body"].get("model")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise _no_answers(out, number) from None
        if isinstance(custom_id, str) and status is not None and status < 500:
            answered.lines.append(line + b"\n")
            answered.ids[custom_id] = str(own_id)
            if status >= 400:
                answered.refused.add(custom_id)
            if isinstance(model, str):
                answered.models[custom_id] = model
    if not lines and not (BEGINNING.startswith(cut) or cut.startswith(BEGINNING)):
        raise _no_answers(out, len(lines) + 1)
    answered.changed = len(answered.lines) < len(lines) or bool(cut)
    return answered


def _no_answers(out: Path, number: int) -> InputError:
    return InputError(f"{out} exists, and its line {number} is no answer of a batch; give another file, or remove it")


def check_same(source: Path, out: Path, known: Answered) -> None:
    """Raise InputError if a custom_id was answered for another request."""
    custom_ids: set[str] = set()
    with source.open("rb") as file:
        for number, text in enumerate(file, 1):
            with contextlib.suppress(LineError):
                line = read_line(number, text, custom_ids)
                if known.ids.get(line.custom_id, line.id) != line.id:
                    raise InputError(
                        f"{out} has an answer to another request with the custom_id {brief(line.custom_id)} of line "
                        f"{number}; give another file, or remove it"
                    )


def read_line(number: int, text: bytes, custom_ids: set[str]) -> Line:
    """Read a line of the input, and add its custom_id to those before it. Raises LineError for a malformed line."""
    where = f"line {number}"
    try:
        fields = pydantic_core.from_json(text)
    except ValueError as error:
        raise LineError(None, f"{where} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise LineError(None, f"{where} is {brief(fields)}; expected an object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError(None, f"the custom_id of {where} is {brief(custom_id)}; expected a text of its own")
    if custom_id in custom_ids:
        raise LineError(custom_id, f"the custom_id {brief(custom_id)} of {where} is that of a line before it")
    custom_ids.add(custom_id)
    if fields.get("method") != "POST":
        raise LineError(custom_id, f"the method of {where} is {brief(fields.get('method'))}; expected 'POST'")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise LineError(custom_id, f"the url of {where} is {brief(url)}; expected one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, dict):
        raise LineError(custom_id, f"the body of {where} is {brief(body)}; expected an object")
    return Line(custom_id, url, pydantic_core.to_json(body))


@dataclass
class BatchFile:
    """Answer a file. at_once: the most lines in flight."""

    service: Service
    source: Path
    out: Path
    at_once: int
    counts: Counts = field(default_factory=Counts)

    async def run(self, should_stop: Callable[[], bool], progress: Callable[[Counts], object]) -> None:
        """Answer all lines without a response. Stop early if `should_stop` returns true, or if the engine fails.

        Raises InputError if another run writes the output, or if it holds answers to other requests or of another
        model.
        """
        self.counts.total = count_lines(self.source)
        with locked(self.out):
            known = read_answers(self.out)
            check_same(self.source, self.out, known)
            if others := {*known.models.values()} - {self.service.model}:
                raise InputError(
                    f"{self.out} has answers of the model {brief(others.pop())}, and {brief(self.service.model)} is "
                    "loaded; give another file, or load that model"
                )
            if known.changed:
                write_whole(self.out, lambda path: path.write_bytes(b"".join(known.lines)))
            await self._run(known, should_stop, progress)

    async def _run(
        self, known: Answered, should_stop: Callable[[], bool], progress: Callable[[Counts], object]
    ) -> None:
        running: set[asyncio.Task[None]] = set()
        with self.out.open("ab") as file, self.source.open("rb") as source:
            try:
                async for line in self._unanswered(source, known, file):
                    running.add(asyncio.create_task(self._answer(line, file)))
                    running = await self._wait(running, self.at_once - 1, should_stop, progress)
                    if self._ends(should_stop):
                        break
                await self._wait(running, 0, should_stop, progress)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def _ends(self, should_stop: Callable[[], bool]) -> bool:
        return should_stop() or self.service.loop.failure is not None

    async def _unanswered(self, source: Iterable[bytes], known: Answered, file: BinaryIO) -> AsyncIterator[Line]:
        """Yield the lines without a response; write the errors of malformed ones."""
        custom_ids: set[str] = set()
        for number, text in enumerate(source, 1):
            if text.isspace():
                continue
            try:
                line = read_line(number, text, custom_ids)
            except LineError as error:
                self.counts.refused += 1
                _write(file, error.custom_id, None, {"code": "invalid_line", "message": error.message})
                continue
            if line.custom_id in known.ids:
                self.counts.known += 1
                self.counts.known_refused += line.custom_id in known.refused
            else:
                yield line

    async def _wait(
        self,
        running: set[asyncio.Task[None]],
        most: int,
        should_stop: Callable[[], bool],
        progress: Callable[[Counts], object],
    ) -> set[asyncio.Task[None]]:
        """Wait until at most `most` tasks run, or until the end; return the running ones."""
        while True:
            progress(self.counts)
            if len(running) <= most or self._ends(should_stop):
                return running
            done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _answer(self, line: Line, file: BinaryIO) -> None:
        name = f"req_{uuid.uuid4().hex}"
        try:
            body, name = await self._reply(line)
            status = 200
        except (ApiError, InputError) as error:
            refused = error if isinstance(error, ApiError) else ApiError.of(error)
            body, status = refused.body(), refused.status
        except Exception as error:
            LOG.exception("the request %s failed", brief(line.custom_id))
            failed = ApiError.unforeseen(error)
            body, status = failed.body(), failed.status
        if status == 200:
            self.counts.answered += 1
        elif status < 500:
            self.counts.refused += 1
        else:
            self.counts.failed += 1
        _write(file, line.custom_id, {"status_code": status, "request_id": name, "body": body}, None, line.id)

    async def _reply(self, line: Line) -> tuple[Mapping[str, Any], str]:
        """Return (the reply to a line, its id)."""
        generation = await ENDPOINTS[line.url].generation(self.service, line.body)
        try:
            if generation.stream:
                raise ApiError(400, "stream is set; a batch has no streams: leave it out", "stream")
            body = await generation.whole()
            self.counts.tokens += sum(len(result.output_ids) for result in generation.outputs.results())
            return body, generation.formatter.id
        finally:
            self.service.finish(generation, line.url)


def _write(file: BinaryIO, custom_id: str | None, response: Any, error: Any, own_id: str | None = None) -> None:
    """Append a line, whole: another run may follow at any time."""
    own_id = own_id or f"batch_req_{uuid.uuid4().hex}"
    value = {"id": own_id, "custom_id": custom_id, "response": response, "error": error}
    file.write(dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    file.flush()


def check_files(source: Path, out: Path) -> None:
    """Raise InputError, before anything slow, for files that cannot be read or written. Writes nothing."""
    if not count_lines(source):
        raise InputError(f"{source} is empty; expected a request as JSON on each line")
    if out.exists() and os.path.samefile(source, out):
        raise InputError(f"{out} is the file of the requests; expected another one for the answers")
    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"{out} cannot be written; expected a file in a folder that exists")
    check_same(source, out, read_answers(out))
