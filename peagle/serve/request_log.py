"""The log of requests: JSON lines about answers, refusals and what the server does not do. No prompt is logged."""

import asyncio
import collections
import logging
import time

from peagle.base.settings import brief
from peagle.base.strict_json import dumps
from peagle.serve.formatter import pooled, usage
from peagle.serve.generation import Generation

MOST_NOTES = 1000  # different notes: clients make some of them


class RequestLog:
    """Writes to a logger; None: nowhere. Call its methods in the server's event loop.

    pause_s: between two lines about requests that are refused under load, which count them.
    """

    def __init__(self, log: logging.Logger | None = None, pause_s: float = 5.0) -> None:
        self._log, self._pause_s, self._pausing = log, pause_s, False
        self._refused: collections.Counter[int] = collections.Counter()
        self._noted: set[str] = set()

    def _write(self, **fields: object) -> None:
        if self._log is not None:
            self._log.info(dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields}))

    def note(self, *lines: str) -> None:
        """Log these lines, each once in the life of the server."""
        for line in lines:
            if line not in self._noted and len(self._noted) < MOST_NOTES:
                self._noted.add(line)
                self._write(note=line)

    def refused_site(self, origin: str) -> None:
        self.note(f"a page of {brief(origin)} was refused; --allow-origin lets the pages of a site in")

    def refused(self, status: int) -> None:
        """Count a refusal under load: a line at once, then at most one after each pause."""
        self._refused[status] += 1
        if not self._pausing:
            self._write_refused()

    def _write_refused(self) -> None:
        self._pausing = bool(self._refused)
        if self._refused:
            self._write(refused=self._refused)
            self._refused = collections.Counter()
            asyncio.get_running_loop().call_later(self._pause_s, self._write_refused)

    def answered(self, generation: Generation, path: str, request_id: str) -> None:
        if self._log is None:
            return
        results = generation.results()
        counted, first = usage(results), results[0]
        self._write(
            id=generation.formatter.id,
            request_id=request_id,
            path=path,
            prompt_tokens=counted["prompt_tokens"],
            cached_tokens=counted["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=counted["completion_tokens"],
            finish_reasons=[result.finish_reason or "abort" for result in results],
            ttft_s=first.ttft_s,
            seconds=time.perf_counter() - first.started_s,
            acceptance_length=pooled(results).acceptance_length,
        )
