"""Choose how many tokens each row drafts, and when it stops drafting. Pure functions of counts and costs.

A table maps numbers of active rows to numbers of drafts; a number without an entry uses the next smaller one. Each row
has a credit, in plain steps: a drafted step takes its cost from it and adds the tokens that it emitted. A row whose
credit is below 0 drafts no more, so rejected drafts cannot cost it more than its first credit. The device keeps the
credits (peagle.engine.step), as a dispatch of a small model holds dozens of steps.

A row whose request sets its own K has endless credit: the measured cost is that of the table's drafts, and whoever sets
a K gets it. It still drafts no more than the table's number.

A row that drafts no more needs no drafter, so its drafter is not kept up. The same holds for a row that does not draft
for so long that its drafter is INPUT_ROOM tokens behind (peagle.engine.state): keeping it up takes a sixth of a small
target's speed.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from peagle.ops.errors import InputError
from peagle.ops.files import write_text_whole, writing
from peagle.ops.strict_json import dumps

# beside a drafter: {"drafts": {ACTIVE ROWS: DRAFTS}, "sampled": true, "drafter_window": POSITIONS}; the drafts may be
# missing, or the window
SPECULATION_FILE = "speculation.json"
WINDOW_KEY = "drafter_window"
OFF: Literal["off"] = "off"  # as a window: none

# a row pauses after it has lost this many plain steps, or this share of its budget, whichever is more
PLAIN_STEPS_LOST = 4.0
BUDGET_LOST = 0.03


@dataclass(frozen=True)
class WidthTable:
    """Drafts by number of active rows: {1: 4, 8: 2, 16: 0}.

    costs: the time of a step with those drafts, in plain steps of the same number of rows; None: not measured, and no
    row pauses. sampled: whether requests with a temperature draft, too; fewer of their drafts are accepted.
    """

    drafts: Mapping[int, int]
    costs: Mapping[int, float] | None = None
    sampled: bool = True

    def __post_init__(self) -> None:
        if not self.drafts or min(self.drafts) != 1:
            raise ValueError(f"the table begins at {min(self.drafts, default=None)} active rows; expected 1")

    def __hash__(self) -> int:
        costs = None if self.costs is None else frozenset(self.costs.items())
        return hash((frozenset(self.drafts.items()), costs, self.sampled))

    @classmethod
    def constant(cls, num_drafts: int) -> "WidthTable":
        """Make a table of the same drafts at any load."""
        return cls({1: num_drafts})

    def paying(self, costs: Mapping[int, float]) -> "WidthTable":
        """Add costs, and set drafts that cannot pay, even if all are accepted, to 0."""
        rows = sorted({*self.drafts, *costs})
        drafts = {each: self.at(each) for each in rows}
        costed = dataclasses.replace(self, drafts=drafts, costs=costs)
        paying = {each: k if k + 1 > (costed.cost(each) or 0) else 0 for each, k in drafts.items()}
        return dataclasses.replace(costed, drafts=paying)

    def in_words(self) -> str:
        """Describe the table. Example: 3 from 1 active request on, 1 from 4, none from 16."""
        changes = [(rows, k) for rows, k in sorted(self.drafts.items()) if rows == 1 or k != self.at(rows - 1)]
        parts = [f"{k or 'none'} from {rows}" for rows, k in changes]
        greedy = "" if self.sampled or not self.most else "; none with a temperature"
        return ", ".join([f"{parts[0]} active request on", *parts[1:]]) + greedy

    @property
    def most(self) -> int:
        """The most tokens a row ever drafts."""
        return max(self.drafts.values())

    def at(self, active_rows: int) -> int:
        """Look up the drafts of a step with this many active rows."""
        return self.drafts[_entry(self.drafts, active_rows)]

    def cost(self, active_rows: int) -> float | None:
        """Look up the time of such a step, in plain steps; None: not measured."""
        return None if self.costs is None else self.costs[_entry(self.costs, active_rows)]


def read_widths(directory: Path) -> WidthTable | None:
    """Read the table beside a drafter; None if there is none.

    Raises InputError for a malformed file.
    """
    path = directory / SPECULATION_FILE
    if not path.is_file():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if "drafts" not in table and WINDOW_KEY in table:
            return None
        drafts = {int(rows): number for rows, number in table["drafts"].items()}
        sampled = table.get("sampled", True)
        if any(isinstance(k, bool) or not isinstance(k, int) or k < 0 for k in drafts.values()):
            raise ValueError
        if not isinstance(sampled, bool):
            raise ValueError
        return WidthTable(dict(sorted(drafts.items())), sampled=sampled)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise InputError(
            f'{path} holds no table of drafts; expected {{"drafts": {{"1": 4, "4": 2}}}}, drafts by number of active '
            "requests, from 1 on: correct it, or remove it"
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
    """Return the path of a new table: in a drafter's directory, or the given file.

    Raises InputError if the file exists, its folder does not, or its name is that of a folder that is missing.
    """
    file = path / SPECULATION_FILE if path.is_dir() else path
    if file.exists():
        raise InputError(f"{file} exists; expected a new file: remove it first to replace it")
    if not file.parent.is_dir():
        raise InputError(f"{file.parent} does not exist; expected a drafter's directory, or a file in a folder")
    if file.suffix != ".json":
        raise InputError(
            f"--write-widths {path} is no folder; expected a drafter's directory, or a new file, as table.json"
        )
    return file


def write_widths(file: Path, table: WidthTable, **origin: Any) -> None:
    """Write a table for `read_widths`.

    `origin`: its provenance, under keys that readers ignore.

    Raises InputError if the file cannot be written.
    """
    drafts = {str(rows): k for rows, k in sorted(table.drafts.items())}
    value = {"drafts": drafts, "sampled": table.sampled, **origin}
    with writing(file):
        write_text_whole(file, dumps(value, indent=1) + "\n")


def _entry(table: Mapping[int, object], active_rows: int) -> int:
    return max(rows for rows in table if rows <= max(active_rows, 1))


def allowance(budget: int) -> float:
    """Return how many plain steps drafting may lose for a request of this budget, in tokens: its first credit."""
    return max(PLAIN_STEPS_LOST, BUDGET_LOST * budget)


Real = jax.Array | float


def credit_after(credit: Real, num_accepted: Real, cost: Real) -> Real:
    """Return a row's credit after a drafted step that took `cost` plain steps and emitted num_accepted + 1 tokens."""
    return credit - cost + num_accepted + 1
