"""Write strict JSON: without NaN and infinity, which Python writes, and without line ends other than \\n."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass(frozen=True)
class Written:
    """A value that is JSON text already. So large values can be written piece by piece (`dumps`)."""

    text: str

    @classmethod
    def array(cls, items: Iterable[str]) -> "Written":
        """Make an array of the JSON texts of its items."""
        return cls(f"[{', '.join(items)}]")

    @classmethod
    def joined(cls, arrays: "Iterable[Written]") -> "Written":
        """Make one array of the items of several."""
        return cls.array(array.text[1:-1] for array in arrays if array.text != "[]")


def dumps(value: Any, **options: Any) -> str:
    """Write the value as JSON text; a number that is not finite becomes null. options: those of json.dumps.

    Characters that str.splitlines treats as line ends are escaped. Objects with a `Written` inside must have string
    keys.
    """
    try:
        text = json.dumps(value, allow_nan=False, **options)
    except ValueError:  # raised at such a number; searching first would take longer than writing
        return dumps(_finite(value), **options)
    except TypeError:  # raised at the first `Written`
        text = "".join(_pieces(value, options))
    if not text.isascii():  # JSON itself escapes ASCII line ends
        for char, escaped in LINE_ENDS.items():
            text = text.replace(char, escaped)
    return text


def number(value: float) -> str:
    return float.__repr__(value) if math.isfinite(value) else "null"


def _pieces(value: Any, options: dict[str, Any]) -> Iterator[str]:
    """Write a value with `Written` inside. Raises TypeError for values that JSON does not have."""
    if isinstance(value, Written):
        yield value.text
    elif isinstance(value, dict):
        before = "{"
        for key, item in value.items():
            yield f"{before}{json.dumps(key, **options)}: "
            yield from _pieces(item, options)
            before = ", "
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple):
        before = "["
        for item in value:
            yield before
            yield from _pieces(item, options)
            before = ", "
        yield "]" if value else "[]"
    else:
        yield json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    """Copy the value with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
