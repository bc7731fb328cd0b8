"""Write the reply to one HTTP request, or its stream of events, from pieces of its answers."""

import functools
import itertools
import operator
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from peagle.answers.result import Counters, Piece, Result
from peagle.base.strict_json import Written, dumps, number
from peagle.engine.request import Request, TokenLogprobs
from peagle.measure.metrics import speculative_decoding_block, total
from peagle.serve.bodies import CustomTool, StreamOptions, Tool
from peagle.serve.errors import ApiError
from peagle.serve.replies import Figures, Usage
from peagle.serve.tools import CustomCalls
from peagle.text.channels import Delta, ToolCall
from peagle.text.tokenizer import Tokenizer

DONE = "data: [DONE]\n\n"


@runtime_checkable
class Counted(Protocol):
    """An answer, complete or not, whose tokens are counted: an Assembler or a Result."""

    @property
    def request(self) -> Request: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_reasoning_tokens(self) -> int: ...


@dataclass
class Formatter:
    """Formats the reply of an endpoint. `read` makes entries of every piece: events, or parts of the whole reply.

    Log-probabilities become JSON as their pieces arrive, since all at the end would block the event loop for seconds.
    answers: what has been read of each. results: returns them as results, for which it copies their tokens.
    """

    model: str
    tokenizer: Tokenizer | None
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    answers: Sequence[Counted] = ()
    results: Callable[[], Sequence[Result]] = list
    _json_by_token: dict[int, str] = field(default_factory=dict)  # see `_token_json`

    prefix: ClassVar[str]  # of ids

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"

    def begin(self) -> str:
        """Write the events before the first piece."""
        return ""

    def read(self, piece: Piece) -> Sequence[Any]:
        """Read a piece of an answer; return its entries."""
        raise NotImplementedError

    def event(self, entry: Any) -> str:
        """Write the event of an entry."""
        raise NotImplementedError

    def end(self) -> str:
        """Write the last events of a stream."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> str:
        """Write the last events of a stream that fails."""
        raise NotImplementedError

    def reply(self, entries: Sequence[Any]) -> Mapping[str, Any]:
        """Make the whole reply of the entries of all pieces."""
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
class ChoicesFormatter(Formatter):
    """Replies with choices: those of chats and of completions. A whole choice is the sum of those of a stream."""

    options: StreamOptions = field(default_factory=StreamOptions)
    _begun: set[int] = field(default_factory=set)  # indices of answers of which a piece was read

    kind: ClassVar[str]  # of a reply
    chunk_kind: ClassVar[str]  # of an event

    def read(self, piece: Piece) -> list[Any]:
        is_first = piece.index not in self._begun
        if is_first:
            self._begun.add(piece.index)
        return self._choices(piece, is_first)

    def event(self, entry: Any) -> str:
        extra, options = "", self.options
        if options.include_usage:
            extra = f', "usage": {dumps(usage(self.answers) if options.continuous_usage_stats else None)}'
        return f'data: {self._chunk_head}, "choices": [{dumps(entry, ensure_ascii=False)}]{extra}}}\n\n'

    def end(self) -> str:
        if not self.options.include_usage:
            return DONE
        return _event({**self._head(self.chunk_kind), "choices": [], **self._figures()}) + DONE

    def failed(self, error: ApiError) -> str:
        return _event(error.body()) + DONE

    def reply(self, entries: Sequence[Any]) -> Mapping[str, Any]:
        choices = list(map(self._whole, _by_index(entries)))
        return {**self._head(self.kind), "choices": choices, **self._figures()}

    def _choices(self, piece: Piece, is_first: bool) -> list[Any]:
        """Make the choices of a stream for a piece. The one that ends an answer has no content."""
        raise NotImplementedError

    def _whole(self, choice: dict[str, Any]) -> Any:
        """Make the choice of a whole reply from the sum of a stream's choices."""
        raise NotImplementedError

    @functools.cached_property
    def _chunk_head(self) -> str:
        """The start of every event, as JSON."""
        return dumps(self._head(self.chunk_kind), ensure_ascii=False)[:-1]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _figures(self) -> dict[str, Any]:
        results = self.results()
        return {"usage": usage(results), **figures(results)}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {dumps(value, ensure_ascii=False)}\n\n"


def _sum(parts: Sequence[Any]) -> Any:
    """Add up values of a stream, as its clients do: texts and lists are joined, other values come once."""
    first, *others = parts = [part for part in parts if part is not None] or [None]
    if isinstance(first, dict):
        return {key: _sum([part.get(key) for part in parts]) for key in dict.fromkeys(itertools.chain(*parts))}
    if isinstance(first, list):
        items = [item for part in parts for item in part]
        return _by_index(items) if "index" in items[0] else items
    if isinstance(first, Written):
        return Written.joined(parts)
    return "".join(parts) if isinstance(first, str) and others else first


def _by_index(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add up the parts of each index."""
    index = operator.itemgetter("index")
    return [_sum([*same]) for _, same in itertools.groupby(sorted(parts, key=index), index)]


@dataclass
class ChannelFormatter(Formatter):
    """Replies with parsed channels. tools: those that the model may call. one_call: show only the first call."""

    tools: Sequence[Tool] = ()
    one_call: bool = False
    _custom: dict[int, CustomCalls] = field(default_factory=dict)  # by index of the answer

    @functools.cached_property
    def _custom_names(self) -> set[str]:
        return {tool.name for tool in self.tools if isinstance(tool, CustomTool)}

    def _is_custom(self, call: ToolCall) -> bool:
        return call.name in self._custom_names

    def _deltas(self, piece: Piece) -> Sequence[Delta]:
        """Return the deltas that the reply shows. Calls of custom tools have inputs in place of arguments."""
        deltas = piece.deltas
        if self._custom_names:
            custom = self._custom.setdefault(piece.index, CustomCalls(self._custom_names))
            deltas = custom.read(deltas, at_end=piece.finish_reason is not None)
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


def usage(answers: Sequence[Counted]) -> Usage:
    """Count tokens. A prompt with n answers counts once."""
    prompts = [answer for answer in answers if answer.request.index == 0]
    prompt = sum(len(answer.request.prompt_ids) for answer in prompts)
    completion = sum(answer.num_output_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached_tokens for answer in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(answer.num_reasoning_tokens for answer in answers)},
    }


def pooled(results: Sequence[Result]) -> Counters:
    return total([result.counters for result in results])


def figures(results: Sequence[Result]) -> dict[str, Figures]:
    """Return the reply's field `metrics`, with counts of its steps under vLLM's names; no field in plain decoding."""
    counters = pooled(results)
    if not counters.num_speculative_tokens:
        return {}
    block: Any = speculative_decoding_block(counters)
    del block["num_plain_steps"]  # vLLM has none
    return {"metrics": {"speculative_decoding": block}}
