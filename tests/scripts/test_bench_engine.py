"""scripts.bench and its scenario `engine`."""

from pathlib import Path

import pytest

from peagle.base.errors import InputError
from scripts import bench
from scripts.scenarios import engine
from scripts.scenarios.engine import BEFORE, NOW, Case
from scripts.scenarios.engine_worker import Measured

ONE = Case("one", "tok_per_s", "one", {})
BOTH = Case("two at once", "tok_per_s", "many", {}, over="one")
WARM = Case("warm-up", "warm_up_s", "warm_up", {})


def line(case: str, side: str, number: int, **figures: float) -> dict[str, object]:
    return {"model": "demo", "case": case, "side": side, "round": number, **figures}


def test_figures_are_of_the_rounds_after_the_first_and_ratios_of_one_round() -> None:
    lines = [line("warm-up", side, 0, warm_up_s=seconds) for side, seconds in ((NOW, 2.0), (BEFORE, 4.0))]
    rounds = [(1.0, 1.0, 1.0), (10.0, 5.0, 15.0), (30.0, 10.0, 60.0), (20.0, 20.0, 20.0)]
    for number, (now, before, two) in enumerate(rounds):
        lines += [line("one", NOW, number, tok_per_s=now), line("one", BEFORE, number, tok_per_s=before)]
        lines += [line("two at once", NOW, number, tok_per_s=two)]
    one, both, warm = engine.rows(lines, [ONE, BOTH, WARM])
    assert one[NOW] == {"median": 20, "lowest": 10, "highest": 30}
    assert one["ratio"] == {"median": 2, "lowest": 1, "highest": 3}
    assert both["ratio"] == {"median": 1.5, "lowest": 1, "highest": 2}
    assert both[BEFORE] is None
    assert warm["ratio"]["median"] == 0.5


def test_without_another_checkout_figures_have_no_ratio() -> None:
    (row,) = engine.rows([line("one", NOW, number, tok_per_s=1.0) for number in range(2)], [ONE])
    assert (row[BEFORE], row["ratio"]) == (None, None)


def test_a_case_names_the_row_it_is_divided_by() -> None:
    names = {case.name for case in engine.cases(8000)}
    assert len(names) == len(list(engine.cases(8000)))
    assert all(case.over is None or case.over in names for case in engine.cases(8000))
    assert all(hasattr(Measured, case.call) for case in engine.cases(8000))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["unknown"], "unknown is no scenario; expected one of auto, engine, llama, memory, peers, serve, soak"),
        (["engine", "--out", "OUT", "--before", "nowhere", "demo"], "expected a checkout of this project"),
        (["engine", "--out", "OUT", "--rounds", "0", "demo"], "--rounds is 0; expected 1 or more"),
        (["engine", "--out", "OUT", "--only", "no such case", "demo"], "--only 'no such case' to begin a case's name"),
    ],
)
def test_bad_input_is_one_line(
    typed: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([str(tmp_path / "run") if word == "OUT" else word for word in typed]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_worker_measures_the_engine_of_this_checkout() -> None:
    measured = Measured("demo", "")
    assert measured.one(1, 0, 5, 4)["tok_per_s"] > 0
    assert set(measured.many(1, 0, 5, 4)) == {"tok_per_s", "last_first_token_s"}
    assert measured.memory(4, 150, 400, 50, None)["tok_per_s"] > 0
    assert measured.memory(4, 150, 400, 50, 0.5)["tok_per_s"] > 0
    with pytest.raises(InputError, match="raise --kv-memory"):
        measured.memory(1, 300, 400, 50, 0.1)


def test_arrivals_are_played_to_their_ends() -> None:
    """Every request gets its tokens after it is due, the long one too; the others' waits are between them."""
    worker = Measured("demo", "")
    engine = worker._engine(2, 0, 128)
    arrivals = [((4, 6), 0.02), ((3, 5), 0.0), ((60, 4), 0.01)]
    times, due = worker._play(engine, arrivals)
    assert all(arrived == sorted(arrived) and arrived[0] > start for arrived, start in zip(times, due, strict=True))
    assert not engine.busy
    figures = worker.arrivals(requests=4, slots=2, prompt=4, new=6, long=60, load=0.8)
    assert set(figures) == {"itl_p99_alone_s", "itl_p99_s", "ttft_s"}
    assert min(figures.values()) > 0


def test_without_a_scenario_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of the list is a scenario that has help."""
    assert bench.main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert listed == ["auto", "engine", "llama", "memory", "peers", "serve", "soak"]
    for name in listed:
        with pytest.raises(SystemExit) as ended:
            bench.main([name, "--help"])
        assert ended.value.code == 0
