"""Declare the fields of a config as command-line options. The docstring below a field is its help."""

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from peagle.base.errors import InputError

# the groups of a command's help
PROMPT, MODEL, SPECULATION, SAMPLING = "Prompt", "Target and drafter", "Speculation", "Sampling"
ENGINE, MACHINE, SERVER, RUNNING, OUTPUT = "Engine", "Machine", "Server", "Run", "Output"
DRAFTER, LEARNING, DATA, PLAN, REPLICAS = "Drafter", "Training", "Data", "Memory plan", "Replicas"
TYPES = {int: "a valid integer", float: "a valid number", str: "a text", bool: "true or false"}
ITEMS = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Flag:
    """Make a field an option, or an argument if its only name has no leading dash.

    group     of the help
    names     of the option; errors use the first; empty: the field's name with dashes
    read      converts the typed text to the value, or raises InputError
    help      of an option that several commands share; others have a docstring below the field
    """

    group: str | None = None
    metavar: str | None = None
    names: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    help: str = ""


class Takes:
    """The fields of a config that a command takes as options; without this mark, it takes all."""

    def __init__(self, *names: str) -> None:
        self.names = names


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise InputError for a value of another type than the field's."""
    if not _fits(value, kind):
        shown = list(value) if isinstance(value, tuple) else value
        raise InputError(f"{name} is {shown!r}; expected {expected_of(kind)}", name)


def _fits(value: Any, kind: Any) -> bool:
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, kind) for kind in kinds)
    if origin is Literal:
        return isinstance(value, str) and value in kinds
    if origin is tuple:
        items = kinds if kinds[-1] is not Ellipsis else kinds[:1] * len(value) if isinstance(value, tuple) else ()
        return isinstance(value, tuple) and len(value) == len(items) and all(map(_fits, value, items))
    kind = int | float if kind is float else origin or kind
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def expected_of(kind: Any) -> str:
    """Describe the values of a type other than None, for a message."""
    kinds = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(expected_of(kind) for kind in kinds if kind is not NoneType)
    if get_origin(kind) is Literal:
        return f"{'one of ' if len(kinds) > 1 else ''}{', '.join(map(repr, kinds))}"
    if get_origin(kind) is tuple:
        return f"a list of {ITEMS[kinds[0]]}" if kinds[0] in ITEMS else "a list"
    return TYPES.get(kind, getattr(kind, "__name__", "another value"))


def check_least(config: Any, **least: int) -> None:
    """Raise InputError for a field of a config below its least value; None passes."""
    for name, lowest in least.items():
        value = getattr(config, name)
        if value is not None and not value >= lowest:
            raise InputError(f"{name} is {value}; expected {lowest} or more", name)


def layers_reader(name: str) -> Callable[[str], tuple[int, ...]]:
    """Make a reader of comma-separated layer numbers, which raises InputError for anything else."""

    def read(typed: str) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in typed.split(","))
        except ValueError:
            message = f"{name} is {typed!r}; expected layers with commas between them, as 1,11,20"
            raise InputError(message, name) from None

    return read
