"""Read and write speculation.json, which says how a drafter in the same folder drafts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peagle.base.errors import InputError
from peagle.base.files import write_text_whole, writing
from peagle.base.strict_json import dumps
from peagle.engine.auto.state import EDGES, NUM_BINS, Counts

# {"num_speculative_tokens": K, "edges": [..], "acceptance": {"greedy": [position][bin][tried, accepted], "sampled":
# ..}, "drafter_window": POSITIONS}; every key is optional
SPECULATION_FILE = "speculation.json"
WINDOW_KEY = "drafter_window"
OFF: Literal["off"] = "off"  # no window
DEFAULT_DRAFTS = 7
_KINDS = ("greedy", "sampled")


@dataclass(frozen=True)
class Speculation:
    """How adaptive steps draft: at most num_drafts tokens, starting from these acceptance counts.

    trained_drafts: how many drafts the drafter was trained for; None: unknown, or any number.
    """

    num_drafts: int = DEFAULT_DRAFTS
    counts: Counts | None = None
    trained_drafts: int | None = None


def read_speculation(directory: Path, trained_drafts: int | None = None) -> Speculation:
    """Read the file of a drafter's folder; return the default for what it does not say.

    Raises InputError for a malformed file.
    """
    path = directory / SPECULATION_FILE
    value, counts = _object(path), None
    default = min(DEFAULT_DRAFTS, trained_drafts or DEFAULT_DRAFTS)
    try:
        if "acceptance" in value:
            if value.get("edges") != list(EDGES):
                raise ValueError
            counts = tuple(_positions(value["acceptance"][kind]) for kind in _KINDS)
        return Speculation(_at_least_1(value.get("num_speculative_tokens", default)), counts, trained_drafts)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(
            f'{path} does not say how to draft; expected {{"num_speculative_tokens": 7}}, and "acceptance" as peagle '
            "sweep --write-widths writes it: correct it, or remove it"
        ) from None


def read_window(directory: Path) -> int | Literal["off"] | None:
    """Read the window of the drafter in a folder: positions, or "off"; None if the file names none.

    Raises InputError for any other value.
    """
    path = directory / SPECULATION_FILE
    window = _object(path).get(WINDOW_KEY)
    if window is None or window == OFF:
        return window
    try:
        return _at_least_1(window)
    except ValueError:
        raise InputError(
            f"{path} names the {WINDOW_KEY} {window!r}; expected the positions that the drafter sees, 1 or more, or "
            f'"{OFF}": correct it, or remove it'
        ) from None


def speculation_file(path: Path) -> Path:
    """Return the path of a new file: in a drafter's directory, or the path itself.

    Raises InputError if the file exists, its folder does not, or its name is that of a missing folder.
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


def write_speculation(file: Path, speculation: Speculation, **origin: Any) -> None:
    """Write a file for `read_speculation`. origin: further keys, such as its provenance or a window.

    Raises InputError if the file cannot be written.
    """
    value: dict[str, Any] = {"num_speculative_tokens": speculation.num_drafts}
    if speculation.counts is not None:
        value |= {"edges": list(EDGES), "acceptance": dict(zip(_KINDS, speculation.counts, strict=True))}
    with writing(file):
        write_text_whole(file, dumps(value | origin, indent=1) + "\n")


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file is an empty one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{path} is no JSON object; correct it, or remove it")
    return value


def _at_least_1(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError
    return number


def _positions(value: Any) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Read the counts of greedy or of sampled drafts: [position][bin][tried, accepted]."""
    positions = tuple(tuple((float(tried), float(accepted)) for tried, accepted in bins) for bins in value)
    if any(len(bins) != NUM_BINS or any(not 0 <= a <= t < 1e12 for t, a in bins) for bins in positions):
        raise ValueError
    return positions
