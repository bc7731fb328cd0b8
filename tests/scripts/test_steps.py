"""Timing of steps while all requests of a batch decode; engines in turns."""

from collections.abc import Iterator

import pytest

from peagle.answers.result import Counters
from peagle.base.errors import InputError
from peagle.engine.request import Request, StepRecord, TokenChunk
from scripts.steps import steady, time_steps


def test_steps_are_timed_while_all_requests_of_a_batch_are_decoded() -> None:
    batch = [Request((1, 2), 9), Request((3,), 9, index=1)]

    def chunk(place: int, time_s: float, *accepted: int, last: bool = False) -> tuple[int, TokenChunk]:
        steps = tuple(StepRecord(2, (7, 7, 7), num, 5) for num in accepted)
        tokens = tuple(range(sum(accepted) + len(accepted))) or (4,)
        return place, TokenChunk(batch[place], tokens, time_s, steps, "length" if last else None)

    class Scripted:
        def generate(self, requests: list[Request]) -> Iterator[tuple[int, TokenChunk]]:
            assert requests == batch
            yield from (chunk(0, 1.0), chunk(0, 2.0, 3), chunk(1, 3.0))  # 0 was decoded alone
            yield from (chunk(0, 5.0, 1, 2), chunk(1, 5.0, 0, 0), *rest, chunk(1, 9.0, 3, last=True))
            yield chunk(0, 10.0, 3, last=True)

    rest = [chunk(0, 7.0, 0, 1), chunk(1, 7.0, 2, 2)]
    run = steady(Scripted(), batch)  # type: ignore[arg-type]
    assert (run.seconds, run.steps, run.tokens) == (2.0, 2, 9), "the dispatch that ends at 5 began without request 1"
    assert run.step_s == 1.0
    assert Counters.of(run.records, 3).histogram == (1, 1, 2, 0)
    rest = []
    alone = steady(Scripted(), batch)  # type: ignore[arg-type]
    assert (alone.seconds, alone.steps, alone.tokens) == (2.0, 2, 7), "of the one dispatch with both requests"
    with pytest.raises(InputError, match="no step has all of 1 requests"):
        steady(Alone(), batch[:1])  # type: ignore[arg-type]


class Alone:
    """An engine whose answer is one token."""

    def generate(self, requests: list[Request]) -> Iterator[tuple[int, TokenChunk]]:
        yield 0, TokenChunk(requests[0], (4,), 1.0, (), "length")


class Timed:
    """An engine whose steps take so many seconds, and accept so many of the drafts that they verify."""

    def __init__(self, step_s: float, num_verified: int, num_accepted: int) -> None:
        self.step_s, self.num_verified, self.num_accepted = step_s, num_verified, num_accepted

    def generate(self, requests: list[Request]) -> Iterator[tuple[int, TokenChunk]]:
        (request,) = requests
        yield 0, TokenChunk(request, (4,), 0.0)
        for number in range(1, 5):
            step = StepRecord(2, (7,) * self.num_verified, self.num_accepted, 5)
            tokens, reason = (6,) * (self.num_accepted + 1), "length" if number == 4 else None
            yield 0, TokenChunk(request, tokens, number * self.step_s, (step,), reason)


def test_steps_of_engines_are_compared_with_plain_ones() -> None:
    engines = {0: Timed(1.0, 0, 0), 3: Timed(2.0, 3, 1), "auto": Timed(1.5, 1, 1)}
    plain, fixed, auto = time_steps(engines, [Request((1,), 9)], 2)  # type: ignore[arg-type]
    assert (plain["k"], plain["speedup"], plain["tokens_a_step"], plain["rows_a_token"]) == (0, 1.0, 1.0, 1.0)
    assert [fixed[name] for name in ("speedup", "cycle_cost", "tokens_a_step", "rows_a_token")] == [1, 2, 2, 2]
    assert (auto["k"], auto["step_ms"], auto["rows_a_token"]) == ("auto", 1500.0, 1.0)
    assert auto["speedup"] == pytest.approx(2 / 1.5)
