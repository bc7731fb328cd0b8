"""Describe how the records of two runs differ."""

import itertools
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_DIGEST = re.compile(r"[0-9a-f]{32,}")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flattened: dict[str, Any] = {}
    for key, value in record.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flattened


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys of `flat` records whose values differ, or that only one record has, in order."""
    return [key for key in {**now, **then} if then.get(key) != now.get(key)]


def describe_difference(then: Mapping[str, Any], now: Mapping[str, Any], name: Callable[[str], str]) -> str:
    """Describe the difference of two `flat` records: "--seed 0 (now 7), --width 512 (now 256)".

    name: the displayed name of a key. Keys with the same name are shown once.
    """
    named = {name(key): _change(then.get(key), now.get(key)) for key in differing(then, now)}
    return ", ".join(f"{name}{values}" for name, values in named.items())


def _change(then: Any, now: Any) -> str:
    """Describe the change of a value. Of files with digests, show only the names."""
    texts = [list(_texts(record)) for record in (then, now)]
    if not any(map(_DIGEST.fullmatch, itertools.chain(*texts))):
        return f" {_SHORT.repr(then)} (now {_SHORT.repr(now)})"
    before, after = (" ".join(text for text in side if not _DIGEST.fullmatch(text)) for side in texts)
    if before != after:
        return f" {before} (now {after})"
    return f"{f' {before}' if before else ''} of other content than now"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
