"""Tools of a chat: their definitions, tool_choice, calls and results.

A message with several calls becomes one message per call, each followed by its result, since GPT-OSS's chat templates
render one call per message and name a result after the call before it.

The model sees a custom tool, whose input is any text, as a function with one text parameter (bodies.CustomTool).
`CustomCalls` turns its calls back into inputs.
"""

import collections
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from peagle.base.settings import brief
from peagle.base.strict_json import dumps
from peagle.engine.grammar import Grammar, GrammarError
from peagle.engine.json_schema import map_schemas
from peagle.serve.bodies import CUSTOM_INPUT, MOST_TOOLS, ChatMessage, NamedTool, Tool
from peagle.serve.errors import ApiError
from peagle.text.channels import CHANNEL, FUNCTIONS, MESSAGE, ROLE, START, Delta, control_ids, final_message
from peagle.text.tokenizer import Message, Tokenizer, Verbatim, detokenize, encode_characters

MOST_CALLS = 512  # of a chat: the time of GPT-OSS's template is quadratic in them
MOST_VALUES, MOST_LEVELS = 5000, 32  # JSON values in the parameters of all tools; levels of nesting
LONGEST_NAME = 128  # of a tool, with its namespace
NAME = re.compile(r"[A-Za-z0-9_.-]+")
RESULT = "a message of the role tool with the tool_call_id"
Choice = Literal["none", "auto", "required"] | NamedTool


def template_tools(tools: Sequence[Tool], choice: Choice, supported: bool) -> tuple[list[dict[str, Any]], str | None]:
    """Return (tools in the form of chat templates, see `forced_function`). The choice "none" leaves out all tools.

    supported: the chat template renders tools. Raises ApiError for invalid tools or an invalid choice.
    """
    check_tools(tools)
    if not tools:
        if choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice is given without tools; add them, or leave it out", "tool_choice")
        return [], None
    if isinstance(choice, NamedTool) and (choice.type, choice.name) not in [(tool.type, tool.name) for tool in tools]:
        raise ApiError(400, f"tool_choice names {brief(choice.name)}, which is not among the tools", "tool_choice")
    if choice == "none":
        return [], None
    if not supported:
        message = "tools are not supported here: the model's chat template has none; leave them out"
        raise ApiError(400, message, "tools", "unsupported_parameter")
    return [_definition(tool) for tool in tools], forced_function(tools, choice)


def forced_function(tools: Sequence[Tool], choice: Choice) -> str | None:
    """Return the name of the function that the answer must call; None if it may do anything else."""
    if isinstance(choice, NamedTool):
        return choice.name
    return tools[0].name if choice == "required" and len(tools) == 1 else None


def must_call(choice: Choice) -> bool:
    """Whether the answer must be a call."""
    return choice not in ("none", "auto")


def call_grammars(tools: Sequence[Tool], choice: Choice) -> dict[str, Grammar | None]:
    """Return the grammar of the arguments of each function that an answer may call; None: any text.

    Strict functions have a grammar; all functions have one if the answer must call one. Raises ApiError for a schema
    that is too large.
    """
    only = forced_function(tools, choice)
    grammars: dict[str, Grammar | None] = {}
    for index, tool in enumerate(tools):
        if only in (None, tool.name):
            constrains = must_call(choice) or tool.function.strict
            grammars[tool.name] = _arguments(tool, f"tools.{index}.{tool.type}.parameters") if constrains else None
    return grammars


def _arguments(tool: Tool, where: str) -> Grammar:
    """Make the grammar of a function's arguments, an object; an empty one for a function without a schema."""
    schema = tool.function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    try:
        return Grammar.json_schema({**schema, "type": "object"}, strict=bool(tool.function.strict))
    except GrammarError as error:
        raise ApiError(400, f"{where}: {error}", where) from None


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise ApiError for too many or too large tools, invalid or equal names, and parameters that are no object."""
    if len(tools) > MOST_TOOLS:
        raise ApiError(400, f"{len(tools)} tools are given; expected at most {MOST_TOOLS}", "tools")
    known: set[str] = set()
    for index, tool in enumerate(tools):
        name, where = tool.name, f"tools.{index}.{tool.type}.name"
        if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
            raise ApiError.wrong(where, name, f"1 to {LONGEST_NAME} letters, digits, _, - or .")
        if name in known:
            raise ApiError(400, f"{where} is {brief(name)}, but an earlier tool has this name", where)
        known.add(name)
        kinds = (tool.function.parameters or {}).get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            where = f"tools.{index}.{tool.type}.parameters.type"
            raise ApiError.wrong(where, kinds, "'object', since arguments are one")
    _check_parameters(tools)


def _check_parameters(tools: Sequence[Tool]) -> None:
    """Raise ApiError for parameters with too many values or levels, without reading those beyond the limit."""
    count = 0
    for index, tool in enumerate(tools):
        where = f"tools.{index}.{tool.type}.parameters"
        open_values: list[tuple[int, Any]] = [(1, tool.function.parameters)]
        while open_values:
            depth, value = open_values.pop()
            if depth > MOST_LEVELS:
                raise ApiError(400, f"{where} has more than {MOST_LEVELS} levels; expected fewer", where)
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            count += len(inner)
            if count > MOST_VALUES:
                message = f"the parameters of the tools hold more than {MOST_VALUES} values; expected shorter schemas"
                raise ApiError(400, message, where)
            open_values += [(depth + 1, item) for item in inner]


def begin_call(tokenizer: Tokenizer, prompt_ids: Sequence[int], name: str) -> tuple[int, ...]:
    """Append the header of a call to a prompt. Raises ApiError unless the prompt ends with the assistant's role."""
    control = control_ids(tokenizer)
    starts = [index for index, token_id in enumerate(prompt_ids) if token_id == control.get(START)]
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


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Make the messages in the form of chat templates. Past answers keep only final texts and calls.

    Raises ApiError for calls without results, results without calls, and more than MOST_CALLS calls.
    """
    count = sum(len(message.tool_calls) for message in messages)
    if count > MOST_CALLS:
        too_many = f"messages holds {count} calls; expected at most {MOST_CALLS}: leave out old ones"
        raise ApiError(400, too_many, "messages")
    chat: list[Message] = []
    rest = collections.deque(enumerate(messages))
    while rest:
        index, message = rest.popleft()
        if message.role == "tool":
            fault = f"messages.{index} is a tool's result, but no call precedes it; send the call, too"
            raise ApiError(400, fault, "messages")
        if not message.tool_calls:
            text = final_message(message.text) if message.role == ROLE else message.text
            named = {} if message.name is None else {"name": message.name}
            chat.append({"role": message.role, "content": text, **named})
            continue
        functions = _function_names(index, message)
        results: dict[str, str] = {}
        while rest and rest[0][1].role == "tool":
            result_index, result = rest.popleft()
            _check_result(result_index, result, functions, results)
            results[result.tool_call_id or ""] = result.text
        chat += _call_messages(index, message, results)
    return chat


def _function_names(index: int, message: ChatMessage) -> dict[str, str]:
    """Return the name of the function of each call of a message, by call id. Raises ApiError for equal ids."""
    functions: dict[str, str] = {}
    for number, call in enumerate(message.tool_calls):
        if call.id in functions:
            where = f"messages.{index}.tool_calls.{number}.id"
            fault = f"{where} is {brief(call.id)}, but an earlier call has this id; expected another one"
            raise ApiError(400, fault, where)
        functions[call.id] = call.function.name
    return functions


def _check_result(index: int, result: ChatMessage, functions: Mapping[str, str], results: Mapping[str, str]) -> None:
    """Raise ApiError for a result without a call, the second result of a call, or the name of another function.

    functions: names by call id. results: those so far, by call id.
    """
    called = functions.get(result.tool_call_id or "")
    if called is None or result.tool_call_id in results:
        where = f"messages.{index}.tool_call_id"
        raise ApiError.wrong(where, result.tool_call_id, "the id of a call before it that has no other result")
    if result.name is not None and result.name != called:
        where = f"messages.{index}.name"
        message = f"{where} is {brief(result.name)}, but the call is one of {brief(called)}; leave it out"
        raise ApiError(400, message, where)


def _call_messages(index: int, message: ChatMessage, results: dict[str, str]) -> Iterator[Message]:
    """Make a message for each call and one for its result. The first also has the reasoning before the calls.

    Arguments are rendered as the model wrote them.
    """
    before = [text for text in (message.thinking, message.text) if text]
    for number, call in enumerate(message.tool_calls):
        if call.id not in results:
            missing = f"messages.{index}.tool_calls.{number} has no result"
            raise ApiError(400, f"{missing}; send {RESULT} {brief(call.id)}", "messages")
        function = {"name": call.function.name, "arguments": Verbatim(call.function.arguments)}
        calls = [{"id": call.id, "type": "function", "function": function}]
        thinking = {} if number or not before else {"thinking": "\n\n".join(before)}
        yield {"role": ROLE, "content": "", "tool_calls": calls, **thinking}
        yield {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": results[call.id]}


class CustomCalls:
    """Turn the arguments of an answer's custom calls back into inputs, each a single delta at the end of its call."""

    def __init__(self, names: Collection[str]) -> None:
        """names: of the custom tools."""
        self._names = names
        self._open: Delta | None = None  # the last delta of the custom call that is being written
        self._arguments = ""  # of that call

    def read(self, deltas: Sequence[Delta], at_end: bool) -> list[Delta]:
        """Return the deltas with inputs in place of arguments. at_end: these are the last of the answer."""
        texts: list[Delta] = []
        for delta in deltas:
            if self._open is not None and delta.message != self._open.message:
                texts += self._end_call()
            if delta.call is None or delta.call.name not in self._names:
                texts.append(delta)
                continue
            if self._open is None:
                texts.append(delta)
            self._open, self._arguments = delta, self._arguments + delta.text
        return texts + self._end_call() if at_end else texts

    def _end_call(self) -> list[Delta]:
        delta, text = self._open, _input_of(self._arguments)
        self._open, self._arguments = None, ""
        return [] if delta is None or not text else [delta._replace(text=text)]


def _input_of(arguments: str) -> str:
    """Return the input of a custom call: its one argument, or the whole text if that is no object with it."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    is_input = isinstance(value, dict) and value.keys() == {CUSTOM_INPUT} and isinstance(value[CUSTOM_INPUT], str)
    return value[CUSTOM_INPUT] if is_input else arguments


def _definition(tool: Tool) -> dict[str, Any]:
    function = tool.function
    parameters = {} if function.parameters is None else {"parameters": _with_verbatim_defaults(function.parameters)}
    named = {"name": function.name, "description": function.description or ""}
    return {"type": "function", "function": {**named, **parameters}}


def _with_verbatim_defaults(schema: Any) -> Any:
    """Make defaults of a schema texts, which are rendered verbatim: GPT-OSS's template fails for other types."""
    if not isinstance(schema, dict):
        return schema
    rendered = map_schemas(schema, lambda inner, _: _with_verbatim_defaults(inner))
    if "default" in schema and not isinstance(schema["default"], str):
        rendered["default"] = Verbatim(dumps(schema["default"], ensure_ascii=False))
    return rendered
