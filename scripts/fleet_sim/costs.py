"""The measured costs of a fleet's replicas, as a JSON file."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peagle.config import check_rates
from peagle.ops.errors import InputError

CURVES = ("prompt_s", "message_bytes", "pack_s", "load_s")  # of Costs, by tokens of a prompt


@dataclass(frozen=True)
class Curve:
    """A measured cost by size, linear between the points and beyond them."""

    points: tuple[tuple[float, float], ...]  # (size, cost)

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] <= 0:
            raise InputError(f"a cost is measured at sizes {sizes}; expected one or more above 0, ascending")
        if any(not 0 <= cost < math.inf for _, cost in self.points):
            raise InputError(f"a cost is {[cost for _, cost in self.points]}; expected finite numbers of 0 or more")

    def at(self, size: int | float) -> float:
        """Interpolate; a single point gives costs in proportion to it."""
        if len(self.points) == 1:
            return self.points[0][1] * size / self.points[0][0]
        sizes, costs = zip(*self.points, strict=True)
        if sizes[0] <= size <= sizes[-1]:
            return float(np.interp(size, sizes, costs))
        (x0, y0), (x1, y1) = self.points[:2] if size < sizes[0] else self.points[-2:]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


@dataclass(frozen=True)
class Costs:
    """The costs of a replica's work, measured on its machine."""

    prompt_s: Curve  # of a prompt that is prefilled alone, its first token included, by its tokens
    step_s: Mapping[int, Curve]  # of a step, by K and active rows
    message_bytes: Curve  # of a hand-off, by tokens of its prompt
    pack_s: Curve
    load_s: Curve
    network_bytes_per_s: float
    network_s: float = 0.0  # one way, without the bytes
    position_s: float = 0.0  # added to a step by a position in its rows' caches
    acceptance: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # K: steps that accept 1, 2, ... or more
    chunk: int = 128
    steps_per_dispatch: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.network_bytes_per_s <= math.inf:
            raise InputError(f"network_bytes_per_s is {self.network_bytes_per_s}; expected a number above 0")
        for name in ("network_s", "position_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; expected 0 or more")
        for name in ("chunk", "steps_per_dispatch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected 1 or more")
        for k in filter(None, self.step_s):
            check_rates(self.acceptance.get(k, ()), k)

    def check_k(self, k: int) -> None:
        """Raise InputError for a K whose steps were not measured."""
        if k not in self.step_s:
            raise InputError(f"steps of K = {k} were not measured; expected K of {sorted(self.step_s)}")

    def to_json(self) -> dict[str, Any]:
        """Make the object that `read_costs` reads."""
        value = dataclasses.asdict(self)
        value |= {name: getattr(self, name).points for name in CURVES}
        value["step_s"] = {str(k): curve.points for k, curve in self.step_s.items()}
        value["acceptance"] = {str(k): rates for k, rates in self.acceptance.items()}
        return value


def read_costs(path: Path) -> Costs:
    """Read a file of costs. Raises InputError for any other file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}; expected a file of costs") from None
    return costs_of(value, str(path))


def costs_of(costs: Any, source: str) -> Costs:
    """Make costs of a JSON value. Raises InputError that begins with the source."""
    fields = {spec.name: spec for spec in dataclasses.fields(Costs)}
    if not isinstance(costs, dict):
        raise InputError(f"{source} holds no JSON object; expected {', '.join(fields)}")
    values = {name: value for name, value in costs.items() if name != "provenance"}
    required = list(fields)[: list(fields).index("network_s")]
    if missing := [name for name in required if name not in values]:
        raise InputError(f"{source} lacks {missing[0]}; expected {', '.join(fields)}")
    if unknown := [name for name in values if name not in fields]:
        raise InputError(f"{source} has {unknown[0]!r}; expected {', '.join(fields)}")
    try:
        values |= {name: float(value) for name, value in values.items() if fields[name].type is float}
        values |= {name: _curve(values[name]) for name in CURVES}
        values["step_s"] = {int(k): _curve(points) for k, points in values["step_s"].items()}
        acceptance = values.get("acceptance", {}).items()
        return Costs(**values | {"acceptance": {int(k): tuple(map(float, rates)) for k, rates in acceptance}})
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{source} holds a value of another form ({error}); expected what --measure writes") from None


def _curve(points: Any) -> Curve:
    return Curve(tuple((float(size), float(cost)) for size, cost in points))
