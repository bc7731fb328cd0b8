"""Time the steps of an engine while all requests of a batch decode."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.engine.loop import AnyEngine
from peagle.engine.request import Request, StepRecord
from peagle.ops.errors import InputError


@dataclass(frozen=True)
class Steady:
    """Counts of whole dispatches between the last request's first token and the first request's end."""

    seconds: float
    tokens: int
    steps: int
    records: tuple[StepRecord, ...]

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


def steady(engine: AnyEngine, requests: Sequence[Request]) -> Steady:
    """Decode the requests together. Raises InputError if one ends before the last one begins.

    The time counts from the first dispatch that has all requests, which began earlier; if no other one has them, from
    the last request's first token.
    """
    chunks = list(engine.generate(requests))
    begun = max(chunk.time_s for _, chunk in chunks if not chunk.steps)
    ended = min(chunk.time_s for _, chunk in chunks if chunk.finish_reason is not None)
    times = [chunk.time_s for index, chunk in chunks if index == 0 and chunk.steps and begun < chunk.time_s <= ended]
    if not times:
        raise InputError(f"no step has all of {len(requests)} requests; expected longer answers, or fewer slots")
    if len(times) > 1:
        begun = times[0]
    timed = [(index, chunk) for index, chunk in chunks if chunk.steps and begun < chunk.time_s <= times[-1]]
    return Steady(
        seconds=times[-1] - begun,
        tokens=sum(len(chunk.token_ids) for _, chunk in timed),
        steps=sum(len(chunk.steps) for index, chunk in timed if index == 0),
        records=tuple(record for _, chunk in timed for record in chunk.steps),
    )
