"""From the fields of a body that constrain its answers (peagle.serve.types.Structured) to a grammar."""

from collections.abc import Mapping
from typing import Any

from peagle.engine.grammar import Grammar, GrammarError
from peagle.serve.errors import ApiError
from peagle.serve.names import CHAT, Names
from peagle.serve.types import ChatBody, Structured


def constraint(body: Structured, names: Names = CHAT) -> str | None:
    """Name a field of a body that may constrain its answers; None if it has none."""
    for name in Structured.model_fields:
        if getattr(body, name) is not None:
            return names.response_format if name == "response_format" else name
    if not isinstance(body, ChatBody) or body.tool_choice == "none":
        return None
    binds = body.tool_choice != "auto" or any(tool.function.strict for tool in body.tools)
    return "tools" if binds and body.tools else None


def grammar_of(body: Structured, names: Names = CHAT) -> tuple[Grammar, str] | None:
    """Return what constrains the answer, with the name of the field that does; None: nothing.

    Raises ApiError for several constraints, and for one that is too large or malformed.
    """
    found = {name: value for name, value in _wanted(body, names).items() if value is not None}
    if not found:
        return None
    first, *others = found
    if others:
        raise ApiError(400, f"{first} and {others[0]} are both given; expected one of them: leave one out", others[0])
    try:
        return _grammar(first, found[first]), first
    except GrammarError as error:
        raise unusable(error, first) from None


def unusable(error: GrammarError, field: str | None) -> ApiError:
    """Make the error of a grammar that cannot be used, with the name of its field, if it has one."""
    return ApiError(400, f"{field}: {error}" if field else str(error), field)


def _wanted(body: Structured, names: Names) -> Mapping[str, Any]:
    """Name every constraint by its field; None where it is not given."""
    form, given = body.response_format, body.structured_outputs
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        seen = "is missing" if form.json_schema is None else f"is given with the type {form.type!r}"
        message = f"{names.json_schema} {seen}; expected it with the type 'json_schema'"
        raise ApiError(400, message, names.response_format)
    of_schema = form.json_schema.of if form is not None and form.json_schema is not None else None
    any_object = {"type": "object"}
    found = {
        names.schema: of_schema,
        names.response_format: any_object if form is not None and form.type == "json_object" else None,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    if given is None:
        return found
    inner = {
        "structured_outputs.json": given.of_json,
        "structured_outputs.regex": given.regex,
        "structured_outputs.choice": given.choice,
        "structured_outputs.grammar": given.grammar,
        "structured_outputs.json_object": any_object if given.json_object else None,
    }
    if all(value is None for value in inner.values()):
        expected = "expected one of json, regex, choice, grammar and json_object"
        raise ApiError(400, f"structured_outputs constrains nothing; {expected}", "structured_outputs")
    return found | inner


def _grammar(name: str, value: Any) -> Grammar:
    if name.endswith("regex"):
        return Grammar.regex(value)
    if name.endswith("choice"):
        return Grammar.choice(value)
    return Grammar.lark(value) if name.endswith("grammar") else Grammar.json_schema(value)
