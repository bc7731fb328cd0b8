"""Time the steps of an engine while all requests of a batch decode."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request, StepRecord
from peagle.ops.errors import InputError


@dataclass(frozen=True)
class Steady:
    """Counts from the last request's first token to the first request's end."""

    seconds: float
    tokens: int
    steps: int
    records: tuple[StepRecord, ...]

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


def steady(engine: AnyEngine, requests: Sequence[Request]) -> Steady:
    """Decode the requests together. Raises InputError if one ends before the last one begins."""
    chunks = list(engine.generate(requests))
    begun = max(chunk.time_s for _, chunk in chunks if not chunk.steps)
    ended = min(chunk.time_s for _, chunk in chunks if chunk.finish_reason is not None)
    between = [(index, chunk) for index, chunk in chunks if chunk.steps and begun < chunk.time_s <= ended]
    if not between:
        raise InputError(f"no step has all of {len(requests)} requests; expected longer answers, or fewer slots")
    return Steady(
        seconds=ended - begun,
        tokens=sum(len(chunk.token_ids) for _, chunk in between),
        steps=sum(len(chunk.steps) for index, chunk in between if index == 0),
        records=tuple(record for _, chunk in between for record in chunk.steps),
    )
