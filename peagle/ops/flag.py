"""How the fields of a config are options of the command line. The docstring below a field is its help."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peagle.ops.errors import InputError

# the groups of a command's help
PROMPT, MODEL, SPECULATION, SAMPLING = "Prompt", "Target and drafter", "Speculation", "Sampling"
ENGINE, MACHINE, SERVER, RUNNING, OUTPUT = "Engine", "Machine", "Server", "Run", "Output"
DRAFTER, LEARNING, DATA = "Drafter", "Training", "Data"


@dataclass(frozen=True)
class Flag:
    """Make a field an option, or an argument if its only name begins with no dash.

    group: of the help. names: errors name the first; none: the field's name with dashes. read: turn the text as typed
    into the value; it raises InputError. default: shown in the place of the value. old: a former name, which warns.
    hidden: not in the help.
    """

    group: str | None = None
    metavar: str | None = None
    names: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    default: str | None = None
    old: str | None = None
    hidden: bool = False


def check_least(config: Any, **least: int) -> None:
    """Raise InputError for a number of a config that is smaller than its least value; None is no number."""
    for name, lowest in least.items():
        value = getattr(config, name)
        if value is not None and not value >= lowest:
            raise InputError(f"{name} is {value}; expected {lowest} or more", name)


def layers_reader(name: str) -> Callable[[str], tuple[int, ...]]:
    """Make the reader of layer numbers with commas between them, which raises InputError for anything else."""

    def read(typed: str) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in typed.split(","))
        except ValueError:
            message = f"{name} is {typed!r}; expected layers with commas between them, as 1,11,20"
            raise InputError(message, name) from None

    return read
