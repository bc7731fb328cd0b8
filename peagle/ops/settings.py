"""Read the settings of a checkpoint's JSON files, each checked where it is read.

Errors name the setting, what was seen and what was expected; the caller puts the file's name in front.
"""

import math
from collections.abc import Mapping
from typing import Any

from peagle.ops.errors import InputError

LARGEST = 2**31 - 1  # of a whole number: sizes and ids are int32 on the device


def whole(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """Read a whole number of `least` or more. Raises InputError for another value, and if there is none at all."""
    value = _value(config, key, default)
    integral = isinstance(value, int | float) and not isinstance(value, bool) and value == math.floor(value)
    if not integral or not least <= value <= LARGEST:
        raise InputError(f"{key} is {brief(value)}; expected a whole number of {least} or more")
    return int(value)


def number(config: Mapping[str, Any], key: str, default: int | float | None = None) -> float:
    """Read a finite number above 0. Raises InputError for another value, and if there is none at all."""
    value = _value(config, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"{key} is {brief(value)}; expected a number above 0")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Read true or false; null is the default. Raises InputError for another value."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{key} is {brief(value)}; expected true or false")
    return default if value is None else value


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Read an object; an absent one, or null, is empty. Raises InputError for another value."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise InputError(f"{key} is {brief(value)}; expected an object")
    return value or {}


def brief(value: object) -> str:
    """Show a value in a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _value(config: Mapping[str, Any], key: str, default: int | float | None) -> Any:
    value = config.get(key)
    if value is not None:
        return value
    if default is None:
        seen = "is null" if key in config else "is missing"
        raise InputError(f"{key} {seen}; expected a number")
    return default
