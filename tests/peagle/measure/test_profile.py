"""The breakdown of a step's time: every instant counts once, and operations map to their part."""

from pathlib import Path

import jax
import pytest

from peagle.base.errors import InputError
from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.host.engine import Engine
from peagle.engine.host.inspection import launching_alone
from peagle.engine.host.programs import trace_counts
from peagle.engine.request import Request
from peagle.engine.resolved import ResolvedConfig
from peagle.measure.profile import IN_PROGRAM, Span, breakdown, make_directory, operation_parts_of, profile
from tests.support.toys import decode, tiny_target

pytestmark = pytest.mark.compile

MS = 1_000_000.0


def spans(*times: tuple[float, float, str]) -> list[Span]:
    return [Span(start * MS, end * MS, part) for start, end, part in times]


def test_instants_are_shared_by_what_runs_in_them() -> None:
    """Two steps in 20 ms: two parts at once count half each, a gap inside the program is the runtime's.

    A gap outside of it is the host's; the time of other programs is left out.
    """
    steps = spans(
        (0, 12, IN_PROGRAM),  # the program, twice
        (14, 20, IN_PROGRAM),
        (0, 2, "draft"),
        (1, 5, "verify"),
        (3, 5, "verify"),  # on another thread
        (6, 8, "accept"),
        (8, 12, "rest"),
        (14, 20, "verify"),
    )
    parts = breakdown("DIR", 2, steps, spans((-5, -1, ""), (12.5, 13, ""), (21, 30, "")))
    assert parts.draft_ms == pytest.approx((1 + 0.5) / 2)
    assert parts.verify_ms == pytest.approx((0.5 + 3 + 6) / 2)
    assert parts.accept_ms == pytest.approx(2 / 2)
    assert parts.rest_ms == pytest.approx(4 / 2)
    assert parts.between_ms == pytest.approx(1 / 2)
    assert parts.host_ms == pytest.approx((2 - 0.5) / 2)
    assert parts.step_ms == pytest.approx((20 - 0.5) / 2)


def test_operations_find_the_innermost_part_they_are_named_by() -> None:
    program = """HloModule jit__steps_2, is_scheduled=true
      %fusion.1 = f32[2]{0} fusion(%a), kind=kLoop, metadata={op_name="jit(_steps)/while/body/draft/add" line=3}
      ROOT %b.2 = f32[2]{0} add(%a, %a), metadata={op_name="jit(_steps)/verify/accept/add"}
      %c = f32[2]{0} add(%a, %a), metadata={op_name="jit(_steps)/drafting/add"}
      %d = f32[2]{0} add(%a, %a)
    """
    assert operation_parts_of(program) == {
        "jit__steps_2/fusion.1": "draft",
        "jit__steps_2/b.2": "accept",
    }


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), pytest.param(SamplingParams(0.8, seed=1), marks=pytest.mark.slow)],
    ids=["greedy", "sampled"],
)
def test_a_run_is_traced_and_broken_down(tmp_path: Path, sampling: SamplingParams) -> None:
    engine = Engine(tiny_target(), NGram(), ResolvedConfig(2, context=64, steps_per_dispatch=2))
    requests = [Request((1, 2, 3), 20, sampling)]
    engine.warm_up(sampled=not sampling.greedy)
    (tokens,), (steps,) = decode(engine, requests)
    parts = profile(engine, requests, make_directory(tmp_path / "new" / "trace"))
    assert list((tmp_path / "new" / "trace").glob("**/*.xplane.pb"))
    assert parts.num_steps == len(steps)
    # which of them takes longer depends on the machine
    assert min(parts.draft_ms, parts.verify_ms, parts.accept_ms) > 0
    assert parts.step_ms == pytest.approx(sum(parts.parts.values()))
    profile(engine, requests, tmp_path / "new" / "trace", perfetto=False)  # beside the first
    assert decode(engine, requests)[0] == [tokens]


def test_steps_whose_operations_a_gpu_launches_alone_are_others_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(tiny_target(), NGram(), ResolvedConfig(2, context=64))
    requests = [Request((1, 2, 3), 8)]
    expected = decode(engine, requests)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        alone = launching_alone(engine.executor)
        anew = alone.__enter__()
    before = trace_counts()["steps"]
    assert anew
    assert decode(engine, requests) == expected
    assert trace_counts()["steps"] > before
    alone.__exit__(None, None, None)
    before = trace_counts()["steps"]
    with launching_alone(engine.executor) as anew:
        assert not anew
        assert decode(engine, requests) == expected
    assert trace_counts()["steps"] == before


def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be created"):
        make_directory(tmp_path / "file" / "trace")
