"""Read and check the settings of a checkpoint's JSON files.

Errors name the setting, its value and what was expected; `naming` puts the file's name in front.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peagle.base.errors import InputError

LARGEST = 2**31 - 1  # whole number: sizes and ids are int32 on the device


class Key(NamedTuple):
    """A field of our config and its key in a config.json. read: `whole` or another reader; other_names: older keys."""

    field: str
    name: str
    read: Callable[..., Any]
    default: Any = None
    other_names: tuple[str, ...] = ()


def read_keys(keys: Iterable[Key], config: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Read our fields from a config.json. defaults: instead of the table's. Raises InputError as the readers do."""
    values = {}
    for key in keys:
        name = next((name for name in (key.name, *key.other_names) if name in config), key.name)
        values[key.field] = key.read(config, name, defaults.get(key.field, key.default))
    return values


def render_keys(keys: Iterable[Key], config: object) -> dict[str, Any]:
    """Render the keys that `read_keys` reads, from the fields of our config."""
    return {key.name: getattr(config, key.field) for key in keys}


def refuse_others(config: Mapping[str, Any], supported: Iterable[tuple[str, Any, str]]) -> None:
    """Raise InputError for a value that is not supported. supported: (key, value, its meaning) each."""
    for key, value, meaning in supported:
        if config.get(key, value) != value:
            raise InputError(f"{key} is {brief(config[key])}, which is not supported; expected {meaning}")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of the InputErrors of the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}", error.field) from None


def whole(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """Read a whole number of `least` or more. Raises InputError for another value, and without a value or default."""
    value = _value(config, key, default)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not least <= value <= LARGEST or value != math.floor(value):  # NaN and infinity have no floor
        raise InputError(f"{key} is {brief(value)}; expected a whole number of {least} or more")
    return int(value)


def number(config: Mapping[str, Any], key: str, default: int | float | None = None) -> float:
    """Read a finite number above 0. Raises InputError for another value, and without a value or default."""
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
    """Shorten a value for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _value(config: Mapping[str, Any], key: str, default: int | float | None) -> Any:
    value = config.get(key)
    if value is not None:
        return value
    if default is None:
        problem = "is null" if key in config else "is missing"
        raise InputError(f"{key} {problem}; expected a number")
    return default
