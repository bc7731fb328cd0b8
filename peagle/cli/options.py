"""Commands from dataclasses: each field of a command's settings is one of its options."""

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from peagle.cli.command import expect_alone as expect_alone
from peagle.cli.command import given as given
from peagle.cli.command import needing as needing
from peagle.cli.command import rebuilt as rebuilt
from peagle.ops.errors import InputError
from peagle.ops.files import reason_of

Settings = TypeVar("Settings")


def command_of(
    app: typer.Typer,
    function: Callable[[Settings], int],
    call: Callable[[Callable[[], int]], int],
    group: str | None = None,
) -> Callable[[Settings], int]:
    """Register a function of one frozen dataclass as a command of the same name, and return it.

    The dataclass's fields are the command's parameters: annotated with typer.Option or typer.Argument, or nested
    dataclasses, whose fields are parameters of the same command. Its docstring is the command's help. `call` runs
    the function and maps its errors to an exit code. group: of commands, in the app's help.
    """
    (kind,) = (hint for name, hint in get_type_hints(function).items() if name != "return")
    parameters = _parameters(kind)
    flags = {each.name: flag for each in parameters if (flag := _flag(each)) is not None}

    def parsed(**values: Any) -> int:
        def run() -> int:
            try:
                return function(_filled(kind, values))
            except InputError as error:
                raise InputError(by_flag(str(error), flags)) from error

        return call(run)

    parsed.__name__ = function.__name__
    parsed.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    parsed.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(function.__name__.replace("_", "-"), help=kind.__doc__, rich_help_panel=group)(parsed)
    return function


def defaults_from(context: Any, file: Path | None) -> Path | None:
    """Take defaults of a command's options from a TOML file, whose keys are the options' names without dashes before.

    The callback of an eager option; `context` is the parser's. Raises InputError, in one line, for a key that is no
    option, or a value that is none for it.
    """
    if file is None:
        return None
    try:
        values = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(
            f"--config {file} cannot be read: {reason_of(error)}; expected TOML, such as slots = 8"
        ) from None
    options = {
        name.lstrip("-"): option
        for option in context.command.params
        for name in option.opts
        if name.startswith("-") and option.name not in ("config", "help")
    }
    found = {}
    for key, value in values.items():
        option = options.get(key.replace("_", "-"))
        if option is None:
            raise InputError(
                f"--config {file} names {key}, which is not an option of this command; expected an option of --help, "
                "such as slots"
            )
        if option.name in found:
            raise InputError(f"--config {file} names the option of {key} twice; leave one out")
        found[option.name] = _checked(file, key, value, option)
        _check_converts(file, key, found[option.name], option, context)
    context.default_map = {**(context.default_map or {}), **found}
    return file


def _checked(file: Path, key: str, value: Any, option: Any) -> Any:
    """Return a value of a file as the parser takes it. Raises InputError for a type that the option does not take."""
    expected = "true or false" if option.is_flag else "a list of texts" if option.multiple else "a text or a number"
    values = value if option.multiple and isinstance(value, list) else [value]
    kinds = (bool,) if option.is_flag else (str, int, float)
    if any(not isinstance(each, kinds) or isinstance(each, bool) != option.is_flag for each in values):
        raise InputError(f"--config {file} sets {key} to {value!r}; expected {expected}")
    return [str(each) for each in values] if option.multiple else value if option.is_flag else str(value)


def _check_converts(file: Path, key: str, value: Any, option: Any, context: Any) -> None:
    """Raise InputError for a value that the option's type does not take."""
    try:
        option.process_value(context, value)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not the parser's error: a bug, so show its traceback
            raise
        raise InputError(f"--config {file} sets {key} to {value!r}: {in_words(str(error))}") from None


def in_words(message: str) -> str:
    """Rewrite the type checker's phrases in a message of the parser."""
    for phrase, ours in _PHRASES:
        message = re.sub(phrase, ours, message)
    return message


_PHRASES = (
    ("Value error, ", ""),
    ("Input should be", "expected"),
    (", unable to parse .*", ""),
    (r"greater than or equal to (\S+)", r"\1 or more"),
    (r"less than or equal to (\S+)", r"at most \1"),
    (r"^.* is not one of (.*?)\.?$", r"expected one of \1"),
)


def refusal(error: Any, command: Any, typed: Sequence[str]) -> str:
    """Describe in one line what the parser refused, and name the command whose help shows the usage.

    The parser's message about a value lacks the value; the error of the type checker below has it.
    """
    words = ["peagle"]
    for word in typed:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        words.append(word)
    parameter, checked = getattr(error, "param", None), error.__cause__
    message = in_words(error.format_message())
    if parameter is not None and hasattr(checked, "errors"):
        first = checked.errors()[0]
        name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.human_readable_name
        seen = str(first["input"])
        seen = seen if re.fullmatch(r"-?[\d.]+", seen) else repr(seen)
        message = f"{name} is {seen}; {in_words(first['msg'])}"
    return f"{message} ({' '.join(words)} --help shows the usage)"


def by_flag(message: str, flags: Mapping[str, str]) -> str:
    """Begin a message about an option's value with its flag, as typed, if it begins with the value's name.

    Below the command line a value has the name that it has in Python. flags: of a command, by the names of its fields.
    Example: "top-k is -1; expected ..." becomes "--top-k is -1; expected ...".
    """
    found = _VALUE_IS.match(message)
    if found is None:
        return message
    name = _SHORT.get(found[1], found[1].replace("-", "_").replace(" ", "_"))
    flag = flags.get(name) or flags.get(f"{name}s")
    return message if flag is None else f"{flag} is {message[found.end() :]}"


_VALUE_IS = re.compile(r"(?:the |number of )*([A-Za-z][\w -]*?) (?:is|are) ")
_SHORT = {"K": "num_speculative_tokens"}


def _flag(parameter: inspect.Parameter) -> str | None:
    """Return the first flag of an option; None for an argument."""
    for option in get_args(parameter.annotation)[1:]:
        # in an annotation typer.Option takes the first of them for its default
        declared = (getattr(option, "default", None), *(getattr(option, "param_decls", None) or ()))
        for each in declared:
            if isinstance(each, str) and each.startswith("-"):
                return each
    return None


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
