"""The measured costs of a fleet's replicas, as a JSON file."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, PositiveInt, RootModel, ValidationError, model_validator

from peagle.config import check_rates
from peagle.ops.errors import InputError
from peagle.ops.settings import brief

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Curve(RootModel[tuple[tuple[Size, Cost], ...]], frozen=True):
    """A measured cost by size: (size, cost), ascending. Linear between the points and beyond them."""

    @model_validator(mode="after")
    def _ascends(self) -> "Curve":
        sizes = [size for size, _ in self.root]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"its sizes are {sizes}; expected one or more, ascending")
        return self

    def at(self, size: int | float) -> float:
        """Interpolate; a single point gives costs in proportion to it."""
        if len(self.root) == 1:
            return self.root[0][1] * size / self.root[0][0]
        sizes, costs = zip(*self.root, strict=True)
        if sizes[0] <= size <= sizes[-1]:
            return float(np.interp(size, sizes, costs))
        (x0, y0), (x1, y1) = self.root[:2] if size < sizes[0] else self.root[-2:]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


class Costs(BaseModel, frozen=True, extra="forbid"):
    """The costs of a replica's work, measured on its machine."""

    prompt_s: Curve  # of a prompt that is prefilled alone, its first token included, by its tokens
    step_s: dict[int, Curve]  # of a step, by K and active rows
    message_bytes: Curve  # of a hand-off, by tokens of its prompt
    pack_s: Curve
    load_s: Curve
    network_bytes_per_s: float = Field(gt=0)
    network_s: Cost = 0.0  # one way, without the bytes
    position_s: Cost = 0.0  # added to a step by a position in its rows' caches
    acceptance: dict[int, tuple[float, ...]] = {}  # K: shares of the steps that accept 1, 2, ... or more
    chunk: PositiveInt = 128
    steps_per_dispatch: PositiveInt = 1
    provenance: Any = Field(None, exclude=True, repr=False)  # of the file

    @model_validator(mode="after")
    def _has_acceptance(self) -> "Costs":
        for k in filter(None, self.step_s):
            check_rates(self.acceptance.get(k, ()), k)
        return self

    def check_k(self, k: int) -> None:
        """Raise InputError for a K whose steps were not measured."""
        if k not in self.step_s:
            raise InputError(f"steps of K = {k} were not measured; expected K of {sorted(self.step_s)}")


def read_costs(path: Path) -> Costs:
    """Read a file of costs. Raises InputError for any other file."""
    with refused_in_words(str(path), "what --measure writes"):
        return Costs.model_validate_json(path.read_bytes())


@contextlib.contextmanager
def refused_in_words(source: str, expected: str) -> Iterator[None]:
    """Raise InputError, in one line, for a value that pydantic refuses."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "it"
        value = "" if first["type"] == "missing" else f" is {brief(first['input'])}"
        raise InputError(f"{source}: {name}{value}: {first['msg']}; expected {expected}") from None
