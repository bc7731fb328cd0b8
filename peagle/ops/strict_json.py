"""Strict JSON: no NaN and no infinity, which Python's own writer lets through."""

import json
import math
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """Write the value as JSON text; a number that is not finite becomes null. `options` are those of json.dumps."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # raised at such a number; searching for them first would take longer than writing
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    """Copy the value with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
