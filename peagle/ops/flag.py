"""How the fields of a config are options of the command line. The docstring below a field is its help."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# the groups of a command's help
PROMPT, MODEL, SPECULATION, SAMPLING = "Prompt", "Target and drafter", "Speculation", "Sampling"
ENGINE, MACHINE, SERVER, RUNNING, OUTPUT = "Engine", "Machine", "Server", "Run", "Output"


@dataclass(frozen=True)
class Flag:
    """Make a field an option, or an argument if its only name begins with no dash.

    group: of the help. names: errors name the first; none: the field's name with dashes. read: turn the text as typed
    into the value; it raises InputError. default: shown in the place of the value. old: a former name, which warns.
    """

    group: str | None = None
    metavar: str | None = None
    names: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    default: str | None = None
    old: str | None = None
