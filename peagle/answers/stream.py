"""Stream one answer, as an iterator and for `async for`."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence

from peagle.answers.result import Assembler, Result, follow, submit
from peagle.engine.devices.replicas import AnyEngine
from peagle.engine.grammar import GrammarError
from peagle.engine.host.handle import Handle
from peagle.engine.request import Request
from peagle.text.tokenizer import Tokenizer


class Stream(Iterator[str]):
    """Iterate over pieces of text, or without a tokenizer of token ids separated by spaces.

    No piece ends inside a character. `result` has the tokens and figures so far. Closing the stream, or dropping the
    last reference to it, ends its request and frees the slot.
    """

    def __init__(self, tokenizer: Tokenizer | None, engine: AnyEngine, request: Request) -> None:
        self._tokenizer, self._engine = tokenizer, engine
        self._assembler = Assembler(request, engine.config.num_drafts, tokenizer, time.perf_counter())
        self._handle: Handle | None = None
        self._closed = False
        self._pieces = self._run(request)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the request. Never blocks; any thread may call it, even while another waits for a piece."""
        self._closed = True  # before reading the handle: `_run` sets the handle, then reads _closed
        if self._handle is not None:
            self._engine.abort(self._handle)
        with contextlib.suppress(ValueError):  # another thread runs the generator, and will end it
            self._pieces.close()

    @property
    def result(self) -> Result:
        return self._assembler.result()

    def _run(self, request: Request) -> Generator[str]:
        self._engine.warm_up(
            sampled=not request.sampling.greedy,
            full_logits=request.full_logits,
            constrained=request.grammar is not None,
        )
        assemblers = submit(self._engine, [request], self._tokenizer)
        ((self._handle, self._assembler),) = assemblers.items()
        if self._closed:
            self._engine.abort(self._handle)
        try:
            with contextlib.closing(follow(self._engine, assemblers)) as pieces:
                for _, piece in pieces:
                    shown = show_ids(piece.token_ids) if self._tokenizer is None else piece.text
                    if shown:
                        yield shown
        finally:
            self._assembler.close()
        if (error := self.result.error) is not None:
            raise GrammarError(error)


class AsyncStream(AsyncIterator[str]):
    """Iterate over a stream with `async for`.

    A thread waits for the next piece, so the event loop is not blocked. Cancelling the iteration, or leaving `async
    with`, ends the request and frees its slot.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def __anext__(self) -> str:
        try:
            piece = await asyncio.to_thread(next, self._stream, None)
        except asyncio.CancelledError:
            self._stream.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        self._stream.close()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def result(self) -> Result:
        return self._stream.result


def show_ids(token_ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in token_ids)
