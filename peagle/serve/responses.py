"""/v1/responses: start the chat of a body (response_chat.py), write its answer as a reply or events, and keep it."""

import copy
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.answers.result import Piece, Result
from peagle.base.strict_json import Written, dumps
from peagle.serve.bodies import Body
from peagle.serve.errors import ApiError
from peagle.serve.formatter import ChannelFormatter, figures, usage
from peagle.serve.generation import Generation
from peagle.serve.replies import ResponseEvent, ResponseUsage
from peagle.serve.request_body import check_messages, count_parts
from peagle.serve.request_builder import notes
from peagle.serve.response_bodies import (
    Item,
    ItemReference,
    OfferedFunction,
    ResponsesBody,
)
from peagle.serve.response_chat import PastItems, ToolName, as_chat, input_items
from peagle.serve.shared_state import SharedState
from peagle.serve.stored import StoredItem
from peagle.text.channels import Delta

CALL_EVENTS = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}  # by field of a call's text
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}  # by type of item
Keep = Callable[[dict[str, Any]], bool]  # keeps a response; returns whether there is room for it


async def start(shared: SharedState, body: ResponsesBody, owner: str = "") -> Generation:
    """Send the request of a body to the engine. owner: the API key, whose responses the body may name."""
    past = _past(shared, body, owner)
    chat = await shared.in_tokenizer_thread(as_chat, body, past)
    try:
        grammar = await shared.grammar(chat.body)
        requests = await shared.in_tokenizer_thread(shared.builder.chat, chat.body, grammar)
    except ApiError as error:
        raise error.renamed(chat.fields) from None
    formatter = ResponsesFormatter(
        shared.model,
        shared.builder.tokenizer,
        body=body,
        tools=chat.body.tools,
        tool_names=chat.tool_names,
        one_call=not body.parallel_tool_calls,
        keep=await _keeper(shared, body, past, owner),
    )
    shared.log.note(*chat.notes, *notes(chat.body))
    return shared.generation(chat.body, formatter, requests, chat.fields, channels=True)


def _past(shared: SharedState, body: ResponsesBody, owner: str) -> PastItems:
    """Find the items that a body names. Raises ApiError for one that is not kept, and for more than fit."""
    items: Sequence[StoredItem] = ()
    if body.previous_response_id is not None:
        items = shared.responses.response(owner, body.previous_response_id, "previous_response_id").conversation
    own = () if isinstance(body.input, str) else body.input
    named = {
        index: shared.responses.item(owner, item.id, f"input.{index}.id")
        for index, item in enumerate(own)
        if isinstance(item, ItemReference)
    }
    new = sum(count_parts(vars(item), "input") for index, item in enumerate(own) if index not in named)
    past = [*items, *named.values()]  # a reference may come again
    check_messages(new + sum(item.num_parts for item in past), shared.builder.context, "input")
    if (size := sum(len(item.data) for item in past)) > shared.max_body:
        message = f"the kept items that are named have {size} bytes; expected at most {shared.max_body}, as of a body"
        raise ApiError(400, f"{message}: name fewer, or start over", "input", "context_length_exceeded")
    return PastItems(items, {item.id: item for item in named.values()})


async def _keeper(shared: SharedState, body: ResponsesBody, past: PastItems, owner: str) -> Keep | None:
    """Return what keeps the response; None: it is not to be kept. Raises ApiError if it cannot be."""
    if body.store and not shared.responses.keeps and "store" in body.model_fields_set:
        message = f"store is true, but no responses are kept here; set it to false{shared.responses.or_cure}"
        raise ApiError(400, message, "store", "unsupported_parameter")
    if not body.store or not shared.responses.keeps:
        return None
    items = await shared.in_tokenizer_thread(_stored_input, body, past)
    return functools.partial(shared.responses.keep, owner, items)


def _stored_input(body: ResponsesBody, past: PastItems) -> list[StoredItem]:
    """Make the items of a response's input, with those of the responses before it."""
    return [
        *past.items,
        *(past.references[item.id] if isinstance(item, ItemReference) else _stored(item) for item in input_items(body)),
    ]


def _stored(item: Item) -> StoredItem:
    fields = item.model_dump(by_alias=True, exclude_none=True)
    if isinstance(fields.get("content"), str):  # of a message
        part = "output_text" if fields["role"] == "assistant" else "input_text"
        fields["content"] = [{"type": part, "text": fields["content"]}]
    return StoredItem.of({"id": _new_id(fields["type"]), "status": "completed", **fields})


@dataclass
class _OutputItem:
    """An output item: one message of the answer, or one call."""

    value: dict[str, Any]  # as in the reply; events have copies, since it changes after them
    index: int  # in the reply's output
    message: int  # of the answer (`Delta.message`)
    entries: list[str] = field(default_factory=list)  # log-probabilities of its tokens, as JSON

    @property
    def call_field(self) -> str | None:
        """The field that has the text of a call; None for other items."""
        return next((name for name in CALL_EVENTS if name in self.value), None)

    @property
    def location(self) -> dict[str, Any]:
        """The fields of an event that locate the item's text."""
        location = {"item_id": self.value["id"], "output_index": self.index}
        return location if self.call_field else {**location, "content_index": 0}

    def add(self, text: str) -> None:
        if self.call_field:
            self.value[self.call_field] += text
        else:
            self.value["content"][0]["text"] += text


@dataclass(kw_only=True)
class ResponsesFormatter(ChannelFormatter):
    """A response and its events. tool_names: by name in the chat.

    keep: called with the response at its end, even if its client has left the stream; None: it is not to be kept.
    """

    body: ResponsesBody
    tool_names: Mapping[str, ToolName] = field(default_factory=dict)
    keep: Keep | None = None
    _items: list[_OutputItem] = field(default_factory=list)
    _num_events: int = 0
    _reason: str | None = None

    prefix = "resp_"

    def begin(self) -> str:
        response = self._response("in_progress")
        created = self.event({"type": "response.created", "response": response})
        return created + self.event({"type": "response.in_progress", "response": response})

    def read(self, piece: Piece) -> list[ResponseEvent]:
        """Read a piece of the answer; return its events, which do not have their sequence numbers yet."""
        self._reason = piece.finish_reason
        events: list[ResponseEvent] = []
        for delta in self._deltas(piece):
            item = self._items[-1] if self._items else None
            if item is None or item.message != delta.message:
                events += self._end_item("completed")
                item = self._new_item(delta)
                events += _added_events(item)
            if delta.text:
                entries = self._logprob_entries(piece, delta)
                item.add(delta.text)
                item.entries += entries
                events.append(_delta_event(item, delta.text, entries))
        if piece.finish_reason is not None:
            events += self._end_item("incomplete" if piece.finish_reason == "length" else "completed")
        return events

    def reply(self, _: Sequence[Any] = ()) -> dict[str, Any]:
        status = "incomplete" if self._reason == "length" else "completed"
        return self._ended(self._response(status, self.results()))

    def event(self, entry: ResponseEvent) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        data = dumps({"type": entry["type"], "sequence_number": number, **entry}, ensure_ascii=False)
        return f"event: {entry['type']}\ndata: {data}\n\n"

    def end(self) -> str:
        response = self.reply()
        return self.event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: ApiError) -> str:
        self._end_item("incomplete")
        failure = {"code": "server_error", "message": error.message}
        response = self._ended({**self._response("failed"), "error": failure})
        return self.event({"type": "response.failed", "response": response})

    def close(self) -> None:
        if self.keep is not None:  # the client has left: it may go on from what it has read
            self._end_item("incomplete")
            self._ended(self._response("cancelled", self.results()))

    def _ended(self, response: dict[str, Any]) -> dict[str, Any]:
        """Keep a response, if it is to be kept."""
        keep, self.keep = self.keep, None
        return {**response, "store": keep is not None and keep(response)}

    def _new_item(self, delta: Delta) -> _OutputItem:
        value: dict[str, Any]
        if delta.call is not None:
            name = self.tool_names.get(delta.call.name, {"name": delta.call.name})
            is_custom = self._is_custom(delta.call)
            kind, text = ("custom_tool_call", "input") if is_custom else ("function_call", "arguments")
            value = {"type": kind, "call_id": delta.call.id, text: "", **name}
        elif delta.kind == "reasoning":
            value = {"type": "reasoning", "summary": [], "encrypted_content": None}
            value["content"] = [{"type": "reasoning_text", "text": ""}]
        else:
            value = {"type": "message", "role": "assistant"}
            value["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        value = {"id": _new_id(value["type"]), **value, "status": "in_progress"}
        self._items.append(_OutputItem(value, len(self._items), delta.message))
        return self._items[-1]

    def _end_item(self, status: str) -> list[ResponseEvent]:
        """Make the events that end the last item, if it is open."""
        item = self._items[-1] if self._items else None
        if item is None or item.value["status"] != "in_progress":
            return []
        item.value["status"] = status
        if item.entries:
            item.value["content"][0]["logprobs"] = Written.array(item.entries)
        ended = _event("output_item.done", item=copy.deepcopy(item.value), output_index=item.index)
        if item.call_field:
            called = {item.call_field: item.value[item.call_field], "name": item.value["name"]}
            return [_event(f"{CALL_EVENTS[item.call_field]}.done", **item.location, **called), ended]
        (part,) = copy.deepcopy(item.value["content"])
        texts = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            _event(f"{part['type']}.done", **item.location, **texts),
            _event("content_part.done", **item.location, part=part),
            ended,
        ]

    def _response(self, status: str, results: Sequence[Result] = ()) -> dict[str, Any]:
        body, choice = self.body, self.body.tool_choice
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.model,
            "output": [copy.deepcopy(item.value) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": self.keep is not None,
            "temperature": body.temperature,
            "text": body.text.model_dump(exclude_none=True, by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [_echo(tool) for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": _usage(results) if results else None,
            "user": body.user,
            **(figures(results) if results else {}),
        }


def _new_id(kind: str) -> str:
    """Make the id of an item. kind: its type."""
    return f"{ID_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


def _event(kind: str, **fields: Any) -> ResponseEvent:
    event: Any = {"type": f"response.{kind}", **fields}
    return event


def _added_events(item: _OutputItem) -> list[ResponseEvent]:
    begun = copy.deepcopy(item.value)
    events = [_event("output_item.added", item=begun, output_index=item.index)]
    if "content" in begun:
        (part,), begun["content"] = begun["content"], []
        events.append(_event("content_part.added", **item.location, part=part))
    return events


def _delta_event(item: _OutputItem, text: str, entries: Sequence[str]) -> ResponseEvent:
    """Make the event for new text of an item. entries: its log-probabilities."""
    if item.call_field:
        return _event(f"{CALL_EVENTS[item.call_field]}.delta", **item.location, delta=text)
    kind = item.value["content"][0]["type"]
    extra = {"logprobs": Written.array(entries)} if kind == "output_text" else {}
    return _event(f"{kind}.delta", **item.location, delta=text, **extra)


def _echo(tool: Body) -> dict[str, Any]:
    """Return a tool as the body has it, a function with all fields that OpenAI's replies have."""
    empty = {"description": None, "parameters": None, "strict": None} if isinstance(tool, OfferedFunction) else {}
    return empty | tool.model_dump(by_alias=True, exclude_unset=True)


def _usage(results: Sequence[Result]) -> ResponseUsage:
    counted = usage(results)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": counted["completion_tokens_details"],
        "total_tokens": counted["total_tokens"],
    }
