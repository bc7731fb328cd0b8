"""Recording vLLM: the copy for it holds the target's own values, and any failure is one line.

A stand-in answers for vLLM here; tests/golden/test_vllm.py compares with what vLLM gave.
"""

import ast
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import peagle
from peagle.base.checkpoint import read_checkpoint
from peagle.workflows.random_checkpoint import geometry, random_tensors
from scripts.golden import vllm
from scripts.golden.vllm import Answer, Drafting
from scripts.peers import worker
from target.load import load_target, write_target


def answer(token_ids: Sequence[int], accepted: Sequence[int], k: int = 3) -> Answer:
    histogram = [list(accepted).count(place) for place in range(k + 1)]
    counts = dict(zip(vllm.COUNTS, (len(accepted), k * len(accepted), sum(accepted), histogram), strict=True))
    return Answer(tuple(token_ids), tuple(accepted), counts)


def block(answer: Answer) -> dict[str, Any]:
    """The answer as vLLM's worker gives it."""
    steps = {**answer.counts, "per_step_accepted": list(answer.accepted), "mean_acceptance_length": 1.5}
    return {"token_ids": list(answer.token_ids), "speculative_decoding": steps}


ANSWERS = [answer(range(9), (3, 0, 2)), answer(range(4), (2,))]


def test_the_copy_for_vllm_holds_the_targets_own_values(tmp_path: Path) -> None:
    small = geometry(
        hidden=96, layers=2, heads=(6, 2), head_dim=16, vocab=89, experts=(5, 2), expert_width=64, window=24
    )
    write_target(tmp_path / "target", small, random_tensors(small, True, seed=1), mxfp4=True, stop_token_ids=(3, 5))
    vllm.write_unquantised(tmp_path / "target", tmp_path / "copy", np.float32)
    copy = read_checkpoint(tmp_path / "copy")
    assert {str(copy.dtype(name)) for name in copy.names} == {"float32"}
    ours, theirs = (load_target(tmp_path / name, experts="expanded") for name in ("target", "copy"))
    assert (ours.config, ours.stop_token_ids) == (theirs.config, theirs.stop_token_ids)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_vllms_worker_imports_nothing_of_ours() -> None:
    """Its environment has none of our packages."""
    for name in ("worker.py", "vllm_engine.py"):
        tree = ast.parse((Path(worker.__file__).parent / name).read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names, "torch", "vllm"}


LOAD = functools.cache(peagle.load)
STARTS = """print('{"answer": {"version": "vLLM 0.0"}}', flush=True)\n"""


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Load the demo once for all commands; write no copy for the stand-in, and another golden file."""
    monkeypatch.setattr(peagle, "load", LOAD)
    monkeypatch.setattr(vllm, "GOLDEN", tmp_path / "golden.jsonl")
    monkeypatch.setattr(vllm, "write_unquantised", lambda *_: None)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def stand_in(folder: Path, answers: str) -> Path:
    """Make a Python that has vLLM, by what it says, and then answers for it."""
    return program(folder / "python", f"import sys\nif sys.argv[1] == '-c':\n    sys.exit(0)\n{answers}")


def command(*options: object) -> int:
    return vllm.main([*map(str, options), "--num-prompts", "2", "-n", "9", "-k", "3", "--drafters", "demo"])


@pytest.mark.usefixtures("prepared")
def test_the_command(tmp_path: Path) -> None:
    """From the demo pair to the golden file; only vLLM is replaced."""
    lines = [json.dumps({"answer": block(answer)}) for answer in ANSWERS]
    python = stand_in(
        tmp_path / "env", f"{STARTS}for _, line in zip(sys.stdin, {lines}):\n    print(line, flush=True)\n"
    )
    assert command("--vllm-python", python) == 0
    about, kept = vllm.recorded()
    assert about["recorded"]["vllm"] == "vLLM 0.0"
    assert str(tmp_path) not in about["recorded"]["command"]
    assert [(drafting, answer) for drafting, _, answer in kept] == [(Drafting("demo", 3), answer) for answer in ANSWERS]
    assert len(kept[1][1].prompt_ids) > 10


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0; expected 1 or more"),
        (["-k", "3,x"], "-k is '3,x'; expected numbers with commas between"),
        (["-k", "0"], "-k is '0'; expected numbers of 1 or more"),
        (["--drafters", "ngram"], "--drafters names ngram, which has no weights"),
        (["--drafters", "nowhere"], "nowhere does not exist"),
        (["--target", "nowhere"], "nowhere does not exist"),
        (["--vllm-python", "/no/such/python"], "vLLM cannot run here: there is no such program as --vllm-python names"),
        (["--vllm-python", sys.executable], "vLLM cannot run here: the Python that --vllm-python names has no vllm"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    python = stand_in(tmp_path / "env", STARTS)
    assert vllm.main(["--vllm-python", str(python), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("golden.vllm: error: ")
    assert said in line
    assert not vllm.GOLDEN.exists()


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("sys.stderr.write('starts\\nno room for caches\\n\\n')\nsys.exit(3)", "status 3 (no room for caches)"),
        ('print(\'{"error": "ValueError: no MXFP4"}\')', "vLLM: ValueError: no MXFP4"),
        (f"{STARTS}sys.exit(4)", "status 4 (it printed nothing)"),
    ],
    ids=["dies", "refuses", "dies while it decodes"],
)
def test_a_vllm_that_does_not_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: str, said: str
) -> None:
    assert command("--vllm-python", stand_in(tmp_path / "env", answers)) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("golden.vllm: error: vLLM: ")
    assert said in line
    assert not vllm.GOLDEN.exists()
