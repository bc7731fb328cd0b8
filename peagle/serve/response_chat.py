"""Make a chat of a /v1/responses body and of the earlier items that it names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pydantic

from peagle.serve.bodies import (
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
from peagle.serve.response_bodies import (
    HostedTool,
    InputCall,
    InputCustomCall,
    InputFormat,
    InputItem,
    InputMessage,
    InputReasoning,
    InputResult,
    Item,
    ItemReference,
    Namespace,
    OfferedCustom,
    OfferedFunction,
    ResponsesBody,
    TextFormat,
)
from peagle.serve.stored import StoredItem
from peagle.serve.tools import RESULT

LOGPROBS_OF_TEXT = "message.output_text.logprobs"  # a value of include
SAME_FIELDS = ("temperature", "top_p", "seed", "top_logprobs", "parallel_tool_calls", "stream", "speculative")
ToolName = Mapping[str, str]  # fields `name` and `namespace` of a tool in the body
FIELDS = {  # of a chat -> of a /v1/responses body
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    RESULT: "a function_call_output with the call_id",
}
ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(InputItem)


@dataclass(frozen=True)
class PastItems:
    """The kept items that a body names. items: those before its input. references: by id."""

    items: Sequence[StoredItem] = ()
    references: Mapping[str, StoredItem] = field(default_factory=dict)


def input_items(body: ResponsesBody) -> Sequence[Item | ItemReference]:
    """Return the input's items."""
    return [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input


@dataclass(frozen=True)
class AsChat:
    """A /v1/responses body as a chat. fields: of the chat -> of the body, for `ApiError.renamed`."""

    body: ChatBody
    fields: Mapping[str, str]
    tool_names: Mapping[str, ToolName]  # by name in the chat
    notes: Sequence[str]  # for the server's log


def as_chat(body: ResponsesBody, past: PastItems | None = None) -> AsChat:
    """Make the chat of a body. Raises ApiError for a body that is no chat."""
    logprobs = LOGPROBS_OF_TEXT in body.include
    if body.top_logprobs and not logprobs:
        raise ApiError(400, f"top_logprobs is given without {LOGPROBS_OF_TEXT!r}; add that to include", "top_logprobs")
    tools, messages, choice = _tools(body), _messages(body, past or PastItems()), body.tool_choice
    notes = [f"tools of the type {kind} are not available here: they are left out" for kind in tools.left_out]
    chat = ChatBody(
        messages=[message for message, _ in messages],
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        reasoning_effort=body.reasoning.effort,
        verbosity=body.text.verbosity,
        tools=tools.tools,
        tool_choice=choice if isinstance(choice, str) else choice.as_in_chat,
        response_format=_response_format(body.text.format),
        **{name: getattr(body, name) for name in SAME_FIELDS},
    )
    return AsChat(chat, _fields([names for _, names in messages], tools), tools.names, notes)


def _fields(messages: Sequence[Sequence[str]], tools: "_ChatTools") -> dict[str, str]:
    """Map the fields of a chat to those of its /v1/responses body. messages: the names of each one and of its calls."""
    names = dict(FIELDS)
    for index, (item, *calls) in enumerate(messages):
        names |= {f"messages.{index}": item, f"messages.{index}.tool_call_id": f"{item}.call_id"}
        for number, call in enumerate(calls):
            where = f"messages.{index}.tool_calls.{number}"
            names |= {where: call, f"{where}.id": f"{call}.call_id"}
    of_tools = {f"tools.{index}.{tool.type}": tools.fields[index] for index, tool in enumerate(tools.tools)}
    return names | of_tools


def _response_format(form: TextFormat) -> ResponseFormat:
    """Make the chat's response_format. Raises ApiError if only one of type 'json_schema' and a schema is given."""
    if (form.type == "json_schema") != (form.schema_ is not None):
        fault = "is missing" if form.schema_ is None else f"is given with the type {form.type!r}"
        raise ApiError(
            400, f"text.format.schema {fault}; expected it with the type 'json_schema'", "text.format.schema"
        )
    if form.schema_ is None:
        return ResponseFormat(type=form.type)
    schema = JsonSchema(name=form.name or "", schema=form.schema_, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)


@dataclass
class _ChatTools:
    """The tools of a chat."""

    tools: list[Tool] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)  # by tool: its field in the body
    names: dict[str, ToolName] = field(default_factory=dict)  # by name in the chat
    left_out: dict[str, None] = field(default_factory=dict)  # types of hosted tools, in order

    def add(self, tool: OfferedFunction | OfferedCustom, where: str, namespace: Namespace | None = None) -> None:
        """Add a tool. The name and the description of its namespace precede its own."""
        space, about = (None, None) if namespace is None else (namespace.name, namespace.description)
        name, description = qualified(space, tool.name), "\n".join(filter(None, (about, tool.description))) or None
        self.fields.append(where)
        self.names[name] = {"name": tool.name} | ({} if space is None else {"namespace": space})
        if isinstance(tool, OfferedFunction):
            function = Function(name=name, description=description, parameters=tool.parameters, strict=tool.strict)
            self.tools.append(FunctionTool(type="function", function=function))
        else:
            custom = Custom(name=name, description=description, format=_format(tool.format, where))
            self.tools.append(CustomTool(type="custom", custom=custom))


def _tools(body: ResponsesBody) -> _ChatTools:
    tools = _ChatTools()
    for index, tool in enumerate(body.tools):
        where = f"tools.{index}"
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
    if form.syntax is None or form.definition is None:
        raise ApiError.missing(f"{where}.format.{'syntax' if form.syntax is None else 'definition'}")
    return CustomFormat(type="grammar", grammar=Syntax(syntax=form.syntax, definition=form.definition))


_NamedMessage = tuple[ChatMessage, Sequence[str]]  # and the names of its item and of its calls


_NamedItem = tuple[str, Item]  # (its name in errors: its place in the input, or the id of a kept one before it; item)


def _messages(body: ResponsesBody, past: PastItems) -> list[_NamedMessage]:
    """Make the messages of the chat, instructions first, with their names in the body."""
    messages = []
    if body.instructions:
        messages.append((ChatMessage(role="developer", content=body.instructions), ["instructions"]))
    items: list[_NamedItem] = [(item.id, ITEM.validate_json(item.data)) for item in past.items]
    references = {name: ITEM.validate_json(item.data) for name, item in past.references.items()}
    for index, item in enumerate(input_items(body)):
        if isinstance(item, ItemReference):
            item = references[item.id]
        items.append(("input" if isinstance(body.input, str) else f"input.{index}", item))
    return messages + _item_messages(items)


def _item_messages(items: Sequence[_NamedItem]) -> list[_NamedMessage]:
    """Make the messages of input items.

    The reasoning, texts and calls of an answer with calls become one message. The results of its calls follow, even if
    other items stand between. Other answers keep only their texts, as chat templates do.
    """
    results = _results(items)
    messages: list[_NamedMessage] = []
    answer: dict[int, _NamedItem] = {}  # by index: the assistant's items since the last item of another role
    for index, (name, item) in enumerate(items):
        is_message = isinstance(item, InputMessage) and item.role != "assistant"
        if not is_message and not isinstance(item, InputResult):
            answer[index] = name, item
            continue
        messages += _answer_messages(answer, items, results)
        answer.clear()
        if isinstance(item, InputMessage):
            messages.append((ChatMessage(role=item.role, content=text_of(item.content)), [name]))
        elif index not in results.values():  # an error, which `tools.template_messages` names
            messages.append(_result_message(name, item))
    return messages + _answer_messages(answer, items, results)


def _results(items: Sequence[_NamedItem]) -> dict[int, int]:
    """Return the index of each call's result, by index of the call."""
    waiting: dict[str, int] = {}  # indices of calls without a result, by call id
    results: dict[int, int] = {}
    for index, (_, item) in enumerate(items):
        if isinstance(item, InputCall | InputCustomCall):
            waiting.setdefault(item.call_id, index)
        elif isinstance(item, InputResult) and item.call_id in waiting:
            results[waiting.pop(item.call_id)] = index
    return results


def _result_message(name: str, item: Any) -> _NamedMessage:
    return ChatMessage(role="tool", tool_call_id=item.call_id, content=text_of(item.output)), [name]


def _answer_messages(
    answer: Mapping[int, _NamedItem], items: Sequence[_NamedItem], results: Mapping[int, int]
) -> list[_NamedMessage]:
    """Make the messages of a past answer, and of the results of its calls. answer: items by index."""
    own = [item for _, item in answer.values()]
    calls = {i: item.as_in_chat for i, (_, item) in answer.items() if isinstance(item, InputCall | InputCustomCall)}
    texts = {name: text_of(item.content) for name, item in answer.values() if isinstance(item, InputMessage)}
    if not calls:
        return [(ChatMessage(role="assistant", content=text), [name]) for name, text in texts.items()]
    reasoning = "".join(item.thinking for item in own if isinstance(item, InputReasoning | InputMessage))
    joined = ChatMessage(
        role="assistant", content="".join(texts.values()), tool_calls=list(calls.values()), reasoning=reasoning
    )
    first, *_ = answer.values()
    names = [first[0], *(answer[call][0] for call in calls)]
    return [(joined, names), *(_result_message(*items[results[call]]) for call in calls if call in results)]
