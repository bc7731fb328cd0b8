"""/v1/chat/completions: start the requests of a body, and write their reply or events."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.answers.result import Piece
from peagle.base.strict_json import Written
from peagle.serve.bodies import ChatBody, StreamOptions
from peagle.serve.formatter import ChannelFormatter, ChoicesFormatter
from peagle.serve.generation import Generation
from peagle.serve.replies import CallDelta, ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, Message, TokenOrigin
from peagle.serve.request_builder import notes
from peagle.serve.shared_state import SharedState
from peagle.text.channels import Delta, ToolCall


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
    shared.log.note(*notes(body))
    return shared.generation(body, formatter, requests, channels=True)


@dataclass
class ChatFormatter(ChoicesFormatter, ChannelFormatter):
    """Chat completions."""

    logprobs: bool = False
    token_origins: bool = False
    _called: set[int] = field(default_factory=set)  # indices of answers that have a call
    _texts: dict[int, "TokenTexts"] = field(default_factory=dict)  # by index of the answer

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def _choices(self, piece: Piece, is_first: bool) -> list[ChatChunkChoice]:
        index, choices = piece.index, list[ChatChunkChoice]()
        for delta in self._deltas(piece):
            choices.append(_choice(index, self._delta(delta)))
            if entries := self._logprob_entries(piece, delta):
                choices[-1]["logprobs"] = _logprobs(entries)
            if delta.call is not None:
                self._called.add(index)
        if self.token_origins and (tokens := self._texts.setdefault(index, TokenTexts()).of(piece)):
            choices = choices or [_choice(index, {"content": ""})]  # control tokens, or text that is held back
            choices[0]["tokens"] = tokens
        if is_first:
            choices.insert(0, _choice(index, {"role": "assistant", "content": ""}))
        if (reason := piece.finish_reason) is not None:
            calls = reason == "stop" and index in self._called and not piece.cut  # the model ended the answer
            choices.append(_choice(index, {}, "tool_calls" if calls else reason))
        return choices

    def _whole(self, choice: dict[str, Any]) -> ChatChoice:
        delta = choice["delta"]
        calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.get("tool_calls", ())]
        message: Message = {"role": "assistant", "content": delta["content"], "refusal": None}
        if calls:
            message |= {"content": delta["content"] or None, "tool_calls": calls}  # type: ignore[typeddict-item]
        if "reasoning" in delta:
            message |= {"reasoning": delta["reasoning"], "reasoning_content": delta["reasoning"]}
        return {
            "index": choice["index"],
            "message": message,
            "logprobs": choice["logprobs"] or (_logprobs(()) if self.logprobs else None),
            "finish_reason": choice["finish_reason"],
        }

    def _delta(self, delta: Delta) -> ChatDelta:
        """Make the delta of a reply. Reasoning has two names, since clients differ."""
        if delta.call is not None:
            return {"tool_calls": [_call(delta.call, delta.text, self._is_custom(delta.call))]}
        if delta.kind == "reasoning":
            return {"reasoning": delta.text, "reasoning_content": delta.text}
        return {"content": delta.text}


def _choice(index: int, delta: ChatDelta, reason: Any = None) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _logprobs(entries: Sequence[str]) -> ChatLogprobs:
    return {"content": Written.array(entries), "refusal": None}


def _call(call: ToolCall, text: str, is_custom: bool) -> CallDelta:
    """Make the delta of a call. Only the first has id and name; it has no text (see `CallDelta`)."""
    kind, field = ("custom", "input") if is_custom else ("function", "arguments")
    part: Any = {"index": call.index}
    if text:
        return part | {kind: {field: text}}
    return part | {"id": call.id, "type": kind, kind: {"name": call.name, field: ""}}


class TokenTexts:
    """The text, kind and origin of each token of an answer, for the page.

    A character of several tokens is the text of the last of them. A token outside of messages, such as a control token,
    has no text.
    """

    def __init__(self) -> None:
        self._origins: list[str] = []  # of the tokens that were read
        self._num_shown = 0

    def of(self, piece: Piece) -> list[TokenOrigin]:
        """Return the waiting tokens up to the last one that has text; all of them at the answer's end."""
        self._origins += piece.origins
        tokens: list[TokenOrigin] = []
        for delta in piece.deltas:
            for token in delta.tokens:
                tokens += self._hidden(token.number)
                tokens.append({"text": token.text, "kind": delta.kind, "origin": self._origins[token.number]})
                self._num_shown = token.number + 1
        return tokens if piece.finish_reason is None else tokens + self._hidden(len(self._origins))

    def _hidden(self, end: int) -> list[TokenOrigin]:
        """Return the waiting tokens before this number, without text."""
        start, self._num_shown = self._num_shown, max(self._num_shown, end)
        return [{"text": "", "kind": "hidden", "origin": origin} for origin in self._origins[start:end]]
