"""A request on its way through an engine."""

import collections
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from peagle.base.errors import InputError
from peagle.engine.grammar import Matcher
from peagle.engine.host.handoff import HandOff
from peagle.engine.memory.pages import PageTable
from peagle.engine.request import Drafting, FinishReason, Request, TokenChunk

_numbers = itertools.count()


class EngineError(RuntimeError):
    """The engine failed and cannot finish its requests."""


@dataclass(eq=False)
class Handle:
    """A request in an engine. `add` makes it; only the engine changes it."""

    request: Request
    stop_token_ids: tuple[int, ...]
    finished: FinishReason | None = None
    length: int = 0  # prompt and output tokens that the host has read, except the pending one
    output_ids: list[int] = field(default_factory=list, repr=False)  # output tokens that the host has read
    added_s: float = field(default_factory=time.perf_counter)  # a server sets when it got the request
    queued_s: float | None = None  # seconds until it had a slot; None: it has none yet, or began in another engine
    num_cached_tokens: int = 0  # tokens of the prompt that were in the prefix cache
    drafting: Drafting = Drafting.ALWAYS
    error: InputError | None = None  # if finished is "error"
    matcher: Matcher | None = None  # of its grammar; has read output_ids
    hand_off: HandOff | None = field(default=None, repr=False)  # received, until the request begins; or made at its end
    has_reader: bool = True  # False after its reader has aborted it
    inbox: collections.deque[TokenChunk] = field(default_factory=collections.deque, repr=False)

    table: PageTable | None = field(default=None, repr=False)  # its pages, while it has a slot
    rows_in_flight: int = 0  # the most that dispatches in flight add to `length`
    drafter_rows: int = 0  # leading indices of the drafter's pages that are final
    num_published: int = 0  # whole pages at the latest `publish_output`
    num_preempted: int = 0
    number: int = field(default_factory=_numbers.__next__)  # in order of arrival

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output that the host has read."""
        return [*self.request.prompt_ids, *self.output_ids]

    @property
    def computed_ids(self) -> Sequence[int]:
        """Tokens that must be in pages before its steps: prompt and output without the pending one."""
        if not self.output_ids:
            return self.request.prompt_ids
        return (*self.request.prompt_ids, *self.output_ids[:-1])

    def deliver(self, chunk: TokenChunk, error: InputError | None = None) -> None:
        """Put a chunk into the inbox. After the last one the request has ended, with this error if it failed."""
        self.error = error
        if chunk.finish_reason not in (None, "handed_off"):
            self.hand_off = None
        self.inbox.append(chunk)
        self.finished = chunk.finish_reason  # last: a reader that sees `finished` finds the chunk

    def finish(self, reason: FinishReason, error: InputError | None = None) -> None:
        """Deliver a last chunk without tokens, after the engine has dropped the request."""
        message = None if error is None else str(error)
        self.deliver(TokenChunk(self.request, (), time.perf_counter(), (), reason, error=message), error)
