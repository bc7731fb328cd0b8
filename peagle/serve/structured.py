"""Make grammars from the fields that constrain an answer (peagle.serve.bodies.Structured)."""

from collections.abc import Mapping
from typing import Any

from peagle.engine.grammar import Grammar, GrammarError
from peagle.serve.bodies import ChatBody, Structured
from peagle.serve.errors import ApiError


def constraint(body: Structured) -> str | None:
    """Name a field of a body that may constrain its answers; None if it has none."""
    for name in Structured.model_fields:
        if getattr(body, name) is not None:
            return body.names.response_format if name == "response_format" else name
    if not isinstance(body, ChatBody) or body.tool_choice == "none":
        return None
    binds = body.tool_choice != "auto" or any(tool.function.strict for tool in body.tools)
    return "tools" if binds and body.tools else None


def grammar_of(body: Structured) -> tuple[Grammar, str] | None:
    """Return the answer's constraint and the name of its field; None: there is none.

    Raises ApiError for several constraints, and for one that is too large or malformed.
    """
    constraints = {name: value for name, value in _constraints(body).items() if value is not None}
    if not constraints:
        return None
    first, *others = constraints
    if others:
        raise ApiError(400, f"{first} and {others[0]} are both given; expected one of them: leave one out", others[0])
    try:
        return _grammar(first, constraints[first]), first
    except GrammarError as error:
        raise unusable(error, first) from None


def unusable(error: GrammarError, field: str | None) -> ApiError:
    """Make the error of a grammar that cannot be used, with the name of its field, if it has one."""
    return ApiError(400, f"{field}: {error}" if field else str(error), field)


def _constraints(body: Structured) -> Mapping[str, Any]:
    """Map the name of every constraining field to its value; None: not set."""
    form, structured, names = body.response_format, body.structured_outputs, body.names
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        fault = "is missing" if form.json_schema is None else f"is given with the type {form.type!r}"
        message = f"{names.json_schema} {fault}; expected it with the type 'json_schema'"
        raise ApiError(400, message, names.response_format)
    of_schema = form.json_schema.of if form is not None and form.json_schema is not None else None
    any_object = {"type": "object"}
    constraints = {
        names.schema: of_schema,
        names.response_format: any_object if form is not None and form.type == "json_object" else None,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    if structured is None:
        return constraints
    inner = {
        "structured_outputs.json": structured.of_json,
        "structured_outputs.regex": structured.regex,
        "structured_outputs.choice": structured.choice,
        "structured_outputs.grammar": structured.grammar,
        "structured_outputs.json_object": any_object if structured.json_object else None,
    }
    if all(value is None for value in inner.values()):
        expected = "expected one of json, regex, choice, grammar and json_object"
        raise ApiError(400, f"structured_outputs constrains nothing; {expected}", "structured_outputs")
    return constraints | inner


def _grammar(name: str, value: Any) -> Grammar:
    if name.endswith("regex"):
        return Grammar.regex(value)
    if name.endswith("choice"):
        return Grammar.choice(value)
    return Grammar.lark(value) if name.endswith("grammar") else Grammar.json_schema(value)
