"""/v1/chat/completions: start the requests of a body, and write their reply or events."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.answers.result import Piece, Result
from peagle.base.strict_json import Written
from peagle.serve.bodies import ChatBody, StreamOptions
from peagle.serve.formatter import ChannelFormatter, ChoicesFormatter, Generation
from peagle.serve.open_answers import TokenTexts
from peagle.serve.replies import CallDelta, ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, Message
from peagle.serve.request_builder import notes
from peagle.serve.shared_state import SharedState
from peagle.serve.tools import CustomCalls
from peagle.text.channels import Delta

TEXT_FIELDS = {"function": "arguments", "custom": "input"}  # by type of the call


async def start(shared: SharedState, body: ChatBody, _owner: str = "") -> Generation:
    """Send the requests of a body to the engine."""
    requests = await shared.in_tokenizer_thread(shared.builder.chat, body, await shared.grammar(body))
    formatter = ChatFormatter(
        shared.model,
        shared.builder.tokenizer,
        tools=body.tools,
        one_call=not body.parallel_tool_calls,
        logprobs=body.logprobs,
        token_origins=body.return_token_origins,
        options=body.stream_options or StreamOptions(),
    )
    shared.log_once(*notes(body))
    return shared.generation(body, formatter, requests, channels=True)


@dataclass
class ChatFormatter(ChoicesFormatter, ChannelFormatter):
    """Chat completions."""

    logprobs: bool = False
    token_origins: bool = False
    # by index of the answer:
    _cut: set[int] = field(default_factory=set)  # answers that a stop string or token of the request ended
    _shown: dict[int, list[Delta]] = field(default_factory=lambda: collections.defaultdict(list))
    _texts: dict[int, TokenTexts] = field(default_factory=dict)
    _entries: dict[int, list[str]] = field(default_factory=lambda: collections.defaultdict(list))  # JSON

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def _choices(self, piece: Piece, is_first: bool) -> list[ChatChunkChoice]:
        index, deltas, custom = piece.index, self._deltas(piece), self._custom_calls(piece.index)
        if piece.cut:
            self._cut.add(index)
        self._shown[index] += deltas
        choices = []
        for delta in deltas:
            choices.append(_choice(index, _delta(delta, custom)))
            if entries := self._logprob_entries(piece, delta):
                self._entries[index] += entries
                choices[-1]["logprobs"] = _logprobs(entries)
        if self.token_origins and (tokens := self._texts.setdefault(index, TokenTexts()).of(piece)):
            choices = choices or [_choice(index, {"content": ""})]  # control tokens, or text that is held back
            choices[0]["tokens"] = tokens
        if is_first:
            choices.insert(0, _choice(index, {"role": "assistant", "content": ""}))
        if piece.finish_reason is not None:
            choices.append(_choice(index, {}, self._reason(index, piece.finish_reason)))
        return choices

    def _reply_choice(self, index: int, result: Result) -> ChatChoice:
        texts = {"reasoning": "", "content": ""}
        calls: dict[int, Any] = {}
        for delta in self._shown[index]:
            if delta.call is None:
                texts[delta.kind] += delta.text
            elif delta.call.index in calls:
                kind = calls[delta.call.index]["type"]
                calls[delta.call.index][kind][TEXT_FIELDS[kind]] += delta.text
            else:
                first = _call(delta, self._custom_calls(index))
                calls[delta.call.index] = {key: value for key, value in first.items() if key != "index"}
        message: Message = {"role": "assistant", "content": texts["content"], "refusal": None}
        if calls:
            message |= {"content": texts["content"] or None, "tool_calls": list(calls.values())}
        if texts["reasoning"]:
            message |= {"reasoning": texts["reasoning"], "reasoning_content": texts["reasoning"]}
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(self._entries[index]) if self.logprobs else None,
            "finish_reason": self._reason(index, result.finish_reason or "stop"),
        }

    def _reason(self, index: int, reason: str) -> Any:
        """Return the finish reason: "tool_calls" if the model ended the answer and it has a call."""
        calls = any(delta.call is not None for delta in self._shown[index])
        return "tool_calls" if calls and reason == "stop" and index not in self._cut else reason


def _choice(index: int, delta: ChatDelta, reason: Any = None) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _logprobs(entries: Sequence[str]) -> ChatLogprobs:
    return {"content": Written.array(entries), "refusal": None}


def _delta(delta: Delta, custom: CustomCalls) -> ChatDelta:
    """Make the delta of a reply. Reasoning has two names, since clients differ."""
    if delta.call is not None:
        return {"tool_calls": [_call(delta, custom)]}
    if delta.kind == "reasoning":
        return {"reasoning": delta.text, "reasoning_content": delta.text}
    return {"content": delta.text}


def _call(delta: Delta, custom: CustomCalls) -> CallDelta:
    """Make the delta of a call. Only the first has id and name; it has no text (see `CallDelta`)."""
    assert delta.call is not None
    index, is_custom = delta.call.index, custom.is_custom(delta.call)
    if delta.text and is_custom:
        return {"index": index, "custom": {"input": delta.text}}
    if delta.text:
        return {"index": index, "function": {"arguments": delta.text}}
    name, call_id = delta.call.name, delta.call.id
    if is_custom:
        return {"index": index, "id": call_id, "type": "custom", "custom": {"name": name, "input": ""}}
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
