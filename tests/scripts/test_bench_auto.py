"""scripts.bench and its scenario `auto`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle.engine.request import Request, StepRecord, TokenChunk
from scripts import bench
from scripts.steps import time_steps


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
    assert (fixed["speedup"], fixed["cycle_cost"], fixed["tokens_a_step"], fixed["rows_a_token"]) == (
        1.0,
        2.0,
        2.0,
        2.0,
    )
    assert (auto["k"], auto["step_ms"], auto["rows_a_token"]) == ("auto", 1500.0, 1.0)
    assert auto["speedup"] == pytest.approx(2 / 1.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["huge"], "huge is no size; expected some of tiny, S"),
        (["S", "--rates", "1.5"], "expected --rates between 0 and 1"),
        (["S", "-k", "0"], "-k is '0'; expected numbers of 1 or more"),
        (["S", "--requests", "a"], "--requests is 'a'; expected numbers with commas between"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert bench.main(["auto", "--out", str(tmp_path / "run"), *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
