"""The comparison with vLLM: what differs is found and said, the copy for vLLM holds the target's own values, and
whatever goes wrong is one line. A stand-in answers for vLLM here; tests/golden/test_vllm.py has what vLLM gave."""

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
from peagle.engine.request import Request
from peagle.measure.pages import markdown
from peagle.ops.checkpoint import read_checkpoint
from peagle.workflows.random_checkpoint import geometry, random_tensors
from scripts import against_vllm
from scripts.against_vllm import Answer, Setting, compared, page, pooled
from scripts.peers import worker
from target.load import load_target, write_target

REQUESTS = [Request((5, 6, 7), 9), Request((8,), 9, index=1)]


def answer(token_ids: Sequence[int], accepted: Sequence[int], k: int = 3) -> Answer:
    histogram = [list(accepted).count(place) for place in range(k + 1)]
    counts = dict(zip(against_vllm.COUNTS, (len(accepted), k * len(accepted), sum(accepted), histogram), strict=True))
    return Answer(tuple(token_ids), tuple(accepted), counts)


def block(answer: Answer) -> dict[str, Any]:
    """The answer as vLLM's worker gives it."""
    steps = {**answer.counts, "per_step_accepted": list(answer.accepted), "mean_acceptance_length": 1.5}
    return {"token_ids": list(answer.token_ids), "speculative_decoding": steps}


ANSWERS = [answer(range(9), (3, 0, 2)), answer(range(4), (2,))]


def record(theirs: list[Answer]) -> dict[str, Any]:
    origin = {"command": "typed", "cpu": "a CPU", "num_threads": 2, "git": None, "time": "now"}
    origin |= {"device": {"platform": "cpu"}, "packages": {"jaxlib": "1"}}
    config = {"target": "demo", "prompts": "p.jsonl", "num_prompts": 2, "max_new_tokens": 9}
    rows = [compared(Setting("/somewhere/drafter", 3), REQUESTS, ANSWERS, theirs)]
    return {"provenance": origin, "config": config, "vllm": "vLLM 0", "kernels": "native", "rows": rows}


def test_counts_of_all_requests_add_up() -> None:
    assert pooled(ANSWERS) == {
        "num_spec_steps": 4,
        "num_draft_tokens": 12,
        "num_accepted_draft_tokens": 7,
        "acceptance_length": 1 + 7 / 4,
        "accepted_per_position": [3, 3, 1],
    }
    assert pooled([answer((1,), ())])["acceptance_length"] is None


def test_what_is_equal_is_said_once() -> None:
    text = markdown(page(record(ANSWERS)))
    assert text.startswith("# The same drafts accepted as by vLLM\n")
    assert "| drafter, K = 3 | 2 | 2 | 2 | vLLM | 4 | 12 | 7 | 2.750 | 3, 3, 1 |" in text
    assert "Nothing differs." in text


@pytest.mark.parametrize(
    ("other", "tokens", "counts", "said"),
    [
        (answer((0, 1, 2, 9), (2,)), 1, 2, "first token that differs is 3 (from 0)"),
        (answer(range(3), (2,)), 1, 2, "first token that differs is 3 (from 0)"),
        (answer(range(4), (1, 1)), 2, 1, "first step that differs is 0 (from 0)"),
        (answer(range(4), (2, 0)), 2, 1, "first step that differs is 1 (from 0)"),
        # vLLM drafted less in a step, and as much of it was accepted
        (
            Answer(ANSWERS[1].token_ids, ANSWERS[1].accepted, {**ANSWERS[1].counts, "num_draft_tokens": 2}),
            *(2, 1, "other counts, with the same drafts accepted in every step"),
        ),
    ],
    ids=["token", "end", "step", "another step", "a count"],
)
def test_what_differs_is_said_with_its_place(other: Answer, tokens: int, counts: int, said: str) -> None:
    apart = record([ANSWERS[0], other])
    (row,) = apart["rows"]
    assert (row["tokens_equal"], row["counts_equal"]) == (tokens, counts)
    text = markdown(page(apart))
    assert text.startswith("# Where vLLM accepts other drafts\n")
    assert f"- drafter, K = 3, request 1: {said}" in text
    assert "Nothing differs." not in text


def test_the_copy_for_vllm_holds_the_targets_own_values(tmp_path: Path) -> None:
    small = geometry(
        hidden=96, layers=2, heads=(6, 2), head_dim=16, vocab=89, experts=(5, 2), expert_width=64, window=24
    )
    write_target(tmp_path / "target", small, random_tensors(small, True, seed=1), mxfp4=True, stop_token_ids=(3, 5))
    against_vllm.write_float32_copy(tmp_path / "target", tmp_path / "copy")
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
        assert {each.partition(".")[0] for each in imported} <= {*sys.stdlib_module_names, "torch", "vllm"}


LOAD = functools.cache(peagle.load)
STARTS = """print('{"answer": {"version": "vLLM 0.0"}}', flush=True)\n"""


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the demo once for all commands, and write no copy for a vLLM that is none."""
    monkeypatch.setattr(peagle, "load", LOAD)
    monkeypatch.setattr(against_vllm, "write_float32_copy", lambda *_: None)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def stand_in(folder: Path, answers: str) -> Path:
    """Make a Python that has vLLM, by what it says, and then answers for it."""
    return program(folder / "python", f"import sys\nif sys.argv[1] == '-c':\n    sys.exit(0)\n{answers}")


def command(*options: object) -> int:
    return against_vllm.main([*map(str, options), "--num-prompts", "2", "-n", "9", "-k", "3", "--drafters", "demo"])


@pytest.mark.usefixtures("prepared")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From the demo pair to the page and the golden file; only what decodes is replaced."""
    lines = [json.dumps({"answer": block(each)}) for each in ANSWERS]
    answers = f"{STARTS}for _, line in zip(sys.stdin, {lines}):\n    print(line, flush=True)\n"
    python = stand_in(tmp_path / "env", answers)
    decoded = [ANSWERS, ANSWERS[::-1]]
    monkeypatch.setattr(against_vllm, "ours", lambda *_: decoded.pop(0))
    monkeypatch.setattr(against_vllm, "GOLDEN", tmp_path / "golden.jsonl")
    assert command("--out", tmp_path / "run", "--vllm-python", python) == 0
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["rows"][0]["differences"] == []
    assert run["vllm"] == "vLLM 0.0"
    assert str(tmp_path) not in run["provenance"]["command"]
    assert (tmp_path / "run" / "README.md").read_text() == markdown(page(run))

    assert command("--out", tmp_path / "other", "--vllm-python", python) == 1

    assert command("--record", "--vllm-python", python) == 0
    about, kept = against_vllm.recorded()
    assert about["recorded"]["vllm"] == "vLLM 0.0"
    assert [(setting, each) for setting, _, each in kept] == [(Setting("demo", 3), each) for each in ANSWERS]
    assert len(kept[1][1].prompt_ids) > 10

    capsys.readouterr()
    assert command("--out", tmp_path / "run", "--vllm-python", python) == 2
    assert "exists; expected a new folder" in capsys.readouterr().err


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
    given = ["--out", str(tmp_path / "run"), "--vllm-python", str(python), *options]
    assert against_vllm.main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("against_vllm: error: ")
    assert said in line
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("sys.stderr.write('starts\\nno room for caches\\n\\n')\nsys.exit(3)", "status 3 (no room for caches)"),
        ('print(\'{"error": "ValueError: no MXFP4"}\')', "vLLM: ValueError: no MXFP4"),
        (f"{STARTS}sys.exit(4)", "status 4 (nothing printed)"),
    ],
    ids=["dies", "refuses", "dies while it decodes"],
)
def test_a_vllm_that_does_not_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: str, said: str
) -> None:
    assert command("--out", tmp_path / "run", "--vllm-python", stand_in(tmp_path / "env", answers)) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("against_vllm: error: vLLM: ")
    assert said in line
    assert not (tmp_path / "run").exists()
