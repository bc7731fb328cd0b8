"""Tools of a chat: their definitions, calls and results in its messages, and choices of a tool.

A message of several calls becomes one message for each call, directly followed by its result: chat templates of GPT-OSS
render one call of a message, and name a result after the call before it. The arguments of past calls are rendered
letter by letter as they were given; the header before them is the template's, "commentary json" in GPT-OSS's, where
the model itself writes "commentary <|constrain|>json".
"""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from peagle.engine.grammar import Grammar, GrammarError
from peagle.serve.errors import ApiError
from peagle.serve.schema import ChatMessage, Function, NamedTool, Tool
from peagle.text.channels import CHANNEL, FUNCTIONS, MESSAGE, ROLE, START, control_ids, final_message
from peagle.text.prompts import brief
from peagle.text.tokenizer import Message, TemplateError, Tokenizer, Verbatim, detokenize, encode_characters

MOST_TOOLS = 128  # the limit of OpenAI's API
MOST_CALLS = 512  # of a chat: GPT-OSS's template takes a time in their square
MOST_VALUES, DEEPEST = 5000, 32  # of the parameters of all tools together: JSON values, levels
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}
Choice = Literal["none", "auto", "required"] | NamedTool


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Test whether the chat template renders tools."""
    chat = [{"role": "user", "content": "a"}]
    try:
        return tokenizer.encode_chat(chat, tools=[PROBE]) != tokenizer.encode_chat(chat)
    except TemplateError:
        return False


def offered(tools: Sequence[Tool], choice: Choice, rendered: bool) -> tuple[list[dict[str, Any]], str | None]:
    """Return (tools as templates take them, the name of the only function that must be called: `forced`).

    With the choice "none" there are no tools. rendered: the chat template takes tools (`takes_tools`). Raises ApiError
    for tools or a choice that cannot be rendered.
    """
    check_tools(tools)
    if not tools:
        if choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice is given without tools; add them, or leave it out", "tool_choice")
        return [], None
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ApiError(
            400, f"tool_choice names {brief(choice.function.name)}, which is not among the tools", "tool_choice"
        )
    if choice == "none":
        return [], None
    if not rendered:
        message = "tools are not supported here: the model's chat template has none; leave them out"
        raise ApiError(400, message, "tools", "unsupported_parameter")
    return [_definition(tool) for tool in tools], forced(tools, choice)


def forced(tools: Sequence[Tool], choice: Choice) -> str | None:
    """Return the name of the only function that the answer may call, and must; None if it may answer otherwise."""
    if isinstance(choice, NamedTool):
        return choice.function.name
    return tools[0].function.name if choice == "required" and len(tools) == 1 else None


def bound_calls(tools: Sequence[Tool], choice: Choice) -> dict[str, Grammar | None]:
    """Map the functions that an answer may call to the grammars of their arguments; None: any text.

    Bound are functions that are strict, and all that the choice makes the answer call. Raises ApiError for a schema
    that is too large.
    """
    only, must = forced(tools, choice), choice == "required"
    functions = [(place, tool.function) for place, tool in enumerate(tools) if only in (None, tool.function.name)]
    is_bound = must or only is not None
    return {each.name: _arguments(place, each) if is_bound or each.strict else None for place, each in functions}


def parameters_of(tools: Sequence[Tool], name: str) -> str:
    """Name the field of a function's parameters."""
    (place,) = (place for place, tool in enumerate(tools) if tool.function.name == name)
    return _parameters(place)


def _parameters(place: int) -> str:
    return f"tools.{place}.function.parameters"


def _arguments(place: int, function: Function) -> Grammar:
    """Describe a function's arguments: an object, by the schema of its parameters. Without one it takes none."""
    schema = {"properties": {}, "additionalProperties": False} if function.parameters is None else function.parameters
    try:
        return Grammar.json_schema({"type": "object", **schema})
    except GrammarError as error:
        raise ApiError(400, f"{_parameters(place)}: {error}", _parameters(place)) from None


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise ApiError for tools that are too many or too large, share a name, or have a name that is none."""
    if len(tools) > MOST_TOOLS:
        raise ApiError(400, f"{len(tools)} tools are given; expected at most {MOST_TOOLS}", "tools")
    names: set[str] = set()
    for place, tool in enumerate(tools):
        name, where = tool.function.name, f"tools.{place}.function"
        if not NAME.fullmatch(name):
            raise ApiError(
                400, f"{where}.name is {brief(name)}; expected 1 to 64 letters, digits, _, - or .", f"{where}.name"
            )
        if name in names:
            raise ApiError(400, f"{where}.name is {brief(name)}, as that of a tool before it", f"{where}.name")
        names.add(name)
    _check_parameters(tools)


def _check_parameters(tools: Sequence[Tool]) -> None:
    """Raise ApiError for parameters of too many values or levels. Looks at no more than those that are allowed."""
    count = 0
    for place, tool in enumerate(tools):
        where = _parameters(place)
        open_values: list[tuple[int, Any]] = [(1, tool.function.parameters)]
        while open_values:
            depth, value = open_values.pop()
            if depth > DEEPEST:
                raise ApiError(400, f"{where} has more than {DEEPEST} levels; expected a schema of fewer", where)
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            count += len(inner)
            if count > MOST_VALUES:
                message = f"the parameters of the tools hold more than {MOST_VALUES} values; expected shorter schemas"
                raise ApiError(400, message, where)
            open_values += [(depth + 1, each) for each in inner]


def begin_call(tokenizer: Tokenizer, prompt_ids: Sequence[int], name: str) -> tuple[int, ...]:
    """Append the header of a call to a prompt that ends where the answer's header begins, as templates write it.

    Raises ApiError if the prompt ends elsewhere.
    """
    control = control_ids(tokenizer)
    starts = [place for place, token_id in enumerate(prompt_ids) if token_id == control.get(START)]
    if (
        not starts
        or detokenize(tokenizer, prompt_ids[starts[-1] + 1 :]) != ROLE
        or not {CHANNEL, MESSAGE} <= {*control}
    ):
        message = "tool_choice is not supported here: the model's chat template begins the answer itself; leave it out"
        raise ApiError(400, message, "tool_choice", "unsupported_parameter")
    return (
        *prompt_ids,
        *encode_characters(tokenizer, f" to={FUNCTIONS}{name}"),
        control[CHANNEL],
        *encode_characters(tokenizer, "commentary json"),
        control[MESSAGE],
    )


def chat_of(messages: Sequence[ChatMessage]) -> list[Message]:
    """Make the messages that templates take; of past answers, only their final texts and calls.

    Raises ApiError for calls without results, results without calls, and more calls than MOST_CALLS.
    """
    count = sum(len(message.tool_calls) for message in messages)
    if count > MOST_CALLS:
        too_many = f"messages holds {count} calls; expected at most {MOST_CALLS}: leave out old ones"
        raise ApiError(400, too_many, "messages")
    chat: list[Message] = []
    rest = collections.deque(enumerate(messages))
    while rest:
        place, message = rest.popleft()
        if message.role == "tool":
            raise ApiError(
                400, f"messages.{place} is a tool's result, but no call precedes it; send that, too", "messages"
            )
        if not message.tool_calls:
            text = final_message(message.text) if message.role == ROLE else message.text
            chat.append({"role": message.role, "content": text})
            continue
        names = _names(place, message)
        results: dict[str, str] = {}
        while rest and rest[0][1].role == "tool":
            number, result = rest.popleft()
            _check_result(number, result, names, results)
            results[result.tool_call_id or ""] = result.text
        chat += _calls(place, message, results)
    return chat


def _names(place: int, message: ChatMessage) -> dict[str, str]:
    """Map the ids of a message's calls to the names of their functions. Raises ApiError for an id of two calls."""
    names: dict[str, str] = {}
    for number, call in enumerate(message.tool_calls):
        if call.id in names:
            where = f"messages.{place}.tool_calls.{number}.id"
            raise ApiError(400, f"{where} is {brief(call.id)}, as that of a call before it; expected its own", where)
        names[call.id] = call.function.name
    return names


def _check_result(place: int, result: ChatMessage, names: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raise ApiError for a result of no call, of one that has a result, or under another name. names: by ids."""
    called = names.get(result.tool_call_id or "")
    if called is None or result.tool_call_id in known:
        raise ApiError(
            400,
            f"messages.{place}.tool_call_id is {brief(result.tool_call_id)}; expected the id of a call before it that "
            "has no other result",
            f"messages.{place}.tool_call_id",
        )
    if result.name is not None and result.name != called:
        raise ApiError(
            400,
            f"messages.{place}.name is {brief(result.name)}, but the call is one of {brief(called)}; leave it out",
            f"messages.{place}.name",
        )


def _calls(place: int, message: ChatMessage, results: dict[str, str]) -> Iterator[Message]:
    """Make a message for each call, and one for its result. The first has the reasoning that led to the calls."""
    before = [text for text in (message.reasoning or message.reasoning_content, message.text) if text]
    for number, call in enumerate(message.tool_calls):
        if call.id not in results:
            raise ApiError(
                400,
                f"messages.{place}.tool_calls.{number} has no result; send a message of the role tool with the "
                f"tool_call_id {brief(call.id)}",
                "messages",
            )
        function = {"name": call.function.name, "arguments": Verbatim(call.function.arguments)}
        calls = [{"id": call.id, "type": "function", "function": function}]
        thinking = {} if number or not before else {"thinking": "\n\n".join(before)}
        yield {"role": ROLE, "content": "", "tool_calls": calls, **thinking}
        yield {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": results[call.id]}


def _definition(tool: Tool) -> dict[str, Any]:
    given = tool.function
    parameters = {} if given.parameters is None else {"parameters": given.parameters}
    return {"type": "function", "function": {"name": given.name, "description": given.description or "", **parameters}}
