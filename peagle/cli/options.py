"""Commands from dataclasses: each field of a command's settings is one of its options, named once."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from peagle.ops.errors import InputError

Settings = TypeVar("Settings")


def command_of(
    app: typer.Typer, function: Callable[[Settings], int], call: Callable[[Callable[[], int]], int]
) -> Callable[[Settings], int]:
    """Register a function of one frozen dataclass as a command of the same name, and return it.

    The dataclass's fields are the command's parameters: annotated with typer.Option or typer.Argument, or nested
    dataclasses, whose fields are parameters of the same command. Its docstring is the command's help. `call` runs
    the function and maps its errors to an exit code.
    """
    (kind,) = (hint for name, hint in get_type_hints(function).items() if name != "return")

    def parsed(**values: Any) -> int:
        return call(lambda: function(_filled(kind, values)))

    parameters = _parameters(kind)
    parsed.__name__ = function.__name__
    parsed.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    parsed.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(function.__name__.replace("_", "-"), help=kind.__doc__)(parsed)
    return function


def given(settings: Any) -> list[str]:
    """Name the fields, nested ones too, whose values are not their defaults."""
    names: list[str] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            names += given(value)
        elif value != field.default:
            names.append(field.name)
    return names


def expect_alone(settings: Any, option: str, free: Sequence[str], whole: str) -> None:
    """Raise InputError if more is given beside an option that takes all else from a file, but for what is free."""
    if others := [name for name in given(settings) if name not in free]:
        raise InputError(
            f"{option} goes on by {whole}, and {others[0].replace('_', ' ')} is given, too; leave it out, or begin "
            "another run with another --out"
        )


def rebuilt(kind: Any, values: Mapping[str, Any]) -> Any:
    """Make settings, nested ones too, from their JSON. Fields that it lacks take their defaults; others are ignored."""
    filled = {}
    for field in dataclasses.fields(kind):
        if field.name in values:
            value = values[field.name]
            if dataclasses.is_dataclass(field.type):
                value = rebuilt(field.type, value)
            filled[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**filled)


def _parameters(kind: Any) -> list[inspect.Parameter]:
    found: list[inspect.Parameter] = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            found += _parameters(field.type)
            continue
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        annotation = _parsed_as(field.type)
        found.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return found


def _parsed_as(annotation: Any) -> Any:
    """The parser's type of a field: of repeatable options it knows lists alone."""
    kind, *option = get_args(annotation)
    if get_origin(kind) is tuple:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    return Annotated[(kind, *option)]


def _filled(kind: Any, values: Mapping[str, Any]) -> Any:
    filled = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            filled[field.name] = _filled(field.type, values)
        else:
            value = values[field.name]
            filled[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**filled)
