"""Files of requests in the form of OpenAI's Batch API, answered by the server's code without a server.

A line of the input is {"custom_id": ..., "method": "POST", "url": one of CALLS, "body": ...}; a line of the output
{"id": ..., "custom_id": ..., "response": {"status_code": ..., "request_id": ..., "body": ...}, "error": null}, in the
order in which the answers end. A line that is none gets an error in place of a response, a body that is none an error
object as its response's body. Lines with a response are answered; a second run begins with the others.
"""

import asyncio
import json
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pydantic_core

from peagle.ops.errors import InputError
from peagle.ops.files import write_whole
from peagle.ops.strict_json import dumps
from peagle.serve.app import CALLS, Service, whole
from peagle.serve.errors import ApiError
from peagle.text.prompts import brief

BEGINS = b'{"id": "batch_req_'  # a line of the output
POLL_S = 0.1  # between looks at Ctrl-C


class LineError(Exception):
    """A line of the input that is no request."""

    def __init__(self, custom_id: str | None, message: str) -> None:
        super().__init__(message)
        self.custom_id, self.message = custom_id, message


@dataclass(frozen=True)
class Line:
    """A request of the input. body: its JSON."""

    custom_id: str
    url: str
    body: bytes


@dataclass
class Counts:
    """Lines of the input by what became of them. known: answered by an earlier run. tokens: of the answers."""

    total: int = 0
    known: int = 0
    answered: int = 0
    refused: int = 0  # by an error object, or as a line that is none
    failed: int = 0  # by the server, not by the request; the next run asks again
    tokens: int = 0

    @property
    def done(self) -> int:
        return self.known + self.answered + self.refused + self.failed


def count_lines(source: Path) -> int:
    """Count the lines of a file that are not blank. Raises InputError if it cannot be read."""
    try:
        with source.open("rb") as file:
            return sum(not line.isspace() for line in file)
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}; expected requests, one a line") from None


@dataclass(frozen=True)
class Known:
    """What an earlier run answered. custom_ids: of lines with a response, which `lines` holds, whole."""

    custom_ids: frozenset[str] = frozenset()
    lines: tuple[bytes, ...] = ()
    as_it_is: bool = True  # the file holds these lines and nothing else


def read_answers(out: Path) -> Known:
    """Read an earlier run's output. Raises InputError for a file of something else.

    Lines without a response are asked again: errors of lines and of the server, and a last line that was cut off.
    """
    if not out.exists():
        return Known()
    kept: list[bytes] = []
    ids: set[str] = set()
    content = out.read_bytes()
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            custom_id, response = found["custom_id"], found["response"]
            status = None if response is None else int(response["status_code"])
        except (ValueError, TypeError, KeyError, RecursionError):
            cut = number == len(lines) and not line.endswith(b"\n")
            if cut and line[: len(BEGINS)] == BEGINS[: len(line)]:
                continue
            raise InputError(
                f"{out} exists, and its line {number} is no answer of a batch; give another file, or remove it"
            ) from None
        if isinstance(custom_id, str) and status is not None and status < 500:
            ids.add(custom_id)
            kept.append(line.rstrip(b"\n") + b"\n")
    return Known(frozenset(ids), tuple(kept), b"".join(kept) == content)


def read_line(number: int, text: bytes, seen: set[str]) -> Line:
    """Read a line of the input. Raises LineError, with its custom_id if it has one, for one that is none."""
    where = f"line {number}"
    try:
        given = pydantic_core.from_json(text)
    except ValueError as error:
        raise LineError(None, f"{where} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise LineError(None, f"{where} is {brief(given)}; expected an object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError(None, f"the custom_id of {where} is {brief(custom_id)}; expected a text of its own")
    if custom_id in seen:
        raise LineError(custom_id, f"the custom_id {brief(custom_id)} of {where} is that of a line before it")
    seen.add(custom_id)
    if given.get("method") != "POST":
        raise LineError(custom_id, f"the method of {where} is {brief(given.get('method'))}; expected 'POST'")
    url, body = given.get("url"), given.get("body")
    if not isinstance(url, str) or url not in CALLS:
        raise LineError(custom_id, f"the url of {where} is {brief(url)}; expected one of {', '.join(CALLS)}")
    if not isinstance(body, dict):
        raise LineError(custom_id, f"the body of {where} is {brief(body)}; expected an object")
    return Line(custom_id, url, pydantic_core.to_json(body))


@dataclass
class Batch:
    """A file that is being answered. at_once: lines whose requests are under way."""

    service: Service
    source: Path
    out: Path
    at_once: int
    counts: Counts = field(default_factory=Counts)

    async def run(self, asked_to_stop: Callable[[], bool], progress: Callable[[Counts], object]) -> None:
        """Answer all lines that have no response yet.

        Ends early, with what was answered until then, if `asked_to_stop` becomes true, or if the engine fails.
        """
        self.counts.total = count_lines(self.source)
        answered = read_answers(self.out)
        if not answered.as_it_is:
            write_whole(self.out, lambda path: path.write_bytes(b"".join(answered.lines)))
        known = answered.custom_ids
        running: set[asyncio.Task[None]] = set()
        with self.out.open("ab") as file, self.source.open("rb") as source:
            try:
                async for line in self._wanted(source, known, file):
                    running.add(asyncio.create_task(self._answer(line, file)))
                    running = await self._wait(running, self.at_once - 1, asked_to_stop, progress)
                    if self._ends(asked_to_stop):
                        break
                await self._wait(running, 0, asked_to_stop, progress)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def _ends(self, asked_to_stop: Callable[[], bool]) -> bool:
        return asked_to_stop() or self.service.loop.failure is not None

    async def _wanted(self, source: Iterable[bytes], known: frozenset[str], file: BinaryIO) -> AsyncIterator[Line]:
        """Yield the lines without a response; write the errors of those that are none."""
        seen: set[str] = set()
        for number, text in enumerate(source, 1):
            if text.isspace():
                continue
            try:
                line = read_line(number, text, seen)
            except LineError as error:
                self.counts.refused += 1
                _write(file, error.custom_id, None, {"code": "invalid_line", "message": error.message})
                continue
            if line.custom_id in known:
                self.counts.known += 1
            else:
                yield line

    async def _wait(
        self,
        running: set[asyncio.Task[None]],
        most: int,
        asked_to_stop: Callable[[], bool],
        progress: Callable[[Counts], object],
    ) -> set[asyncio.Task[None]]:
        """Wait until at most so many tasks run, or until the end; return those that do."""
        while True:
            progress(self.counts)
            if len(running) <= most or self._ends(asked_to_stop):
                return running
            done, running = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _answer(self, line: Line, file: BinaryIO) -> None:
        """Answer a line and write its response; one of the server's failure is asked again by the next run."""
        try:
            asked = await CALLS[line.url](self.service, line.body)
            try:
                if asked.stream:
                    raise ApiError(400, "stream is set; a batch has no streams: leave it out", "stream")
                body, status, name = await whole(asked), 200, asked.form.id
            finally:
                self.service.finish(asked.answers, line.url, asked.form.id)
        except Exception as error:
            refused = _refusal(error)
            body, status, name = refused.body(), refused.status, f"req_{uuid.uuid4().hex}"
        if status >= 500:
            self.counts.failed += 1
        elif status == 200:
            self.counts.answered += 1
            self.counts.tokens += sum(len(result.output_ids) for result in asked.answers.results())
        else:
            self.counts.refused += 1
        _write(file, line.custom_id, {"status_code": status, "request_id": name, "body": body}, None)


def _refusal(error: Exception) -> ApiError:
    """Return the error object of whatever went wrong with a line. What nobody expected is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    logging.getLogger("peagle.batch").error("a line failed", exc_info=error)
    return ApiError(500, f"the server failed at this request ({type(error).__name__}); the log has more")


def _write(file: BinaryIO, custom_id: str | None, response: Any, error: Any) -> None:
    """Append a line, whole: another run may follow at any time."""
    value = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    file.write(dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    file.flush()


def check_files(source: Path, out: Path) -> None:
    """Raise InputError, before anything slow, for files that cannot be read or written."""
    count_lines(source)
    if not source.is_file():
        raise InputError(f"{source} is no regular file; expected one, since its lines are counted first")
    if out.exists() and os.path.samefile(source, out):
        raise InputError(f"{out} is the file of the requests; expected another one for the answers")
    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"{out} cannot be written; expected a file in a folder that exists")
    read_answers(out)
