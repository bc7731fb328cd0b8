"""/v1/responses, stateless: a body becomes a chat; its answer becomes a reply, or events."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.ops.strict_json import Written, dumps
from peagle.result import Result
from peagle.serve.bodies import (
    Body,
    ChatBody,
    ChatMessage,
    Custom,
    CustomFormat,
    CustomTool,
    Function,
    FunctionTool,
    JsonSchema,
    ResponseFormat,
    Syntax,
    Tool,
    qualified,
    text_of,
)
from peagle.serve.errors import ApiError
from peagle.serve.formatter import ChannelFormatter, Generation
from peagle.serve.names import MessageNames, Names, ResponseNames
from peagle.serve.outputs import OutputChunk, OutputCollector, figures, usage
from peagle.serve.replies import ResponseEvent, ResponseUsage, Usage
from peagle.serve.requests import notes
from peagle.serve.response_bodies import (
    HostedTool,
    InputCall,
    InputCustomCall,
    InputFormat,
    InputMessage,
    InputReasoning,
    InputResult,
    Item,
    Namespace,
    OfferedCustom,
    OfferedFunction,
    ResponsesBody,
    TextFormat,
)
from peagle.serve.service import Service
from peagle.serve.structured import constraint
from peagle.serve.tools import id_of_no_call, id_twice, result_alone
from peagle.text.channels import Delta

LOGPROBS_OF_TEXT = "message.output_text.logprobs"  # of include
AS_IN_CHAT = (  # fields
    "temperature",
    "top_p",
    "seed",
    "top_logprobs",
    "parallel_tool_calls",
    "stream",
    "speculative",
)
TEXTS_OF_CALLS = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}  # in events


async def start(service: Service, body: ResponsesBody) -> Generation:
    """Send the request of a body to the engine."""
    chat = await service.in_tokenizer_thread(as_chat, body)
    grammar = await service.grammar(chat.body)
    requests = await service.in_tokenizer_thread(service.builder.chat, chat.body, grammar)
    tokenizer = service.builder.tokenizer
    formatter = ResponsesFormatter(
        service.model,
        tokenizer,
        body=body,
        tools=chat.body.tools,
        tool_names=chat.tool_names,
        one_call=not body.parallel_tool_calls,
    )
    service.note(*chat.notes, *notes(chat.body))
    outputs = OutputCollector(service.loop, requests, tokenizer, channels=True, constraint=constraint(chat.body))
    return Generation(body.stream, formatter, outputs)


class ResponseChat(ChatBody):
    """A chat whose refusals name the fields of a /v1/responses body."""

    _names: ResponseNames

    def __init__(self, names: ResponseNames, **fields: Any) -> None:
        super().__init__(**fields)
        self._names = names

    @property
    def names(self) -> Names:
        return self._names


@dataclass(frozen=True)
class NamespacedName:
    """The name of a tool in a /v1/responses body."""

    name: str
    namespace: str | None


@dataclass(frozen=True)
class AsChat:
    """A /v1/responses body as a chat. tool_names: the body's, by the chat's. notes: for the server's log."""

    body: ChatBody
    tool_names: Mapping[str, NamespacedName]
    notes: Sequence[str]


def as_chat(body: ResponsesBody) -> AsChat:
    """Make the chat of a body. Raises ApiError for a body that no chat expresses."""
    if body.store:
        raise ApiError(
            400, "store is not supported here: no response is kept; set it to false", "store", "unsupported_parameter"
        )
    logprobs = LOGPROBS_OF_TEXT in body.include
    if body.top_logprobs is not None and not logprobs:
        raise ApiError(400, f"top_logprobs is given without {LOGPROBS_OF_TEXT!r}; add that to include", "top_logprobs")
    tools, messages, choice = _tools(body), _messages(body), body.tool_choice
    notes = [f"tools of the type {kind} are not available here: they are left out" for kind in tools.left_out]
    chat = ResponseChat(
        ResponseNames(items=[item for _, item in messages], tools=tools.fields),
        messages=[message for message, _ in messages],
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        reasoning_effort=body.reasoning.effort,
        tools=tools.tools,
        tool_choice=choice if isinstance(choice, str) else choice.as_in_chat,
        response_format=_response_format(body.text.format),
        **{name: getattr(body, name) for name in AS_IN_CHAT},
    )
    return AsChat(chat, tools.names, notes)


def _response_format(form: TextFormat) -> ResponseFormat:
    """Make the chat's response_format. Raises ApiError for a schema without its type, and the reverse."""
    if (form.type == "json_schema") != (form.of is not None):
        fault = "is missing" if form.of is None else f"is given with the type {form.type!r}"
        raise ApiError(
            400, f"text.format.schema {fault}; expected it with the type 'json_schema'", "text.format.schema"
        )
    if form.of is None:
        return ResponseFormat(type=form.type)
    return ResponseFormat(type=form.type, json_schema=JsonSchema(name=form.name or "", schema=form.of))


@dataclass
class _Tools:
    """The tools of a chat, and the fields of the body that they come from. left_out: types of hosted tools."""

    tools: list[Tool] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    names: dict[str, NamespacedName] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)

    def add(self, tool: OfferedFunction | OfferedCustom, where: str, namespace: Namespace | None = None) -> None:
        """Add a tool, with the name and the description of its namespace before its own."""
        space, about = (None, None) if namespace is None else (namespace.name, namespace.description)
        name, description = qualified(space, tool.name), "\n".join(filter(None, (about, tool.description))) or None
        self.fields.append(where)
        self.names[name] = NamespacedName(tool.name, space)
        if isinstance(tool, OfferedFunction):
            function = Function(name=name, description=description, parameters=tool.parameters, strict=tool.strict)
            self.tools.append(FunctionTool(type="function", function=function))
        else:
            custom = Custom(name=name, description=description, format=_format(tool.format, where))
            self.tools.append(CustomTool(type="custom", custom=custom))


def _tools(body: ResponsesBody) -> _Tools:
    tools = _Tools()
    for place, tool in enumerate(body.tools):
        where = f"tools.{place}"
        if isinstance(tool, HostedTool):
            tools.left_out[tool.type] = None
        elif isinstance(tool, Namespace):
            for number, inner in enumerate(tool.tools):
                tools.add(inner, f"{where}.tools.{number}", tool)
        else:
            tools.add(tool, where)
    return tools


def _format(form: InputFormat | None, where: str) -> CustomFormat | None:
    """Make a chat's format of a custom tool. Raises ApiError for a grammar without its definition."""
    if form is None or form.type == "text":
        return None
    for name in ("syntax", "definition"):
        if getattr(form, name) is None:
            raise ApiError.missing(f"{where}.format.{name}")
    assert form.syntax is not None
    assert form.definition is not None
    return CustomFormat(type="grammar", grammar=Syntax(syntax=form.syntax, definition=form.definition))


_Named = tuple[ChatMessage, MessageNames]


def _messages(body: ResponsesBody) -> list[_Named]:
    """Make the messages of the input, instructions first, each with its name in the body."""
    messages = []
    if body.instructions:
        messages.append((ChatMessage(role="developer", content=body.instructions), MessageNames("instructions")))
    if isinstance(body.input, str):
        return [*messages, (ChatMessage(role="user", content=body.input), MessageNames("input"))]
    return messages + _messages_of(body.input)


def _messages_of(items: Sequence[Item]) -> list[_Named]:
    """Join the reasoning, texts and calls of an answer that calls functions into one message.

    The results of its calls follow, wherever they stand after them. Of other answers only the texts are kept, as chat
    templates do.
    """
    results = _results(items)
    messages: list[_Named] = []
    answer: dict[int, Item] = {}  # by their places: the assistant's items since the last item of another role
    for place, item in enumerate(items):
        is_message = isinstance(item, InputMessage) and item.role != "assistant"
        if not is_message and not isinstance(item, InputResult):
            answer[place] = item
            continue
        messages += _answer(answer, results)
        answer.clear()
        if isinstance(item, InputMessage):
            messages.append((ChatMessage(role=item.role, content=text_of(item.content)), MessageNames(_name(place))))
    return messages + _answer(answer, results)


def _results(items: Sequence[Item]) -> dict[int, tuple[int, InputResult]]:
    """Map the place of each call to (the place of its result, the result).

    Raises ApiError for a result without a call before it, a second result of a call, and a call with the id of a call
    that waits for its result.
    """
    waiting: dict[str, int] = {}
    ids: set[str] = set()
    results: dict[int, tuple[int, InputResult]] = {}
    for place, item in enumerate(items):
        where = f"{_name(place)}.call_id"
        if isinstance(item, InputCall | InputCustomCall):
            if item.call_id in waiting:
                raise id_twice(where, item.call_id)
            waiting[item.call_id] = place
            ids.add(item.call_id)
        elif isinstance(item, InputResult):
            if item.call_id not in ids:
                raise result_alone(_name(place), "input")
            if item.call_id not in waiting:
                raise id_of_no_call(where, item.call_id)
            results[waiting.pop(item.call_id)] = place, item
    return results


def _answer(items: Mapping[int, Item], results: Mapping[int, tuple[int, InputResult]]) -> list[_Named]:
    """Make the messages of a past answer, and of its calls' results."""
    calls = {place: item.as_in_chat for place, item in items.items() if isinstance(item, InputCall | InputCustomCall)}
    texts = {place: text_of(item.content) for place, item in items.items() if isinstance(item, InputMessage)}
    if not calls:
        return [
            (ChatMessage(role="assistant", content=text), MessageNames(_name(place))) for place, text in texts.items()
        ]
    reasoning = "".join(text_of(item.content or "") for item in items.values() if isinstance(item, InputReasoning))
    joined = ChatMessage(
        role="assistant", content="".join(texts.values()), tool_calls=list(calls.values()), reasoning=reasoning
    )
    messages = [(joined, MessageNames(_name(next(iter(items))), tuple(map(_name, calls))))]
    for place in calls:
        if place in results:
            of, result = results[place]
            message = ChatMessage(role="tool", tool_call_id=result.call_id, content=text_of(result.output))
            messages.append((message, MessageNames(_name(of))))
    return messages


def _name(place: int) -> str:
    return f"input.{place}"


@dataclass
class _OutputItem:
    """An output item: one message of the answer. value: as in the reply. entries: its log-probabilities."""

    value: dict[str, Any]
    index: int
    message: int
    entries: list[str] = field(default_factory=list)

    @property
    def of_call(self) -> str | None:
        """The field that holds the text of a call; None for other items."""
        return next((name for name in TEXTS_OF_CALLS if name in self.value), None)

    @property
    def place(self) -> dict[str, Any]:
        """The fields of an event that locate the item's text."""
        place = {"item_id": self.value["id"], "output_index": self.index}
        return place if self.of_call else {**place, "content_index": 0}

    @property
    def text(self) -> str:
        return str(self.value[self.of_call] if self.of_call else self.value["content"][0]["text"])

    def add(self, text: str) -> None:
        if self.of_call:
            self.value[self.of_call] += text
        else:
            self.value["content"][0]["text"] += text


@dataclass
class ResponsesFormatter(ChannelFormatter):
    """A response and its events. tool_names: the body's, by the chat's."""

    body: ResponsesBody = field(default_factory=lambda: ResponsesBody(input=""))
    tool_names: Mapping[str, NamespacedName] = field(default_factory=dict)
    _items: list[_OutputItem] = field(default_factory=list)
    _num_events: int = 0
    _reason: str | None = None

    prefix = "resp_"

    def begin(self) -> str:
        response = self._response([], "in_progress")
        created = self.event({"type": "response.created", "response": response})
        return created + self.event({"type": "response.in_progress", "response": response})

    def read(self, chunk: OutputChunk) -> list[ResponseEvent]:
        """Read a chunk of the answer; return its events, still without numbers."""
        self._reason = chunk.finish_reason
        events: list[ResponseEvent] = []
        for delta in self._deltas(chunk):
            item = self._items[-1] if self._items else None
            if item is None or item.message != delta.message:
                events += self._done("completed")
                item = self._new_item(delta)
                events += _added(item)
            if delta.text:
                entries = self._logprobs(chunk, delta)
                item.add(delta.text)
                item.entries += entries
                events.append(_grown(item, delta.text, entries))
        if chunk.finish_reason is not None:
            events += self._done("incomplete" if chunk.finish_reason == "length" else "completed")
        return events

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        return self._response(results, "incomplete" if self._reason == "length" else "completed")

    def event(self, shown: ResponseEvent, used: Usage | None = None) -> str:  # noqa: ARG002  the response has it
        number, self._num_events = self._num_events, self._num_events + 1
        data = dumps({"type": shown["type"], "sequence_number": number, **shown}, ensure_ascii=False)
        return f"event: {shown['type']}\ndata: {data}\n\n"

    def end(self, results: Sequence[Result]) -> str:
        response = self.whole(results)
        return self.event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: ApiError) -> str:
        response = self._response([], "failed")
        response["error"] = {"code": "server_error", "message": error.message}
        return self.event({"type": "response.failed", "response": response})

    def _new_item(self, delta: Delta) -> _OutputItem:
        number = uuid.uuid4().hex
        value: dict[str, Any]
        if delta.call is not None:
            name = self.tool_names.get(delta.call.name, NamespacedName(delta.call.name, None))
            is_custom = self._custom_calls(0).is_custom(delta.call)
            kind, prefix, text = (
                ("custom_tool_call", "ctc", "input") if is_custom else ("function_call", "fc", "arguments")
            )
            value = {"id": f"{prefix}_{number}", "type": kind, "call_id": delta.call.id, "name": name.name, text: ""}
            value |= {} if name.namespace is None else {"namespace": name.namespace}
        elif delta.kind == "reasoning":
            value = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "encrypted_content": None}
            value["content"] = [{"type": "reasoning_text", "text": ""}]
        else:
            value = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
            value["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        value["status"] = "in_progress"
        self._items.append(_OutputItem(value, len(self._items), delta.message))
        return self._items[-1]

    def _done(self, status: str) -> list[ResponseEvent]:
        """Make the events that end the last item, if it is open."""
        item = self._items[-1] if self._items else None
        if item is None or item.value["status"] != "in_progress":
            return []
        item.value["status"] = status
        if item.entries:
            item.value["content"][0]["logprobs"] = Written.array(item.entries)
        ended = _event("output_item.done", item=_copy(item.value), output_index=item.index)
        if item.of_call:
            called = {item.of_call: item.text, "name": item.value["name"]}
            return [_event(f"{TEXTS_OF_CALLS[item.of_call]}.done", **item.place, **called), ended]
        (part,) = _copy(item.value["content"])
        texts = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            _event(f"{part['type']}.done", **item.place, **texts),
            _event("content_part.done", **item.place, part=part),
            ended,
        ]

    def _response(self, results: Sequence[Result], status: str) -> dict[str, Any]:
        body = self.body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        choice = body.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.model,
            "output": [_copy(item.value) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.text.format.model_dump(exclude_none=True, by_alias=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [_echo(tool) for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": _usage(results) if results else None,
            "user": body.user,
            **(figures(results) if results else {}),
        }


def _event(kind: str, **fields: Any) -> ResponseEvent:
    event: Any = {"type": f"response.{kind}", **fields}
    return event


def _added(item: _OutputItem) -> list[ResponseEvent]:
    begun = _copy(item.value)
    events = [_event("output_item.added", item=begun, output_index=item.index)]
    if "content" in begun:
        (part,), begun["content"] = begun["content"], []
        events.append(_event("content_part.added", **item.place, part=part))
    return events


def _grown(item: _OutputItem, text: str, entries: Sequence[str]) -> ResponseEvent:
    """Make the event of new text of an item. entries: its log-probabilities."""
    if item.of_call:
        return _event(f"{TEXTS_OF_CALLS[item.of_call]}.delta", **item.place, delta=text)
    kind = item.value["content"][0]["type"]
    extra = {"logprobs": Written.array(entries)} if kind == "output_text" else {}
    return _event(f"{kind}.delta", **item.place, delta=text, **extra)


def _echo(tool: Body) -> dict[str, Any]:
    """Write a tool as the body has it; a function with all fields of OpenAI's own replies."""
    empty = {"description": None, "parameters": None, "strict": None} if isinstance(tool, OfferedFunction) else {}
    return empty | tool.model_dump(by_alias=True, exclude_unset=True)


def _copy(value: Any) -> Any:
    """Copy a JSON value: events show an item as it was."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _usage(results: Sequence[Result]) -> ResponseUsage:
    counted = usage(results)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": counted["completion_tokens_details"],
        "total_tokens": counted["total_tokens"],
    }
