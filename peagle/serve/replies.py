"""Replies in OpenAI's form: chat completions and completions, whole and as streams."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.engine.request import TokenLogprobs
from peagle.ops.strict_json import dumps
from peagle.result import Result
from peagle.serve.answers import Part, TokenTexts, metrics, usage
from peagle.serve.errors import ApiError
from peagle.text.channels import Delta
from peagle.text.tokenizer import Tokenizer

DONE = "data: [DONE]\n\n"


@dataclass
class Form:
    """The parts of a reply that both kinds share. Read every part of an answer (`read`), then ask for the whole."""

    model: str
    tokenizer: Tokenizer | None
    include_usage: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    _logprobs_of: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

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
        is_first = part.place not in self._logprobs_of
        self._logprobs_of.setdefault(part.place, []).extend(part.logprobs)
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
        extra = {"usage": None} if self.include_usage else {}
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

    def _bytes(self, token_id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass
class ChatForm(Form):
    """Chat completions, of answers whose channels are parsed. one_call: leave out all calls but the first."""

    logprobs: bool = False
    token_origins: bool = False
    one_call: bool = False
    _cut: set[int] = field(default_factory=set)  # answers that the request ended, not the model
    _deltas: dict[int, list[Delta]] = field(default_factory=dict)
    _texts: dict[int, TokenTexts] = field(default_factory=dict)

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _first(self, place: int) -> list[dict[str, Any]]:
        return [self._choice(place, {"role": "assistant", "content": ""}, None)]

    def _middle(self, part: Part) -> list[dict[str, Any]]:
        assert self.tokenizer is not None
        deltas = [each for each in part.deltas if not (self.one_call and each.call is not None and each.call.index)]
        if part.cut:
            self._cut.add(part.place)
        self._deltas.setdefault(part.place, []).extend(deltas)
        choices = [self._choice(part.place, _delta(delta), None) for delta in deltas]
        tokens = self._texts.setdefault(part.place, TokenTexts(self.tokenizer)).of(part) if self.token_origins else []
        if not choices and (part.logprobs or tokens):  # control tokens, or text that is held back
            choices = [self._choice(part.place, {"content": ""}, None)]
        if part.logprobs:
            choices[0]["logprobs"] = self._logprobs(part.logprobs)
        if tokens:
            choices[0]["tokens"] = tokens
        return choices

    def _last(self, place: int, reason: str) -> dict[str, Any]:
        return self._choice(place, {}, self._reason(place, reason))

    def _whole(self, place: int, result: Result) -> dict[str, Any]:
        texts = {"reasoning": "", "content": ""}
        calls: dict[int, dict[str, Any]] = {}
        for delta in self._deltas.get(place, []):
            if delta.call is None:
                texts[delta.kind] += delta.text
            elif delta.call.index in calls:
                calls[delta.call.index]["function"]["arguments"] += delta.text
            else:
                calls[delta.call.index] = {key: value for key, value in _call(delta).items() if key != "index"}
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "refusal": None}
        if calls:
            message |= {"content": texts["content"] or None, "tool_calls": list(calls.values())}
        if texts["reasoning"]:
            message |= {"reasoning": texts["reasoning"], "reasoning_content": texts["reasoning"]}
        return {
            "index": place,
            "message": message,
            "logprobs": self._logprobs(self._logprobs_of.get(place, [])) if self.logprobs else None,
            "finish_reason": self._reason(place, result.finish_reason or "stop"),
        }

    def _reason(self, place: int, reason: str) -> str:
        """Return "tool_calls" after an answer that ended itself and calls a function."""
        calls = any(delta.call is not None for delta in self._deltas.get(place, []))
        return "tool_calls" if calls and reason == "stop" and place not in self._cut else reason

    def _choice(self, place: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": place, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        entries = [
            {
                **self._entry(each.token_id, each.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in each.best],
            }
            for each in found
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token(token_id), "logprob": logprob, "bytes": list(self._bytes(token_id))}


def _delta(delta: Delta) -> dict[str, Any]:
    """Write a delta of one channel. Reasoning has two names, since clients differ."""
    if delta.call is not None:
        return {"tool_calls": [_call(delta)]}
    if delta.kind == "reasoning":
        return {"reasoning": delta.text, "reasoning_content": delta.text}
    return {"content": delta.text}


def _call(delta: Delta) -> dict[str, Any]:
    """Write a delta of a call. Its first one alone, without text, names the call: clients join texts of all deltas."""
    assert delta.call is not None
    if delta.text:
        return {"index": delta.call.index, "function": {"arguments": delta.text}}
    function = {"name": delta.call.name, "arguments": ""}
    return {"index": delta.call.index, "id": delta.call.id, "type": "function", "function": function}


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
    _offsets: dict[int, int] = field(default_factory=dict)

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _first(self, place: int) -> list[dict[str, Any]]:
        if not self.echoed:
            return []
        choice = self._choice(place, self.echoed[place], None)
        if self.logprobs:
            choice["logprobs"] = self._of_prompt(place)
        return [choice]

    def _middle(self, part: Part) -> list[dict[str, Any]]:
        if not part.text and not part.logprobs:
            return []
        choice = self._choice(part.place, part.text, None)
        if part.logprobs:
            choice["logprobs"] = self._entries(part.place, part.logprobs)
        return [choice]

    def _last(self, place: int, reason: str) -> dict[str, Any]:
        return self._choice(place, "", reason)

    def _whole(self, place: int, result: Result) -> dict[str, Any]:
        prompt = self.echoed[place] if self.echoed else ""
        choice = self._choice(place, prompt + (result.text or ""), result.finish_reason)
        if self.logprobs:
            self._offsets.pop(place, None)
            before = self._of_prompt(place) if self.echoed else {}
            after = self._entries(place, self._logprobs_of.get(place, []))
            choice["logprobs"] = {key: [*before.get(key, []), *entries] for key, entries in after.items()}
        return choice

    def _choice(self, place: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": None, "finish_reason": reason}

    def _of_prompt(self, place: int) -> dict[str, list[Any]]:
        """Make the entries of an echoed prompt. Its first token has no log-probability."""
        token = self._token(self.prompts[place][0])
        if not self.echoed[place].startswith(token):  # the tokenizer put it before the text
            self._offsets[place] = -len(token)
        first = self._entries(place, [TokenLogprobs(self.prompts[place][0], 0.0, ())])
        first |= {"token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        others = self._entries(place, self.prompt_logprobs[place])
        return {key: [*first[key], *others[key]] for key in first}

    def _entries(self, place: int, found: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        tokens = [self._token(each.token_id) for each in found]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(place, 0))
            self._offsets[place] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [{self._token(token): value for token, value in each.best} for each in found],
            "text_offset": offsets,
        }


def _event(value: dict[str, Any]) -> str:
    return f"data: {dumps(value, ensure_ascii=False)}\n\n"
