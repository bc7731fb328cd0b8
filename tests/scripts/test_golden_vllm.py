"""Recording vLLM: the copy for it holds the target's own values, and any failure is one line.

A stand-in answers for vLLM here; tests/golden/test_vllm.py compares with what vLLM gave.
"""

import ast
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from peagle.base.checkpoint import read_checkpoint
from scripts.golden import vllm
from scripts.golden.vllm import COUNTS, Answer, Drafting
from scripts.peers import worker
from target.load import load_target

ANSWER = Answer((1, 2, 3, 4), (2,), dict(zip(COUNTS, (1, 3, 2, [0, 0, 1, 0]), strict=True)))
BLOCK = {**ANSWER.counts, "per_step_accepted": [2], "mean_acceptance_length": 3.0}
STARTS = """print('{"answer": {"version": "vLLM 0.0"}}', flush=True)\n"""
SAYS = json.dumps({"answer": {"token_ids": ANSWER.token_ids, "speculative_decoding": BLOCK}})
ANSWERS = f"{STARTS}for _ in sys.stdin:\n    print({SAYS!r}, flush=True)\n"


def test_the_copy_for_vllm_holds_the_targets_own_values(tmp_path: Path, checkpoint: Path) -> None:
    vllm.write_unquantised(checkpoint, tmp_path / "copy", np.float32)
    copy = read_checkpoint(tmp_path / "copy")
    assert {str(copy.dtype(name)) for name in copy.names} == {"float32"}
    ours, theirs = (load_target(path, experts="expanded") for path in (checkpoint, tmp_path / "copy"))
    assert (ours.config, ours.stop_token_ids) == (theirs.config, theirs.stop_token_ids)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_vllms_worker_imports_nothing_of_ours() -> None:
    """Its environment has none of our packages."""
    for name in ("worker.py", "vllm_engine.py"):
        tree = ast.parse((Path(worker.__file__).parent / name).read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names, "torch", "vllm"}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (ANSWERS, None),
        ("sys.stderr.write('starts\\nno room for caches\\n\\n')\nsys.exit(3)", "status 3 (no room for caches)"),
        ('print(\'{"error": "ValueError: no MXFP4"}\')', "vLLM: ValueError: no MXFP4"),
        (f"{STARTS}sys.exit(4)", "status 4 (it printed nothing)"),
        (None, "vLLM cannot run here: the Python that --vllm-python names has no vllm"),
    ],
    ids=["answers", "dies", "refuses", "dies while it decodes", "is not there"],
)
def test_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: str | None,
    said: str | None,
) -> None:
    """From the demo pair to the golden file, or one line; only vLLM is replaced, and no copy is written for it."""
    monkeypatch.setattr(vllm, "GOLDEN", tmp_path / "golden.jsonl")
    monkeypatch.setattr(vllm, "write_unquantised", lambda *_: None)
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport sys\nif sys.argv[1] == '-c':\n    sys.exit(0)\n{answers}")
    python.chmod(0o755)
    code = vllm.main(["--vllm-python", sys.executable if answers is None else str(python)])
    if said is not None:
        *_, line = capsys.readouterr().err.splitlines()
        assert code == 2
        assert line.startswith("golden.vllm: error: ")
        assert said in line
        assert not vllm.GOLDEN.exists()
        return
    about, kept = vllm.recorded()
    assert (code, about["recorded"]["vllm"]) == (0, "vLLM 0.0")
    assert str(tmp_path) not in about["recorded"]["command"]
    draftings = [Drafting(drafter, k) for drafter in vllm.DRAFTERS for k in vllm.KS]
    assert [drafting for drafting, _, _ in kept] == [own for own in draftings for _ in range(vllm.NUM_PROMPTS)]
    assert {answer.token_ids for _, _, answer in kept} == {ANSWER.token_ids}
    assert all(len(request.prompt_ids) > 10 for _, request, _ in kept)
