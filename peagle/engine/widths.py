"""How many tokens each row drafts, and when a row stops drafting. Host code; pure functions of counts and costs.

A table says how many drafts pay at how many active rows; where it has no entry for a number of rows, the nearest
smaller one holds. A row whose drafting has lost more against plain decoding than a small allowance pauses for good:
drafts that its text does not accept cannot cost it more than that.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peagle.ops.errors import InputError
from peagle.ops.files import write_text_whole
from peagle.ops.strict_json import dumps

# beside a drafter: {"drafts": {ACTIVE ROWS: DRAFTS}, "drafter_window": POSITIONS}; one of the two may be left out
SPECULATION_FILE = "speculation.json"
WINDOW_KEY = "drafter_window"
OFF: Literal["off"] = "off"  # as a window: none

PLAIN_STEPS_LOST = 4.0  # a row may lose so many plain steps,
BUDGET_LOST = 0.05  # or this share of its budget, whichever is more, before it pauses


@dataclass(frozen=True)
class WidthTable:
    """Drafts by number of active rows: {1: 4, 8: 2, 16: 0}. `costs`: what a step with those drafts takes, in plain
    steps at the same number of rows; None where it is not known, and no row pauses."""

    drafts: Mapping[int, int]
    costs: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        if not self.drafts or min(self.drafts) != 1:
            raise ValueError(f"the table begins at {min(self.drafts, default=None)} active rows; expected 1")

    def __hash__(self) -> int:
        costs = None if self.costs is None else frozenset(self.costs.items())
        return hash((frozenset(self.drafts.items()), costs))

    @classmethod
    def constant(cls, num_drafts: int) -> "WidthTable":
        """The same drafts whatever the load."""
        return cls({1: num_drafts})

    def paying(self, costs: Mapping[int, float]) -> "WidthTable":
        """The table with these costs, without the drafts that cannot pay even if all are accepted."""
        rows = sorted({*self.drafts, *costs})
        drafts = {each: self.at(each) for each in rows}
        known = WidthTable(drafts, costs)
        return WidthTable({each: k if k + 1 > (known.cost(each) or 0) else 0 for each, k in drafts.items()}, costs)

    def in_words(self) -> str:
        """Say how many tokens are drafted from which load on. Example: 3 from 1 active request on, 1 from 4, none from
        16."""
        changes = [(rows, k) for rows, k in sorted(self.drafts.items()) if rows == 1 or k != self.at(rows - 1)]
        said = [f"{k or 'none'} from {rows}" for rows, k in changes]
        return ", ".join([f"{said[0]} active request on", *said[1:]])

    @property
    def most(self) -> int:
        """The most tokens a row ever drafts."""
        return max(self.drafts.values())

    def at(self, active_rows: int) -> int:
        """The drafts of a step with so many active rows."""
        return self.drafts[_entry(self.drafts, active_rows)]

    def cost(self, active_rows: int) -> float | None:
        """What such a step takes, in plain steps."""
        return None if self.costs is None else self.costs[_entry(self.costs, active_rows)]


def read_widths(directory: Path) -> WidthTable | None:
    """Read the table beside a drafter; None if it has none. Raises InputError for a file that holds something else."""
    path = directory / SPECULATION_FILE
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if "drafts" not in value and WINDOW_KEY in value:
            return None
        drafts = {int(rows): number for rows, number in value["drafts"].items()}
        if any(isinstance(k, bool) or not isinstance(k, int) or k < 0 for k in drafts.values()):
            raise ValueError
        return WidthTable(dict(sorted(drafts.items())))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise InputError(
            f'{path} holds no table of drafts; expected {{"drafts": {{"1": 4, "4": 2}}}}, drafts by number of active '
            "requests, from 1 on: mend it, or remove it"
        ) from None


def read_window(directory: Path) -> int | Literal["off"] | None:
    """Read the window beside a drafter: so many positions, or "off"; None if no file names one.

    Raises InputError for a file that holds something else.
    """
    path = directory / SPECULATION_FILE
    if not path.is_file():
        return None
    try:
        window = json.loads(path.read_text(encoding="utf-8")).get(WINDOW_KEY)
    except (OSError, ValueError, AttributeError):
        raise InputError(f"{path} is no JSON object; mend it, or remove it") from None
    if window is None or window == OFF:
        return window
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise InputError(
            f"{path} names the {WINDOW_KEY} {window!r}; expected the positions that the drafter sees, 1 or more, or "
            f'"{OFF}": mend it, or remove it'
        )
    return window


def widths_file(path: Path) -> Path:
    """Name the file of the table that belongs to a drafter's directory, or the file itself.

    Raises InputError where it is there already, and where its folder is not.
    """
    file = path / SPECULATION_FILE if path.is_dir() else path
    if file.exists():
        raise InputError(f"{file} exists; expected a new file: remove it first, if it is to be replaced")
    if not file.parent.is_dir():
        raise InputError(f"{file.parent} does not exist; expected a drafter's directory, or a file in a folder")
    return file


def write_widths(file: Path, drafts: Mapping[int, int], **origin: Any) -> None:
    """Write a table that `read_widths` reads. `origin`: where it comes from, under keys that readers pass over.

    Raises InputError where the file cannot be written.
    """
    WidthTable(drafts)  # refuses what is no table
    value = {"drafts": {str(rows): k for rows, k in sorted(drafts.items())}, **origin}
    try:
        write_text_whole(file, dumps(value, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from None


def _entry(table: Mapping[int, object], active_rows: int) -> int:
    return max(rows for rows in table if rows <= max(active_rows, 1))


def allowance(budget: int) -> float:
    """The plain steps that drafting may lose a request of so many tokens."""
    return max(PLAIN_STEPS_LOST, BUDGET_LOST * budget)


def loss(num_accepted: int, cost: float) -> float:
    """The plain steps that one drafted step lost (negative: gained) against plain decoding of the same tokens."""
    return cost - (num_accepted + 1)
