"""Commands are dataclasses read by cyclopts: each field of a command, or of a group in it, is an option."""

import ast
import dataclasses
import difflib
import functools
import inspect
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints, runtime_checkable

from cyclopts import App, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from peagle.cli.output import say
from peagle.ops.errors import InputError, not_installed
from peagle.ops.files import reason_of
from peagle.ops.flag import Flag, Takes, check_type, expected_of

ARGUMENTS, OPTIONS = Group("Arguments", sort_key=-2), Group("Options", sort_key=-1)
ALL = Takes()
HELP_FLAGS = ("--help", "-h")
CONFIG = "config"  # the field of a command that reads options from a file
NAMED = {"num_speculative_tokens": "K"}  # names of fields in messages


@runtime_checkable
class Command(Protocol):
    """A frozen dataclass of options that runs."""

    def run(self) -> int:
        """Run the command and return its exit code. Raises InputError for bad options."""
        ...


@dataclass(frozen=True)
class Option:
    """One option or argument of a command. path: of the field, within its groups."""

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
    def typed_as(self) -> Any:
        """The type that the parser reads: text, if the option has a reader of its own."""
        if self.flag.read is None or self.kind is bool:
            return self.kind
        return tuple[str, ...] if self.repeats else str

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def shown(self) -> str | None:
        """The default, as the help shows it."""
        if self.flag.default is not None and self.default is None:
            return self.flag.default
        hidden = self.required or self.default is None or self.kind is bool or self.default in ("", ())
        return None if hidden else str(self.default)

    def of(self, config: Any) -> Any:
        """Return the option's value in a command, or in another config of this shape."""
        return functools.reduce(getattr, self.path, config)

    def value(self, typed: Any) -> Any:
        if self.flag.read is None:
            return typed
        return tuple(map(self.flag.read, typed)) if self.repeats else self.flag.read(typed)


Kind = TypeVar("Kind")


def options_of(
    kind: type[Any], default: Any = None, takes: Takes = ALL, path: tuple[str, ...] = ()
) -> Iterator[Option]:
    """Yield the options of a command and of its groups. default: a group whose values are the defaults."""
    hints = get_type_hints(kind, include_extras=True)
    helps = {**field_helps(kind), **takes.helps}  # type: ignore[arg-type]  # a class has a hash
    for field in sorted(dataclasses.fields(kind), key=lambda field: takes.place(field.name)):
        hint, *marks = (
            get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else [hints[field.name]]
        )
        value = field.default if default is None else getattr(default, field.name)
        if dataclasses.is_dataclass(hint):
            group = next((mark for mark in marks if isinstance(mark, Takes)), ALL)
            yield from options_of(hint, value, group, (*path, field.name))  # type: ignore[arg-type]
        elif takes.has(field.name):
            for flag in (mark for mark in marks if isinstance(mark, Flag)):
                flag = dataclasses.replace(
                    flag,
                    metavar=takes.metavars.get(field.name, flag.metavar),
                    read=takes.reads.get(field.name, flag.read),
                    old=takes.olds.get(field.name, flag.old),
                )
                help = " ".join(helps.get(field.name, flag.help).split())
                yield Option((*path, field.name), hint, flag, help, value)


@functools.cache
def field_helps(kind: type[Any]) -> dict[str, str]:
    """Read the docstrings below the fields of a dataclass, inherited ones included."""
    helps: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        if dataclasses.is_dataclass(base):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in zip(definition.body, definition.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    helps[ast.unparse(field.target)] = str(ast.literal_eval(below.value))
    return helps


def register(app: App, kind: type[Command], name: str, group: Group | None) -> None:
    """Add a command to an app. A call of it returns (its dataclass, the typed values by the options' names)."""
    options = list(options_of(kind))
    panels: dict[str, Group] = {}

    def parameter(option: Option) -> inspect.Parameter:
        panel = ARGUMENTS if option.is_argument else OPTIONS
        if option.flag.group is not None:
            panel = panels.setdefault(option.flag.group, Group(option.flag.group, sort_key=len(panels)))
        shown = option.shown
        settings = Parameter(
            name=option.names,
            help=option.help.replace("[", "\\["),
            group=panel,
            metavar=option.flag.metavar,
            show=not option.flag.hidden,
            allow_leading_hyphen=not option.is_argument,
            converter=_whole if option.typed_as in (int, int | None) else None,
            show_default=False if shown is None else lambda _: shown,
            required=option.required,
        )
        if option.is_argument and option.repeats:  # of *arguments, options may stand between them
            (item, _) = get_args(option.typed_as)
            return inspect.Parameter(
                option.name, inspect.Parameter.VAR_POSITIONAL, annotation=Annotated[item, settings]
            )
        kind = inspect.Parameter.POSITIONAL_ONLY if option.is_argument else inspect.Parameter.KEYWORD_ONLY
        return reading(option, option.name, kind, settings, inspect.Parameter.empty if option.required else None)

    def former(option: Option) -> inspect.Parameter:
        settings = Parameter(name=option.flag.old, show=False, allow_leading_hyphen=True)
        return reading(option, _former(option), inspect.Parameter.KEYWORD_ONLY, settings, None)

    def reading(option: Option, name: str, kind: Any, settings: Parameter, default: Any) -> inspect.Parameter:
        # cyclopts passes typed options alone, so this default is never read
        typed_as = option.typed_as
        if default is None:
            default, typed_as = (False, bool) if option.kind is bool else (None, typed_as | None)
        return inspect.Parameter(name, kind, default=default, annotation=Annotated[typed_as, settings])

    def parsed(*arguments: Any, **values: Any) -> tuple[type[Command], dict[str, Any]]:
        for option in (option for option in options if option.is_argument):
            if arguments:
                value, arguments = (arguments, ()) if option.repeats else (arguments[0], arguments[1:])
                values[option.name] = value
        return kind, values

    parameters = [parameter(option) for option in options]
    parameters += [former(option) for option in options if option.flag.old is not None]
    parsed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        sorted(parameters, key=lambda parameter: parameter.kind)
    )
    parsed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    extra: dict[str, Any] = {} if group is None else {"group": group}
    app.command(parsed, name=name, help=inspect.cleandoc(kind.__doc__ or ""), usage=_usage(name, options), **extra)


def _usage(name: str, options: Sequence[Option]) -> str | None:
    """Return the usage of a command with an argument NAME..., to which cyclopts adds dots of its own; else None."""
    arguments = [option.names[0] for option in options if option.is_argument]
    if not any(argument.endswith("...") for argument in arguments):
        return None
    typed = [option for option in options if not option.is_argument]
    needed = [f"{option.names[0]} {option.flag.metavar}" for option in typed if option.required]
    others = ["[OPTIONS]"] if len(needed) < len(typed) else []
    return " ".join(["Usage: peagle", name, *needed, *others, *arguments])


def unambiguous(typed: Sequence[str], words: Sequence[str], options: Sequence[Option]) -> list[str]:
    """Join options to their values by =, and put the arguments last, in their order.

    The parser takes an argument - for an option, and a value -- for the end of the options. words: of the command.
    Raises InputError for a value of an option that takes none.
    """
    flags = {name for option in options if option.kind is bool for name in option.names} | set(HELP_FLAGS)
    taking = {name for option in options if option.kind is not bool for name in (*option.names, option.flag.old)}
    read: list[str] = []
    arguments: list[str] = []
    rest = iter(typed)
    for word in rest:
        name = word.partition("=")[0]
        if word == "--":
            arguments += rest
        elif not word.startswith("-") or word[1:2] in "0123456789":  # of the dash alone, no digit: ""
            arguments.append(word)
        elif word != name and name in flags:
            raise InputError(f"Option '{name}' does not take a value. {_usage_shown(words)}")
        else:
            if not word.startswith("--") and all(f"-{letter}" in flags for letter in word[1:-1]):  # -qn 3
                read += [f"-{letter}" for letter in word[1:-1]]
                word = f"-{word[-1]}"
            value = next(rest, None) if word in taking else None
            read.append(word if value is None else f"{word}={value}")
    behind = ["--"] if options and any(argument.startswith("-") for argument in arguments) else []
    return [*read, *behind, *arguments]


def _former(option: Option) -> str:
    return f"former_{option.name}"


def built(kind: type[Kind], typed: Mapping[str, Any]) -> Kind:
    """Make a command from typed values. Raises InputError, which begins with the option's flag."""
    options, typed = list(options_of(kind)), dict(typed)
    for option in options:
        if option.flag.old is not None and _former(option) in typed:
            if option.name in typed:
                old, new = option.flag.old, option.names[0]
                raise InputError(f"{new} and {old} are both given; {old} is the old name of {new}: leave it out")
            say("warning", f"{option.flag.old} is now called {option.names[0]}")
            typed[option.name] = typed.pop(_former(option))
    values: dict[tuple[str, ...], dict[str, Any]] = {}
    for option in options:
        if option.name in typed:
            values.setdefault(option.path[:-1], {})[option.name] = option.value(typed[option.name])
    return _filled(kind, values)


def _filled(
    kind: type[Kind], values: Mapping[tuple[str, ...], Any], path: tuple[str, ...] = (), usual: Any = None
) -> Kind:
    """Make a config and its groups. values: by the groups' paths. usual: a config with the other values."""
    filled = dict(values.get(path, {}))
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        below = (*path, field.name)
        if any(group[: len(below)] == below for group in values):
            group = field.default if usual is None else getattr(usual, field.name)
            filled[field.name] = _filled(type(group), values, below, group)
    return kind(**filled) if usual is None else dataclasses.replace(usual, **filled)


def record(command: Any) -> dict[str, Any]:
    """Return a command's options by the names of their fields, for a file that a later command resumes from."""
    return {option.name: option.of(command) for option in options_of(type(command))}


def read_record(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Undo `record` after a round trip through JSON; a missing option takes its default.

    Raises InputError for an unknown name (a later version's, or a renamed one's), a missing required option, and a
    value of another type.
    """
    options = {option.name: option for option in options_of(kind)}
    if missing := [name for name, option in options.items() if option.required and name not in values]:
        raise InputError(f"{missing[0]} is missing", missing[0])
    filled: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, value in values.items():
        if name not in options:
            close = difflib.get_close_matches(name, options, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise InputError(f"{name} is not an option of this version{hint}", name)
        held = tuple(value) if isinstance(value, list) else value
        check_type(name, held, options[name].kind)
        filled.setdefault(options[name].path[:-1], {})[name] = held
    return _filled(kind, filled)


def flagged(error: InputError, kind: type[Any]) -> str:
    """Return an error's message, with the flag of its field in place of a field's name at its beginning."""
    message, field = str(error), error.field
    flag = next((option.names[0] for option in options_of(kind) if option.name == field), None)
    if field is None or flag is None:
        return message
    for name in (field, field.replace("_", " "), field.replace("_", "-"), NAMED.get(field, field)):
        for verb in (" is ", " are "):
            start, is_named, rest = message.partition(name + verb)
            if is_named and start in ("", "the "):
                return f"{flag} is {rest}"
    return message


def from_file(app: App, words: Sequence[str], kind: type[Command], file: Path) -> dict[str, Any]:
    """Read options of a command from a TOML file; keys are flags without leading dashes.

    Raises InputError, in one line, for a key that is no option, or a value of another type.
    """
    try:
        values = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(
            f"--config {file} cannot be read: {reason_of(error)}; expected TOML, such as slots = 8"
        ) from None
    options = {name.lstrip("-"): option for option in options_of(kind) for name in option.names}
    options.pop(CONFIG)
    typed: dict[str, Any] = {}
    for key, value in values.items():
        option = options.get(key.replace("_", "-"))
        if option is None:
            close = difflib.get_close_matches(key, options, 1)
            raise InputError(
                f"--config {file} names {key}, which is not an option of this command; expected an option of --help, "
                f"such as {close[0] if close else 'slots'}"
            )
        if option.name in typed:
            raise InputError(f"--config {file} names the option of {key} twice; leave one out")
        is_flag = option.kind is bool
        expected = "true or false" if is_flag else "a list of texts" if option.repeats else "a text or a number"
        several = value if option.repeats and isinstance(value, list) else [value]
        types = (bool,) if is_flag else (str, int, float)
        if any(not isinstance(item, types) or isinstance(item, bool) != is_flag for item in several):
            raise InputError(f"--config {file} sets {key} to {value!r}; expected {expected}")
        tokens = [f"{option.names[-1]}={str(item).lower() if is_flag else item}" for item in several]
        try:
            _, read = app([*words, *tokens], result_action="return_value", print_error=False, exit_on_error=False)
        except CycloptsError as error:
            reason = refusal(error, [], list(options_of(kind))).partition("; ")[2].partition(" (peagle")[0]
            raise InputError(f"--config {file} sets {key} to {value!r}: {reason}") from None
        typed |= read
    return typed


def refusal(error: CycloptsError, words: Sequence[str], options: Sequence[Option]) -> str:
    """Describe a parser's error in one line that names the command with the usage."""
    usage = _usage_shown(words)
    named = {name: option for option in options for name in (*option.names, option.flag.old) if name}
    argument = None if error.argument is None else error.argument.name
    option = None if argument is None else named.get(argument)
    if isinstance(error, UnknownOptionError):
        flag = error.token.keyword or error.token.value or ""
        if flag == "-":
            return f"Got unexpected extra argument(s) (-) {usage}"
        return f"{_no_such_option(flag, options)} {usage}"
    if isinstance(error, UnknownCommandError):
        word = (error.unused_tokens or [""])[0]
        if word.startswith("-"):
            return f"{_no_such_option(word, options)} {usage}"
        return f"No such command '{word}'.{_meant(word, list(error.app or ()))} {usage}"
    if isinstance(error, UnusedCliTokensError):
        for token in error.unused_tokens or ():
            if token.startswith("-") and token != "-":
                return f"{_no_such_option(token, options)} {usage}"
        return f"Got unexpected extra argument(s) ({' '.join(error.unused_tokens or ())}) {usage}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        if error.keyword is not None or error.argument.tokens:
            return f"Option '{error.keyword or argument}' requires an argument. {usage}"
        what = "argument" if option is not None and option.is_argument else "option"
        names = "' / '".join([str(argument)] if option is None else option.names)
        return f"Missing {what} '{names}'. {usage}"
    if isinstance(error, CoercionError) and option is not None and error.token is not None:
        value = error.token.value
        shown = value if value.replace(".", "", 1).removeprefix("-").isdecimal() else repr(value)
        return f"{option.names[0]} is {shown}; expected {expected_of(option.kind)} {usage}"
    return f"{' '.join(str(error).split())} {usage}"


def _usage_shown(words: Sequence[str]) -> str:
    return f"({' '.join(['peagle', *words])} --help shows the usage)"


def _no_such_option(flag: str, options: Sequence[Option]) -> str:
    shown = [name for option in options if not option.flag.hidden and not option.is_argument for name in option.names]
    flag = flag.partition("=")[0]
    meant = _meant(flag, shown)
    return f"No such option: {flag}{'.' if meant else ''}{meant}"


def _whole(_: Any, tokens: Sequence[Any]) -> int:
    """Read a whole number, such as 8 or 8.0. Raises ValueError for others, which cyclopts would round."""
    value = tokens[-1].value
    try:
        return int(value)
    except ValueError:
        number = float(value)
        if not number.is_integer():
            raise
        return int(number)


def _meant(typed: str, names: Any) -> str:
    close = difflib.get_close_matches(typed, [name for name in names if name], 1)
    return f" Did you mean '{close[0]}'?" if close else ""


def changed_fields(config: Any, usual: Any = None) -> list[str]:
    """Name the fields, nested ones included, with another value than their default. usual: has the defaults."""
    names: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default if usual is None else getattr(usual, field.name)
        if dataclasses.is_dataclass(value):
            names += changed_fields(value, default)
        elif value != default:
            names.append(field.name)
    return names


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Raise InputError if an import within fails; name the extra to install. what: such as "training needs"."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise not_installed(what, error.name or "a package", extra) from None


def expect_alone(settings: Any, option: str, free: Sequence[str], whole: str) -> None:
    """Raise InputError for fields beside an option that reads them from a file. free: fields that may be typed."""
    flags = {option.name: option.names[-1] for option in options_of(type(settings))}
    if others := [name for name in changed_fields(settings) if name not in free]:
        raise InputError(
            f"{option} takes its options from {whole}; leave out {flags[others[0]]}, or start a new run with another "
            "--out"
        )
