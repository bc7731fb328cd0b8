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
from peagle.text.tokenizer import Tokenizer

DONE = "data: [DONE]\n\n"


@dataclass
class Form:
    """The parts of a reply that both kinds share."""

    model: str
    tokenizer: Tokenizer | None
    include_usage: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    kind, chunk_kind, prefix = "", "", ""  # of a reply; of a stream's chunk; of ids

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def whole(self, results: Sequence[Result], logprobs: Sequence[Sequence[TokenLogprobs]]) -> dict[str, Any]:
        """Make the reply of answers that have ended."""
        choices = [self.choice(place, result, logprobs[place]) for place, result in enumerate(results)]
        return {**self._head(self.kind), "choices": choices, "usage": usage(results), **metrics(results)}

    def first(self, place: int) -> list[dict[str, Any]]:
        """Make what precedes an answer's first part in a stream."""
        raise NotImplementedError

    def choice(self, place: int, result: Result, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, part: Part) -> dict[str, Any] | None:
        """Make a part's choice of a stream; None if the part shows nothing."""
        raise NotImplementedError

    def last(self, place: int, reason: str) -> dict[str, Any]:
        raise NotImplementedError

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

    def token(self, token_id: int) -> str:
        """Return a token's text, an incomplete character as U+FFFD; its id without a tokenizer."""
        return f"token_id:{token_id}" if self.tokenizer is None else self._bytes(token_id).decode("utf-8", "replace")

    def _bytes(self, token_id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass
class ChatForm(Form):
    """Chat completions. Content is the whole text of an answer."""

    logprobs: bool = False
    token_origins: bool = False
    _texts: dict[int, TokenTexts] = field(default_factory=dict)

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, place: int, result: Result, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {
            "index": place,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._logprobs(logprobs),
            "finish_reason": result.finish_reason,
        }

    def first(self, place: int) -> list[dict[str, Any]]:
        return [self._choice(place, {"role": "assistant", "content": ""}, None)]

    def delta(self, part: Part) -> dict[str, Any] | None:
        if not part.text and not part.logprobs and not self.token_origins:
            return None
        choice = self._choice(part.place, {"content": part.text}, None, part.logprobs)
        if self.token_origins and self.tokenizer is not None:
            texts = self._texts.setdefault(part.place, TokenTexts(self.tokenizer))
            choice["tokens"] = texts.of(part)
        return choice

    def last(self, place: int, reason: str) -> dict[str, Any]:
        return self._choice(place, {}, reason)

    def _choice(
        self, place: int, delta: dict[str, Any], reason: str | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> dict[str, Any]:
        entries = self._logprobs(logprobs) if logprobs else None
        return {"index": place, "delta": delta, "logprobs": entries, "finish_reason": reason}

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        entries = [
            {
                **self._entry(each.token_id, each.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in each.best],
            }
            for each in found
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.token(token_id), "logprob": logprob, "bytes": list(self._bytes(token_id))}


@dataclass
class CompletionForm(Form):
    """Completions of raw text. `echoed`: texts of the prompts, one for each answer, if they are wanted."""

    logprobs: bool = False
    echoed: Sequence[str] = ()
    _offsets: dict[int, int] = field(default_factory=dict)

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, place: int, result: Result, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        prompt = self.echoed[place] if self.echoed else ""
        return self._choice(place, prompt + (result.text or ""), result.finish_reason, logprobs)

    def first(self, place: int) -> list[dict[str, Any]]:
        return [self._choice(place, self.echoed[place], None)] if self.echoed else []

    def delta(self, part: Part) -> dict[str, Any] | None:
        if not part.text and not part.logprobs:
            return None
        return self._choice(part.place, part.text, None, part.logprobs)

    def last(self, place: int, reason: str) -> dict[str, Any]:
        return self._choice(place, "", reason)

    def _choice(
        self, place: int, text: str, reason: str | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> dict[str, Any]:
        entries = self._logprobs(place, logprobs) if self.logprobs and (logprobs or reason is None) else None
        return {"index": place, "text": text, "logprobs": entries, "finish_reason": reason}

    def _logprobs(self, place: int, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens = [self.token(each.token_id) for each in found]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(place, 0))
            self._offsets[place] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [{self.token(token): value for token, value in each.best} for each in found],
            "text_offset": offsets,
        }


def error_event(body: dict[str, Any]) -> str:
    """Make the last events of a stream that fails."""
    return _event(body) + DONE


def _event(value: dict[str, Any]) -> str:
    return f"data: {dumps(value, ensure_ascii=False)}\n\n"
