"""Make grammars of the fields that constrain an answer (peagle.serve.bodies.Structured)."""

from collections.abc import Mapping
from typing import Any

from peagle.engine.grammar import Grammar, GrammarError
from peagle.serve.bodies import ChatBody, JsonSchema, ResponseFormat, Structured, StructuredOutputs
from peagle.serve.errors import ApiError
from peagle.serve.tools import must_call


def constraint_field(body: Structured) -> str | None:
    """Return the name of the field that constrains a body's answers; None: they are free."""
    tools, choice = (body.tools, body.tool_choice) if isinstance(body, ChatBody) else ([], "none")
    if tools and must_call(choice):
        return "tools"
    for name in Structured.model_fields:
        value = getattr(body, name)
        if value is not None and not (isinstance(value, ResponseFormat) and value.type == "text"):
            return name
    return "tools" if choice == "auto" and any(tool.function.strict for tool in tools) else None


def grammar_of(body: Structured) -> tuple[Grammar, str] | None:
    """Return (the grammar of the answers, the name of its field), apart from tools; None: there is none.

    Raises ApiError for several grammars, and for one that is too large or malformed.
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
        raise grammar_error(error, first) from None


def grammar_error(error: GrammarError, field: str | None) -> ApiError:
    """Make the error of a grammar that cannot be used."""
    return ApiError(400, f"{field}: {error}" if field else str(error), field)


def _constraints(body: Structured) -> Mapping[str, Any]:
    """Return the value of each field that constrains answers, by its name; None: not set."""
    form, structured = body.response_format, body.structured_outputs
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        fault = "is missing" if form.json_schema is None else f"is given with the type {form.type!r}"
        message = f"response_format.json_schema {fault}; expected it with the type 'json_schema'"
        raise ApiError(400, message, "response_format")
    schema = None if form is None else form.json_schema
    any_object = {"type": "object"}
    constraints = {
        "response_format.json_schema.schema": schema,
        "response_format": any_object if form is not None and form.type == "json_object" else None,
        **{name: getattr(body, name) for name in Structured.model_fields if name.startswith("guided_")},
    }
    if structured is None:
        return constraints
    fields = StructuredOutputs.model_fields.items()
    inner = {f"structured_outputs.{field.alias or name}": getattr(structured, name) for name, field in fields}
    inner["structured_outputs.json_object"] = any_object if structured.json_object else None
    if all(value is None for value in inner.values()):
        expected = "expected one of json, regex, choice, grammar and json_object"
        raise ApiError(400, f"structured_outputs constrains nothing; {expected}", "structured_outputs")
    return constraints | inner


def _grammar(name: str, value: Any) -> Grammar:
    if name.endswith("regex"):
        return Grammar.regex(value)
    if name.endswith("choice"):
        return Grammar.choice(value)
    if isinstance(value, JsonSchema):
        return Grammar.json_schema(value.schema_, strict=bool(value.strict))
    return Grammar.lark(value) if name.endswith("grammar") else Grammar.json_schema(value)
