"""Read speculation.json, which says how a drafter in the same folder drafts."""

import json
from pathlib import Path
from typing import Any, Literal

from peagle.base.errors import InputError

# {"num_speculative_tokens": K, "drafter_window": POSITIONS}; both keys are optional
SPECULATION_FILE = "speculation.json"
WINDOW_KEY = "drafter_window"
OFF: Literal["off"] = "off"  # no window


def read_auto_drafts(directory: Path) -> int | None:
    """Read the most tokens that a step of K "auto" drafts with the drafter in a folder; None if no file says it.

    Raises InputError for any other value.
    """
    most: int | None = _read(directory, "num_speculative_tokens", "the most tokens that a step drafts, 1 or more")
    return most


def read_window(directory: Path) -> int | Literal["off"] | None:
    """Read the window of the drafter in a folder: positions, or "off"; None if no file names one.

    Raises InputError for any other value.
    """
    expected = f'the positions that the drafter sees, 1 or more, or "{OFF}"'
    window: int | Literal["off"] | None = _read(directory, WINDOW_KEY, expected, OFF)
    return window


def _read(directory: Path, key: str, expected: str, *words: str) -> Any:
    path = directory / SPECULATION_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path} is no JSON object; correct it, or remove it")
    value = content.get(key)
    if value is None or value in words or (type(value) is int and value >= 1):
        return value
    raise InputError(f"{path} has {key} {value!r}; expected {expected}: correct it, or remove it")
