"""Replies in OpenAI's form: chat completions and completions, whole and as streams."""

import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.engine.request import TokenLogprobs
from peagle.ops.strict_json import Written, dumps, number
from peagle.result import Result
from peagle.serve.answers import Part, TokenTexts, metrics, usage
from peagle.serve.errors import ApiError
from peagle.serve.schema import Tool
from peagle.serve.tools import CustomCalls
from peagle.text.channels import Delta
from peagle.text.tokenizer import Detokenizer, Tokenizer, detokenize

TEXT_OF_CALL = {"function": "arguments", "custom": "input"}
DONE = "data: [DONE]\n\n"


@dataclass
class Form:
    """The parts of a reply that both kinds share. Read every part of an answer (`read`), then make the whole.

    Log-probabilities are written as their parts arrive: those of many answers at once take seconds of the event loop.
    """

    model: str
    tokenizer: Tokenizer | None
    include_usage: bool = False
    continuous_usage: bool = False  # `used`, which whoever makes events sets, is in every chunk
    used: dict[str, Any] | None = None
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)  # answers of which a part was read
    _texts_of: dict[int, str] = field(default_factory=dict)  # tokens as JSON (`_written`)

    kind, chunk_kind, prefix = "", "", ""  # of a reply; of a stream's chunk; of ids

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def begin(self) -> str:
        """Make the events before the first part."""
        return ""

    def failed(self, error: ApiError) -> str:
        """Make the last events of a stream that fails."""
        return _event(error.body()) + DONE

    def read(self, part: Part) -> list[dict[str, Any]]:
        """Read a part of an answer; return its choices in a stream."""
        is_first = part.place not in self._begun
        self._begun.add(part.place)
        choices = [*(self._first(part.place) if is_first else ()), *self._middle(part)]
        if part.finish_reason is not None:
            choices.append(self._last(part.place, part.finish_reason))
        return choices

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """Make the reply of answers that have ended."""
        choices = [self._whole(place, result) for place, result in enumerate(results)]
        return {**self._head(self.kind), "choices": choices, "usage": usage(results), **metrics(results)}

    def event(self, choice: dict[str, Any]) -> str:
        """Make the event of one choice."""
        extra = {"usage": self.used} if self.include_usage else {}
        return _event({**self._head(self.chunk_kind), "choices": [choice], **extra})

    def end(self, results: Sequence[Result]) -> str:
        """Make the events after the last choice."""
        if not self.include_usage:
            return DONE
        found = {"choices": [], "usage": usage(results), **metrics(results)}
        return _event({**self._head(self.chunk_kind), **found}) + DONE

    def _first(self, place: int) -> list[dict[str, Any]]:
        """Make what precedes an answer's first part in a stream."""
        raise NotImplementedError

    def _middle(self, part: Part) -> list[dict[str, Any]]:
        """Make a part's choices in a stream; none if it shows nothing."""
        raise NotImplementedError

    def _last(self, place: int, reason: str) -> dict[str, Any]:
        """Make the choice that ends an answer's stream; it has no content."""
        raise NotImplementedError

    def _whole(self, place: int, result: Result) -> dict[str, Any]:
        raise NotImplementedError

    def _token(self, token_id: int) -> str:
        """Return a token's text, an incomplete character as U+FFFD; its id without a tokenizer."""
        return f"token_id:{token_id}" if self.tokenizer is None else self._bytes(token_id).decode("utf-8", "replace")

    def _written(self, token_id: int) -> str:
        """Return a token's text as JSON, written once."""
        found = self._texts_of.get(token_id)
        if found is None:
            found = self._texts_of[token_id] = self._write(token_id)
        return found

    def _write(self, token_id: int) -> str:
        return dumps(self._token(token_id), ensure_ascii=False)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass
class ChannelForm(Form):
    """What replies of answers whose channels are parsed share.

    tools: that the model may call. one_call: leave out all calls but the first.
    """

    tools: Sequence[Tool] = ()
    one_call: bool = False
    _custom: dict[int, CustomCalls] = field(default_factory=dict)

    def _custom_calls(self, place: int) -> CustomCalls:
        return self._custom.setdefault(place, CustomCalls(self.tools))

    def _deltas(self, part: Part) -> list[Delta]:
        """Return the part's deltas that the reply shows, those of custom tools' calls with their inputs."""
        deltas = self._custom_calls(part.place).read(part.deltas, at_end=part.finish_reason is not None)
        return [delta for delta in deltas if not (self.one_call and delta.call is not None and delta.call.index)]

    def _logprobs(self, part: Part, delta: Delta) -> list[str]:
        """Write the entries of the tokens of a content delta, if log-probabilities are wanted."""
        if delta.kind != "content":
            return []
        return [self._entry(logprobs) for _, logprobs in part.logprobs_of(delta)]

    def _entry(self, entry: TokenLogprobs) -> str:
        best = ", ".join(f"{self._written(token)}{number(value)}}}" for token, value in entry.best)
        return f'{self._written(entry.token_id)}{number(entry.logprob)}, "top_logprobs": [{best}]}}'

    def _write(self, token_id: int) -> str:
        """Write the entry of a token up to its log-probability."""
        entry = {"token": self._token(token_id), "bytes": list(self._bytes(token_id))}
        return f'{dumps(entry, ensure_ascii=False)[:-1]}, "logprob": '


@dataclass
class ChatForm(ChannelForm):
    """Chat completions."""

    logprobs: bool = False
    token_origins: bool = False
    _cut: set[int] = field(default_factory=set)  # answers that the request ended, not the model
    _told: dict[int, list[Delta]] = field(default_factory=dict)
    _texts: dict[int, TokenTexts] = field(default_factory=dict)
    _entries: dict[int, list[str]] = field(default_factory=dict)  # of tokens, with their log-probabilities

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _first(self, place: int) -> list[dict[str, Any]]:
        return [self._choice(place, {"role": "assistant", "content": ""}, None)]

    def _middle(self, part: Part) -> list[dict[str, Any]]:
        assert self.tokenizer is not None
        deltas, custom = self._deltas(part), self._custom_calls(part.place)
        if part.cut:
            self._cut.add(part.place)
        self._told.setdefault(part.place, []).extend(deltas)
        choices = []
        for delta in deltas:
            choices.append(self._choice(part.place, _delta(delta, custom), None))
            if entries := self._logprobs(part, delta):
                self._entries.setdefault(part.place, []).extend(entries)
                choices[-1]["logprobs"] = _logprobs(entries)
        if self.token_origins:
            tokens = self._texts.setdefault(part.place, TokenTexts(self.tokenizer)).of(part)
            if tokens and not choices:  # control tokens, or text that is held back
                choices = [self._choice(part.place, {"content": ""}, None)]
            if tokens:
                choices[0]["tokens"] = tokens
        return choices

    def _last(self, place: int, reason: str) -> dict[str, Any]:
        return self._choice(place, {}, self._reason(place, reason))

    def _whole(self, place: int, result: Result) -> dict[str, Any]:
        texts = {"reasoning": "", "content": ""}
        calls: dict[int, dict[str, Any]] = {}
        for delta in self._told.get(place, []):
            if delta.call is None:
                texts[delta.kind] += delta.text
            elif delta.call.index in calls:
                kind = calls[delta.call.index]["type"]
                calls[delta.call.index][kind][TEXT_OF_CALL[kind]] += delta.text
            else:
                first = _call(delta, self._custom_calls(place))
                calls[delta.call.index] = {key: value for key, value in first.items() if key != "index"}
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "refusal": None}
        if calls:
            message |= {"content": texts["content"] or None, "tool_calls": list(calls.values())}
        if texts["reasoning"]:
            message |= {"reasoning": texts["reasoning"], "reasoning_content": texts["reasoning"]}
        return {
            "index": place,
            "message": message,
            "logprobs": _logprobs(self._entries.get(place, [])) if self.logprobs else None,
            "finish_reason": self._reason(place, result.finish_reason or "stop"),
        }

    def _reason(self, place: int, reason: str) -> str:
        """Return "tool_calls" after an answer that ended itself and calls a function."""
        calls = any(delta.call is not None for delta in self._told.get(place, []))
        return "tool_calls" if calls and reason == "stop" and place not in self._cut else reason

    def _choice(self, place: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": place, "delta": delta, "logprobs": None, "finish_reason": reason}


def _logprobs(entries: Sequence[str]) -> dict[str, Any]:
    return {"content": Written.array(entries), "refusal": None}


def _delta(delta: Delta, custom: CustomCalls) -> dict[str, Any]:
    """Write a delta of one channel. Reasoning has two names, since clients differ."""
    if delta.call is not None:
        return {"tool_calls": [_call(delta, custom)]}
    if delta.kind == "reasoning":
        return {"reasoning": delta.text, "reasoning_content": delta.text}
    return {"content": delta.text}


def _call(delta: Delta, custom: CustomCalls) -> dict[str, Any]:
    """Write a delta of a call. Its first one alone, without text, names the call: clients join texts of all deltas."""
    assert delta.call is not None
    kind = "custom" if custom.is_custom(delta.call) else "function"
    if delta.text:
        return {"index": delta.call.index, kind: {TEXT_OF_CALL[kind]: delta.text}}
    named = {"name": delta.call.name, TEXT_OF_CALL[kind]: ""}
    return {"index": delta.call.index, "id": delta.call.id, "type": kind, kind: named}


@dataclass
class CompletionForm(Form):
    """Completions of raw text.

    `echoed`: texts of the prompts, one for each answer, if they are wanted; with log-probabilities also their ids, and
    the log-probabilities of all but their first tokens.
    """

    logprobs: bool = False
    echoed: Sequence[str] = ()
    prompts: Sequence[tuple[int, ...]] = ()
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    _entries: dict[int, dict[str, list[str]]] = field(default_factory=dict)

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _first(self, place: int) -> list[dict[str, Any]]:
        if not self.echoed:
            return []
        choice = self._choice(place, self.echoed[place], None)
        if self.logprobs:
            choice["logprobs"] = self._kept(place, self._of_prompt(place))
        return [choice]

    def _middle(self, part: Part) -> list[dict[str, Any]]:
        return [self._piece(part, delta) for delta in part.deltas]

    def _piece(self, part: Part, delta: Delta) -> dict[str, Any]:
        choice = self._choice(part.place, delta.text, None)
        if tokens := part.logprobs_of(delta):
            start = len(self.echoed[part.place]) if self.echoed else 0
            places = [start + token.place for token, _ in tokens]
            choice["logprobs"] = self._kept(part.place, self._columns([logprobs for _, logprobs in tokens], places))
        return choice

    def _last(self, place: int, reason: str) -> dict[str, Any]:
        return self._choice(place, "", reason)

    def _whole(self, place: int, result: Result) -> dict[str, Any]:
        prompt = self.echoed[place] if self.echoed else ""
        choice = self._choice(place, prompt + (result.text or ""), result.finish_reason)
        if self.logprobs:
            choice["logprobs"] = _joined(self._entries.get(place, self._columns([], [])))
        return choice

    def _choice(self, place: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": None, "finish_reason": reason}

    def _kept(self, place: int, columns: dict[str, list[str]]) -> dict[str, Written]:
        """Keep entries of log-probabilities for the whole reply; return them joined."""
        kept = self._entries.setdefault(place, {})
        for name, entries in columns.items():
            kept.setdefault(name, []).extend(entries)
        return _joined(columns)

    def _of_prompt(self, place: int) -> dict[str, list[str]]:
        """Make the entries of an echoed prompt. Its first token has no log-probability."""
        prompt, known = self.prompts[place], [TokenLogprobs(self.prompts[place][0], 0.0, ())]
        columns = self._columns([*known, *self.prompt_logprobs[place]], self._places(prompt, self.echoed[place]))
        columns["token_logprobs"][0] = columns["top_logprobs"][0] = "null"
        return columns

    def _places(self, prompt: Sequence[int], text: str) -> list[int]:
        """Find where a prompt's tokens stand in its text, before which the tokenizer may have put one."""
        if self.tokenizer is None:
            return [0] * len(prompt)
        texts = Detokenizer(self.tokenizer)
        lengths = [len(texts.add((token,))) for token in prompt]
        if detokenize(self.tokenizer, prompt) != text:
            lengths[0] = 0
        return [0, *itertools.accumulate(lengths[:-1])]

    def _columns(self, tokens: Sequence[TokenLogprobs], places: Sequence[int]) -> dict[str, list[str]]:
        """Write the entries of tokens, token column as texts of JSON. places: of the tokens in the text."""
        return {
            "tokens": [self._written(token.token_id) for token in tokens],
            "token_logprobs": [number(token.logprob) for token in tokens],
            "top_logprobs": [self._best(token) for token in tokens],
            "text_offset": list(map(str, places)),
        }

    def _best(self, found: TokenLogprobs) -> str:
        values = {self._written(token): number(value) for token, value in found.best}  # texts may be equal
        return f"{{{', '.join(f'{text}: {value}' for text, value in values.items())}}}"


def _joined(columns: dict[str, list[str]]) -> dict[str, Written]:
    return {name: Written.array(entries) for name, entries in columns.items()}


def _event(value: dict[str, Any]) -> str:
    return f"data: {dumps(value, ensure_ascii=False)}\n\n"
