"""Read the body of a request: its bytes, its JSON, its fields. Every refusal names the field."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

import pydantic
import pydantic_core
from fastapi import Request

from peagle.base.errors import meant
from peagle.base.settings import brief
from peagle.serve.bodies import MOST_PROMPTS, MOST_TOOLS, Body
from peagle.serve.errors import ApiError

BODY_PATIENCE_S = 60.0
TOKENS_OF_A_MESSAGE = 4  # the fewest, in harmony: start, role, channel or text, end
# lists of messages or items -> the fields of an item that are lists, too
INNER_LISTS = {"messages": ("tool_calls", "content"), "input": ("content", "output")}
EXPECTED = {  # by field, for fields of several types
    "prompt": "expected a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "expected a text or a list of texts",
    "input": "expected a text or a list of items",
    "tool_choice": "expected 'none', 'auto', 'required', or a tool by its name",
    "content": "expected a text or a list of parts",  # of any message
    "output": "expected a text or a list of parts",
}
BodyT = TypeVar("BodyT", bound=Body)


async def read_body(request: Request, most: int) -> bytes:
    """Read a body of at most `most` bytes.

    Raises ApiError for a larger body, an encoded one, and one that is incomplete after BODY_PATIENCE_S.
    """
    encoding = request.headers.get("content-encoding", "")
    if encoding.lower() not in ("", "identity"):
        raise ApiError(415, f"the body's content encoding is {brief(encoding)}; expected none: send plain JSON")
    too_large = ApiError(413, f"the body has more than {most} bytes, the most that this server reads; send less")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_PATIENCE_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        message = f"the body was not complete within {BODY_PATIENCE_S:g} seconds; send it at once"
        raise ApiError(408, message) from None
    return bytes(body)


def parse(kind: type[BodyT], body: bytes, context: int | None = None) -> BodyT:
    """Parse the JSON of a body. Raises ApiError with the name of the wrong field.

    context: in positions. Refuses more messages, calls and parts than it can hold before it checks their types.
    """
    try:
        fields = read_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}; expected an object in UTF-8") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body is {brief(fields)}; expected a JSON object")
    if context is not None:
        _check_count(fields, context)
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _refusal(error, kind) from None


def read_json(body: bytes) -> Any:
    """Parse JSON in UTF-8, UTF-16 or UTF-32, with or without a byte order mark. Raises ValueError."""
    encoding = json.detect_encoding(body)
    return pydantic_core.from_json(body if encoding == "utf-8" else body.decode(encoding))


def _check_count(fields: dict[str, Any], context: int) -> None:
    """Raise ApiError for more ids, messages, calls and parts than the context can hold, and for too many tools.

    To check their types would block the one thread that encodes texts for seconds.
    """
    limits = {"prompt": max(context, MOST_PROMPTS), "tokens": context, "tools": MOST_TOOLS}
    for name, most in limits.items():
        items = fields.get(name)
        for prompt in (items, *(items if isinstance(items, list) else ())):  # a prompt may be a list of lists
            if isinstance(prompt, list) and len(prompt) > most:
                code = None if name == "tools" else "context_length_exceeded"
                raise ApiError(400, f"{name} has {len(prompt)} items; expected at most {most}", name, code)
    for name in INNER_LISTS:
        items = fields.get(name)
        if not isinstance(items, list):
            continue
        check_messages(sum(count_parts(item, name) for item in items if isinstance(item, dict)), context, name)


def count_parts(item: Mapping[str, Any], name: str) -> int:
    """Count an item, its calls and its parts. name: of the field of the body that has the item."""
    inner = (item.get(key) for key in INNER_LISTS[name])
    return 1 + sum(len(parts) for parts in inner if isinstance(parts, list))


def check_messages(count: int, context: int, name: str) -> None:
    """Raise ApiError for more messages, calls and parts than the context can hold. name: of their field."""
    most = max(1, context // TOKENS_OF_A_MESSAGE)
    if count > most:
        things = "items" if name == "input" else "messages, calls"
        message = f"{count} {things} and parts are given; expected at most {most}, since the context holds"
        raise ApiError(400, f"{message} {context} tokens", name, "context_length_exceeded")


def _refusal(error: pydantic.ValidationError, kind: type[Body]) -> ApiError:
    """Make the error of the first wrong field of a body."""
    first, *_ = error.errors(include_url=False)
    # pydantic's location also has the branches of unions: "str", and the tags in brackets
    path = [str(part) for part in first["loc"] if isinstance(part, int) or not (part == "str" or "[" in part)]
    name, value, is_union = ".".join(path) or "the body", first["input"], first["type"] == "union_tag_invalid"
    if is_union and isinstance(value, dict):
        if value.get("type") is None:
            return ApiError.missing(f"{name}.type")
        tags = re.sub(r"[\[\]]", "", first["ctx"]["expected_tags"])
        message = f"{name}.type is {brief(value['type'])}; expected {' or '.join(tags.rsplit(', ', 1))}"
        return ApiError(400, message, f"{name}.type", "unsupported_parameter")
    if first["type"] == "extra_forbidden":
        close = meant(path[-1], _fields_beside(path, kind))
        cure = kind.cures.get(name) or (f"did you mean {close}? Else leave it out" if close else "leave it out")
        return ApiError(
            400, f"{name} is not supported here (it is {brief(value)}); {cure}", name, "unsupported_parameter"
        )
    if first["type"] == "missing":
        return ApiError.missing(name)
    field = path[-1] if path and path[-1] in ("content", "output") else name
    expected = "expected an object" if is_union else EXPECTED.get(field, _in_plain_words(first["msg"]))
    return ApiError(400, f"{name} is {brief(value)}; {expected}", name, "invalid_type")


def _fields_beside(path: Sequence[str], kind: type[Body]) -> list[str]:
    """List the fields of the objects that may be where the path ends, without its last part."""
    kinds = [kind]
    for part in path[:-1]:
        if not part.isdecimal():
            fields = (one.model_fields[part] for one in kinds if part in one.model_fields)
            kinds = [inner for field in fields for inner in _bodies(field.annotation)]
    return [name for one in kinds for name in one.model_fields]


def _bodies(annotation: Any) -> list[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return [annotation]
    return [body for argument in get_args(annotation) for body in _bodies(argument)]


def _in_plain_words(message: str) -> str:
    """Rewrite a message of pydantic: it says "string" and "dictionary"."""
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", message.removeprefix("Value error, "))
    return (
        message.replace("Input should be", "expected")
        .replace("a valid string", "a text")
        .replace("a valid i", "an i")
        .replace("a valid ", "a ")
    )
