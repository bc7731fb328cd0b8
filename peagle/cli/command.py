"""Commands are dataclasses that cyclopts parses: every field of a command, or of a group in it, is an option."""

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

from peagle.ops.errors import InputError, not_installed
from peagle.ops.files import reason_of
from peagle.ops.flag import Flag, Takes, check_type, expected_of

ARGUMENTS, OPTIONS = Group("Arguments", sort_key=-2), Group("Options", sort_key=-1)
ALL = Takes()
HELP_FLAGS = ("--help", "-h")
CONFIG = "config"  # the field that names a file of options
SYMBOLS = {"num_speculative_tokens": "K"}  # how messages spell these fields


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
        if self.flag.default is not None and self.default is None:
            return self.flag.default
        hidden = self.required or self.default is None or self.kind is bool or self.default in ("", ())
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
    kind: type[Any], default: Any = None, takes: Takes = ALL, path: tuple[str, ...] = ()
) -> Iterator[Option]:
    """Yield the options of a command and of its groups. default: an instance of `kind` that holds the defaults."""
    hints = get_type_hints(kind, include_extras=True)
    helps = {**field_helps(kind), **takes.helps}  # type: ignore[arg-type]  # a class has a hash
    for field in sorted(dataclasses.fields(kind), key=lambda field: takes.place(field.name)):
        annotation = hints[field.name]
        hint, *marks = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        value = field.default if default is None else getattr(default, field.name)
        if dataclasses.is_dataclass(hint):
            group = next((mark for mark in marks if isinstance(mark, Takes)), ALL)
            yield from options_of(hint, value, group, (*path, field.name))  # type: ignore[arg-type]
        elif takes.has(field.name):
            for flag in (mark for mark in marks if isinstance(mark, Flag)):
                flag = dataclasses.replace(flag, read=takes.reads.get(field.name, flag.read))
                help = " ".join(helps.get(field.name, flag.help).split())
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


def register(app: App, kind: type[Command], name: str, group: Group | None) -> None:
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
    extra: dict[str, Any] = {} if group is None else {"group": group}
    app.command(parse, name=name, help=inspect.cleandoc(kind.__doc__ or ""), usage=_usage(name, options), **extra)


def _usage(name: str, options: Sequence[Option]) -> str | None:
    """Return the usage of a command with an argument NAME..., because cyclopts would add a second "..."; else None."""
    arguments = [option.names[0] for option in options if option.is_argument]
    if not any(argument.endswith("...") for argument in arguments):
        return None
    typed = [option for option in options if not option.is_argument]
    needed = [f"{option.names[0]} {option.flag.metavar}" for option in typed if option.required]
    others = ["[OPTIONS]"] if len(needed) < len(typed) else []
    return " ".join(["Usage: peagle", name, *needed, *others, *arguments])


def normalize(typed: Sequence[str], words: Sequence[str], options: Sequence[Option]) -> list[str]:
    """Rewrite a command line as cyclopts expects it: --option=VALUE first, then the arguments in their order.

    Otherwise cyclopts takes the argument - for an option, and the value -- for the end of the options. words: the
    command. Raises InputError for a value of an option that takes none, and for two of an option that takes one.
    """
    flags = {name for option in options if option.kind is bool for name in option.names} | set(HELP_FLAGS)
    taking = {name: option for option in options if option.kind is not bool for name in option.names}
    normalized: list[str] = []
    arguments: list[str] = []
    values: dict[str, str] = {}  # of the options that take one
    rest = iter(typed)
    for word in rest:
        name = word.partition("=")[0]
        if word.startswith("--"):  # --max_new_tokens, as cyclopts reads it
            name, word = name.replace("_", "-"), name.replace("_", "-") + word[len(name) :]
        if word == "--":
            arguments += rest
        elif not word.startswith("-") or word[1:2] in "0123456789":  # "" is in it, so a lone dash is an argument
            arguments.append(word)
        elif word != name and name in flags:
            raise InputError(f"Option '{name}' does not take a value. {_help_hint(words)}")
        else:
            while not word.startswith("--") and word[:2] in flags and len(word) > 2:  # -qn 3, -qk3
                normalized.append(word[:2])
                word = f"-{word[2:]}"
            if word[:2] in taking and word[2:3] not in ("", "="):  # -k3
                word = f"{word[:2]}={word[2:]}"
            if word in taking and (value := next(rest, None)) is not None:
                word = f"{word}={value}"
            normalized.append(word)
            _refuse_second(word, taking, values, words)
    separator = ["--"] if options and any(argument.startswith("-") for argument in arguments) else []
    return [*normalized, *separator, *arguments]


def _refuse_second(word: str, taking: Mapping[str, Option], values: dict[str, str], words: Sequence[str]) -> None:
    """Raise InputError if --option=VALUE is the second value of an option that takes one. values: those so far."""
    name, equals, value = word.partition("=")
    option = taking.get(name)
    if option is None or option.repeats or not equals:
        return
    key = option.names[0]
    if key in values:
        raise InputError(f"{key} is given twice, {values[key]} and {value}; leave one out {_help_hint(words)}")
    values[key] = value


def build_command(kind: type[Kind], typed: Mapping[str, Any]) -> Kind:
    """Make a command from typed values. Raises InputError that names the field of a bad one."""
    values: dict[tuple[str, ...], dict[str, Any]] = {}
    for option in options_of(kind):
        if option.name in typed:
            values.setdefault(option.path[:-1], {})[option.name] = option.value(typed[option.name])
    return _build(kind, values)


def _build(
    kind: type[Kind], values: Mapping[tuple[str, ...], Any], path: tuple[str, ...] = (), defaults: Any = None
) -> Kind:
    """Make a config and its groups. values: by the path of their group. defaults: an instance with all other values."""
    fields = dict(values.get(path, {}))
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        below = (*path, field.name)
        if any(group[: len(below)] == below for group in values):
            group = field.default if defaults is None else getattr(defaults, field.name)
            fields[field.name] = _build(type(group), values, below, group)
    return kind(**fields) if defaults is None else dataclasses.replace(defaults, **fields)


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
    by_group: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, value in values.items():
        if name not in options:
            close = difflib.get_close_matches(name, options, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise InputError(f"{name} is not an option of this version{hint}", name)
        value = tuple(value) if isinstance(value, list) else value
        check_type(name, value, options[name].kind)
        by_group.setdefault(options[name].path[:-1], {})[name] = value
    return _build(kind, by_group)


def with_flag(error: InputError, kind: type[Any]) -> str:
    """Return an error's message; if it begins with a field's name, replace that by the flag: top-k is -> --top-k is."""
    message, field = str(error), error.field
    flag = next((option.names[0] for option in options_of(kind) if option.name == field), None)
    if field is None or flag is None:
        return message
    for name in (field, field.replace("_", " "), field.replace("_", "-"), SYMBOLS.get(field, field)):
        for verb in (" is ", " are "):
            before, match, rest = message.partition(name + verb)
            if match and before in ("", "the "):
                return f"{flag} is {rest}"
    return message


def read_config_file(app: App, words: Sequence[str], kind: type[Command], file: Path) -> dict[str, Any]:
    """Read options of a command from a TOML file, whose keys are flags without leading dashes.

    Raises InputError for a key that is no option, and for a value of another type.
    """
    try:
        values = tomllib.loads(file.read_text("utf-8-sig"))
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
        items = value if option.repeats and isinstance(value, list) else [value]
        types = (bool,) if is_flag else (str, int, float)
        if any(not isinstance(item, types) or isinstance(item, bool) != is_flag for item in items):
            raise InputError(f"--config {file} sets {key} to {value!r}; expected {expected}")
        tokens = [f"{option.names[-1]}={str(item).lower() if is_flag else item}" for item in items]
        try:
            _, parsed = app([*words, *tokens], result_action="return_value", print_error=False, exit_on_error=False)
        except CycloptsError as error:
            reason = usage_error(error, [], list(options_of(kind))).partition("; ")[2].partition(" (peagle")[0]
            raise InputError(f"--config {file} sets {key} to {value!r}: {reason}") from None
        typed |= parsed
    return typed


def usage_error(error: CycloptsError, words: Sequence[str], options: Sequence[Option]) -> str:
    """Describe a parser's error in one line, which ends with how to show the help."""
    hint = _help_hint(words)
    by_flag = {name: option for option in options for name in option.names}
    argument = None if error.argument is None else error.argument.name
    option = None if argument is None else by_flag.get(argument)
    unknown: list[str] = []
    if isinstance(error, UnknownOptionError):
        unknown = [error.token.keyword or error.token.value or ""]
    elif isinstance(error, UnknownCommandError):
        unknown = (error.unused_tokens or [""])[:1]
    elif isinstance(error, UnusedCliTokensError):
        unknown = list(error.unused_tokens or ())
    if flags := [word for word in unknown if word.startswith("-") and word != "-"]:
        return f"{_no_such_option(flags[0], options)} {hint}"
    if isinstance(error, UnknownCommandError):
        return f"No such command '{unknown[0]}'.{_did_you_mean(unknown[0], list(error.app or ()))} {hint}"
    if unknown:
        return f"Got unexpected extra argument(s) ({' '.join(unknown)}) {hint}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        if error.keyword is not None or error.argument.tokens:
            return f"Option '{error.keyword or argument}' requires an argument. {hint}"
        kind = "argument" if option is not None and option.is_argument else "option"
        names = "' / '".join([str(argument)] if option is None else option.names)
        return f"Missing {kind} '{names}'. {hint}"
    if isinstance(error, CoercionError) and option is not None and error.token is not None:
        value = error.token.value
        shown = value if value.replace(".", "", 1).removeprefix("-").isdecimal() else repr(value)
        return f"{option.names[0]} is {shown}; expected {expected_of(option.kind)} {hint}"
    return f"{' '.join(str(error).split())} {hint}"


def _help_hint(words: Sequence[str]) -> str:
    return f"({' '.join(['peagle', *words])} --help shows the usage)"


def _no_such_option(typed: str, options: Sequence[Option]) -> str:
    names = [name for option in options if not option.is_argument for name in option.names]
    flag = typed.partition("=")[0]
    suggestion = _did_you_mean(flag, names)
    return f"No such option: {flag}{'.' if suggestion else ''}{suggestion}"


def _did_you_mean(typed: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(typed, [name for name in names if name], 1)
    return f" Did you mean '{close[0]}'?" if close else ""


def _read_int(_: Any, tokens: Sequence[Any]) -> int:
    """Read an integer, such as 8 or 8.0. Raises ValueError for other numbers, which cyclopts would round."""
    value = tokens[-1].value
    try:
        return int(value)
    except ValueError:
        number = float(value)
        if not number.is_integer():
            raise
        return int(number)


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
