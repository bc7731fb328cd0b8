"""scripts.bench: every scenario has help, refuses bad options in a line, and takes ratios within a round."""

import json
from pathlib import Path
from typing import Any

import pytest

from peagle.base.errors import InputError
from peagle.workflows.random_checkpoint import write_random_checkpoint
from scripts import bench
from scripts.scenarios import engine, experts
from scripts.scenarios.engine import BEFORE, NOW
from tests.scripts.conftest import GEOMETRY

SCENARIOS = ["auto", "engine", "experts", "peers", "serve", "soak"]


def test_without_a_scenario_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_has_help(name: str) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main([name, "--help"])
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("bench") / "small"
    write_random_checkpoint(directory, GEOMETRY)
    return directory


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("unknown", f"unknown is no scenario; expected one of {', '.join(SCENARIOS)}"),
        ("auto huge", "huge is no size; expected some of tiny, S"),
        ("auto S --rates 1.5", "--rates is '1.5'; expected numbers from 0.01 to 0.99"),
        ("auto S --temperatures -1", "--temperatures is '-1'; expected numbers from 0 to 2"),
        ("auto S -k 0", "-k is '0'; expected numbers of 1 or more"),
        ("auto S --requests a", "--requests is 'a'; expected numbers with commas between"),
        ("engine --before nowhere demo", "expected a checkout of this project"),
        ("engine --before . --rounds 0 demo", "--rounds is 0; expected 1 or more"),
        ("experts huge", "huge is no size; expected some of tiny, S"),
        ("experts S --rows 0,1", "--rows is '0,1'; expected numbers of 1 or more"),
        ("peers {checkpoint} --engines unheard-of", "--engines names 'unheard-of'"),
        ("peers {checkpoint} --engines vllm", "vllm cannot run here: no --vllm-python was given"),
        ("peers {checkpoint} --engines vllm --vllm-python /no/such", "there is no such program as --vllm-python names"),
        ("peers {checkpoint} --engines llama.cpp", "llama.cpp cannot run here: no --llama-cpp was given"),
        ("peers demo --llama-cpp nowhere", "has no driver; expected a folder built as --help says"),
        ("peers {checkpoint} --drafters medusa", "--drafters names 'medusa'"),
        ("peers {checkpoint} --drafters p-eagle", "has 3 layers; expected 4 or more"),
        ("peers {checkpoint} --requests 0,4", "expected numbers of 1 or more"),
        ("peers {checkpoint} -n 1", "--new-tokens is 1; expected 2 or more"),
        ("peers {checkpoint} --prompt-tokens 131072", "has 131072 positions"),
        ("peers {checkpoint} {checkpoint}", "two checkpoints have the same name"),
        ("peers nowhere", "does not exist; expected a directory with config.json"),
        ("peers {checkpoint} --out {checkpoint}", "expected a new folder"),
        ("serve --rounds 0", "--rounds is 0"),
        ("serve --tokens-out 1", "--tokens-out is 1; expected 2 or more"),
        ("serve --clients 0", "--clients is '0'"),
        ("serve --peer no-such-folder", "--peer no-such-folder has no build/bin/llama-server"),
        ("serve -k x", "-k is 'x'"),
        ("serve --tokens-out 10000000", "positions; expected"),
        ("soak --minutes 0", "--minutes is 0.0; expected a number above 0"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path, typed: str, says: str
) -> None:
    words = [word.format(checkpoint=checkpoint) for word in typed.split()]
    assert bench.main([words[0], "--out", str(tmp_path / "run"), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_forms_of_experts_are_timed_until_they_take_too_long(tmp_path: Path) -> None:
    typed = f"experts --out {tmp_path / 'run'} tiny --rows 1,4 --rounds 1 --most-ms 1".split()
    assert bench.main(typed) == 0
    one, four = json.loads((tmp_path / "run" / "run.json").read_text())["rows"]
    assert {f"{name}_ms" for name in experts.FORMS} <= one.keys()
    assert all(one[name]["median"] <= 1 for name in four if name.endswith("_ms"))


def test_a_bench_that_is_killed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "peagle").mkdir()
    (tmp_path / "peagle" / "__init__.py").touch()
    (tmp_path / "peagle" / "__main__.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(InputError, match=f"peagle bench in {tmp_path.name}: it ended with status -9"):
        list(engine.bench(tmp_path, "demo", ""))


def test_two_checkouts_are_compared_within_a_round() -> None:
    def line(side: str, number: int, milliseconds: float) -> dict[str, Any]:
        test = {"kind": "pp", "size": 512, "context": 0, "slots": 1, "num_speculative_tokens": 0}
        return {"model": "demo", **test, "side": side, "round": number, "ms_per_pass": milliseconds}

    lines = [line(NOW, number, drift) for number, drift in enumerate((10.0, 30.0, 20.0), 1)]
    lines += [line(BEFORE, number, 2 * drift) for number, drift in enumerate((10.0, 30.0, 20.0), 1)]
    (row,) = engine.rows(lines)
    assert row["now_ms"] == {"median": 20, "lowest": 10, "highest": 30}
    assert row["speedup"] == {"median": 2, "lowest": 2, "highest": 2}
