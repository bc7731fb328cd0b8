"""How many tokens each row drafts, and when a row stops drafting. Pure functions of counts and costs.

A table gives the drafts that pay by number of active rows; between two entries the smaller one's holds. Each row has a
credit, in plain steps: a drafted step takes its cost from it and adds the tokens that it gave. A row whose credit is
below 0 drafts no more, so drafts that its text does not accept cost it no more than its first credit. The step itself
keeps the credits (peagle.engine.step), as a dispatch of a small model holds dozens of steps.

A row that drafts no more has no use for its drafter, so the drafter does not follow it any further. The same is done
with a row that did not draft for so long that its drafter is INPUT_ROOM tokens behind (peagle.engine.state): keeping up
costs a small target a sixth of its speed.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from peagle.ops.errors import InputError
from peagle.ops.files import write_text_whole
from peagle.ops.strict_json import dumps

SPECULATION_FILE = "speculation.json"  # beside a drafter: {"drafts": {ACTIVE ROWS: DRAFTS}, "sampled": true}

PLAIN_STEPS_LOST = 4.0  # a row may lose so many plain steps,
BUDGET_LOST = 0.05  # or this share of its budget, whichever is more, before it pauses


@dataclass(frozen=True)
class WidthTable:
    """Drafts by number of active rows: {1: 4, 8: 2, 16: 0}.

    costs: the time of a step with those drafts in plain steps, by number of active rows; None: unknown, and no row
    pauses. sampled: whether requests with a temperature draft, too; of theirs fewer drafts are accepted.
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
        """The same drafts whatever the load."""
        return cls({1: num_drafts})

    def paying(self, costs: Mapping[int, float]) -> "WidthTable":
        """The table with these costs, without the drafts that cannot pay even if all are accepted."""
        rows = sorted({*self.drafts, *costs})
        drafts = {each: self.at(each) for each in rows}
        known = dataclasses.replace(self, drafts=drafts, costs=costs)
        paying = {each: k if k + 1 > (known.cost(each) or 0) else 0 for each, k in drafts.items()}
        return dataclasses.replace(known, drafts=paying)

    def in_words(self) -> str:
        """Say how many tokens are drafted from which load on. Example: 3 from 1 active request on, 1 from 4, none from
        16."""
        changes = [(rows, k) for rows, k in sorted(self.drafts.items()) if rows == 1 or k != self.at(rows - 1)]
        said = [f"{k or 'none'} from {rows}" for rows, k in changes]
        greedy = "" if self.sampled or not self.most else "; none with a temperature"
        return ", ".join([f"{said[0]} active request on", *said[1:]]) + greedy

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
        table = json.loads(path.read_text(encoding="utf-8"))
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
            "requests, from 1 on: mend it, or remove it"
        ) from None


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


def write_widths(file: Path, table: WidthTable, **origin: Any) -> None:
    """Write a table that `read_widths` reads. `origin`: how it was found, under keys that readers pass over.

    Raises InputError if the file cannot be written.
    """
    drafts = {str(rows): k for rows, k in sorted(table.drafts.items())}
    value = {"drafts": drafts, "sampled": table.sampled, **origin}
    try:
        write_text_whole(file, dumps(value, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from None


def _entry(table: Mapping[int, object], active_rows: int) -> int:
    return max(rows for rows in table if rows <= max(active_rows, 1))


def allowance(budget: int) -> float:
    """Return the plain steps that drafting may lose a request of so many tokens: its first credit."""
    return max(PLAIN_STEPS_LOST, BUDGET_LOST * budget)


Real = jax.Array | float


def credit_after(credit: Real, num_accepted: Real, cost: Real) -> Real:
    """Return each row's credit after one drafted step that took so many plain steps and emitted num_accepted + 1."""
    return credit - cost + num_accepted + 1
