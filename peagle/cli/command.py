"""Commands are dataclasses that cyclopts parses: every field of a command, or of a group in it, is an option."""

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints, runtime_checkable

from cyclopts import App, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from peagle.base.errors import InputError, meant, not_installed
from peagle.base.flag import Flag, Takes, check_type, expected_of

ARGUMENTS, OPTIONS = Group("Arguments", sort_key=-2), Group("Options", sort_key=-1)


@runtime_checkable
class Command(Protocol):
    """A frozen dataclass of options that runs."""

    def run(self) -> int:
        """Run the command and return its exit code. Raises InputError for bad options."""
        ...


@dataclass(frozen=True)
class Option:
    """One option or argument of a command. path: the names of its groups and of its field."""

    path: tuple[str, ...]
    kind: Any
    flag: Flag
    help: str
    default: Any

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def names(self) -> tuple[str, ...]:
        return self.flag.names or (f"--{self.name.replace('_', '-')}",)

    @property
    def is_argument(self) -> bool:
        return not self.names[0].startswith("-")

    @property
    def repeats(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def parsed_type(self) -> Any:
        """The type that cyclopts parses: text, if the option has its own reader."""
        if self.flag.read is None or self.kind is bool:
            return self.kind
        return tuple[str, ...] if self.repeats else str

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def shown_default(self) -> str | None:
        hidden = self.required or self.kind is bool or self.default in (None, "", ())
        return None if hidden else str(self.default)

    def of(self, config: Any) -> Any:
        """Return the option's value in a command, or in another config with the same fields."""
        return functools.reduce(getattr, self.path, config)

    def value(self, typed: Any) -> Any:
        if self.flag.read is None:
            return typed
        return tuple(map(self.flag.read, typed)) if self.repeats else self.flag.read(typed)


Kind = TypeVar("Kind")


def options_of(
    kind: type[Any], default: Any = None, names: Sequence[str] | None = None, path: tuple[str, ...] = ()
) -> Iterator[Option]:
    """Yield the options of a command and of its groups.

    default: an instance of `kind` that holds the defaults. names: of the fields that the command takes; None: all.
    """
    hints, helps = get_type_hints(kind, include_extras=True), field_helps(kind)  # type: ignore[arg-type]  # hashable
    for field in dataclasses.fields(kind):
        annotation = hints[field.name]
        hint, *marks = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        value = field.default if default is None else getattr(default, field.name)
        if dataclasses.is_dataclass(hint):
            taken = next((mark.names for mark in marks if isinstance(mark, Takes)), None)
            yield from options_of(hint, value, taken, (*path, field.name))  # type: ignore[arg-type]
        elif names is None or field.name in names:
            for flag in (mark for mark in marks if isinstance(mark, Flag)):
                help = " ".join((flag.help or helps[field.name]).split())
                yield Option((*path, field.name), hint, flag, help, value)


@functools.cache
def field_helps(kind: type[Any]) -> dict[str, str]:
    """Read the docstrings below the fields of a dataclass and of its base classes."""
    helps: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        if dataclasses.is_dataclass(base):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in zip(definition.body, definition.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    helps[ast.unparse(field.target)] = str(ast.literal_eval(below.value))
    return helps


def register(app: App, kind: type[Command], name: str) -> None:
    """Add a command to an app. Parsing it returns (its dataclass, the typed values by the options' names)."""
    options = list(options_of(kind))
    panels: dict[str, Group] = {}

    def parameter(option: Option) -> inspect.Parameter:
        panel = ARGUMENTS if option.is_argument else OPTIONS
        if option.flag.group is not None:
            panel = panels.setdefault(option.flag.group, Group(option.flag.group, sort_key=len(panels)))
        shown = option.shown_default
        settings = Parameter(
            name=option.names,
            help=option.help.replace("[", "\\["),
            group=panel,
            metavar=option.flag.metavar,
            allow_leading_hyphen=not option.is_argument,
            converter=_read_int if option.parsed_type in (int, int | None) else None,
            show_default=False if shown is None else lambda _: shown,
            required=option.required,
            allow_repeating=True if option.kind is bool else None,  # None: only options of several values
        )
        if option.is_argument and option.repeats:  # as *arguments, so that options may stand between them
            (item, _) = get_args(option.parsed_type)
            return inspect.Parameter(
                option.name, inspect.Parameter.VAR_POSITIONAL, annotation=Annotated[item, settings]
            )
        kind = inspect.Parameter.POSITIONAL_ONLY if option.is_argument else inspect.Parameter.KEYWORD_ONLY
        default: Any = inspect.Parameter.empty
        parsed_type = option.parsed_type
        if not option.required:  # cyclopts returns only typed options, so this default is never used
            default, parsed_type = (False, bool) if option.kind is bool else (None, parsed_type | None)
        return inspect.Parameter(option.name, kind, default=default, annotation=Annotated[parsed_type, settings])

    def parse(*arguments: Any, **values: Any) -> tuple[type[Command], dict[str, Any]]:
        for option in (option for option in options if option.is_argument):
            if arguments:
                value, arguments = (arguments, ()) if option.repeats else (arguments[0], arguments[1:])
                values[option.name] = value
        return kind, values

    parameters = [parameter(option) for option in options]
    parse.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        sorted(parameters, key=lambda parameter: parameter.kind)
    )
    parse.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(parse, name=name, help=inspect.cleandoc(kind.__doc__ or ""))


def normalize(typed: Sequence[str], options: Sequence[Option]) -> list[str]:
    """Rewrite a command line as cyclopts expects it: --option=VALUE first, then the arguments in their order.

    Otherwise cyclopts takes the argument - for an option, and the value -- for the end of the options.
    """
    taking = {name for option in options if option.kind is not bool for name in option.names}
    normalized: list[str] = []
    arguments: list[str] = []
    rest = iter(typed)
    for word in rest:
        if word == "--":
            arguments += rest
        elif not word.startswith("-") or word[1:2] in "0123456789":  # "" is in it, so a lone dash is an argument
            arguments.append(word)
        elif word in taking and (value := next(rest, None)) is not None:
            normalized.append(f"{word}={value}")
        else:
            normalized.append(word)
    separator = ["--"] if options and any(argument.startswith("-") for argument in arguments) else []
    return [*normalized, *separator, *arguments]


def build_command(kind: type[Kind], typed: Mapping[str, Any]) -> Kind:
    """Make a command from typed values. Raises InputError that names the field of a bad one."""
    options = (option for option in options_of(kind) if option.name in typed)
    command: Kind = _build(kind, {option.path: option.value(typed[option.name]) for option in options})
    return command


def _build(config: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """Make a config with these values, by their paths. config: its class, or an instance with all other values."""
    groups: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *rest), value in values.items():
        groups.setdefault(name, {})[tuple(rest)] = value
    fields = {
        name: inner[()] if () in inner else _build(getattr(config, name), inner) for name, inner in groups.items()
    }
    return config(**fields) if isinstance(config, type) else dataclasses.replace(config, **fields)


def record(command: Any) -> dict[str, Any]:
    """Return a command's options by field name, for a file that --resume reads."""
    return {option.name: option.of(command) for option in options_of(type(command))}


def read_record(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Undo `record` after a round trip through JSON; a missing option takes its default.

    Raises InputError for an unknown name (a later version's, or a renamed one's), a missing required option, and a
    value of another type.
    """
    options = {option.name: option for option in options_of(kind)}
    if missing := [name for name, option in options.items() if option.required and name not in values]:
        raise InputError(f"{missing[0]} is missing", missing[0])
    by_path = {}
    for name, value in values.items():
        if name not in options:
            hint = f" (did you mean {close}?)" if (close := meant(name, options)) else ""
            raise InputError(f"{name} is not an option of this version{hint}", name)
        value = tuple(value) if isinstance(value, list) else value
        check_type(name, value, options[name].kind)
        by_path[options[name].path] = value
    command: Kind = _build(kind, by_path)
    return command


def with_flag(error: InputError, kind: type[Any]) -> str:
    """Return an error's message; if it begins with a field's name, replace that by the flag: top-k is -> --top-k is."""
    message, field = str(error), error.field
    flag = next((option.names[0] for option in options_of(kind) if option.name == field), None)
    if field is None or flag is None:
        return message
    symbols = ("K",) if field == "num_speculative_tokens" else ()
    for name in (field, field.replace("_", " "), field.replace("_", "-"), *symbols):
        for verb in (" is ", " are "):
            before, match, rest = message.partition(name + verb)
            if match and before in ("", "the "):
                return f"{flag} is {rest}"
    return message


def usage_error(error: CycloptsError, words: Sequence[str], options: Sequence[Option]) -> str:
    """Describe a parser's error in one line, which ends with how to show the help."""
    return f"{_reason(error, options)} ({' '.join(['peagle', *words])} --help shows the usage)"


def _reason(error: CycloptsError, options: Sequence[Option]) -> str:
    flags = [name for option in options if not option.is_argument for name in option.names]
    token: Any = getattr(error, "token", None)
    typed = "" if token is None else token.value
    if isinstance(error, UnknownCommandError):
        return _unknown("command", (error.unused_tokens or [""])[0], list(error.app or ()))
    if isinstance(error, UnknownOptionError) and (flag := token.keyword or typed) != "-":
        return _unknown("option", flag.partition("=")[0], flags)
    if isinstance(error, UnknownOptionError | UnusedCliTokensError):
        return f"unexpected argument {' '.join(getattr(error, 'unused_tokens', None) or '-')}; leave it out"
    name = token.keyword if isinstance(error, RepeatArgumentError) else getattr(error.argument, "name", "")
    option = next((option for option in options if name in option.names), None)
    if option is None:
        return " ".join(str(error).split())
    name = option.names[0]
    if isinstance(error, RepeatArgumentError):
        return f"{name} is given twice; leave one out"
    if isinstance(error, MissingArgumentError):
        return f"expected {name} {option.flag.metavar or ''}".rstrip()
    if isinstance(error, CoercionError):
        shown = typed if typed.replace(".", "", 1).removeprefix("-").isdecimal() else repr(typed)
        return f"{name} is {shown}; expected {expected_of(option.kind)}"
    return " ".join(str(error).split())


def _unknown(what: str, typed: str, names: Sequence[str]) -> str:
    close = meant(typed, filter(None, names))
    return f"no such {what}: {typed}" + (f"; did you mean {close}?" if close else "")


def _read_int(_: Any, tokens: Sequence[Any]) -> int:
    """Read an integer. Raises ValueError for other numbers, which cyclopts would round."""
    return int(tokens[-1].value)


def changed_options(command: Any) -> list[Option]:
    """Return the options whose values differ from their defaults."""
    return [option for option in options_of(type(command)) if option.of(command) != option.default]


@contextmanager
def require_extra(what: str, extra: str) -> Iterator[None]:
    """Raise InputError that names the extra to install if an import in the block fails. what: as "training needs"."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise not_installed(what, error.name or "a package", extra) from None


def refuse_other_options(settings: Any, option: str, allowed: Sequence[str], source: str) -> None:
    """Raise InputError if options are typed with one that reads them from a file. allowed: fields that may be."""
    if others := [other for other in changed_options(settings) if other.name not in allowed]:
        raise InputError(
            f"{option} takes its options from {source}; leave out {others[0].names[-1]}, or start a new run with "
            "another --out"
        )
