"""Write the reply to one HTTP request, or its stream of events, from pieces of its answers."""

import contextlib
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from peagle.answers.result import Piece, Result
from peagle.base.strict_json import dumps, number
from peagle.engine.request import TokenLogprobs
from peagle.serve.bodies import StreamOptions, Tool
from peagle.serve.errors import ApiError
from peagle.serve.open_answers import OpenAnswers, figures, usage
from peagle.serve.tools import CustomCalls
from peagle.text.channels import Delta
from peagle.text.tokenizer import Tokenizer

DONE = "data: [DONE]\n\n"


@dataclass
class ResponseFormatter:
    """Formats the reply of an endpoint. `read` every piece; then `reply` makes a whole reply.

    Log-probabilities become JSON as their pieces arrive, since all at the end would block the event loop for seconds.
    results: returns those of the answers so far.
    """

    model: str
    tokenizer: Tokenizer | None
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    results: Callable[[], Sequence[Result]] = list
    _json_by_token: dict[int, str] = field(default_factory=dict)  # see `_token_json`

    prefix: ClassVar[str]  # of ids

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"

    def begin(self) -> str:
        """Write the events before the first piece."""
        return ""

    def read(self, piece: Piece) -> Sequence[Any]:
        """Read a piece of an answer; return the entries of its events."""
        raise NotImplementedError

    def event(self, entry: Any) -> str:
        """Write the event of an entry from `read`."""
        raise NotImplementedError

    def end(self) -> str:
        """Write the last events of a stream."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> str:
        """Write the last events of a stream that fails."""
        raise NotImplementedError

    def reply(self) -> Mapping[str, Any]:
        """Make the reply after all answers have ended."""
        raise NotImplementedError

    def close(self) -> None:
        """End a stream, which its client may have left."""

    def _token_json(self, token_id: int) -> str:
        """Return `_write_token`, which is called once per token id."""
        text = self._json_by_token.get(token_id)
        if text is None:
            text = self._json_by_token[token_id] = self._write_token(token_id)
        return text

    def _write_token(self, token_id: int) -> str:
        """Write a token's text as JSON: U+FFFD for an incomplete character, its id without a tokenizer."""
        data = f"token_id:{token_id}".encode() if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return dumps(data.decode("utf-8", "replace"), ensure_ascii=False)


@dataclass
class ChoicesFormatter(ResponseFormatter):
    """Replies with choices: those of chats and of completions."""

    options: StreamOptions = field(default_factory=StreamOptions)
    _begun: set[int] = field(default_factory=set)  # indices of answers of which a piece was read

    kind: ClassVar[str]  # of a reply
    chunk_kind: ClassVar[str]  # of an event

    def read(self, piece: Piece) -> list[Any]:
        is_first = piece.index not in self._begun
        self._begun.add(piece.index)
        return self._choices(piece, is_first)

    def event(self, entry: Any) -> str:
        extra, options = "", self.options
        if options.include_usage:
            extra = f', "usage": {dumps(usage(self.results()) if options.continuous_usage_stats else None)}'
        return f'data: {self._chunk_head}, "choices": [{dumps(entry, ensure_ascii=False)}]{extra}}}\n\n'

    def end(self) -> str:
        if not self.options.include_usage:
            return DONE
        results = self.results()
        extra = {"choices": [], "usage": usage(results), **figures(results)}
        return _event({**self._head(self.chunk_kind), **extra}) + DONE

    def failed(self, error: ApiError) -> str:
        return _event(error.body()) + DONE

    def reply(self) -> Mapping[str, Any]:
        results = self.results()
        choices = [self._reply_choice(index, result) for index, result in enumerate(results)]
        return {**self._head(self.kind), "choices": choices, "usage": usage(results), **figures(results)}

    def _choices(self, piece: Piece, is_first: bool) -> list[Any]:
        """Make the choices of a stream for a piece. The one that ends an answer has no content."""
        raise NotImplementedError

    def _reply_choice(self, index: int, result: Result) -> Any:
        """Make the choice of a whole reply."""
        raise NotImplementedError

    @functools.cached_property
    def _chunk_head(self) -> str:
        """The start of every event, as JSON."""
        return dumps(self._head(self.chunk_kind), ensure_ascii=False)[:-1]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass
class ChannelFormatter(ResponseFormatter):
    """Replies with parsed channels. tools: those that the model may call. one_call: show only the first call."""

    tools: Sequence[Tool] = ()
    one_call: bool = False
    _custom: dict[int, CustomCalls] = field(default_factory=dict)  # by index of the answer

    def _custom_calls(self, index: int) -> CustomCalls:
        return self._custom.setdefault(index, CustomCalls(self.tools))

    def _deltas(self, piece: Piece) -> list[Delta]:
        """Return the deltas that the reply shows. Calls of custom tools have inputs in place of arguments."""
        deltas = self._custom_calls(piece.index).read(piece.deltas, at_end=piece.finish_reason is not None)
        return [delta for delta in deltas if not (self.one_call and delta.call is not None and delta.call.index)]

    def _logprob_entries(self, piece: Piece, delta: Delta) -> list[str]:
        """Write the log-probabilities of a content delta's tokens, if the request sets logprobs."""
        if delta.kind != "content":
            return []
        return [self._entry(logprobs) for _, logprobs in piece.logprobs_of(delta)]

    def _entry(self, entry: TokenLogprobs) -> str:
        best = ", ".join(f"{self._token_json(token)}{number(value)}}}" for token, value in entry.best)
        return f'{self._token_json(entry.token_id)}{number(entry.logprob)}, "top_logprobs": [{best}]}}'

    def _write_token(self, token_id: int) -> str:
        """Write a token's entry up to the value of its log-probability."""
        data = b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return f'{{"token": {super()._write_token(token_id)}, "bytes": {[*data]}, "logprob": '


@dataclass(frozen=True)
class Generation:
    """The running requests of a body, and the formatter of their reply. `SharedState.finish` ends them."""

    stream: bool
    formatter: ResponseFormatter
    outputs: OpenAnswers

    def __post_init__(self) -> None:
        self.formatter.results = self.outputs.results

    async def reply(self) -> Mapping[str, Any]:
        """Read the answers to their end, and make the reply."""
        async with contextlib.aclosing(self.outputs.chunks()) as pieces:
            async for piece in pieces:
                self.formatter.read(piece)
        return self.formatter.reply()

    async def events(self) -> AsyncGenerator[str, None]:
        """Write the events of a stream. An error becomes an event."""
        formatter = self.formatter
        try:
            async with contextlib.aclosing(self.outputs.chunks()) as pieces:
                if begun := formatter.begin():
                    yield begun
                async for piece in pieces:
                    if events := "".join(map(formatter.event, formatter.read(piece))):
                        yield events
            yield formatter.end()
        except ApiError as error:
            yield formatter.failed(error)
        finally:
            formatter.close()


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {dumps(value, ensure_ascii=False)}\n\n"
