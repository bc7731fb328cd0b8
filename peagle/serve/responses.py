"""/v1/responses, stateless: bodies become those of chats; replies and events are made from the answers."""

import contextlib
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic

from peagle.ops.strict_json import dumps
from peagle.result import Result
from peagle.serve.answers import Part, metrics, usage
from peagle.serve.errors import ApiError
from peagle.serve.replies import Form
from peagle.serve.schema import (
    LIMIT,
    SEED,
    TEMPERATURE,
    TOP_P,
    Body,
    CalledFunction,
    ChatBody,
    ChatMessage,
    Function,
    JsonSchema,
    NamedFunction,
    NamedTool,
    PastCall,
    ResponseFormat,
    Speculative,
    Tool,
    validated,
)
from peagle.text.channels import Delta
from peagle.text.prompts import brief


class ReasoningOptions(Body):
    effort: Literal["low", "medium", "high"] | None = None
    summary: Literal["auto"] | None = None  # there is none; the reasoning itself is in the reply


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    """What the final text must be. `strict` changes nothing, since every answer follows its schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    of: dict[str, Any] | None = pydantic.Field(None, alias="schema")


class TextOptions(Body):
    format: TextFormat = pydantic.Field(default_factory=lambda: TextFormat(schema=None))
    verbosity: Literal["medium"] | None = None


class ResponsesBody(Body):
    """`input`: a text, or items, which `as_chat` reads. prompt_cache_key, safety_identifier, user: no effect."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    temperature: TEMPERATURE = 1.0
    top_p: TOP_P = 1.0
    seed: SEED = None
    max_output_tokens: LIMIT = None
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[FunctionTool] = pydantic.Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    stream: bool = False
    store: bool = False
    metadata: dict[str, str] = pydantic.Field(default_factory=dict)
    speculative: Speculative | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class Item(Body):
    """An item of the input. id and status: of clients that send what they received."""

    id: str | None = None
    status: str | None = None


class InputText(Body):
    """A part of a text. annotations and logprobs: of clients that send what they received."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[InputText]
    phase: str | None = None


class InputCall(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputResult(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Item):
    """Reasoning of a past answer; it reaches the model if it led to calls. Nothing here is encrypted."""

    type: Literal["reasoning"]
    summary: list[Any] = pydantic.Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


ITEMS: dict[str, type[Item]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputResult,
    "reasoning": InputReasoning,
}


@dataclass(frozen=True)
class _Named:
    """A message, and what the client calls it: the items of the message and of its calls."""

    message: ChatMessage
    name: str
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class AsChat:
    """The chat that a body asks for."""

    body: ChatBody
    messages: Sequence[_Named]

    @contextlib.contextmanager
    def own_names(self) -> Iterator[None]:
        """Let an ApiError name the fields as a response's body does."""
        try:
            yield
        except ApiError as error:
            param = None if error.param is None else self.own_name(error.param)
            raise ApiError(error.status, self.own_name(error.message), param, error.code) from None

    def own_name(self, text: str) -> str:
        """Replace the names of a chat's fields by those of a response."""

        def place(found: re.Match[str]) -> str:
            named = self.messages[int(found[1])]
            call = named.calls[int(found[2])] if found[2] else named.name
            return call + (found[3] or "").replace("tool_call_id", "call_id").replace(".id", ".call_id")

        text = re.sub(r"\bmessages\.(\d+)(?:\.tool_calls\.(\d+))?(\.\w+)?", place, text)
        for chat, ours in NAMES.items():
            text = re.sub(chat, ours, text)
        return text


def as_chat(body: ResponsesBody) -> AsChat:
    """Make the chat that a body asks for. Raises ApiError for what it cannot be."""
    messages = _messages(body)
    return AsChat(_chat_body(body, messages), messages)


NAMES = {  # of a chat's fields here
    r"\bresponse_format\.json_schema\b": "text.format",
    r"\bresponse_format\b": "text.format",
    r"(?<![\w'])max_completion_tokens(?![\w'])": "max_output_tokens",
    r"(?<![\w'])(tools\.\d+)\.function\b": r"\1",
    r"^messages\b": "input",
}


def _chat_body(body: ResponsesBody, messages: Sequence[_Named]) -> ChatBody:
    """Make the body of the same chat. Raises ApiError for what needs a state."""
    if body.store:
        raise ApiError(
            400, "store is not supported here: no response is kept; set it to false", "store", "unsupported_parameter"
        )
    choice = body.tool_choice
    return ChatBody(
        messages=[each.message for each in messages],
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        max_completion_tokens=body.max_output_tokens,
        reasoning_effort=body.reasoning.effort,
        tools=[_tool(tool) for tool in body.tools],
        tool_choice=_named(choice) if isinstance(choice, FunctionChoice) else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text.format),
        stream=body.stream,
        speculative=body.speculative,
    )


def _response_format(given: TextFormat) -> ResponseFormat:
    """Make a chat's field of it. Raises ApiError for a schema without its type, and the reverse."""
    if (given.type == "json_schema") != (given.of is not None):
        seen = "is missing" if given.of is None else f"is given with the type {given.type!r}"
        raise ApiError(400, f"text.format.schema {seen}; expected it with the type 'json_schema'", "text.format.schema")
    if given.of is None:
        return ResponseFormat(type=given.type)
    return ResponseFormat(type=given.type, json_schema=JsonSchema(name=given.name or "", schema=given.of))


def _named(choice: FunctionChoice) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def _tool(tool: FunctionTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function)


def _messages(body: ResponsesBody) -> list[_Named]:
    """Make the messages of the input, instructions first: joined with a first message of the system or developer."""
    if isinstance(body.input, str):
        messages = [_Named(ChatMessage(role="user", content=body.input), "input")]
    else:
        messages = _messages_of([_item(place, each) for place, each in enumerate(body.input)])
    if not body.instructions:
        return messages
    texts = [body.instructions]
    if messages and messages[0].message.role in ("system", "developer"):
        texts.append(messages.pop(0).message.text)
    return [_Named(ChatMessage(role="developer", content="\n\n".join(texts)), "instructions"), *messages]


def _item(place: int, given: dict[str, Any]) -> Item:
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        raise ApiError(
            400,
            f"input.{place}.type is {brief(kind)}; expected one of {', '.join(ITEMS)}",
            f"input.{place}.type",
            "unsupported_parameter",
        )
    known = {key: value for key, value in given.items() if value is not None}
    return validated(ITEMS[kind], known, f"input.{place}")


def _messages_of(items: Sequence[Item]) -> list[_Named]:
    """Join what an answer that calls functions consists of to one message: its reasoning, texts and calls.

    Of other answers, only the texts are kept, as chat templates do.
    """
    messages: list[_Named] = []
    answer: list[tuple[str, Item]] = []  # the items of the assistant since the last of another

    for place, item in enumerate(items):
        name = f"input.{place}"
        if isinstance(item, InputResult):
            messages += _answer(answer)
            answer.clear()
            result = ChatMessage(role="tool", tool_call_id=item.call_id, content=_text(item.output))
            messages.append(_Named(result, name))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            messages += _answer(answer)
            answer.clear()
            messages.append(_Named(ChatMessage(role=item.role, content=_text(item.content)), name))
        else:
            answer.append((name, item))
    return messages + _answer(answer)


def _answer(items: Sequence[tuple[str, Item]]) -> list[_Named]:
    """Make the messages of a past answer."""
    calls: list[PastCall] = []
    names: list[str] = []
    texts: list[tuple[str, str]] = []
    reasoning = ""
    for name, item in items:
        if isinstance(item, InputCall):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            calls.append(PastCall(id=item.call_id, function=function))
            names.append(name)
        elif isinstance(item, InputReasoning):
            reasoning += "".join(part.text for part in item.content or ())
        elif isinstance(item, InputMessage):
            texts.append((name, _text(item.content)))
    if not calls:
        return [_Named(ChatMessage(role="assistant", content=text), name) for name, text in texts]
    content = "".join(text for _, text in texts)
    joined = ChatMessage(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)
    return [_Named(joined, items[0][0], tuple(names))]


def _text(given: str | list[InputText]) -> str:
    return given if isinstance(given, str) else "".join(part.text for part in given)


@dataclass
class _OutputItem:
    """An item of the output: a message of the answer. value: as in the reply."""

    value: dict[str, Any]
    index: int
    message: int

    @property
    def text(self) -> str:
        content = self.value.get("content")
        return str(content[0]["text"] if content else self.value.get("arguments", ""))

    def add(self, text: str) -> None:
        if "content" in self.value:
            self.value["content"][0]["text"] += text
        else:
            self.value["arguments"] += text


@dataclass
class ResponsesForm(Form):
    """A response and its events. `asked`: the body. The answer's channels are parsed."""

    asked: ResponsesBody = field(default_factory=lambda: ResponsesBody(input=""))
    _items: list[_OutputItem] = field(default_factory=list)
    _num_events: int = 0
    _reason: str | None = None

    prefix = "resp"

    def __post_init__(self) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"

    def begin(self) -> str:
        response = self._response([], "in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def read(self, part: Part) -> list[dict[str, Any]]:
        """Read a part of the answer; return its events, without their numbers."""
        self._reason = part.finish_reason
        events: list[dict[str, Any]] = []
        for delta in part.deltas:
            if delta.call is not None and delta.call.index and not self.asked.parallel_tool_calls:
                continue
            item = self._items[-1] if self._items else None
            if item is None or item.message != delta.message:
                events += self._done("completed")
                item = self._new_item(delta)
                events += _added(item)
            if delta.text:
                item.add(delta.text)
                events.append(_grown(item, delta.text))
        if part.finish_reason is not None:
            events += self._done("incomplete" if part.finish_reason == "length" else "completed")
        return events

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        return self._response(results, "incomplete" if self._reason == "length" else "completed")

    def event(self, choice: dict[str, Any]) -> str:
        fields = dict(choice)
        return self._event(fields.pop("type"), **fields)

    def end(self, results: Sequence[Result]) -> str:
        response = self.whole(results)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> str:
        response = self._response([], "failed")
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _new_item(self, delta: Delta) -> _OutputItem:
        number = uuid.uuid4().hex
        value: dict[str, Any]
        if delta.call is not None:
            value = {"id": f"fc_{number}", "type": "function_call", "call_id": delta.call.id, "name": delta.call.name}
            value["arguments"] = ""
        elif delta.kind == "reasoning":
            value = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "encrypted_content": None}
            value["content"] = [{"type": "reasoning_text", "text": ""}]
        else:
            value = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
            value["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        value["status"] = "in_progress"
        self._items.append(_OutputItem(value, len(self._items), delta.message))
        return self._items[-1]

    def _done(self, status: str) -> list[dict[str, Any]]:
        """Make the events that end the last item, if it is open."""
        item = self._items[-1] if self._items else None
        if item is None or item.value["status"] != "in_progress":
            return []
        item.value["status"] = status
        place = {"item_id": item.value["id"], "output_index": item.index}
        ended = {"type": "response.output_item.done", "output_index": item.index, "item": _copy(item.value)}
        if "content" not in item.value:
            arguments = {"arguments": item.text, "name": item.value["name"]}
            return [{"type": "response.function_call_arguments.done", **place, **arguments}, ended]
        (part,) = _copy(item.value["content"])
        place["content_index"] = 0
        kind = part["type"]
        extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return [
            {"type": f"response.{kind}.done", **place, "text": item.text, **extra},
            {"type": "response.content_part.done", **place, "part": part},
            ended,
        ]

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        data = dumps({"type": kind, "sequence_number": number, **fields}, ensure_ascii=False)
        return f"event: {kind}\ndata: {data}\n\n"

    def _response(self, results: Sequence[Result], status: str) -> dict[str, Any]:
        asked = self.asked
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        choice = asked.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self.model,
            "output": [_copy(item.value) for item in self._items],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": asked.text.format.model_dump(exclude_none=True, by_alias=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in asked.tools],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": _usage(results) if results else None,
            "user": asked.user,
            **(metrics(results) if results else {}),
        }


def _added(item: _OutputItem) -> list[dict[str, Any]]:
    """Make the events that begin an item."""
    begun = _copy(item.value)
    events = [{"type": "response.output_item.added", "output_index": item.index, "item": begun}]
    if "content" in begun:
        (part,), begun["content"] = begun["content"], []
        place = {"item_id": begun["id"], "output_index": item.index, "content_index": 0}
        events.append({"type": "response.content_part.added", **place, "part": part})
    return events


def _grown(item: _OutputItem, text: str) -> dict[str, Any]:
    """Make the event of a text that is added to an item."""
    place = {"item_id": item.value["id"], "output_index": item.index, "delta": text}
    if "content" not in item.value:
        return {"type": "response.function_call_arguments.delta", **place}
    kind = item.value["content"][0]["type"]
    extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    return {"type": f"response.{kind}.delta", "content_index": 0, **place, **extra}


def _copy(value: Any) -> Any:
    """Copy a JSON value: events show an item as it was."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _usage(results: Sequence[Result]) -> dict[str, Any]:
    found = usage(results)
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": found["completion_tokens_details"],
        "total_tokens": found["total_tokens"],
    }
